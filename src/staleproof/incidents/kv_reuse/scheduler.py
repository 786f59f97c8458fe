"""The scheduler's half of the fix: it reports the new blocks of each step, and keeps no list of them.

A small continuous batch: one request per row, and one token per request and step, also for prompts. A request
gets attention blocks as it grows, and one Mamba block for its state; with prefix caching it gets one Mamba
block per attention block, as in vLLM's ``align`` mode. Scheduling does not depend on computed values, so one
trace gives every kernel and every remedy the same inputs.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from staleproof.incidents.kv_reuse.block_pool import NULL_BLOCK, BlockPool

ATTENTION, MAMBA = "attention", "mamba"
VOCABULARY = 97


class Request(NamedTuple):
    """A request whose output tokens are fixed in advance, so that no fault changes the schedule."""

    number: int
    tokens: tuple[int, ...]


def requests(*, prefix: int = 32, shortest: int = 34, longest: int = 80) -> Iterator[Request]:
    """An endless stream of requests; each begins with one of six prefixes of ``prefix`` tokens."""
    draw = random.Random(0)
    prefixes = [[draw.randrange(VOCABULARY) for _ in range(prefix)] for _ in range(6)]
    number = 0
    while True:
        more = draw.randint(shortest, longest) - prefix
        tail = [draw.randrange(VOCABULARY) for _ in range(more)]
        yield Request(number, (*draw.choice(prefixes), *tail))
        number += 1


class NewBlocks:
    """Ids of newly allocated blocks, until they are taken."""

    def __init__(self) -> None:
        self.ids: dict[str, list[int]] = {ATTENTION: [], MAMBA: []}

    def record(self, group: str, block_ids: list[int]) -> None:
        """Add blocks just allocated to a group. Prefix-cache hits are not new: never record them."""
        self.ids[group].extend(block_ids)

    def take(self) -> dict[str, list[int]]:
        """Return what was recorded since the last call, by group, and forget it.

        Call it in every step, on every model: on a model that never does, the list grows for as
        long as the server runs (vLLM #44175).
        """
        taken, self.ids = self.ids, {ATTENTION: [], MAMBA: []}
        return taken


@dataclass(frozen=True)
class Row:
    """One request's part of one step.

    Attributes:
        request: its number.
        token: fed in this step.
        position: of that token in the request.
        blocks: attention blocks, in order.
        state_in: Mamba block that holds the state before this token.
        state_out: Mamba block that takes the state after it.
        first: whether this is the request's first token, so that there is no state to load.
        last: whether the request is done after this step.
    """

    request: int
    token: int
    position: int
    blocks: tuple[int, ...]
    state_in: int
    state_out: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Step:
    """What the scheduler hands to the worker.

    Attributes:
        rows: one a running request.
        new: ids allocated in this step, by group; they must be clean before anything reads them.
        hits: (request, blocks) taken from the prefix cache, both groups.
        ended: requests whose blocks were freed before this step.
        freed: blocks that lost their last user since the step before, both groups.
    """

    rows: tuple[Row, ...]
    new: dict[str, list[int]]
    hits: tuple[tuple[int, tuple[int, ...]], ...]
    ended: tuple[int, ...]
    freed: tuple[int, ...]

    @property
    def new_blocks(self) -> list[int]:
        """Blocks of both groups that are new in this step."""
        return [*self.new[ATTENTION], *self.new[MAMBA]]


@dataclass
class _Running:
    request: Request
    position: int = 0
    blocks: list[int] = field(default_factory=list)
    state: int = NULL_BLOCK
    fresh: bool = True


class Scheduler:
    """Requests in, steps out.

    Args:
        pool: block ids of both groups.
        block_size: tokens an attention block holds.
        source: the requests, first come first served.
        batch: rows of every step.
        prefix_caching: whether full blocks are remembered and hit.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        source: Iterator[Request],
        *,
        batch: int = 16,
        prefix_caching: bool = True,
    ) -> None:
        self.pool, self.block_size, self.source = pool, block_size, source
        self.batch, self.prefix_caching = batch, prefix_caching
        self.new = NewBlocks()
        self._running: list[_Running] = []
        # Blocks of states that the step in flight reads for the last time. They are freed after it.
        self._leaving: list[int] = []

    def schedule(self) -> Step:
        """The next step.

        Raises:
            OutOfBlocks: the pool is too small for the batch.
        """
        ended, freed = self._end()
        hits = [self._begin() for _ in range(self.batch - len(self._running))]
        rows = [self._advance(running) for running in self._running]
        return Step(
            tuple(rows), self.new.take(), tuple(hit for hit in hits if hit[1]), tuple(ended), tuple(freed)
        )

    def _allocate(self, group: str) -> int:
        (block,) = self.pool.allocate(1)
        self.new.record(group, [block])
        return block

    def _end(self) -> tuple[list[int], list[int]]:
        done = [r for r in self._running if r.position == len(r.request.tokens)]
        freed = self.pool.free(self._leaving)
        self._leaving.clear()
        for running in done:
            # Last block first, so that the beginning of a prefix stays in the cache longest.
            freed += self.pool.free([running.state, *running.blocks[::-1]])
            self._running.remove(running)
        return [running.request.number for running in done], freed

    def _begin(self) -> tuple[int, tuple[int, ...]]:
        running = _Running(next(self.source))
        self._running.append(running)
        if not self.prefix_caching:
            return running.request.number, ()
        # At least one token is always computed: its output is what the row is for.
        longest = (len(running.request.tokens) - 1) // self.block_size
        blocks: list[int] = []
        usable: list[int] = []
        for count in range(1, longest + 1):
            block = self.pool.cached(self._key(ATTENTION, running.request, count))
            if block is None:
                break
            blocks.append(block)
            # A hit counts only up to a block whose recurrent state is cached as well.
            state = self.pool.cached(self._key(MAMBA, running.request, count))
            if state is not None:
                running.state, usable = state, blocks.copy()
        hit = [*usable, running.state] if usable else []
        self.pool.touch(hit)
        running.blocks, running.position = usable, len(usable) * self.block_size
        running.fresh = not usable
        return running.request.number, tuple(hit)

    def _key(self, group: str, request: Request, blocks: int) -> Hashable:
        return group, request.tokens[: blocks * self.block_size]

    def _advance(self, running: _Running) -> Row:
        request, position = running.request, running.position
        state_in, first = running.state, running.fresh
        if position % self.block_size == 0:
            running.blocks.append(self._allocate(ATTENTION))
        if first or (self.prefix_caching and position % self.block_size == 0):
            # The state at the end of the last block stays in its block, for other requests to hit.
            running.state = self._allocate(MAMBA)
            if not first:
                self._leaving.append(state_in)
        row = Row(
            request.number,
            request.tokens[position],
            position,
            tuple(running.blocks),
            NULL_BLOCK if first else state_in,
            running.state,
            first,
            position + 1 == len(request.tokens),
        )
        running.position += 1
        running.fresh = False
        if self.prefix_caching and running.position % self.block_size == 0:
            # The block is full once this step is done. It cannot be hit earlier, since hits are
            # looked up when the next step is scheduled.
            count = running.position // self.block_size
            self.pool.cache(running.blocks[-1], self._key(ATTENTION, request, count))
            self.pool.cache(running.state, self._key(MAMBA, request, count))
        return row


