"""The fix of incident 4: newly allocated KV blocks are zeroed, all layers in one launch.

Upstream's (vLLM #35219) writes 4 KiB a program, block after block, and knows one page size and one
kind of layout. Here every range of bytes that belongs to a block is a row of a table of absolute
addresses, so that any layout, dtype and mixture of page sizes will do; the programs follow the
addresses upwards, which memory likes better; and stores are 16 bytes wide.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from staleproof import check, device
from staleproof.ops.id_ring import IdRing
from staleproof.ops.reference.zero_blocks import per_cache

device.load_triton()

import triton
import triton.language as tl

INTERPRET = device.interpreting()
# Bytes of a page that one program clears.
CHUNK = 4096
# Where pages differ in size, each is cut into rows of at most this many bytes.
ROW = 32768
WARPS = 2
# Programs along the second and third axis of a grid, at most.
MOST = 65535
# Types in which zero bytes are the number zero.
DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


# One compiled kernel serves every count and every list of ids.
@triton.jit(do_not_specialize=["count", "rows", "num_blocks"], do_not_specialize_on_alignment=["ids"])
def _zero_kernel(
    table, ids, count, rows, num_blocks,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Zero a chunk of a page, which is a row of the table in one block, or of some pages.

    Programs start along axis 0, then 1, then 2, so that they follow the addresses upwards.
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
    row = table + row.to(tl.int64) * 4
    start = tl.load(row, mask=there, other=0) + block * tl.load(row + 1, mask=there, other=0)
    length = tl.load(row + 2, mask=there, other=0)
    length = tl.where((block > 0) & (block < num_blocks), length, 0)

    # Counted from an address that is a multiple of 16, in bytes: [skip, end) is to be zero.
    base = start // 16 * 16
    skip = 0 if ALIGNED else start - base
    end = skip + length
    words = (base + chunk * CHUNK).to(tl.pointer_type(tl.int32))
    if PAGES == 1:
        words = tl.multiple_of(words, 16)
    # Products with 4, so that the compiler sees that no mask parts 16 bytes.
    left = end // 16 * 4 - chunk * (CHUNK // 4)
    mask = word < tl.where(left < CHUNK // 4, left, CHUNK // 4).to(tl.int32)
    if not ALIGNED:
        mask &= word >= tl.where((chunk == 0) & (skip > 0), 4, 0)
    # Nobody reads the zeros soon: they need not stay in the caches.
    tl.store(words + word, 0, mask=mask, cache_modifier=".cs")
    if not ALIGNED:
        stop = tl.where((skip > 0) & (chunk == 0), end, 0)
        head = base.to(tl.pointer_type(tl.int8)) + byte
        tl.store(head, 0, mask=(byte >= skip) & (byte < stop))
        at = end // 16 * 16
        stop = tl.where(((at > 0) | (skip == 0)) & (chunk == at // CHUNK), end - at, 0)
        tail = (base + at).to(tl.pointer_type(tl.int8)) + byte
        tl.store(tail, 0, mask=byte < stop)


class _Range(NamedTuple):
    """The bytes of block b: ``length`` of them from the address ``start + b * stride``."""

    stride: int
    start: int
    length: int


def _ranges(name: str, cache: torch.Tensor, block_dim: int, ratio: int) -> list[_Range]:
    """Where the bytes of a manager's block lie in one cache."""
    size = cache.element_size()
    stride, blocks = cache.stride(block_dim) * size, cache.shape[block_dim]
    axes = sorted(
        (cache.stride(d) * size, cache.shape[d])
        for d in range(cache.ndim)
        if d != block_dim and cache.shape[d] > 1
    )
    layout = f"shape {tuple(cache.shape)}, strides {cache.stride()}"
    run = size
    while axes and axes[0][0] == run:
        run *= axes.pop(0)[1]
    # What is left goes over all blocks at once, as K and V outermost do, and overlaps nothing.
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
        cache.data_ptr() + sum(offsets)
        for offsets in product(*(range(0, step * count, step) for step, count in axes))
    ]
    if run == stride:
        return [_Range(ratio * stride, begin, ratio * run) for begin in begins]
    return [_Range(ratio * stride, begin + j * stride, run) for begin in begins for j in range(ratio)]


def _merged(ranges: list[_Range]) -> list[_Range]:
    """The same bytes without duplicates, by ascending address within a stride."""
    merged: list[_Range] = []
    for new in sorted(set(ranges)):
        old = merged[-1] if merged else None
        if old and old.stride == new.stride and new.start <= old.start + old.length:
            length = max(old.length, new.start + new.length - old.start)
            merged[-1] = old._replace(length=length)
        else:
            merged.append(new)
    return merged


def _rows(ranges: list[_Range]) -> list[tuple[int, int, int, int]]:
    """Rows of (start, stride, length, 0) for the kernel: with the 0, one read of memory each."""
    longest = max(r.length for r in ranges)
    # Rows of one length need no cutting: each takes as many programs.
    row = longest if longest == min(r.length for r in ranges) else ROW
    return [
        (r.start + at, r.stride, min(row, r.length - at), 0) for r in ranges for at in range(0, r.length, row)
    ]


