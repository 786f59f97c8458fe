"""Which remedy cures which cause: every remedy is tried on every cause, in one small model.

The model has a place for each fault of the five incidents: block allocation, a dummy batch, paged
attention over two layers, the merge of two ranks' parts, quantisers, an NVFP4 product, routing and
the experts' map. One fault at a time is put in place, and one remedy applied, whether it is meant
for that fault or not. Four steps are served. A cell counts the outputs of healthy requests that
differ from those of a model without the fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch

from staleproof.incidents.scale_padding import broken, ids, null_block
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.nvfp4 import quantize_nvfp4
from staleproof.ops.reference import nvfp4 as reference
from staleproof.ops.topk import topk_softmax
from staleproof.ops.zero_blocks import BlockZeroer

ROWS, LAYERS, EXPERTS, TOP_K = 4, 2, 8, 2
# 80 elements are five blocks of 16: the scales get three padding columns.
WIDTH = 80
BLOCK_SIZE, TOKENS, GLOBAL_SCALE = 4, 6, 64.0
# Live requests of each step. In the second, rows 1 and 3 are NaN by themselves; it is not judged.
LIVE = (2, 4, 2, 2)
SICK_STEP, SICK_ROWS = 1, [1, 3]
# What fresh memory contains at each step: it was another tensor's before.
STALE = (torch.nan, torch.nan, 300.0, torch.nan)

UNWRITTEN = ("empty rows", "amax, torch.max", "amax, fmax")
OVER_READS = ("tail over-read", "null block", "block reuse")
# Each cause, and the remedy that it asks for.
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

# What the threads tried; then what three of the causes need.
REMEDIES = (
    "zero_init_per_layer",
    "shared_buffer",
    "post_kernel_clear",
    "fused_sanitising",
    "in_kernel_padding",
    "zero_blocks_on_allocation",
    "slot_minus_one",
    "int32_ids",
    "amax_of_live_rows",
    "distinct_ids",
    "rows_kept_apart",
)

CURED, HELPED, NOT_CURED, WORSE = "cured", "helped", "not cured", "made worse"


@dataclass
class Server:
    """What lives from step to step.

    Attributes:
        cause: the fault; it also decides the setting: load test, idle rank, two ranks' parts ...
        remedy: one of :data:`REMEDIES`, or ``None``.
        device: where it runs.
        faulty: whether the fault is in place, or only its setting.
        buffers: attention outputs that a remedy keeps.
    """

    cause: str
    remedy: str | None
    device: str
    faulty: bool = True
    buffers: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.device)

        # Two blocks a request; the third entry is unused and names the null block.
        shape = (1 + 2 * ROWS, BLOCK_SIZE, WIDTH)
        self.table = torch.zeros(ROWS, 3, dtype=torch.int64, device=self.device)
        self.table[:, :2] = torch.arange(1, shape[0], device=self.device).view(ROWS, 2)
        # Some requests are louder than others.
        loudness = torch.tensor([1.0, 3.0, 5.0, 1.0], device=self.device)[:, None, None]
        self.tokens = (noise(LAYERS, ROWS, TOKENS, WIDTH) * loudness).bfloat16()
        self.queries, self.other_rank = noise(ROWS, WIDTH), noise(ROWS, WIDTH)
        self.weight = reference.quantize_nvfp4(noise(WIDTH, WIDTH) / WIDTH**0.5, GLOBAL_SCALE)
        self.router = noise(WIDTH, EXPERTS)
        self.experts = noise(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5
        self.caches = [torch.zeros(shape, dtype=torch.bfloat16, device=self.device) for _ in range(LAYERS)]
        for cache_ in self.caches:
            if self.has("tail over-read"):
                # The last request in these blocks was sick.
                cache_[1:] = torch.nan
            if self.has("block reuse"):
                # They were float32 state of a Mamba layer, whose low halves spell NaN in bfloat16.
                state = noise(*shape[:2], WIDTH // 2)
                cache_.copy_(state.view(torch.bfloat16))
                cache_[0] = 0
        if self.remedy == "zero_blocks_on_allocation":
            self.zeroer = BlockZeroer(self.caches)

    def has(self, *causes: str) -> bool:
        """Whether one of these faults is in place."""
        return self.faulty and self.cause in causes

    def allocate(self, rows: range) -> None:
        """New requests get their blocks, and their prompts are written into them."""
        position = torch.arange(BLOCK_SIZE, device=self.device)
        for row in rows:
            blocks = self.table[row, :2]
            if self.remedy == "zero_blocks_on_allocation":
                self.zeroer.zero(blocks.tolist())
            slots = (blocks[:, None] * BLOCK_SIZE + position).flatten()[:TOKENS]
            for layer, cache_ in enumerate(self.caches):
                null_block.write_kv(cache_, self.tokens[layer, row], slots)

    def dummy_batch(self) -> None:
        """What an idle rank runs so that the others need not wait for it."""
        fixed = self.remedy == "slot_minus_one" or not self.faulty
        slots = torch.full((1,), -1 if fixed else 0, device=self.device)
        garbage = torch.full((1, WIDTH), torch.nan, dtype=torch.bfloat16, device=self.device)
        for cache_ in self.caches:
            null_block.write_kv(cache_, garbage, slots)

    def output(self, layer: int, step: int) -> torch.Tensor:
        """(rows, width): memory for one layer's attention output."""
        if self.remedy in ("zero_init_per_layer", "shared_buffer"):
            key = layer if self.remedy == "zero_init_per_layer" else 0
            zeros = torch.zeros(ROWS, WIDTH, device=self.device)
            return self.buffers.setdefault(key, zeros)
        return torch.full((ROWS, WIDTH), STALE[step], device=self.device)

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
                # 0 times whatever lies past the end.
                out[row] = score.softmax(0) @ keys
            elif not self.has(*UNWRITTEN):
                out[row] = 0
        if self.remedy == "post_kernel_clear":
            lengths = torch.tensor(seq_lens, dtype=torch.int32, device=self.device)
            clear_empty_rows(out.view(ROWS, 1, WIDTH), lengths)
        return out

    def quantised(self, x: torch.Tensor, live: int) -> torch.Tensor:
        """x through fp8 and back, by the quantiser the cause is about; else one scale a row."""
        if self.cause in ("amax, torch.max", "amax, fmax"):
            if self.remedy == "amax_of_live_rows":
                values, scale = quantize_fp8_per_tensor(x, live_rows=live)
                return values.float() * scale
            seen = x.abs() if self.faulty else x[:live].abs()
            amax = (seen.nan_to_num(0.0) if self.cause == "amax, fmax" else seen).max()
        elif self.has("cross-row reduction"):
            apart = self.remedy == "rows_kept_apart"
            values, scale = (broken.row_alone if apart else broken.neighbour_in_the_maximum)(x)
            return values.float() * scale[:, None]
        else:
            amax = x.abs().amax(1, keepdim=True)
        scale = torch.where(amax > 0, amax / torch.full_like(amax, 448.0), 1.0)
        scaled = (x * (1 / scale)).clamp(-448, 448)
        return scaled.to(torch.float8_e4m3fn).float() * scale

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x @ weight.T by way of NVFP4."""
        factor = torch.full((1,), GLOBAL_SCALE, device=self.device)
        if self.remedy == "in_kernel_padding":
            packed, scales = quantize_nvfp4(x, factor)
        elif self.has("scale padding"):
            packed, scales = broken.quantize_blocks_only(
                x, factor, broken.PATHS["128x4"], "empty", lambda memory: memory.fill_(torch.nan)
            )
        else:
            packed, scales = reference.quantize_nvfp4(x, factor)
        return reference.block_scaled_mm(packed, scales, *self.weight, GLOBAL_SCALE**-2)

    def hidden(self, step: int) -> torch.Tensor:
        """(rows, width): the step up to its router."""
        live = LIVE[step]
        if self.cause == "null block":
            self.dummy_batch()
        if step < 2:
            self.allocate(range(LIVE[step - 1] if step else 0, live))
        seq_lens = [TOKENS] * live + [0] * (ROWS - live)
        x = self.queries.clone()
        if step == SICK_STEP:
            x[SICK_ROWS] = torch.nan
        elif self.cause == "empty rows":
            # All tokens of the second request lie on another rank.
            seq_lens[1] = 0
        for layer in range(LAYERS):
            out = self.attention(layer, step, x, seq_lens)
            if self.cause == "empty rows":
                # Two ranks' parts by their weights, which is 0 here for a row without tokens.
                here = torch.tensor(seq_lens, device=self.device).clamp(max=1)[:, None] / 2
                out = here * out + (1 - here) * self.other_rank
            x = self.product(self.quantised(out, live))
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
            # The rows of padding, which a piecewise graph leaves as they lie.
            logits[LIVE[step] :] = torch.nan
        if self.remedy == "fused_sanitising":
            return topk_softmax(logits, TOP_K)
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
        rows, survived = through_the_map(x, weights, chosen, self.experts)
        return StepResult(rows, meant, survived)


@dataclass(frozen=True)
class StepResult:
    """One step's outputs.

    Attributes:
        rows: (rows, width), through the map.
        meant: (rows, width), what the routing of this step should give.
        survived: whether the process did.
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
    """The formula: each row's weighted sum over its experts, (rows, width)."""
    by_slot = torch.einsum("rw,rkwv->rkv", x, experts[chosen.long()])
    return (weights[..., None] * by_slot).sum(1)


