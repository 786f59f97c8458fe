"""MXFP4 weights in the format of a checkpoint, drawn and decoded."""

from __future__ import annotations

from typing import NamedTuple

import torch

from staleproof.check import require

# Values that share a scale.
GROUP = 32
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Shape(NamedTuple):
    """Sizes of one projection: the product has ``n`` columns and sums over ``k``."""

    experts: int
    n: int
    k: int

    def check(self) -> None:
        """Raise unless the layout can hold it.

        >>> Shape(2, 256, 100).check()
        Traceback (most recent call last):
        ValueError: k: expected a multiple of 32, got 100
        """
        require(self.k > 0 and self.k % GROUP == 0, "k", "a multiple of 32", self.k)
        require(self.n > 0 and self.experts > 0, "n, experts", "at least 1", (self.n, self.experts))


class Matrix(NamedTuple):
    """One projection of all experts, in the format of a checkpoint.

    Attributes:
        weight: (experts, n, k / 2) uint8, two FP4 each, the first in the low half.
        scale: (experts, n, k / 32) uint8, E8M0.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> Shape:
        """Sizes of the projection."""
        experts, n, half = self.weight.shape
        return Shape(experts, n, 2 * half)

    def on(self, device: str) -> Matrix:
        """The same on a device."""
        return Matrix(*(each.to(device) for each in self))


def quantized(shape: Shape, generator: torch.Generator) -> Matrix:
    """Normal weights of std 0.02, converted to MXFP4 by the OCP Microscaling specification 1.0, section 6.3.

    Random bytes would hold 0xff more often than a checkpoint does.

    Args:
        shape: of the projection.
        generator: of the device.

    Raises:
        ValueError: K is no multiple of 32.
    """
    shape.check()
    experts, n, k = shape
    drawn = torch.randn(experts, n, k // GROUP, GROUP, generator=generator, device=generator.device) * 0.02
    exponent = drawn.abs().amax(-1).log2().floor() - 2
    middle = ((FP4[1:] + FP4[:-1]) / 2).to(drawn.device)
    codes = torch.bucketize(drawn.abs() / exponent.exp2()[..., None], middle) + 8 * (drawn < 0)
    low, high = codes.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return Matrix(low | high << 4, (exponent + 127).to(torch.uint8))


def values(weight: torch.Tensor) -> torch.Tensor:
    """The FP4 values, (..., k) fp32, of packed weights (..., k / 2) uint8, without their scales.

    >>> values(torch.tensor([0x1F], dtype=torch.uint8)).tolist()
    [-6.0, 0.5]
    """
    codes = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(-2).long()
    return torch.cat([FP4, -FP4]).to(weight.device)[codes]


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The numbers, (..., k) fp32, that weights and scales stand for."""
    return values(weight) * (scale.float() - 127).exp2().repeat_interleave(GROUP, -1)
