"""Counting rows of expert ids that name an expert twice, inside a CUDA graph."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from staleproof import check, device

device.load_triton()

import triton
import triton.language as tl

_ROWS = 32


@triton.jit
def _count_repeats_kernel(
    ids_ptr, live_ptr, counts_ptr, rows, stride, top_k, ROWS: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.arange(0, K)
    in_range = (row < rows)[:, None] & (slot < top_k)[None, :]
    ids = tl.load(ids_ptr + row[:, None] * stride + slot[None, :], mask=in_range, other=-1)
    # -1 is no expert: it stands where there is no slot or row, and for experts of other ranks.
    pair = slot[:, None] < slot[None, :]
    same = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None] & pair[None, :, :]
    twice = tl.sum(tl.sum(same.to(tl.int32), axis=2), axis=1) > 0
    live = tl.load(live_ptr + row, mask=row < rows, other=0) != 0
    tl.atomic_add(counts_ptr, tl.sum((twice & (live == 0)).to(tl.int64), axis=0))
    tl.atomic_add(counts_ptr + 1, tl.sum((twice & live).to(tl.int64), axis=0))


def count_repeats(ids: torch.Tensor, live: torch.Tensor, counts: torch.Tensor) -> None:
    """Add the rows that name an expert twice to ``counts``, apart for padding and live rows.

    It only launches work on the device, so it can be captured.

    Args:
        ids: (rows, top_k), int32 or int64, last axis contiguous, top_k at most 32. A negative id is no
            expert.
        live: (rows,), any integer type or bool; not 0 for a live row.
        counts: (2,) int64: padding rows, live rows.

    Raises:
        ValueError: a tensor of wrong dtype, device, layout or length; nothing was counted.

    >>> counts = torch.zeros(2, dtype=torch.int64)
    >>> count_repeats(torch.tensor([[0, 1], [2, 2], [3, 3]]), torch.tensor([1, 1, 0]), counts)
    >>> counts
    tensor([1, 1])
    """
    check.tensor("counts", counts, shape=(2,), dtype=torch.int64, contiguous=True)
    check.tensor("ids", ids, ndim=2, dtype=(torch.int32, torch.int64), like=counts)
    check.tensor("live", live, shape=(ids.shape[0],), like=counts, contiguous=True)
    rows, top_k = ids.shape
    check.require(0 < top_k <= 32 and ids.stride(1) == 1, "ids", "1 to 32 ids a row, contiguous", ids.shape)
    with torch.cuda.device(ids.device) if ids.device.type == "cuda" else nullcontext():
        _count_repeats_kernel[(triton.cdiv(rows, _ROWS),)](
            ids, live, counts, rows, ids.stride(0), top_k, ROWS=_ROWS, K=triton.next_power_of_2(top_k)
        )