def through_the_map(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: torch.Tensor
) -> tuple[torch.Tensor, bool]:
    """The same by a map from slots to rows sorted by expert, as FlashInfer's CUTLASS MoE takes it.

    For each expert, a token's slots are scanned up to the first match. The slot of a second match is
    never written: following its stale entry is an illegal access (vLLM #39593).

    Returns:
        (rows, width), and whether every entry followed had been written.
    """
    expert_of = chosen.tolist()
    first = [[row.index(expert) == slot for slot, expert in enumerate(row)] for row in expert_of]
    written = torch.tensor(first, device=x.device)
    kept = torch.where(written, weights, 0.0)
    return expert_sums(x, kept, chosen, experts), all(map(all, first))


@cache
def _right(cause: str, device: str) -> tuple[torch.Tensor, ...]:
    server = Server(cause, None, device, faulty=False)
    return tuple(server.step(number).meant for number in range(len(LIVE)))


def serve(cause: str, remedy: str | None, device: str) -> int:
    """Serve the four steps; return how many outputs of healthy requests were wrong or never came."""
    server = Server(cause, remedy, device)
    wrong, survived = 0, True
    for number, live in enumerate(LIVE):
        if survived:
            said = server.step(number)
            # An illegal access ends the process, and with it all later steps.
            survived = said.survived
        if number == SICK_STEP:
            continue
        wanted = said.meant if cause == "duplicate ids" else _right(cause, device)[number]
        for row in range(live):
            near = torch.allclose(said.rows[row], wanted[row], rtol=1e-3, atol=1e-4)
            wrong += not (survived and near)
    return wrong


@dataclass(frozen=True)
class Cell:
    """One remedy on one cause: wrong outputs without it, with it, and without it again."""

    cause: str
    remedy: str
    off: int
    on: int
    off_again: int

    @property
    def verdict(self) -> str:
        """``cured``, ``helped``, ``not cured`` or ``made worse``."""
        if not self.off or self.off != self.off_again:
            return "not reproduced"
        if self.on == 0:
            return CURED
        if self.on == self.off:
            return NOT_CURED
        return HELPED if self.on < self.off else WORSE


def row_of(cause: str, device: str, remedies: tuple[str, ...] = REMEDIES) -> list[Cell]:
    """Every remedy on one cause; the cause alone is served before and after."""
    off = serve(cause, None, device)
    on = {remedy: serve(cause, remedy, device) for remedy in remedies}
    off_again = serve(cause, None, device)
    return [Cell(cause, remedy, off, count, off_again) for remedy, count in on.items()]
