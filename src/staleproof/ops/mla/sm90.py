"""MLA decode for Hopper: the same program as ``decode._mla_decode_kernel``, scheduled by hand.

It begins sooner than the kernels of ``hopper.py`` and takes longer for a tile: for many short requests.

Three groups of four warps share a program of 64 heads. One loads keys, one computes scores, weights and
the left half of the output, one the right half. So loads run during all arithmetic, and each score is
computed once, from one reading of the queries. Contract and arguments are the same as in
``mla_decode``, for DeepSeek's shape only.

Tried on an H200 and slower: issuing the next scores behind the product of the present ones together with
freeing a buffer by thirds.
"""

from __future__ import annotations

from staleproof import device

device.load_triton()

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# These were renamed after Triton 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

LOAD_THREADS = gl.constexpr(128)


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
def _load_keys(
    keys_c, keys_r, arrived, left, kv_cache, table, end, page_stride, token_stride,
    PAGE_SIZE: gl.constexpr, LAYOUT_C: gl.constexpr, LAYOUT_R: gl.constexpr,
):  # fmt: skip
    """The loading group: 64 keys a step, into the buffer that both others have left."""
    row_c = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT_C))
    row_r = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT_R))
    page = gl.load(table, mask=end > 0, other=0)
    for step in range(gl.cdiv(end, 64)):
        position = step * 64
        buffer = step % 2
        base = kv_cache + page.to(gl.int64) * page_stride
        slot = (position % PAGE_SIZE).to(gl.int64)
        page = gl.load(table + (position + 64) // PAGE_SIZE, mask=position + 64 < end, other=0)
        mbarrier.wait(left.index(buffer), ((step // 2) & 1) ^ 1)
        _copy(
            keys_c.index(buffer),
            keys_r.index(buffer),
            base + (slot + row_c) * token_stride,
            base + (slot + row_r) * token_stride,
            position + row_c < end,
            position + row_r < end,
            LAYOUT_C,
            LAYOUT_R,
        )
        async_copy.mbarrier_arrive(arrived.index(buffer), increment_count=False)


@gluon.jit
def _store_half(out, acc, factor, blank, staging, first_row, rows, request, FIRST: gl.constexpr):
    """Write one half of the output by way of shared memory, where threads get whole rows."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    half = staging.slice(FIRST, 256, dim=1)
    half.store(gl.where(blank[:, None], 0.0, acc * factor[:, None]).to(staging.dtype))
    barrier()
    row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))
    column = FIRST + gl.arange(0, 256, layout=gl.SliceLayout(0, wide))
    place = out + (request * rows + row)[:, None] * 512 + column[None, :]
    gl.store(place, half.load(wide), mask=(row < rows)[:, None])


@gluon.jit
def _right_half(
    q_c, keys_c, weights_s, decay_s, arrived, left, given, taken, out, end, first_row, rows, request,
    ACC: gl.constexpr,
):  # fmt: skip
    """The group of the right half: weights and decay come from the group of the scores."""
    acc = gl.full([64, 256], 0.0, gl.float32, layout=ACC)
    steps = gl.cdiv(end, 64)
    for step in range(steps):
        buffer = step % 2
        mbarrier.wait(arrived.index(buffer), (step // 2) & 1)
        mbarrier.wait(given, step & 1)
        decay = decay_s.index(0).load(gl.SliceLayout(1, ACC))
        acc = acc * decay[:, None]
        fence_async_shared()
        acc = warpgroup_mma(weights_s, keys_c.index(buffer).slice(256, 256, dim=1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(taken, count=1)
        mbarrier.arrive(left.index(buffer), count=1)
    mbarrier.wait(given, steps & 1)
    factor = decay_s.index(0).load(gl.SliceLayout(1, ACC))
    blank = decay_s.index(1).load(gl.SliceLayout(1, ACC)) != 0.0
    _store_half(out, acc, factor, blank, q_c, first_row, rows, request, 256)


@gluon.jit
def _scores_and_left_half(
    q_c, q_r, keys_c, keys_r, weights_s, decay_s, arrived, left, given, taken, out, lse,
    end, first_row, rows, request, scale_log2, k_scale, ACC: gl.constexpr,
):  # fmt: skip
    """The group of the scores, which also computes the left half of the output."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    dtype: gl.constexpr = weights_s.dtype
    # The queries, which this group's threads have copied.
    async_copy.wait_group(0)
    fence_async_shared()
    barrier()
    peak = gl.full([64], -float("inf"), gl.float32, layout=gl.SliceLayout(1, scores_layout))
    total = gl.full([64], 0.0, gl.float32, layout=gl.SliceLayout(1, scores_layout))
    acc = gl.full([64, 256], 0.0, gl.float32, layout=ACC)
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, scores_layout))
    steps = gl.cdiv(end, 64)
    for step in range(steps):
        position = step * 64
        buffer = step % 2
        mbarrier.wait(arrived.index(buffer), (step // 2) & 1)
        fence_async_shared()
        block_c = keys_c.index(buffer)
        block_r = keys_r.index(buffer)
        zero = gl.full([64, 64], 0.0, gl.float32, layout=scores_layout)
        scores = warpgroup_mma(q_c, block_c.permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma(q_r, block_r.permute((1, 0)), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])

        scores = scores * scale_log2
        if position + 64 > end:
            scores = gl.where((position + column < end)[None, :], scores, -float("inf"))
        # Whether or not the maximum is that of a live NaN, it reaches the sums, and so the output.
        new_peak = gl.maximum(peak, gl.max(scores, 1))
        base = gl.where(new_peak == -float("inf"), 0.0, new_peak)
        weights = gl.exp2(scores - base[:, None])
        decay = gl.exp2(peak - base)
        total = total * decay + gl.sum(weights, 1)
        peak = new_peak
        mbarrier.wait(taken, (step & 1) ^ 1)
        weights_s.store(weights.to(dtype))
        decay_s.index(0).store(decay)
        fence_async_shared()
        barrier()
        mbarrier.arrive(given, count=1)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, ACC))[:, None]
        acc = warpgroup_mma(weights_s, block_c.slice(0, 256, dim=1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(left.index(buffer), count=1)

    empty = total == 0.0
    safe = gl.where(empty, 1.0, total)
    log_sum = gl.where(empty, -float("inf"), peak * 0.6931471805599453 + gl.log(safe))
    factor = k_scale / safe
    mbarrier.wait(taken, (steps & 1) ^ 1)
    decay_s.index(0).store(factor)
    decay_s.index(1).store(gl.where(empty, 1.0, 0.0))
    barrier()
    mbarrier.arrive(given, count=1)
    row = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, scores_layout))
    gl.store(lse + request * rows + row, log_sum, mask=row < rows)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, ACC))
    blank = gl.convert_layout(empty, gl.SliceLayout(1, ACC))
    _store_half(out, acc, factor, blank, q_c, first_row, rows, request, 0)


