"""MLA decode: ours, vLLM's Triton kernel, FlashInfer's, FlashMLA, and what the machine allows.

vLLM's kernel is measured with several numbers of splits. Its rows are the fastest of them, and the
number that vLLM itself would choose for these lengths (``splits``); ``sweep`` holds all of them.

Run: ``python benchmarks/mla_decode.py`` on a machine with a CUDA device. ``STALEPROOF_FLASHMLA_SO`` names
the compiled ``_flashmla_C`` library of a vLLM wheel; without it, and without an installed vLLM, that peer is
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from staleproof import device

device.select()

from staleproof.harness import measure
from staleproof.harness.peer import Peer
from staleproof.harness.peers import peers
from staleproof.harness.vllm_peers import flashmla, vllm_splits
from staleproof.ops.mla_decode import mla_decode
from staleproof.ops.reference import mla_decode as reference

BATCHES = (128, 16, 1)
TOKENS = (512, 4096)
HEADS, PAGE, RANK, ROPE = 128, 64, 512, 64
SCALE = (128 + 64) ** -0.5
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Prepare = Callable[..., Callable[[], Any]]


def make_inputs(batch: int, tokens: int) -> Inputs:
    """Random q and cache, a shuffled block table, all requests ``tokens`` long."""
    pages = tokens // PAGE
    q = torch.randn(batch, HEADS, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
    kv_cache = torch.randn(batch * pages, PAGE, RANK + ROPE, device="cuda", dtype=torch.bfloat16)
    block_table = torch.randperm(batch * pages, device="cuda").int().reshape(batch, pages)
    seq_lens = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
    return q, kv_cache, block_table, seq_lens


def rates() -> tuple[float, float]:
    """(bytes/us of a memset of 1 GiB, FLOP/us of a bf16 product of 8192 cubed), measured now."""
    target = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    memset = measure.graph_times([lambda: measure.memset_async(target)], launches=4)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = measure.graph_times([lambda: a @ b], launches=4, replays=10)
    return target.numel() / memset.p50, 2 * 8192**3 / product.p50


def splits_to_try(batch: int, tokens: int) -> list[int]:
    """1 to 64 for a single request, whose keys are all the parallelism there is; otherwise 1 to 8.

    vLLM's own choice is among them. A part has at least 16 keys.
    """
    own = vllm_splits(tokens, torch.cuda.get_device_properties(0).multi_processor_count)
    tried = (1, 2, 4, 8, 16, 32, 64) if batch == 1 else (1, 2, 4, 8)
    return sorted({own, *(n for n in tried if n * 16 <= tokens)})


class Case:
    """One batch and length: its inputs, and the rows measured with them."""

    def __init__(self, batch: int, tokens: int) -> None:
        self.batch, self.tokens = batch, tokens
        self.mode = f"bf16 batch {batch} heads {HEADS} page {PAGE}"
        kv_bytes = batch * tokens * (RANK + ROPE) * 2
        self.io_bytes = kv_bytes + batch * HEADS * (RANK + ROPE + RANK) * 2
        self.turns = measure.rotation(kv_bytes)
        self.sets = [make_inputs(batch, tokens) for _ in range(self.turns.sets)]
        self.want, _ = reference.mla_decode(*self.sets[0], softmax_scale=SCALE)

    def row(self, provider: str, times: measure.Times, cache: str) -> dict[str, Any]:
        return measure.row(
            *("mla_padding", "mla_decode", provider, self.mode, "tokens", self.tokens),
            times,
            self.io_bytes,
            cache=cache,
        )

    def times(self, provider: str, prepare: Prepare) -> dict[str, measure.Times]:
        """Warm and cold times, or none if a peer's result is wrong."""
        outs = [torch.full_like(self.want, torch.nan) for _ in self.sets]
        calls = [prepare(*s, out) for s, out in zip(self.sets, outs, strict=True)]
        calls[0]()
        error = ((outs[0].float() - self.want.float()).norm() / self.want.float().norm()).item()
        why = f"relative error {error:.1e}, batch {self.batch}, {self.tokens} tokens"
        if not measure.checked(provider, error < 1e-2, why):
            return {}
        return dict(measure.cached_times(calls, self.turns))

    def rows(self, provider: str, prepare: Prepare) -> Iterator[dict[str, Any]]:
        for cache, times in self.times(provider, prepare).items():
            yield self.row(provider, times, cache)

    def vllm_rows(self, peer: Peer) -> Iterator[dict[str, Any]]:
        """The fastest number of splits, and vLLM's own choice."""
        swept = {}
        for splits in splits_to_try(self.batch, self.tokens):
            found = self.times(f"{peer.name}, {splits} splits", _of_peer(peer, splits))
            if found:
                swept[splits] = found
        own = vllm_splits(self.tokens, torch.cuda.get_device_properties(0).multi_processor_count)
        for cache in self.turns.caches if swept else ():
            p50 = {splits: round(times[cache].p50, 3) for splits, times in swept.items()}
            best = min(p50, key=lambda splits: p50[splits])
            for name, splits in (("best splits", best), ("its own splits", own)):
                if splits in swept:
                    yield self.row(f"{peer.name}, {name}", swept[splits][cache], cache) | {
                        "splits": splits,
                        "sweep": {str(n): us for n, us in p50.items()},
                    }

    def limits(self, memory_rate: float, matmul_rate: float) -> Iterator[dict[str, Any]]:
        flops = 2 * self.batch * self.tokens * HEADS * (RANK + ROPE + RANK)
        for name, floor in (
            ("limit: bytes at the memset rate", self.io_bytes / memory_rate),
            ("limit: FLOP at the matmul rate", flops / matmul_rate),
        ):
            yield self.row(name, measure.Times(p50=floor, p20=floor, p80=floor), measure.COLD)


def _ours(q: Any, kv: Any, table: Any, lens: Any, out: Any) -> Callable[[], Any]:
    lse = torch.empty(q.shape[:-1], device=q.device)
    return lambda: mla_decode(q, kv, table, lens, softmax_scale=SCALE, out=out, lse=lse)


def _of_peer(peer: Peer, splits: int | None) -> Prepare:
    return lambda q, kv, table, lens, out: peer.prepare(q, kv, table, lens, SCALE, splits, out)


def rows() -> list[dict[str, Any]]:
    """Measure every case.

    Raises:
        DeviceError: no GPU.
        WrongResult: ours is wrong.
    """
    measure.require_gpu()
    known = peers() | {"flashmla": flashmla()}
    for peer in known.values():
        if peer.unavailable_reason is not None:
            print(f"{peer.name}: not run, {peer.unavailable_reason}")
    usable = {key: peer for key, peer in known.items() if peer.unavailable_reason is None}
    limits = rates()
    found: list[dict[str, Any]] = []
    for batch in BATCHES:
        for tokens in TOKENS:
            case = Case(batch, tokens)
            found += case.rows("staleproof", _ours)
            for key, peer in usable.items():
                if key == "vllm_triton":
                    found += case.vllm_rows(peer)
                elif key.startswith("flash"):
                    found += case.rows(peer.name, _of_peer(peer, None))
            found += case.limits(*limits)
    return found


if __name__ == "__main__":
    measure.print_rows(rows(), baseline="staleproof")
