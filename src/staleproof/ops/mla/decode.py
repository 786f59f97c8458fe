"""MLA decode over a paged cache, with a contract for padding rows (the fix of incident 1).

Upstream's decode kernels leave the output row of an empty request unwritten (CUTLASS and
TensorRT-LLM MLA, vLLM #37442) or write 0/0 into it (Triton MLA, vLLM #57017).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from staleproof import check, device
from staleproof.ops.launching import Seen, empty, key_of, launched
from staleproof.ops.mla.merge import merge_splits_kernel
from staleproof.ops.mla.plan import Cut, Tiles, cache_dtypes, fastest, fits_hopper, is_measured, tiles_of
from staleproof.ops.operators import operator, require_values

device.load_triton()

import triton
import triton.language as tl

INTERPRET = device.interpreting()
# The merge reads the splits of a row at once: for 1,024 it compiles in 3 s on an H200, for 4,096 in 27 s.
MAX_SPLITS = 1024
LARGEST_FACTOR = torch.finfo(torch.float32).max


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
    """One online softmax step over a block of keys. MASKED: only keys where ``live`` (rows, keys) is true."""
    scores = tl.dot(q_c, tl.trans(k_c), input_precision="ieee")
    scores = tl.dot(q_r, tl.trans(k_r), scores, input_precision="ieee") * scale_log2
    if MASKED:
        scores = tl.where(live, scores, -float("inf"))
    # Leave a live NaN out of the maximum, on which Triton's versions disagree. It still reaches the
    # sums below, and so the output.
    known = tl.where(scores == scores, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(known, 1))
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    if INTERPRET:
        # _operand has converted the values to float32.
        acc = tl.dot(weights, k_c, acc, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(k_c.dtype), k_c, acc, input_precision="ieee")
    return new_peak, total, acc


@triton.jit
def _operand(x, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """``x`` as an operand of a dot: float32 for the interpreter, which multiplies the bits of bfloat16."""
    if not INTERPRET:
        return x.to(dtype)
    elif x.dtype == tl.float8e4nv:
        # The interpreter reads E4M3's NaN as 480, which E4M3 cannot represent.
        wide = x.to(tl.float32)
        return tl.where(tl.abs(wide) > 448.0, float("nan"), wide)
    else:
        return x.to(tl.float32)


# Not specialised on ``splits``: a server uses many values of it.
@triton.jit(do_not_specialize=["splits"])
def _mla_decode_kernel(
    q, kv_cache, block_table, seq_lens, out, lse,
    q_batch_stride, q_token_stride, q_head_stride, page_stride, token_stride, table_stride,
    softmax_scale, k_scale, capacity, q_len, heads, splits,
    SPECULATIVE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    RANK: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Attend from BLOCK_M rows (query token, head) of one request to one split of its keys.

    Writes the normalised output of the split and its lse; with one split that is the result. A
    program whose range of keys is empty writes its rows as well.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    split = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // heads
    is_row = row < q_len * heads
    first_token = (tl.program_id(0) * BLOCK_M) // heads
    last_token = tl.minimum((tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // heads, q_len - 1)

    # A length beyond what the table has pages for would read past the end of the table.
    seq_len = tl.minimum(tl.load(seq_lens + request), capacity)
    first_limit = tl.maximum(seq_len - q_len + first_token + 1, 0)
    last_limit = tl.maximum(seq_len - q_len + last_token + 1, 0)
    span = tl.cdiv(tl.cdiv(last_limit, BLOCK_N), splits) * BLOCK_N
    begin = split * span
    end = tl.minimum(begin + span, last_limit)
    # Every row of this program attends to all keys before `full`, so blocks up to there need no mask.
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
    q_c = _operand(q_c, dtype, INTERPRET)
    q_r = _operand(q_r, dtype, INTERPRET)

    table = block_table + request * table_stride
    scale_log2 = softmax_scale * k_scale * 1.4426950408889634
    peak = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, RANK], tl.float32)

    for position in tl.range(begin, full, BLOCK_N):
        k_row = _kv_pointers(kv_cache, table, position, full, page_stride, token_stride, PAGE_SIZE, BLOCK_N)
        k_c = _operand(tl.load(k_row[:, None] + column[None, :]), dtype, INTERPRET)
        k_r = _operand(tl.load(k_row[:, None] + rope_column[None, :]), dtype, INTERPRET)
        peak, total, acc = _attend(q_c, q_r, k_c, k_r, is_row, peak, total, acc, scale_log2, False, INTERPRET)

    # The rest, one query token at a time. A key beyond the token's limit is loaded as zeros: giving
    # it weight zero would not do, because 0 * NaN is NaN.
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
            k_c, k_r = _operand(k_c, dtype, INTERPRET), _operand(k_r, dtype, INTERPRET)
            peak, total, new_acc = _attend(
                q_c, q_r, k_c, k_r, live, peak, total, acc, scale_log2, True, INTERPRET
            )
            if SPECULATIVE:
                # The dot also covered rows of other tokens, with weight zero: 0 * NaN is NaN.
                new_acc = tl.where((token == tail_token)[:, None], new_acc, acc)
            acc = new_acc

    empty = total == 0.0
    result = acc * (k_scale / tl.where(empty, 1.0, total))[:, None]
    result = tl.where(empty[:, None], 0.0, result)
    log_sum = tl.where(empty, -float("inf"), peak * 0.6931471805599453 + tl.log(tl.where(empty, 1.0, total)))
    slot = (request * (q_len * heads) + row) * splits + split
    tl.store(
        out + slot[:, None] * RANK + column[None, :], result.to(out.dtype.element_ty), mask=is_row[:, None]
    )
    tl.store(lse + slot, log_sum, mask=is_row)


@operator(
    "mla_decode(Tensor q, Tensor kv_cache, Tensor block_table, Tensor seq_lens, float softmax_scale, "
    "float k_scale, SymInt? num_kv_splits, Tensor(a!) out, Tensor(b!) lse) -> ()"
)
def _launch(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    softmax_scale: float,
    k_scale: float,
    num_kv_splits: int | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> Any:
    call = Call(q, kv_cache, block_table, seq_lens, softmax_scale, k_scale, out, lse)
    heads, q_len, capacity = q.shape[-2], call.q_len, call.capacity
    if not fits_hopper(q, kv_cache, out.shape[-1], q_len, softmax_scale * k_scale):
        tiles = tiles_of(q, q_len * heads, capacity)
        return launch_portable(call, tiles._replace(splits=num_kv_splits or tiles.splits))
    if num_kv_splits is None:
        cut = fastest(q, kv_cache, q_len, capacity)
    else:
        # A program decodes one request or one split of it, so the result depends on that request alone.
        cut = Cut("pairs", 0, num_kv_splits)
    if cut.kernel == "portable":
        return launch_portable(call, Tiles(16, 64, cut.splits, 4))
    from staleproof.ops.mla.hopper_call import HopperCall

    made = HopperCall(call, cut)
    return made if made.is_ready else None


class Call(NamedTuple):
    """The arguments of every MLA decode kernel: those of :func:`mla_decode`, checked."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    softmax_scale: float
    k_scale: float
    out: torch.Tensor
    lse: torch.Tensor

    @property
    def q_len(self) -> int:
        """Query tokens of a request."""
        return self.q.shape[1] if self.q.ndim == 4 else 1

    @property
    def capacity(self) -> int:
        """Tokens that the block table has pages for."""
        return self.block_table.shape[1] * self.kv_cache.shape[1]


