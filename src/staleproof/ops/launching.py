"""Calls that were checked and compiled before, by the layouts of their tensors.

Checks, tile sizes and grid depend on shapes, strides, dtypes and options, not on values. Finding them
and Triton's compiled kernel again takes several times as long as a launch. So an operation keeps, for
each such key, the compiled kernels of its first call, and later calls only fill in the addresses.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch._C import _len_torch_dispatch_stack

# A server sees each number of tokens up to its largest batch; more keys than this are a mistake.
MOST_KEYS = 4096
_PLAIN = (torch.Tensor, torch.nn.Parameter)

Call = TypeVar("Call")


def key_of(*arguments: Any) -> tuple[Hashable, ...] | None:
    """What checks and grid of a call depend on; ``None`` where it must take the long way.

    Args:
        arguments: of the call; tensors count by layout, device and whether their address is a multiple
            of 16, everything else by value.

    Returns:
        ``None`` while torch traces, under another dispatch mode, and for tensors that are not on a CUDA
        device: the interpreter has nothing to gain.

    >>> key_of(torch.ones(2), 8) is None
    True
    """
    if torch.compiler.is_compiling() or _len_torch_dispatch_stack():
        return None
    key: list[Any] = []
    for x in arguments:
        if type(x) in _PLAIN:
            if (device := x.get_device()) < 0 or x.layout is not torch.strided:
                return None
            key += (x.shape, x.stride(), x.dtype, device, x.data_ptr() % 16 == 0)
        elif isinstance(x, torch.Tensor):
            return None
        else:
            # 1, 1.0 and True are equal, but Triton compiles other kernels for them.
            key += (type(x), x)
    return tuple(key)


class Seen(Generic[Call]):
    """The calls of one operation by key.

    >>> seen = Seen()
    >>> seen.keep(("a key",), "a call")
    >>> seen.get(("a key",)), seen.get(None)
    ('a call', None)
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[Hashable, ...], Call] = {}

    def get(self, key: tuple[Hashable, ...] | None) -> Call | None:
        """The call with this key, or ``None``."""
        if key is None:
            return None
        try:
            return self._calls.get(key)
        except TypeError:
            # An argument that no dict can hold, e.g. a list: the checks will name it.
            return None

    def keep(self, key: tuple[Hashable, ...] | None, call: Call | None) -> None:
        """Remember a call whose arguments passed the checks, unless it has no key or nothing to repeat."""
        if key is None or call is None:
            return
        if len(self._calls) >= MOST_KEYS:
            self._calls.clear()
        self._calls[key] = call


class Ready:
    """One compiled kernel with its grid and sizes: a launch without Triton's search for it.

    Args:
        compiled: what Triton's own launch returned.
        grid: its grid.
        sizes: all arguments of the kernel behind its pointers, constants included, in the order of its
            signature.
        device: index of the CUDA device.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], sizes: Iterable[Any], device: int) -> None:
        from triton.runtime import driver

        self._run, self._function, self._metadata = compiled.run, compiled.function, compiled.packed_metadata
        self._grid, self._sizes = (*grid, 1, 1)[:3], tuple(sizes)
        self._device, self._stream_of = device, driver.active.get_current_stream

    def __call__(self, *addresses: int | None) -> None:
        """Launch on the current stream of the device, with the addresses of the kernel's tensors."""
        if self._device != torch._C._cuda_getDevice():
            with torch.cuda.device(self._device):
                return self(*addresses)
        self._run(
            *self._grid,
            self._stream_of(self._device),
            self._function,
            self._metadata,
            # No metadata for a profiler, and no hooks.
            None,
            None,
            None,
            *addresses,
            *self._sizes,
        )


def launched(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor | None],
    sizes: Iterable[Any],
    **options: Any,
) -> Ready | None:
    """Launch a kernel by Triton's own way, and return what repeats the launch on other addresses.

    Args:
        kernel: a Triton kernel whose pointers come first in its signature.
        grid: of the launch.
        tensors: its pointers.
        sizes: its other arguments, in the order of the signature.
        options: of Triton, e.g. ``num_warps``.

    Returns:
        ``None`` if nothing was compiled: under the interpreter.
    """
    sizes = tuple(sizes)
    compiled = kernel[grid](*tensors, *sizes, **options)
    first = tensors[0]
    if first is None or not first.is_cuda or not hasattr(compiled, "packed_metadata"):
        return None
    return Ready(compiled, grid, sizes, first.get_device())


def address(x: torch.Tensor | None) -> int | None:
    """The address of a tensor that may be missing.

    >>> address(None) is None
    True
    """
    return None if x is None else x.data_ptr()