@gluon.jit
def mla_decode_sm90_kernel(
    q, kv_cache, block_table, seq_lens, out, lse,
    q_batch_stride, q_token_stride, q_head_stride, page_stride, token_stride, table_stride,
    softmax_scale, k_scale, capacity, q_len, heads, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Attend from 64 heads of one query token to its keys, 64 a step, on 12 warps.

    Grid: (groups of 64 rows, batch). PAGE_SIZE is 64 or 128; the 64 rows belong to one query token.
    """
    layout_c: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    layout_r: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    dtype: gl.constexpr = q.dtype.element_ty

    request = gl.program_id(1).to(gl.int64)
    first_row = gl.program_id(0) * 64
    rows = q_len * heads
    seq_len = gl.minimum(gl.load(seq_lens + request), capacity)
    end = gl.maximum(seq_len - q_len + first_row // heads + 1, 0)
    table = block_table + request * table_stride

    q_c = gl.allocate_shared_memory(dtype, [64, 512], shared)
    q_r = gl.allocate_shared_memory(dtype, [64, 64], shared)
    keys_c = gl.allocate_shared_memory(dtype, [2, 64, 512], shared)
    keys_r = gl.allocate_shared_memory(dtype, [2, 64, 64], shared)
    weights_s = gl.allocate_shared_memory(dtype, [64, 64], shared)
    decay_s = gl.allocate_shared_memory(gl.float32, [2, 64], flat)
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    left = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(arrived.index(i), count=LOAD_THREADS)
        mbarrier.init(left.index(i), count=2)
    mbarrier.init(given, count=1)
    mbarrier.init(taken, count=1)
    barrier()

    row_c = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout_c))
    row_r = first_row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout_r))
    q_rows = gl.where(end > 0, rows, 0)
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
    async_copy.commit_group()
    scale_log2 = softmax_scale * k_scale * 1.4426950408889634
    gl.warp_specialize(
        [
            (
                _scores_and_left_half,
                (
                    q_c, q_r, keys_c, keys_r, weights_s, decay_s, arrived, left, given, taken, out, lse,
                    end, first_row, rows, request, scale_log2, k_scale, acc_layout,
                ),
            ),
            (
                _right_half,
                (
                    q_c, keys_c, weights_s, decay_s, arrived, left, given, taken, out, end, first_row, rows,
                    request, acc_layout,
                ),
            ),
            (
                _load_keys,
                (
                    keys_c, keys_r, arrived, left, kv_cache, table, end, page_stride, token_stride,
                    PAGE_SIZE, layout_c, layout_r,
                ),
            ),
        ],
        [4, 4],
        [160, 88],
    )  # fmt: skip