def launch_portable(call: Call, tiles: Tiles) -> Any:
    """Launch the Triton kernel and, with several splits, the merge. Returns what ``_SEEN`` keeps."""
    q, kv_cache, block_table, seq_lens, softmax_scale, k_scale, out, lse = call
    rank, q_len, heads, splits = out.shape[-1], call.q_len, q.shape[-2], tiles.splits
    parts, part_lse = out, lse
    if splits > 1:
        memory, numbers = _part_memory(out, splits)
        parts, part_lse = memory[:numbers], memory[numbers:]
    # In the order of the signature.
    of_q = q.stride(0), q.stride(1) if q.ndim == 4 else 0, q.stride(-2)
    strides = *of_q, *kv_cache.stride()[:2], block_table.stride(0)
    sizes = softmax_scale, k_scale, call.capacity, q_len, heads, splits
    constants = q_len > 1, kv_cache.shape[1], rank, q.shape[-1] - rank, tiles.rows, tiles.keys, INTERPRET
    decode = launched(
        _mla_decode_kernel,
        (triton.cdiv(q_len * heads, tiles.rows), splits, q.shape[0]),
        (q, kv_cache, block_table, seq_lens, parts, part_lse),
        (*strides, *sizes, *constants),
        num_warps=tiles.warps,
        num_stages=2,
    )
    merge = None
    if splits > 1:
        # 256 splits of 128 columns do not fit into the registers.
        block = min(128 if splits <= 128 or is_measured(q) else 64, rank)
        of_merge = splits, rank, block, triton.next_power_of_2(splits)
        programs = lse.numel(), rank // block
        merge = launched(merge_splits_kernel, programs, (parts, part_lse, out, lse), of_merge, num_warps=4)
    return None if decode is None else (decode, merge, splits)


