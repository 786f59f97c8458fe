"""Clearing the rows of empty requests, behind any decode kernel (incident 1)."""

from __future__ import annotations

import torch

from staleproof import check, device
from staleproof.ops.launching import Ready, Seen, address, key_of, launched
from staleproof.ops.operators import operator, require_values

device.load_triton()

import triton
import triton.language as tl

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


_SEEN: Seen[Ready] = Seen()


@operator("clear_empty_rows(Tensor(a!) out, Tensor seq_lens, Tensor? query_start_loc, Tensor(b!)? lse) -> ()")
def _launch(
    out: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor | None, lse: torch.Tensor | None
) -> Ready | None:
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
    return launched(_clear_empty_rows_kernel, grid, tensors, sizes, num_warps=CLEAR_WARPS)


def clear_empty_rows(
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    validate: bool = False,
) -> None:
    """Set the output rows of empty requests to 0 and their lse to -inf, in place.

    Call it behind a decode kernel that leaves these rows unwritten or writes 0/0 there (vLLM
    #37442, #57017, FlashInfer #2883). Rows of live requests are neither read nor written.
    ``seq_lens`` is read on the device, so there is no host sync, and a captured CUDA graph stays
    right when the number of live requests changes between replays.

    Args:
        out: (rows, heads, dim) or (batch, q_len, heads, dim), of 1, 2 or 4 bytes an element;
            heads and dim contiguous, rows at any stride. Without ``query_start_loc``, ``rows`` is
            ``batch * q_len`` for some q_len.
        seq_lens: (batch,) int32, tokens of each request; 0 marks an empty one.
        lse: out's shape without its last axis, float32, contiguous.
        query_start_loc: (batch + 1,) int32, rising: request b owns rows query_start_loc[b] up to
            query_start_loc[b + 1]. For batches with different numbers of query tokens. Rows from
            query_start_loc[batch] on belong to no request and are cleared as well.
        validate: also check the values of ``seq_lens`` and ``query_start_loc``, which waits for
            the device; for tests and notebooks. Without it a negative length counts as empty.

    Raises:
        ValueError: an argument does not fit; nothing was written.

    >>> out = torch.full((3, 1, 2), torch.nan)
    >>> clear_empty_rows(out, torch.tensor([7, 0, 0], dtype=torch.int32))
    >>> out[:, 0]
    tensor([[nan, nan],
            [0., 0.],
            [0., 0.]])
    """
    key = key_of(out, seq_lens, lse, query_start_loc)
    if not validate and (again := _SEEN.get(key)) is not None:
        return again(out.data_ptr(), address(lse), seq_lens.data_ptr(), address(query_start_loc))
    check.tensor("out", out, ndim=(3, 4))
    check.tensor("seq_lens", seq_lens, ndim=1, dtype=torch.int32, like=out, contiguous=True)
    shape, strides, batch = out.shape, out.stride(), seq_lens.shape[0]
    heads, dim = shape[-2:]
    rows = shape[0] if out.ndim == 3 else shape[0] * shape[1]
    if out.element_size() not in (1, 2, 4):
        check.fail("out", "1, 2 or 4 bytes an element", out.dtype)
    if batch == 0:
        check.fail("seq_lens", "at least one request", "an empty batch")
    if rows == 0 or heads == 0 or dim == 0:
        check.fail("out", "at least one element", f"shape {tuple(shape)}")
    if strides[-1] != 1 or (strides[-2] != dim and heads != 1):
        check.fail("out", "contiguous heads and last axis", f"strides {strides}")
    if out.ndim == 4:
        if shape[0] != batch:
            check.fail("out", f"{batch} requests, as in seq_lens", f"shape {tuple(shape)}")
        if strides[0] != shape[1] * strides[1] and shape[0] != 1 and shape[1] != 1:
            expected = "the query tokens of consecutive requests at one stride"
            check.fail("out", expected, f"strides {strides}")
    if query_start_loc is None:
        if rows % batch != 0:
            check.fail("out", f"a multiple of {batch} rows, as in seq_lens", f"{rows} rows")
    else:
        if out.ndim != 3:
            check.fail("out", "(rows, heads, dim) with query_start_loc", f"shape {tuple(shape)}")
        check.tensor(
            "query_start_loc",
            query_start_loc,
            shape=(batch + 1,),
            dtype=torch.int32,
            like=out,
            contiguous=True,
        )
    if lse is not None:
        check.tensor("lse", lse, shape=shape[:-1], dtype=torch.float32, like=out, contiguous=True)
    if validate:
        require_values(out)
        for request, length in enumerate(seq_lens.tolist()):
            check.require(length >= 0, f"seq_lens[{request}]", "a length of at least 0", length)
        if query_start_loc is not None:
            starts = query_start_loc.tolist()
            check.require(
                starts[0] == 0 and starts == sorted(starts) and starts[-1] <= rows,
                "query_start_loc",
                f"0, rising, at most {rows} rows",
                starts,
            )
    _SEEN.keep(key, _launch(out, seq_lens, query_start_loc, lse))
