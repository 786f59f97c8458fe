"""MLA decode for Hopper with at most 16 heads, whose time is that of reading the cache.

The tensor cores multiply 64 rows at a time. Here these are keys and output columns instead of heads, of which
there would be too few: scores are keys * queries^T, and the output is values^T * weights. A program's keys
come in tiles of 64; group 0 takes the even tiles, group 1 the odd ones, each with all columns of the output,
and they exchange halves of it at the end of a request. The rest is that of ``pairs.py``: one
program a processor, equal parts of the line of all tiles, and a merge of the requests that were cut.
"""

from __future__ import annotations

from staleproof import device

device.load_triton()

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from staleproof.ops.mla.pairs import barriers, key_memory
from staleproof.ops.mla.pairs_load import load_group, shared_as
from staleproof.ops.mla.pairs_steps import (
    FREE,
    GIVEN,
    LOADED,
    PIECES,
    QUERIES,
    QUERIES_FREE,
    TOTAL,
    WIDTH,
    barrier,
    clear_tail,
    equal_part,
    finite,
    opaque_zero,
    part_of,
)

HEADS = gl.constexpr(16)
# Keys or output columns by heads.
TALL = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
BY_HEAD = gl.constexpr(gl.SliceLayout(0, TALL.value))
# No weights cross between the groups here: their two barriers say, by the group, that it has read what the
# other left.
READ = GIVEN


