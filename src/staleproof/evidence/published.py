"""PublishedBlocks: blocks of the prefix cache that nobody has written, and the requests that hit them.

A scheduler with prefix caching publishes the hash of a block when it plans the step that fills it. If
it then removes the request from that plan, the hash remains, but the block holds its last tenant's keys
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
        published: number of blocks so far that were published but not written.
        hits: number of times that a request got one of these blocks.

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
        """Whether any published block is known to be unwritten."""
        return bool(self._unwritten)

    @property
    def owners(self) -> set[Hashable]:
        """Requests that published a block since the last :meth:`plan`."""
        return {owner for _, _, owner, _ in self._pending}

    def publish(
        self, block: int, key: Hashable, owner: Hashable, tokens: int, computed: int | None = None
    ) -> None:
        """Record that a block was put into the prefix cache.

        Args:
            block: its id.
            key: the hash that it is found by; another key later means that the block was reused.
            owner: the request that is to write it.
            tokens: how many tokens the owner must have computed for the block to be full.
            computed: how many it has computed, if known; a block that is full already is not followed.

        Raises:
            ValueError: no token fills the block.
        """
        require(tokens > 0, "tokens", "at least one token up to the block's end", tokens)
        # Forget the block's earlier state: it has been allocated again.
        self._unwritten.pop(block, None)
        if computed is None or computed < tokens:
            self._pending.append((block, key, owner, tokens))

    def plan(
        self, computed: Mapping[Hashable, int], key_of: Callable[[int], Hashable] | None = None
    ) -> list[int]:
        """Record that a step was planned.

        Args:
            computed: tokens that each owner will have computed after this step; 0 for an owner that is gone
                or starts again from the beginning.
            key_of: the key that a block has now; a block whose key was withdrawn cannot be hit.

        Returns:
            Blocks that were published in the step but that the step does not write.
        """
        bare = []
        for block, key, owner, tokens in self._pending:
            unchanged = key_of is None or key_of(block) == key
            if unchanged and computed.get(owner, 0) < tokens:
                self._unwritten[block] = key, owner
                bare.append(block)
        self._pending.clear()
        self.published += len(bare)
        return bare

    def read(self, reader: Hashable, blocks: Iterable[tuple[int, Hashable]]) -> list[UnwrittenHit]:
        """Record that a request got blocks from the prefix cache, each with its present key.

        Returns:
            One :class:`UnwrittenHit` for each publisher of unwritten blocks among them.
        """
        found: dict[Hashable, list[int]] = {}
        for block, key in blocks:
            known = self._unwritten.get(block)
            if known is not None and known[0] == key:
                found.setdefault(known[1], []).append(block)
        self.hits += sum(map(len, found.values()))
        return [UnwrittenHit(reader, publisher, tuple(ids)) for publisher, ids in found.items()]
