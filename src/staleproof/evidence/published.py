"""PublishedBlocks: blocks of the prefix cache that nobody has written, and the requests that hit them.

A scheduler with prefix caching publishes the hash of a block when it plans the step that fills it. If
it then takes the request out of that plan, the hash stands and the block holds its last tenant's keys
and values. Everything here is on the host: no tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

from staleproof.check import require


@dataclass(frozen=True)
class UnwrittenHit:
    """A request that got blocks from the prefix cache which their publisher never wrote.

    Attributes:
        reader: the request that reads them; it may be the publisher itself, resumed.
        publisher: the request that published them.
        blocks: their ids.
    """

    reader: Hashable
    publisher: Hashable
    blocks: tuple[int, ...]

    def __str__(self) -> str:
        whose = "itself" if self.reader == self.publisher else self.publisher
        ids = ", ".join(map(str, self.blocks))
        return f"{self.reader} reads block {ids}, published by {whose} and written by nobody"


class PublishedBlocks:
    """Follows published blocks from step to step.

    Attributes:
        published: blocks that were published and not written, so far.
        hits: blocks of them that a request got, so far; once a reader.

    >>> watch = PublishedBlocks()
    >>> watch.publish(7, "hash", "victim", tokens=32)
    >>> watch.plan({"victim": 16})  # taken out of the step: 16 tokens are computed, not 32
    [7]
    >>> print(*watch.read("stranger", [(7, "hash"), (8, "other")]))
    stranger reads block 7, published by victim and written by nobody
    >>> watch.read("later", [(7, "another hash")])  # evicted and used again
    []
    """

    def __init__(self) -> None:
        self.published = self.hits = 0
        self._pending: list[tuple[int, Hashable, Hashable, int]] = []
        self._unwritten: dict[int, tuple[Hashable, Hashable]] = {}

    def __bool__(self) -> bool:
        """Whether a published block is unwritten now, as far as is known."""
        return bool(self._unwritten)

    @property
    def owners(self) -> set[Hashable]:
        """Requests that published a block since the last :meth:`plan`."""
        return {owner for _, _, owner, _ in self._pending}

    def publish(
        self, block: int, key: Hashable, owner: Hashable, tokens: int, computed: int | None = None
    ) -> None:
        """A block was put into the prefix cache.

        Args:
            block: its id.
            key: what it is found by; another key later means that the block was used again.
            owner: the request that is to write it.
            tokens: how many tokens the owner must have computed for the block to be full.
            computed: how many it has computed, if that is known now: a block that is full is no concern.

        Raises:
            ValueError: no token fills the block.
        """
        require(tokens > 0, "tokens", "at least one token up to the block's end", tokens)
        # Whatever was known of it is over: it was allocated anew.
        self._unwritten.pop(block, None)
        if computed is None or computed < tokens:
            self._pending.append((block, key, owner, tokens))

    def plan(
        self, computed: Mapping[Hashable, int], key_of: Callable[[int], Hashable] | None = None
    ) -> list[int]:
        """A step was planned.

        Args:
            computed: tokens that each owner has computed when this step is over; an owner that is gone,
                or that starts again from nothing, has computed 0.
            key_of: the key that a block has now; a block whose key was taken back cannot be hit.

        Returns:
            Blocks published in the step that it does not write.
        """
        bare = []
        for block, key, owner, tokens in self._pending:
            stands = key_of is None or key_of(block) == key
            if stands and computed.get(owner, 0) < tokens:
                self._unwritten[block] = key, owner
                bare.append(block)
        self._pending.clear()
        self.published += len(bare)
        return bare

    def read(self, reader: Hashable, blocks: Iterable[tuple[int, Hashable]]) -> list[UnwrittenHit]:
        """A request got blocks from the prefix cache, each with the key that it has now.

        Returns:
            One a publisher.
        """
        found: dict[Hashable, list[int]] = {}
        for block, key in blocks:
            known = self._unwritten.get(block)
            if known is not None and known[0] == key:
                found.setdefault(known[1], []).append(block)
        self.hits += sum(map(len, found.values()))
        return [UnwrittenHit(reader, publisher, tuple(ids)) for publisher, ids in found.items()]
