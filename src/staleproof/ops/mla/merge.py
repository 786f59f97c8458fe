"""The second launch of an MLA decode: one result for each row whose keys were split among programs."""

from __future__ import annotations

from staleproof import device
from staleproof.ops.mla.plan import REQUEST_COST

device.load_triton()

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

COST = tl.constexpr(REQUEST_COST)


@triton.jit
def merge_splits_kernel(
    parts, part_lse, out, lse, splits,
    RANK: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Average the splits of one row, weighted by their lse; SPLITS: ``splits`` up to a power of 2."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS)
    logs = tl.load(part_lse + row * splits + split, mask=split < splits, other=-float("inf"))
    peak = tl.max(tl.where(logs == logs, logs, -float("inf")), 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    weights = tl.exp(logs - base)
    total = tl.sum(weights, 0)
    # A split without keys has weight zero, so its values need not be read.
    wanted = logs != -float("inf")
    values = tl.load(
        parts + (row * splits + split)[:, None] * RANK + column[None, :], mask=wanted[:, None], other=0.0
    )
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    result = tl.sum(values * weights[:, None], 0) / safe
    tl.store(out + row * RANK + column, tl.where(empty, 0.0, result).to(out.dtype.element_ty))
    if tl.program_id(1) == 0:
        tl.store(lse + row, tl.where(empty, -float("inf"), base + tl.log(safe)))


@triton.jit
def _program_of(unit, whole, programs):
    """The program of the decode whose equal part of all tiles holds this one."""
    return (((unit + 1) * programs - 1) // whole).to(tl.int32)


@triton.jit
def _splits_of(request, tiles, splits):
    """The first program of the decode that has a split of this request, and how many have one."""
    return request * splits, tl.minimum(tiles, splits)


@triton.jit(do_not_specialize=["rows", "own", "heads", "capacity", "q_len", "batch", "programs", "aligned"])
def merge_parts_kernel(
    parts, part_lse, seq_lens, out, lse, k_scale, rows, own, heads, capacity, q_len, batch, programs, aligned,
    RANK: tl.constexpr, ROOM: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, BATCH: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Average the parts of ROWS rows of a request, weighted by their lse, unless it has one part.

    Grid: (groups of ``own`` rows * columns / BLOCK, own / ROWS, batch). ``programs`` of the decode share
    the tiles, or with BATCH 0 each request has ``aligned`` splits. Program p wrote the first part of its
    last request to slot 2 p + 1, and other parts to 2 p. A slot has ROOM rows.
    """
    blocks: tl.constexpr = RANK // BLOCK
    groups = tl.num_programs(0) // blocks
    group = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    line = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = (line < own) & (group * own + line < rows)
    request = tl.program_id(2)
    # Where the decode cut, once more from the lengths: while it still runs, and without waiting for what it
    # would have to store and this would have to load. The limit is that of the group's last query token.
    unseen = (tl.minimum((group + 1) * own, rows) - 1) // heads + 1 - q_len
    if BATCH == 0:
        limit = tl.minimum(tl.load(seq_lens + request), capacity) + unseen
        first, count = _splits_of(request, tl.maximum(tl.cdiv(limit, 64), 1), aligned)
    else:
        index = tl.arange(0, BATCH)
        seq_len = tl.load(seq_lens + index, mask=index < batch, other=0)
        limit = tl.maximum(tl.minimum(seq_len, capacity) + unseen, 0)
        units = tl.where(index < batch, tl.maximum(tl.cdiv(limit, 64), 1) + COST, 0)
        most = tl.max(units, 0)
        is_even = tl.min(tl.where(index < batch, units, most), 0) == most
        # What hopper.pays_off says.
        is_aligned = is_even & (tl.cdiv(batch * most, aligned) <= tl.cdiv(batch * most, programs) + COST)
        if is_aligned & (aligned >= batch):
            first, count = _splits_of(request, most - COST, aligned // batch)
        else:
            whole = tl.sum(units, 0).to(tl.int64)
            end = tl.sum(tl.where(index <= request, units, 0), 0).to(tl.int64)
            begin = tl.sum(tl.where(index < request, units, 0), 0).to(tl.int64)
            parted = tl.minimum(whole, tl.where(is_aligned, aligned, programs))
            first = _program_of(begin + COST, whole, parted)
            count = _program_of(end - 1, whole, parted) - first + 1
    if not INTERPRET:
        gdc_wait()
    if count > 1:
        peak = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK], tl.float32)
        for step in range(0, count, STEP):
            part = step + tl.arange(0, STEP)
            slot = 2 * ((first + part) * groups + group) + (part == 0).to(tl.int32)
            where = slot.to(tl.int64)[None, :] * ROOM + line[:, None]
            known = (part < count)[None, :] & is_row[:, None]
            values = tl.load(
                parts + where[:, :, None] * RANK + column[None, None, :], mask=known[:, :, None], other=0.0
            )
            logs = tl.load(part_lse + where, mask=known, other=-float("inf"))
            new_peak = tl.maximum(peak, tl.max(tl.where(logs == logs, logs, -float("inf")), 1))
            base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
            # A part without keys has weight zero, and zeros as values.
            weights = tl.exp(logs - base[:, None])
            decay = tl.exp(peak - base)
            peak = new_peak
            total = total * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None] + tl.sum(values.to(tl.float32) * weights[:, :, None], 1)
        empty = total == 0.0
        safe = tl.where(empty, 1.0, total)
        target = request.to(tl.int64) * rows + group * own + line
        result = tl.where(empty[:, None], 0.0, acc * (k_scale / safe)[:, None])
        place = out + target[:, None] * RANK + column[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=is_row[:, None])
        if tl.program_id(0) % blocks == 0:
            tl.store(lse + target, tl.where(empty, -float("inf"), peak + tl.log(safe)), mask=is_row)
