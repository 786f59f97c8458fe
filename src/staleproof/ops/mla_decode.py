"""The fix of incident 1: MLA decode, its cleaner and its consumer, each right about padding rows.

Upstream's decode kernels leave the output row of an empty request unwritten (CUTLASS and
TensorRT-LLM MLA, vLLM #37442) or write 0/0 into it (Triton MLA, vLLM #57017). Three places can
cure that, and each is here: the kernel itself, a pass behind somebody else's kernel, and the
quantiser that lets the row of one request reach another.
"""

from __future__ import annotations

import torch

from staleproof import check, device
from staleproof.ops.cuda_runtime import capability, processor_count

device.load_triton()

import triton
import triton.language as tl

INTERPRET = device.interpreting()


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
        q
        + request * q_batch_stride
        + token.to(tl.int64) * q_token_stride
        + (row % heads).to(tl.int64) * q_head_stride
    )
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
        k_row = _kv_pointers(kv_cache, table, position, full, page_stride, token_stride, PAGE_SIZE, BLOCK_N)
        k_c = _widen(tl.load(k_row[:, None] + column[None, :]), INTERPRET)
        k_r = _widen(tl.load(k_row[:, None] + rope_column[None, :]), INTERPRET)
        peak, total, acc = _attend(q_c, q_r, k_c, k_r, is_row, peak, total, acc, scale_log2, False, INTERPRET)

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
                q_c,
                q_r,
                _widen(k_c, INTERPRET),
                _widen(k_r, INTERPRET),
                live,
                peak,
                total,
                acc,
                scale_log2,
                True,
                INTERPRET,
            )
            if SPECULATIVE:
                # The dot ran over the rows of the other tokens too, and 0 * NaN is NaN.
                new_acc = tl.where((token == tail_token)[:, None], new_acc, acc)
            acc = new_acc

    empty = total == 0.0
    result = acc * (k_scale / tl.where(empty, 1.0, total))[:, None]
    result = tl.where(empty[:, None], 0.0, result)
    log_sum = tl.where(empty, -float("inf"), peak * 0.6931471805599453 + tl.log(tl.where(empty, 1.0, total)))
    slot = (request * (q_len * heads) + row) * SPLITS + split
    tl.store(
        out + slot[:, None] * RANK + column[None, :], result.to(out.dtype.element_ty), mask=is_row[:, None]
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
        parts + (row * splits + split)[:, None] * RANK + column[None, :], mask=wanted[:, None], other=0.0
    )
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    result = tl.sum(values * weights[:, None], 0) / safe
    tl.store(out + row * RANK + column, tl.where(empty, 0.0, result).to(out.dtype.element_ty))
    if tl.program_id(1) == 0:
        tl.store(lse + row, tl.where(empty, -float("inf"), base + tl.log(safe)))


def _plan(q: torch.Tensor, rows: int, capacity: int) -> tuple[int, int, int, dict[str, int]]:
    """(rows and keys of a program, splits, launch options), from shapes alone.

    No length is read back, so ``capacity`` stands for all of them. Tiles measured on an H200:
    wide ones read the cache less often, narrow ones spread a small batch over the processors.
    """
    if q.element_size() == 4:
        block_m, block_n, options = 16, 16, {"num_warps": 4, "num_stages": 2}
    else:
        block_m, block_n, options = 16, 64, {"num_warps": 4, "num_stages": 2}
    processors = processor_count(q.device.index) if q.is_cuda else 1
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
        and capability(q.device.index) == (9, 0)
        and q.element_size() == 2
        and (rank, q.shape[-1]) == (512, 576)
        and kv_cache.shape[1] % 64 == 0
        and (q_len == 1 or q.shape[-2] % 64 == 0)
        and all(x.data_ptr() % 16 == 0 for x in (q, kv_cache))
        and all(n % 16 == 0 for n in (*q.stride()[:-1], *kv_cache.stride()[:-1]))
    )


def _is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def _check_lengths(block_table: torch.Tensor, seq_lens: torch.Tensor, page_size: int, pages: int) -> None:
    """The checks that need values, and so wait for the device."""
    lengths = seq_lens.tolist()
    capacity = block_table.shape[1] * page_size
    for request, length in enumerate(lengths):
        check.require(length >= 0, f"seq_lens[{request}]", "a length of at least 0", length)
        check.require(
            length <= capacity,
            f"seq_lens[{request}]",
            f"at most {capacity} tokens ({block_table.shape[1]} pages of {page_size} in block_table)",
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
        kv_cache.stride(-1) == 1, "kv_cache", "a contiguous last axis", f"strides {kv_cache.stride()}"
    )
    check.tensor("block_table", block_table, shape=(batch, None), dtype=torch.int32, like=q)
    check.require(
        block_table.shape[1] > 0 and block_table.stride(1) == 1,
        "block_table",
        "at least one page a request, contiguous along a request",
        f"shape {tuple(block_table.shape)}, strides {block_table.stride()}",
    )
    check.tensor("seq_lens", seq_lens, shape=(batch,), dtype=torch.int32, like=q, contiguous=True)
    check.require(
        num_kv_splits is None or num_kv_splits >= 1, "num_kv_splits", "None or at least 1", num_kv_splits
    )
    out_shape = (*q.shape[:-1], kv_lora_rank)
    if out is not None:
        check.tensor("out", out, shape=out_shape, dtype=q.dtype, like=q, contiguous=True)
    if lse is not None:
        check.tensor("lse", lse, shape=tuple(q.shape[:-1]), dtype=torch.float32, like=q, contiguous=True)
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
        parts = torch.empty(batch * rows, splits, kv_lora_rank, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(batch * rows, splits, dtype=torch.float32, device=q.device)
    arguments = (
        q,
        kv_cache,
        block_table,
        seq_lens,
        parts,
        part_lse,
        q.stride(0),
        q.stride(1) if q.ndim == 4 else 0,
        q.stride(-2),
        kv_cache.stride(0),
        kv_cache.stride(1),
        block_table.stride(0),
        softmax_scale,
        k_scale,
        capacity,
        q_len,
        heads,
    )
    grid = (row_blocks, splits, batch)
    if block_m == 64 and _fits_sm90(q, kv_cache, kv_lora_rank, q_len):
        from staleproof.ops.mla_decode_sm90 import mla_decode_sm90_kernel

        mla_decode_sm90_kernel[grid](*arguments, SPLITS=splits, PAGE_SIZE=page_size, num_warps=8)
    else:
        _mla_decode_kernel[grid](
            *arguments,
            SPECULATIVE=q_len > 1,
            SPLITS=splits,
            PAGE_SIZE=page_size,
            RANK=kv_lora_rank,
            ROPE=rope,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            INTERPRET=INTERPRET,
            **options,
        )
    if splits > 1:
        block = min(128, kv_lora_rank)
        _merge_splits_kernel[(batch * rows, kv_lora_rank // block)](
            parts,
            part_lse,
            out,
            lse,
            splits,
            RANK=kv_lora_rank,
            BLOCK=block,
            SPLITS=triton.next_power_of_2(splits),
            num_warps=4,
        )
    return out, lse
