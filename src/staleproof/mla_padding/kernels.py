"""The fix of incident 1: MLA decode, its cleaner and its consumer, each right about padding rows.

Upstream's decode kernels leave the output row of an empty request unwritten (CUTLASS and
TensorRT-LLM MLA, vLLM #37442) or write 0/0 into it (Triton MLA, vLLM #57017). Three places can
cure that, and each is here: the kernel itself, a pass behind somebody else's kernel, and the
quantiser that lets the row of one request reach another.
"""

from __future__ import annotations

from functools import cache

import torch

from staleproof import check, device

device.load_triton()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

INTERPRET = device.interpreting()
E4M3_MAX = 448.0
# A scale below the smallest normal number would have no finite reciprocal.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Best of a sweep on an H200: rows a program looks after, bytes it clears of each.
CLEAR_ROWS, CLEAR_BYTES, CLEAR_WARPS = 8, 32768, 4


@triton.jit
def _kv_pointers(
    kv_cache, table, position, limit, page_stride, token_stride,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Addresses of BLOCK_N tokens from ``position`` on; no table entry past ``limit`` is read."""
    token = position + tl.arange(0, BLOCK_N)
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table + position // PAGE_SIZE)
        slot = tl.cast(position % PAGE_SIZE, tl.int64) + tl.arange(0, BLOCK_N)
        return kv_cache + page.to(tl.int64) * page_stride + slot * token_stride
    else:
        page = tl.load(table + token // PAGE_SIZE, mask=token < limit, other=0)
        slot = (token % PAGE_SIZE).to(tl.int64)
        return kv_cache + page.to(tl.int64) * page_stride + slot * token_stride


@triton.jit
def _attend(
    q_c, q_r, k_c, k_r, live, peak, total, acc, scale_log2,
    MASKED: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One online softmax step over a block of keys; ``live`` (rows, keys) counts where MASKED."""
    scores = tl.dot(q_c, tl.trans(k_c), input_precision="ieee")
    scores = tl.dot(q_r, tl.trans(k_r), scores, input_precision="ieee") * scale_log2
    if MASKED:
        scores = tl.where(live, scores, -float("inf"))
    # A live NaN must not decide the peak: Triton's versions disagree on the maximum of a NaN.
    # It still reaches the sums below, and so the output.
    known = tl.where(scores == scores, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(known, 1))
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    if INTERPRET:
        # The values came as bfloat16 or float16 and were widened for the interpreter (see below).
        acc = tl.dot(weights, k_c, acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(k_c.dtype), k_c, acc, input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def _widen(x, INTERPRET: tl.constexpr):
    """Operands for a dot: the interpreter multiplies bfloat16 as if its bits were integers."""
    if INTERPRET:
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def _mla_decode_kernel(
    q, kv_cache, block_table, seq_lens, out, lse,
    q_batch_stride, q_token_stride, q_head_stride, page_stride, token_stride, table_stride,
    softmax_scale, k_scale, capacity, q_len, heads,
    SPECULATIVE: tl.constexpr, SPLITS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows (query token, head) of one request over one split of its keys.

    Writes the normalised output of its split and the split's lse; with one split that is the
    result. Every program writes its rows, also where its range of keys is empty.
    """
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // heads
    is_row = row < q_len * heads
    first_token = (tl.program_id(0) * BLOCK_M) // heads
    last_token = tl.minimum((tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // heads, q_len - 1)

    # A length past the table's reach would have the kernel read past the table.
    seq_len = tl.minimum(tl.load(seq_lens + request), capacity)
    first_limit = tl.maximum(seq_len - q_len + first_token + 1, 0)
    last_limit = tl.maximum(seq_len - q_len + last_token + 1, 0)
    span = tl.cdiv(tl.cdiv(last_limit, BLOCK_N), SPLITS) * BLOCK_N
    begin = split * span
    end = tl.minimum(begin + span, last_limit)
    # Blocks before `full` lie below the limit of every row here and need no mask.
    full = tl.minimum(end, first_limit // BLOCK_N * BLOCK_N)

    column = tl.arange(0, RANK)
    rope_column = RANK + tl.arange(0, ROPE)
    q_row = (
        q + request * q_batch_stride
        + token.to(tl.int64) * q_token_stride + (row % heads).to(tl.int64) * q_head_stride
    )  # fmt: skip
    wanted = row < tl.where(begin < end, q_len * heads, 0)
    q_c = tl.load(q_row[:, None] + column[None, :], mask=wanted[:, None], other=0.0)
    q_r = tl.load(q_row[:, None] + rope_column[None, :], mask=wanted[:, None], other=0.0)
    q_c = _widen(q_c, INTERPRET)
    q_r = _widen(q_r, INTERPRET)

    table = block_table + request * table_stride
    scale_log2 = softmax_scale * k_scale * 1.4426950408889634
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, RANK], tl.float32)

    for position in tl.range(begin, full, BLOCK_N):
        k_row = _kv_pointers(
            kv_cache, table, position, full, page_stride, token_stride, PAGE_SIZE, BLOCK_N
        )
        k_c = _widen(tl.load(k_row[:, None] + column[None, :]), INTERPRET)
        k_r = _widen(tl.load(k_row[:, None] + rope_column[None, :]), INTERPRET)
        peak, total, acc = _attend(
            q_c, q_r, k_c, k_r, is_row, peak, total, acc, scale_log2, False, INTERPRET
        )

    # The tail, one query token at a time: a key beyond a token's limit is loaded as zero, because
    # a weight of zero does not cure it (0 * NaN is NaN).
    for tail_token in tl.range(first_token, last_token + 1):
        limit = tl.minimum(end, seq_len - q_len + tail_token + 1)
        for position in tl.range(tl.maximum(begin, full), limit, BLOCK_N, num_stages=1):
            k_row = _kv_pointers(
                kv_cache, table, position, limit, page_stride, token_stride, PAGE_SIZE, BLOCK_N
            )
            in_range = position + tl.arange(0, BLOCK_N) < limit
            k_c = tl.load(k_row[:, None] + column[None, :], mask=in_range[:, None], other=0.0)
            k_r = tl.load(k_row[:, None] + rope_column[None, :], mask=in_range[:, None], other=0.0)
            live = in_range[None, :] & (token == tail_token)[:, None]
            peak, total, new_acc = _attend(
                q_c, q_r, _widen(k_c, INTERPRET), _widen(k_r, INTERPRET), live,
                peak, total, acc, scale_log2, True, INTERPRET,
            )  # fmt: skip
            if SPECULATIVE:
                # The dot ran over the rows of the other tokens too, and 0 * NaN is NaN.
                new_acc = tl.where((token == tail_token)[:, None], new_acc, acc)
            acc = new_acc

    empty = total == 0.0
    result = acc * (k_scale / tl.where(empty, 1.0, total))[:, None]
    result = tl.where(empty[:, None], 0.0, result)
    log_sum = tl.where(
        empty, -float("inf"), peak * 0.6931471805599453 + tl.log(tl.where(empty, 1.0, total))
    )
    slot = (request * (q_len * heads) + row) * SPLITS + split
    tl.store(
        out + slot[:, None] * RANK + column[None, :],
        result.to(out.dtype.element_ty),
        mask=is_row[:, None],
    )
    tl.store(lse + slot, log_sum, mask=is_row)


@triton.jit
def _merge_splits_kernel(
    parts, part_lse, out, lse, splits,
    RANK: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Weigh the splits of one row by their lse; SPLITS is ``splits`` rounded up to a power of 2."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS)
    logs = tl.load(part_lse + row * splits + split, mask=split < splits, other=-float("inf"))
    peak = tl.max(tl.where(logs == logs, logs, -float("inf")), 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    weights = tl.exp(logs - base)
    total = tl.sum(weights, 0)
    # Splits without keys hold nothing worth reading.
    wanted = logs != -float("inf")
    values = tl.load(
        parts + (row * splits + split)[:, None] * RANK + column[None, :],
        mask=wanted[:, None],
        other=0.0,
    )
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    result = tl.sum(values * weights[:, None], 0) / safe
    tl.store(out + row * RANK + column, tl.where(empty, 0.0, result).to(out.dtype.element_ty))
    if tl.program_id(1) == 0:
        tl.store(lse + row, tl.where(empty, -float("inf"), base + tl.log(safe)))


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


@triton.jit
def _row_is_live(row, rows, live_rows, live_count, LIVE: tl.constexpr):
    if LIVE == "mask":
        return tl.load(live_rows + row) != 0
    else:
        return row < live_count


@triton.jit
def _amax_kernel(
    x, live_rows, live_count, partial, rows, hidden, row_stride,
    LIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of the live rows, one partial result a program.

    Magnitudes are compared as the integers their bits spell: same order, and every NaN is above
    infinity, so that no version of Triton can lose one.
    """
    if LIVE == "tensor":
        live_count = tl.minimum(tl.load(live_rows), rows)
    slices = tl.cdiv(hidden, BLOCK)
    bits = tl.zeros([BLOCK], tl.int32)
    for tile in tl.range(tl.program_id(0), live_count * slices, tl.num_programs(0)):
        row = tile // slices
        if _row_is_live(row, rows, live_rows, live_count, LIVE):
            column = (tile % slices) * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(
                x + row.to(tl.int64) * row_stride + column, mask=column < hidden, other=0.0
            )
            magnitude = values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            bits = tl.maximum(bits, magnitude)
    tl.store(partial + tl.program_id(0), tl.max(bits, 0))


@triton.jit
def _encode_e4m3(x):
    """The byte of the E4M3 number nearest to ``x`` (|x| <= 448, or NaN), ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # Exponents are biased by 7 there and by 127 here; below 2**-6 numbers are 2**-9 apart, and
    # adding 2**14 leaves no finer bit.
    normal = rounded - (120 << 3)
    shifted = tl.where(x < 0, -x, x) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _quantize_kernel(
    x, live_rows, live_count, partial, programs, x_fp8, scale, rows, hidden, row_stride,
    smallest_scale,
    LIVE: tl.constexpr, BLOCK: tl.constexpr, PARTIALS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    if LIVE == "tensor":
        live_count = tl.minimum(tl.load(live_rows), rows)
    index = tl.arange(0, PARTIALS)
    amax = tl.max(tl.load(partial + index, mask=index < programs, other=0), 0).to(
        tl.float32, bitcast=True
    )
    factor = tl.div_rn(amax, 448.0)
    factor = tl.where(factor < smallest_scale, smallest_scale, factor)
    factor = tl.where(amax == 0.0, 1.0, factor)
    inverse = tl.div_rn(1.0, factor)
    if tl.program_id(0) == 0:
        tl.store(scale, factor)
    slices = tl.cdiv(hidden, BLOCK)
    for tile in tl.range(tl.program_id(0), rows * slices, tl.num_programs(0)):
        row = tile // slices
        column = (tile % slices) * BLOCK + tl.arange(0, BLOCK)
        target = x_fp8 + row.to(tl.int64) * hidden + column
        if _row_is_live(row, rows, live_rows, live_count, LIVE):
            values = tl.load(
                x + row.to(tl.int64) * row_stride + column, mask=column < hidden, other=0.0
            )
            scaled = values.to(tl.float32) * inverse
            # Comparisons, not clamp: a NaN passes both and stays visible.
            scaled = tl.where(scaled > 448.0, 448.0, scaled)
            scaled = tl.where(scaled < -448.0, -448.0, scaled)
            if INTERPRET:
                # The interpreter's cast drops the carry into the exponent, and NaN.
                codes = _encode_e4m3(scaled)
            else:
                codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            tl.store(target, codes, mask=column < hidden)
        else:
            tl.store(target, tl.zeros([BLOCK], tl.uint8), mask=column < hidden)


@cache
def _gpu(index: int) -> tuple[int, tuple[int, int]]:
    """(multiprocessors, compute capability) of a CUDA device."""
    found = torch.cuda.get_device_properties(index)
    return found.multi_processor_count, (found.major, found.minor)


def _plan(q: torch.Tensor, rows: int, capacity: int) -> tuple[int, int, int, dict[str, int]]:
    """(rows and keys of a program, splits, launch options), from shapes alone.

    No length is read back, so ``capacity`` stands for all of them. Tiles measured on an H200:
    wide ones read the cache less often, narrow ones spread a small batch over the processors.
    """
    if q.element_size() == 4:
        block_m, block_n, options = 16, 16, {"num_warps": 4, "num_stages": 2}
    else:
        block_m, block_n, options = 16, 64, {"num_warps": 4, "num_stages": 2}
    processors = _gpu(q.device.index)[0] if q.is_cuda else 1
    batch, blocks = q.shape[0], triton.cdiv(capacity, block_n)
    narrow = batch * triton.cdiv(rows, block_m)
    if q.element_size() == 2 and narrow * blocks > 8 * processors:
        if rows > 32:
            block_m, options = 64, {"num_warps": 8, "num_stages": 2}
        elif rows > 16:
            block_m = 32
    programs = batch * triton.cdiv(rows, block_m)
    return block_m, block_n, max(1, min(processors // programs, blocks)), options


def _fits_sm90(q: torch.Tensor, kv_cache: torch.Tensor, rank: int, q_len: int) -> bool:
    """Whether the kernel written for Hopper takes this call: its shape, and 16-byte loads."""
    return (
        q.is_cuda
        and _gpu(q.device.index)[1] == (9, 0)
        and q.element_size() == 2
        and (rank, q.shape[-1]) == (512, 576)
        and kv_cache.shape[1] % 64 == 0
        and (q_len == 1 or q.shape[-2] % 64 == 0)
        and all(x.data_ptr() % 16 == 0 for x in (q, kv_cache))
        and all(n % 16 == 0 for n in (*q.stride()[:-1], *kv_cache.stride()[:-1]))
    )


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _check_lengths(
    block_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, pages: int
) -> None:
    """The checks that need values, and so wait for the device."""
    lengths = seq_lens.tolist()
    capacity = block_table.shape[1] * page_size
    for request, length in enumerate(lengths):
        check.require(length >= 0, f"seq_lens[{request}]", "a length of at least 0", length)
        check.require(
            length <= capacity,
            f"seq_lens[{request}]",
            f"at most {capacity} tokens ({block_table.shape[1]} pages of {page_size} "
            "in block_table)",
            length,
        )
    for request, row in enumerate(block_table.tolist()):
        for index, page in enumerate(row[: -(-lengths[request] // page_size)]):
            check.require(
                0 <= page < pages,
                f"block_table[{request}, {index}]",
                f"a page of kv_cache, 0 to {pages - 1}",
                page,
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
        check.require(
            shape[0] == batch, "out", f"{batch} requests, as in seq_lens", f"shape {shape}"
        )
        check.require(
            out.stride(0) == shape[1] * out.stride(1) or 1 in shape[:2],
            "out",
            "the query tokens of consecutive requests at one stride",
            f"strides {out.stride()}",
        )
    rows = out.numel() // (heads * dim)
    row_stride = out.stride(-3) if shape[-3] > 1 else out.stride(0)
    if query_start_loc is None:
        check.require(
            rows % batch == 0, "out", f"a multiple of {batch} rows, as in seq_lens", f"{rows} rows"
        )
    else:
        check.require(
            out.ndim == 3, "out", "(rows, heads, dim) with query_start_loc", f"shape {shape}"
        )
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
        out.view(bits), lse, seq_lens, query_start_loc, rows, batch, max(rows // batch, 1), heads,
        row_stride, heads * dim,
        RAGGED=query_start_loc is not None, HAS_LSE=lse is not None, ROWS=CLEAR_ROWS, CHUNK=chunk,
        WHOLE=heads * dim % chunk == 0, HEADS=triton.next_power_of_2(heads), OWNERS=128,
        num_warps=CLEAR_WARPS,
    )  # fmt: skip


def quantize_fp8_per_tensor(
    x: torch.Tensor, *, live_rows: int | torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic per-tensor FP8 quantisation whose scale is that of the live rows.

    Upstream's scale is the amax of the whole padded batch, so that one stale row rescales, or
    with ``torch.max`` turns into NaN, every request of the step (vLLM #37442). Here the amax reads
    live rows only, which is also less work: two launches, no host sync.

    Args:
        x: (rows, hidden) float32, float16 or bfloat16; last axis contiguous.
        live_rows: which rows belong to requests: the first n of them (an int, or an int32 tensor
            of shape (1,) on the device), those where a (rows,) bool mask is true, or all (None).

    Returns:
        ``x_fp8`` (rows, hidden) float8_e4m3fn, padding rows zero; ``scale`` (1,) float32, such
        that ``x_fp8 * scale`` is about ``x``. The scale is amax / 448, at least the smallest
        normal float32, and 1 where no row is live or every live value is zero. As with
        ``torch.max``, a NaN in a live row makes the scale and all live rows NaN: it was born
        there, and stays visible. An infinite one makes the scale infinite.

    Raises:
        ValueError: an argument does not fit.
    """
    check.tensor("x", x, ndim=2, dtype=(torch.bfloat16, torch.float16, torch.float32))
    check.require(x.numel() > 0, "x", "at least one element", f"shape {tuple(x.shape)}")
    check.require(x.stride(1) == 1, "x", "a contiguous last axis", f"strides {x.stride()}")
    rows, hidden = x.shape
    kind, live, count = "all", None, rows
    if isinstance(live_rows, torch.Tensor):
        live = live_rows
        if live.dtype == torch.bool:
            check.tensor("live_rows", live, shape=(rows,), like=x, contiguous=True)
            kind = "mask"
        else:
            check.tensor("live_rows", live, shape=(1,), dtype=torch.int32, like=x)
            kind = "tensor"
    elif live_rows is not None:
        check.require(
            isinstance(live_rows, int) and 0 <= live_rows <= rows,
            "live_rows",
            f"0 to {rows} rows",
            live_rows,
        )
        count = live_rows

    x_fp8 = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    block = min(4096, triton.next_power_of_2(hidden))
    tiles = rows * triton.cdiv(hidden, block)
    programs = min(tiles, 8 * _gpu(x.device.index)[0] if x.is_cuda else 8)
    partial = torch.empty(programs, dtype=torch.int32, device=x.device)
    _amax_kernel[(programs,)](
        x, live, count, partial, rows, hidden, x.stride(0), LIVE=kind, BLOCK=block, num_warps=8
    )
    _quantize_kernel[(programs,)](
        x, live, count, partial, programs, x_fp8.view(torch.uint8), scale, rows, hidden,
        x.stride(0), SMALLEST_SCALE,
        LIVE=kind, BLOCK=block, PARTIALS=triton.next_power_of_2(programs), INTERPRET=INTERPRET,
        num_warps=8,
    )  # fmt: skip
    return x_fp8, scale


def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    k_scale: float = 1.0,
    num_kv_splits: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed MLA decode over a paged cache, with a contract for padding.

    - An empty row (a request with seq_len 0, or a query token before the request's first) is
      written: 0, with lse -inf.
    - Nothing at or past ``seq_len`` can change the output, whatever its bytes; nor can a later
      token change an earlier one of the same request.
    - Unused entries of ``block_table`` are never followed; they may hold anything.

    Query token j of q_len attends to the first ``seq_len - q_len + j + 1`` keys. The hot path
    never waits for the device: a negative length counts as empty, one past the table's reach as
    the table's reach. One launch, or two with splits; the partial results of the splits it
    chooses take at most processors * 64 * kv_lora_rank * 4 bytes (16.5 MiB on an H200) during
    the call. On Hopper DeepSeek's shape runs a kernel of its own (``decode_sm90.py``).

    Args:
        q: (batch, heads, 576) or (batch, q_len, heads, 576), bfloat16, float16 or float32;
            up to 128 heads; last axis contiguous.
        kv_cache: (pages, page_size, 576), dtype of q, page_size a multiple of 16 up to 128; last
            axis contiguous.
        block_table: (batch, max_pages) int32, page of each page_size tokens of a request.
        seq_lens: (batch,) int32, tokens of each request, all q_len query tokens counted.
        softmax_scale: factor of the scores.
        kv_lora_rank: leading elements of a cached token that are its value; 512 for DeepSeek. The
            rest are rotary. Both are powers of two: 16 to 512, and 16 to 64.
        k_scale: dequantisation factor of the cache, for keys and values.
        num_kv_splits: programs that share the keys of a request; None chooses from the shapes.
        out: (*q.shape[:-1], kv_lora_rank), dtype of q, contiguous; written in place.
        lse: q.shape[:-1] float32, contiguous; written in place.
        validate: also check the values of ``seq_lens`` and ``block_table``, which waits for the
            device; for tests and notebooks.

    Returns:
        ``out`` and ``lse``, the natural logarithm of the sum of exponentials.

    Raises:
        ValueError: an argument does not fit; nothing was written.
    """
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    check.tensor("q", q, ndim=(3, 4), dtype=dtypes)
    check.tensor("kv_cache", kv_cache, ndim=3, dtype=q.dtype, like=q)
    check.require(
        _is_power_of_two(kv_lora_rank) and 16 <= kv_lora_rank <= 512,
        "kv_lora_rank",
        "a power of two from 16 to 512",
        kv_lora_rank,
    )
    batch, heads, width = q.shape[0], q.shape[-2], q.shape[-1]
    q_len = q.shape[1] if q.ndim == 4 else 1
    rope = width - kv_lora_rank
    check.require(
        _is_power_of_two(rope) and 16 <= rope <= 64,
        "q",
        f"a last axis of kv_lora_rank {kv_lora_rank} + 16, 32 or 64",
        f"shape {tuple(q.shape)}",
    )
    check.require(batch > 0, "q", "at least one request", "an empty batch")
    check.require(q_len > 0, "q", "at least one query token a request", "q_len 0")
    check.require(1 <= heads <= 128, "q", "1 to 128 heads", f"{heads} heads")
    check.require(q.stride(-1) == 1, "q", "a contiguous last axis", f"strides {q.stride()}")
    pages, page_size = kv_cache.shape[:2]
    check.tensor("kv_cache", kv_cache, shape=(None, None, width))
    check.require(
        page_size % 16 == 0 and 16 <= page_size <= 128,
        "kv_cache",
        "a page size that is a multiple of 16 up to 128",
        f"shape {tuple(kv_cache.shape)}",
    )
    check.require(
        kv_cache.stride(-1) == 1, "kv_cache", "a contiguous last axis",
        f"strides {kv_cache.stride()}",
    )  # fmt: skip
    check.tensor("block_table", block_table, shape=(batch, None), dtype=torch.int32, like=q)
    check.require(
        block_table.shape[1] > 0 and block_table.stride(1) == 1,
        "block_table",
        "at least one page a request, contiguous along a request",
        f"shape {tuple(block_table.shape)}, strides {block_table.stride()}",
    )
    check.tensor("seq_lens", seq_lens, shape=(batch,), dtype=torch.int32, like=q, contiguous=True)
    check.require(
        num_kv_splits is None or num_kv_splits >= 1,
        "num_kv_splits", "None or at least 1", num_kv_splits,
    )  # fmt: skip
    out_shape = (*q.shape[:-1], kv_lora_rank)
    if out is not None:
        check.tensor("out", out, shape=out_shape, dtype=q.dtype, like=q, contiguous=True)
    if lse is not None:
        check.tensor(
            "lse", lse, shape=tuple(q.shape[:-1]), dtype=torch.float32, like=q, contiguous=True
        )
    if validate:
        _check_lengths(block_table, seq_lens, page_size, pages)

    if out is None:
        out = torch.empty(out_shape, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    rows = q_len * heads
    capacity = block_table.shape[1] * page_size
    block_m, block_n, splits, options = _plan(q, rows, capacity)
    splits = num_kv_splits or splits
    row_blocks = triton.cdiv(rows, block_m)
    parts, part_lse = out, lse
    if splits > 1:
        parts = torch.empty(
            batch * rows, splits, kv_lora_rank, dtype=torch.float32, device=q.device
        )
        part_lse = torch.empty(batch * rows, splits, dtype=torch.float32, device=q.device)
    arguments = (
        q, kv_cache, block_table, seq_lens, parts, part_lse,
        q.stride(0), q.stride(1) if q.ndim == 4 else 0, q.stride(-2),
        kv_cache.stride(0), kv_cache.stride(1), block_table.stride(0),
        softmax_scale, k_scale, capacity, q_len, heads,
    )  # fmt: skip
    grid = (row_blocks, splits, batch)
    if block_m == 64 and _fits_sm90(q, kv_cache, kv_lora_rank, q_len):
        from staleproof.mla_padding.decode_sm90 import mla_decode_sm90_kernel

        mla_decode_sm90_kernel[grid](*arguments, SPLITS=splits, PAGE_SIZE=page_size, num_warps=8)
    else:
        _mla_decode_kernel[grid](
            *arguments,
            SPECULATIVE=q_len > 1, SPLITS=splits, PAGE_SIZE=page_size, RANK=kv_lora_rank,
            ROPE=rope, BLOCK_M=block_m, BLOCK_N=block_n, INTERPRET=INTERPRET, **options,
        )  # fmt: skip
    if splits > 1:
        block = min(128, kv_lora_rank)
        _merge_splits_kernel[(batch * rows, kv_lora_rank // block)](
            parts, part_lse, out, lse, splits,
            RANK=kv_lora_rank, BLOCK=block, SPLITS=triton.next_power_of_2(splits), num_warps=4,
        )  # fmt: skip
    return out, lse
