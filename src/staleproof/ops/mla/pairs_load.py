"""The loading group of ``pairs.py``: queries by ordinary copies, keys by the copy engine.

The engine brings what lies behind the end of a request, too. The computing groups clear it. It does not
convert: keys of an E4M3 cache come through registers.
"""

from __future__ import annotations

from staleproof import device

device.load_triton()

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from staleproof.ops.mla.pairs_steps import (
    FREE,
    HALF,
    LOADED,
    PIECES,
    QUERIES,
    QUERIES_FREE,
    WIDTH,
    opaque_zero,
    part_of,
)
from staleproof.ops.mla.sm90 import async_load, barrier

# Renamed after Triton 3.6.
tile_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

IS_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
ROPE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
WORDS = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0]))
ROPE_WORDS = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
PAIRS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
# Four E4M3 numbers in a word to two words. There is no way from them to bfloat16 but by float16 and float32.
TO_FLOAT16 = gl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")
TO_BFLOAT16 = gl.constexpr("""{
.reg .b16 low, high, a, b, c, d;
.reg .b32 ab, cd;
.reg .f32 w, x, y, z;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 ab, low;
cvt.rn.f16x2.e4m3x2 cd, high;
mov.b32 {a, b}, ab;
mov.b32 {c, d}, cd;
cvt.f32.f16 w, a;
cvt.f32.f16 x, b;
cvt.f32.f16 y, c;
cvt.f32.f16 z, d;
cvt.rn.bf16x2.f32 $0, x, w;
cvt.rn.bf16x2.f32 $1, z, y;
}""")


