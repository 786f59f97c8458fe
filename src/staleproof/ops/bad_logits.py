"""Which rows of logits hold a NaN or +Inf, for ``STALEPROOF_CONTAIN`` (:mod:`staleproof.vllm.contain`)."""

from __future__ import annotations

import torch

from staleproof import check, device
from staleproof.ops.launching import Ready, Seen, key_of, launched

device.load_triton()

import triton
import triton.language as tl

# Logits of a program, and its warps.
PART, WARPS = 8192, 8


@triton.jit(do_not_specialize=["columns", "row_stride"], do_not_specialize_on_alignment=["flags"])
def _bad_logits_kernel(logits, flags, columns, row_stride, PART: tl.constexpr):
    """Look at one part of one row: program (row, part)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * row_stride + column, mask=column < columns, other=0.0).to(tl.float32)
    found = (x != x) | (x == float("inf"))
    tl.store(flags + row * tl.num_programs(1) + part, tl.max(found.to(tl.int32), 0).to(tl.uint8))


_SEEN: Seen[Ready] = Seen()


def parts_of(columns: int) -> int:
    """How many programs look at a row, each at one part of it.

    >>> parts_of(PART), parts_of(PART + 1)
    (1, 2)
    """
    return -(-columns // PART)


def find_bad_logits(logits: torch.Tensor, flags: torch.Tensor) -> None:
    """Find NaN and +Inf; -Inf is none, because masks are -Inf. It is one launch.

    Args:
        logits: (rows, columns), a floating-point dtype, columns contiguous.
        flags: uint8, contiguous, ``rows * parts_of(columns)`` or more. It gets a flag for each part of
            each row: 1 if there is one, otherwise 0; what is behind stays. It is on the device of
            ``logits``, or it is pinned memory of the host, and then no copy is needed. It must be kept until
            the kernel has run.

    Raises:
        ValueError: fewer flags than parts.

    >>> flags = torch.empty(3, dtype=torch.uint8)
    >>> find_bad_logits(torch.tensor([[1.0, -torch.inf], [torch.nan, 0.0], [torch.inf, 0.0]]), flags)
    >>> flags
    tensor([0, 1, 1], dtype=torch.uint8)
    """
    rows, columns = logits.shape
    parts = parts_of(columns)
    if flags.numel() < rows * parts:
        check.fail("flags", f"{rows * parts} or more", flags.numel())
    if not rows:
        return
    key = key_of(logits)
    if (again := _SEEN.get(key)) is not None:
        again(logits.data_ptr(), flags.data_ptr())
        return
    sizes = columns, logits.stride(0), PART
    _SEEN.keep(key, launched(_bad_logits_kernel, (rows, parts), (logits, flags), sizes, num_warps=WARPS))
