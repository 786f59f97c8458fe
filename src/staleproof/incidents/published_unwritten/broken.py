"""Remedies, right and wrong, as data: for the miniature and for vLLM's own classes (:mod:`.real`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Remedy(NamedTuple):
    """What is done about hashes that a plan published. By default nothing, as in vLLM up to 0.33.0.

    Attributes:
        takes_back: which hashes are withdrawn when a request is preempted: ``unwritten``, those of its blocks
            that are not computed; ``own``, all of its blocks; ``all``, those of the whole pool.
        guards: whether a hit on a block is refused in the step that published it.
        zeroes: whether a block is zeroed when it is allocated.
        restarts: whether every request that uses a block whose load failed restarts at that block, and the
            hashes from there on are withdrawn.
    """

    takes_back: str = ""
    guards: bool = False
    zeroes: bool = False
    restarts: bool = False

    def taken_back(self, blocks: Sequence[int], computed: int, pool: int) -> Sequence[int]:
        """Which blocks lose their hash.

        Args:
            blocks: of the request that is preempted.
            computed: how many of them, from the first on, contain computed keys and values.
            pool: number of blocks of the pool.
        """
        return {"": (), "unwritten": blocks[computed:], "own": blocks, "all": range(pool)}[self.takes_back]


NONE = Remedy()
REMEDIES = {
    "none": NONE,
    "unpublish": Remedy(takes_back="unwritten"),
    # Wrong (vLLM #37152, #38715, #42359): the hash outlives the step, and a hit in the next step is allowed.
    "same_step_guard": Remedy(guards=True),
    # Wrong: no request reads another's bytes any more, but the request still attends to zeros.
    "zero_at_allocation": Remedy(zeroes=True),
    # Right, but the request must compute all of it again.
    "withdraw_all": Remedy(takes_back="own"),
    # Correct, but expensive.
    "reset_cache": Remedy(takes_back="all"),
}
RESTART = Remedy(restarts=True)
