"""Tensors compared bit by bit, and moved with their strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """Integers of the same size, for which NaN equals itself."""
    return x.view(INTEGERS[x.element_size()])


def assert_same_bits(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    """The same shapes, dtypes and bits, on the same devices."""
    for mine, theirs in zip(got, want, strict=True):
        assert (mine.shape, mine.dtype, mine.device) == (theirs.shape, theirs.dtype, theirs.device)
        assert torch.equal(bits(mine), bits(theirs))


def moved(value: Any, device: str) -> Any:
    """The same on the device, strides included."""
    if isinstance(value, tuple):
        return tuple(moved(v, device) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    there = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return there.copy_(value)
