"""The kernels behind :class:`staleproof.BlockZeroer`, and the address table that a launch of them needs.

The table says which bytes belong to a KV block: ranges of addresses, for caches of any layout.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from staleproof import check, device
from staleproof.ops.id_ring import IdRing
from staleproof.ops.launching import Ready
from staleproof.ops.operators import on_device_of
from staleproof.ops.private import is_capturing

device.load_triton()

import triton
import triton.language as tl

INTERPRET = device.interpreting()
# Bytes that one program zeroes of each of its pages.
CHUNK = 4096
WARPS = 2
# If pages differ in size, each is cut into rows of at most this many bytes.
ROW = 32768
# The most programs along the second and third axis of a CUDA grid.
MOST = 65535
# The most ids that are passed as arguments of a launch, two in each argument.
LISTED = 32
_IDS, _PAIRS, _NONE = struct.Struct(f"{LISTED}i"), struct.Struct(f"{LISTED // 2}q"), (0,) * LISTED


@triton.jit
def _zero_page(
    table, row, block, there, num_blocks, chunk, word, byte,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Zero the CHUNK bytes number ``chunk`` of each page (table row, block)."""
    row = table + row.to(tl.int64) * 4
    start = tl.load(row, mask=there, other=0) + block * tl.load(row + 1, mask=there, other=0)
    length = tl.load(row + 2, mask=there, other=0)
    length = tl.where((block > 0) & (block < num_blocks), length, 0)

    # Bytes [skip, end) are zeroed, counted from the last multiple of 16 at or before ``start``.
    base = start // 16 * 16
    skip = 0 if ALIGNED else start - base
    end = skip + length
    words = (base + chunk * CHUNK).to(tl.pointer_type(tl.int32))
    if PAGES == 1:
        words = tl.multiple_of(words, 16)
    # Computed as multiples of 4 words, so that the compiler knows that the mask splits no 16-byte store.
    left = end // 16 * 4 - chunk * (CHUNK // 4)
    mask = word < tl.where(left < CHUNK // 4, left, CHUNK // 4).to(tl.int32)
    if not ALIGNED:
        mask &= word >= tl.where((chunk == 0) & (skip > 0), 4, 0)
    # Streaming stores, because nobody reads the zeros soon.
    tl.store(words + word, 0, mask=mask, cache_modifier=".cs")
    if not ALIGNED:
        stop = tl.where((skip > 0) & (chunk == 0), end, 0)
        head = base.to(tl.pointer_type(tl.int8)) + byte
        tl.store(head, 0, mask=(byte >= skip) & (byte < stop))
        at = end // 16 * 16
        stop = tl.where(((at > 0) | (skip == 0)) & (chunk == at // CHUNK), end - at, 0)
        tail = (base + at).to(tl.pointer_type(tl.int8)) + byte
        tl.store(tail, 0, mask=byte < stop)


# No specialisation on the numbers: one compiled kernel serves every list of ids.
@triton.jit(do_not_specialize=["count", "rows", "num_blocks"], do_not_specialize_on_alignment=["ids"])
def _zero_kernel(
    table, ids, count, rows, num_blocks,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Each program zeroes CHUNK bytes of PAGES (table row, block) pairs.

    Programs start along axis 0, then 1, then 2, so that the addresses written ascend.
    """
    chunk = tl.program_id(0).to(tl.int64)
    word, byte = tl.arange(0, CHUNK // 4), tl.arange(0, 16)
    if PAGES == 1:
        i, row = tl.program_id(1), tl.program_id(2)
    else:
        page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)[:, None]
        row = page // count
        i = page - row * count
        word, byte = word[None, :], byte[None, :]
    there = row < rows
    block = tl.load(ids + i, mask=there, other=0).to(tl.int64)
    _zero_page(table, row, block, there, num_blocks, chunk, word, byte, ALIGNED, CHUNK, PAGES)


_NUMBERS = [*(f"pair{i}" for i in range(16)), "rows", "num_blocks"]


@triton.jit(do_not_specialize=_NUMBERS)
def _zero_listed_kernel(
    table,
    pair0, pair1, pair2, pair3, pair4, pair5, pair6, pair7,
    pair8, pair9, pair10, pair11, pair12, pair13, pair14, pair15,
    rows, num_blocks,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """``_zero_kernel`` with PAGES = 1 and the ids as arguments, two in each int64, instead of in memory."""
    i, row = tl.program_id(1), tl.program_id(2)
    # Select the argument by the bits of i, in a tree.
    odd = (i & 2) != 0
    a0, a1 = tl.where(odd, pair1, pair0), tl.where(odd, pair3, pair2)
    a2, a3 = tl.where(odd, pair5, pair4), tl.where(odd, pair7, pair6)
    a4, a5 = tl.where(odd, pair9, pair8), tl.where(odd, pair11, pair10)
    a6, a7 = tl.where(odd, pair13, pair12), tl.where(odd, pair15, pair14)
    odd = (i & 4) != 0
    a0, a1 = tl.where(odd, a1, a0), tl.where(odd, a3, a2)
    a2, a3 = tl.where(odd, a5, a4), tl.where(odd, a7, a6)
    odd = (i & 8) != 0
    a0, a1 = tl.where(odd, a1, a0), tl.where(odd, a3, a2)
    pair = tl.where((i & 16) != 0, a1, a0)
    block = (pair >> (i & 1).to(tl.int64) * 32) & 0x7FFFFFFF
    chunk = tl.program_id(0).to(tl.int64)
    word, byte = tl.arange(0, CHUNK // 4), tl.arange(0, 16)
    _zero_page(table, row, block, row < rows, num_blocks, chunk, word, byte, ALIGNED, CHUNK, 1)


def _tile(longest: int) -> tuple[int, int]:
    """Bytes of a page, and pages, that one program zeroes."""
    if not INTERPRET:
        return CHUNK, 1
    # An interpreted program takes as long for many bytes as for few.
    chunk = min(max(triton.next_power_of_2(longest), 16), 2**16)
    return chunk, 2**18 // chunk


def pairs_of(ids: Sequence[int]) -> tuple[int, ...]:
    """At most LISTED ids, packed two in each number, then their count.

    Raises:
        struct.error: an id is not an integer within int32.

    >>> pairs_of([1, 2, 3])[:3]
    (8589934593, 3, 0)
    """
    return *_PAIRS.unpack(_IDS.pack(*ids, *_NONE[len(ids) :])), len(ids)


class Layout(NamedTuple):
    """Address, element size, shape and strides (in elements) of a cache."""

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
    """The bytes of a manager's block in one cache; it is ``ratio`` blocks of the cache.

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
    # Each remaining axis must have a larger stride than the blocks (e.g. K and V outermost).
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


def rows_of(found: list[Range]) -> list[tuple[int, int, int, int]]:
    """Rows (start, stride, length, 0) for the kernel. The 0 makes a row 32 bytes: one memory access."""
    longest = max(r.length for r in found)
    # Ranges of one length need no cutting, because each takes the same number of programs.
    row = longest if longest == min(r.length for r in found) else ROW
    return [
        (r.start + at, r.stride, min(row, r.length - at), 0) for r in found for at in range(0, r.length, row)
    ]


class Plan:
    """Everything about a launch that depends on the caches only: the table, and the compiled kernel."""

    def __init__(
        self, caches: Sequence[Layout], dims: Sequence[int], ratios: Sequence[int], where: torch.device
    ) -> None:
        found = []
        for index, (cache, dim, ratio) in enumerate(zip(caches, dims, ratios, strict=True)):
            found += ranges(f"kv_caches[{index}]", cache, dim, ratio)
        found = merged(found)
        rows = rows_of(found)
        check.require(len(rows) <= MOST, "kv_caches", f"at most {MOST} ranges of bytes a block", len(rows))
        self.rows, self.num_blocks = len(rows), caches[0].shape[dims[0]] // ratios[0]
        self.block_bytes = sum(r.length for r in found)
        self._aligned = all(number % 16 == 0 for row in rows for number in row)
        longest = max(length for _, _, length, _ in rows)
        self._chunk, self._pages = _tile(longest)
        # If a start is not a multiple of 16, the end moves by up to 15 bytes.
        self._chunks = triton.cdiv(longest + (0 if self._aligned else 15), self._chunk)
        self.table = torch.tensor(rows, dtype=torch.int64, device=where)
        self._address = self.table.data_ptr()
        if not INTERPRET:
            with on_device_of(self.table):
                # Loading a kernel breaks a capture, so load them now. Each launch has one program, which gets
                # the null block and writes nothing.
                none = torch.zeros(1, dtype=torch.int64, device=where)
                self._ready = {
                    dtype: self._loaded(_zero_kernel, none.to(dtype), *self._sizes(1))
                    for dtype in (torch.int32, torch.int64)
                }
                # Large numbers, because small ones would be compiled as int32. Their lower half is 0, the
                # null block.
                self._listed = self._loaded(_zero_listed_kernel, *(2**40,) * (LISTED // 2), *self._last())

    def _loaded(self, kernel: Any, *arguments: Any) -> Ready:
        compiled = kernel[(1,)](self.table, *arguments, num_warps=WARPS)
        return Ready(compiled, (1,), (), self.table.get_device())

    def zero(self, ids: torch.Tensor) -> None:
        """Launch on ids on the caches' device. Ids that name no block, or the null block, are skipped."""
        if not INTERPRET:
            self.launch(ids.data_ptr(), len(ids), ids.dtype, self.stream())
        elif len(ids):
            pages = triton.cdiv(self.rows * len(ids), self._pages)
            _zero_kernel[(self._chunks, pages)](self.table, ids, *self._sizes(len(ids)))

    def stream(self) -> int:
        """The handle of the current stream."""
        return triton.runtime.driver.active.get_current_stream(self.table.get_device())

    def launch(self, address: int, count: int, dtype: torch.dtype, stream: int) -> None:
        """Launch on ``count`` ids at an address on the device."""
        for first in range(0, count, MOST):
            part = min(count - first, MOST)
            at = self._address, address + first * dtype.itemsize
            self._ready[dtype].on(stream, (self._chunks, part, self.rows), *at, *self._sizes(part))

    def zero_from_host(self, ids: np.ndarray, ring: IdRing | None) -> None:
        """Launch on ascending ids of the host; more than ``LISTED`` of them go through the ring.

        Raises:
            ValueError: the stream is capturing. Nothing was launched.
        """
        with on_device_of(self.table):
            if ring is None:
                return self.zero(torch.from_numpy(ids))
            if is_capturing():
                expected = "a tensor on the device where the current stream is capturing"
                check.fail("block_ids", expected, "ids on the host, which no replay could read again")
            if len(ids) <= LISTED:
                # Pass ids as arguments: this needs no copy, and no memory that a later call could overwrite.
                return self.launch_listed(pairs_of(ids.tolist()))
            stream = self.stream()
            ring.send(ids, stream, lambda to: self.launch(to, len(ids), torch.int32, stream))

    def launch_listed(self, pairs: Sequence[int]) -> None:
        """Launch with ids from :func:`pairs_of`, passed as arguments."""
        count, pairs = pairs[-1], pairs[:-1]
        grid = self._chunks, count, self.rows
        if INTERPRET:
            _zero_listed_kernel[grid](self.table, *pairs, *self._last())
        else:
            self._listed.on(self.stream(), grid, self._address, *pairs, *self._last())

    def _sizes(self, count: int) -> tuple[Any, ...]:
        """The arguments of the kernel after the table and the ids."""
        return count, *self._last(), self._pages

    def _last(self) -> tuple[Any, ...]:
        return self.rows, self.num_blocks, self._aligned, self._chunk
