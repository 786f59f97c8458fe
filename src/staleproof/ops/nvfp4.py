"""NVFP4 quantisation that leaves no byte of its scales unwritten. The fix of incident 5.

vLLM went back and forth between a fill before the quantiser (vLLM #38148, #45739) and none (vLLM
#42988), until its quantiser wrote the padding (vLLM #53568). Here the programs that quantise the
rows of an incomplete tile also write its padding rows, while their own loads are under way. Padding
columns need no code of their own: they are quantised as blocks of zeros.
"""

from __future__ import annotations

import torch

from staleproof import check, device
from staleproof.ops.launching import Ready, Seen, empty, key_of, launched
from staleproof.ops.nvfp4_layout import (
    BLOCK,
    COLUMNS_A_STEP,
    DTYPES,
    SIXTH,
    as_global_scale,
    check_sizes,
    scale_shape,
)
from staleproof.ops.nvfp4_layout import create_fp4_scale_tensor as create_fp4_scale_tensor
from staleproof.ops.operators import operator
from staleproof.ops.reference.nvfp4 import dequantize_nvfp4 as dequantize_nvfp4

device.load_triton()

import triton
import triton.language as tl

from staleproof.ops.e4m3 import decode_e4m3, encode_e4m3

ROW_TILE = 128
_SIXTH = tl.constexpr(SIXTH)
_FLOAT_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _magnitude(half, KIND: tl.constexpr):
    """|x| as float32, of the 16 bits of x in an int32."""
    if KIND == "bfloat16":
        # A shift of the bits, because the interpreter's cast rounds denormals differently.
        return ((half & 0x7FFF) << 16).to(tl.float32, bitcast=True)
    else:
        return (half & 0x7FFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _encode_e2m1(x):
    """Codes 0 to 7 of x >= 0, nearest with ties to even; above 6 and NaN: 7."""
    x = tl.where(x < 6.0, x, 6.0)
    bits = x.to(tl.int32, bitcast=True)
    power = tl.where(bits > 0x3F800000, bits, 0x3F800000) & 0x7F800000
    # E2M1 numbers are 0.5 apart below 2, 1 below 4, then 2. Floats from 2**22, 2**23 and 2**24 on
    # have that spacing, so adding one of these rounds to an E2M1 number.
    magic = power + (22 << 23)
    shifted = (x + magic.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
    return shifted - magic + (power >> 22) - (127 << 1)


# Not specialised on the number of rows: it changes from step to step, and no step should compile.
@triton.jit(do_not_specialize=["m"])
def _quantize_nvfp4_kernel(
    x, global_scale, packed, scales, scale_words, m, columns, row_stride,
    SWIZZLED: tl.constexpr, PAD_ROWS: tl.constexpr, PAD_COLUMNS: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program quantises ROWS rows x COLUMNS blocks of 16, and writes the padding beside them.

    ``x`` points at float32 values if KIND is float32, else at int32 words of two 16-bit values;
    ``row_stride`` counts these.
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
        # Padding rows: the programs that quantise rows of the last row of tiles share its padding.
        first = m // 128 * 128
        mine = tl.program_id(0) - first // ROWS
        if mine >= 0:
            word = tl.arange(0, 128)
            is_padding = word % 4 * 32 + word // 4 >= m - first
            tile = tl.program_id(1) * (COLUMNS // 4)
            last = tl.minimum(tile + COLUMNS // 4, tiles)
            for one in tl.range(tile + mine, last, tl.cdiv(m - first, ROWS)):
                start = ((first // 128).to(tl.int64) * tiles + one) * 128
                tl.store(scale_words + start + word, tl.zeros([128], tl.int32), mask=is_padding)

    # The maximum of the bits, as integers: every NaN is above infinity, so no version of Triton loses a NaN.
    even_bits = even.to(tl.int32, bitcast=True)
    odd_bits = odd.to(tl.int32, bitcast=True)
    amax_bits = tl.max(tl.where(even_bits > odd_bits, even_bits, odd_bits), 2)
    amax = amax_bits.to(tl.float32, bitcast=True)
    code = encode_e4m3(amax * (factor * _SIXTH))
    inverse = tl.div_rn(1.0, decode_e4m3(code) * tl.div_rn(1.0, factor))
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
            # A padding column was loaded as a block of zeros, so its scale is 0.
            live = (row < m)[:, None] & (column < tiles * 4)[None, :]
    else:
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(scales + at, code.to(tl.uint8), mask=live)


def _plan(m: int, columns: int) -> tuple[int, int, int]:
    """Rows and blocks of a program, and its warps."""
    if device.interpreting():
        # The interpreter's time grows with the number of programs.
        return min(128, triton.next_power_of_2(m)), min(64, triton.next_power_of_2(columns)), 4
    # Best of a sweep on an H200.
    if m <= 16:
        return 1, 8, 1
    return (4, 32, 4) if m <= 64 else (1, 32 if m <= 256 else 64, 1)


@operator(
    "quantize_nvfp4(Tensor x, Tensor global_scale, Tensor(a!) packed, Tensor(b!) scales, "
    "bool swizzled, bool pad) -> ()"
)
def _launch(
    x: torch.Tensor,
    global_scale: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    swizzled: bool,
    pad: bool,
) -> Ready | None:
    """Launch without checks. ``pad=False`` leaves the padding as it is: the fault of incident 5."""
    m, columns = x.shape[0], x.shape[1] // BLOCK
    kind = str(x.dtype).removeprefix("torch.")
    in_place = x.element_size() == 4 or not (x.stride(0) % 2 or x.data_ptr() % 4)
    if not in_place:
        # Pairs of values do not start at multiples of 4 bytes.
        x = x.clone(memory_format=torch.contiguous_format)
    if x.element_size() == 2:
        x = x.view(torch.int32)
    rows, width, warps = _plan(m, columns)
    width = max(width, COLUMNS_A_STEP)
    raw = scales.view(torch.uint8)
    grid = triton.cdiv(m, rows), triton.cdiv(columns, width)
    tensors = x, global_scale, packed, raw, raw.view(torch.int32) if swizzled else raw
    sizes = (
        m,
        columns,
        x.stride(0) if m > 1 else x.shape[1],
        swizzled,
        pad and swizzled and m % ROW_TILE != 0,
        pad and columns % COLUMNS_A_STEP != 0,
        kind,
        rows,
        width,
    )
    # A fused multiply-add rounds once where the reference rounds twice.
    options = {"enable_fp_fusion": False, "num_warps": warps}
    made = launched(_quantize_nvfp4_kernel, grid, tensors, sizes, **options)
    return made if in_place else None


_SEEN: Seen[Ready] = Seen()


def quantize_nvfp4(
    x: torch.Tensor,
    global_scale: float | torch.Tensor,
    *,
    swizzled: bool = True,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 values and scales in one launch, with every byte of the scales written.

    The scale of a block of 16 is e4m3(amax * (global_scale / 6)), its codes are
    e2m1(x / (scale / global_scale)). Each step is one float32 rounding, and both conversions round
    to nearest even and saturate, as in FlashInfer's ``fp4_quantize`` without fast math. FlashInfer
    drops a NaN; here the scale of its block becomes NaN, so that the NaN stays visible in the block
    where it arose and does not spread.

    Args:
        x: (m, n) bfloat16, float16 or float32, n a multiple of 16, rows contiguous at any stride.
        global_scale: usually 448 * 6 / amax of the tensor. A positive number, or () or (1,) float32
            on the device, which the kernel reads without a host sync.
        swizzled: scales in 128 x 4 tiles, whose padding becomes 0, or in plain rows.
        out: ``(packed, scales)`` to write to, contiguous.
        validate: also check the value of a ``global_scale`` on the device, which waits for the
            device; for tests and notebooks.

    Returns:
        ``packed`` (m, n / 2) uint8, the even element in the low half of its byte; ``scales``
        float8_e4m3fn, (m rounded up to 128, n / 16 rounded up to 4) swizzled, (m, n / 16) linear.

    Raises:
        ValueError: an argument does not fit; nothing was written.

    >>> packed, scales = quantize_nvfp4(torch.arange(32.0).reshape(1, 32), 1.0)
    >>> packed.shape, scales.shape, scales[0].tolist()
    (torch.Size([1, 16]), torch.Size([128, 4]), [2.5, 5.0, 0.0, 0.0])
    """
    key = None
    # A number becomes a new tensor on every call: a cached tensor could be in a CUDA graph's memory pool.
    if isinstance(global_scale, torch.Tensor) and not validate:
        results = out if isinstance(out, tuple | list) else (out,)
        key = key_of(x, global_scale, swizzled, *results)
        if (again := _SEEN.get(key)) is not None:
            if out is None:
                m, n = x.shape
                packed = empty((m, n // 2), torch.uint8, x)
                scales = empty(scale_shape(m, n, swizzled=swizzled), torch.float8_e4m3fn, x)
            else:
                packed, scales = out
            at = scales.data_ptr()
            again(x.data_ptr(), global_scale.data_ptr(), packed.data_ptr(), at, at)
            return packed, scales
    check.tensor("x", x, ndim=2, dtype=DTYPES)
    m, n = x.shape
    check_sizes(m, n, "x")
    check.require(x.stride(1) == 1, "x", "a contiguous last axis", f"strides {x.stride()}")
    shape = scale_shape(m, n, swizzled=swizzled)
    factor = as_global_scale(global_scale, x, validate=validate)
    if out is None:
        packed = torch.empty(m, n // 2, dtype=torch.uint8, device=x.device)
        scales = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    else:
        check.out_pair(out, "(packed, scales)")
        packed, scales = out
        check.tensor("out[0]", packed, shape=(m, n // 2), dtype=torch.uint8, like=x, contiguous=True)
        check.tensor("out[1]", scales, shape=shape, dtype=torch.float8_e4m3fn, like=x, contiguous=True)
    _SEEN.keep(key, _launch(x, factor, packed, scales, swizzled, True))
    return packed, scales
