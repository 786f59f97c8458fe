"""The second launch of an MLA decode of equal parts: one result for each request that was cut."""

from __future__ import annotations

from staleproof import device

device.load_triton()

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit(do_not_specialize=["rows"])
def merge_parts_kernel(
    parts, part_lse, cuts, out, lse, rows,
    RANK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Average the parts of ROWS rows of a request, weighted by their lse, unless it has one part.

    Grid: (groups of 64 rows * columns / BLOCK, 64 / ROWS, batch). ``cuts`` holds for each request and
    group the first of the decode's programs that has a part of it, and the number of parts. Program p
    wrote the first part of its last request to slot 2 p + 1, and other parts to 2 p.
    """
    blocks: tl.constexpr = RANK // BLOCK
    groups = tl.num_programs(0) // blocks
    group = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    line = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = group * 64 + line < rows
    request = tl.program_id(2).to(tl.int64)
    gdc_wait()
    first = tl.load(cuts + 2 * (request * groups + group))
    count = tl.load(cuts + 2 * (request * groups + group) + 1)
    if count > 1:
        peak = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, BLOCK], tl.float32)
        for begin in range(0, count, STEP):
            part = begin + tl.arange(0, STEP)
            slot = 2 * ((first + part) * groups + group) + (part == 0).to(tl.int32)
            where = slot.to(tl.int64)[None, :] * 64 + line[:, None]
            logs = tl.load(part_lse + where, mask=(part < count)[None, :], other=-float("inf"))
            new_peak = tl.maximum(peak, tl.max(tl.where(logs == logs, logs, -float("inf")), 1))
            base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
            weights = tl.exp(logs - base[:, None])
            decay = tl.exp(peak - base)
            peak = new_peak
            total = total * decay + tl.sum(weights, 1)
            # A part without keys has weight zero, so its values need not be read.
            wanted = (logs != -float("inf"))[:, :, None]
            values = tl.load(parts + where[:, :, None] * RANK + column[None, None, :], mask=wanted, other=0.0)
            acc = acc * decay[:, None] + tl.sum(values * weights[:, :, None], 1)
        empty = total == 0.0
        safe = tl.where(empty, 1.0, total)
        target = request * rows + group * 64 + line
        result = tl.where(empty[:, None], 0.0, acc / safe[:, None])
        place = out + target[:, None] * RANK + column[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=is_row[:, None])
        if tl.program_id(0) % blocks == 0:
            tl.store(lse + target, tl.where(empty, -float("inf"), peak + tl.log(safe)), mask=is_row)
