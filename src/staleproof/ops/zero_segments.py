"""Zeroing of KV blocks whose caches are known by their addresses only, as vLLM's own zeroer keeps them.

One launch of the kernel of :class:`staleproof.BlockZeroer`. A few ids are passed as arguments of the launch,
more go through a ring of slots, so that no call overwrites ids that an earlier call has not read
(vLLM #48085).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from staleproof import check
from staleproof.ops.id_ring import IdRing
from staleproof.ops.zero_kernel import INTERPRET, Layout, Plan

# Block counts are not known here. The kernel skips ids from this one on.
MOST_BLOCKS = 2**31 - 1


class SegmentZeroer:
    """Zeroes KV blocks in segments of memory: block b of a segment is ``page_bytes`` long.

    The caller keeps the memory alive, and names no block beyond its end.

    Args:
        segments: address of block 0 in each segment; block b follows ``b * page_bytes`` bytes later.
        page_bytes: bytes of a block in one segment, a multiple of 4.
        where: device of the segments.
        capacity: most ids of one call.

    Raises:
        ValueError: an argument does not fit.

    >>> cache = torch.ones(4, 8)
    >>> SegmentZeroer([cache.data_ptr()], 32, cache.device).zero([2])
    >>> cache[:, 0].tolist()
    [1.0, 1.0, 0.0, 1.0]
    """

    def __init__(
        self, segments: Sequence[int], page_bytes: int, where: torch.device, capacity: int = 8192
    ) -> None:
        check.require(len(segments) > 0, "segments", "at least one", 0)
        check.require(page_bytes > 0 and page_bytes % 4 == 0, "page_bytes", "a multiple of 4", page_bytes)
        words = page_bytes // 4
        layouts = [Layout(start, 4, (MOST_BLOCKS, words), (words, 1)) for start in segments]
        self._plan = Plan(layouts, [0] * len(layouts), [1] * len(layouts), where)
        self._capacity = capacity
        self._ring = None if INTERPRET else IdRing(capacity, where)

    def zero(self, block_ids: list[int]) -> None:
        """Zero the blocks, on the current stream, without waiting for the device.

        Args:
            block_ids: ids from 1 on, because block 0 is the null block; repeated ones do no harm. The
                list may change as soon as the call returns.

        Raises:
            ValueError: an id is below 1, there are too many of them, or the stream is capturing, so
                that each replay would zero the same blocks. Nothing was written.
        """
        if not 0 < len(block_ids) <= self._capacity:
            check.fail("block_ids", f"1 to {self._capacity} of them", len(block_ids))
        ids = np.frombuffer(array("q", block_ids), np.int64)
        # Ascending addresses are faster to write, and a bad id is at an end.
        ids.sort()
        if ids.item(0) < 1 or ids.item(-1) >= MOST_BLOCKS:
            check.fail("block_ids", f"1 to {MOST_BLOCKS - 1}", [ids.item(0), ids.item(-1)])
        self._plan.zero_from_host(ids, self._ring)
