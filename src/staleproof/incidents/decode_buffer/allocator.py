"""Device memory, real or simulated, on which a server starts.

On CUDA :class:`CudaMemory` is the device. Elsewhere :class:`SimulatedMemory` lets the server work with
meta tensors, and :class:`SimulatedAllocator` counts their bytes as torch's caching allocator does.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from staleproof import check
from staleproof.evidence.ledger import Usage, cuda_usage, size_text
from staleproof.graph import Graph

MIB, GIB = 2**20, 2**30

# c10/cuda/CUDACachingAllocator: smallest block, what counts as small, and the sizes of segments.
_ROUND = 512
_SMALL, _SMALL_SEGMENT = MIB, 2 * MIB
_MEDIUM, _MEDIUM_SEGMENT = 10 * MIB, 20 * MIB
_LARGE_ROUND = 2 * MIB


@dataclass(eq=False)
class _Block:
    segment: _Segment
    offset: int
    size: int
    free: bool = True


@dataclass(eq=False)
class _Segment:
    size: int
    kind: tuple[bool, int]
    blocks: list[_Block]

    @property
    def empty(self) -> bool:
        return len(self.blocks) == 1 and self.blocks[0].free


class SimulatedAllocator:
    """The arithmetic of torch's CUDA caching allocator for one device and one stream, without memory.

    Requests are rounded to 512 bytes. Those up to 1 MiB share segments of 2 MiB, those below 10 MiB
    segments of 20 MiB; a larger one gets a segment of its own, rounded to 2 MiB. Freed blocks merge
    with free neighbours and are reused best fit. Before a request fails, empty segments are given back.

    Args:
        capacity: bytes of the device.
        outside: bytes of it that other processes and the driver take.
    """

    def __init__(self, capacity: int, outside: int = 0) -> None:
        check.require(capacity > outside >= 0, "capacity", f"more than {outside} bytes", capacity)
        self.capacity, self.outside = capacity, outside
        self.allocated = self.peak = self.reserved = 0
        self._segments: list[_Segment] = []

    def malloc(self, nbytes: int, pool: int = 0) -> _Block:
        """Take a block.

        Args:
            nbytes: at least 1.
            pool: 0, or the number of a graph's private pool.

        Raises:
            torch.OutOfMemoryError: it fits neither in a cached segment nor on the device.
        """
        check.require(nbytes >= 1, "nbytes", "at least 1", nbytes)
        size = -(-nbytes // _ROUND) * _ROUND
        kind = size <= _SMALL, pool
        fitting = [
            block
            for segment in self._segments
            if segment.kind == kind
            for block in segment.blocks
            if block.free and block.size >= size
        ]
        block = min(fitting, key=lambda b: b.size) if fitting else self._grow(size, kind)
        rest = block.size - size
        if rest >= _ROUND if kind[0] else rest > _SMALL:
            blocks = block.segment.blocks
            blocks.insert(blocks.index(block) + 1, _Block(block.segment, block.offset + size, rest))
            block.size = size
        block.free = False
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def _grow(self, size: int, kind: tuple[bool, int]) -> _Block:
        if kind[0]:
            wanted = _SMALL_SEGMENT
        elif size < _MEDIUM:
            wanted = _MEDIUM_SEGMENT
        else:
            wanted = -(-size // _LARGE_ROUND) * _LARGE_ROUND
        if wanted > self.free_bytes:
            self.empty_cache()
        if wanted > self.free_bytes:
            raise torch.OutOfMemoryError(self._message(wanted))
        segment = _Segment(wanted, kind, [])
        segment.blocks.append(_Block(segment, 0, wanted))
        self._segments.append(segment)
        self.reserved += wanted
        return segment.blocks[0]

    def _message(self, wanted: int) -> str:
        cached = self.reserved - self.allocated
        return (
            f"CUDA out of memory. Tried to allocate {size_text(wanted)}. GPU 0 has a total "
            f"capacity of {size_text(self.capacity)} of which {size_text(self.free_bytes)} is "
            f"free. Including non-PyTorch memory, this process has "
            f"{size_text(self.reserved + self.outside)} memory in use. Of the allocated memory "
            f"{size_text(self.allocated)} is allocated by PyTorch, and {size_text(cached)} is "
            "reserved by PyTorch but unallocated."
        )

    def free(self, block: _Block) -> None:
        """Give a block back; its segment stays."""
        self.allocated -= block.size
        block.free = True
        blocks = block.segment.blocks
        at = blocks.index(block)
        for left, right in ((at, at + 1), (at - 1, at)):
            if left >= 0 and right < len(blocks) and blocks[left].free and blocks[right].free:
                blocks[left].size += blocks[right].size
                del blocks[right]

    def empty_cache(self) -> None:
        """Give segments without a live block back to the device; those of private pools stay."""
        for segment in [s for s in self._segments if s.empty and s.kind[1] == 0]:
            self._segments.remove(segment)
            self.reserved -= segment.size

    @property
    def free_bytes(self) -> int:
        """Bytes of the device that are not taken."""
        return self.capacity - self.outside - self.reserved

    def usage(self) -> Usage:
        """What :func:`staleproof.evidence.ledger.cuda_usage` reads from a real device."""
        releasable = sum(s.size for s in self._segments if s.empty and s.kind[1] == 0)
        return Usage(self.outside + self.reserved, self.reserved, self.allocated, releasable)


_FIELDS = {
    "tried": r"Tried to allocate ([\d.]+ \w+)",
    "total": r"total capacity of ([\d.]+ \w+)",
    "free": r"of which ([\d.]+ \w+) is free",
    "in_use": r"this process has ([\d.]+ \w+) memory in use",
    "allocated": r"allocated memory ([\d.]+ \w+) is allocated by PyTorch",
    "unallocated": r"and ([\d.]+ \w+) is reserved by PyTorch but unallocated",
}


def oom_fields(message: str) -> dict[str, str]:
    """The figures in an out-of-memory message, real or simulated, by name."""
    found = {name: re.search(pattern, message) for name, pattern in _FIELDS.items()}
    return {name: match.group(1) for name, match in found.items() if match}


# Torch computes the shapes of these operations in Python, which takes 300 us each time.
_ARITHMETIC = frozenset((torch.ops.aten.add.Tensor, torch.ops.aten.gt.Scalar, torch.ops.aten.mul.Tensor))


def _shape_key(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A key for everything that determines the shape and type of a result."""
    return func, *((a.shape, a.dtype) if isinstance(a, torch.Tensor) else (type(a), a) for a in args)