@gluon.jit
def shared_as(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory with another shape."""
    if IS_RENAMED:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


@gluon.jit
def _copy_queries(q_v, q_r, base, stride, live, ROWS: gl.constexpr):
    """Start copying rows of queries, 16 at a time so that few addresses are alive; others become zeros."""
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, HALF))
    column = gl.arange(0, 256, layout=gl.SliceLayout(0, HALF))
    row_r = gl.arange(0, 16, layout=gl.SliceLayout(1, ROPE))
    column_r = 512 + gl.arange(0, 64, layout=gl.SliceLayout(0, ROPE))
    for i in gl.static_range(ROWS // 16):
        rows = base + (16 * i + row) * stride
        mask = (16 * i + row < live)[:, None]
        async_load(q_v.index(0).slice(16 * i, 16, dim=0), rows[:, None] + column[None, :], mask=mask)
        async_load(q_v.index(1).slice(16 * i, 16, dim=0), rows[:, None] + (256 + column)[None, :], mask=mask)
        rows_r = base + (16 * i + row_r) * stride
        mask_r = (16 * i + row_r < live)[:, None]
        async_load(q_r.index(0).slice(16 * i, 16, dim=0), rows_r[:, None] + column_r[None, :], mask=mask_r)


@gluon.jit
def _load_half(
    pieces, rope, bars, columns, first_row, wanted, used, TILE: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Load half of a tile's columns in pieces with a barrier each, rotary ones with the last of the right."""
    mbarrier.wait(bars[FREE].index(2 * TILE + RIGHT), (used & 1) ^ 1)
    for i in gl.static_range(PIECES):
        bar = bars[LOADED].index(8 * TILE + RIGHT * PIECES + i)
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
def _page_of(table, tile, limit, PAGE_SIZE: gl.constexpr):
    return gl.load(table + tile * 64 // PAGE_SIZE, mask=tile * 64 < limit, other=0)


@gluon.jit
def _copy_tiles(
    left, right, rope, bars, columns, table, begin, end, limit, used_a, used_b, page_rows,
    PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Copy a request's tiles, each to the memory that the one before the last has left."""
    page_a = _page_of(table, begin, limit, PAGE_SIZE)
    page_b = _page_of(table, begin + 1, limit, PAGE_SIZE)
    for tile in range(begin, end, 2):
        row_a = page_a * page_rows + tile * 64 % PAGE_SIZE
        row_b = page_b * page_rows + (tile + 1) * 64 % PAGE_SIZE
        page_a = _page_of(table, tile + 2, limit, PAGE_SIZE)
        page_b = _page_of(table, tile + 3, limit, PAGE_SIZE)
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

    Words, because a number that waits in a register has one of its own.
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
def _converted(words, dtype: gl.constexpr):
    """(rows, words) of four E4M3 numbers as (rows, 2 * words) of two numbers of 16 bits. All are exact."""
    pair: gl.constexpr = TO_FLOAT16 if dtype == gl.float16 else TO_BFLOAT16
    low, high = gl.inline_asm_elementwise(
        pair, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    return gl.join(low, high).reshape((words.shape[0], 2 * words.shape[1]))


@gluon.jit
def _announce(bars, first):
    """The columns that this group has stored are there: all pieces of a half."""
    fence_async_shared()
    barrier()
    for i in gl.static_range(PIECES):
        mbarrier.arrive(bars[LOADED].index(first + i), count=1)


@gluon.jit
def _convert_tiles(
    left, right, rope, bars, cache, table, begin, end, limit, used_a, used_b, page_rows, row_words,
    PAGE_SIZE: gl.constexpr, IS_TILE_AHEAD: gl.constexpr,
):  # fmt: skip
    """Convert a request's tiles to the queries' dtype; columns are loaded while those before are stored.

    A whole tile ahead where the computing groups leave enough registers for it, or half of one.
    """
    dtype: gl.constexpr = left.dtype
    left = shared_as(left, gl.int32, [2, 64, 128], PAIRS)
    right = shared_as(right, gl.int32, [2, 64, 128], PAIRS)
    rope = shared_as(rope, gl.int32, [2, 64, 32], PAIRS)
    row = _page_of(table, begin, limit, PAGE_SIZE).to(gl.int64) * page_rows + begin * 64 % PAGE_SIZE
    live = limit - begin * 64
    a = _load_left(cache, row, live, row_words)
    if IS_TILE_AHEAD:
        b, c = _load_right(cache, row, live, row_words)
    for tile in range(begin, end):
        odd = (tile - begin) & 1
        used = gl.where(odd == 0, used_a, used_b) + (tile - begin) // 2
        next_page = _page_of(table, tile + 1, limit, PAGE_SIZE)
        mbarrier.wait(bars[FREE].index(2 * odd), (used & 1) ^ 1)
        left.index(odd).store(_converted(a, dtype))
        _announce(bars, 8 * odd)
        if not IS_TILE_AHEAD:
            b, c = _load_right(cache, row, live, row_words)
        row = next_page.to(gl.int64) * page_rows + (tile + 1) * 64 % PAGE_SIZE
        live = gl.where(tile + 1 < end, limit - (tile + 1) * 64, 0)
        if IS_TILE_AHEAD:
            a = _load_left(cache, row, live, row_words)
        mbarrier.wait(bars[FREE].index(2 * odd + 1), (used & 1) ^ 1)
        right.index(odd).store(_converted(b, dtype))
        rope.index(odd).store(_converted(c, dtype))
        _announce(bars, 8 * odd + PIECES)
        if IS_TILE_AHEAD:
            b, c = _load_right(cache, row, live, row_words)
        else:
            a = _load_left(cache, row, live, row_words)


@gluon.jit
def load_group(
    q_v, q_r, left_p, right_p, left, right, rope, bars, q, columns, block_table, seq_lens,
    q_batch_stride, q_token_stride, q_head_stride, page_rows, row_words, table_stride,
    capacity, q_len, heads, first_row, rows, first, last, unit, begin_unit, end_unit,
    PAGE_SIZE: gl.constexpr, ROWS: gl.constexpr, CONVERTS: gl.constexpr,
):  # fmt: skip
    """Load ``rows`` queries of at most ROWS, and keys, in the order in which their memory is freed."""
    token = first_row // heads
    used_a = 0
    used_b = 0
    segment = 0
    for number in range(first, last):
        request = number.to(gl.int64)  # type: ignore[attr-defined]  # a tensor, in a kernel
        seq_len = gl.load(seq_lens + request)
        limit, tiles, begin, end = part_of(seq_len, capacity, q_len, token, unit, begin_unit, end_unit)
        unit += tiles
        if begin < end:
            table = block_table + request * table_stride
            q_base = (
                q
                + request * q_batch_stride
                + token.to(gl.int64) * q_token_stride
                + (first_row - token * heads).to(gl.int64) * q_head_stride
            )
            live_q = gl.where(limit > 0, rows, 0)
            mbarrier.wait(bars[QUERIES_FREE], (segment & 1) ^ 1)
            _copy_queries(q_v, q_r, q_base, q_head_stride, live_q, ROWS)
            async_copy.mbarrier_arrive(bars[QUERIES], increment_count=False)
            segment += 1
            if CONVERTS:
                _convert_tiles(
                    left, right, rope, bars, columns, table, begin, end, limit, used_a, used_b,
                    page_rows, row_words, PAGE_SIZE, ROWS < 64,
                )  # fmt: skip
            else:
                _copy_tiles(
                    left_p, right_p, rope, bars, columns, table, begin, end, limit, used_a, used_b,
                    page_rows, PAGE_SIZE,
                )  # fmt: skip
            used_a += (end - begin + 1) // 2
            used_b += (end - begin) // 2
