"""What becomes of upstream's remedies when the conditions change that they silently rely on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from staleproof.cases.case import Reading, reading
from staleproof.evidence.canary import plant, row_states
from staleproof.evidence.rows import Verdict, same_bits
from staleproof.incidents.mla_padding import broken
from staleproof.incidents.mla_padding.scene import (
    KV_LORA_RANK,
    LATENT,
    SCALE,
    AttentionInputs,
    Batch,
    Engine,
    Variant,
    make_call,
)
from staleproof.incidents.mla_padding.setups import SETUPS, ClearEmptyRows, Setup
from staleproof.ops.mla.decode import mla_decode

LIVE = 3
WRONG_FINITE = "wrong, finite"

# --- A kept buffer that grows after the capture.


class _FreedBlocks:
    """The next tenant of a freed block: on CUDA torch's allocator decides, elsewhere this list does."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.freed: list[torch.Tensor] = []

    def free(self, block: torch.Tensor) -> None:
        if self.device == "cpu":
            self.freed.append(block)

    def tenant_at(
        self, where: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[torch.Tensor | None, int]:
        """The tensor that gets the block at address ``where``, if any does, and how many came before."""
        if self.device == "cpu":
            return (self.freed.pop() if self.freed else None), 0
        # Blocks of this size that the process freed earlier may be handed out first.
        tenants: list[torch.Tensor] = []
        for before in range(64):
            tenants.append(torch.empty(shape, dtype=dtype, device=self.device))
            if tenants[-1].data_ptr() == where:
                return tenants[-1], before
        return None, len(tenants)


def growth_after_capture(setup: Setup, device: str, free_blocks: int = 0) -> Reading:
    """Whether a replay writes into memory that belongs to somebody else by then.

    After the capture one larger eager batch comes. If a buffer grows for it, the old one is freed and
    given to another tensor, but the captured graph still writes to it.

    Args:
        setup: a kernel and its remedy.
        device: ``"cpu"`` or ``"cuda"``.
        free_blocks: blocks of the same size that torch's allocator has free before the growth.
    """
    blocks = _FreedBlocks(device)
    remedy = setup.remedy(setup.kernel)
    if isinstance(remedy, broken.ZerosOncePerLayer):
        remedy.free = blocks.free
    config = setup.config(device)
    engine = Engine(Variant("grown", remedy, broken.QUANTISERS["torch.max"]), config)
    output = engine.taps[0]["attention"]
    shape, where = tuple(output.shape), output.data_ptr()
    del output
    engine.forget_taps()
    idle = [torch.empty(shape, dtype=config.dtype, device=device) for _ in range(free_blocks)]
    del idle
    larger = 2 * config.batch
    remedy(
        AttentionInputs(
            q=torch.zeros(larger, config.q_len, config.heads, LATENT, dtype=config.dtype, device=device),
            kv_cache=engine.kv_cache[0],
            block_table=engine.block_table.repeat(2, 1),
            seq_lens=torch.zeros(larger, dtype=torch.int32, device=device),
            num_decodes=larger,
            layer=0,
        )
    )
    tenant, before = blocks.tenant_at(where, shape, config.dtype)
    changed = 0
    if tenant is not None:
        plant(tenant, stage=9)
        engine.set_batch(Batch(3))
        engine.graph.replay()
        states = row_states(tenant.view(config.batch * config.q_len, -1), stage=9)
        changed = sum(state != "unwritten" for state in states)
    verdict = "overwrites a tenant" if changed else "clean"
    return reading(verdict, tenant_rows_overwritten=changed, tensors_before_the_tenant=before)


def growth_by_history(free_blocks: int, device: str) -> Reading:
    """The same where the allocator has other free blocks of the size, so that somebody else comes first."""
    return growth_after_capture(SETUPS["zeros_once_per_layer"], device, free_blocks)


def needs_an_allocator(free_blocks: int, device: str) -> str | None:
    """Why the allocator's history cannot be asked about."""
    return "a list stands for the allocator on a CPU, and has no history" if device == "cpu" else None


FREE_BLOCKS = {f"{n} other free blocks": n for n in (0, 1, 8)}
GROWTH = {"zeros_once_per_layer": "overwrites a tenant", "clear_empty_rows": "clean", "mla_decode": "clean"}

# --- Padding rows with one token of the null block.


@dataclass(frozen=True)
class NullBlockCase:
    """Padding rows get one token from the null block, which holds ``fill``."""

    kernel: broken.Kernel
    fill: str


def _first_token_only(block: torch.Tensor) -> None:
    block.fill_(torch.nan)
    block[0] = 0


FILLS: dict[str, Callable[[torch.Tensor], object]] = {
    "NaN": plant,
    "zeros": torch.Tensor.zero_,
    "other numbers": lambda block: block.copy_(torch.linspace(-4, 4, block.numel()).view_as(block)),
    "NaN after its first token": _first_token_only,
}
# The first kernel masks what lies past seq_len. The second multiplies it by 0, as the values of CUTLASS
# SM100 MLA are by their source (workbook/sm100-sources.md, 2a and 2b).
_TILES = {"masked tail": broken.empty_row_not_written, "over-read tile": broken.block_table_not_padded}
NULL_BLOCKS = {
    f"{name}, {fill}": NullBlockCase(kernel, fill) for name, kernel in _TILES.items() for fill in FILLS
}


@cache
def _cleared(kernel: broken.Kernel, device: str) -> torch.Tensor:
    """Logits of the live rows of the same step, with its padding rows cleared."""
    engine = Setup(kernel, ClearEmptyRows).engine("torch.max", device)
    engine.set_batch(Batch(LIVE))
    return engine.replay()[engine.live]


def null_block(case: NullBlockCase, device: str) -> Reading:
    """What live rows become when padding rows have ``seq_len`` 1 and read the null block.

    Compared with the same step whose padding rows are cleared: other bits without NaN are "wrong, finite".
    """

    engine = Setup(case.kernel, broken.PadWithSeqLenOne).engine("torch.max", device)
    for kv_cache in engine.kv_cache:
        FILLS[case.fill](kv_cache[0])
    engine.set_batch(Batch(LIVE))
    verdict, live = engine.verdict(), engine.replay()[engine.live]
    moved = int((~same_bits(live, _cleared(case.kernel, device))).sum())
    if verdict == Verdict.CLEAN and moved:
        return reading(WRONG_FINITE, live_rows=len(live), moved_rows=moved)
    return reading(verdict, live_rows=len(live), moved_rows=moved)


def null_block_expected(case: NullBlockCase) -> str:
    """What must come out."""
    after_first = Verdict.CLEAN if case.kernel is broken.empty_row_not_written else Verdict.LEAKED
    return {
        "NaN": Verdict.LEAKED,
        "zeros": Verdict.CLEAN,
        "other numbers": WRONG_FINITE,
        "NaN after its first token": after_first,
    }[case.fill]


# --- Which count the branch for several query tokens is given.

DECODES = {"the padded batch, as in a full graph": None, "the real count, set by hand": LIVE}
DECODES_EXPECTED = {
    "the padded batch, as in a full graph": Verdict.LEAKED,
    "the real count, set by hand": Verdict.CLEAN,
}


def num_decodes(count: int | None, device: str) -> str:
    """Verdict of :class:`broken.ClearsNothing` with the padded ``num_decodes``, or with a given one."""
    remedy = broken.ClearsNothing(broken.empty_row_not_written)

    def attend(a: AttentionInputs) -> torch.Tensor:
        return remedy(a if count is None else replace(a, num_decodes=count))

    config = SETUPS["clears_nothing_q_len_4"].config(device)
    engine = Engine(Variant("ClearsNothing", attend, broken.QUANTISERS["torch.max"]), config)
    engine.poison(plant)
    engine.set_batch(Batch(LIVE))
    return engine.verdict()


# --- A buffer made for one query token, given to a kernel that writes several.

PAST, INSIDE, REFUSED = "writes past its end", "stays inside", "refused"


@dataclass(frozen=True)
class BufferCase:
    """A kernel, the query tokens a request, and the buffer (rows, heads, 512) that it is given."""

    kernel: broken.Kernel
    q_len: int


BUFFERS = {
    "empty_row_not_written, q_len 1": BufferCase(broken.empty_row_not_written, 1),
    "empty_row_not_written, q_len 4": BufferCase(broken.empty_row_not_written, 4),
    "mla_decode, q_len 4": BufferCase(mla_decode, 4),
}
BUFFERS_EXPECTED = dict(zip(BUFFERS, (INSIDE, PAST, REFUSED), strict=True))


def three_d_buffer(case: BufferCase, device: str) -> Reading:
    """Whether a launch with ``q_len`` query tokens writes past a buffer of (batch, heads, 512).

    The buffer of vLLM #37442 has three dimensions, the output of several query tokens four. A kernel
    that takes the sizes from the query and trusts the buffer writes ``q_len`` times its bytes. Here the
    buffer is the first part of a larger allocation with canaries, so that nobody is harmed.
    """
    rows = 8
    call = make_call(device, rows=rows, live=rows, tokens=20, q_len=case.q_len)
    slab = plant(call.q.new_empty(rows * (case.q_len + 1), call.q.shape[2], KV_LORA_RANK), stage=6)
    buffer = slab[:rows]
    try:
        case.kernel(*call, softmax_scale=SCALE, out=buffer)
    except ValueError as refusal:
        untouched = set(row_states(slab, stage=6)) == {"unwritten"}
        return reading(REFUSED if untouched else "refused too late", note=str(refusal))
    past = sum(state != "unwritten" for state in row_states(slab[rows:], stage=6))
    return reading(PAST if past else INSIDE, rows_past_the_end=past, rows=rows)
