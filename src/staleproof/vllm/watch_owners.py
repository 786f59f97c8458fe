"""Who wrote the KV blocks that a request reads, and in which steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Ended requests whose blocks are remembered, of which a long one has thousands; writers remembered of a
# block; parts named in a line.
REMEMBERED, WRITERS, NAMED = 128, 3, 6
# More tokens than any request has.
NEVER = 2**62


class Write(NamedTuple):
    """A block's time with one writer; ``last`` is ``None`` while it goes on."""

    owner: str
    kind: str
    first: int
    last: int | None


class Part(NamedTuple):
    """Successive blocks of a request with one writer.

    Attributes:
        blocks: their ids.
        owner: who wrote them last; empty: nobody since the start, or since they were zeroed.
        kind: of the writer's group, ``attention`` or ``state``.
        first, last: the steps in which it did; ``last`` is ``None`` if it still may.
    """

    blocks: tuple[int, ...]
    owner: str
    kind: str
    first: int
    last: int | None

    def text(self, reader: str = "") -> str:
        """The part in words; ``reader`` is called itself.

        >>> Part((4, 5, 6, 9), "a", "attention", 3, 7).text(), Part((8,), "", "", 0, 0).text()
        ('4-6, 9 of a (steps 3 to 7)', '8 of nobody')
        """
        whose = "nobody" if not self.owner else "itself" if self.owner == reader else self.owner
        until = "now" if self.last is None else self.last
        steps = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {until}"
        state = ", as state" if self.kind == "state" else ""
        return f"{spans(self.blocks)} of {whose}" + (f" ({steps}{state})" if self.owner else "")


def spans(ids: Sequence[int]) -> str:
    """Ids as spans, in their order.

    >>> spans([4, 5, 6, 9, 2])
    '4-6, 9, 2'
    """
    found: list[list[int]] = []
    for one in ids:
        if found and found[-1][1] == one - 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in found)


def text(parts: Sequence[Part], reader: str) -> str:
    """All parts in words, of a long table the last: a reader's own blocks are at its end.

    >>> text([Part((4,), "a", "attention", 1, 2), Part((7,), "b", "attention", 9, None)], "b")
    '4 of a (steps 1 to 2); 7 of itself (steps 9 to now)'
    """
    left_out = sum(len(part.blocks) for part in parts[:-NAMED])
    named = [part.text(reader) for part in parts[-NAMED:]]
    return "; ".join(([f"{left_out} blocks before"] if left_out else []) + named)


class Owners:
    """Follows writes by what the scheduler gives, a block at a time; most steps of a decode cost nothing.

    A block that a request gets ahead of its tokens, for drafts, counts as written from the next step on.

    >>> owners = Owners()
    >>> owners.given(1, "a", 0, "attention", 16, [4, 5], computed=0, tokens=20)
    >>> owners.given(9, "b", 0, "attention", 16, [4, 6], computed=16, tokens=3)  # a hit of block 4
    >>> print(text(owners.read_by("b", 9), "b"))
    4 of a (step 1); 6 of itself (steps 9 to now)
    """

    def __init__(self) -> None:
        self._writes: dict[int, list[Write]] = {}
        # Request -> group -> (id, step in which it was given) of each block.
        self._tables: dict[str, dict[int, list[tuple[int, int]]]] = {}
        # Request -> block that it has not filled -> the tokens that fill it.
        self._open: dict[str, dict[int, int]] = {}
        self._ended: deque[str] = deque()

    def begins(self, step: int, name: str) -> None:
        """A request starts, or starts again: it gets all its blocks."""
        self._close(step, name)
        self._tables[name] = {}

    def given(
        self,
        step: int,
        name: str,
        group: int,
        kind: str,
        size: int,
        ids: Iterable[int],
        computed: int,
        tokens: int,
    ) -> None:
        """A request gets further blocks of a group.

        Args:
            step: its number.
            name: of the request.
            group: of the cache.
            kind: ``attention`` or ``state``.
            size: tokens of a block.
            ids: of the blocks.
            computed: tokens before the step.
            tokens: of the step.
        """
        self._close(step, name, computed)
        if kind != "attention":
            # A state is written as a whole, in each step of the request.
            for block in ids:
                self._add(block, Write(name, kind, step, None), end=NEVER)
            return
        table = self._tables.setdefault(name, {}).setdefault(group, [])
        for block in ids:
            start, end = len(table) * size, (len(table) + 1) * size
            table.append((block, step))
            if end > computed:
                first = step if start < computed + tokens else step + 1
                self._add(block, Write(name, kind, first, step if end <= computed + tokens else None), end)

    def _add(self, block: int, write: Write, end: int) -> None:
        writes = self._writes.setdefault(block, [])
        writes.append(write)
        del writes[:-WRITERS]
        if write.last is None:
            self._open.setdefault(write.owner, {})[block] = end

    def _close(self, step: int, name: str, computed: int = NEVER) -> None:
        """The blocks that a request has filled with so many tokens were written before this step."""
        waiting = self._open.get(name, {})
        for block in [block for block, end in waiting.items() if end <= computed]:
            del waiting[block]
            writes = self._writes.get(block, [])
            for at, write in enumerate(writes):
                if write.owner == name and write.last is None:
                    writes[at] = write._replace(last=max(write.first, step - 1))

    def ended(self, step: int, name: str) -> None:
        """A request has ended before this step."""
        self._close(step, name)
        self._open.pop(name, None)
        self._ended.append(name)
        if len(self._ended) > REMEMBERED:
            self._tables.pop(self._ended.popleft(), None)

    def zeroed(self, step: int, blocks: Iterable[int]) -> None:
        """Blocks are zeroed before this step."""
        for block in blocks:
            self._writes[block] = [Write("", "", step, step)]

    def read_by(self, name: str, step: int) -> list[Part]:
        """The blocks that a request reads in a step, by who wrote them last until then."""
        found: list[Part] = []
        for table in self._tables.get(name, {}).values():
            for block in [block for block, since in table if since <= step]:
                known = [write for write in self._writes.get(block, ()) if write.first <= step]
                write = known[-1] if known else Write("", "", 0, 0)
                before = found[-1] if found else None
                if before is not None and before[1:3] == write[:2]:
                    ends = before.last, write.last
                    last = None if None in ends else max(end for end in ends if end is not None)
                    ids, first = (*before.blocks, block), min(before.first, write.first)
                    found[-1] = Part(ids, write.owner, write.kind, first, last)
                else:
                    found.append(Part((block,), *write))
        return found