@dataclass(frozen=True)
class Tables:
    """The pages of one memory that each row of each step reads and writes; (steps, rows, ...)."""

    blocks: torch.Tensor
    state_in: torch.Tensor
    state_out: torch.Tensor


@dataclass(frozen=True)
class Trace:
    """Hundreds of steps, with the same inputs for every memory they are served from.

    Attributes:
        steps: as scheduled.
        tokens: (steps, rows) int64.
        positions: (steps, rows) int64.
        first: (steps, rows) bool.
        owners: (steps, rows) int64, request numbers.
        pooled: pages of the pool: ids are reused.
        clean: pages of a memory in which every tenancy has a page that nobody used before.
        clean_pages: pages that such a memory needs.
    """

    steps: list[Step]
    tokens: torch.Tensor
    positions: torch.Tensor
    first: torch.Tensor
    owners: torch.Tensor
    pooled: Tables
    clean: Tables
    clean_pages: int

    @property
    def finished(self) -> dict[int, int]:
        """Step in which each request ended, of those that did."""
        return {row.request: n for n, step in enumerate(self.steps) for row in step.rows if row.last}


def trace(scheduler: Scheduler, steps: int, device: str = "cpu") -> Trace:
    """Let a scheduler run for a number of steps.

    Args:
        scheduler: fresh.
        steps: how many.
        device: of the tensors.
    """
    page_of, pages = {NULL_BLOCK: NULL_BLOCK}, 1
    taken, clean = [], []
    for _ in range(steps):
        step = scheduler.schedule()
        for block in step.new_blocks:
            page_of[block] = pages
            pages += 1
        taken.append(step)
        clean.append(
            [([page_of[b] for b in r.blocks], page_of[r.state_in], page_of[r.state_out]) for r in step.rows]
        )
    pooled = [[(list(r.blocks), r.state_in, r.state_out) for r in s.rows] for s in taken]
    width = max(len(r.blocks) for s in taken for r in s.rows)

    def tensor(values: object, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def tables(of: list[list[tuple[list[int], int, int]]]) -> Tables:
        rows = [[b + [NULL_BLOCK] * (width - len(b)) for b, _, _ in step] for step in of]
        return Tables(
            tensor(rows),
            tensor([[i for _, i, _ in step] for step in of]),
            tensor([[o for _, _, o in step] for step in of]),
        )

    return Trace(
        taken,
        tensor([[r.token for r in s.rows] for s in taken]),
        tensor([[r.position for r in s.rows] for s in taken]),
        tensor([[r.first for r in s.rows] for s in taken], torch.bool),
        tensor([[r.request for r in s.rows] for s in taken]),
        tables(pooled),
        tables(clean),
        pages,
    )
