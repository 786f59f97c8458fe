"""MLA decode for Hopper: two Gluon kernels for DeepSeek's shape, and their launch.

``mla_decode_pairs_kernel`` has a program of 64 rows: heads of one query token or, packed, of several. Its
keys come in pairs of tiles of 64. Group 0 computes the scores of the even tile and the left 256 columns of
the output; group 1 the scores of the odd tile and the right columns. While one does softmax, products of the
other run. Weights cross through shared memory.

``mla_decode_few_kernel`` has a program of at most 16 heads. The tensor cores multiply 64 rows at a time. Here
these are keys and output columns instead of heads, of which there would be too few: scores are
keys * queries^T, and the output is values^T * weights. Group 0 takes the even tiles, group 1 the odd ones,
each with all columns of the output, and they exchange halves of it at the end of a request.

In both kernels a third group loads: queries with asynchronous copies (cp.async), keys with TMA. TMA also
copies what follows the end of a request, and the computing groups clear that. TMA does not convert: for an
E4M3 cache, the loading group of the first kernel converts keys to float16 in registers. Up to 32 rows, the
kernel of ``e4m3.py`` is used instead.

A program decodes whole requests, or one of several splits of a request, or an equal part of the line. The
line is all tiles of all requests, one after another, so that programs have equal work even if lengths differ.
The parts of one request are merged afterwards. While the results of one request are stored, the keys of the
next are being loaded.

A program runs most of its instructions once, so they must be fetched from memory: with short requests it
waited for them a quarter of its time. So code outside the loop over tiles is short rather than unrolled.

Each barrier has an allocation of its own: the compiler puts a barrier of all threads between an arrival and a
wait that use the same allocation.
"""

from __future__ import annotations

from staleproof import device
from staleproof.ops.mla.plan import REQUEST_COST

device.load_triton()

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# These were renamed after Triton 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tile_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
IS_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

# Columns of a tile that arrive together: a product waits only for the columns that it reads.
WIDTH = gl.constexpr(64)
PIECES = gl.constexpr(256 // WIDTH.value)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
HALF = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order=[0]))

# Indices of barriers. LOADED has 8 for the pieces of the even tile and 8 for the odd one. FREE has 2 for each
# tile: left columns, then right and rotary columns. GIVEN and TOTAL have one for each group,
# by the group that arrives.
LOADED, FREE, QUERIES, QUERIES_FREE, GIVEN, TOTAL = (gl.constexpr(i) for i in (0, 1, 2, 3, 4, 6))
# Indices in ``memory``, which has: 0 queries in pieces, 1 their rotary columns; of two tiles, 2 and 3 the
# left and right columns in pieces, 4 and 5 the same memory as a whole, 6 the rotary columns; 7 the odd tile's
# weights; 8 maxima.
LEFT, RIGHT = gl.constexpr(4), gl.constexpr(5)
LOAD_THREADS = gl.constexpr(128)
COST = gl.constexpr(REQUEST_COST)


