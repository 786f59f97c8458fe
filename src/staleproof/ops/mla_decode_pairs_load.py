"""The loading group of ``mla_decode_pairs.py``: queries by ordinary copies, keys by the copy engine.

The engine brings what lies behind the end of a request, too. The computing groups clear it.
"""

from __future__ import annotations

from staleproof import device

device.load_triton()

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from staleproof.ops.mla_decode_pairs_steps import (
    FREE,
    HALF,
    LOADED,
    PIECES,
    QUERIES,
    QUERIES_FREE,
    WIDTH,
    part_of,
)
from staleproof.ops.mla_decode_sm90 import async_load

# Renamed after Triton 3.6.
tile_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

ROPE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


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
def load_group(
    q_v, q_r, left, right, rope, bars, q, columns, block_table, seq_lens,
    q_batch_stride, q_token_stride, q_head_stride, page_rows, table_stride,
    capacity, q_len, heads, first_row, rows, first, last, unit, begin_unit, end_unit,
    PAGE_SIZE: gl.constexpr, ROWS: gl.constexpr,
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
            page_a = _page_of(table, begin, limit, PAGE_SIZE)
            page_b = _page_of(table, begin + 1, limit, PAGE_SIZE)
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
