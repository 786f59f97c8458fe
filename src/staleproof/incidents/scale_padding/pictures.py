"""Data for the figure of incident 5's notebook: the bytes of a tile of scales, and whose rows they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from staleproof.incidents.scale_padding.broken import PATHS, quantize_blocks_only
from staleproof.ops.nvfp4_layout import scale_offsets

TILE_ROWS, TILE_COLUMNS, TILE_BYTES = 128, 4, 512


@dataclass(frozen=True)
class TilePicture:
    """The first tile of the scales of a quantised tensor.

    Attributes:
        rows: the row of the tensor that each of the 512 bytes belongs to, in the order of memory.
        columns: its column in the tile.
        written: whether the quantiser wrote the byte.
    """

    rows: list[int]
    columns: list[int]
    written: list[bool]


def tile_picture(rows: int, width: int, device: str, allocation: str = "empty") -> TilePicture:
    """Quantise a tensor twice over different memory, and see which bytes of the first tile were written.

    A byte that is not written keeps the old content of its memory, so it differs between the two runs.

    Args:
        rows: of the tensor.
        width: its columns, a multiple of 16.
        device: ``"cpu"`` or ``"cuda"``.
        allocation: of the scales, one of :data:`staleproof.incidents.scale_padding.broken.ALLOCATIONS`.
    """
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(device)
    factor = torch.full((1,), 64.0, device=device)

    def tile_over(byte: int) -> torch.Tensor:
        def leave(scales: torch.Tensor) -> object:
            return scales.view(torch.uint8).fill_(byte)

        scales = quantize_blocks_only(x, factor, PATHS["128x4"], allocation, leave)[1]
        return scales.view(torch.uint8).flatten()[:TILE_BYTES]

    written = (tile_over(0x7F) == tile_over(0xA5)).tolist()
    at = scale_offsets(TILE_ROWS, TILE_COLUMNS)
    of_byte = at.flatten().argsort()
    return TilePicture((of_byte // TILE_COLUMNS).tolist(), (of_byte % TILE_COLUMNS).tolist(), written)
