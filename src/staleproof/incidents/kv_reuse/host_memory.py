"""The memory of a list of block ids that a server never takes (vLLM #44175), and which tools show it."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from dataclasses import dataclass
from functools import cache

from staleproof.incidents.kv_reuse.block_pool import BlockPool
from staleproof.incidents.kv_reuse.broken import NeverTaken
from staleproof.incidents.kv_reuse.scheduler import ATTENTION, NewBlocks


@dataclass(frozen=True)
class HostMemory:
    """What a list of new ids costs after a number of blocks.

    Attributes:
        kept: ids in the list.
        list_bytes: size of the list.
        traced_bytes: growth of the memory that tracemalloc traces.
        gc_sees: whether ``gc.get_objects()`` returns the list.
    """

    kept: int
    list_bytes: int
    traced_bytes: int
    gc_sees: bool

    @property
    def tracemalloc_sees(self) -> bool:
        """Whether tracemalloc noticed the list."""
        return self.traced_bytes > self.list_bytes // 2


@cache
def host_memory(blocks: int, *, taken: bool, frozen: bool) -> HostMemory:
    """Record ``blocks`` allocations, 16 a step, and measure the list.

    Args:
        blocks: allocations; a multiple of 16.
        taken: whether the list is emptied after every step, or never.
        frozen: call ``gc.freeze()`` first, as vLLM's engine does once it has started.
    """
    # A pool hands out the same int objects again and again: the list adds references, not integers.
    new, ids = NewBlocks() if taken else NeverTaken(), BlockPool(1025).allocate(1024)
    gc.collect()
    if frozen:
        gc.freeze()
    try:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for start in range(0, blocks, 16):
            new.record(ATTENTION, ids[start % 1024 :][:16])
            new.take()
        traced = tracemalloc.get_traced_memory()[0] - before
        kept = new.ids[ATTENTION]
        return HostMemory(len(kept), sys.getsizeof(kept), traced, any(o is kept for o in gc.get_objects()))
    finally:
        tracemalloc.stop()
        if frozen:
            gc.unfreeze()
