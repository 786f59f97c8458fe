"""MLA decode for Hopper: the same program as ``mla_decode._mla_decode_kernel``, scheduled by hand.

Triton's pipeliner issues the loads of the next keys after the arithmetic of the present ones, and
waits for them at once. Here they are issued before that arithmetic, into the buffer that the
previous block has just left, so a whole block of arithmetic hides them. Also, the two warp groups
share the scores instead of each computing all of them. Contract and arguments are the same, for
DeepSeek's shape only.
"""

from __future__ import annotations

from staleproof import device

device.load_triton()

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# These were renamed after Triton 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _copy(
    shared_c, shared_r, rows_c, rows_r, mask_c, mask_r,
    LAYOUT_C: gl.constexpr, LAYOUT_R: gl.constexpr,
):  # fmt: skip
    """Start copying 64 rows of 512 + 64 elements; masked rows become zeros."""
    column_c = gl.arange(0, 512, layout=gl.SliceLayout(0, LAYOUT_C))
    column_r = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT_R))
    async_load(shared_c, rows_c[:, None] + column_c[None, :], mask=mask_c[:, None])
    async_load(shared_r, rows_r[:, None] + 512 + column_r[None, :], mask=mask_r[:, None])


@gluon.jit
def _copy_keys(
    shared_c, shared_r, kv_cache, page, position, limit, page_stride, token_stride,
    PAGE_SIZE: gl.constexpr, LAYOUT_C: gl.constexpr, LAYOUT_R: gl.constexpr,
):  # fmt: skip
    base = kv_cache + page.to(gl.int64) * page_stride
    slot = (position % PAGE_SIZE).to(gl.int64)
    row_c = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT_C))
    row_r = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT_R))
    _copy(
        shared_c,
        shared_r,
        base + (slot + row_c) * token_stride,
        base + (slot + row_r) * token_stride,
        position + row_c < limit,
        position + row_r < limit,
        LAYOUT_C,
        LAYOUT_R,
    )
    async_copy.commit_group()


@gluon.jit
def mla_decode_sm90_kernel(
    q, kv_cache, block_table, seq_lens, out, lse,
    q_batch_stride, q_token_stride, q_head_stride, page_stride, token_stride, table_stride,
    softmax_scale, k_scale, capacity, q_len, heads,
    SPLITS: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Attend from 64 heads of one query token to one split of its keys, 64 keys a step, on 8 warps.

    PAGE_SIZE is 64 or 128; the 64 rows of a program belong to one query token.
    """
    layout_c: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    layout_r: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 256, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = q.dtype.element_ty

    split = gl.program_id(1)
    request = gl.program_id(2).to(gl.int64)
    first_row = gl.program_id(0) * 64
    seq_len = gl.minimum(gl.load(seq_lens + request), capacity)
    limit = gl.maximum(seq_len - q_len + first_row // heads + 1, 0)
    span = gl.cdiv(gl.cdiv(limit, 64), SPLITS) * 64
    begin = split * span
    end = gl.minimum(begin + span, limit)
    table = block_table + request * table_stride

    q_c = gl.allocate_shared_memory(dtype, [64, 512], shared)
    q_r = gl.allocate_shared_memory(dtype, [64, 64], shared)
    keys_c = gl.allocate_shared_memory(dtype, [2, 64, 512], shared)
    keys_r = gl.allocate_shared_memory(dtype, [2, 64, 64], shared)
    weights_s = gl.allocate_shared_memory(dtype, [64, 64], shared)

    page = gl.load(table + begin // PAGE_SIZE, mask=begin < end, other=0)
    row_c = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout_c))
    row_r = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout_r))
    q_rows = gl.where(begin < end, q_len * heads, 0)
    q_base = q + request * q_batch_stride
    _copy(
        q_c,
        q_r,
        q_base
        + (row_c // heads).to(gl.int64) * q_token_stride
        + (row_c % heads).to(gl.int64) * q_head_stride,
        q_base
        + (row_r // heads).to(gl.int64) * q_token_stride
        + (row_r % heads).to(gl.int64) * q_head_stride,
        row_c < q_rows,
        row_r < q_rows,
        layout_c,
        layout_r,
    )
    _copy_keys(
        keys_c.index(0),
        keys_r.index(0),
        kv_cache,
        page,
        begin,
        end,
        page_stride,
        token_stride,
        PAGE_SIZE,
        layout_c,
        layout_r,
    )
    page = gl.load(table + (begin + 64) // PAGE_SIZE, mask=begin + 64 < end, other=0)

    scale_log2 = softmax_scale * k_scale * 1.4426950408889634
    peak = gl.full([64], -float("inf"), gl.float32, layout=gl.SliceLayout(1, scores_layout))
    # One sum a column until the end, which saves an exchange between the warp groups a step.
    totals = gl.full([64, 64], 0.0, gl.float32, layout=scores_layout)
    acc = gl.full([64, 512], 0.0, gl.float32, layout=acc_layout)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, scores_layout))

    for position in range(begin, end, 64):
        buffer = ((position - begin) // 64) % 2
        # After the barrier all threads have read the other buffer, and this one has arrived whole.
        async_copy.wait_group(0)
        fence_async_shared()
        barrier()
        _copy_keys(
            keys_c.index(1 - buffer),
            keys_r.index(1 - buffer),
            kv_cache,
            page,
            position + 64,
            end,
            page_stride,
            token_stride,
            PAGE_SIZE,
            layout_c,
            layout_r,
        )
        page = gl.load(table + (position + 128) // PAGE_SIZE, mask=position + 128 < end, other=0)

        block_c = keys_c.index(buffer)
        block_r = keys_r.index(buffer)
        zero = gl.full([64, 64], 0.0, gl.float32, layout=scores_layout)
        scores = warpgroup_mma(q_c, block_c.permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_r, block_r.permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])

        scores = scores * scale_log2
        scores = gl.where((position + column < end)[None, :], scores, -float("inf"))
        # Leave a live NaN out of the maximum. It reaches the sums, and so the output.
        known = gl.where(scores == scores, scores, -float("inf"))
        new_peak = gl.maximum(peak, gl.max(known, 1))
        base = gl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = gl.exp2(scores - base[:, None])
        decay = gl.exp2(peak - base)
        totals = totals * decay[:, None] + weights
        peak = new_peak
        decay = gl.convert_layout(decay, gl.SliceLayout(1, acc_layout))
        # Each warp group computed half of the weights and needs all: exchange in shared memory.
        weights_s.store(weights.to(dtype))
        acc = acc * decay[:, None]
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(weights_s, block_c, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])

    async_copy.wait_group(0)
    total = gl.sum(totals, 1)
    empty = total == 0.0
    safe = gl.where(empty, 1.0, total)
    log_sum = gl.where(empty, -float("inf"), peak * 0.6931471805599453 + gl.log(safe))
    factor = gl.convert_layout(k_scale / safe, gl.SliceLayout(1, acc_layout))
    blank = gl.convert_layout(empty, gl.SliceLayout(1, acc_layout))
    result = gl.where(blank[:, None], 0.0, acc * factor[:, None]).to(out.dtype.element_ty)
    result = gl.convert_layout(result, layout_c)
    column_c = gl.arange(0, 512, layout=gl.SliceLayout(0, layout_c))
    slot = (request * (q_len * heads) + row_c) * SPLITS + split
    gl.store(out + slot[:, None] * 512 + column_c[None, :], result, mask=(row_c < q_len * heads)[:, None])
    row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, scores_layout))
    gl.store(lse + (request * (q_len * heads) + row) * SPLITS + split, log_sum, mask=row < q_len * heads)
