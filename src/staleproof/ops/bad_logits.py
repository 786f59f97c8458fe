"""Which rows of logits hold a NaN or +Inf, for ``STALEPROOF_CONTAIN`` (:mod:`staleproof.vllm.contain`)."""

from __future__ import annotations

import torch

from staleproof import device
from staleproof.ops.launching import Ready, Seen, key_of, launched

device.load_triton()

import triton
import triton.language as tl

# Logits of a program, and its warps.
PART, WARPS = 8192, 8


@triton.jit(do_not_specialize=["columns", "row_stride"])
def _bad_logits_kernel(logits, bad, columns, row_stride, PART: tl.constexpr):
    """Look at one part of one row: program (row, part)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * row_stride + column, mask=column < columns, other=0.0).to(tl.float32)
    found = (x != x) | (x == float("inf"))
    tl.store(bad + row * tl.num_programs(1) + part, tl.max(found.to(tl.int32), 0).to(tl.uint8))


_SEEN: Seen[Ready] = Seen()


def bad_logits(logits: torch.Tensor) -> torch.Tensor:
    """Find NaN and +Inf; -Inf is none, because masks are -Inf.

    It is one launch and no copy: a GPU writes the flags into pinned memory of the host. They are there when
    the kernel has run, and must be kept until then: freed before, the memory may be given out while it is
    written to. The host puts the parts of a row together, which it reads anyway.

    Args:
        logits: (rows, columns), a floating-point dtype, columns contiguous.

    Returns:
        (rows, parts) uint8 on the CPU; a row is bad if one of its parts is not 0.

    >>> bad_logits(torch.tensor([[1.0, -torch.inf], [torch.nan, 0.0], [torch.inf, 0.0]]))[:, 0]
    tensor([0, 1, 1], dtype=torch.uint8)
    """
    rows, columns = logits.shape
    parts = triton.cdiv(columns, PART)
    bad = torch.empty((rows, parts), dtype=torch.uint8, pin_memory=logits.is_cuda)
    if not rows:
        return bad
    key = key_of(logits)
    if (again := _SEEN.get(key)) is not None:
        again(logits.data_ptr(), bad.data_ptr())
        return bad
    sizes = columns, logits.stride(0), PART
    _SEEN.keep(key, launched(_bad_logits_kernel, (rows, parts), (logits, bad), sizes, num_warps=WARPS))
    return bad
