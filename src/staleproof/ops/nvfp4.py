"""The fix of incident 5: an NVFP4 quantiser whose launch leaves no byte of its scales unwritten.

Upstream went back and forth between a fill before the quantiser (vLLM #38148, #45739) and none
(vLLM #42988), and in the end had the quantiser write the padding (vLLM #53568). Here programs that
quantise the rows of a tile that is not full also write the rows nobody owns, while their own loads
are under way; padding columns come out of the arithmetic, as blocks of zeros.
"""

from __future__ import annotations

import torch

from staleproof import check, device
from staleproof.ops.reference.nvfp4 import (
    BLOCK,
    COLUMNS_A_STEP,
    DTYPES,
    SIXTH,
    as_global_scale,
    check_sizes,
    scale_shape,
)

device.load_triton()

import triton
import triton.language as tl

ROW_TILE = 128
_SIXTH = tl.constexpr(SIXTH)
_FLOAT_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _magnitude(half, KIND: tl.constexpr):
    """|x| as float32, of the 16 bits of x in an int32."""
    if KIND == "bfloat16":
        # By its bits: the interpreter's own conversion of denormals is another.
        return ((half & 0x7FFF) << 16).to(tl.float32, bitcast=True)
    else:
        return (half & 0x7FFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _encode_e4m3(x):
    """The code of the e4m3 number nearest to x >= 0, ties to even; above 448: 448; NaN: 0x7F.

    By integers, because the interpreter's cast drops the carry into the exponent, and NaN.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    # Exponents are biased by 7 there and by 127 here; below 2**-6 numbers are 2**-9 apart, and
    # adding 2**14 leaves no finer bit.
    subnormal = (x + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(bits < 0x3C800000, subnormal, rounded - (120 << 3))
    code = tl.where(code > 0x7E, 0x7E, code)
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)


@triton.jit
def _decode_e4m3(code):
    """The number of a code from 0 to 0x7E."""
    normal = ((code + (120 << 3)) << 20).to(tl.float32, bitcast=True)
    return tl.where(code < 8, code.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _encode_e2m1(x):
    """Codes 0 to 7 of x >= 0, nearest with ties to even; above 6 and NaN: 7."""
    x = tl.where(x < 6.0, x, 6.0)
    bits = x.to(tl.int32, bitcast=True)
    power = tl.where(bits > 0x3F800000, bits, 0x3F800000) & 0x7F800000
    # Codes below 2 are 0.5 apart, below 4 they are 1 apart, then 2: the spacing of floats from
    # 2**22, 2**23 and 2**24 on.
    magic = power + (22 << 23)
    shifted = (x + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return shifted - magic + (power >> 22) - (127 << 1)


@triton.jit
def _quantize_nvfp4_kernel(
    x, global_scale, packed, scales, scale_words, m, columns, row_stride,
    SWIZZLED: tl.constexpr, PAD_ROWS: tl.constexpr, PAD_COLUMNS: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS rows x COLUMNS blocks of 16, and the padding of their scales.

    With KIND float32 ``x`` points at values, else at pairs of them; ``row_stride`` counts what it
    points at.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pair = tl.arange(0, 8)
    live = (row < m)[:, None] & (column < columns)[None, :]
    source = x + (row.to(tl.int64) * row_stride)[:, None, None]
    inside = column[None, :, None] * 8 + pair[None, None, :]
    if KIND == "float32":
        even = tl.load(source + inside * 2, mask=live[:, :, None], other=0.0)
        odd = tl.load(source + inside * 2 + 1, mask=live[:, :, None], other=0.0)
        even = even.to(tl.int32, bitcast=True)
        odd = odd.to(tl.int32, bitcast=True)
        signs = ((even >> 28) & 8) | ((odd >> 24) & 0x80)
        even = (even & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        odd = (odd & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    else:
        both = tl.load(source + inside, mask=live[:, :, None], other=0)
        signs = ((both >> 12) & 8) | ((both >> 24) & 0x80)
        even = _magnitude(both, KIND)
        odd = _magnitude(both >> 16, KIND)
    factor = tl.load(global_scale)
    tiles = (columns + 3) // 4

    if PAD_ROWS:
        # The rows that nobody owns: tiles are dealt out to the programs that hold their rows.
        first = m // 128 * 128
        mine = tl.program_id(0) - first // ROWS
        if mine >= 0:
            word = tl.arange(0, 128)
            unowned = word % 4 * 32 + word // 4 >= m - first
            tile = tl.program_id(1) * (COLUMNS // 4)
            last = tl.minimum(tile + COLUMNS // 4, tiles)
            for one in tl.range(tile + mine, last, tl.cdiv(m - first, ROWS)):
                start = ((first // 128).to(tl.int64) * tiles + one) * 128
                tl.store(scale_words + start + word, tl.zeros([128], tl.int32), mask=unowned)

    # Magnitudes order as their bits do, every NaN above infinity: no version loses one.
    even_bits = even.to(tl.int32, bitcast=True)
    odd_bits = odd.to(tl.int32, bitcast=True)
    amax_bits = tl.max(tl.where(even_bits > odd_bits, even_bits, odd_bits), 2)
    amax = amax_bits.to(tl.float32, bitcast=True)
    code = _encode_e4m3(amax * (factor * _SIXTH))
    inverse = tl.div_rn(1.0, _decode_e4m3(code) * tl.div_rn(1.0, factor))
    inverse = tl.where(inverse > _FLOAT_MAX, _FLOAT_MAX, inverse)
    inverse = tl.where((amax_bits == 0) | (amax_bits > 0x7F800000), 0.0, inverse)[:, :, None]
    byte = _encode_e2m1(even * inverse) | (_encode_e2m1(odd * inverse) << 4) | signs
    target = packed + (row.to(tl.int64) * (columns * 8))[:, None, None]
    tl.store(target + inside, byte.to(tl.uint8), mask=live[:, :, None])

    if SWIZZLED:
        within = row % 32 * 16 + row % 128 // 32 * 4
        tile_row = (row // 128).to(tl.int64) * tiles
        at = (tile_row[:, None] + (column // 4)[None, :]) * 512
        at += within[:, None] + (column % 4)[None, :]
        if PAD_COLUMNS:
            # A padding column is a block of zeros, whose scale is 0.
            live = (row < m)[:, None] & (column < tiles * 4)[None, :]
    else:
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(scales + at, code.to(tl.uint8), mask=live)


def _plan(m: int, columns: int) -> tuple[int, int, int]:
    """Rows and blocks of a program, and its warps."""
    if device.interpreting():
        # The interpreter pays for each program.
        return min(128, triton.next_power_of_2(m)), min(64, triton.next_power_of_2(columns)), 4
    # Best of a sweep on an H200.
    if m <= 16:
        return 1, 8, 1
    return (4, 32, 4) if m <= 64 else (1, 32 if m <= 256 else 64, 1)


def _quantize(
    x: torch.Tensor,
    factor: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    *,
    swizzled: bool,
    pad: bool,
) -> None:
    m, columns = x.shape[0], x.shape[1] // BLOCK
    kind = str(x.dtype).removeprefix("torch.")
    if x.element_size() == 2:
        if x.stride(0) % 2 or x.data_ptr() % 4:
            # Its pairs do not lie at whole words.
            x = x.clone(memory_format=torch.contiguous_format)
        x = x.view(torch.int32)
    rows, width, warps = _plan(m, columns)
    width = max(width, COLUMNS_A_STEP)
    raw = scales.view(torch.uint8)
    _quantize_nvfp4_kernel[(triton.cdiv(m, rows), triton.cdiv(columns, width))](
        x,
        factor,
        packed,
        raw,
        raw.view(torch.int32) if swizzled else raw,
        m,
        columns,
        x.stride(0) if m > 1 else x.shape[1],
        SWIZZLED=swizzled,
        PAD_ROWS=pad and swizzled and m % ROW_TILE != 0,
        PAD_COLUMNS=pad and columns % COLUMNS_A_STEP != 0,
        KIND=kind,
        ROWS=rows,
        COLUMNS=width,
        # A fused multiply-add would round once where the reference rounds twice.
        enable_fp_fusion=False,
        num_warps=warps,
    )


def quantize_nvfp4(
    x: torch.Tensor,
    global_scale: float | torch.Tensor,
    *,
    swizzled: bool = True,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 values and scales in one launch, with every byte of the scales written.

    The scale of a block of 16 is e4m3(amax * (global_scale / 6)), its codes are
    e2m1(x / (scale / global_scale)); each step is one float32 rounding, both conversions round to
    nearest even and saturate (FlashInfer's ``fp4_quantize`` without fast math). Where that drops a
    NaN, here the block's scale becomes NaN: it was born there, stays there, and stays visible.

    Args:
        x: (m, n) bfloat16, float16 or float32, n a multiple of 16, rows contiguous at any stride.
        global_scale: usually 448 * 6 / amax of the tensor; a positive number, or (1,) float32 on
            the device, which is read there without a sync.
        swizzled: scales in 128 x 4 tiles, whose padding is written with 0, or in plain rows.
        out: packed and scales to write, contiguous.

    Returns:
        ``packed`` (m, n / 2) uint8, the even element in the low half of its byte; ``scales``
        float8_e4m3fn, (m rounded up to 128, n / 16 rounded up to 4) swizzled, (m, n / 16) linear.

    Raises:
        ValueError: an argument does not fit; nothing was written.
    """
    check.tensor("x", x, ndim=2, dtype=DTYPES)
    m, n = x.shape
    check_sizes(m, n, "x")
    check.require(x.stride(1) == 1, "x", "a contiguous last axis", f"strides {x.stride()}")
    shape = scale_shape(m, n, swizzled=swizzled)
    if out is None:
        packed = torch.empty(m, n // 2, dtype=torch.uint8, device=x.device)
        scales = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    else:
        packed, scales = out
        check.tensor("out[0]", packed, shape=(m, n // 2), dtype=torch.uint8, like=x, contiguous=True)
        check.tensor("out[1]", scales, shape=shape, dtype=torch.float8_e4m3fn, like=x, contiguous=True)
    factor = as_global_scale(global_scale, x)
    _quantize(x, factor, packed, scales, swizzled=swizzled, pad=True)
    return packed, scales