def _tile(longest: int) -> tuple[int, int]:
    """Bytes of a page, and pages, that one program clears."""
    if not INTERPRET:
        return CHUNK, 1
    # An interpreted program costs the same whatever it clears.
    chunk = min(max(triton.next_power_of_2(longest), 16), 2**16)
    return chunk, 2**18 // chunk


def _append(freed: list[int], index: int, _: object) -> None:
    freed.append(index)


class BlockZeroer:
    """Zeroes KV blocks in every layer's cache, in one launch.

    For each block that a scheduler newly allocates: what its last tenant left there, fp32 state of
    a Mamba layer say, may read as NaN, and attention that masks by multiplication keeps it (vLLM
    #35138). Prefix-cache hits must not be named.

    The caches are known by address. Of their memory weak references are held: the caller keeps them
    alive, and a call after one was freed is an error. Only bytes that belong to the named blocks of
    the caches given are written: not the gap from the end of a page to the next block, nor a
    neighbour in a packed layout (vLLM #50276).

    Args:
        kv_caches: tensors on one device, one or more a layer, of any floating-point or integer
            dtype in which zero bytes are the number zero; usually views of a few raw buffers. The
            elements of a block lie side by side, but for axes of a larger stride than that of the
            blocks (K and V outermost). Bytes that several caches share are zeroed once.
        block_dim: the axis of the blocks, for all caches or one each.
        block_size_ratio: blocks of a cache to a block of the manager (virtual block splitting), for
            all caches or one each.

    Attributes:
        num_blocks: blocks of the manager, the null block among them.
        block_bytes: bytes zeroed for one block.

    Raises:
        ValueError: an argument does not fit.
    """

    def __init__(
        self,
        kv_caches: Sequence[torch.Tensor],
        *,
        block_dim: int | Sequence[int] = 0,
        block_size_ratio: int | Sequence[int] = 1,
    ) -> None:
        several = isinstance(kv_caches, Sequence)
        check.require(several, "kv_caches", "a sequence of tensors", type(kv_caches).__name__)
        caches = [*kv_caches]
        check.require(len(caches) > 0, "kv_caches", "at least one tensor", "none")
        for name, value in (("block_dim", block_dim), ("block_size_ratio", block_size_ratio)):
            fits = isinstance(value, int) or (isinstance(value, Sequence) and len(value) == len(caches))
            check.require(fits, name, f"one int, or {len(caches)}", value)
        dims, ratios = per_cache(block_dim, len(caches)), per_cache(block_size_ratio, len(caches))
        counts, ranges = [], []
        for index, (cache, dim, ratio) in enumerate(zip(caches, dims, ratios, strict=True)):
            name = f"kv_caches[{index}]"
            check.tensor(name, cache)
            check.require(cache.dtype in DTYPES, name, "a dtype whose zero bytes are 0", cache.dtype)
            check.require(cache.layout == torch.strided, name, "a dense tensor", cache.layout)
            kind = "cpu" if INTERPRET else "cuda"
            check.require(cache.device.type == kind, name, f"a {kind} tensor", cache.device)
            check.tensor(name, cache, like=caches[0])
            check.require(
                isinstance(dim, int) and 0 <= dim < cache.ndim,
                "block_dim",
                f"an axis of {name}, 0 to {cache.ndim - 1}",
                dim,
            )
            blocks = cache.shape[dim]
            check.require(
                isinstance(ratio, int) and ratio > 0 and blocks % ratio == 0,
                "block_size_ratio",
                f"a divisor of the {blocks} blocks of {name}",
                ratio,
            )
            check.require(cache.numel() > 0, name, "elements", f"shape {tuple(cache.shape)}")
            counts.append(blocks // ratio)
            check.require(counts[-1] == counts[0], name, f"{counts[0]} blocks of the manager", counts[-1])
            ranges += _ranges(name, cache, dim, ratio)

        self.num_blocks = counts[0]
        ranges = _merged(ranges)
        self.block_bytes = sum(r.length for r in ranges)
        rows = _rows(ranges)
        self._rows = len(rows)
        check.require(self._rows <= MOST, "kv_caches", f"at most {MOST} ranges of bytes a block", self._rows)
        self._aligned = all(number % 16 == 0 for row in rows for number in row)
        longest = max(length for _, _, length, _ in rows)
        self._chunk, self._pages = _tile(longest)
        # A start that is not a multiple of 16 moves the end by up to 15 bytes.
        self._chunks = triton.cdiv(longest + (0 if self._aligned else 15), self._chunk)
        self._device = caches[0].device
        self._table = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self._address = self._table.data_ptr()
        self._freed: list[int] = []
        # A storage dies with the last of its tensors, whichever of them was given here.
        self._storages = [
            weakref.ref(cache.untyped_storage(), partial(_append, self._freed, index))
            for index, cache in enumerate(caches)
        ]
        if not INTERPRET:
            with torch.cuda.device(self._device):
                self._ring = IdRing(self.num_blocks, self._device)
                # Loading a kernel would break a capture, so it happens here. Without ids, one
                # program runs, finds the null block, and writes nothing.
                none = {
                    dtype: torch.zeros(1, dtype=dtype, device=self._device)
                    for dtype in (torch.int32, torch.int64)
                }
                self._compiled = {
                    dtype: _zero_kernel[(1,)](self._table, ids, *self._sizes(1), num_warps=WARPS)
                    for dtype, ids in none.items()
                }

    def zero(self, block_ids: Sequence[int] | torch.Tensor) -> None:
        """Zero the blocks, on the current stream, without waiting for the device.

        Ids on the host are checked, and the list may change as soon as the call returns; any other
        stream may be capturing meanwhile. Ids on the device are read when the kernel runs. They
        cannot be checked: those that name no block, or the null block, are passed over, and
        repeated ones do no harm. A call that is captured takes its ids there, padded with zeros.
        One launch for each 65,535 blocks.

        Args:
            block_ids: ids of the manager, from 1 to ``num_blocks - 1``: block 0 is the null block,
                which no request owns. A sequence of ints, or an int32 or int64 tensor of one axis,
                contiguous, on the host or on the caches' device. None is fine.

        Raises:
            ValueError: a bad id, or a cache was freed; nothing was written.
        """
        if isinstance(block_ids, torch.Tensor):
            check.tensor("block_ids", block_ids, ndim=1, dtype=(torch.int32, torch.int64), contiguous=True)
            if block_ids.is_cuda:
                check.require(
                    block_ids.device == self._device,
                    "block_ids",
                    f"a tensor on the host or on {self._device}",
                    f"one on {block_ids.device}",
                )
                if len(block_ids) > 0:
                    self._check_alive()
                    with torch.cuda.device(self._device):
                        self._launch(block_ids.data_ptr(), len(block_ids), block_ids.dtype, self._stream())
                return
            block_ids = block_ids.tolist()
        ids = self._checked(block_ids)
        if len(ids) == 0:
            return
        self._check_alive()
        if INTERPRET:
            pages = triton.cdiv(self._rows * len(ids), self._pages)
            _zero_kernel[(self._chunks, pages)](self._table, torch.from_numpy(ids), *self._sizes(len(ids)))
        elif torch.cuda.current_device() == self._device.index:
            self._send(ids)
        else:
            with torch.cuda.device(self._device):
                self._send(ids)

    def _checked(self, block_ids: Sequence[int]) -> np.ndarray:
        """The ids in rising order."""
        try:
            listed = block_ids if isinstance(block_ids, list) else [*block_ids]
            ids = np.frombuffer(array("q", listed), np.int64)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"block_ids: expected a sequence of int64, got {error}") from error
        if len(ids) == 0:
            return ids
        # In rising order, what is wrong is at an end or beside its like, and memory is written in
        # the order of its addresses.
        ids.sort()
        lowest, highest = ids.item(0), ids.item(-1)
        if lowest < 1 or highest >= self.num_blocks:
            wrong = lowest if lowest < 1 else highest
            kind = " (the null block)" if wrong == 0 else ""
            check.require(False, "block_ids", f"1 to {self.num_blocks - 1}", f"{wrong}{kind}")
        if np.count_nonzero(ids[1:] == ids[:-1]):
            again = ids[1:][ids[1:] == ids[:-1]]
            check.require(False, "block_ids", "each id once", f"{again[0]} again")
        return ids

    def _check_alive(self) -> None:
        if self._freed:
            check.require(False, f"kv_caches[{self._freed[0]}]", "a live tensor", "freed memory")

    def _send(self, ids: np.ndarray) -> None:
        if torch.cuda.is_current_stream_capturing():
            check.require(
                False,
                "block_ids",
                "a tensor on the device where the current stream is capturing",
                "ids on the host, which no replay could read again",
            )
        stream = self._stream()
        self._ring.send(ids, stream, lambda address: self._launch(address, len(ids), torch.int32, stream))

    def _stream(self) -> int:
        return triton.runtime.driver.active.get_current_stream(self._device.index)

    def _launch(self, address: int, count: int, dtype: torch.dtype, stream: int) -> None:
        # The compiled kernel's own launcher: Triton's dispatcher, which would find it by the
        # arguments, takes twice as long.
        kernel = self._compiled[dtype]
        for first in range(0, count, MOST):
            part = min(count - first, MOST)
            kernel.run(
                self._chunks,
                part,
                self._rows,
                stream,
                kernel.function,
                kernel.packed_metadata,
                None,
                None,
                None,
                self._address,
                address + first * dtype.itemsize,
                *self._sizes(part),
            )

    def _sizes(self, count: int) -> tuple[Any, ...]:
        """The arguments of the kernel behind the table and the ids."""
        return count, self._rows, self.num_blocks, self._aligned, self._chunk, self._pages
