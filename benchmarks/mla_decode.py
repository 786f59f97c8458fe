"""MLA decode: ours, vLLM's Triton kernel, FlashInfer's, FlashMLA, and what the machine allows.

vLLM's kernel is measured with several numbers of splits. Its rows are the fastest of them, and the
number that vLLM itself would choose for these lengths (``splits``); ``sweep`` holds all of them.

Besides the shapes of the table, cells that are drawn from a grid are measured beside FlashInfer and FlashMLA.

Run: ``python benchmarks/mla_decode.py`` on a machine with a CUDA device. ``STALEPROOF_FLASHMLA_SO`` names
the compiled ``_flashmla_C`` library of a vLLM wheel; without it, and without an installed vLLM, that peer is
left out.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from staleproof import device

device.select()

from staleproof import measure
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
        mix: ``"half"``: every second request has an eighth of the tokens; ``"ramp"``: lengths from a
            sixteenth of the tokens up to all of them.
        dtype: of the queries and the result.
        cache: dtype of the cache.
    """

    batch: int
    tokens: int
    heads: int = 128
    q_len: int = 1
    longest: int = 0
    mix: str = ""
    dtype: torch.dtype = torch.bfloat16
    cache: torch.dtype = torch.bfloat16

    def lengths(self) -> list[int]:
        """Tokens of each request.

        >>> Shape(3, 1024, longest=4096).lengths()
        [4096, 1024, 1024]
        >>> Shape(3, 1024, mix="half").lengths(), Shape(3, 1024, mix="ramp").lengths()
        ([1024, 128, 1024], [64, 544, 1024])
        """
        every = range(self.batch)
        if self.mix == "half":
            return [self.tokens // 8 if i % 2 else self.tokens for i in every]
        if self.mix == "ramp":
            least = self.tokens // 16
            return [least + (self.tokens - least) * i // max(1, self.batch - 1) for i in every]
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
        more += f", lengths: {self.mix}" if self.mix else ""
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
# Cells drawn from a grid besides (STALEPROOF_MLA_CELLS: another number): half of them by this seed,
# half by the one in STALEPROOF_MLA_SEED, so that they were not there when the kernels were tuned.
CELLS, SEEN = 24, 0
# Tokens of a batch at most: what the float64 reference takes a second for.
MOST_KEYS = 2**19
# A peer for an E4M3 cache rounds the queries and the weights to E4M3 as well.
LARGEST_ERROR, LARGEST_ERROR_E4M3 = 1e-2, 6e-2


def drawn(count: int, seed: int) -> list[Shape]:
    """Cells of a grid: batch 1 to 256, 128 to 32,768 tokens, 16 to 128 heads, uniform or one of three mixes.

    Batch and tokens are drawn evenly by their logarithms. Batches of more than :data:`MOST_KEYS` tokens are
    drawn again.

    >>> [one.mode() for one in drawn(2, 0)] == [one.mode() for one in drawn(2, 0)]
    True
    """
    draw = random.Random(seed)
    shapes: list[Shape] = []
    while len(shapes) < count:
        batch, tokens = round(2 ** draw.uniform(0, 8)), round(2 ** draw.uniform(7, 15))
        heads, q_len = draw.choice((16, 32, 64, 128)), draw.choice((1, 2, 4))
        mix = draw.choice(("", "longest", "half", "ramp"))
        longest = min(8 * tokens, 2**15) if mix == "longest" else 0
        shape = Shape(batch, tokens, heads, q_len, longest, mix.replace("longest", ""))
        if sum(shape.lengths()) <= MOST_KEYS:
            shapes.append(shape)
    return shapes


def cells() -> Iterator[tuple[Shape, int]]:
    """The drawn cells, each with the seed that it was drawn by."""
    count = int(os.environ.get("STALEPROOF_MLA_CELLS", CELLS))
    other = int(os.environ.get("STALEPROOF_MLA_SEED", SEEN + 1))
    for seed, some in ((SEEN, count - count // 2), (other, count // 2)):
        yield from ((shape, seed) for shape in drawn(some, seed))


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
    """One shape and its inputs."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.keys = sum(shape.lengths())
        kv_bytes = self.keys * (RANK + ROPE) * shape.cache.itemsize
        rows = shape.batch * shape.q_len * shape.heads
        self.io_bytes = kv_bytes + rows * (RANK + ROPE + RANK) * 2
        self.turns = measure.rotation(kv_bytes)
        self.sets = [make_inputs(shape) for _ in range(self.turns.sets)]
        self.want, _ = reference.mla_decode(*self.sets[0], softmax_scale=SCALE)

    def timing(self, prepared: Mapping[str, Prepare], **more: Any) -> measure.Timing:
        """These providers on this shape; ``more`` are fields of each row."""
        outs = [torch.full_like(self.want, torch.nan) for _ in self.sets]
        # Each allocates and plans when it is called first.
        calls: dict[str, list[Callable[[], Any]]] = {
            name: [_once(prepare, *s, out) for s, out in zip(self.sets, outs, strict=True)]
            for name, prepare in prepared.items()
        }
        found: dict[str, float] = {}

        def wrong(provider: str) -> str:
            outs[0].fill_(torch.nan)
            try:
                calls[provider][0]()
            except (RuntimeError, OSError) as error:
                return f"it does not take the shape: {str(error).strip().splitlines()[0]}"
            off = (outs[0].float() - self.want.float()).norm() / self.want.float().norm()
            found[provider] = off.item()
            is_rounded = self.shape.cache == torch.float8_e4m3fn and provider != "staleproof"
            most = LARGEST_ERROR_E4M3 if is_rounded else LARGEST_ERROR
            return "" if found[provider] < most else f"relative error {found[provider]:.1e}"

        return self._timing(
            calls, self.turns, wrong, lambda provider: {"error": float(f"{found[provider]:.2e}"), **more}
        )

    def _timing(self, *given: Any) -> measure.Timing:
        case = "mla_padding", "mla_decode", self.shape.mode(), "tokens", self.shape.tokens
        return measure.Timing(*case, self.io_bytes, *given)

    def vllm_rows(self, peer: Peer) -> Iterator[dict[str, Any]]:
        """The fastest number of splits, and vLLM's own choice."""
        longest = max(self.shape.lengths())
        swept = [
            row | {"splits": splits}
            for splits in splits_to_try(self.shape.batch, longest)
            for row in self.timing({f"{peer.name}, {splits} splits": _of_peer(peer, splits)}).rows()
        ]
        own = vllm_splits(longest, torch.cuda.get_device_properties(0).multi_processor_count)
        for cache in self.turns.caches:
            here = [row for row in swept if row["cache"] == cache]
            sweep = {str(row["splits"]): row["p50"] for row in here}
            best = min(here, key=lambda row: row["p50"], default=None)
            for name, splits in (("best splits", best and best["splits"]), ("its own splits", own)):
                chosen = [row for row in here if row["splits"] == splits]
                yield from (row | {"provider": f"{peer.name}, {name}", "sweep": sweep} for row in chosen)

    def limits(self, memory_rate: float, matmul_rate: float) -> measure.Timing:
        """What the machine takes for as many bytes and as many operations."""
        flops = 2 * self.keys * self.shape.q_len * self.shape.heads * (RANK + ROPE + RANK)
        floors = {
            "limit: bytes at the memset rate": self.io_bytes / memory_rate,
            "limit: FLOP at the matmul rate": flops / matmul_rate,
        }
        times = {name: measure.Times(p50=us, p20=us, p80=us) for name, us in floors.items()}
        return self._timing(times, measure.COLD, lambda provider: "")


def _once(prepare: Prepare, *given: Any) -> Callable[[], Any]:
    """What a provider prepared for these inputs, prepared at the first call."""
    held: list[Callable[[], Any]] = []

    def call() -> Any:
        if not held:
            held.append(prepare(*given))
        return held[0]()

    return call


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
    flash = {peer.name: _of_peer(peer, None) for key, peer in usable.items() if key.startswith("flash")}
    found: list[dict[str, Any]] = []
    for shape in SHAPES:
        case = Case(shape)
        found += case.timing({"staleproof": _ours}).rows()
        if "vllm_triton" in usable and shape.q_len == 1:
            found += case.vllm_rows(usable["vllm_triton"])
        found += case.timing(flash).rows()
        found += case.limits(*limits).rows()
    for shape, seed in cells():
        found += Case(shape).timing({"staleproof": _ours} | flash, drawn=seed).rows()
    return found


if __name__ == "__main__":
    sys.exit(measure.main(rows, baseline="staleproof"))
