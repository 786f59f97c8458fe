"""The second launch of a decode whose requests' keys are split: one result out of the partial ones."""

from __future__ import annotations

from staleproof import device

device.load_triton()

import triton
import triton.language as tl


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
