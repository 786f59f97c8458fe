"""Zeroing of newly allocated KV blocks, all layers in one launch. The fix of incident 4.

vLLM's kernel (vLLM #35219) writes 4 KiB a program, block after block, for one page size and one kind
of layout. Here every range of bytes of a block is a row in a table of absolute addresses, so that
layouts, dtypes and page sizes may be mixed. Programs write ascending addresses in stores of 16
bytes.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch

from staleproof import check
from staleproof.ops.id_ring import IdRing
from staleproof.ops.operators import on_device_of, operator, traced
from staleproof.ops.private import is_capturing
from staleproof.ops.reference.zero_blocks import per_cache
from staleproof.ops.zero_kernel import INTERPRET, Layout, Plan

# Dtypes in which zero bytes are the number zero.
DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


@lru_cache(maxsize=64)
def _plan(
    caches: tuple[Layout, ...], dims: tuple[int, ...], ratios: tuple[int, ...], where: torch.device
) -> Plan:
    """A plan for the caches an operator was called with, which need not be those of a BlockZeroer."""
    check.require(
        INTERPRET or not is_capturing(),
        "kv_caches",
        "caches of an earlier call, because a capture cannot build their table",
        "others",
    )
    return Plan(caches, dims, ratios, where)


@operator("zero_blocks(Tensor block_ids, Tensor(a!)[] kv_caches, int[] block_dim, int[] ratio) -> ()")
def _zero_blocks(
    block_ids: torch.Tensor, kv_caches: list[torch.Tensor], block_dim: list[int], ratio: list[int]
) -> None:
    # Use the addresses of this call: a compiler may pass copies of the caches, and copy them back.
    caches = tuple(Layout.of(cache) for cache in kv_caches)
    _plan(caches, tuple(block_dim), tuple(ratio), block_ids.device).zero(block_ids)


class BlockZeroer:
    """Zeroes KV blocks in every layer's cache, in one launch.

    Call it for each block that a scheduler newly allocates, and not for prefix-cache hits. The last
    tenant's bytes, fp32 state of a Mamba layer for example, may read as NaN in the new dtype, and
    attention that masks by multiplication keeps a NaN (vLLM #35138).

    The zeroer keeps the addresses of the caches and weak references to their memory. The caller
    keeps them alive; a call after one was freed is an error. Only bytes of the named blocks are
    written: neither the gap between the end of a page and the next block, nor a neighbour in a
    packed layout (vLLM #50276).

    Args:
        kv_caches: tensors on one device, one or more a layer, of any floating-point or integer
            dtype in which zero bytes are the number zero; usually views of a few raw buffers. The
            elements of a block lie side by side. Only axes with a larger stride than that of the
            blocks (K and V outermost) are exempt. Bytes that several caches share are zeroed once.
        block_dim: the axis of the blocks, for all caches or one each.
        block_size_ratio: blocks of a cache per block of the manager (virtual block splitting), for
            all caches or one each.

    Attributes:
        num_blocks: blocks of the manager, including the null block.
        block_bytes: bytes zeroed for one block.

    Raises:
        ValueError: an argument does not fit.

    >>> cache = torch.ones(4, 3)
    >>> zeroer = BlockZeroer([cache])
    >>> zeroer.zero([2])
    >>> cache[:, 0].tolist(), zeroer.block_bytes
    ([1.0, 1.0, 0.0, 1.0], 12)
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
        counts = []
        for index, (cache, dim, ratio) in enumerate(zip(caches, dims, ratios, strict=True)):
            name = f"kv_caches[{index}]"
            check.tensor(name, cache)
            check.require(cache.dtype in DTYPES, name, "a dtype whose zero bytes are 0", cache.dtype)
            check.require(cache.layout == torch.strided, name, "a dense tensor", cache.layout)
            kind = "cpu" if INTERPRET else "cuda"
            check.require(cache.device.type == kind, name, f"a {kind} tensor", cache.device)
            check.tensor(name, cache, like=caches[0])
            fits = isinstance(dim, int) and 0 <= dim < cache.ndim
            check.require(fits, "block_dim", f"an axis of {name}, 0 to {cache.ndim - 1}", dim)
            blocks = cache.shape[dim]
            fits = isinstance(ratio, int) and ratio > 0 and blocks % ratio == 0
            check.require(fits, "block_size_ratio", f"a divisor of the {blocks} blocks of {name}", ratio)
            check.require(cache.numel() > 0, name, "elements", f"shape {tuple(cache.shape)}")
            counts.append(blocks // ratio)
            check.require(counts[-1] == counts[0], name, f"{counts[0]} blocks of the manager", counts[-1])
        self._plan = Plan([Layout.of(cache) for cache in caches], dims, ratios, caches[0].device)
        self.num_blocks, self.block_bytes = self._plan.num_blocks, self._plan.block_bytes
        self._device, self._axes = caches[0].device, (dims, ratios)
        self._freed: list[int] = []
        # A storage dies with the last of its tensors, whichever of them was given here.
        self._storages = [
            weakref.ref(cache.untyped_storage(), partial(_append, self._freed, index))
            for index, cache in enumerate(caches)
        ]
        self._caches = [weakref.ref(cache) for cache in caches]
        self._ring = None if INTERPRET else IdRing(self.num_blocks, self._device)

    def zero(self, block_ids: Sequence[int] | torch.Tensor) -> None:
        """Zero the blocks, on the current stream, without waiting for the device.

        Ids on the host are checked. The list may change as soon as the call returns, and other
        streams may be capturing meanwhile. Ids on the device are read when the kernel runs, so they
        are not checked: ids that name no block, or the null block, are skipped, and repeated ids do
        no harm. One launch per 65,535 blocks.

        In a CUDA graph the ids must be on the device, padded with 0 to a fixed length; likewise
        under ``torch.compile(fullgraph=True)``, which refuses ids on the host: the graph would keep
        the list of the first call. Without ``fullgraph`` such a call breaks the graph. While torch
        traces, the tensors given to the constructor must still exist, and torch refuses caches that
        share memory under different dtypes. ``torch.export`` cannot keep a zeroer, which is bound to
        addresses: call the operator ``torch.ops.staleproof.zero_blocks``, which is given the caches.

        Args:
            block_ids: ids of the manager, from 1 to ``num_blocks - 1``: block 0 is the null block,
                which no request owns. A sequence of ints, or an int32 or int64 tensor of one axis,
                contiguous, on the host or on the caches' device. May be empty.

        Raises:
            ValueError: a bad id, or a cache was freed; nothing was written.

        >>> cache = torch.ones(4, 3)
        >>> BlockZeroer([cache]).zero([4])
        Traceback (most recent call last):
        ValueError: block_ids: expected 1 to 3, got 4
        """
        self._check_alive()
        if isinstance(block_ids, torch.Tensor):
            check.tensor("block_ids", block_ids, ndim=1, dtype=(torch.int32, torch.int64), contiguous=True)
            if block_ids.is_cuda:
                check.tensor("block_ids", block_ids, like=self._plan.table)
            if block_ids.device == self._device and traced(block_ids):
                return _zero_blocks(block_ids, self._live_caches(), *self._axes)
            if block_ids.is_cuda:
                with on_device_of(block_ids):
                    return self._plan.zero(block_ids)
        if torch.compiler.is_compiling():
            from staleproof.ops.zero_untraced import zero_from_host

            return zero_from_host(self, block_ids)
        self._zero_from_host(block_ids)

    def _zero_from_host(self, block_ids: Sequence[int] | torch.Tensor) -> None:
        ids = self._checked(block_ids.tolist() if isinstance(block_ids, torch.Tensor) else block_ids)
        if len(ids):
            self._plan.zero_from_host(ids, self._ring)

    def _checked(self, block_ids: Sequence[int]) -> np.ndarray:
        """The ids in ascending order, int64."""
        try:
            listed = block_ids if isinstance(block_ids, list) else [*block_ids]
            ids = np.frombuffer(array("q", listed), np.int64)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"block_ids: expected a sequence of int64, got {error}") from error
        if len(ids) == 0:
            return ids
        # Sorted, because then bad ids are at an end, repeated ids are neighbours, and the addresses
        # written ascend.
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

    def _live_caches(self) -> list[torch.Tensor]:
        """The tensors given to the constructor, which a tracer needs to see."""
        caches: list[torch.Tensor] = []
        for index, ref in enumerate(self._caches):
            cache = ref()
            if cache is None:
                check.require(False, f"kv_caches[{index}]", "a live tensor while torch traces", "none")
            else:
                caches.append(cache)
        return caches


def _append(freed: list[int], index: int, _: object) -> None:
    freed.append(index)
