"""The remedies that came out wrong, each named after what it does, each with its source.

A remedy decides which blocks are zeroed before which step (:class:`Zeroing`), or how the list of
new ids is kept. What they zero with is torch's ``index_fill_`` on every layer's buffer: right, and
slow; the faults are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from staleproof.incidents.kv_reuse.block_pool import KVBuffers
from staleproof.incidents.kv_reuse.hybrid import Zeroing
from staleproof.incidents.kv_reuse.scheduler import ATTENTION, MAMBA, NewBlocks, Step


def index_fill(buffers: KVBuffers, ids: torch.Tensor) -> None:
    """Zero whole pages: ``ids`` int64 on the buffers' device; one call a layer."""
    for raw in buffers.raw:
        raw.index_fill_(0, ids, 0)


class _Fill(Zeroing):
    """Zeroes the ids that :meth:`ids` picks from a step."""

    def __init__(self, buffers: KVBuffers) -> None:
        self.buffers = buffers

    def ids(self, step: Step) -> Sequence[int]:
        """The blocks to zero before ``step``."""
        raise NotImplementedError

    def submit(self, step: Step) -> object:
        """The ids, on the device by the time they are needed."""
        return torch.tensor(list(self.ids(step)), device=self.buffers.raw[0].device).long()

    def run(self, ticket: object) -> torch.Tensor:
        """Zero them."""
        assert isinstance(ticket, torch.Tensor)
        index_fill(self.buffers, ticket)
        return ticket


class ZeroOnFree(_Fill):
    """Zeroes a block when its last holder lets go: the first design of vLLM #35219.

    The prefix cache still remembers what was in it.
    """

    def ids(self, step: Step) -> Sequence[int]:
        """Blocks freed before ``step``."""
        return step.freed


class ZeroHitsToo(_Fill):
    """Zeroes whatever a request starts with, prefix-cache hits included.

    What recording at the wrong place would do: in vLLM, hits are touched and not recorded.
    """

    def ids(self, step: Step) -> Sequence[int]:
        """Blocks new in ``step``, and blocks hit."""
        hits = [block for _, blocks in step.hits for block in blocks]
        return [*step.new[ATTENTION], *step.new[MAMBA], *hits]


class ZeroAttentionOnly(_Fill):
    """Zeroes new attention blocks and leaves Mamba blocks as they are: vLLM #35219 as merged."""

    def ids(self, step: Step) -> Sequence[int]:
        """New attention blocks."""
        return step.new[ATTENTION]


class ZeroMambaOnly(_Fill):
    """Zeroes new Mamba blocks alone: the half that vLLM #56524 asks for."""

    def ids(self, step: Step) -> Sequence[int]:
        """New Mamba blocks."""
        return step.new[MAMBA]


class ZeroBoth(_Fill):
    """Zeroes every new block, with ``index_fill_``: right, to compare with."""

    def ids(self, step: Step) -> Sequence[int]:
        """New blocks of both groups."""
        return [*step.new[ATTENTION], *step.new[MAMBA]]


class ZeroFromStep(ZeroBoth):
    """Zeroes new blocks from one step on: the cure, switched on in a server that has been running.

    What the prefix cache holds by then stays as it is.

    Args:
        buffers: the memory.
        start: the first step it is on in.
    """

    def __init__(self, buffers: KVBuffers, start: int) -> None:
        super().__init__(buffers)
        self.steps_to_go = start

    def ids(self, step: Step) -> Sequence[int]:
        """New blocks of both groups, once it is on."""
        self.steps_to_go -= 1
        return () if self.steps_to_go >= 0 else super().ids(step)


class OnePinnedBuffer(ZeroBoth):
    """Sends the ids of every step through one host buffer, with an asynchronous copy.

    vLLM 0.17.1 to 0.25.1 (#48085, #48399); the class is older than that (TensorRT-LLM #15546). The
    copy reads its source when the device gets to it, and by then the host may have written the next
    step's ids there. Pinned memory on CUDA; elsewhere the copy is made late.
    """

    def __init__(self, buffers: KVBuffers, capacity: int = 8192) -> None:
        super().__init__(buffers)
        device = buffers.raw[0].device
        self.host = torch.zeros(capacity, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.there = torch.zeros(capacity, dtype=torch.int64, device=device)

    def submit(self, step: Step) -> object:
        """Write the ids over the last step's; what is handed on is their number."""
        ids = self.ids(step)
        self.host[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
        return len(ids)

    def run(self, ticket: object) -> torch.Tensor:
        """Copy as many ids as were promised, whichever they are by now, and zero those."""
        assert isinstance(ticket, int)
        ids = self.there[:ticket]
        ids.copy_(self.host[:ticket], non_blocking=True)
        index_fill(self.buffers, ids)
        return ids.clone()


class FreshPinnedBuffer(ZeroBoth):
    """A new host buffer for every step: vLLM's repair (#48399). Right, and pays for the pinning."""

    def submit(self, step: Step) -> object:
        """The ids in memory of their own."""
        host = torch.tensor(list(self.ids(step)), dtype=torch.int64)
        return host.pin_memory() if self.buffers.raw[0].is_cuda else host

    def run(self, ticket: object) -> torch.Tensor:
        """Copy and zero."""
        assert isinstance(ticket, torch.Tensor)
        ids = ticket.to(self.buffers.raw[0].device, non_blocking=True)
        index_fill(self.buffers, ids)
        return ids


class NeverTaken(NewBlocks):
    """Records new ids and never hands them out, so that the list grows as long as the server lives.

    vLLM 0.17.1 to 0.25.1 on models without Mamba layers (#44175): ids were recorded on every model
    and taken on those with Mamba layers only.
    """

    def take(self) -> dict[str, list[int]]:
        """Nothing."""
        return {ATTENTION: [], MAMBA: []}
