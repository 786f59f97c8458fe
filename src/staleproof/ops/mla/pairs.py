"""MLA decode for Hopper in which two groups of warps take turns at the tensor cores.

A program has 64 heads. Its keys come in pairs of tiles of 64. Group 0 computes the scores of the even
tile and the left 256 columns of the output; group 1 the scores of the odd tile and the right columns.
While one does softmax, products of the other run. Weights cross through shared memory.

The launch has one program a processor. All tiles of all requests form one line, of which each program
takes an equal part, so lengths may differ. A request that lies in several parts is merged afterwards.
"""

from __future__ import annotations

from staleproof import device

device.load_triton()

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from staleproof.ops.mla.pairs_load import load_group, shared_as
from staleproof.ops.mla.pairs_steps import (
    ACC,
    FREE,
    HALF,
    LEFT,
    QUERIES,
    RIGHT,
    SCORES,
    TOTAL,
    WIDTH,
    barrier,
    equal_part,
    even_step,
    lone_step,
    odd_step,
    part_of,
)

LOAD_THREADS = gl.constexpr(128)


@gluon.jit
def key_memory(dtype: gl.constexpr, layout: gl.constexpr):
    """Both tiles' left columns, then their right ones, in pieces and as a whole: the same memory."""
    left_p = gl.allocate_shared_memory(dtype, [512 // WIDTH, 64, WIDTH], layout)
    left = shared_as(left_p, dtype, [2, 64, 256], layout)
    right_p = gl.allocate_shared_memory(dtype, [512 // WIDTH, 64, WIDTH], layout)
    right = shared_as(right_p, dtype, [2, 64, 256], layout)
    return left_p, right_p, left, right


@gluon.jit
def barriers():
    """In the order of their numbers in ``mla_decode_pairs_steps.py``."""
    one: gl.constexpr = mbarrier.MBarrierLayout()
    loaded = gl.allocate_shared_memory(gl.int64, [16, 1], one)
    free = gl.allocate_shared_memory(gl.int64, [4, 1], one)
    given_0 = gl.allocate_shared_memory(gl.int64, [1], one)
    given_1 = gl.allocate_shared_memory(gl.int64, [1], one)
    total_0 = gl.allocate_shared_memory(gl.int64, [1], one)
    total_1 = gl.allocate_shared_memory(gl.int64, [1], one)
    queries = gl.allocate_shared_memory(gl.int64, [1], one)
    queries_free = gl.allocate_shared_memory(gl.int64, [1], one)
    bars = (loaded, free, given_0, given_1, total_0, total_1, queries, queries_free)
    for i in gl.static_range(16):
        mbarrier.init(loaded.index(i), count=1)
    for i in gl.static_range(4):
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(2, 6):
        mbarrier.init(bars[i], count=1)
    mbarrier.init(queries, count=LOAD_THREADS)
    mbarrier.init(queries_free, count=2)
    barrier()
    return bars


@gluon.jit
def _store_rows(target, result, rows, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    column = GROUP * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(target + (row * 512)[:, None] + column[None, :], result, mask=(row < rows)[:, None])


@gluon.jit
def _store(
    acc, peak, total, totals, staging, free, bars, target, segment, request, rows,
    first_row, slot, k_scale, GROUP: gl.constexpr,
):  # fmt: skip
    """Write one half of the rows: the result, or with ``slot`` >= 0 a part of it that is merged later.

    ``staging`` held the last values that this group read; ``free`` is their barrier.
    """
    out, lse, parts, part_lse = target
    place = (segment & 1) * 2
    totals.index(place + GROUP).store(total)
    barrier()
    mbarrier.arrive(bars[TOTAL + GROUP], count=1)
    mbarrier.wait(bars[TOTAL + 1 - GROUP], segment & 1)
    total += totals.index(place + 1 - GROUP).load(gl.SliceLayout(1, SCORES))
    empty = total == 0.0
    safe = gl.where(empty, 1.0, total)
    factor = gl.convert_layout(k_scale / safe, gl.SliceLayout(1, ACC))
    blank = gl.convert_layout(empty, gl.SliceLayout(1, ACC))
    result = gl.where(blank[:, None], 0.0, acc * factor[:, None])
    log_sum = gl.where(empty, -float("inf"), peak * 0.6931471805599453 + gl.log(safe))
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    if slot >= 0:
        part = slot.to(gl.int64) * 64
        if GROUP == 0:
            gl.store(part_lse + part + row, log_sum)
        mbarrier.arrive(free, count=1)
        _store_rows(parts + part * 512, result, 64, GROUP, ACC)
    else:
        whole = request.to(gl.int64) * rows + first_row
        if GROUP == 0:
            gl.store(lse + whole + row, log_sum, mask=row < rows - first_row)
        # By way of shared memory, so that a warp stores whole rows.
        staging.store(result.to(out.dtype.element_ty))
        barrier()
        rounded = staging.load(HALF)
        fence_async_shared()
        barrier()
        mbarrier.arrive(free, count=1)
        _store_rows(out + whole * 512, rounded, rows - first_row, GROUP, HALF)


@gluon.jit
def _attend_group(
    memory, totals, bars, target, seq_lens, capacity, q_len, heads,
    first_row, program, first, last, unit, begin_unit, end_unit, scale, k_scale, GROUP: gl.constexpr,
):  # fmt: skip
    """One of the two groups that compute."""
    token = first_row // heads
    rows = q_len * heads
    used_a = 0
    used_b = 0
    segment = 0
    for request in range(first, last):
        seq_len = gl.load(seq_lens + request)
        limit, tiles, begin, end = part_of(seq_len, capacity, q_len, token, unit, begin_unit, end_unit)
        unit += tiles
        if begin < end:
            peak = gl.full([64], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
            total = gl.full([64], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
            acc = gl.full([64, 256], 0.0, gl.float32, layout=ACC)
            mbarrier.wait(bars[QUERIES], segment & 1)
            fence_async_shared()
            pairs = (end - begin) // 2
            for pair in range(pairs):
                live = limit - (begin + 2 * pair + GROUP) * 64
                if GROUP == 0:
                    acc, peak, total = even_step(
                        acc, peak, total, memory, bars, live, scale,
                        used_a + pair, used_b + pair, begin + 2 * pair + 2 == end, True,
                    )  # fmt: skip
                else:
                    acc, peak, total = odd_step(
                        acc, peak, total, memory, bars, live, scale,
                        used_a + pair, used_b + pair, begin + 2 * pair + 2 == end,
                    )  # fmt: skip
            used_a += pairs
            used_b += pairs
            if (end - begin) % 2 != 0:
                live = limit - (end - 1) * 64
                if GROUP == 0:
                    acc, peak, total = even_step(
                        acc, peak, total, memory, bars, live, scale,
                        used_a, used_b, True, False,
                    )  # fmt: skip
                else:
                    acc, peak, total = lone_step(acc, peak, total, memory, bars, live, used_a)
                used_a += 1
            slot = gl.where(begin > 0, 2 * program, gl.where(end < tiles, 2 * program + 1, -1))
            odd = 1 - (end - begin) % 2
            if GROUP == 0:
                staging = memory[LEFT].index(odd)
            else:
                staging = memory[RIGHT].index(odd)
            free = bars[FREE].index(2 * odd + GROUP)
            _store(
                acc, peak, total, totals, staging, free, bars, target, segment, request,
                rows, first_row, slot, k_scale, GROUP,
            )  # fmt: skip
            segment += 1


# Not in the compiled kernel: a server has many values of these.
@gluon.jit(do_not_specialize=["page_rows", "table_stride", "capacity", "q_len", "heads", "batch", "aligned"])
def mla_decode_pairs_kernel(
    q, columns, block_table, seq_lens, out, lse, parts, part_lse,
    q_batch_stride, q_token_stride, q_head_stride, page_rows, row_words, table_stride,
    softmax_scale, k_scale, capacity, q_len, heads, batch, aligned,
    PAGE_SIZE: gl.constexpr, BATCH: gl.constexpr, CONVERTS: gl.constexpr,
):  # fmt: skip
    """Attend from 64 heads of one query token to an equal part of the tiles of all requests.

    Grid: (blocks of 64 rows, parts). PAGE_SIZE is 64 or 128; BATCH is ``batch`` up to a power of two.
    ``softmax_scale * k_scale`` must be positive.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    gdc_launch_dependents()

    first_row = gl.program_id(0) * 64
    program = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    first, last, unit, begin_unit, end_unit = equal_part(
        seq_lens, batch, capacity, q_len, first_row // heads, aligned, BATCH
    )
    pieces: gl.constexpr = 512 // WIDTH
    q_p = gl.allocate_shared_memory(dtype, [pieces, 64, WIDTH], shared)
    q_v = shared_as(q_p, dtype, [2, 64, 256], shared)
    q_r = gl.allocate_shared_memory(dtype, [1, 64, 64], shared)
    left_p, right_p, left, right = key_memory(dtype, shared)
    rope = gl.allocate_shared_memory(dtype, [2, 64, 64], shared)
    given = gl.allocate_shared_memory(dtype, [1, 64, 64], shared)
    peaks = gl.allocate_shared_memory(gl.float32, [2, 64], flat)
    totals = gl.allocate_shared_memory(gl.float32, [4, 64], flat)
    bars = barriers()
    scale = softmax_scale * k_scale * 1.4426950408889634
    # In the order of their numbers in mla_decode_pairs_steps.py.
    memory = (q_p, q_r, left_p, right_p, left, right, rope, given, peaks)
    target = (out, lse, parts, part_lse)
    gl.warp_specialize(
        [
            (
                _attend_group,
                (
                    memory, totals, bars, target, seq_lens, capacity,
                    q_len, heads, first_row, program, first, last, unit, begin_unit, end_unit, scale, k_scale,
                    0,
                ),
            ),
            (
                _attend_group,
                (
                    memory, totals, bars, target, seq_lens, capacity,
                    q_len, heads, first_row, program, first, last, unit, begin_unit, end_unit, scale, k_scale,
                    1,
                ),
            ),
            (
                load_group,
                (
                    q_v, q_r, left_p, right_p, left, right, rope, bars, q, columns, block_table, seq_lens,
                    q_batch_stride, q_token_stride, q_head_stride, page_rows, row_words, table_stride,
                    capacity, q_len, heads, first_row, q_len * heads - first_row,
                    first, last, unit, begin_unit, end_unit, PAGE_SIZE, 64, CONVERTS,
                ),
            ),
        ],
        [4, 4],
        # Registers of a thread. A processor has 504 for three groups; the first takes what is left, 224.
        [200, 104] if CONVERTS else [224, 56],
    )  # fmt: skip