class SimulatedMemory(TorchDispatchMode):
    """A device of meta tensors: operations give shapes, and a :class:`SimulatedAllocator` counts bytes.

    Args:
        total_bytes: bytes of the device.
    """

    device = "meta"

    def __init__(self, total_bytes: int) -> None:
        super().__init__()
        self.total_bytes = total_bytes
        self.allocator = SimulatedAllocator(total_bytes)
        self._blocks: dict[int, tuple[_Block, object]] = {}
        self._shapes: dict[object, tuple[torch.Size, torch.dtype]] = {}
        self._pool = self._pools = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Call torch only in this method, whose frame a ledger skips: it names the line that asked for memory.
        key = _shape_key(func, args) if not kwargs and func in _ARITHMETIC else None
        if key in self._shapes:
            shape, dtype = self._shapes[key]
            result = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            result = func(*args, **(kwargs or {}))
        if key is not None:
            self._shapes[key] = result.shape, result.dtype
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._take(tensor.untyped_storage())
        return result

    def _take(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._blocks and storage.nbytes():
            block = self.allocator.malloc(storage.nbytes(), self._pool)
            self._blocks[key] = block, weakref.ref(storage, lambda _: self._release(key))

    def _release(self, key: int) -> None:
        block, _ = self._blocks.pop(key)
        self.allocator.free(block)

    def usage(self) -> Usage:
        """The device now."""
        return self.allocator.usage()

    def peak_of(self, fn: Callable[[], object]) -> int:
        """Peak of the bytes that ``fn`` allocated in addition; caches are emptied afterwards."""
        before = self.allocator.peak = self.allocator.allocated
        fn()
        self.allocator.empty_cache()
        return self.allocator.peak - before

    def capture(self, fn: Callable[[], object]) -> Graph:
        """Run ``fn`` once, in a private pool that stays reserved; a replay allocates nothing."""
        self._pools += 1
        self._pool = self._pools
        try:
            fn()
        finally:
            self._pool = 0
        return _Replayed()


class _Replayed:
    def replay(self) -> None:
        """Meta tensors hold no values, and a replay takes no memory."""


class CudaMemory(contextlib.nullcontext):
    """The current CUDA device.

    Args:
        limit_bytes: what torch's allocator may use; ``None`` for the whole device. Torch does not count
            other users' memory against the limit, so :meth:`usage` excludes it too.

    Raises:
        ValueError: a limit beyond the device.
    """

    device = "cuda"

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        whole = torch.cuda.mem_get_info()[1]
        self.total_bytes = whole if limit_bytes is None else limit_bytes
        self._limited = limit_bytes is not None
        check.require(self.total_bytes <= whole, "limit_bytes", f"at most {whole}", self.total_bytes)
        torch.cuda.set_per_process_memory_fraction(self.total_bytes / whole)

    def usage(self) -> Usage:
        """The device now."""
        usage = cuda_usage()
        return usage._replace(used=usage.reserved) if self._limited else usage

    def peak_of(self, fn: Callable[[], object]) -> int:
        """Peak of the bytes that ``fn`` allocated in addition; caches are emptied afterwards."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.max_memory_allocated() - before

    def capture(self, fn: Callable[[], object]) -> Graph:
        """A CUDA graph of ``fn``."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        return graph


# Where a server's tensors live; every allocation happens in its ``with`` block.
Memory = SimulatedMemory | CudaMemory