@gluon.jit
def _step(
    left_acc, right_acc, peak, total, memory, bars, live, scale, used, is_last, TILE: gl.constexpr,
):  # fmt: skip
    """One tile of 64 keys, of which ``live`` count: scores, weights, and all columns of the output."""
    q_p, q_r, left_p, right_p, left, right, rope, given = memory
    z = opaque_zero()
    scores = warpgroup_mma_init(gl.full([64, HEADS], 0.0, gl.float32, layout=TALL))
    for i in gl.static_range(PIECES):
        mbarrier.wait(bars[LOADED].index(TILE * 2 * PIECES + i), used & 1)
        piece = q_p.index(z + i).permute((1, 0))
        scores = warpgroup_mma(
            left_p.index(z + TILE * PIECES + i), piece, scores, use_acc=i > 0, is_async=True
        )
    for i in gl.static_range(PIECES):
        mbarrier.wait(bars[LOADED].index((TILE * 2 + 1) * PIECES + i), used & 1)
        keys, piece = right_p.index(z + TILE * PIECES + i), q_p.index(z + PIECES + i).permute((1, 0))
        scores = warpgroup_mma(keys, piece, scores, is_async=True)
    scores = warpgroup_mma(rope.index(z + TILE), q_r.index(z).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if live < 64:
        key = gl.arange(0, 64, layout=gl.SliceLayout(1, TALL))
        scores = gl.where((key < live)[:, None], scores, -float("inf"))
    # A NaN is left out of the maximum; it reaches the sums, and so the output.
    new_peak = gl.maximum(peak, gl.max(scores, 0) * scale)
    base = finite(new_peak)
    weights = gl.exp2(scores * scale - base[None, :])
    given.index(z + TILE).store(weights.to(given.dtype))
    if live < 64:
        clear_tail(left.index(z + TILE), live)
        clear_tail(right.index(z + TILE), live)
    fence_async_shared()
    barrier()
    mbarrier.arrive(bars[QUERIES_FREE], count=1, pred=is_last)
    decay = gl.exp2(peak - base)
    total = total * decay[None, :] + weights
    left_acc = left_acc * decay[None, :]
    right_acc = right_acc * decay[None, :]
    given_w = given.index(z + TILE)
    left_acc = warpgroup_mma(left.index(z + TILE).permute((1, 0)), given_w, left_acc, is_async=True)
    right_acc = warpgroup_mma(right.index(z + TILE).permute((1, 0)), given_w, right_acc, is_async=True)
    left_acc, right_acc = warpgroup_mma_wait(0, deps=[left_acc, right_acc])
    barrier()
    mbarrier.arrive(bars[FREE].index(2 * TILE), count=1)
    mbarrier.arrive(bars[FREE].index(2 * TILE + 1), count=1)
    return left_acc, right_acc, new_peak, total


@gluon.jit
def _store(
    own, theirs, peak, total, peaks, totals, halves, bars, target, segment, first_row,
    heads, request, rows, slot, k_scale, GROUP: gl.constexpr,
):  # fmt: skip
    """Exchange halves of the output with the other group, and write one: a result, or a part of one.

    ``own`` are this group's sums of the columns that it writes, ``theirs`` those of the other columns.
    """
    out, lse, parts, part_lse = target
    place = (segment & 1) * 2
    sums = gl.sum(total, 0)
    # Before the first request there is nothing to be read.
    mbarrier.wait(bars[READ + 1 - GROUP], (segment & 1) ^ 1)
    halves.index(GROUP).store(theirs)
    peaks.index(place + GROUP).store(peak)
    totals.index(place + GROUP).store(sums)
    barrier()
    mbarrier.arrive(bars[TOTAL + GROUP], count=1)
    mbarrier.wait(bars[TOTAL + 1 - GROUP], segment & 1)
    other_peak = peaks.index(place + 1 - GROUP).load(BY_HEAD)
    other = halves.index(1 - GROUP).load(TALL)
    highest = gl.maximum(peak, other_peak)
    base = finite(highest)
    mine, decay = gl.exp2(peak - base), gl.exp2(other_peak - base)
    sums = sums * mine + totals.index(place + 1 - GROUP).load(BY_HEAD) * decay
    acc = own * mine[None, :] + other * decay[None, :]
    barrier()
    mbarrier.arrive(bars[READ + GROUP], count=1)
    empty = sums == 0.0
    safe = gl.where(empty, 1.0, sums)
    result = gl.where(empty[None, :], 0.0, acc * (k_scale / safe)[None, :])
    log_sum = gl.where(empty, -float("inf"), highest * 0.6931471805599453 + gl.log(safe))
    head = gl.arange(0, HEADS, layout=BY_HEAD)
    column = GROUP * 256 + gl.arange(0, 256, layout=gl.SliceLayout(1, TALL))
    where = (head * 512)[None, :] + column[:, None]
    mask = (head < heads)[None, :] & (column >= 0)[:, None]
    if slot >= 0:
        row = slot.to(gl.int64) * HEADS
        if GROUP == 0:
            gl.store(part_lse + row + head, log_sum, mask=head < heads)
        gl.store(parts + row * 512 + where, result, mask=mask)
    else:
        row = request.to(gl.int64) * rows + first_row
        if GROUP == 0:
            gl.store(lse + row + head, log_sum, mask=head < heads)
        gl.store(out + row * 512 + where, result.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _attend_group(
    memory, peaks, totals, halves, bars, target, seq_lens, capacity, q_len, heads, token,
    program, first, last, unit, begin_unit, end_unit, scale, k_scale, GROUP: gl.constexpr,
):  # fmt: skip
    """One of the two groups that compute."""
    used = 0
    segment = 0
    for request in range(first, last):
        seq_len = gl.load(seq_lens + request)
        limit, tiles, begin, end = part_of(seq_len, capacity, q_len, token, unit, begin_unit, end_unit)
        unit += tiles
        if begin < end:
            peak = gl.full([HEADS], -float("inf"), gl.float32, layout=BY_HEAD)
            total = gl.full([64, HEADS], 0.0, gl.float32, layout=TALL)
            left_acc = gl.full([256, HEADS], 0.0, gl.float32, layout=TALL)
            right_acc = gl.full([256, HEADS], 0.0, gl.float32, layout=TALL)
            mbarrier.wait(bars[QUERIES], segment & 1)
            fence_async_shared()
            mine = (end - begin + 1 - GROUP) // 2
            for i in range(mine):
                live = limit - (begin + 2 * i + GROUP) * 64
                left_acc, right_acc, peak, total = _step(
                    left_acc,
                    right_acc,
                    peak,
                    total,
                    memory,
                    bars,
                    live,
                    scale,
                    used + i,
                    i + 1 == mine,
                    GROUP,
                )
            used += mine
            mbarrier.arrive(bars[QUERIES_FREE], count=1, pred=mine == 0)
            slot = gl.where(begin > 0, 2 * program, gl.where(end < tiles, 2 * program + 1, -1))
            if GROUP == 0:
                own, theirs = left_acc, right_acc
            else:
                own, theirs = right_acc, left_acc
            _store(
                own, theirs, peak, total, peaks, totals, halves, bars, target, segment,
                token * heads, heads, request, q_len * heads, slot, k_scale, GROUP,
            )  # fmt: skip
            segment += 1


# Not in the compiled kernel: a server has many values of these.
@gluon.jit(do_not_specialize=["page_rows", "table_stride", "capacity", "q_len", "heads", "batch", "aligned"])
def mla_decode_few_kernel(
    q, columns, block_table, seq_lens, out, lse, parts, part_lse,
    q_batch_stride, q_token_stride, q_head_stride, page_rows, row_words, table_stride,
    softmax_scale, k_scale, capacity, q_len, heads, batch, aligned,
    PAGE_SIZE: gl.constexpr, BATCH: gl.constexpr, CONVERTS: gl.constexpr,
):  # fmt: skip
    """Attend from the heads of one query token, at most 16, to an equal part of the tiles of all requests.

    Grid: (query tokens, parts). PAGE_SIZE is 64 or 128; BATCH is ``batch`` up to a power of two.
    ``softmax_scale * k_scale`` must be positive.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0, 1])
    gdc_launch_dependents()

    token = gl.program_id(0)
    program = gl.program_id(1) * gl.num_programs(0) + token
    first, last, unit, begin_unit, end_unit = equal_part(
        seq_lens, batch, capacity, q_len, token, aligned, BATCH
    )
    pieces: gl.constexpr = 512 // WIDTH
    q_p = gl.allocate_shared_memory(dtype, [pieces, HEADS, WIDTH], shared)
    q_v = shared_as(q_p, dtype, [2, HEADS, 256], shared)
    q_r = gl.allocate_shared_memory(dtype, [1, HEADS, 64], shared)
    left_p, right_p, left, right = key_memory(dtype, shared)
    rope = gl.allocate_shared_memory(dtype, [2, 64, 64], shared)
    given = gl.allocate_shared_memory(dtype, [2, 64, HEADS], narrow)
    halves = gl.allocate_shared_memory(gl.float32, [2, 256, HEADS], plain)
    peaks = gl.allocate_shared_memory(gl.float32, [4, HEADS], flat)
    totals = gl.allocate_shared_memory(gl.float32, [4, HEADS], flat)
    bars = barriers()
    scale = softmax_scale * k_scale * 1.4426950408889634
    memory = (q_p, q_r, left_p, right_p, left, right, rope, given)
    target = (out, lse, parts, part_lse)
    gl.warp_specialize(
        [
            (
                _attend_group,
                (
                    memory, peaks, totals, halves, bars, target, seq_lens, capacity, q_len,
                    heads, token, program, first, last, unit, begin_unit, end_unit, scale, k_scale, 0,
                ),
            ),
            (
                _attend_group,
                (
                    memory, peaks, totals, halves, bars, target, seq_lens, capacity, q_len,
                    heads, token, program, first, last, unit, begin_unit, end_unit, scale, k_scale, 1,
                ),
            ),
            (
                load_group,
                (
                    q_v, q_r, left_p, right_p, left, right, rope, bars, q, columns, block_table, seq_lens,
                    q_batch_stride, q_token_stride, q_head_stride, page_rows, row_words, table_stride,
                    capacity, q_len, heads, token * heads, heads, first, last, unit, begin_unit, end_unit,
                    PAGE_SIZE, HEADS, CONVERTS,
                ),
            ),
        ],
        [4, 4],
        [168, 168] if CONVERTS else [224, 56],
    )  # fmt: skip
