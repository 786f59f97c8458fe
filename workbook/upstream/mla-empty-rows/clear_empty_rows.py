# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Clears the decode output of requests without tokens (CUDA graph padding)."""

import torch

from vllm.triton_utils import tl, triton

# Rows of a program, bytes that it clears of each row, and warps: the fastest of a sweep on an H200.
CLEAR_ROWS, CLEAR_BYTES, CLEAR_WARPS = 8, 32768, 4


# Not specialised on numbers that change from step to step: no step should compile.
@triton.jit(do_not_specialize=["rows", "batch"])
def _clear_empty_rows_kernel(
    out, lse, seq_lens, query_start_loc, rows, batch, q_len, heads, row_stride, lse_stride, row_size,
    RAGGED: tl.constexpr, HAS_LSE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    WHOLE: tl.constexpr, HEADS: tl.constexpr, OWNERS: tl.constexpr,
):  # fmt: skip
    """Clear one slice of CHUNK elements in those of ROWS rows that are empty.

    The rows of a program are ``num_programs(1)`` apart. The empty rows of a padded batch are
    adjacent, at its end, and this spreads them over all programs. A program without an empty row
    reads ROWS lengths and returns.
    """
    groups = tl.num_programs(1)
    lane = tl.arange(0, ROWS)
    row = lane * groups + tl.program_id(1)
    if RAGGED:
        # The owner of a row is the number of requests that end at or before it.
        owner = tl.zeros([ROWS], tl.int32)
        for first in tl.range(0, batch, OWNERS):
            request = first + tl.arange(0, OWNERS)
            ends = tl.load(query_start_loc + 1 + request, mask=request < batch, other=2147483647)
            owner += tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)
    else:
        owner = row // q_len
    # Rows after the last request belong to no request; their length reads as 0, so they are cleared.
    tokens = tl.load(seq_lens + owner, mask=(row < rows) & (owner < batch), other=0)
    empty = (row < rows) & (tokens <= 0)
    flags = tl.sum(empty.to(tl.int32) << lane, 0)
    if flags != 0:
        column = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        while flags != 0:
            lowest = flags & -flags
            # The index of the lowest set bit: the exponent of that power of two as a float32.
            index = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            flags ^= lowest
            target = (index * groups + tl.program_id(1)).to(tl.int64)
            tl.store(
                out + target * row_stride + column,
                tl.zeros([CHUNK], out.dtype.element_ty),
                mask=(column < row_size) | WHOLE,
                cache_modifier=".cs",
            )
            if HAS_LSE and tl.program_id(0) == 0:
                head = tl.arange(0, HEADS)
                tl.store(
                    lse + target * lse_stride + head,
                    tl.full([HEADS], -float("inf"), tl.float32),
                    mask=head < heads,
                )


def _launch(
    out: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor | None, lse: torch.Tensor | None
) -> None:
    *_, heads, dim = out.shape
    row_size = heads * dim
    rows = out.numel() // row_size
    batch = seq_lens.shape[0]
    # Integers of the same size: 0 is the same bits in every dtype, FP8 included.
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.element_size()]
    chunk = CLEAR_BYTES // out.element_size()
    # The stride of an axis with one element is arbitrary.
    many = out.shape[-3] > 1
    sizes = (
        rows,
        batch,
        max(rows // batch, 1),
        heads,
        out.stride(-3 if many else 0),
        0 if lse is None else lse.stride(-2 if many else 0),
        row_size,
        query_start_loc is not None,
        lse is not None,
        CLEAR_ROWS,
        chunk,
        row_size % chunk == 0,
        triton.next_power_of_2(heads),
        128,
    )
    grid = triton.cdiv(row_size, chunk), triton.cdiv(rows, CLEAR_ROWS)
    tensors = out.view(bits), lse, seq_lens, query_start_loc
    _clear_empty_rows_kernel[grid](*tensors, *sizes, num_warps=CLEAR_WARPS)


def clear_empty_rows(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor | None = None,
) -> None:
    """Sets the rows of requests with ``seq_lens == 0`` to 0, their lse to -inf.

    A padded decode batch has such requests, and the kernels leave their rows as they were. The lengths are
    read on the device, so a captured graph follows them.

    Args:
        out: [num_tokens, num_heads, head_dim], of 1, 2 or 4 bytes an element; heads side by side.
        lse: [num_tokens, num_heads] float32, or None; heads side by side.
        seq_lens: [num_reqs] int32
        query_start_loc: [num_reqs + 1] int32 where requests have different numbers of query tokens. Rows
            behind the last request are cleared as well.
    """
    if out.numel() > 0:
        _launch(out, seq_lens, query_start_loc, lse)
