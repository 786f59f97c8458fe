"""What the two computing groups of ``pairs.py`` do with a pair of tiles.

Barriers are in memory of their own each: the compiler puts a barrier of all threads between an arrival and a
wait in the same allocation.
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

from staleproof.ops.mla.sm90 import barrier

# Columns of a tile that arrive together: a product waits for those it reads alone.
WIDTH = gl.constexpr(64)
PIECES = gl.constexpr(256 // WIDTH.value)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, ACC.value, 2))
HALF = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))

# Barriers. LOADED has 8 for the pieces of the even tile and 8 for the odd one. FREE has left columns, then
# right with rotary ones, of each tile. GIVEN and TOTAL are two each, by the group that arrives.
LOADED, FREE, GIVEN, TOTAL = (gl.constexpr(i) for i in (0, 1, 2, 4))
QUERIES, QUERIES_FREE = gl.constexpr(6), gl.constexpr(7)
# Shared memory: queries in pieces and their rotary columns, left and right columns of two tiles in pieces,
# the same as a whole, their rotary columns, the odd tile's weights, maxima.
LEFT, RIGHT = gl.constexpr(4), gl.constexpr(5)


@gluon.jit
def opaque_zero():
    """Zero, which the compiler cannot know: an address made with it is computed where it is used.

    Otherwise the addresses of all products move out of the loop, and from there into local memory.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def limit_of(seq_len, capacity, q_len, token):
    """Keys that query token ``token`` of a request attends to."""
    return gl.maximum(gl.minimum(seq_len, capacity) - q_len + token + 1, 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def equal_part(seq_lens, batch, capacity, q_len, token, aligned, BATCH: gl.constexpr):
    """The part of program ``program_id(1)`` in the line of all tiles.

    If all requests have as many tiles, ``aligned`` programs share them, so that cuts fall between requests.

    Returns the first request in it and the one behind its last, the tile of the line at which that first
    request begins, and the part's first tile and the one behind its last.
    """
    line: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    index = gl.arange(0, BATCH, layout=line)
    seq_len = gl.load(seq_lens + index, mask=index < batch, other=0)
    limits = limit_of(seq_len, capacity, q_len, token)
    units = gl.where(index < batch, gl.maximum(gl.cdiv(limits, 64), 1), 0)
    ends = gl.associative_scan(units, 0, _add)
    whole = gl.sum(units, 0).to(gl.int64)
    most = gl.max(units, 0)
    is_even = gl.min(gl.where(index < batch, units, most), 0) == most
    # With fewer tiles than programs, the last programs have nothing to do.
    count = gl.minimum(whole, gl.where(is_even, aligned, gl.num_programs(1)))
    place = gl.minimum(gl.program_id(1), count)
    begin_unit = (whole * place // count).to(gl.int32)
    end_unit = (whole * gl.minimum(place + 1, count) // count).to(gl.int32)
    # Requests that end before this part, and those that begin before its end.
    first = gl.sum((ends <= begin_unit).to(gl.int32), 0)
    last = gl.sum(((ends - units < end_unit) & (index < batch)).to(gl.int32), 0)
    unit = gl.max(gl.where(ends <= begin_unit, ends, 0), 0)
    return first, last, unit, begin_unit, end_unit


@gluon.jit
def part_of(seq_len, capacity, q_len, token, unit, begin_unit, end_unit):
    """The keys of a request, its tiles, which begin at ``unit`` of the line, and a program's part of them.

    The part is the tiles from ``begin`` up to ``end``; there is none if begin >= end.
    """
    limit = limit_of(seq_len, capacity, q_len, token)
    tiles = gl.maximum(gl.cdiv(limit, 64), 1)
    begin = gl.minimum(gl.maximum(begin_unit - unit, 0), tiles)
    end = gl.minimum(end_unit - unit, tiles)
    return limit, tiles, begin, end


@gluon.jit
def _cut_off(scores, live):
    """Scores of keys from ``live`` on become -inf: only the last tile of a request has such keys."""
    if live < 64:
        column = gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
        scores = gl.where((column < live)[None, :], scores, -float("inf"))
    return scores


@gluon.jit
def clear_tail(values, live):
    """Rows of values from ``live`` on become zero: whatever lies there has weight 0, but 0 * NaN is NaN."""
    if live < 64:
        row = gl.arange(0, 16, layout=gl.SliceLayout(1, HALF))
        for i in gl.static_range(4):
            rows = values.slice(16 * i, 16, dim=0)
            kept = rows.load(HALF)
            rows.store(gl.where((16 * i + row < live)[:, None], kept, gl.full_like(kept, 0.0)))
        fence_async_shared()
        barrier()


@gluon.jit
def finite(peak):
    """What scores are taken relative to: 0 while a row has no key."""
    return gl.where(peak == -float("inf"), 0.0, peak)


@gluon.jit
def _raised(peak, highest):
    """The maximum so far. A NaN is left out of it; it reaches the sums, and so the output."""
    return gl.maximum(peak, highest)


@gluon.jit
def _scaled(acc, decay):
    """The output relative to a new maximum."""
    return acc * gl.convert_layout(decay, gl.SliceLayout(1, ACC))[:, None]


@gluon.jit
def _begun_scores(memory, bars, z, used, TILE: gl.constexpr):
    """Start the scores of the even tile (0) or the odd one (1): each product once its columns are there."""
    q_p, q_r, left_p, right_p, rope = memory[0], memory[1], memory[2], memory[3], memory[6]
    scores = warpgroup_mma_init(gl.full([64, 64], 0.0, gl.float32, layout=SCORES))
    for i in gl.static_range(PIECES):
        mbarrier.wait(bars[LOADED].index(TILE * 2 * PIECES + i), used & 1)
        piece = left_p.index(z + TILE * PIECES + i).permute((1, 0))
        scores = warpgroup_mma(q_p.index(z + i), piece, scores, use_acc=i > 0, is_async=True)
    for i in gl.static_range(PIECES):
        mbarrier.wait(bars[LOADED].index((TILE * 2 + 1) * PIECES + i), used & 1)
        piece = right_p.index(z + TILE * PIECES + i).permute((1, 0))
        scores = warpgroup_mma(q_p.index(z + PIECES + i), piece, scores, is_async=True)
    return warpgroup_mma(q_r.index(z), rope.index(z + TILE).permute((1, 0)), scores, is_async=True)


@gluon.jit
def even_step(
    acc, peak, total, memory, bars, live, scale, used_a, used_b, is_last, HAS_ODD: gl.constexpr,
):  # fmt: skip
    """Group 0: scores of the even tile, and the left columns of both tiles."""
    left, rope, given, peaks = memory[LEFT], memory[6], memory[7], memory[8]
    dtype: gl.constexpr = given.dtype
    z = opaque_zero()
    scores = _begun_scores(memory, bars, z, used_a, 0)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if not HAS_ODD:
        scores = _cut_off(scores, live)
    new_peak = _raised(peak, gl.max(scores, 1) * scale)
    base = finite(new_peak)
    weights = gl.exp2(scores * scale - base[:, None])
    rounded = weights.to(dtype)
    peaks.index(0).store(new_peak)
    # The rotary columns have been read, so their memory takes the weights.
    rope.index(z).store(rounded)
    fence_async_shared()
    barrier()
    mbarrier.arrive(bars[GIVEN], count=1)
    mbarrier.arrive(bars[QUERIES_FREE], count=1, pred=is_last)
    decay = gl.exp2(peak - base)
    total = total * decay + gl.sum(weights, 1)
    acc = _scaled(acc, decay)
    if not HAS_ODD:
        clear_tail(left.index(z), live)
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
        clear_tail(left.index(z + 1), live - 64)
        acc = warpgroup_mma(given.index(z), left.index(z + 1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(bars[FREE].index(2), count=1, pred=not is_last)
    else:
        last_peak = new_peak
    return acc, last_peak, total


@gluon.jit
def odd_step(
    acc, peak, total, memory, bars, live, scale, used_a, used_b, is_last,
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
    scores = _cut_off(scores, live)
    new_peak = _raised(even_peak, gl.max(scores, 1) * scale)
    base = finite(new_peak)
    weights = gl.exp2(scores * scale - base[:, None])
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
    clear_tail(right.index(z + 1), live)
    acc = warpgroup_mma(gl.convert_layout(rounded, WEIGHTS), right.index(z + 1), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(bars[FREE].index(3), count=1, pred=not is_last)
    return acc, new_peak, total


@gluon.jit
def lone_step(acc, peak, total, memory, bars, live, used_a):
    """Group 1, if the last pair has no odd tile."""
    right, rope, peaks = memory[RIGHT], memory[6], memory[8]
    z = opaque_zero()
    mbarrier.arrive(bars[QUERIES_FREE], count=1)
    mbarrier.wait(bars[GIVEN], used_a & 1)
    new_peak = peaks.index(0).load(gl.SliceLayout(1, SCORES))
    decay = gl.exp2(peak - finite(new_peak))
    acc = _scaled(acc, decay)
    clear_tail(right.index(z), live)
    acc = warpgroup_mma(rope.index(z), right.index(z), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, new_peak, total * decay
