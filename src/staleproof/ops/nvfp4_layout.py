"""The memory layout of the scales of an NVFP4 tensor, and the checks that the quantisers share.

A block of 16 neighbours of a row shares one e4m3 scale. Tensor cores read the scales in tiles of 128
rows x 4 columns, so rows are rounded up to 128 and columns to 4: a batch of one row has 127 rows of
padding, which some kernel has to write.
"""

from __future__ import annotations

import math

import torch

from staleproof import check
from staleproof.ops import operators

BLOCK = 16
E2M1_MAX, E4M3_MAX = 6.0, 448.0
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

    Any positive number of rows is allowed. A row must be whole blocks.
    """
    whole = (int, torch.SymInt)
    if not (isinstance(m, whole) and m > 0):
        check.fail("m" if name == "n" else name, "at least one row", repr(m))
    if not (isinstance(n, whole) and n > 0 and n % BLOCK == 0):
        check.fail(name, f"a positive multiple of {BLOCK} columns", repr(n))


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


def as_global_scale(
    global_scale: float | torch.Tensor, like: torch.Tensor, *, validate: bool = False
) -> torch.Tensor:
    """``global_scale`` as a (1,) float32 tensor on the device of ``like``.

    Raises:
        ValueError: another shape than () or (1,), another dtype or device, or a number that is not
            positive and finite; for the value of a tensor only with ``validate``.

    >>> as_global_scale(2.0, torch.ones(3)), as_global_scale(torch.tensor(2.0), torch.ones(3))
    (tensor([2.]), tensor([2.]))
    """
    most = torch.finfo(torch.float32).max
    if not isinstance(global_scale, torch.Tensor):
        if not (isinstance(global_scale, (int, float)) and 0 < global_scale <= most):
            check.fail("global_scale", "a positive finite number", repr(global_scale))
        return torch.full((1,), global_scale, dtype=torch.float32, device=like.device)
    check.tensor("global_scale", global_scale, dtype=torch.float32, like=like)
    shape = tuple(global_scale.shape)
    check.require(shape in ((), (1,)), "global_scale", "shape () or (1,)", shape)
    if validate:
        operators.require_values(global_scale)
        value = global_scale.item()
        check.require(0 < value <= most, "global_scale", "a positive finite number", value)
    return global_scale if shape else global_scale.reshape(1)


def scale_shape(m: int, n: int, *, swizzled: bool = True, row_tile: int = 128) -> tuple[int, int]:
    """Rows and columns of the scales of an (m, n) tensor, padding included.

    >>> scale_shape(1, 48), scale_shape(1, 48, swizzled=False)
    ((128, 4), (1, 3))
    """
    columns = n // BLOCK
    if not swizzled:
        return m, columns
    return round_up(m, row_tile), round_up(columns, COLUMNS_A_STEP)


def scale_offsets(
    rows: int, columns: int, *, row_tile: int = 128, device: torch.device | str | None = None
) -> torch.Tensor:
    """Offset of the scale of each (row, column) in the swizzled buffer.

    A tile is ``row_tile`` rows x 4 columns, and the tiles of a row of tiles are consecutive.
    128 x 4: byte ``row % 32 * 16 + row % 128 // 32 * 4 + column % 4`` of 512 (PTX ISA, tcgen05 scale
    factors; cuBLAS, block scaling factors layout). 8 x 4: byte ``row % 8 * 4 + column % 4`` of 32
    (FlashInfer's layout for few rows).

    Returns:
        (rows, columns) int64.

    >>> scale_offsets(2, 6).tolist()
    [[0, 1, 2, 3, 512, 513], [16, 17, 18, 19, 528, 529]]
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
    """Offsets of the padding: scales that belong to no block of an (m, n) tensor, in rising order.

    >>> padding_offsets(1, 48)[:4].tolist(), len(padding_offsets(1, 48))
    ([3, 4, 5, 6], 509)
    """
    rows, columns = scale_shape(m, n, row_tile=row_tile)
    is_padding = torch.ones(rows * columns, dtype=torch.bool)
    is_padding[scale_offsets(m, n // BLOCK, row_tile=row_tile)] = False
    return is_padding.nonzero()[:, 0]


def create_fp4_scale_tensor(
    m: int, n: int, *, swizzled: bool = True, device: torch.device | str | None = None
) -> torch.Tensor:
    """Allocate the scales of an (m, n) tensor for a quantiser that writes the scales of blocks only.

    The swizzled layout has padding, which is set to 0 here (vLLM #45739). The linear layout has no
    padding and is left uninitialised. ``quantize_nvfp4`` writes the padding itself.

    Args:
        m: rows, at least 1.
        n: columns, a multiple of 16.
        swizzled: 128 x 4 tiles, or plain rows.
        device: as for ``torch.empty``.

    Returns:
        float8_e4m3fn, (m rounded up to 128, n / 16 rounded up to 4) swizzled, (m, n / 16) linear.

    Raises:
        ValueError: no row, or columns that are not whole blocks.

    >>> scales = create_fp4_scale_tensor(1, 48)
    >>> scales.shape, int(scales.view(torch.uint8).count_nonzero())
    (torch.Size([128, 4]), 0)
    """
    check_sizes(m, n)
    make = torch.zeros if swizzled else torch.empty
    # As uint8, because not every device can fill float8.
    raw = make(scale_shape(m, n, swizzled=swizzled), dtype=torch.uint8, device=device)
    return raw.view(torch.float8_e4m3fn)


def swizzle(scales: torch.Tensor, *, row_tile: int = 128, fill: int = 0) -> torch.Tensor:
    """(m, columns) uint8 scales in tiles of ``row_tile`` rows x 4 columns; the padding is ``fill``.

    >>> swizzle(torch.full((1, 3), 7, dtype=torch.uint8))[0].tolist()
    [7, 7, 7, 0]
    """
    m, columns = scales.shape
    shape = scale_shape(m, columns * BLOCK, row_tile=row_tile)
    out = torch.full((math.prod(shape),), fill, dtype=torch.uint8, device=scales.device)
    out[scale_offsets(m, columns, row_tile=row_tile, device=scales.device)] = scales
    return out.view(shape)


def unswizzle(scales: torch.Tensor, m: int, columns: int, *, row_tile: int = 128) -> torch.Tensor:
    """The (m, columns) scales of a swizzled buffer; ``m`` and ``columns`` may include padding.

    >>> unswizzle(swizzle(torch.full((1, 3), 0x38, dtype=torch.uint8)), 1, 4).tolist()
    [[1.0, 1.0, 1.0, 0.0]]
    """
    offsets = scale_offsets(m, columns, row_tile=row_tile, device=scales.device)
    return scales.view(torch.uint8).flatten()[offsets].view(torch.float8_e4m3fn)
