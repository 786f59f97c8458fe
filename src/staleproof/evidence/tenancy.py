"""TenancyLog: which bytes a request could read that another request had written.

A pool of KV blocks gives the same memory to one request after another. The log records when a block
is allocated, taken from the prefix cache, written and zeroed. For a request with wrong output it then
says which blocks contained bytes of another request, which request that was, and how old the bytes were.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from staleproof.check import require

# STALE: the block still had the bytes of its last owner when a new owner got it. WIPED: the block was
# zeroed while its owner, or the prefix cache, still needed its bytes.
STALE, WIPED = "stale", "wiped"


@dataclass(frozen=True)
class Suspect:
    """Bytes that a request could read and should not have.

    Attributes:
        request: the request that could read them.
        block: id of the block.
        kind: :data:`STALE` or :data:`WIPED`.
        whose: for stale bytes the request that wrote them; for wiped bytes the request that lost them.
        written_as: dtype they were written in.
        read_as: dtype they are read in.
        step: step in which the block was allocated to its reader, or wiped.
        steps_ago: age of the bytes in that step, in steps.
        via: requests whose cached blocks carried the bytes on, nearest first.
    """

    request: Hashable
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
        if self.kind == WIPED:
            text = f"block {self.block}: wiped in step {self.step}, {ago} after request"
            text += f" {self.whose} wrote {self.written_as} there"
        else:
            text = f"block {self.block}: {self.written_as} bits of request {self.whose}, {ago} old, not"
            reader = self.via[-1] if self.via else self.request
            text += f" zeroed, read as {self.read_as} by request {reader} from step {self.step} on"
        if not self.via:
            return text
        text += f"; request {self.request} used cached blocks of request "
        return text + ", which used those of request ".join(map(str, self.via))


@dataclass(frozen=True)
class Write:
    """A write to a block: by whom, in which dtype, in which step."""

    owner: Hashable
    dtype: str
    step: int


@dataclass
class _Tenancy:
    """A block's time with one owner: the last write before it, its owner's last write, and the wipe."""

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
    """Records on the host who had each block and who wrote it. An owner is a request.

    Args:
        keep: number of owners to remember. Of older owners only the last write to a block is kept.

    Attributes:
        step: number of the current step; :meth:`advance` begins the next.

    Raises:
        ValueError: ``keep`` is below 1.

    >>> log = TenancyLog()
    >>> log.allocated([7], 1, "fp32")
    >>> log.wrote([7], 1, "fp32")
    >>> log.advance()
    >>> log.allocated([7], 2, "e4m3")  # not zeroed in between
    >>> print(*log.explain(2))
    block 7: fp32 bits of request 1, 1 step old, not zeroed, read as e4m3 by request 2 from step 1 on
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
        """Record that blocks were allocated to ``owner``, whose layer reads them as ``dtype``."""
        for block in block_ids:
            tenancy = _Tenancy(block, owner, dtype, self.step, self._last.get(block))
            self._now[block] = tenancy
            self._of(owner).tenancies.append(tenancy)

    def hit(self, block_ids: Iterable[int], owner: Hashable) -> None:
        """Record that ``owner`` took blocks from the prefix cache and will read the bytes in them.

        Raises:
            ValueError: a block that was never allocated.
        """
        for block in block_ids:
            require(block in self._now, "block_ids", "blocks that were allocated before", block)
            self._of(owner).hits.append(self._now[block])

    def ended(self, owner: Hashable) -> None:
        """Record that ``owner`` has finished: blocks zeroed from this step on do not count as its loss."""
        self._of(owner).ended = self.step

    def wrote(self, block_ids: Iterable[int], owner: Hashable, dtype: str, *, whole: bool = False) -> None:
        """Record that ``owner`` wrote into blocks.

        Args:
            block_ids: the blocks.
            owner: who wrote.
            dtype: what it wrote.
            whole: every byte that the owner's layer reads was written, so no earlier byte is left.
        """
        for block in block_ids:
            write = Write(owner, dtype, self.step)
            self._last[block] = write
            tenancy = self._now.get(block)
            if tenancy is not None and tenancy.owner == owner:
                tenancy.wrote = write
                if whole:
                    tenancy.inherited = tenancy.wiped = None

    def zeroed(self, block_ids: Iterable[int]) -> None:
        """Record that blocks were zeroed, whether that was right or wrong."""
        for block in block_ids:
            self._last[block] = None
            tenancy = self._now.get(block)
            if tenancy is not None:
                tenancy.inherited = None
                if tenancy.wrote is not None and tenancy.wiped is None:
                    tenancy.wiped = self.step

    def explain(self, owner: Hashable) -> list[Suspect]:
        """List bytes of others that ``owner`` could read, and bytes of its own that were wiped.

        Returns:
            Its own blocks first, then those it reached through the prefix cache; each in order of steps.

        Raises:
            ValueError: the log does not know the owner, or no longer.
        """
        require(owner in self._owners, "owner", "an owner in the log", owner)
        suspects = self._suspects(self.step, (owner,), {owner})
        return sorted(suspects, key=lambda suspect: (len(suspect.via), suspect.step, suspect.block))

    def _suspects(self, until: int, path: tuple[Hashable, ...], visited: set[Hashable]) -> list[Suspect]:
        """What the last request of ``path`` could read; it reaches the first one by cached blocks."""
        known = self._owners.get(path[-1])
        if known is None:
            return []
        suspects = []
        end = self.step + 1 if known.ended is None else known.ended
        for t in known.tenancies:
            if t.inherited is not None and t.step <= until:
                suspects.append(_suspect(t, STALE, t.inherited, t.step, path))
            if t.wiped is not None and t.wiped <= until and t.wiped < end:
                suspects.append(_wiped(t, path))
        for t in known.hits:
            further = (*path, t.owner)
            if t.wiped is not None:
                suspects.append(_wiped(t, further))
            if t.wrote is None:
                # Published before its owner wrote it: a request that hits it reads what was there before.
                if t.inherited is not None:
                    suspects.append(_suspect(t, STALE, t.inherited, t.step, further))
            elif t.owner not in visited:
                visited.add(t.owner)
                # Bytes that reached the writer after it wrote this block are not in this block.
                suspects += self._suspects(t.wrote.step, further, visited)
        return list(dict.fromkeys(suspects))

    def _of(self, owner: Hashable) -> _Owner:
        if owner not in self._owners:
            self._owners[owner] = _Owner()
            if len(self._owners) > self.keep:
                self._owners.popitem(last=False)
        return self._owners[owner]


def _suspect(tenancy: _Tenancy, kind: str, write: Write, step: int, path: tuple[Hashable, ...]) -> Suspect:
    (request, *via), age, dtypes = path, step - write.step, (write.dtype, tenancy.dtype)
    return Suspect(request, tenancy.block, kind, write.owner, *dtypes, step, age, tuple(via))


def _wiped(tenancy: _Tenancy, path: tuple[Hashable, ...]) -> Suspect:
    assert tenancy.wrote is not None
    assert tenancy.wiped is not None
    return _suspect(tenancy, WIPED, tenancy.wrote, tenancy.wiped, path)
