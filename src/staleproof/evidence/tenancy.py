"""Who wrote each block last, in which dtype, zeroed or not; asked about a request that went wrong.

A pool hands the same bytes from tenant to tenant. The log hears of four things: a block was
allocated, hit in the prefix cache, written, zeroed. From these it answers which bytes a request
could read that were not its own, whose they were, and how long they had been lying there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from staleproof.check import require

# A new tenant over the last one's bytes; a tenant's bytes wiped while it, or the prefix cache,
# still counted on them.
STALE, WIPED = "stale", "wiped"


@dataclass(frozen=True)
class Suspect:
    """Bytes that a request could read and should not have.

    Attributes:
        block: where.
        kind: :data:`STALE` or :data:`WIPED`.
        whose: for stale bytes their last writer; for wiped ones the tenant who lost them.
        written_as: dtype of that writer.
        read_as: dtype of the request's own layer.
        step: when the block came to the request, or was wiped.
        steps_ago: for how long, at that step, the bytes had been lying there.
        via: owners through whose cached blocks they reached the request, nearest first.
    """

    block: int
    kind: str
    whose: Hashable
    written_as: str
    read_as: str
    step: int
    steps_ago: int
    via: tuple[Hashable, ...] = ()

    def __str__(self) -> str:
        ago = f"{self.steps_ago} step{'' if self.steps_ago == 1 else 's'}"
        through = f", through the cached blocks of {', '.join(map(str, self.via))}"
        if self.kind == WIPED:
            said = f"block {self.block}: wiped in step {self.step}, {ago} after {self.whose} wrote"
            said += f" {self.written_as} there"
        else:
            said = f"block {self.block}: {self.written_as} bits of {self.whose}, {ago} old, not"
            said += f" zeroed, read as {self.read_as} from step {self.step} on"
        return said + (through if self.via else "")


@dataclass(frozen=True)
class Write:
    """The last write to a block."""

    owner: Hashable
    dtype: str
    step: int


@dataclass
class _Tenancy:
    block: int
    owner: Hashable
    dtype: str
    step: int
    inherited: Write | None
    wrote: Write | None = None
    wiped: int | None = None


@dataclass
class _Owner:
    tenancies: list[_Tenancy] = field(default_factory=list)
    hits: list[_Tenancy] = field(default_factory=list)
    ended: int | None = None


class TenancyLog:
    """The last tenants of every block, on the host.

    Args:
        keep: owners remembered; of older ones only the blocks' last writes stay.

    Attributes:
        step: the current step; :meth:`advance` counts it up.

    Raises:
        ValueError: ``keep`` below 1.
    """

    def __init__(self, keep: int = 10_000) -> None:
        require(keep >= 1, "keep", "at least 1 owner", keep)
        self.keep = keep
        self.step = 0
        self._now: dict[int, _Tenancy] = {}
        self._last: dict[int, Write | None] = {}
        self._owners: OrderedDict[Hashable, _Owner] = OrderedDict()

    def advance(self) -> None:
        """Begin the next step."""
        self.step += 1

    def allocated(self, block_ids: Iterable[int], owner: Hashable, dtype: str) -> None:
        """Blocks begin to belong to ``owner``, whose layer reads them as ``dtype``."""
        for block in block_ids:
            tenancy = _Tenancy(block, owner, dtype, self.step, self._last.get(block))
            self._now[block] = tenancy
            self._of(owner).tenancies.append(tenancy)

    def hit(self, block_ids: Iterable[int], owner: Hashable) -> None:
        """``owner`` takes blocks from the prefix cache, with the bytes that are in them.

        Raises:
            ValueError: a block that was never allocated.
        """
        for block in block_ids:
            require(block in self._now, "block_ids", "blocks that were allocated before", block)
            self._of(owner).hits.append(self._now[block])

    def ended(self, owner: Hashable) -> None:
        """``owner`` is done; what becomes of its blocks from this step on cannot hurt it."""
        self._of(owner).ended = self.step

    def wrote(self, block_ids: Iterable[int], owner: Hashable, dtype: str, *, whole: bool = False) -> None:
        """``owner`` wrote into blocks; ``whole``: every byte that its layer reads from them."""
        for block in block_ids:
            write = Write(owner, dtype, self.step)
            self._last[block] = write
            tenancy = self._now.get(block)
            if tenancy is not None and tenancy.owner == owner:
                tenancy.wrote = write
                if whole:
                    tenancy.inherited = tenancy.wiped = None

    def zeroed(self, block_ids: Iterable[int]) -> None:
        """Blocks were set to zero, rightly or not."""
        for block in block_ids:
            self._last[block] = None
            tenancy = self._now.get(block)
            if tenancy is not None:
                tenancy.inherited = None
                if tenancy.wrote is not None and tenancy.wiped is None:
                    tenancy.wiped = self.step

    def last_write(self, block: int) -> Write | None:
        """Who wrote a block last, in which dtype and step; ``None`` if it was zeroed since."""
        return self._last.get(block)

    def explain(self, owner: Hashable) -> list[Suspect]:
        """What ``owner`` could read that was not its own, oldest first.

        Raises:
            ValueError: an owner that the log does not know, or no longer.
        """
        require(owner in self._owners, "owner", "an owner in the log", owner)
        found = self._suspects(owner, self.step, (), {owner})
        return sorted(found, key=lambda suspect: (len(suspect.via), suspect.step, suspect.block))

    def _suspects(
        self, owner: Hashable, until: int, via: tuple[Hashable, ...], seen: set[Hashable]
    ) -> list[Suspect]:
        known = self._owners.get(owner)
        if known is None:
            return []
        found = []
        end = self.step + 1 if known.ended is None else known.ended
        for t in known.tenancies:
            if t.inherited is not None and t.step <= until:
                found.append(_suspect(t, STALE, t.inherited, t.step, via))
            if t.wiped is not None and t.wiped <= until and t.wiped < end:
                found.append(_wiped(t, via))
        for t in known.hits:
            further = (*via, t.owner)
            if t.wiped is not None:
                found.append(_wiped(t, further))
            if t.owner not in seen and t.wrote is not None:
                seen.add(t.owner)
                # What reached the writer after it had filled the block is not in the block.
                found += self._suspects(t.owner, t.wrote.step, further, seen)
        return list(dict.fromkeys(found))

    def _of(self, owner: Hashable) -> _Owner:
        if owner not in self._owners:
            self._owners[owner] = _Owner()
            if len(self._owners) > self.keep:
                self._owners.popitem(last=False)
        return self._owners[owner]


def _suspect(tenancy: _Tenancy, kind: str, write: Write, step: int, via: tuple[Hashable, ...]) -> Suspect:
    return Suspect(tenancy.block, kind, write.owner, write.dtype, tenancy.dtype, step, step - write.step, via)


def _wiped(tenancy: _Tenancy, via: tuple[Hashable, ...]) -> Suspect:
    assert tenancy.wrote is not None
    assert tenancy.wiped is not None
    return _suspect(tenancy, WIPED, tenancy.wrote, tenancy.wiped, via)
