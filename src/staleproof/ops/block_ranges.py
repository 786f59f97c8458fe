"""Which bytes of memory belong to a KV block: ranges of addresses, for caches of any layout."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch

from staleproof import check

# If pages differ in size, each is cut into rows of at most this many bytes.
ROW = 32768


class Layout(NamedTuple):
    """Where a cache lies: its address, and what its indices mean there. Strides in elements."""

    address: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, cache: torch.Tensor) -> Layout:
        return cls(cache.data_ptr(), cache.element_size(), tuple(cache.shape), cache.stride())


class Range(NamedTuple):
    """The bytes of block b: ``length`` of them from the address ``start + b * stride``."""

    stride: int
    start: int
    length: int


def ranges(name: str, cache: Layout, block_dim: int, ratio: int) -> list[Range]:
    """The bytes of a manager's block in one cache; ``ratio`` of its blocks make one of the manager's.

    Raises:
        ValueError: blocks overlap, or the elements of a block are not side by side.

    >>> ranges("cache", Layout(4096, 2, (8, 16), (16, 1)), block_dim=0, ratio=1)
    [Range(stride=32, start=4096, length=32)]
    """
    size = cache.itemsize
    stride, blocks = cache.strides[block_dim] * size, cache.shape[block_dim]
    axes = sorted(
        (step * size, count)
        for dim, (step, count) in enumerate(zip(cache.strides, cache.shape, strict=True))
        if dim != block_dim and count > 1
    )
    layout = f"shape {cache.shape}, strides {cache.strides}"
    run = size
    while axes and axes[0][0] == run:
        run *= axes.pop(0)[1]
    # Each axis that is left must step over all blocks at once (as K and V outermost do).
    check.require(
        run <= stride and all(step > stride for step, _ in axes),
        name,
        f"the elements of a block side by side, and blocks apart, along axis {block_dim}",
        layout,
    )
    span = (blocks - 1) * stride + run
    for step, count in axes:
        check.require(step >= span, name, "elements with memory of their own", layout)
        span += (count - 1) * step
    begins = [
        cache.address + sum(offsets)
        for offsets in product(*(range(0, step * count, step) for step, count in axes))
    ]
    if run == stride:
        return [Range(ratio * stride, begin, ratio * run) for begin in begins]
    return [Range(ratio * stride, begin + j * stride, run) for begin in begins for j in range(ratio)]


def merged(found: list[Range]) -> list[Range]:
    """The same bytes, each once, by ascending address within a stride.

    >>> merged([Range(64, 16, 16), Range(64, 0, 16), Range(64, 0, 8)])
    [Range(stride=64, start=0, length=32)]
    """
    result: list[Range] = []
    for new in sorted(set(found)):
        old = result[-1] if result else None
        if old and old.stride == new.stride and new.start <= old.start + old.length:
            length = max(old.length, new.start + new.length - old.start)
            result[-1] = old._replace(length=length)
        else:
            result.append(new)
    return result


def table(found: list[Range]) -> list[tuple[int, int, int, int]]:
    """Rows (start, stride, length, 0) for the kernel. The 0 makes a row 32 bytes: one memory access."""
    longest = max(r.length for r in found)
    # Ranges of one length need no cutting, because each takes the same number of programs.
    row = longest if longest == min(r.length for r in found) else ROW
    return [
        (r.start + at, r.stride, min(row, r.length - at), 0) for r in found for at in range(0, r.length, row)
    ]
