"""Remedies with a fault, and right ones to compare with; each is named after what it does.

A remedy decides which blocks are zeroed before which step (:class:`Zeroing`), or how the list of new ids is
kept. All zero with torch's ``index_fill_`` on every layer's buffer, which is correct and slow: the faults are
in the choice of ids, or in the copy of the ids to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from staleproof.incidents.kv_reuse.block_pool import KVBuffers
from staleproof.incidents.kv_reuse.hybrid import Zeroing
from staleproof.incidents.kv_reuse.scheduler import ATTENTION, MAMBA, NewBlocks, Step


def index_fill(buffers: KVBuffers, ids: torch.Tensor) -> None:
    """Zero whole pages: ``ids`` int64 on the buffers' device; one call a layer."""
    for raw in buffers.raw:
        raw.index_fill_(0, ids, 0)


# Picks the blocks to zero before a step.
Pick = Callable[[Step], Sequence[int]]


def freed(step: Step) -> Sequence[int]:
    """Blocks that were freed before a step: the first design of vLLM #35219.

    Such a block stays in the prefix cache, so a later hit reads zeros.
    """
    return step.freed


def hits_too(step: Step) -> Sequence[int]:
    """New blocks, and blocks that a request hits in the prefix cache.

    It wipes cached KV that other requests still use. vLLM records new blocks only, not hits.
    """
    return [*step.new_blocks, *(block for _, blocks in step.hits for block in blocks)]


def attention_only(step: Step) -> Sequence[int]:
    """New attention blocks, but no Mamba blocks: vLLM #35219 as merged."""
    return step.new[ATTENTION]


def mamba_only(step: Step) -> Sequence[int]:
    """New Mamba blocks: the other half, which vLLM #56524 asks for."""
    return step.new[MAMBA]


def both(step: Step) -> Sequence[int]:
    """Every new block, which is correct, to compare with."""
    return step.new_blocks


class OnChange:
    """New attention blocks whose last tenant was a Mamba layer (proposed in the review of vLLM #35219).

    A NaN that attention itself left in a block reaches the block's next tenant.
    """

    def __init__(self) -> None:
        self.mamba: set[int] = set()

    def __call__(self, step: Step) -> Sequence[int]:
        """The blocks that change from Mamba to attention before a step. Call it for the steps in order."""
        changed = self.mamba.intersection(step.new[ATTENTION])
        self.mamba = (self.mamba - changed).union(step.new[MAMBA])
        return sorted(changed)


class Fill(Zeroing):
    """Zeroes the blocks that ``pick`` picks from a step, with torch's ``index_fill_``."""

    def __init__(self, buffers: KVBuffers, pick: Pick = both) -> None:
        self.buffers, self.pick = buffers, pick

    def submit(self, step: Step) -> object:
        """The ids, in a new tensor on the device."""
        return torch.tensor(list(self.pick(step)), device=self.buffers.raw[0].device).long()

    def run(self, ticket: object) -> torch.Tensor:
        """Zero them."""
        assert isinstance(ticket, torch.Tensor)
        index_fill(self.buffers, ticket)
        return ticket


class ZeroFromStep(Fill):
    """Zeroes new blocks from one step on: the cure, switched on in a server that has been running.

    Blocks that are in the prefix cache by then are not zeroed.

    Args:
        buffers: the memory.
        start: the first step it is on in.
    """

    def __init__(self, buffers: KVBuffers, start: int) -> None:
        super().__init__(buffers, self._later)
        self.steps_to_go = start

    def _later(self, step: Step) -> Sequence[int]:
        self.steps_to_go -= 1
        return () if self.steps_to_go >= 0 else step.new_blocks


class OnePinnedBuffer(Fill):
    """Sends the ids of every step through one host buffer, with an asynchronous copy.

    vLLM 0.17.1 to 0.25.1 (#48085, #48399); this kind of fault is older (TensorRT-LLM #15546). The copy reads
    its source when the device gets to it, and by then the host may have written the next step's ids there.
    The buffer is pinned memory on CUDA; elsewhere the copy is simply made late.
    """

    def __init__(self, buffers: KVBuffers) -> None:
        super().__init__(buffers)
        device, capacity = buffers.raw[0].device, 2 * buffers.num_blocks
        self.host = torch.zeros(capacity, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.there = torch.zeros(capacity, dtype=torch.int64, device=device)

    def submit(self, step: Step) -> object:
        """Overwrite the last step's ids; only their number is passed to :meth:`run`."""
        ids = self.pick(step)
        self.host[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
        return len(ids)

    def run(self, ticket: object) -> torch.Tensor:
        """Copy that many ids, which by now can be the next step's, and zero those blocks."""
        assert isinstance(ticket, int)
        ids = self.there[:ticket]
        ids.copy_(self.host[:ticket], non_blocking=True)
        index_fill(self.buffers, ids)
        return ids.clone()


class FreshPinnedBuffer(Fill):
    """A new host buffer for every step: vLLM's fix (#48399). Correct, at the cost of pinning."""

    def submit(self, step: Step) -> object:
        """The ids, in a host buffer of this step alone."""
        host = torch.tensor(list(self.pick(step)), dtype=torch.int64)
        return host.pin_memory() if self.buffers.raw[0].is_cuda else host

    def run(self, ticket: object) -> torch.Tensor:
        """Copy and zero."""
        assert isinstance(ticket, torch.Tensor)
        ids = ticket.to(self.buffers.raw[0].device, non_blocking=True)
        index_fill(self.buffers, ids)
        return ids


class NeverTaken(NewBlocks):
    """Records new ids and never returns them, so that the list grows as long as the server runs.

    vLLM 0.17.1 to 0.25.1 on models without Mamba layers (#44175): ids were recorded on every model
    and taken on those with Mamba layers only.
    """

    def take(self) -> dict[str, list[int]]:
        """Nothing."""
        return {ATTENTION: [], MAMBA: []}
