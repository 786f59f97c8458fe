"""The steps that the questions judge: an NVFP4 product of few rows, and a quantiser per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from staleproof.evidence.rows import Fill
from staleproof.incidents.scale_padding import broken
from staleproof.ops.nvfp4 import quantize_nvfp4
from staleproof.ops.reference import nvfp4 as reference

IN_KERNEL = "quantize_nvfp4"

# Five live rows of five blocks: 123 rows and 3 columns of the tile of scales are padding.
LIVE, N, OUT = 5, 80, 16


@dataclass(frozen=True)
class Product:
    """Operands of one NVFP4 product: x (live, n), weight (out, n), quantised once."""

    x: torch.Tensor
    factor: torch.Tensor
    weight: tuple[torch.Tensor, torch.Tensor]

    @property
    def alpha(self) -> float:
        """Factor of the result."""
        return 1 / float(self.factor) ** 2


def product_on(device: str, m: int = LIVE, n: int = N) -> Product:
    """The operands of all questions about padding."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(m, n, generator=generator).to(device, torch.bfloat16)
    factor = torch.full((1,), 256.0, device=device)
    weight = torch.randn(OUT, n, generator=generator).to(device, torch.bfloat16)
    return Product(x, factor, reference.quantize_nvfp4(weight, factor))


def multiply(a: Product, packed: torch.Tensor, scales: torch.Tensor, tile: int | None) -> torch.Tensor:
    """(live, out): the product tile by tile as on tensor cores, or by rows for the linear layout."""
    if tile is None:
        left = reference.dequantize_nvfp4(packed, scales, a.factor, swizzled=False)
        return left @ reference.dequantize_nvfp4(*a.weight, a.factor).T
    return reference.block_scaled_mm(packed, scales, *a.weight, a.alpha, row_tile=tile)


def step_of(path_name: str, allocation: str, a: Product) -> Callable[[Fill | None], torch.Tensor]:
    """Quantise and multiply, for judge_rows and pad_invariance, which fill the scales' fresh memory."""
    tile, (m, n), device = broken.PATHS[path_name], a.x.shape, a.x.device

    def run(fill: Fill | None) -> torch.Tensor:
        def leave(memory: torch.Tensor) -> None:
            # NaN if no fill is given, because a tile of random bytes nearly always contains a NaN.
            wide = torch.full(memory.shape, torch.nan, device=device)
            if fill is not None:
                fill(wide)
            # e4m3 has no infinity.
            memory.copy_(wide.clamp(-448, 448))

        if allocation == IN_KERNEL:
            swizzled = tile is not None
            shape = reference.scale_shape(m, n, swizzled=swizzled)
            scales = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
            packed = torch.empty(m, n // 2, dtype=torch.uint8, device=device)
            leave(scales)
            quantize_nvfp4(a.x, a.factor, swizzled=swizzled, out=(packed, scales))
        else:
            packed, scales = broken.quantize_blocks_only(a.x, a.factor, tile, allocation, leave)
        return multiply(a, packed, scales, tile)

    return run


def per_token_step(name: str, device: str) -> Callable[[Fill | None], torch.Tensor]:
    """A per-token quantiser over three live and three padding rows, for judge_rows and pad_invariance."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(6, 64, generator=generator).to(device)

    def run(fill: Fill | None) -> torch.Tensor:
        rows = x.clone()
        rows[3:] = torch.nan
        if fill is not None:
            fill(rows[3:])
        values, scales = broken.PER_TOKEN[name](rows)
        return values.float() * scales[:, None]

    return run
