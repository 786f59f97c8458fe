"""MLA decode for Hopper with an E4M3 cache, up to 32 heads: a Gluon kernel for DeepSeek's shape.

Its tiles of 64 keys stay E4M3 in shared memory. The tensor cores can take the left operand from registers, so
a group of warps loads E4M3 numbers into registers, converts them to float16, which is exact, and writes
nothing back to shared memory. So keys and output columns are the rows of the products, as in
``mla_decode_few_kernel``: scores are keys * queries^T, the output is values^T * weights.

Tiles come in pairs. Group 0 computes the scores of the even tile and the left 256 columns of the output,
group 1 the scores of the odd tile and the right columns. Maxima and weights cross through shared memory. A
third group loads; TMA copies tiles unconverted.

A word holds four columns of one key. Scores are sums over columns, so the order of columns is free: queries
are stored in the order in which words are unpacked (``queries.py``). In the output the four columns of a word
go to four accumulators, and the keys of a product are in the order of ``in_order``.
"""

from __future__ import annotations

from staleproof import device
from staleproof.ops.mla.hopper import (
    COST,
    FLAT,
    FREE,
    GIVEN,
    LOAD_THREADS,
    LOADED,
    QUERIES_FREE,
    SHARED,
    TOTAL,
    barrier,
    clear_tail,
    finite,
    lift_of,
    load_group,
    next_request,
    opaque_zero,
    part_of,
    result_at,
    scale_of,
    share_of,
    shared_as,
    token_of,
    wait_for_queries,
)

device.load_triton()

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Words (64 keys, 16), as TMA stores them.
WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2))
# Register layouts of words (64 keys, 16) and of words (64, 8 keys), as a product's left operand needs them.
KEYS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 16]
    )
)
VALUES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0], [0, 2]], [[0, 1], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 8]
    )
)
# One row of maxima per thread.
COLUMNS = gl.constexpr(gl.BlockedLayout([8, 1], [2, 16], [1, 4], [0, 1]))
LIFT = gl.constexpr(lift_of(gl.float16))
# A barrier that hopper.py does not have, one for each group.
PEAK = gl.constexpr(8)

# Unpacks a word of one key to the float16 numbers of its four columns.
TAKE_KEYS = gl.constexpr("""{
.reg .b16 low, high;
.reg .b32 first, second;
mov.b32 {low, high}, $4;
cvt.rn.f16x2.e4m3x2 first, low;
cvt.rn.f16x2.e4m3x2 second, high;
mov.b32 {$0, $1}, first;
mov.b32 {$2, $3}, second;
}""")
# Unpacks words of two keys to float16 numbers: for each of four columns, the numbers of both keys.
TAKE_VALUES = gl.constexpr("""{
.reg .b16 low, high;
.reg .b32 bytes, both;
prmt.b32 bytes, $8, $9, 0x5140;
mov.b32 {low, high}, bytes;
cvt.rn.f16x2.e4m3x2 both, low;
mov.b32 {$0, $1}, both;
cvt.rn.f16x2.e4m3x2 both, high;
mov.b32 {$2, $3}, both;
prmt.b32 bytes, $8, $9, 0x7362;
mov.b32 {low, high}, bytes;
cvt.rn.f16x2.e4m3x2 both, low;
mov.b32 {$4, $5}, both;
cvt.rn.f16x2.e4m3x2 both, high;
mov.b32 {$6, $7}, both;
}""")


