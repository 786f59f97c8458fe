"""Set the rows of empty requests to the empty sum behind any decode kernel."""

from __future__ import annotations

import torch

from staleproof import check, device

device.load_triton()

import triton
import triton.language as tl

# Best of a sweep on an H200: rows a program looks after, bytes it clears of each.
CLEAR_ROWS, CLEAR_BYTES, CLEAR_WARPS = 8, 32768, 4


@triton.jit
def _clear_empty_rows_kernel(
    out, lse, seq_lens, query_start_loc, rows, batch, q_len, heads, row_stride, row_size,
    RAGGED: tl.constexpr, HAS_LSE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    WHOLE: tl.constexpr, HEADS: tl.constexpr, OWNERS: tl.constexpr,
):  # fmt: skip
    """One slice of CHUNK elements of ROWS rows, which lie a grid apart from each other.

    Rows to clear stand together at the end of a padded batch, so neighbours go to different
    programs. A program without a row to clear reads ROWS lengths and leaves.
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
    # Rows behind the last request belong to nobody and read as empty.
    tokens = tl.load(seq_lens + owner, mask=(row < rows) & (owner < batch), other=0)
    empty = (row < rows) & (tokens <= 0)
    flags = tl.sum(empty.to(tl.int32) << lane, 0)
    if flags != 0:
        column = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
        while flags != 0:
            lowest = flags & -flags
            # The exponent of a power of two is its bit's index.
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
                    lse + target * heads + head,
                    tl.full([HEADS], -float("inf"), tl.float32),
                    mask=head < heads,
                )


def clear_empty_rows(
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    validate: bool = False,
) -> None:
    """Clear, in place, the output rows of requests without tokens, behind any decode kernel.

    Makes the result of a kernel that leaves such rows unwritten, or writes 0/0 there (vLLM
    #37442, #57017, FlashInfer #2883), what the empty sum is. Reads ``seq_lens`` on the device:
    no host sync, and safe to capture in a CUDA graph whose live count changes between replays.
    Rows of live requests are neither read nor written.

    Args:
        out: (rows, heads, dim) or (batch, q_len, heads, dim), of 1, 2 or 4 bytes an element;
            heads and dim contiguous, rows at any stride. Without ``query_start_loc``, ``rows`` is
            ``batch * q_len`` for some q_len.
        seq_lens: (batch,) int32, tokens of each request; 0 marks an empty one.
        lse: out's shape without its last axis, float32, contiguous; rows cleared become -inf.
        query_start_loc: (batch + 1,) int32, rising: request b owns rows query_start_loc[b] up to
            query_start_loc[b + 1]. For batches with different numbers of query tokens. Rows from
            query_start_loc[batch] on belong to no request and are cleared as well.
        validate: also check the values of ``seq_lens`` and ``query_start_loc``, which waits for
            the device. Without it a negative length counts as empty.

    Raises:
        ValueError: an argument does not fit; nothing was written.
    """
    check.tensor("out", out, ndim=(3, 4))
    check.require(out.element_size() in (1, 2, 4), "out", "1, 2 or 4 bytes an element", out.dtype)
    check.tensor("seq_lens", seq_lens, ndim=1, dtype=torch.int32, like=out, contiguous=True)
    batch = seq_lens.shape[0]
    check.require(batch > 0, "seq_lens", "at least one request", "an empty batch")
    check.require(out.numel() > 0, "out", "at least one element", f"shape {tuple(out.shape)}")
    shape = tuple(out.shape)
    heads, dim = shape[-2:]
    inner = out.stride()[-2:]
    check.require(
        inner[1] == 1 and (inner[0] == dim or heads == 1),
        "out",
        "contiguous heads and last axis",
        f"strides {out.stride()}",
    )
    if out.ndim == 4:
        check.require(shape[0] == batch, "out", f"{batch} requests, as in seq_lens", f"shape {shape}")
        check.require(
            out.stride(0) == shape[1] * out.stride(1) or 1 in shape[:2],
            "out",
            "the query tokens of consecutive requests at one stride",
            f"strides {out.stride()}",
        )
    rows = out.numel() // (heads * dim)
    row_stride = out.stride(-3) if shape[-3] > 1 else out.stride(0)
    if query_start_loc is None:
        check.require(rows % batch == 0, "out", f"a multiple of {batch} rows, as in seq_lens", f"{rows} rows")
    else:
        check.require(out.ndim == 3, "out", "(rows, heads, dim) with query_start_loc", f"shape {shape}")
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

    # Same-size integers: zero bits are zero in every dtype, FP8 included.
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[out.element_size()]
    chunk = CLEAR_BYTES // out.element_size()
    groups = triton.cdiv(rows, CLEAR_ROWS)
    _clear_empty_rows_kernel[(triton.cdiv(heads * dim, chunk), groups)](
        out.view(bits),
        lse,
        seq_lens,
        query_start_loc,
        rows,
        batch,
        max(rows // batch, 1),
        heads,
        row_stride,
        heads * dim,
        RAGGED=query_start_loc is not None,
        HAS_LSE=lse is not None,
        ROWS=CLEAR_ROWS,
        CHUNK=chunk,
        WHOLE=heads * dim % chunk == 0,
        HEADS=triton.next_power_of_2(heads),
        OWNERS=128,
        num_warps=CLEAR_WARPS,
    )
