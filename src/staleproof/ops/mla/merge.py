"""The second launch of an MLA decode: one result for each row whose keys were split among programs."""

from __future__ import annotations

from staleproof import device

device.load_triton()

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


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
def _nth_cut(cuts, number, group, groups, programs, PROGRAMS: tl.constexpr):
    """The cut request number ``number``, the first program with a part of it, and how many have a part.

    For each program, ``cuts`` has 1 + the request whose first part it wrote; -1 if it wrote only a part from
    the middle of a request; otherwise 0. The returned request is -1 if fewer requests were cut.
    """
    index = tl.arange(0, PROGRAMS)
    cut = tl.load(cuts + index * groups + group, mask=index < programs, other=0)
    is_first = cut > 0
    mine = is_first & (tl.cumsum(is_first.to(tl.int32), 0) == number + 1)
    # Program and request packed into one sum; a batch has up to 1,024 requests.
    found = tl.sum(tl.where(mine, index * 2048 + cut, 0), 0)
    first = found // 2048
    last = tl.min(tl.where((index > first) & (cut >= 0), index, PROGRAMS), 0)
    return found % 2048 - 1, first, last - first + 1


@triton.jit(do_not_specialize=["rows", "own", "heads", "capacity", "q_len", "programs", "splits"])
def merge_parts_kernel(
    parts, part_lse, cuts, seq_lens, out, lse, k_scale, rows, own, heads, capacity, q_len, programs, splits,
    RANK: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    PROGRAMS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Average the parts of ROWS rows of a request, weighted by their lse.

    Grid: (groups of ``own`` rows * columns / BLOCK, own / ROWS, requests that may have been cut). With
    PROGRAMS 0 the decode cut each request into ``splits``, or fewer if it has fewer tiles. Otherwise ``cuts``
    says which requests it cut, and PROGRAMS is ``programs`` rounded up to a power of two. Program p wrote the
    first part of its last request to slot 2 p + 1, and other parts to 2 p. A slot has ROOM rows.
    """
    blocks: tl.constexpr = RANK // BLOCK
    groups = tl.num_programs(0) // blocks
    group = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    line = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = (line < own) & (group * own + line < rows)
    request = tl.program_id(2)
    if PROGRAMS == 0:
        # From the length, while the decode still runs. The limit is that of the group's last query token.
        unseen = (tl.minimum((group + 1) * own, rows) - 1) // heads + 1 - q_len
        limit = tl.minimum(tl.load(seq_lens + request), capacity) + unseen
        first, count = request * splits, tl.minimum(tl.maximum(tl.cdiv(limit, 64), 1), splits)
    if not INTERPRET:
        gdc_wait()
    if PROGRAMS > 0:
        request, first, count = _nth_cut(cuts, request, group, groups, programs, PROGRAMS)
        count = tl.where(request < 0, 0, count)
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
