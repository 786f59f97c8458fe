"""MLA decode: ours, vLLM's Triton kernel, FlashInfer's, FlashMLA, and what the machine allows.

vLLM's kernel is measured with several numbers of splits. Its rows are the fastest of them, and the
number that vLLM itself would choose for these lengths (``splits``); ``sweep`` holds all of them.

Run: ``python benchmarks/mla_decode.py`` on a machine with a CUDA device. ``STALEPROOF_FLASHMLA_SO`` names
the compiled ``_flashmla_C`` library of a vLLM wheel; without it, and without an installed vLLM, that peer is
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from staleproof import device

device.select()

from staleproof.cases import measure
from staleproof.kernels.adapter import Peer
from staleproof.kernels.mla import peers
from staleproof.kernels.vllm import flashmla, vllm_splits
from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.reference import mla_decode as reference

PAGE, RANK, ROPE = 64, 512, 64
SCALE = (128 + 64) ** -0.5
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Prepare = Callable[..., Callable[[], Any]]


@dataclass(frozen=True)
class Shape:
    """One decode batch.

    Attributes:
        batch: requests.
        tokens: length of each.
        heads: of the model on this GPU; 16 are what 128 heads leave on one of eight.
        q_len: query tokens a request; more than one with speculative decoding.
        longest: length of one request in 32 instead, if not 0.
        dtype: of the queries and the result.
        cache: dtype of the cache.
    """

    batch: int
    tokens: int
    heads: int = 128
    q_len: int = 1
    longest: int = 0
    dtype: torch.dtype = torch.bfloat16
    cache: torch.dtype = torch.bfloat16

    def lengths(self) -> list[int]:
        """Tokens of each request.

        >>> Shape(3, 1024, longest=4096).lengths()
        [4096, 1024, 1024]
        """
        every = range(self.batch)
        return [self.longest if self.longest and i % 32 == 0 else self.tokens for i in every]

    def mode(self) -> str:
        """The shape in words, without the tokens.

        >>> Shape(128, 1024, 16, longest=32768).mode()
        'bf16 batch 128 heads 16 page 64, one in 32 of 32768 tokens'
        >>> Shape(16, 512, cache=torch.float8_e4m3fn).mode()
        'bf16 batch 16 heads 128 page 64, fp8 cache'
        """
        more = f", q_len {self.q_len}" if self.q_len > 1 else ""
        more += f", one in 32 of {self.longest} tokens" if self.longest else ""
        more += ", fp8 cache" if self.cache == torch.float8_e4m3fn else ""
        name = "fp16" if self.dtype == torch.float16 else "bf16"
        return f"{name} batch {self.batch} heads {self.heads} page {PAGE}{more}"


SHAPES = (
    *(Shape(batch, tokens) for batch in (128, 16, 1) for tokens in (512, 4096)),
    *(Shape(4, 4096), Shape(1, 32768)),
    *(Shape(128, 4096, heads=16), Shape(16, 32768, heads=16)),
    *(Shape(128, 1024, longest=32768), Shape(128, 1024, heads=16, longest=32768)),
    *(Shape(128, 4096, q_len=2), Shape(128, 4096, q_len=4)),
    Shape(128, 4096, dtype=torch.float16, cache=torch.float16),
    *(Shape(128, 4096, heads, cache=torch.float8_e4m3fn) for heads in (128, 16)),
)
# A peer for an E4M3 cache rounds the queries and the weights to E4M3 as well.
LARGEST_ERROR, LARGEST_ERROR_E4M3 = 1e-2, 6e-2


def make_inputs(shape: Shape) -> Inputs:
    """Random q and cache, and a shuffled block table; unused entries of it are page 0.

    Beside an E4M3 cache the queries are E4M3 numbers, so that no kernel has to round them.
    """
    lengths = shape.lengths()
    counts = [-(-length // PAGE) for length in lengths]
    q_shape = (shape.batch, *([shape.q_len] if shape.q_len > 1 else []), shape.heads, RANK + ROPE)
    q = torch.randn(q_shape, device="cuda", dtype=shape.dtype)
    if shape.cache == torch.float8_e4m3fn:
        q = q.to(shape.cache).to(shape.dtype)
    kv_cache = torch.randn(sum(counts), PAGE, RANK + ROPE, device="cuda", dtype=shape.dtype).to(shape.cache)
    pages = torch.randperm(sum(counts), device="cuda").int().split(counts)
    block_table = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True)
    return q, kv_cache, block_table, torch.tensor(lengths, dtype=torch.int32, device="cuda")


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
    """One shape: its inputs, and the rows measured with them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.keys = sum(shape.lengths())
        kv_bytes = self.keys * (RANK + ROPE) * shape.cache.itemsize
        rows = shape.batch * shape.q_len * shape.heads
        self.io_bytes = kv_bytes + rows * (RANK + ROPE + RANK) * 2
        self.turns = measure.rotation(kv_bytes)
        self.sets = [make_inputs(shape) for _ in range(self.turns.sets)]
        self.want, _ = reference.mla_decode(*self.sets[0], softmax_scale=SCALE)

    def row(self, provider: str, times: measure.Times, cache: str) -> dict[str, Any]:
        return measure.row(
            *("mla_padding", "mla_decode", provider, self.shape.mode(), "tokens", self.shape.tokens),
            times,
            self.io_bytes,
            cache=cache,
        )

    def times(self, provider: str, prepare: Prepare) -> dict[str, measure.Times]:
        """Warm and cold times, or none if a peer refuses the shape or its result is wrong."""
        outs = [torch.full_like(self.want, torch.nan) for _ in self.sets]
        try:
            calls = [prepare(*s, out) for s, out in zip(self.sets, outs, strict=True)]
            calls[0]()
        except (RuntimeError, OSError) as error:
            if provider == "staleproof":
                raise
            why = str(error).strip().splitlines()[0]
            print(f"{provider}: not run, {self.shape.mode()}, {self.shape.tokens} tokens: {why}")
            return {}
        error = ((outs[0].float() - self.want.float()).norm() / self.want.float().norm()).item()
        why = f"relative error {error:.1e}, {self.shape.mode()}, {self.shape.tokens} tokens"
        is_rounded = self.shape.cache == torch.float8_e4m3fn and provider != "staleproof"
        if not measure.checked(provider, error < (LARGEST_ERROR_E4M3 if is_rounded else LARGEST_ERROR), why):
            return {}
        return dict(measure.cached_times(calls, self.turns))

    def rows(self, provider: str, prepare: Prepare) -> Iterator[dict[str, Any]]:
        for cache, times in self.times(provider, prepare).items():
            yield self.row(provider, times, cache)

    def vllm_rows(self, peer: Peer) -> Iterator[dict[str, Any]]:
        """The fastest number of splits, and vLLM's own choice."""
        swept = {}
        longest = max(self.shape.lengths())
        for splits in splits_to_try(self.shape.batch, longest):
            found = self.times(f"{peer.name}, {splits} splits", _of_peer(peer, splits))
            if found:
                swept[splits] = found
        own = vllm_splits(longest, torch.cuda.get_device_properties(0).multi_processor_count)
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
        flops = 2 * self.keys * self.shape.q_len * self.shape.heads * (RANK + ROPE + RANK)
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
    for shape in SHAPES:
        case = Case(shape)
        found += case.rows("staleproof", _ours)
        for key, peer in usable.items():
            if key == "vllm_triton" and shape.q_len == 1:
                found += case.vllm_rows(peer)
            elif key.startswith("flash"):
                found += case.rows(peer.name, _of_peer(peer, None))
        found += case.limits(*limits)
    return found


if __name__ == "__main__":
    measure.print_rows(rows(), baseline="staleproof")
