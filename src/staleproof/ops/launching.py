"""A cache of calls that were checked and compiled before, keyed by the layouts of their tensors.

Checks, tile sizes and grid depend on shapes, strides, dtypes and options, not on values. Finding them
and Triton's compiled kernel again takes several times as long as a launch. So an operation keeps, for
each such key, the compiled kernels of its first call, and later calls only fill in the addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from staleproof.ops import private
from staleproof.ops.private import mode_count

# A server has a call for each number of tokens up to its largest batch. More calls than this are a mistake,
# so the cache is then emptied.
MOST_CALLS = 4096
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_data_ptr = torch.Tensor.data_ptr

Key = tuple[Any, ...]
Call = TypeVar("Call")


def key_of(*arguments: Any) -> Key | None:
    """The cache key of a call: the arguments that its checks and grid depend on. ``None`` while torch traces.

    The first argument is a tensor. :class:`Seen` compares tensors by layout, device and whether their
    address is a multiple of 16, everything else by type and value.

    >>> len(key_of(torch.ones(2), 8))
    2
    """
    if torch.compiler.is_compiling() or mode_count():
        return None
    return arguments


class _Kept(NamedTuple):
    fits: Callable[..., bool]
    # Bit i: tensor i is at a multiple of 16 bytes, and the compiled kernel relies on that.
    aligned: int
    call: Any


class _Kind:
    """Calls whose arguments have the same types, so that tensors are in the same places."""

    def __init__(self, types: tuple[type, ...]) -> None:
        places = [i for i, t in enumerate(types) if t in _PLAIN]
        others = [i for i in range(len(types)) if i not in places]
        one = places[0]
        # An itemgetter with a single index returns the item itself, not a tuple.
        self.tensors: Callable[[Key], tuple[torch.Tensor, ...]]
        self.tensors = itemgetter(*places) if len(places) > 1 else lambda key: (key[one],)
        self.values: Callable[[Key], Hashable] = itemgetter(*others) if others else lambda key: None
        self.calls: dict[Hashable, list[_Kept]] = {}


def _misaligned(tensors: Iterable[torch.Tensor]) -> int:
    """Bit i is set if tensor i is not at a multiple of 16 bytes."""
    return sum(1 << i for i, x in enumerate(tensors) if x.data_ptr() & 15)


class Seen(Generic[Call]):
    """The calls of one operation that were checked and compiled before.

    >>> seen = Seen()
    >>> seen.keep(key_of(torch.ones(2), 8), "a call")
    >>> seen.get(key_of(torch.zeros(2), 8)), seen.get(key_of(torch.zeros(3), 8)), seen.get(None)
    ('a call', None, None)
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[type, ...], _Kind] = {}
        self._count = 0

    def get(self, key: Key | None, addresses: int | None = None) -> Call | None:
        """The call that was kept for such arguments, or ``None``.

        Args:
            key: see :func:`key_of`.
            addresses: the addresses of all its tensors, combined by ``|``, if the caller has them already.
        """
        if key is None or (kind := self._kinds.get(tuple(map(type, key)))) is None:
            return None
        try:
            found = kind.calls.get((key[0].shape, kind.values(key)))
        except TypeError:
            # An argument that is not hashable, e.g. a list: the checks will name it.
            return None
        if found is None:
            return None
        tensors = kind.tensors(key)
        if addresses is None:
            addresses = 0
            for at in map(_data_ptr, tensors):
                addresses |= at
        for kept in found:
            if kept.fits(*tensors) and not (addresses & 15 and kept.aligned & _misaligned(tensors)):
                call: Call = kept.call
                return call
        return None

    def keep(self, key: Key | None, call: Call | None) -> None:
        """Remember a call whose arguments passed the checks, unless the key or the call is ``None``."""
        if key is None or call is None:
            return
        types = tuple(map(type, key))
        if any(issubclass(t, torch.Tensor) and t not in _PLAIN for t in types):
            return
        if self._count >= MOST_CALLS:
            self._kinds.clear()
            self._count = 0
        kind = self._kinds.setdefault(types, _Kind(types))
        tensors = kind.tensors(key)
        aligned = ~_misaligned(tensors)
        kept = _Kept(private.layout_check(tensors), aligned, call)
        kind.calls.setdefault((key[0].shape, kind.values(key)), []).append(kept)
        self._count += 1


class Ready:
    """One compiled kernel with its grid and sizes: a launch without Triton's search for it.

    Args:
        compiled: what Triton's own launch returned.
        grid: its grid.
        sizes: all arguments of the kernel after its pointers, constants included, in the order of its
            signature.
        device: index of the CUDA device.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...], sizes: Iterable[Any], device: int) -> None:
        from triton.runtime import driver

        self._run, self._before, self.described = private.launcher(compiled)
        self._grid, self._sizes = (*grid, 1, 1)[:3], tuple(sizes)
        self._device, self._stream_of = device, driver.active.get_current_stream

    def __call__(self, *arguments: Any) -> None:
        """Launch on the current stream of the device.

        Args:
            arguments: the addresses of the kernel's tensors; for a descriptor, what ``described`` returns.
        """
        device = self._device
        if device != private.current_device():
            with torch.cuda.device(device):
                return self(*arguments)
        self._run(*self._grid, self._stream_of(device), *self._before, *arguments, *self._sizes)

    def on(self, stream: int, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launch on this stream with another grid and all arguments of the kernel."""
        self._run(*grid, stream, *self._before, *arguments)


def launched(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[torch.Tensor | None],
    sizes: Iterable[Any],
    **options: Any,
) -> Ready | None:
    """Launch a kernel through Triton, and return a callable that repeats the launch on other addresses.

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
    if first is None or not first.is_cuda or compiled is None:
        return None
    return Ready(compiled, grid, sizes, first.get_device())


@lru_cache(MOST_CALLS)
def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))


def empty(shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """Uninitialised contiguous memory on the device of ``like``, for a call that :class:`Seen` has found.

    >>> empty((2, 3), torch.int32, torch.ones(1)).shape
    torch.Size([2, 3])
    """
    make = private.empty_strided_cuda
    if make is not None and like.is_cuda and like.get_device() == private.current_device():
        # torch's private function takes a tuple, but not a torch.Size.
        shape = tuple(shape)
        return make(shape, _contiguous(shape), dtype)
    return torch.empty(shape, dtype=dtype, device=like.device)


def address(x: torch.Tensor | None) -> int | None:
    """The address of a tensor that may be missing.

    >>> address(None) is None
    True
    """
    return None if x is None else x.data_ptr()
