"""How upstream's remedies fail if conditions that they silently rely on no longer hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from staleproof.cases.case import Reading, reading
from staleproof.evidence.canary import plant, row_states
from staleproof.evidence.rows import Verdict, same_bits
from staleproof.incidents.mla_padding import broken, scene
from staleproof.incidents.mla_padding.scene import Batch, Engine, Variant
from staleproof.incidents.mla_padding.setups import SETUPS, ClearEmptyRows, Setup
from staleproof.ops.mla.decode import mla_decode

LIVE = 3

# --- A kept buffer that grows after the capture.


def growth_after_capture(setup: Setup, device: str, free_blocks: int = 0) -> Reading:
    """Whether a replay writes into memory that belongs to another tensor by then.

    After the capture one larger eager batch comes. If a buffer grows for it, the old one is freed and
    given to another tensor, but the captured graph still writes to it.

    Args:
        setup: a kernel and its remedy.
        device: ``"cuda"``, where torch's allocator reuses freed blocks, or ``"cpu"``, where a list plays it.
        free_blocks: number of free blocks of the same size in torch's allocator before the growth.
    """
    freed: list[torch.Tensor] = []
    remedy = setup.remedy(setup.kernel)
    if isinstance(remedy, broken.ZerosOncePerLayer) and device == "cpu":
        remedy.free = freed.append
    config = setup.config(device)
    engine = Engine(Variant("grown", remedy, broken.QUANTISERS["torch.max"]), config)
    output = engine.taps[0]["attention"]
    shape, where = output.shape, output.data_ptr()
    # A serving engine keeps no reference to the stage outputs, so they can be freed.
    del output
    engine.taps = []
    idle = [torch.empty(shape, dtype=config.dtype, device=device) for _ in range(free_blocks)]
    del idle
    larger = 2 * config.batch
    q_shape = larger, config.q_len, config.heads, scene.LATENT
    remedy(
        scene.AttentionInputs(
            q=torch.zeros(q_shape, dtype=config.dtype, device=device),
            kv_cache=engine.kv_cache[0],
            block_table=engine.block_table.repeat(2, 1),
            seq_lens=torch.zeros(larger, dtype=torch.int32, device=device),
            num_decodes=larger,
            layer=0,
        )
    )
    tenant, before = (freed.pop() if freed else None), 0
    if device != "cpu":
        # The allocator may first hand out blocks of this size that were freed earlier.
        tenants: list[torch.Tensor] = []
        while tenant is None and len(tenants) < 64:
            tenants.append(torch.empty(shape, dtype=config.dtype, device=device))
            tenant = tenants[-1] if tenants[-1].data_ptr() == where else None
        before = len(tenants) - (tenant is not None)
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
    """The same if the allocator has other free blocks of this size, which it hands out first."""
    return growth_after_capture(SETUPS["zeros_once_per_layer"], device, free_blocks)


def needs_an_allocator(free_blocks: int, device: str) -> str | None:
    """Why this device has no allocator history to test."""
    return "a list stands for the allocator on a CPU, and has no history" if device == "cpu" else None


GROWTH = {"zeros_once_per_layer": "overwrites a tenant", "clear_empty_rows": "clean", "mla_decode": "clean"}

# --- Padding rows with one token of the null block.


def _first_token_only(block: torch.Tensor) -> None:
    block.fill_(torch.nan)
    block[0] = 0


# The first kernel masks values past seq_len. The second multiplies them by 0, as CUTLASS SM100 MLA does
# according to its source (workbook/sm100-sources.md, 2a and 2b).
_TILES = {"masked tail": broken.empty_row_not_written, "over-read tile": broken.block_table_not_padded}
# Content of the null block -> the function that writes it, and the expected verdict with each kernel.
_FILLS: dict[str, tuple[Callable[[torch.Tensor], object], tuple[str, str]]] = {
    "NaN": (plant, (Verdict.LEAKED, Verdict.LEAKED)),
    "zeros": (torch.Tensor.zero_, (Verdict.CLEAN, Verdict.CLEAN)),
    "other numbers": (
        lambda block: block.copy_(torch.linspace(-4, 4, block.numel()).view_as(block)),
        ("wrong, finite", "wrong, finite"),
    ),
    "NaN after its first token": (_first_token_only, (Verdict.CLEAN, Verdict.LEAKED)),
}
NULL_BLOCKS = {
    f"{tile}, {fill}": (kernel, write, expected[index])
    for index, (tile, kernel) in enumerate(_TILES.items())
    for fill, (write, expected) in _FILLS.items()
}


@cache
def _cleared(kernel: broken.Kernel, device: str) -> torch.Tensor:
    """Logits of the live rows of the same step, with its padding rows cleared."""
    engine = Setup(kernel, ClearEmptyRows).engine("torch.max", device)
    engine.set_batch(Batch(LIVE))
    return engine.replay()[engine.live]


def null_block(case: tuple[broken.Kernel, Callable[[torch.Tensor], object], str], device: str) -> Reading:
    """How live rows change if padding rows have ``seq_len`` 1 and read the null block.

    Compared with the same step with cleared padding rows: other bits without NaN are "wrong, finite".

    Args:
        case: a kernel, what fills the null block, and the expected verdict.
        device: ``"cpu"`` or ``"cuda"``.
    """
    kernel, write, _ = case
    engine = Setup(kernel, broken.PadWithSeqLenOne).engine("torch.max", device)
    for kv_cache in engine.kv_cache:
        write(kv_cache[0])
    engine.set_batch(Batch(LIVE))
    verdict, live = engine.verdict(), engine.replay()[engine.live]
    moved = int((~same_bits(live, _cleared(kernel, device))).sum())
    finite = "wrong, finite" if moved else str(verdict)
    return reading(finite if verdict == Verdict.CLEAN else verdict, live_rows=len(live), moved_rows=moved)


# --- Which count is passed to the branch for several query tokens.

DECODES = {
    "the padded batch, as in a full graph": (None, Verdict.LEAKED),
    "the real count, set by hand": (LIVE, Verdict.CLEAN),
}


def num_decodes(case: tuple[int | None, Verdict], device: str) -> str:
    """Verdict of :class:`broken.ClearsNothing` with the padded ``num_decodes``, or with a given one."""
    remedy, count = broken.ClearsNothing(broken.empty_row_not_written), case[0]

    def attend(a: scene.AttentionInputs) -> torch.Tensor:
        return remedy(a if count is None else replace(a, num_decodes=count))

    config = SETUPS["clears_nothing_q_len_4"].config(device)
    engine = Engine(Variant("ClearsNothing", attend, broken.QUANTISERS["torch.max"]), config)
    engine.poison(plant)
    engine.set_batch(Batch(LIVE))
    return engine.verdict()


# --- A buffer allocated for one query token, passed to a kernel that writes several.

# A kernel, the query tokens a request, and the expected verdict.
BUFFERS: dict[str, tuple[broken.Kernel, int, str]] = {
    "empty_row_not_written, q_len 1": (broken.empty_row_not_written, 1, "stays inside"),
    "empty_row_not_written, q_len 4": (broken.empty_row_not_written, 4, "writes past its end"),
    "mla_decode, q_len 4": (mla_decode, 4, "refused"),
}


def three_d_buffer(case: tuple[broken.Kernel, int, str], device: str) -> Reading:
    """Whether a launch with ``q_len`` query tokens writes past a buffer of (batch, heads, 512).

    The buffer of vLLM #37442 has three dimensions, the output of several query tokens four. A kernel
    that takes the sizes from the query and trusts the buffer writes ``q_len`` times its bytes. Here the
    buffer is the first part of a larger allocation with canaries, so no other tensor is overwritten.
    """
    (kernel, q_len, _), rows = case, 8
    call = scene.make_call(device, rows=rows, live=rows, tokens=20, q_len=q_len)
    slab = plant(call.q.new_empty(rows * (q_len + 1), call.q.shape[2], scene.KV_LORA_RANK), stage=6)
    try:
        kernel(*call, softmax_scale=scene.SCALE, out=slab[:rows])
    except ValueError as refusal:
        untouched = set(row_states(slab, stage=6)) == {"unwritten"}
        return reading("refused" if untouched else "refused too late", note=str(refusal))
    past = sum(state != "unwritten" for state in row_states(slab[rows:], stage=6))
    return reading("writes past its end" if past else "stays inside", rows_past_the_end=past, rows=rows)