def _part_memory(out: torch.Tensor, splits: int) -> tuple[torch.Tensor, int]:
    """Memory for the splits of each row of ``out``: first this number of output elements, then their lse."""
    numbers = out.numel() * splits
    return empty((numbers + numbers // out.shape[-1],), torch.float32, out), numbers


# What repeats a call: (decode, merge or None, splits), or a HopperCall.
_SEEN: Seen[Any] = Seen()


def _check_values(kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> None:
    """The checks that read values, and so wait for the device."""
    require_values(seq_lens)
    pages, page_size = kv_cache.shape[:2]
    lengths, columns = seq_lens.tolist(), block_table.shape[1]
    for request, length in enumerate(lengths):
        name = f"seq_lens[{request}]"
        check.require(length >= 0, name, "a length of at least 0", length)
        reach = f"at most {columns * page_size} tokens ({columns} pages of {page_size} in block_table)"
        check.require(length <= columns * page_size, name, reach, length)
    for request, row in enumerate(block_table.tolist()):
        for index, page in enumerate(row[: -(-lengths[request] // page_size)]):
            name = f"block_table[{request}, {index}]"
            check.require(0 <= page < pages, name, f"a page of kv_cache, 0 to {pages - 1}", page)


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

    Query token j of q_len attends to the first ``seq_len - q_len + j + 1`` keys. There is no host sync. One
    launch; a second one if keys are split among programs; on Hopper with an E4M3 cache, one more before them.
    During the call partial results take at most processors * (128 * (2 * kv_lora_rank + 4) + 4) bytes (16.6
    MiB on an H200), unless ``num_kv_splits`` is given.

    On Hopper DeepSeek's shape has kernels of its own (``hopper.py``, ``e4m3.py``), and ``plan.py`` chooses by
    predicted time. Some give each program an equal part of all keys, whatever the lengths. Then the last bits
    of a request's result depend on where the request is cut, and so on the lengths in the batch, but not on
    other requests' contents. With ``num_kv_splits`` given they depend on the request alone. Where Hopper's
    kernels cut a request, its parts are rounded to the dtype of ``q`` before they are merged, as FlashInfer's
    fa3 does: on an H200 the relative error of random bfloat16 numbers was 0.0016 to 0.0028, with float32
    parts 0.0010 to 0.0017.

    Args:
        q: (batch, heads, 576) or (batch, q_len, heads, 576), bfloat16, float16 or float32;
            up to 128 heads; last axis contiguous.
        kv_cache: (pages, page_size, 576), at least one page, dtype of q or float8_e4m3fn (on a GPU from
            compute capability 8.9 on), page_size a multiple of 16 up to 128; last axis contiguous.
        block_table: (batch, max_pages) int32, page of each page_size tokens of a request.
        seq_lens: (batch,) int32, tokens of each request, all q_len query tokens counted.
        softmax_scale: factor of the scores; finite.
        kv_lora_rank: leading elements of a cached token that are its value; 512 for DeepSeek. The
            rest are rotary. Both are powers of two: 16 to 512, and 16 to 64.
        k_scale: dequantisation factor of the cache, for keys and values; finite.
        num_kv_splits: programs that share the keys of a request, 1 to 1,024; None chooses from the shapes.
        out: (*q.shape[:-1], kv_lora_rank), dtype of q, contiguous; written in place.
        lse: q.shape[:-1] float32, contiguous; written in place.
        validate: also check the values of ``seq_lens`` and ``block_table``, which waits for the
            device; for tests and notebooks. Without it a negative length counts as 0, and one that
            ``block_table`` has no pages for as the most it has pages for.

    Returns:
        ``out`` and ``lse``, the natural logarithm of the sum of exponentials.

    Raises:
        ValueError: an argument does not fit; nothing was written.

    >>> q, cache = torch.zeros(2, 1, 32), torch.ones(1, 16, 32)
    >>> table = torch.zeros(2, 1, dtype=torch.int32)
    >>> seq_lens = torch.tensor([4, 0], dtype=torch.int32)
    >>> out, lse = mla_decode(q, cache, table, seq_lens, softmax_scale=0.2, kv_lora_rank=16)
    >>> out[:, 0, 0], lse[:, 0]
    (tensor([1., 0.]), tensor([1.3863,   -inf]))
    """
    options = softmax_scale, kv_lora_rank, k_scale, num_kv_splits
    key = key_of(q, kv_cache, block_table, seq_lens, *options, out, lse)
    if not validate and (again := _SEEN.get(key)) is not None:
        rows = q.shape[:-1]
        out = empty((*rows, kv_lora_rank), q.dtype, q) if out is None else out
        lse = empty(rows, torch.float32, q) if lse is None else lse
        if not isinstance(again, tuple):
            again(q, kv_cache, block_table, seq_lens, out, lse)
            return out, lse
        decode, merge, splits = again
        at = out.data_ptr(), lse.data_ptr()
        if merge is not None:
            memory, numbers = _part_memory(out, splits)
            at = memory.data_ptr(), memory.data_ptr() + 4 * numbers
        decode(q.data_ptr(), kv_cache.data_ptr(), block_table.data_ptr(), seq_lens.data_ptr(), *at)
        if merge is not None:
            merge(*at, out.data_ptr(), lse.data_ptr())
        return out, lse
    check.tensor("q", q, ndim=(3, 4), dtype=(torch.bfloat16, torch.float16, torch.float32))
    if not (isinstance(kv_lora_rank, int) and kv_lora_rank in (16, 32, 64, 128, 256, 512)):
        check.fail("kv_lora_rank", "a power of two from 16 to 512", kv_lora_rank)
    batch, heads, width = q.shape[0], q.shape[-2], q.shape[-1]
    if width - kv_lora_rank not in (16, 32, 64):
        expected = f"a last axis of kv_lora_rank {kv_lora_rank} + 16, 32 or 64"
        check.fail("q", expected, f"shape {tuple(q.shape)}")
    if batch == 0:
        check.fail("q", "at least one request", "an empty batch")
    if q.ndim == 4 and q.shape[1] == 0:
        check.fail("q", "at least one query token a request", "q_len 0")
    if not 1 <= heads <= 128:
        check.fail("q", "1 to 128 heads", f"{heads} heads")
    if q.stride(-1) != 1:
        check.fail("q", "a contiguous last axis", f"strides {q.stride()}")
    check.tensor("kv_cache", kv_cache, ndim=3, shape=(None, None, width), dtype=cache_dtypes(q), like=q)
    pages, page_size = kv_cache.shape[:2]
    if pages == 0:
        check.fail("kv_cache", "at least one page", f"shape {tuple(kv_cache.shape)}")
    if page_size % 16 != 0 or not 16 <= page_size <= 128:
        expected = "a page size that is a multiple of 16 up to 128"
        check.fail("kv_cache", expected, f"shape {tuple(kv_cache.shape)}")
    if kv_cache.stride(-1) != 1:
        check.fail("kv_cache", "a contiguous last axis", f"strides {kv_cache.stride()}")
    check.tensor("block_table", block_table, shape=(batch, None), dtype=torch.int32, like=q)
    if block_table.shape[1] == 0 or block_table.stride(1) != 1:
        got = f"shape {tuple(block_table.shape)}, strides {block_table.stride()}"
        check.fail("block_table", "at least one page a request, contiguous along a request", got)
    check.tensor("seq_lens", seq_lens, shape=(batch,), dtype=torch.int32, like=q, contiguous=True)
    for name, factor in (("softmax_scale", softmax_scale), ("k_scale", k_scale)):
        if not (isinstance(factor, (int, float)) and abs(factor) <= LARGEST_FACTOR):
            check.fail(name, "a finite float", repr(factor))
    if not (num_kv_splits is None or (isinstance(num_kv_splits, int) and 1 <= num_kv_splits <= MAX_SPLITS)):
        check.fail("num_kv_splits", f"None or 1 to {MAX_SPLITS}", repr(num_kv_splits))
    lse_shape = q.shape[:-1]
    out_shape = (*lse_shape, kv_lora_rank)
    if out is not None:
        check.tensor("out", out, shape=out_shape, dtype=q.dtype, like=q, contiguous=True)
    if lse is not None:
        check.tensor("lse", lse, shape=lse_shape, dtype=torch.float32, like=q, contiguous=True)
    if validate:
        _check_values(kv_cache, block_table, seq_lens)
    if out is None:
        out = torch.empty(out_shape, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    made = _launch(q, kv_cache, block_table, seq_lens, softmax_scale, k_scale, num_kv_splits, out, lse)
    _SEEN.keep(key, made)
    return out, lse
