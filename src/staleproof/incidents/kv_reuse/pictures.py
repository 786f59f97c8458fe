"""Data for the figure of incident 4's notebook: one block of the pool, from a Mamba state to a prefix hit."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from staleproof.check import fail
from staleproof.incidents.kv_reuse.scene import Scene, trace_of
from staleproof.incidents.kv_reuse.scheduler import ATTENTION, MAMBA, Trace

FREE, STATE, KV, HIT = "free", "Mamba state", "keys and values", "prefix hit"


@dataclass(frozen=True)
class Span:
    """A period of a block: steps ``begin`` to ``end`` - 1, what it was then, and its owner."""

    begin: int
    end: int
    what: str
    request: int | None = None


@dataclass(frozen=True)
class BlockLife:
    """One block of the pool, from a Mamba state to the first prefix hit on it.

    Attributes:
        block: its number.
        spans: what it was, in order: ``Mamba state``, ``free``, ``keys and values`` or ``prefix hit``.
        filled: (step, tokens): how many positions contained keys and values of the owner at the end of each
            step in which a position was written.
        block_size: number of positions.
    """

    block: int
    spans: list[Span]
    filled: list[tuple[int, int]]
    block_size: int


def _spans(trace: Trace, block: int) -> list[Span]:
    """The life of one block, without the free time before its first owner."""
    marks: list[tuple[int, str, int | None]] = []
    for number, step in enumerate(trace.steps):
        if block in step.freed:
            marks.append((number, FREE, None))
        for request, blocks in step.hits:
            if block in blocks:
                marks.append((number, HIT, request))
        for group, what in ((MAMBA, STATE), (ATTENTION, KV)):
            if block in step.new[group]:
                owner = next(row.request for row in step.rows if block in (row.state_out, row.blocks[-1]))
                marks.append((number, what, owner))
    ends = [begin for begin, _, _ in marks[1:]] + [len(trace.steps)]
    return [Span(b, e, what, who) for (b, what, who), e in zip(marks, ends, strict=True) if e > b]


def block_life(scene: Scene, corrupted: Collection[int]) -> BlockLife:
    """The first block that was a Mamba state, was reused by a corrupted request, and was then hit.

    It was a Mamba state, then free, then keys and values of a request with wrong output, and a later request
    hit it before it was a Mamba state again.

    Args:
        scene: served with prefix caching.
        corrupted: requests with wrong output.

    Raises:
        ValueError: no block of the scene had such a life.
    """
    trace, size = trace_of(scene), scene.page.block_size
    for block in range(1, scene.blocks):
        spans = _spans(trace, block)
        # Match on one letter per span: M(amba), f(ree), k(eys and values) or p(refix hit).
        for life in re.finditer("Mfk[^M]*?p", "".join(span.what[0] for span in spans)):
            kept = spans[slice(*life.span())]
            if kept[2].request in corrupted:
                return BlockLife(block, kept, _filled(trace, block, kept, size), size)
    fail("scene", "a block that is a state, then keys and values, then hit", "none")


def _filled(trace: Trace, block: int, spans: list[Span], size: int) -> list[tuple[int, int]]:
    owners = {span.request for span in spans if span.what == KV}
    return [
        (number, row.position % size + 1)
        for number, step in enumerate(trace.steps)
        for row in step.rows
        if row.request in owners and row.blocks[row.position // size] == block
    ]
