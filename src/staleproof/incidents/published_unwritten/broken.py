"""Remedies, right and wrong. Each works on the miniature and, through :mod:`.real`, in vLLM's own classes.

A remedy is told what the scheduler does, and says which hashes are taken back, which hits are refused
and which blocks are zeroed. The base class does nothing: vLLM as it is, up to 0.33.0.
"""

from __future__ import annotations

from collections.abc import Sequence


class Remedy:
    """vLLM as it is: a hash is published when its step is planned, and stays if the plan changes."""

    def step(self) -> None:
        """A plan begins."""

    def published(self, blocks: Sequence[int]) -> None:
        """Blocks were put into the prefix cache."""

    def usable(self, block: int) -> bool:
        """Whether a block of the prefix cache may be hit."""
        return True

    def zeroed(self, blocks: Sequence[int]) -> Sequence[int]:
        """Which of the blocks that are allocated now are zeroed."""
        return ()

    def taken_back(self, blocks: Sequence[int], computed: int, pool: int) -> Sequence[int]:
        """Which blocks lose their hash when a request is preempted.

        Args:
            blocks: of the request.
            computed: how many of them, from the first, hold keys and values that were computed.
            pool: blocks of the pool.
        """
        return ()


class Unpublish(Remedy):
    """Takes back the hashes past what was computed: right, and nothing that was written is lost."""

    def taken_back(self, blocks: Sequence[int], computed: int, pool: int) -> Sequence[int]:
        """Those that no step writes."""
        return blocks[computed:]


class WithdrawAll(Remedy):
    """Takes back every hash of a preempted request: right, but it must compute all of it again."""

    def taken_back(self, blocks: Sequence[int], computed: int, pool: int) -> Sequence[int]:
        """All of its blocks."""
        return blocks


class ResetCache(Remedy):
    """Empties the whole prefix cache at each preemption: right, and dear."""

    def taken_back(self, blocks: Sequence[int], computed: int, pool: int) -> Sequence[int]:
        """All blocks there are."""
        return range(pool)


class SameStepGuard(Remedy):
    """Refuses hits on blocks that this very step published (vLLM #37152, #38715, #42359).

    Wrong: the hash outlives the step, and the next step's hit is let through.
    """

    def __init__(self) -> None:
        self.fresh: set[int] = set()

    def step(self) -> None:
        """Forget the last step's."""
        self.fresh.clear()

    def published(self, blocks: Sequence[int]) -> None:
        """Remember this step's."""
        self.fresh.update(blocks)

    def usable(self, block: int) -> bool:
        """Not in the step that published it."""
        return block not in self.fresh


class ZeroAtAllocation(Remedy):
    """Zeroes a block when it is allocated.

    Wrong: nobody reads a stranger's bytes any more, but the request still attends to zeros.
    """

    def zeroed(self, blocks: Sequence[int]) -> Sequence[int]:
        """All of them."""
        return blocks


REMEDIES: dict[str, type[Remedy]] = {
    "none": Remedy,
    "unpublish": Unpublish,
    "same_step_guard": SameStepGuard,
    "zero_at_allocation": ZeroAtAllocation,
    "withdraw_all": WithdrawAll,
    "reset_cache": ResetCache,
}
