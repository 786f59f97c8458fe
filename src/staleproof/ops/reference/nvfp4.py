"""NVFP4 in plain PyTorch: its layouts, its two roundings, and the product that reads its scales.

A block of 16 neighbours of a row shares one e4m3 scale. The tensor cores want the scales in tiles
of 128 rows x 4 columns, so rows are rounded up to 128 and columns to 4: a batch of one row brings
127 rows of scales that belong to nobody, and somebody has to write them.
"""

from __future__ import annotations

import math

import torch

from staleproof import check
from staleproof.evidence.canary import bits

BLOCK = 16
E2M1_MAX, E4M3_MAX = 6.0, 448.0
# The magnitudes of the eight codes without sign, and halfway between each and the next; a tie goes
# to the even code.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
SIXTH = 1 / E2M1_MAX
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Scale columns that one matrix instruction reads: 64 elements of a row.
COLUMNS_A_STEP = 4
ROW_TILES = (128, 8)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least ``value``."""
    return -(-value // multiple) * multiple


def check_sizes(m: int, n: int, name: str = "n") -> None:
    """Raise ValueError unless a tensor of ``m`` rows and ``n`` columns can be quantised.

    Any number of rows is fine; a row must be whole blocks.
    """
    check.require(m > 0, "m" if name == "n" else name, "at least one row", m)
    check.require(n > 0 and n % BLOCK == 0, name, f"a positive multiple of {BLOCK} columns", n)


def scale_shape(m: int, n: int, *, swizzled: bool = True, row_tile: int = 128) -> tuple[int, int]:
    """Rows and columns of the scales of an (m, n) tensor, padding included."""
    columns = n // BLOCK
    if not swizzled:
        return m, columns
    return round_up(m, row_tile), round_up(columns, COLUMNS_A_STEP)


def scale_offsets(
    rows: int, columns: int, *, row_tile: int = 128, device: torch.device | str | None = None
) -> torch.Tensor:
    """Where the scale of each (row, column) lies in the swizzled buffer.

    A tile is ``row_tile`` rows x 4 columns; tiles follow each other column first, then by rows of
    tiles. 128 x 4: byte ``row % 32 * 16 + row % 128 // 32 * 4 + column % 4`` of 512 (PTX ISA,
    tcgen05 scale factors; cuBLAS, block scaling factors layout). 8 x 4: byte
    ``row % 8 * 4 + column % 4`` of 32 (FlashInfer's layout for few rows).

    Returns:
        (rows, columns) int64.
    """
    row = torch.arange(rows, device=device)[:, None]
    column = torch.arange(columns, device=device)[None, :]
    tiles = round_up(columns, COLUMNS_A_STEP) // COLUMNS_A_STEP
    tile = row // row_tile * tiles + column // COLUMNS_A_STEP
    inside = column % COLUMNS_A_STEP
    if row_tile == 128:
        inside = row % 32 * 16 + row % 128 // 32 * 4 + inside
    else:
        inside = row % row_tile * COLUMNS_A_STEP + inside
    return tile * row_tile * COLUMNS_A_STEP + inside


def padding_offsets(m: int, n: int, *, row_tile: int = 128) -> torch.Tensor:
    """Offsets of the scales that belong to no block of an (m, n) tensor, in rising order."""
    rows, columns = scale_shape(m, n, row_tile=row_tile)
    nobody = torch.ones(rows * columns, dtype=torch.bool)
    nobody[scale_offsets(m, n // BLOCK, row_tile=row_tile)] = False
    return nobody.nonzero()[:, 0]


def create_fp4_scale_tensor(
    m: int, n: int, *, swizzled: bool = True, device: torch.device | str | None = None
) -> torch.Tensor:
    """Memory for the scales of an (m, n) tensor, safe behind a quantiser that writes blocks only.

    The swizzled layout has padding, which comes as zeros (vLLM #45739); the linear one has none and
    comes as it lies. :func:`quantize_nvfp4` writes the padding itself and needs no such fill.

    Args:
        m: rows, at least 1.
        n: columns, a multiple of 16.
        swizzled: 128 x 4 tiles, or plain rows.
        device: where it lives.

    Returns:
        float8_e4m3fn, (m rounded up to 128, n / 16 rounded up to 4) swizzled, (m, n / 16) linear.

    Raises:
        ValueError: no row, or columns that are not whole blocks.
    """
    check_sizes(m, n)
    make = torch.zeros if swizzled else torch.empty
    # uint8 first: not every device fills float8.
    raw = make(scale_shape(m, n, swizzled=swizzled), dtype=torch.uint8, device=device)
    return raw.view(torch.float8_e4m3fn)


def global_scale_of(x: torch.Tensor) -> torch.Tensor:
    """The usual global scale, 448 * 6 / amax, (1,) float32; 1 for nothing but zeros."""
    amax = x.abs().amax().float()
    return torch.where(amax > 0, E4M3_MAX * E2M1_MAX / amax, 1.0).reshape(1)


def as_global_scale(global_scale: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``global_scale`` as a (1,) float32 tensor beside ``like``.

    Raises:
        ValueError: another shape, dtype or device, or a number that is not positive and finite.
    """
    if isinstance(global_scale, torch.Tensor):
        check.tensor("global_scale", global_scale, shape=(1,), dtype=torch.float32, like=like)
        return global_scale
    ok = math.isfinite(global_scale) and global_scale > 0
    check.require(ok, "global_scale", "a positive finite number", global_scale)
    return torch.full((1,), global_scale, dtype=torch.float32, device=like.device)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 7 of non-negative numbers, nearest with ties to even; above 6 and NaN: 7."""
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for index, halfway in enumerate(_HALFWAY):
        code += x >= halfway if index % 2 else x > halfway
    return torch.where(x.isnan(), 7, code)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """(m, n / 2) uint8, the even element in the low half of its byte, as (m, n) float32."""
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), device=packed.device)
    codes = torch.stack((packed & 0xF, packed >> 4), -1).flatten(1)
    return table[codes.long()]


def quantize_nvfp4(
    x: torch.Tensor, global_scale: float | torch.Tensor, *, swizzled: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 step by step, each step one rounding in float32; the padding of the scales is 0.

    Args and results are those of :func:`staleproof.ops.nvfp4.quantize_nvfp4`.
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
    # By its bits: a GPU's conversion of a 16-bit NaN drops the sign.
    codes = (codes.view(m, n) | ((bits(x) < 0) * 8).to(torch.uint8)).view(m, n // 2, 2)
    # A NaN is where the block was quantised, whatever sign it has.
    raw = torch.where(amax.isnan(), 0x7F, scales.view(torch.uint8))
    if swizzled:
        raw = swizzle(raw)
    return codes[..., 0] | codes[..., 1] << 4, raw.view(torch.float8_e4m3fn)


def swizzle(scales: torch.Tensor, *, row_tile: int = 128, fill: int = 0) -> torch.Tensor:
    """(m, columns) uint8 scales, brought into tiles; the padding holds ``fill``."""
    m, columns = scales.shape
    shape = scale_shape(m, columns * BLOCK, row_tile=row_tile)
    out = torch.full((math.prod(shape),), fill, dtype=torch.uint8, device=scales.device)
    out[scale_offsets(m, columns, row_tile=row_tile, device=scales.device)] = scales
    return out.view(shape)


def unswizzle(scales: torch.Tensor, m: int, columns: int, *, row_tile: int = 128) -> torch.Tensor:
    """(m, columns) scales out of a swizzled buffer; ``columns`` may take padding columns along."""
    offsets = scale_offsets(m, columns, row_tile=row_tile, device=scales.device)
    return scales.view(torch.uint8).flatten()[offsets].view(torch.float8_e4m3fn)


def dequantize_nvfp4(
    packed: torch.Tensor,
    scales: torch.Tensor,
    global_scale: float | torch.Tensor,
    *,
    swizzled: bool = True,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """What :func:`quantize_nvfp4` kept of its input.

    Args:
        packed: (m, n / 2) uint8.
        scales: float8_e4m3fn or uint8, as ``create_fp4_scale_tensor(m, n)`` shapes them.
        global_scale: as given to the quantiser: a number or (1,) float32.
        swizzled: which layout ``scales`` are in.
        dtype: of the result.

    Returns:
        (m, n): code * scale / global_scale. Padding is not read.

    Raises:
        ValueError: an argument does not fit, scales of the wrong size for one.
    """
    m, n = check_quantized(packed, scales, swizzled=swizzled)
    factor = as_global_scale(global_scale, packed)
    if swizzled:
        scales = unswizzle(scales, m, n // BLOCK)
    per_block = scales.view(torch.float8_e4m3fn).float() / factor
    return (decode_e2m1(packed) * per_block.repeat_interleave(BLOCK, 1)).to(dtype)


def check_quantized(
    packed: torch.Tensor, scales: torch.Tensor, *, swizzled: bool, row_tile: int = 128
) -> tuple[int, int]:
    """Rows and columns of a quantised tensor.

    Raises:
        ValueError: packed or scales of another shape, dtype or device.
    """
    check.tensor("packed", packed, ndim=2, dtype=torch.uint8)
    m, n = packed.shape[0], 2 * packed.shape[1]
    check_sizes(m, n, "packed")
    check.tensor(
        "scales",
        scales,
        shape=scale_shape(m, n, swizzled=swizzled, row_tile=row_tile),
        dtype=(torch.float8_e4m3fn, torch.uint8),
        like=packed,
        contiguous=True,
    )
    return m, n


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
    """``a @ b.T`` as tensor cores take it: whole steps of 64 elements, scales as they lie.

    Values past the end of a row are zeros, the scales beside them are whatever the padding columns
    hold: 0 times a NaN is NaN, 0 times a number is 0. Rows past ``m`` are computed and dropped.

    Args:
        a: (m, k / 2) uint8 packed.
        a_scales: its scales in tiles of ``row_tile`` rows.
        b: (n, k / 2) uint8 packed.
        b_scales: its scales in tiles of 128 rows.
        alpha: factor of the result, 1 / (global scale of a * global scale of b).
        row_tile: 128 or 8.
        scales_read_as: read ``a_scales`` in the tiles of this layout instead: a fault.

    Returns:
        (m, n) float32.

    Raises:
        ValueError: an argument does not fit.
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
