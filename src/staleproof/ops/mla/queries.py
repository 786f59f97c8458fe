"""The launch before an MLA decode on Hopper with an E4M3 cache: it converts queries to float16.

E4M3 to float16 is exact and takes one instruction for two numbers; bfloat16 has no such instruction. So both
operands of the products are float16. Queries may exceed float16's range, so each row is scaled by a power of
two.
"""

from __future__ import annotations

from staleproof import device

device.load_triton()

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def _largest(x):
    return tl.max(tl.abs(x.to(tl.float32)), 1)


@triton.jit
def by_words(column):
    """The place of a column: two of each four go to the first half of 64, the other two to the second half.

    ``e4m3.py`` unpacks words of four E4M3 numbers in that order.
    """
    return column // 64 * 64 + column % 4 // 2 * 32 + column % 64 // 4 * 2 + column % 2


@triton.jit(do_not_specialize=["rows", "q_len", "heads"])
def float16_queries_kernel(
    q, numbers, scales, q_batch_stride, q_token_stride, q_head_stride, rows, q_len, heads,
    RANK: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, BY_WORDS: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Write ROWS of ``rows`` rows (request, query token, head) one after another, and their scales.

    Each row is multiplied by a power of two that brings its largest magnitude to 2 ** 14 to 2 ** 15; its
    scale undoes that. A row with Inf or NaN keeps them; its finite numbers do not matter. BY_WORDS: columns
    in the order of ``by_words``.
    """
    if not INTERPRET:
        # Let the decode begin; it waits for this launch before it reads the queries.
        gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request, token = row // heads // q_len, row // heads % q_len
    source = (
        q
        + request.to(tl.int64) * q_batch_stride
        + token.to(tl.int64) * q_token_stride
        + (row % heads).to(tl.int64) * q_head_stride
    )
    column, rope_column = tl.arange(0, RANK), RANK + tl.arange(0, ROPE)
    place, rope_place = column, rope_column
    if BY_WORDS:
        place, rope_place = by_words(column), by_words(rope_column)
    mask = (row < rows)[:, None]
    latent = tl.load(source[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    rope = tl.load(source[:, None] + rope_column[None, :], mask=mask, other=0.0).to(tl.float32)
    largest = tl.maximum(_largest(latent), _largest(rope))
    # The factor's exponent as float32 stores it; its inverse has 254 minus that. Neither is subnormal.
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    stored = tl.minimum(tl.maximum(268 - exponent, 27), 227)
    factor = (stored << 23).to(tl.float32, bitcast=True)[:, None]
    target = numbers + row.to(tl.int64)[:, None] * (RANK + ROPE)
    tl.store(target + place[None, :], (latent * factor).to(tl.float16), mask=mask)
    tl.store(target + rope_place[None, :], (rope * factor).to(tl.float16), mask=mask)
    tl.store(scales + row, ((254 - stored) << 23).to(tl.float32, bitcast=True), mask=row < rows)
