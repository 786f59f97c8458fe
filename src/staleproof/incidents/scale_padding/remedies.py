"""One small model with a place for every cause and every remedy of the matrix.

It has block allocation, a dummy batch, paged attention over two layers, the merge of two ranks' parts,
quantisers, an NVFP4 product, routing and the experts' map. One fault at a time is switched on, and one remedy
is applied, whether it is meant for that fault or not. A :class:`History` is the earlier content of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from staleproof.incidents.scale_padding import broken, ids, null_block
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.nvfp4 import quantize_nvfp4
from staleproof.ops.reference import clear_empty_rows as reference_clear
from staleproof.ops.reference import fp8 as reference_fp8
from staleproof.ops.reference import nvfp4 as reference
from staleproof.ops.reference import topk as reference_topk
from staleproof.ops.reference.zero_blocks import zero_blocks
from staleproof.ops.topk import topk_softmax
from staleproof.ops.zero_blocks import BlockZeroer

ROWS, LAYERS, EXPERTS, TOP_K = 4, 2, 8, 2
# 80 elements are five blocks of 16: the scales get three padding columns.
WIDTH = 80
BLOCK_SIZE, TOKENS, GLOBAL_SCALE = 4, 6, 64.0
# Live requests of each step. In the second step, which is not judged, rows 1 and 3 are NaN by themselves,
# unless the history has no sick requests.
LIVE = (2, 4, 2, 2)
SICK_STEP, SICK_ROWS = 1, [1, 3]

UNWRITTEN = ("empty rows", "amax, torch.max", "amax, fmax")
OVER_READS = ("tail over-read", "null block", "block reuse")
# Each cause, and the remedy that is meant for it.
CAUSES = {
    "empty rows": "post_kernel_clear",
    "amax, torch.max": "amax_of_live_rows",
    "amax, fmax": "amax_of_live_rows",
    "NaN logits": "fused_sanitising",
    "duplicate ids": "distinct_ids",
    "int64 ids": "int32_ids",
    "scale padding": "in_kernel_padding",
    "tail over-read": "zero_blocks_on_allocation",
    "null block": "slot_minus_one",
    "block reuse": "zero_blocks_on_allocation",
    "cross-row reduction": "rows_kept_apart",
}


@dataclass(frozen=True)
class History:
    """The content of memory before this model got it: float32 numbers of another tensor.

    Fresh memory of another type contains the bytes of these numbers: the scales of an NVFP4 tensor,
    the experts' map, and blocks that were a Mamba state.

    Attributes:
        values: the number at each step, or ``None`` for normal random numbers.
        sick: whether two requests of the second step are NaN by themselves.
        earlier_map: whether the map's memory contains the previous step's map instead of these bytes.
    """

    values: tuple[float, float, float, float] | None
    sick: bool = True
    earlier_map: bool = False

    def fresh(self, step: int, *shape: int, device: str) -> torch.Tensor:
        """Float32 memory of a shape at a step."""
        if self.values is not None:
            return torch.full(shape, self.values[step], device=device)
        return torch.randn(shape, generator=torch.Generator().manual_seed(step)).to(device)


class Operations(NamedTuple):
    """The operations that remedies call: our kernels, or their references in PyTorch."""

    clear_empty_rows: Callable[..., Any]
    quantize_fp8_per_tensor: Callable[..., Any]
    quantize_nvfp4: Callable[..., Any]
    topk_softmax: Callable[..., Any]
    zero: Callable[[list[torch.Tensor]], Callable[[list[int]], None]]


KERNELS = Operations(
    clear_empty_rows, quantize_fp8_per_tensor, quantize_nvfp4, topk_softmax, lambda kv: BlockZeroer(kv).zero
)
IN_TORCH = Operations(
    reference_clear.clear_empty_rows,
    reference_fp8.quantize_fp8_per_tensor,
    reference.quantize_nvfp4,
    reference_topk.topk_softmax,
    lambda kv: partial(zero_blocks, kv),
)


@dataclass
class Server:
    """The state that is kept from step to step.

    Attributes:
        cause: the fault; it also decides the setting: load test, idle rank, two ranks' parts ...
        remedy: one of a cause in :data:`CAUSES`, ``zero_init_per_layer``, or ``None``.
        device: where it runs.
        history: what memory contained before.
        run: the operations of the remedies.
        faulty: whether the fault is switched on, or only its setting.
        buffers: attention outputs that a remedy keeps.
        map: the experts' map of the step before, at first of another batch.
    """

    cause: str
    remedy: str | None
    device: str
    history: History
    run: Operations = KERNELS
    faulty: bool = True
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)
    map: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.device)

        # Two blocks a request; the third entry is unused and names the null block.
        shape = (1 + 2 * ROWS, BLOCK_SIZE, WIDTH)
        self.table = torch.zeros(ROWS, 3, dtype=torch.int64, device=self.device)
        self.table[:, :2] = torch.arange(1, shape[0], device=self.device).view(ROWS, 2)
        # Some requests have larger values than others.
        loudness = torch.tensor([1.0, 3.0, 5.0, 1.0], device=self.device)[:, None, None]
        self.tokens = (noise(LAYERS, ROWS, TOKENS, WIDTH) * loudness).bfloat16()
        self.queries, self.other_rank = noise(ROWS, WIDTH), noise(ROWS, WIDTH)
        self.weight = reference.quantize_nvfp4(noise(WIDTH, WIDTH) / WIDTH**0.5, GLOBAL_SCALE)
        self.map = torch.arange(ROWS * TOP_K, dtype=torch.int32, device=self.device).view(ROWS, TOP_K)
        self.router = noise(WIDTH, EXPERTS)
        self.experts = noise(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
        self.caches = [torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in range(LAYERS)]
        for cache_ in self.caches:
            if self.has("tail over-read"):
                # The old content of these blocks, from their last request.
                cache_[1:] = self.fresh(0, *shape)[1:]
            if self.has("block reuse"):
                # The blocks were float32 state of a Mamba layer, which gives other numbers in bfloat16.
                cache_[1:] = self.fresh(0, *shape[:2], WIDTH // 2).view(torch.bfloat16)[1:]
        if self.remedy == "zero_blocks_on_allocation":
            self.zero = self.run.zero(self.caches)

    def fresh(self, step: int, *shape: int) -> torch.Tensor:
        """Memory with the content of its last owner."""
        return self.history.fresh(step, *shape, device=self.device)

    def has(self, *causes: str) -> bool:
        """Whether one of these faults is switched on."""
        return self.faulty and self.cause in causes

    def allocate(self, rows: range) -> None:
        """Allocate blocks for new requests, and write their prompts into them."""
        position = torch.arange(BLOCK_SIZE, device=self.device)
        for row in rows:
            blocks = self.table[row, :2]
            if self.remedy == "zero_blocks_on_allocation":
                self.zero(blocks.tolist())
            slots = (blocks[:, None] * BLOCK_SIZE + position).flatten()[:TOKENS]
            for layer, cache_ in enumerate(self.caches):
                null_block.write_kv(cache_, self.tokens[layer, row], slots)

    def dummy_batch(self, step: int) -> None:
        """The dummy batch of an idle rank, which runs so that other ranks need not wait."""
        fixed = self.remedy == "slot_minus_one" or not self.faulty
        slots = torch.full((1,), -1 if fixed else 0, device=self.device)
        garbage = self.fresh(step, 1, WIDTH).bfloat16()
        for cache_ in self.caches:
            null_block.write_kv(cache_, garbage, slots)

    def output(self, layer: int, step: int) -> torch.Tensor:
        """(rows, width): memory for one layer's attention output."""
        if self.remedy == "zero_init_per_layer":
            return self.buffers.setdefault(layer, torch.zeros(ROWS, WIDTH, device=self.device))
        return self.fresh(step, ROWS, WIDTH)

    def attention(self, layer: int, step: int, x: torch.Tensor, seq_lens: list[int]) -> torch.Tensor:
        """(rows, width). The faulty kernels leave an empty row alone, or read past a row's end."""
        out = self.output(layer, step)
        position = torch.arange(3 * BLOCK_SIZE, device=self.device)
        for row, length in enumerate(seq_lens):
            if length:
                keys = self.caches[layer][self.table[row]].flatten(0, 1).float()
                past = position >= length
                if not self.has(*OVER_READS):
                    keys = torch.where(past[:, None], 0.0, keys)
                score = (keys @ x[row] / WIDTH**0.5).masked_fill(past, -torch.inf)
                # 0 times whatever is past the end.
                out[row] = score.softmax(0) @ keys
            elif not self.has(*UNWRITTEN):
                out[row] = 0
        if self.remedy == "post_kernel_clear":
            lengths = torch.tensor(seq_lens, dtype=torch.int32, device=self.device)
            self.run.clear_empty_rows(out.view(ROWS, 1, WIDTH), lengths)
        return out

    def quantised(self, x: torch.Tensor, live: int) -> torch.Tensor:
        """x through fp8 and back, by the quantiser the cause is about; else one scale a row."""
        if self.cause in ("amax, torch.max", "amax, fmax"):
            if self.remedy == "amax_of_live_rows":
                values, scale = self.run.quantize_fp8_per_tensor(x, live_rows=live)
                return values.float() * scale
            magnitudes = x.abs() if self.faulty else x[:live].abs()
            amax = (
                magnitudes.where(~magnitudes.isnan(), 0.0) if self.cause == "amax, fmax" else magnitudes
            ).max()
        elif self.has("cross-row reduction"):
            apart = self.remedy == "rows_kept_apart"
            values, scale = (broken.row_alone if apart else broken.neighbour_in_the_maximum)(x)
            return values.float() * scale[:, None]
        else:
            amax = x.abs().amax(1, keepdim=True)
        scale = torch.where(amax > 0, amax / torch.full_like(amax, 448.0), 1.0)
        scaled = (x * (1 / scale)).clamp(-448, 448)
        return scaled.to(torch.float8_e4m3fn).float() * scale

    def product(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """x @ weight.T in NVFP4."""
        factor = torch.full((1,), GLOBAL_SCALE, device=self.device)
        ours = self.remedy == "in_kernel_padding"
        packed, scales = (self.run if ours else IN_TORCH).quantize_nvfp4(x, factor)
        if self.has("scale padding") and not ours:
            # Leave the padding unwritten, as quantize_blocks_only does.
            raw = scales.view(torch.uint8).view(-1)
            nobody = reference.padding_offsets(ROWS, WIDTH).to(self.device)
            raw[nobody] = self.fresh(step, len(raw) // 4).view(torch.uint8)[nobody]
        return reference.block_scaled_mm(packed, scales, *self.weight, GLOBAL_SCALE**-2)

    def hidden(self, step: int) -> torch.Tensor:
        """(rows, width): the step up to its router."""
        live = LIVE[step]
        if self.cause == "null block":
            self.dummy_batch(step)
        if step < 2:
            self.allocate(range(LIVE[step - 1] if step else 0, live))
        seq_lens = [TOKENS] * live + [0] * (ROWS - live)
        x = self.queries.clone()
        if step == SICK_STEP:
            if self.history.sick:
                x[SICK_ROWS] = torch.nan
        elif self.cause == "empty rows":
            # All tokens of the second request are on another rank.
            seq_lens[1] = 0
        for layer in range(LAYERS):
            out = self.attention(layer, step, x, seq_lens)
            if self.cause == "empty rows":
                # Merge two ranks' parts by their weights; this rank's is 0 for a row without tokens.
                here = torch.tensor(seq_lens, device=self.device).clamp(max=1)[:, None] / 2
                out = here * out + (1 - here) * self.other_rank
            x = self.product(self.quantised(out, live), step)
        return x

    def route(self, x: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and ids: from the simulator in a load test, else from the router."""
        if self.cause in ("duplicate ids", "int64 ids"):
            again = self.cause == "duplicate ids" and self.remedy != "distinct_ids"
            draw = broken.simulate_with_replacement if again else ids.simulate_routing
            weights, chosen = draw(ROWS, EXPERTS, TOP_K, device=self.device, seed=step)
            return weights, chosen.long()
        logits = x @ self.router
        if self.has("NaN logits"):
            # A piecewise graph leaves the rows of padding unwritten.
            logits[LIVE[step] :] = self.fresh(step, ROWS - LIVE[step], EXPERTS)
        if self.remedy == "fused_sanitising":
            weights, chosen = self.run.topk_softmax(logits, TOP_K)
            return weights, chosen.long()
        if self.has("NaN logits"):
            return keeps_the_first(logits.softmax(1))
        weights, chosen = logits.softmax(1).topk(TOP_K)
        return weights, chosen

    def step(self, number: int) -> StepResult:
        """One step."""
        x = self.hidden(number)
        weights, chosen = self.route(x, number)
        meant = expert_sums(x, weights, chosen, self.experts)
        if self.remedy == "int32_ids":
            chosen = chosen.int()
        if self.has("int64 ids") and chosen.dtype == torch.int64:
            chosen = broken.read_as_int32(chosen)
        unused = self.fresh(number, chosen.numel(), WIDTH)
        stale = self.map if self.history.earlier_map else unused[:, 0].view(torch.int32).view(chosen.shape)
        rows, self.map, survived = through_the_map(x, weights, chosen, self.experts, stale, unused)
        return StepResult(rows, meant, survived)


@dataclass(frozen=True)
class StepResult:
    """One step's outputs.

    Attributes:
        rows: (rows, width), through the map.
        meant: (rows, width), the right result for the routing of this step.
        survived: whether the process survived.
    """

    rows: torch.Tensor
    meant: torch.Tensor
    survived: bool


def keeps_the_first(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k by scans that keep expert 0 unless another is larger; NaN never is (vLLM #39593)."""
    left = scores.clone()
    chosen = torch.zeros(len(scores), TOP_K, dtype=torch.int64, device=scores.device)
    for turn in range(TOP_K):
        best = left[:, 0]
        for expert in range(1, EXPERTS):
            larger = left[:, expert] > best
            best = torch.where(larger, left[:, expert], best)
            chosen[:, turn] = torch.where(larger, expert, chosen[:, turn])
        left.scatter_(1, chosen[:, turn : turn + 1], -1.0)
    return scores.gather(1, chosen), chosen


def expert_sums(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """Each row's weighted sum over its experts by the formula, (rows, width)."""
    by_slot = torch.einsum("rw,rkwv->rkv", x, experts[chosen.long()])
    return (weights[..., None] * by_slot).sum(1)


def through_the_map(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    experts: torch.Tensor,
    stale: torch.Tensor,
    unused: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The same with a map from slots to rows sorted by expert, as in FlashInfer's CUTLASS MoE.

    For each expert, a token's slots are scanned up to the first match. The slot of a second match is
    never written: its stale entry is followed, which is an illegal access if it names no row
    (vLLM #39593).

    Args:
        x, weights, chosen, experts: as for :func:`expert_sums`.
        stale: (rows, top_k) int32, old content of the map's memory.
        unused: (rows * top_k, width), old content of the memory of the experts' output rows.

    Returns:
        (rows, width); the map, (rows, top_k) int32; whether every entry followed named a row.
    """
    expert_of = chosen.tolist()
    slots = [(e, r, k) for r, row in enumerate(expert_of) for k, e in enumerate(row) if row.index(e) == k]
    row_of_slot, outputs = stale.clone(), unused.clone()
    for place, (expert, row, k) in enumerate(sorted(slots)):
        row_of_slot[row, k] = place
        outputs[place] = x[row] @ experts[expert]
    inside = (row_of_slot >= 0) & (row_of_slot < len(outputs))
    followed = outputs[row_of_slot.where(inside, 0).long()]
    summed = (weights[..., None] * followed).where(inside[..., None], 0.0).sum(1)
    return summed, row_of_slot, bool(inside.all())
