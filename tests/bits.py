"""Tensors compared bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

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
