"""Tensors compared bit by bit, and moved with their strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from staleproof.evidence.canary import bits


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