@gluon.constexpr_function
def product_layout(rows):
    """The layout of a product (64 keys or output columns, ``rows``)."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.jit
def exp2(x):
    """2 ** x in one instruction: results too small for a normal number become zero."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _key_operand(words, LAYOUT: gl.constexpr):
    """Words (64 keys, 16) as a left operand (64 keys, 64 columns), with the columns in queries.py's order."""
    a, b, c, d = gl.inline_asm_elementwise(
        TAKE_KEYS, "=h,=h,=h,=h,r", [words],
        dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip
    halves = gl.join(gl.join(a, b), gl.join(c, d)).permute((0, 3, 1, 2)).reshape((64, 64))
    return gl.convert_layout(halves, LAYOUT)


@gluon.jit
def _value_operand(even, odd, LAYOUT: gl.constexpr):
    """Numbers (64 columns, 8) of even keys and of odd ones as a left operand (64 columns, 16 keys)."""
    both = gl.join(even, odd).reshape((64, 2, 2, 2, 2)).permute((0, 2, 1, 3, 4)).reshape((64, 16))
    return gl.convert_layout(both, LAYOUT)


@gluon.jit
def in_order(weights, ROWS: gl.constexpr):
    """Weights (64 keys, rows) with the keys in the order in which ``_add_values`` takes them.

    The bits of a key's number are permuted to 5, 3, 1, 2, 0, 4, highest first. So the keys whose words a warp
    loads together are in different banks of shared memory.
    """
    return weights.reshape((2, 2, 2, 2, 2, 2, ROWS)).permute((0, 2, 4, 3, 5, 1, 6)).reshape((64, ROWS))


@gluon.jit
def _scores(memory, stage, ROWS: gl.constexpr):
    """Scores (64 keys, rows) of a tile."""
    q_p, q_r, left_p, right_p, rope = memory[0], memory[1], memory[2], memory[3], memory[4]
    layout: gl.constexpr = product_layout(ROWS)
    z = opaque_zero()
    scores = gl.full([64, ROWS], 0.0, gl.float32, layout=layout)
    words = left_p.index(stage * 4).load(KEYS)
    for i in gl.static_range(9):
        keys = _key_operand(words, gl.DotOperandLayout(0, layout, 2))
        # Load the next words while these are multiplied.
        if i < 3:
            words = left_p.index(stage * 4 + i + 1).load(KEYS)
        elif i < 7:
            words = right_p.index(stage * 4 + i - 3).load(KEYS)
        elif i < 8:
            words = rope.index(stage).load(KEYS)
        if i < 8:
            queries = q_p.index(z + i).permute((1, 0))
        else:
            queries = q_r.index(z).permute((1, 0))
        product = warpgroup_mma(keys, queries, scores, use_acc=i > 0, is_async=True)
        scores = warpgroup_mma_wait(1 if i < 8 else 0, deps=[product])
    return scores


@gluon.jit
def _two_keys(words, STEP: gl.constexpr):
    """A thread's words of eight even keys, and of the eight odd keys that are paired with them."""
    even = words.slice(STEP // 2 * 32 + STEP % 2 * 8, 8, dim=0).permute((1, 0)).load(VALUES)
    odd = words.slice(STEP // 2 * 32 + STEP % 2 * 8 + 16, 8, dim=0).permute((1, 0)).load(VALUES)
    return even, odd


@gluon.jit
def _add_values(acc, words, weights, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """Add values^T * weights of a tile: words (64 keys, 64), weights in pieces of 16 keys from FIRST on."""
    operand: gl.constexpr = gl.DotOperandLayout(0, product_layout(ROWS), 2)
    a, b, c, d = acc
    even, odd = _two_keys(words, 0)
    for i in gl.static_range(4):
        a0, a1, b0, b1, c0, c1, d0, d1 = gl.inline_asm_elementwise(
            TAKE_VALUES, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [even, odd],
            dtype=(
                gl.float16, gl.float16, gl.float16, gl.float16,
                gl.float16, gl.float16, gl.float16, gl.float16,
            ), is_pure=True, pack=1,
        )  # fmt: skip
        if i < 3:
            even, odd = _two_keys(words, i + 1)
        given = weights.index(FIRST + i)
        a = warpgroup_mma(_value_operand(a0, a1, operand), given, a, is_async=True)
        b = warpgroup_mma(_value_operand(b0, b1, operand), given, b, is_async=True)
        c = warpgroup_mma(_value_operand(c0, c1, operand), given, c, is_async=True)
        d = warpgroup_mma(_value_operand(d0, d1, operand), given, d, is_async=True)
        a, b, c, d = warpgroup_mma_wait(4 if i < 3 else 0, deps=[a, b, c, d])
    return a, b, c, d


@gluon.jit
def _cut_off(scores, live, heads, more, ROWS: gl.constexpr, IS_PACKED: gl.constexpr):
    """As ``hopper._cut_off``, for scores (keys, rows)."""
    if live - more < 64:
        layout: gl.constexpr = product_layout(ROWS)
        key = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        if IS_PACKED:
            row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
            mask = key[:, None] < (live - more + token_of(row, heads))[None, :]
        else:
            mask = (key < live)[:, None]
        scores = gl.where(mask, scores, -float("inf"))
    return scores


@gluon.jit
def _own_sums(weights, ROWS: gl.constexpr):
    """Sums within each thread, (32, rows). They are added across threads at the end of a request."""
    return gl.sum(weights.reshape((4, 2, 8, ROWS)), 1).reshape((32, ROWS))


@gluon.jit
def _highest(scores, ROWS: gl.constexpr):
    """The maximum of each row, ignoring a NaN. The NaN reaches the sums, and so the output."""
    own = gl.max(gl.max(scores.reshape((4, 2, 2, 4, ROWS)), 1), 1).reshape((16, ROWS))
    return gl.max(gl.convert_layout(own, COLUMNS), 0)


@gluon.jit
def _times(acc, factor):
    a, b, c, d = acc
    factor = factor[None, :]
    return a * factor, b * factor, c * factor, d * factor


@gluon.jit
def _group(
    memory, scales, totals, bars, target, seq_lens, capacity, q_len, heads, first_row, rows, token,
    program, work, scale,
    GROUP: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, IS_PACKED: gl.constexpr,
):  # fmt: skip
    """One of the two groups that compute."""
    gdc_wait()
    seat, requests, stride, turn, unit, begin_unit, end_unit = work
    layout: gl.constexpr = product_layout(ROWS)
    by_row: gl.constexpr = gl.SliceLayout(0, layout)
    half, given_p, given, peaks = memory[5 + GROUP], memory[7], memory[8], memory[9]
    more = token - first_row // heads if IS_PACKED else 0
    # Tiles and pairs so far. They choose the buffer and the barrier phase.
    count = 0
    pairs = 0
    segment = 0
    lap = seat * 0
    for _ in range(requests):
        request = lap + seat
        lap, seat = next_request(lap, seat, stride, turn)
        seq_len = gl.load(seq_lens + request)
        limit, tiles, begin, end = part_of(seq_len, capacity, q_len, token, unit, begin_unit, end_unit)
        unit += tiles + COST
        if begin < end:
            peak = gl.full([ROWS], -float("inf"), gl.float32, layout=by_row)
            zeros = gl.full([64, ROWS], 0.0, gl.float32, layout=layout)
            acc = zeros, zeros, zeros, zeros
            total = _own_sums(zeros, ROWS)
            row = request.to(gl.int64) * q_len * heads + first_row
            row_scale = scale_of(scales, row, scale, rows, ROWS, True, by_row)
            first = count + GROUP
            keys = bars[LOADED].index(first % STAGES)
            wait_for_queries(bars, segment, keys, first // STAGES, begin + GROUP < end)
            for even in range(begin, end, 2):
                tile = even + GROUP
                place = count + tile - begin
                scores = gl.full([64, ROWS], -float("inf"), gl.float32, layout=layout)
                if tile < end:
                    mbarrier.wait(bars[LOADED].index(place % STAGES), place // STAGES & 1)
                    scores = _scores(memory, place % STAGES, ROWS)
                    scores = _cut_off(scores, limit - tile * 64, heads, more, ROWS, IS_PACKED)
                peaks.index(GROUP).store(_highest(scores, ROWS))
                barrier()
                mbarrier.arrive(bars[PEAK + GROUP], count=1)
                mbarrier.arrive(bars[QUERIES_FREE], count=1, pred=even + 2 >= end)
                mbarrier.wait(bars[PEAK + 1 - GROUP], pairs & 1)
                both = gl.maximum(peaks.index(0).load(by_row), peaks.index(1).load(by_row))
                new_peak = gl.maximum(peak, both * row_scale)
                base = finite(new_peak)
                weights = exp2(scores * row_scale[None, :] - (base - LIFT)[None, :])
                given.index(GROUP).store(in_order(weights.to(gl.float16), ROWS))
                fence_async_shared()
                barrier()
                mbarrier.arrive(bars[GIVEN + GROUP], count=1)
                decay = exp2(peak - base)
                peak = new_peak
                faded = total * gl.convert_layout(decay, gl.SliceLayout(0, total.type.layout))[None, :]
                total = faded + _own_sums(weights, ROWS)
                acc = _times(acc, decay)
                # Both groups take the even tile first, so that its memory is free before the odd tile's.
                for i in gl.static_range(2):
                    if i != GROUP:
                        mbarrier.wait(bars[GIVEN + i], pairs & 1)
                    if even + i < end:
                        place = count + even + i - begin
                        stage = place % STAGES
                        mbarrier.wait(bars[LOADED].index(stage), place // STAGES & 1)
                        clear_tail(memory[2 + GROUP], stage, limit - (even + i) * 64, more, WORDS, IS_PACKED)
                        acc = _add_values(acc, half.index(stage), given_p, 4 * i, ROWS)
                        barrier()
                        mbarrier.arrive(bars[FREE].index(stage), count=1)
                pairs += 1
            count += end - begin
            slot = gl.where(begin > 0, 2 * program, gl.where(end < tiles, 2 * program + 1, -1))
            _store(acc, peak, total, totals, bars, target, segment, row, rows, slot, GROUP, ROWS)
            segment += 1


@gluon.jit
def _store(
    acc, peak, total, totals, bars, target, segment, first_row, rows, slot,
    GROUP: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Write one half of the columns: the result, or with ``slot`` >= 0 a part of it that is merged later."""
    by_row: gl.constexpr = gl.SliceLayout(0, product_layout(ROWS))
    place = (segment & 1) * 2
    sums = gl.convert_layout(gl.sum(total, 0), by_row)
    totals.index(place + GROUP).store(sums)
    barrier()
    mbarrier.arrive(bars[TOTAL + GROUP], count=1)
    mbarrier.wait(bars[TOTAL + 1 - GROUP], segment & 1)
    sums += totals.index(place + 1 - GROUP).load(by_row)
    empty = sums == 0.0
    safe = gl.where(empty, 1.0, sums)
    numbers, logs, factor = result_at(target, first_row, slot, ROWS)
    a, b, c, d = _times(acc, factor / safe)
    # The masks are made here, not kept in registers from one request to the next.
    rows += opaque_zero()
    whole = gl.join(gl.join(a, c), gl.join(b, d)).permute((1, 0, 2, 3)).reshape((ROWS, 256))
    wide: gl.constexpr = whole.type.layout
    blank = gl.convert_layout(empty, gl.SliceLayout(1, wide))
    result = gl.where(blank[:, None], 0.0, whole)
    log_sum = gl.where(empty, -float("inf"), (peak - LIFT) * 0.6931471805599453 + gl.log(safe))
    row = gl.arange(0, ROWS, layout=by_row)
    line = gl.arange(0, ROWS, layout=gl.SliceLayout(1, wide))
    column = GROUP * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, wide))
    if GROUP == 0:
        gl.store(logs + row, log_sum, mask=row < rows)
    place = numbers + (line * 512)[:, None] + column[None, :]
    mask = (line < rows)[:, None] & (column >= 0)[None, :]
    gl.store(place, result.to(numbers.dtype.element_ty), mask=mask)


# Not specialised on these: a server uses many values of them.
@gluon.jit(do_not_specialize=["page_rows", "table_stride", "capacity", "q_len", "heads", "batch", "aligned"])
def mla_decode_e4m3_kernel(
    q, columns, block_table, seq_lens, out, lse, parts, part_lse, cuts, scales,
    q_batch_stride, q_token_stride, q_head_stride, page_rows, table_stride,
    softmax_scale, k_scale, capacity, q_len, heads, batch, aligned,
    PAGE_SIZE: gl.constexpr, BATCH: gl.constexpr, ROWS: gl.constexpr, IS_PACKED: gl.constexpr,
):  # fmt: skip
    """Attend from up to ROWS rows (query token, head) to an equal part of the tiles of all requests.

    The rows are heads of one query token or, if IS_PACKED, all heads of some. Grid: (blocks of such rows,
    parts). PAGE_SIZE is 64 or 128; BATCH is that of ``share_of``; ROWS is 16 or 32.
    ``softmax_scale * k_scale`` must be positive.
    """
    # As many tiles as shared memory has room for.
    stages: gl.constexpr = 5 if ROWS == 16 else 4
    gdc_launch_dependents()

    own = ROWS // heads * heads if IS_PACKED else heads
    first_row = gl.program_id(0) * own
    rows = gl.minimum(own, q_len * heads - first_row)
    # The last query token.
    token = (first_row + rows - 1) // heads
    # Without opaque_zero() each group computes this again, and the grid's size is spilled to local memory.
    program = (gl.program_id(1) + opaque_zero()) * gl.num_programs(0) + gl.program_id(0)
    cuts += program
    work = share_of(seq_lens, batch, capacity, q_len, token, aligned, BATCH)
    q_p = gl.allocate_shared_memory(gl.float16, [8, ROWS, 64], SHARED)
    q_v = shared_as(q_p, gl.float16, [2, ROWS, 256], SHARED)
    q_r = gl.allocate_shared_memory(gl.float16, [1, ROWS, 64], SHARED)
    left_p = gl.allocate_shared_memory(gl.int32, [4 * stages, 64, 16], WORDS)
    left = shared_as(left_p, gl.int32, [stages, 64, 64], WORDS)
    right_p = gl.allocate_shared_memory(gl.int32, [4 * stages, 64, 16], WORDS)
    right = shared_as(right_p, gl.int32, [stages, 64, 64], WORDS)
    rope = gl.allocate_shared_memory(gl.int32, [stages, 64, 16], WORDS)
    narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * ROWS, element_bitwidth=16, rank=2)
    given_p = gl.allocate_shared_memory(gl.float16, [8, 16, ROWS], narrow)
    given = shared_as(given_p, gl.float16, [2, 64, ROWS], narrow)
    peaks = gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT)
    totals = gl.allocate_shared_memory(gl.float32, [4, ROWS], FLAT)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    loaded = gl.allocate_shared_memory(gl.int64, [stages, 1], one)
    free = gl.allocate_shared_memory(gl.int64, [stages, 1], one)
    peak_0 = gl.allocate_shared_memory(gl.int64, [1], one)
    peak_1 = gl.allocate_shared_memory(gl.int64, [1], one)
    given_0 = gl.allocate_shared_memory(gl.int64, [1], one)
    given_1 = gl.allocate_shared_memory(gl.int64, [1], one)
    total_0 = gl.allocate_shared_memory(gl.int64, [1], one)
    total_1 = gl.allocate_shared_memory(gl.int64, [1], one)
    queries = gl.allocate_shared_memory(gl.int64, [1], one)
    queries_free = gl.allocate_shared_memory(gl.int64, [1], one)
    # In the order of the indices in hopper.py.
    bars = (loaded, free, queries, queries_free, given_0, given_1, total_0, total_1, peak_0, peak_1)
    for i in gl.static_range(stages):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(4, 10):
        mbarrier.init(bars[i], count=1)
    mbarrier.init(queries, count=LOAD_THREADS)
    mbarrier.init(queries_free, count=2)
    barrier()
    scale = softmax_scale * k_scale * 1.4426950408889634
    memory = (q_p, q_r, left_p, right_p, rope, left, right, given_p, given, peaks)
    target = (out, lse, parts, part_lse, k_scale)
    gl.warp_specialize(
        [
            (
                _group,
                (
                    memory, scales, totals, bars, target, seq_lens, capacity, q_len, heads, first_row, rows,
                    token, program, work, scale, 0, ROWS, stages, IS_PACKED,
                ),
            ),
            (
                _group,
                (
                    memory, scales, totals, bars, target, seq_lens, capacity, q_len, heads, first_row, rows,
                    token, program, work, scale, 1, ROWS, stages, IS_PACKED,
                ),
            ),
            (
                load_group,
                (
                    q_v, q_r, left_p, right_p, left, right, rope, bars, q, columns, block_table, seq_lens,
                    cuts, q_batch_stride, q_token_stride, q_head_stride, page_rows, 0, table_stride,
                    capacity, q_len, heads, first_row, rows, token, work,
                    PAGE_SIZE, ROWS, stages, False, IS_PACKED, BATCH > 1,
                ),
            ),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip
