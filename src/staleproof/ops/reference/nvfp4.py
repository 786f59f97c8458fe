"""NVFP4 in plain PyTorch: quantisation, dequantisation, and the matrix product that reads the scales."""

from __future__ import annotations

import torch

from staleproof import check
from staleproof.ops.nvfp4_layout import (
    BLOCK,
    COLUMNS_A_STEP,
    DTYPES,
    E2M1_MAX,
    E4M3_MAX,
    ROW_TILES,
    SIXTH,
    as_global_scale,
    check_quantized,
    check_sizes,
    round_up,
    swizzle,
    unswizzle,
)

# Notebooks and patches import these from here as well.
from staleproof.ops.nvfp4_layout import create_fp4_scale_tensor as create_fp4_scale_tensor
from staleproof.ops.nvfp4_layout import padding_offsets as padding_offsets
from staleproof.ops.nvfp4_layout import scale_offsets as scale_offsets
from staleproof.ops.nvfp4_layout import scale_shape as scale_shape

# The magnitudes of the eight codes without sign, and the midpoint between each and the next; a tie
# goes to the even code.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def global_scale_of(x: torch.Tensor) -> torch.Tensor:
    """The usual global scale, 448 * 6 / amax, (1,) float32; 1 if every element is 0.

    >>> global_scale_of(torch.tensor([[-2.0, 1.0]]))
    tensor([1344.])
    """
    amax = x.abs().amax().float()
    return torch.where(amax > 0, E4M3_MAX * E2M1_MAX / amax, 1.0).reshape(1)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 7 of non-negative numbers, nearest with ties to even; above 6 and NaN: 7.

    >>> encode_e2m1(torch.tensor([0.25, 2.4, 5.0, 99.0])).tolist()
    [0, 4, 6, 7]
    """
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for index, halfway in enumerate(_HALFWAY):
        code += x >= halfway if index % 2 else x > halfway
    return torch.where(x.isnan(), 7, code)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """(m, n / 2) uint8, the even element in the low half of its byte, as (m, n) float32.

    >>> decode_e2m1(torch.tensor([[0x2A]], dtype=torch.uint8)).tolist()
    [[-1.0, 1.0]]
    """
    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(1).int()
    # By arithmetic, not by a table: making one copies from the host, which a CUDA graph cannot hold.
    exponent, mantissa = codes >> 1 & 3, codes & 1
    quarters = torch.where(exponent == 0, 2 * mantissa, (2 + mantissa) << exponent)
    values = quarters.float() / 4
    return torch.where(codes >= 8, -values, values)


def quantize_nvfp4(
    x: torch.Tensor, global_scale: float | torch.Tensor, *, swizzled: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 step by step, each step one rounding in float32; the padding of the scales is 0.

    Args and results are those of :func:`staleproof.ops.nvfp4.quantize_nvfp4`.

    >>> quantize_nvfp4(torch.full((1, 16), 6.0), 1.0, swizzled=False)[1].tolist()
    [[1.0]]
    """
    check.tensor("x", x, ndim=2, dtype=DTYPES)
    m, n = x.shape
    check_sizes(m, n, "x")
    factor = as_global_scale(global_scale, x)
    blocks = x.float().view(m, n // BLOCK, BLOCK)
    amax = blocks.abs().amax(-1)
    scales = (amax * (factor * SIXTH)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    one = torch.ones_like(factor)
    inverse = (one / (scales.float() * (one / factor))).clamp(max=torch.finfo(torch.float32).max)
    inverse = torch.where((amax > 0) & ~amax.isnan(), inverse, 0.0)
    codes = encode_e2m1(blocks.abs() * inverse[..., None])
    # The sign by its bit, because a GPU's cast of a 16-bit NaN to float32 drops the sign.
    negative = x.view(torch.int32 if x.dtype == torch.float32 else torch.int16) < 0
    codes = (codes.view(m, n) | (negative * 8).to(torch.uint8)).view(m, n // 2, 2)
    # The scale of a block with a NaN is 0x7F, whatever the sign of the NaN.
    raw = torch.where(amax.isnan(), 0x7F, scales.view(torch.uint8))
    if swizzled:
        raw = swizzle(raw)
    return codes[..., 0] | codes[..., 1] << 4, raw.view(torch.float8_e4m3fn)


def dequantize_nvfp4(
    packed: torch.Tensor,
    scales: torch.Tensor,
    global_scale: float | torch.Tensor,
    *,
    swizzled: bool = True,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The numbers that an NVFP4 tensor stands for: code * scale / global_scale.

    Args:
        packed: (m, n / 2) uint8, as ``quantize_nvfp4`` returns it.
        scales: float8_e4m3fn or uint8, of the shape that ``create_fp4_scale_tensor(m, n)`` has.
            Padding is not read.
        global_scale: as given to the quantiser: a number, or () or (1,) float32.
        swizzled: whether ``scales`` are in 128 x 4 tiles or in plain rows.
        dtype: of the result.

    Returns:
        (m, n).

    Raises:
        ValueError: an argument does not fit.

    >>> packed, scales = quantize_nvfp4(torch.arange(16.0).reshape(1, 16), 1.0)
    >>> dequantize_nvfp4(packed, scales, 1.0)[0, :8].tolist()
    [0.0, 1.25, 2.5, 2.5, 3.75, 5.0, 5.0, 7.5]
    """
    m, n = check_quantized(packed, scales, swizzled=swizzled)
    factor = as_global_scale(global_scale, packed)
    if swizzled:
        scales = unswizzle(scales, m, n // BLOCK)
    per_block = scales.view(torch.float8_e4m3fn).float() / factor
    return (decode_e2m1(packed) * per_block.repeat_interleave(BLOCK, 1)).to(dtype)


def block_scaled_mm(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    alpha: float,
    *,
    row_tile: int = 128,
    scales_read_as: int | None = None,
) -> torch.Tensor:
    """``a @ b.T`` as tensor cores compute it: in whole steps of 64 elements, padding included.

    Values past the end of a row are 0, but their scales are whatever the padding columns hold: 0
    times a number is 0, 0 times a NaN is a NaN. Rows past ``m`` do not enter the result.

    Args:
        a: (m, k / 2) uint8 packed.
        a_scales: its scales in tiles of ``row_tile`` rows.
        b: (n, k / 2) uint8 packed.
        b_scales: its scales in tiles of 128 rows.
        alpha: factor of the result, 1 / (global scale of a * global scale of b).
        row_tile: 128 or 8.
        scales_read_as: the fault to model: read ``a_scales`` as if in tiles of so many rows.

    Returns:
        (m, n) float32.

    Raises:
        ValueError: an argument does not fit.

    >>> sixes = quantize_nvfp4(torch.full((2, 16), 6.0), 1.0)
    >>> block_scaled_mm(*sixes, *sixes, 1.0).tolist()
    [[576.0, 576.0], [576.0, 576.0]]
    """
    check.require(row_tile in ROW_TILES, "row_tile", f"one of {ROW_TILES}", row_tile)
    m, k = check_quantized(a, a_scales, swizzled=True, row_tile=row_tile)
    n, b_k = check_quantized(b, b_scales, swizzled=True)
    check.require(b_k == k, "b", f"{k} columns, as in a", b_k)
    left = _widened(a, a_scales, m, k, scales_read_as or row_tile)
    return left @ _widened(b, b_scales, n, k, 128).T * alpha


def _widened(packed: torch.Tensor, scales: torch.Tensor, rows: int, k: int, row_tile: int) -> torch.Tensor:
    columns = round_up(k // BLOCK, COLUMNS_A_STEP)
    values = torch.nn.functional.pad(decode_e2m1(packed), (0, columns * BLOCK - k))
    per_block = unswizzle(scales, rows, columns, row_tile=row_tile).float()
    return values * per_block.repeat_interleave(BLOCK, 1)