@gluon.jit
def opaque_zero():
    """Zero, but the compiler does not know it: an expression with it is computed where it is used.

    Otherwise the compiler hoists addresses and masks out of the loops and spills them to local memory.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def limit_of(seq_len, capacity, q_len, token):
    """Keys that query token ``token`` of a request attends to."""
    return gl.maximum(gl.minimum(seq_len, capacity) - q_len + token + 1, 0)


@gluon.jit
def token_of(row, heads):
    """``row // heads`` for rows below 64, with one division for all of them."""
    return row * (65536 // heads + 1) >> 16


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def pays_off(batch, units, aligned, programs):
    """Whether ``aligned`` programs are faster than all: a part is then whole requests, or lies within one.

    All requests have ``units`` tiles, the cost of a request included.
    """
    return gl.cdiv(batch * units, aligned) <= gl.cdiv(batch * units, programs) + COST


@gluon.jit
def share(whole, place, count):
    """``whole * place // count``, without a product that exceeds 32 bits."""
    return whole // count * place + whole % count * place // count


@gluon.jit
def split_of(program, tiles, splits):
    """A program's request, and its split of that request's ``tiles``: first tile, and end (exclusive).

    Programs are numbered through the splits of the first request, then of the next. A request with fewer
    tiles than splits has as many splits as tiles. ``merge.py`` uses the same numbers.
    """
    split = program % splits
    count = gl.minimum(tiles, splits)
    return program // splits, tiles * split // count, tiles * (split + 1) // count


@gluon.jit
def equal_part(seq_lens, batch, capacity, q_len, token, aligned, BATCH: gl.constexpr):
    """The part of program ``program_id(1)`` in the line of all tiles.

    If all requests have the same number of tiles and ``pays_off``, only ``aligned`` programs share them.

    Returns the part's first request and number of requests, ``stride`` and ``turn`` of ``next_request``, the
    tile of the line at which the first request begins, and the part's first tile and end (exclusive).
    """
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    index = gl.arange(0, BATCH, layout=line)
    seq_len = gl.load(seq_lens + index, mask=index < batch, other=0)
    limits = limit_of(seq_len, capacity, q_len, token)
    units = gl.where(index < batch, gl.maximum(gl.cdiv(limits, 64), 1) + COST, 0)
    most = gl.max(units, 0)
    is_even = gl.min(gl.where(index < batch, units, most), 0) == most
    program, programs = gl.program_id(1), gl.num_programs(1)
    is_aligned = is_even & pays_off(batch, most, aligned, programs)
    if is_aligned & (aligned >= batch):
        # No part has more than one request.
        first, begin, end = split_of(program, most - COST, aligned // batch)
        last = gl.minimum(first + 1, batch)
        unit = first * most
        begin_unit, end_unit = unit + COST + begin, unit + COST + end
    elif is_aligned:
        # No request has more than one part.
        first = share(batch, gl.minimum(program, aligned), aligned)
        last = share(batch, gl.minimum(program + 1, aligned), aligned)
        unit = first * most
        begin_unit, end_unit = unit, last * most
    else:
        ends = gl.associative_scan(units, 0, _add)
        whole = gl.sum(units, 0)
        # With fewer tiles than programs, the last programs have nothing to do.
        count = gl.minimum(whole, programs)
        place = gl.minimum(program, count)
        begin_unit = share(whole, place, count)
        end_unit = share(whole, gl.minimum(place + 1, count), count)
        # Requests that end before this part, and those that begin before its end.
        first = gl.sum((ends <= begin_unit).to(gl.int32), 0)
        last = gl.sum(((ends - units < end_unit) & (index < batch)).to(gl.int32), 0)
        unit = gl.max(gl.where(ends <= begin_unit, ends, 0), 0)
    return first, last - first, 1, 0, unit, begin_unit, end_unit


@gluon.jit
def own_split(seq_lens, splits, capacity, q_len, token):
    """One of ``splits`` splits of a request, in the form in which ``equal_part`` returns a part."""
    first = gl.program_id(1) // splits
    zero = first * 0
    begin_unit = zero
    end_unit = zero + 2147483647
    if splits > 1:
        limit = limit_of(gl.load(seq_lens + first), capacity, q_len, token)
        _, begin, end = split_of(gl.program_id(1), gl.maximum(gl.cdiv(limit, 64), 1), splits)
        begin_unit, end_unit = COST + begin, COST + end
    # One request, but still in a loop: otherwise the compiler hoists more than the registers can hold.
    return first, gl.minimum(splits, 1), 1, 0, zero, begin_unit, end_unit


@gluon.jit
def own_requests(batch):
    """Whole requests, one from each round of ``num_programs(1)``, in the form of ``equal_part``."""
    first, programs = gl.program_id(1), gl.num_programs(1)
    zero = first * 0
    turn = 1 - programs % 2
    rounds = gl.cdiv(batch, programs)
    # The last round may have fewer requests than programs.
    last = (rounds - 1) * programs + (first + (rounds - 1) * turn) % programs
    return first, rounds - (last >= batch).to(gl.int32), programs, turn, zero, zero, zero + 2147483647


@gluon.jit
def next_request(lap, seat, stride, turn):
    """A program's next request: one round (``stride`` requests) further, and ``turn`` seats further.

    ``turn`` makes the distance odd. Otherwise, if every second request is long, one program might get only
    long ones.
    """
    seat += turn
    return lap + stride, gl.where((turn != 0) & (seat >= stride), seat - stride, seat)


@gluon.jit
def share_of(seq_lens, batch, capacity, q_len, token, aligned, BATCH: gl.constexpr):
    """A program's share: with BATCH 0 a request or a split of it, with 1 whole requests, else an equal part.

    For equal parts BATCH is ``batch``, rounded up to a power of two.
    """
    if BATCH == 0:
        return own_split(seq_lens, aligned, capacity, q_len, token)
    elif BATCH == 1:
        return own_requests(batch)
    else:
        return equal_part(seq_lens, batch, capacity, q_len, token, aligned, BATCH)


@gluon.jit
def part_of(seq_len, capacity, q_len, token, unit, begin_unit, end_unit):
    """A request's number of keys and of tiles, and a program's part of the tiles, ``begin`` up to ``end``.

    The request begins at ``unit`` of the line. The program has no part of it if begin >= end.
    """
    limit = limit_of(seq_len, capacity, q_len, token)
    tiles = gl.maximum(gl.cdiv(limit, 64), 1)
    begin = gl.minimum(gl.maximum(begin_unit - unit - COST, 0), tiles)
    end = gl.minimum(end_unit - unit - COST, tiles)
    return limit, tiles, begin, end


@gluon.jit
def _cut_off(scores, live, heads, more, IS_PACKED: gl.constexpr):
    """Scores of keys that a row does not attend to become -inf: only the end of a request has such keys.

    The rows are ``heads`` of each of ``more`` + 1 query tokens. The last one attends to ``live`` keys, each
    before it to one less.
    """
    if live - more < 64:
        column = gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
        if IS_PACKED:
            row = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
            mask = column[None, :] < (live - more + token_of(row, heads))[:, None]
        else:
            mask = (column < live)[None, :]
        scores = gl.where(mask, scores, -float("inf"))
    return scores


@gluon.constexpr_function
def largest_exponent(dtype):
    """The exponent bits of Inf and NaN, for two 16-bit numbers in a word."""
    return 0x7C007C00 if dtype == gl.float16 else 0x7F807F80


@gluon.jit
def _unfinite(words, dtype: gl.constexpr):
    """A mask with all bits set for each Inf and NaN in ``words``. For E4M3 numbers, dtype is int32.

    Adding one to the highest exponent overflows into the sign bit. E4M3 has no Inf; its NaNs are 0x7f, 0xff.
    """
    if dtype == gl.int32:
        found = ((words & 0x7F7F7F7F) + 0x01010101) >> 7 & 0x01010101
        return found * 0xFF
    else:
        exponent: gl.constexpr = largest_exponent(dtype)
        found = ((words & exponent) + (0x80008000 - exponent)) >> 15 & 0x00010001
        return found * 0xFFFF


@gluon.jit
def clear_tail(pieces, tile, live, more, LAYOUT: gl.constexpr, IS_PACKED: gl.constexpr):
    """Set rows of values from ``live`` on to zero: their weight is 0, but 0 * NaN is NaN.

    Also set Inf and NaN to zero in the ``more`` rows before, to which some query tokens do not attend. The
    tokens that do attend keep the fault: it is in their scores, and a NaN score reaches all columns. The
    values of a tile are in four of ``pieces``, as words in LAYOUT.

    The loop over 16 rows is not unrolled: this runs once a request, so its instructions are not cached.
    """
    if live - more < 64:
        wide: gl.constexpr = 16 if pieces.dtype == gl.int32 else 32
        words = shared_as(pieces, gl.int32, [4 * pieces.shape[0], 16, wide], LAYOUT)
        row = gl.arange(0, 16, layout=gl.SliceLayout(1, ROPE_WORDS))
        for i in range(gl.maximum(live - more, 0) // 16, 4 + opaque_zero()):
            for piece in gl.static_range(PIECES):
                rows = words.index((tile * PIECES + piece) * 4 + i)
                kept = rows.load(ROPE_WORDS)
                if IS_PACKED:
                    finite_bits = kept & ~_unfinite(kept, pieces.dtype)
                    kept = gl.where((16 * i + row < live - more)[:, None], kept, finite_bits)
                rows.store(gl.where((16 * i + row < live)[:, None], kept, 0))
        fence_async_shared()
        barrier()


@gluon.jit
def finite(peak):
    """The number to subtract from scores: the peak, or 0 while a row has no key."""
    return gl.where(peak == -float("inf"), 0.0, peak)


@gluon.jit
def scale_of(scales, row, scale, live, ROWS: gl.constexpr, CONVERTS: gl.constexpr, LAYOUT: gl.constexpr):
    """The factor of the scores of each row from ``row`` on; for converted queries it undoes their scale."""
    if CONVERTS:
        place = gl.arange(0, ROWS, layout=LAYOUT)
        return gl.load(scales + row + place, mask=place < live, other=1.0) * scale
    else:
        return gl.full([ROWS], 1.0, gl.float32, layout=LAYOUT) * scale


@gluon.constexpr_function
def lift_of(dtype):
    """Weights are multiplied by 2 ** this: long requests have many below 2 ** -24, the least float16."""
    return 15.0 if dtype == gl.float16 else 0.0


@gluon.jit
def _scaled(acc, decay):
    """The output, rescaled to a new maximum."""
    return acc * gl.convert_layout(decay, gl.SliceLayout(1, ACC))[:, None]


@gluon.jit
def wait_for_queries(bars, segment, keys, phase, has_keys):
    """Wait for a request's queries and, if this group ``has_keys``, for its first keys on barrier ``keys``.

    Queries come by cp.async, so tensor cores may read them only after a fence. Triton's sanitizer does not
    follow the barrier of cp.async; it learns of these copies at the next barrier of the loading group.
    """
    mbarrier.wait(bars[QUERIES], segment & 1)
    mbarrier.wait(keys, phase & 1, pred=has_keys)
    fence_async_shared()


@gluon.jit
def _begun_scores(memory, bars, z, used, TILE: gl.constexpr):
    """Start the scores of the even tile (0) or the odd one (1): each product as its columns arrive."""
    q_p, q_r, left_p, right_p, rope = memory[0], memory[1], memory[2], memory[3], memory[6]
    scores = warpgroup_mma_init(gl.full([64, 64], 0.0, gl.float32, layout=SCORES))
    for i in gl.static_range(PIECES):
        mbarrier.wait(bars[LOADED][TILE * 2 * PIECES + i], used & 1)
        piece = left_p.index(z + TILE * PIECES + i).permute((1, 0))
        scores = warpgroup_mma(q_p.index(z + i), piece, scores, use_acc=i > 0, is_async=True)
    for i in gl.static_range(PIECES):
        mbarrier.wait(bars[LOADED][(TILE * 2 + 1) * PIECES + i], used & 1)
        piece = right_p.index(z + TILE * PIECES + i).permute((1, 0))
        scores = warpgroup_mma(q_p.index(z + PIECES + i), piece, scores, is_async=True)
    return warpgroup_mma(q_r.index(z), rope.index(z + TILE).permute((1, 0)), scores, is_async=True)


@gluon.jit
def even_step(
    acc, peak, total, memory, bars, live, heads, more, scale, used_a, used_b, is_last,
    HAS_ODD: gl.constexpr, IS_PACKED: gl.constexpr,
):  # fmt: skip
    """Group 0: scores of the even tile, and the left columns of both tiles."""
    left, rope, given, peaks = memory[LEFT], memory[6], memory[7], memory[8]
    dtype: gl.constexpr = given.dtype
    z = opaque_zero()
    scores = _begun_scores(memory, bars, z, used_a, 0)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if IS_PACKED or not HAS_ODD:
        scores = _cut_off(scores, live, heads, more, IS_PACKED)
    # The maximum ignores a NaN. The NaN reaches the sums, and so the output.
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
    base = finite(new_peak)
    weights = gl.exp2(scores * scale[:, None] - (base - lift_of(dtype))[:, None])
    rounded = weights.to(dtype)
    peaks.index(0).store(new_peak)
    # The rotary columns have been read, so their memory takes the weights.
    rope.index(z).store(rounded)
    fence_async_shared()
    barrier()
    if IS_PACKED and HAS_ODD:
        # This group clears the right columns too, because the other group has no time between its products.
        clear_tail(memory[3], z, live, more, PAIRS, IS_PACKED)
    mbarrier.arrive(bars[GIVEN], count=1)
    mbarrier.arrive(bars[QUERIES_FREE], count=1, pred=is_last)
    decay = gl.exp2(peak - base)
    total = total * decay + gl.sum(weights, 1)
    acc = _scaled(acc, decay)
    if IS_PACKED or not HAS_ODD:
        clear_tail(memory[2], z, live, more, PAIRS, IS_PACKED)
    acc = warpgroup_mma(gl.convert_layout(rounded, WEIGHTS), left.index(z), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if HAS_ODD:
        barrier()
        mbarrier.arrive(bars[FREE].index(0), count=1)
        mbarrier.wait(bars[GIVEN + 1], used_b & 1)
        last_peak = peaks.index(1).load(gl.SliceLayout(1, SCORES))
        decay = gl.exp2(new_peak - finite(last_peak))
        total = total * decay
        acc = _scaled(acc, decay)
        clear_tail(memory[2], z + 1, live - 64, more, PAIRS, IS_PACKED)
        acc = warpgroup_mma(given.index(z), left.index(z + 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(bars[FREE].index(2), count=1, pred=not is_last)
    else:
        last_peak = new_peak
    return acc, last_peak, total


@gluon.jit
def odd_step(
    acc, peak, total, memory, bars, live, heads, more, scale, used_a, used_b, is_last,
    IS_PACKED: gl.constexpr,
):  # fmt: skip
    """Group 1: scores of the odd tile, and the right columns of both tiles."""
    right, rope, given, peaks = memory[RIGHT], memory[6], memory[7], memory[8]
    dtype: gl.constexpr = given.dtype
    z = opaque_zero()
    scores = _begun_scores(memory, bars, z, used_b, 1)
    mbarrier.wait(bars[GIVEN], used_a & 1)
    even_peak = peaks.index(0).load(gl.SliceLayout(1, SCORES))
    acc = _scaled(acc, gl.exp2(peak - finite(even_peak)))
    # The even tile first: its memory is then free in the middle of a pair.
    acc = warpgroup_mma(rope.index(z), right.index(z), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    scores = _cut_off(scores, live, heads, more, IS_PACKED)
    new_peak = gl.maximum(even_peak, gl.max(scores, 1) * scale)
    base = finite(new_peak)
    weights = gl.exp2(scores * scale[:, None] - (base - lift_of(dtype))[:, None])
    rounded = weights.to(dtype)
    peaks.index(1).store(new_peak)
    given.index(z).store(rounded)
    fence_async_shared()
    barrier()
    mbarrier.arrive(bars[GIVEN + 1], count=1)
    mbarrier.arrive(bars[QUERIES_FREE], count=1, pred=is_last)
    total = total * gl.exp2(peak - base) + gl.sum(weights, 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(bars[FREE].index(1), count=1)
    acc = _scaled(acc, gl.exp2(even_peak - base))
    clear_tail(memory[3], z + 1, live, more, PAIRS, IS_PACKED)
    acc = warpgroup_mma(gl.convert_layout(rounded, WEIGHTS), right.index(z + 1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(bars[FREE].index(3), count=1, pred=not is_last)
    return acc, new_peak, total


@gluon.jit
def lone_step(acc, peak, total, memory, bars, live, more, used_a, IS_PACKED: gl.constexpr):
    """Group 1, if the last pair has no odd tile."""
    right, rope, peaks = memory[RIGHT], memory[6], memory[8]
    z = opaque_zero()
    mbarrier.arrive(bars[QUERIES_FREE], count=1)
    mbarrier.wait(bars[GIVEN], used_a & 1)
    new_peak = peaks.index(0).load(gl.SliceLayout(1, SCORES))
    decay = gl.exp2(peak - finite(new_peak))
    acc = _scaled(acc, decay)
    clear_tail(memory[3], z, live, more, PAIRS, IS_PACKED)
    acc = warpgroup_mma(rope.index(z), right.index(z), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, new_peak, total * decay


ROPE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
WORDS = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
ROPE_WORDS = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
PAIRS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
# Converts four E4M3 numbers in a word to two words of two float16 numbers, which is exact. A conversion to
# bfloat16 would have to go through float16 and float32.
TO_FLOAT16 = gl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")


@gluon.jit
def shared_as(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory with another shape."""
    if IS_RENAMED:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


@gluon.jit
def load_queries(
    q_v, q_r, bar, base, stride, heads, gap, live, ROWS: gl.constexpr, IS_PACKED: gl.constexpr,
):  # fmt: skip
    """Start copying ``live`` rows of queries, 16 at a time so that few addresses are alive; others become 0.

    From one query token to the next, the distance between heads is ``gap`` numbers more than within a token.
    """
    # Addresses of rows are made for each request, not kept in registers from one to the next.
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, HALF)) + opaque_zero()
    column = gl.arange(0, 256, layout=gl.SliceLayout(0, HALF))
    row_r = gl.arange(0, 16, layout=gl.SliceLayout(1, ROPE)) + opaque_zero()
    column_r = 512 + gl.arange(0, 64, layout=gl.SliceLayout(0, ROPE))
    for i in gl.static_range(ROWS // 16):
        rows = base + (16 * i + row) * stride
        if IS_PACKED:
            rows += token_of(16 * i + row, heads) * gap
        mask = (16 * i + row < live)[:, None]
        async_load(q_v.index(0).slice(16 * i, 16, dim=0), rows[:, None] + column[None, :], mask=mask)
        async_load(q_v.index(1).slice(16 * i, 16, dim=0), rows[:, None] + (256 + column)[None, :], mask=mask)
        rows_r = base + (16 * i + row_r) * stride
        if IS_PACKED:
            rows_r += token_of(16 * i + row_r, heads) * gap
        mask_r = (16 * i + row_r < live)[:, None]
        async_load(q_r.index(0).slice(16 * i, 16, dim=0), rows_r[:, None] + column_r[None, :], mask=mask_r)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _load_half(
    pieces, rope, bars, columns, first_row, wanted, used, TILE: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Load half of a tile's columns in pieces with a barrier each; rotary ones with the last right piece."""
    mbarrier.wait(bars[FREE].index(2 * TILE + RIGHT), (used & 1) ^ 1)
    for i in gl.static_range(PIECES):
        bar = bars[LOADED][(TILE * 2 + RIGHT) * PIECES + i]
        if wanted:
            if RIGHT == 1 and i == PIECES - 1:
                mbarrier.expect(bar, 64 * (WIDTH + 64) * 2)
                tile_load(columns, [first_row, 512], bar, rope.index(TILE))
            else:
                mbarrier.expect(bar, 64 * WIDTH * 2)
            tile_load(columns, [first_row, RIGHT * 256 + i * WIDTH], bar, pieces.index(TILE * PIECES + i))
        else:
            mbarrier.arrive(bar, count=1)


@gluon.jit
def page_of(table, tile, limit, PAGE_SIZE: gl.constexpr):
    return gl.load(table + tile * 64 // PAGE_SIZE, mask=tile * 64 < limit, other=0)


@gluon.jit
def _copy_tiles(
    left, right, rope, bars, columns, table, page_a, page_b, begin, end, limit, used_a, used_b, page_rows,
    PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy a request's tiles. Each goes to the memory of the tile two before it, once that is free."""
    for tile in range(begin, end, 2):
        row_a = page_a * page_rows + tile * 64 % PAGE_SIZE
        row_b = page_b * page_rows + (tile + 1) * 64 % PAGE_SIZE
        page_a = page_of(table, tile + 2, limit, PAGE_SIZE)
        page_b = page_of(table, tile + 3, limit, PAGE_SIZE)
        wanted = limit > 0
        _load_half(left, rope, bars, columns, row_a, wanted, used_a, 0, 0)
        _load_half(right, rope, bars, columns, row_a, wanted, used_a, 0, 1)
        if tile + 1 < end:
            _load_half(left, rope, bars, columns, row_b, wanted, used_b, 1, 0)
            _load_half(right, rope, bars, columns, row_b, wanted, used_b, 1, 1)
            used_b += 1
        used_a += 1


@gluon.jit
def _load_words(
    cache, row, live, row_words, FIRST: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Start loading words of 64 rows from ``row`` on, four numbers each; zeros in rows from ``live`` on.

    Words, because a single number would occupy a whole register while it waits.
    """
    # Addresses of rows are made here, not kept in registers from tile to tile.
    row_words = gl.multiple_of(row_words + opaque_zero(), 4)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    word = FIRST + gl.arange(0, COUNT, layout=gl.SliceLayout(0, LAYOUT))
    at = cache + row * row_words + (rows[:, None] * row_words + word[None, :])
    return gl.load(at, mask=(rows < live)[:, None], other=0)


@gluon.jit
def _load_left(cache, row, live, row_words):
    return _load_words(cache, row, live, row_words, 0, 64, WORDS)


@gluon.jit
def _load_right(cache, row, live, row_words):
    """Right columns, and rotary ones."""
    right = _load_words(cache, row, live, row_words, 64, 64, WORDS)
    return right, _load_words(cache, row, live, row_words, 128, 16, ROPE_WORDS)


@gluon.jit
def _converted(words):
    """(rows, words) of four E4M3 numbers as (rows, 2 * words) of two float16 numbers each."""
    low, high = gl.inline_asm_elementwise(
        TO_FLOAT16, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(low, high).reshape((words.shape[0], 2 * words.shape[1]))


@gluon.jit
def _announce(bars, odd, RIGHT: gl.constexpr):
    """Signal that this group has stored columns: all pieces of one half of the even or odd tile."""
    fence_async_shared()
    barrier()
    for i in gl.static_range(PIECES):
        mbarrier.arrive(bars[LOADED][RIGHT * PIECES + i], count=1, pred=odd == 0)
        mbarrier.arrive(bars[LOADED][(2 + RIGHT) * PIECES + i], count=1, pred=odd == 1)


@gluon.jit
def _convert_tiles(
    left, right, rope, bars, cache, table, begin, end, limit, used_a, used_b, page_rows, row_words,
    PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Convert a request's tiles to float16. While columns are stored, the next columns are being loaded."""
    left = shared_as(left, gl.int32, [2, 64, 128], PAIRS)
    right = shared_as(right, gl.int32, [2, 64, 128], PAIRS)
    rope = shared_as(rope, gl.int32, [2, 64, 32], PAIRS)
    row = page_of(table, begin, limit, PAGE_SIZE).to(gl.int64) * page_rows + begin * 64 % PAGE_SIZE
    live = limit - begin * 64
    a = _load_left(cache, row, live, row_words)
    for tile in range(begin, end):
        odd = (tile - begin) & 1
        used = gl.where(odd == 0, used_a, used_b) + (tile - begin) // 2
        next_page = page_of(table, tile + 1, limit, PAGE_SIZE)
        mbarrier.wait(bars[FREE].index(2 * odd), (used & 1) ^ 1)
        left.index(odd).store(_converted(a))
        _announce(bars, odd, 0)
        b, c = _load_right(cache, row, live, row_words)
        row = next_page.to(gl.int64) * page_rows + (tile + 1) * 64 % PAGE_SIZE
        live = gl.where(tile + 1 < end, limit - (tile + 1) * 64, 0)
        mbarrier.wait(bars[FREE].index(2 * odd + 1), (used & 1) ^ 1)
        right.index(odd).store(_converted(b))
        rope.index(odd).store(_converted(c))
        _announce(bars, odd, 1)
        a = _load_left(cache, row, live, row_words)


@gluon.jit
def _copy_words(
    left, right, rope, bars, columns, table, page, begin, end, limit, used, page_rows,
    PAGE_SIZE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy a request's tiles of E4M3 numbers, as words of four, to STAGES buffers in turn."""
    for tile in range(begin, end):
        row = page * page_rows + tile * 64 % PAGE_SIZE
        page = page_of(table, tile + 1, limit, PAGE_SIZE)
        stage = used % STAGES
        bar = bars[LOADED].index(stage)
        mbarrier.wait(bars[FREE].index(stage), used // STAGES & 1 ^ 1)
        if limit > 0:
            mbarrier.expect(bar, 64 * 576)
            for i in gl.static_range(4):
                tile_load(columns, [row, 16 * i], bar, left.index(stage * 4 + i))
            for i in gl.static_range(4):
                tile_load(columns, [row, 64 + 16 * i], bar, right.index(stage * 4 + i))
            tile_load(columns, [row, 128], bar, rope.index(stage))
        else:
            mbarrier.arrive(bar, count=1)
        used += 1


@gluon.jit
def load_group(
    q_v, q_r, left_p, right_p, left, right, rope, bars, q, columns, block_table, seq_lens, cuts,
    q_batch_stride, q_token_stride, q_head_stride, page_rows, row_words, table_stride,
    capacity, q_len, heads, first_row, rows, token, work,
    PAGE_SIZE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, CONVERTS: gl.constexpr,
    IS_PACKED: gl.constexpr, CUTS: gl.constexpr,
):  # fmt: skip
    """Load ``rows`` queries of at most ROWS, and keys, in the order in which their memory is freed.

    With STAGES > 0 the keys stay E4M3, and memory has this many tiles; with 0 it has a pair of tiles. With
    CUTS this group also writes to ``cuts`` which request was cut, for ``merge.py``.
    """
    if CONVERTS or STAGES > 0:
        # Wait for the launch that converts the queries. The groups that load the scales wait too.
        gdc_wait()
    seat, requests, stride, turn, unit, begin_unit, end_unit = work
    gap = q_token_stride - heads * q_head_stride
    used_a = 0
    used_b = 0
    segment = 0
    if CUTS:
        # The memory still holds the cuts of another call.
        gl.store(cuts, 0)
    lap = seat * 0
    for _ in range(requests):
        request = (lap + seat).to(gl.int64)
        lap, seat = next_request(lap, seat, stride, turn)
        seq_len = gl.load(seq_lens + request)
        limit, tiles, begin, end = part_of(seq_len, capacity, q_len, token, unit, begin_unit, end_unit)
        unit += tiles + COST
        if begin < end:
            if CUTS and end < tiles:
                # -1 for a request that began in an earlier part: it is this program's only one. Otherwise it
                # is the last one.
                gl.store(cuts, gl.where(begin > 0, -1, request.to(gl.int32) + 1))
            table = block_table + request * (table_stride + opaque_zero())
            q_base = (
                q
                + request * q_batch_stride
                + (first_row // heads).to(gl.int64) * q_token_stride
                + (first_row % heads).to(gl.int64) * q_head_stride
            )
            live_q = gl.where(limit > 0, rows, 0)
            # Look up pages before queries are loaded, so that the first keys need not wait for those.
            page_a = page_of(table, begin, limit, PAGE_SIZE)
            page_b = page_of(table, begin + 1, limit, PAGE_SIZE)
            mbarrier.wait(bars[QUERIES_FREE], (segment & 1) ^ 1)
            load_queries(q_v, q_r, bars[QUERIES], q_base, q_head_stride, heads, gap, live_q, ROWS, IS_PACKED)
            segment += 1
            if STAGES > 0:
                _copy_words(
                    left_p, right_p, rope, bars, columns, table, page_a, begin, end, limit, used_a + used_b,
                    page_rows, PAGE_SIZE, STAGES,
                )  # fmt: skip
            elif CONVERTS:
                _convert_tiles(
                    left, right, rope, bars, columns, table, begin, end, limit, used_a, used_b,
                    page_rows, row_words, PAGE_SIZE,
                )  # fmt: skip
            else:
                _copy_tiles(
                    left_p, right_p, rope, bars, columns, table, page_a, page_b, begin, end, limit,
                    used_a, used_b, page_rows, PAGE_SIZE,
                )  # fmt: skip
            used_a += (end - begin + 1) // 2
            used_b += (end - begin) // 2


@gluon.jit
def key_memory(dtype: gl.constexpr, layout: gl.constexpr):
    """Memory of both tiles: left and right columns in pieces, then views of the same memory as a whole."""
    left_p = gl.allocate_shared_memory(dtype, [512 // WIDTH, 64, WIDTH], layout)
    left = shared_as(left_p, dtype, [2, 64, 256], layout)
    right_p = gl.allocate_shared_memory(dtype, [512 // WIDTH, 64, WIDTH], layout)
    right = shared_as(right_p, dtype, [2, 64, 256], layout)
    return left_p, right_p, left, right


@gluon.jit
def barriers():
    """All barriers, in the order of the indices at the top of this file."""
    one: gl.constexpr = mbarrier.MBarrierLayout()
    loaded = ()
    # Separate allocations: between two barriers of one allocation the compiler would make all threads wait.
    for _ in gl.static_range(16):
        # Gluon does not support unpacking with a star here.
        loaded = loaded + (gl.allocate_shared_memory(gl.int64, [1], one),)  # type: ignore[assignment]  # noqa: RUF005
    free = gl.allocate_shared_memory(gl.int64, [4, 1], one)
    given_0 = gl.allocate_shared_memory(gl.int64, [1], one)
    given_1 = gl.allocate_shared_memory(gl.int64, [1], one)
    total_0 = gl.allocate_shared_memory(gl.int64, [1], one)
    total_1 = gl.allocate_shared_memory(gl.int64, [1], one)
    queries = gl.allocate_shared_memory(gl.int64, [1], one)
    queries_free = gl.allocate_shared_memory(gl.int64, [1], one)
    bars = (loaded, free, queries, queries_free, given_0, given_1, total_0, total_1)
    for i in gl.static_range(16):
        mbarrier.init(loaded[i], count=1)
    for i in gl.static_range(4):
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(4, 8):
        mbarrier.init(bars[i], count=1)
    mbarrier.init(queries, count=LOAD_THREADS)
    mbarrier.init(queries_free, count=2)
    barrier()
    return bars


@gluon.jit
def result_at(target, first_row, slot, ROOM: gl.constexpr):
    """Where to store output and lse of rows from ``first_row`` on, or with ``slot`` >= 0 those of a part.

    The third result is the factor of the output. For a part it is 1: a part is an average of values, and so
    in the range of their dtype. The merge multiplies by ``k_scale``.
    """
    out, lse, parts, part_lse, k_scale = target
    if slot >= 0:
        first = slot.to(gl.int64) * ROOM
        numbers = parts + first * 512
        logs = part_lse + first
    else:
        numbers = out + first_row * 512
        logs = lse + first_row
    return numbers, logs, gl.where(slot >= 0, 1.0, k_scale)


@gluon.jit
def _pairs_store(
    acc, peak, total, totals, staging, free, bars, target, segment, first_row, rows, slot,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Write one half of the rows: the result, or with ``slot`` >= 0 a part of it that is merged later.

    The output has ``rows`` rows from ``first_row`` on. ``staging`` held the last values that this group read;
    ``free`` is the barrier of that memory.
    """
    place = (segment & 1) * 2
    totals.index(place + GROUP).store(total)
    barrier()
    mbarrier.arrive(bars[TOTAL + GROUP], count=1)
    mbarrier.wait(bars[TOTAL + 1 - GROUP], segment & 1)
    total += totals.index(place + 1 - GROUP).load(gl.SliceLayout(1, SCORES))
    empty = total == 0.0
    safe = gl.where(empty, 1.0, total)
    numbers, logs, factor = result_at(target, first_row, slot, 64)
    factor = gl.convert_layout(factor / safe, gl.SliceLayout(1, ACC))
    blank = gl.convert_layout(empty, gl.SliceLayout(1, ACC))
    result = gl.where(blank[:, None], 0.0, acc * factor[:, None])
    peak -= lift_of(staging.dtype)
    log_sum = gl.where(empty, -float("inf"), peak * 0.6931471805599453 + gl.log(safe))
    if GROUP == 0:
        row = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
        gl.store(logs + row, log_sum, mask=row < rows)
    # Through shared memory, so that a warp stores whole rows.
    whole_rows = shared_as(staging, numbers.dtype.element_ty, [64, 256], SHARED)
    whole_rows.store(result.to(numbers.dtype.element_ty))
    barrier()
    rounded = whole_rows.load(HALF)
    fence_async_shared()
    barrier()
    mbarrier.arrive(free, count=1)
    line = gl.arange(0, 64, layout=gl.SliceLayout(1, HALF))
    column = GROUP * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, HALF))
    gl.store(numbers + (line * 512)[:, None] + column[None, :], rounded, mask=(line < rows)[:, None])


@gluon.jit
def _pairs_group(
    memory, scales, totals, bars, target, seq_lens, capacity, q_len, heads, first_row, rows, token,
    program, work, scale, GROUP: gl.constexpr, CONVERTS: gl.constexpr, IS_PACKED: gl.constexpr,
):  # fmt: skip
    """One of the two groups that compute."""
    if CONVERTS:
        gdc_wait()
    seat, requests, stride, turn, unit, begin_unit, end_unit = work
    more = token - first_row // heads if IS_PACKED else 0
    used_a = 0
    used_b = 0
    segment = 0
    lap = seat * 0
    for _ in range(requests):
        request = lap + seat
        lap, seat = next_request(lap, seat, stride, turn)
        seq_len = gl.load(seq_lens + request)
        limit, tiles, begin, end = part_of(seq_len, capacity, q_len, token, unit, begin_unit, end_unit)
        unit += tiles + COST
        if begin < end:
            peak = gl.full([64], -float("inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
            total = gl.full([64], 0.0, gl.float32, layout=gl.SliceLayout(1, SCORES))
            acc = gl.full([64, 256], 0.0, gl.float32, layout=ACC)
            row = request.to(gl.int64) * q_len * heads + first_row
            factors: gl.constexpr = gl.SliceLayout(1, SCORES)
            row_scale = scale_of(scales, row, scale, rows, 64, CONVERTS, factors)
            keys = bars[LOADED][GROUP * 2 * PIECES]
            wait_for_queries(bars, segment, keys, used_a if GROUP == 0 else used_b, begin + GROUP < end)
            pairs = (end - begin) // 2
            for pair in range(pairs):
                live = limit - (begin + 2 * pair + GROUP) * 64
                if GROUP == 0:
                    acc, peak, total = even_step(
                        acc, peak, total, memory, bars, live, heads, more, row_scale,
                        used_a + pair, used_b + pair, begin + 2 * pair + 2 == end, True, IS_PACKED,
                    )  # fmt: skip
                else:
                    acc, peak, total = odd_step(
                        acc, peak, total, memory, bars, live, heads, more, row_scale,
                        used_a + pair, used_b + pair, begin + 2 * pair + 2 == end, IS_PACKED,
                    )  # fmt: skip
            used_a += pairs
            used_b += pairs
            if (end - begin) % 2 != 0:
                live = limit - (end - 1) * 64
                if GROUP == 0:
                    acc, peak, total = even_step(
                        acc, peak, total, memory, bars, live, heads, more, row_scale,
                        used_a, used_b, True, False, IS_PACKED,
                    )  # fmt: skip
                else:
                    acc, peak, total = lone_step(
                        acc, peak, total, memory, bars, live, more, used_a, IS_PACKED
                    )
                used_a += 1
            slot = gl.where(begin > 0, 2 * program, gl.where(end < tiles, 2 * program + 1, -1))
            odd = 1 - (end - begin) % 2
            if GROUP == 0:
                staging = memory[LEFT].index(odd)
            else:
                staging = memory[RIGHT].index(odd)
            free = bars[FREE].index(2 * odd + GROUP)
            _pairs_store(
                acc, peak, total, totals, staging, free, bars, target, segment, row, rows, slot, GROUP
            )  # fmt: skip
            segment += 1


# Not specialised on these: a server uses many values of them.
@gluon.jit(do_not_specialize=["page_rows", "table_stride", "capacity", "q_len", "heads", "batch", "aligned"])
def mla_decode_pairs_kernel(
    q, columns, block_table, seq_lens, out, lse, parts, part_lse, cuts, scales,
    q_batch_stride, q_token_stride, q_head_stride, page_rows, row_words, table_stride,
    softmax_scale, k_scale, capacity, q_len, heads, batch, aligned,
    PAGE_SIZE: gl.constexpr, BATCH: gl.constexpr, CONVERTS: gl.constexpr, IS_PACKED: gl.constexpr,
):  # fmt: skip
    """Attend from up to 64 rows (query token, head) to an equal part of the tiles of all requests.

    The rows are heads of one query token or, if IS_PACKED, all heads of some. Grid: (blocks of such rows,
    parts). PAGE_SIZE is 64 or 128; BATCH is that of ``share_of``.
    ``softmax_scale * k_scale`` must be positive.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    gdc_launch_dependents()

    own = 64 // heads * heads if IS_PACKED else gl.minimum(heads, 64)
    first_row = gl.program_id(0) * own
    rows = gl.minimum(own, q_len * heads - first_row)
    # The last query token.
    token = (first_row + rows - 1) // heads
    program = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    cuts += program
    work = share_of(seq_lens, batch, capacity, q_len, token, aligned, BATCH)
    pieces: gl.constexpr = 512 // WIDTH
    q_p = gl.allocate_shared_memory(dtype, [pieces, 64, WIDTH], SHARED)
    q_v = shared_as(q_p, dtype, [2, 64, 256], SHARED)
    q_r = gl.allocate_shared_memory(dtype, [1, 64, 64], SHARED)
    left_p, right_p, left, right = key_memory(dtype, SHARED)
    rope = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    given = gl.allocate_shared_memory(dtype, [1, 64, 64], SHARED)
    peaks = gl.allocate_shared_memory(gl.float32, [2, 64], FLAT)
    totals = gl.allocate_shared_memory(gl.float32, [4, 64], FLAT)
    bars = barriers()
    scale = softmax_scale * k_scale * 1.4426950408889634
    # In the order of the indices at the top of this file.
    memory = (q_p, q_r, left_p, right_p, left, right, rope, given, peaks)
    target = (out, lse, parts, part_lse, k_scale)
    gl.warp_specialize(
        [
            (
                _pairs_group,
                (
                    memory, scales, totals, bars, target, seq_lens, capacity, q_len, heads, first_row, rows,
                    token, program, work, scale, 0, CONVERTS, IS_PACKED,
                ),
            ),
            (
                _pairs_group,
                (
                    memory, scales, totals, bars, target, seq_lens, capacity, q_len, heads, first_row, rows,
                    token, program, work, scale, 1, CONVERTS, IS_PACKED,
                ),
            ),
            (
                load_group,
                (
                    q_v, q_r, left_p, right_p, left, right, rope, bars, q, columns, block_table, seq_lens,
                    cuts, q_batch_stride, q_token_stride, q_head_stride, page_rows, row_words, table_stride,
                    capacity, q_len, heads, first_row, rows, token, work,
                    PAGE_SIZE, 64, 0, CONVERTS, IS_PACKED, BATCH > 1,
                ),
            ),
        ],
        [4, 4],
        # Registers per thread of the second and third group. The three have 504 together; the first gets the
        # rest, 208 or 224.
        [200, 96] if CONVERTS else [216, 64],
    )  # fmt: skip


HEADS = gl.constexpr(16)
# Layout of (keys or output columns, heads).
TALL = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
BY_HEAD = gl.constexpr(gl.SliceLayout(0, TALL.value))
# No weights cross between the groups here. Each barrier: this group has consumed the other's data.
READ = GIVEN


@gluon.jit
def _few_step(
    left_acc, right_acc, peak, total, memory, bars, live, scale, used, is_last, TILE: gl.constexpr,
):  # fmt: skip
    """One tile of 64 keys, of which ``live`` count: scores, weights, and all columns of the output."""
    q_p, q_r, left_p, right_p, left, right, rope, given = memory
    z = opaque_zero()
    scores = warpgroup_mma_init(gl.full([64, HEADS], 0.0, gl.float32, layout=TALL))
    for i in gl.static_range(PIECES):
        mbarrier.wait(bars[LOADED][TILE * 2 * PIECES + i], used & 1)
        piece = q_p.index(z + i).permute((1, 0))
        scores = warpgroup_mma(
            left_p.index(z + TILE * PIECES + i), piece, scores, use_acc=i > 0, is_async=True
        )
    for i in gl.static_range(PIECES):
        mbarrier.wait(bars[LOADED][(TILE * 2 + 1) * PIECES + i], used & 1)
        keys, piece = right_p.index(z + TILE * PIECES + i), q_p.index(z + PIECES + i).permute((1, 0))
        scores = warpgroup_mma(keys, piece, scores, is_async=True)
    scores = warpgroup_mma(rope.index(z + TILE), q_r.index(z).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if live < 64:
        key = gl.arange(0, 64, layout=gl.SliceLayout(1, TALL))
        scores = gl.where((key < live)[:, None], scores, -float("inf"))
    # The maximum ignores a NaN. The NaN reaches the sums, and so the output.
    new_peak = gl.maximum(peak, gl.max(scores, 0) * scale)
    base = finite(new_peak)
    weights = gl.exp2(scores * scale - (base - lift_of(given.dtype))[None, :])
    given.index(z + TILE).store(weights.to(given.dtype))
    if live < 64:
        clear_tail(left_p, z + TILE, live, 0, PAIRS, False)
        clear_tail(right_p, z + TILE, live, 0, PAIRS, False)
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
def _few_store(
    own, theirs, peak, total, peaks, totals, halves, bars, target, segment, first_row,
    heads, slot, GROUP: gl.constexpr, LIFT: gl.constexpr,
):  # fmt: skip
    """Exchange halves of the output with the other group, and write one half of a result or of a part.

    ``own`` are this group's sums of the columns that it writes, ``theirs`` its sums of the other columns.
    """
    place = (segment & 1) * 2
    sums = gl.sum(total, 0)
    # Wait until the other group has read the last halves. For the first request there are none.
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
    numbers, logs, factor = result_at(target, first_row, slot, HEADS)
    result = gl.where(empty[None, :], 0.0, acc * (factor / safe)[None, :])
    highest -= LIFT
    log_sum = gl.where(empty, -float("inf"), highest * 0.6931471805599453 + gl.log(safe))
    head = gl.arange(0, HEADS, layout=BY_HEAD)
    column = GROUP * 256 + gl.arange(0, 256, layout=gl.SliceLayout(1, TALL))
    if GROUP == 0:
        gl.store(logs + head, log_sum, mask=head < heads)
    place = numbers + (head * 512)[None, :] + column[:, None]
    mask = (head < heads)[None, :] & (column >= 0)[:, None]
    gl.store(place, result.to(numbers.dtype.element_ty), mask=mask)


@gluon.jit
def _few_group(
    memory, peaks, totals, halves, bars, target, seq_lens, capacity, q_len, heads, token,
    program, work, scale, GROUP: gl.constexpr,
):  # fmt: skip
    """One of the two groups that compute."""
    seat, requests, stride, turn, unit, begin_unit, end_unit = work
    used = 0
    segment = 0
    lap = seat * 0
    for _ in range(requests):
        request = lap + seat
        lap, seat = next_request(lap, seat, stride, turn)
        seq_len = gl.load(seq_lens + request)
        limit, tiles, begin, end = part_of(seq_len, capacity, q_len, token, unit, begin_unit, end_unit)
        unit += tiles + COST
        if begin < end:
            peak = gl.full([HEADS], -float("inf"), gl.float32, layout=BY_HEAD)
            total = gl.full([64, HEADS], 0.0, gl.float32, layout=TALL)
            left_acc = gl.full([256, HEADS], 0.0, gl.float32, layout=TALL)
            right_acc = gl.full([256, HEADS], 0.0, gl.float32, layout=TALL)
            mine = (end - begin + 1 - GROUP) // 2
            wait_for_queries(bars, segment, bars[LOADED][GROUP * 2 * PIECES], used, mine > 0)
            for i in range(mine):
                live = limit - (begin + 2 * i + GROUP) * 64
                left_acc, right_acc, peak, total = _few_step(
                    left_acc, right_acc, peak, total, memory, bars, live, scale,
                    used + i, i + 1 == mine, GROUP,
                )  # fmt: skip
            used += mine
            mbarrier.arrive(bars[QUERIES_FREE], count=1, pred=mine == 0)
            slot = gl.where(begin > 0, 2 * program, gl.where(end < tiles, 2 * program + 1, -1))
            if GROUP == 0:
                own, theirs = left_acc, right_acc
            else:
                own, theirs = right_acc, left_acc
            row = (request.to(gl.int64) * q_len + token) * heads
            _few_store(
                own, theirs, peak, total, peaks, totals, halves, bars, target, segment, row, heads, slot,
                GROUP, lift_of(memory[7].dtype),
            )  # fmt: skip
            segment += 1


# Not specialised on these: a server uses many values of them.
@gluon.jit(do_not_specialize=["page_rows", "table_stride", "capacity", "q_len", "heads", "batch", "aligned"])
def mla_decode_few_kernel(
    q, columns, block_table, seq_lens, out, lse, parts, part_lse, cuts,
    q_batch_stride, q_token_stride, q_head_stride, page_rows, table_stride,
    softmax_scale, k_scale, capacity, q_len, heads, batch, aligned,
    PAGE_SIZE: gl.constexpr, BATCH: gl.constexpr,
):  # fmt: skip
    """Attend from the heads of one query token, at most 16, to an equal part of the tiles of all requests.

    Grid: (query tokens, parts). PAGE_SIZE is 64 or 128; BATCH is that of ``share_of``.
    ``softmax_scale * k_scale`` must be positive.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0, 1])
    gdc_launch_dependents()

    token = gl.program_id(0)
    program = gl.program_id(1) * gl.num_programs(0) + token
    cuts += program
    work = share_of(seq_lens, batch, capacity, q_len, token, aligned, BATCH)
    pieces: gl.constexpr = 512 // WIDTH
    q_p = gl.allocate_shared_memory(dtype, [pieces, HEADS, WIDTH], SHARED)
    q_v = shared_as(q_p, dtype, [2, HEADS, 256], SHARED)
    q_r = gl.allocate_shared_memory(dtype, [1, HEADS, 64], SHARED)
    left_p, right_p, left, right = key_memory(dtype, SHARED)
    rope = gl.allocate_shared_memory(dtype, [2, 64, 64], SHARED)
    given = gl.allocate_shared_memory(dtype, [2, 64, HEADS], narrow)
    halves = gl.allocate_shared_memory(gl.float32, [2, 256, HEADS], plain)
    peaks = gl.allocate_shared_memory(gl.float32, [4, HEADS], FLAT)
    totals = gl.allocate_shared_memory(gl.float32, [4, HEADS], FLAT)
    bars = barriers()
    scale = softmax_scale * k_scale * 1.4426950408889634
    memory = (q_p, q_r, left_p, right_p, left, right, rope, given)
    target = (out, lse, parts, part_lse, k_scale)
    gl.warp_specialize(
        [
            (
                _few_group,
                (
                    memory, peaks, totals, halves, bars, target, seq_lens, capacity, q_len,
                    heads, token, program, work, scale, 0,
                ),
            ),
            (
                _few_group,
                (
                    memory, peaks, totals, halves, bars, target, seq_lens, capacity, q_len,
                    heads, token, program, work, scale, 1,
                ),
            ),
            (
                load_group,
                (
                    q_v, q_r, left_p, right_p, left, right, rope, bars, q, columns, block_table, seq_lens,
                    cuts, q_batch_stride, q_token_stride, q_head_stride, page_rows, 0, table_stride,
                    capacity, q_len, heads, token * heads, heads, token, work,
                    PAGE_SIZE, HEADS, 0, False, False, BATCH > 1,
                ),
            ),
        ],
        [4, 4],
        [224, 56],
    )  # fmt: skip
