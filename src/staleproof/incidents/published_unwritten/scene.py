"""Steps that are planned and then written, and a record of every read of a slot that was not written.

:class:`Memory` tracks, slot by slot, whose keys and values a pool of blocks contains. It gets each step as a
worker does. :class:`Miniature` is a scheduler of about a page of code: the order of events follows vLLM's
``Scheduler.schedule`` and ``KVCacheManager.allocate_slots`` (0.33.0). :func:`serve` runs a load on it, or on
vLLM's own scheduler (:mod:`.real`).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from staleproof.check import require
from staleproof.incidents.published_unwritten.broken import NONE, Remedy
from staleproof.whole.load import Arrival

ZEROS, NOBODY = "zeros", "nobody"
WRITTEN, FOREIGN, UNWRITTEN = "written", "a stranger's", "unwritten"


class Row(NamedTuple):
    """One request in one step.

    Attributes:
        name: of the request.
        tokens: all its tokens.
        blocks: its block ids, in order.
        start: tokens computed before the step.
        more: tokens that the step computes.
        hits: whether it starts or resumes now, so that its first ``start`` tokens are prefix-cache hits.
    """

    name: str
    tokens: Sequence[int]
    blocks: Sequence[int]
    start: int
    more: int
    hits: bool


class Read(NamedTuple):
    """A slot that a request got as a hit, but that does not contain its prefix."""

    step: int
    reader: str
    position: int
    block: int
    whose: str


class Memory:
    """Which request's keys and values each slot contains.

    Slots are compared by a chained hash of all tokens up to their own, which keys and values depend on.

    Attributes:
        reads: every read of a slot that was not written for this prefix.
        tokens: tokens that requests got as hits.
        plan: a digest of which request computed which tokens in which step.
        same_step: tokens among the hits that are written only in the step of the hit. That is correct: each
            layer writes all keys and values before it reads any.

    >>> memory = Memory(block_size=2)
    >>> memory.step([Row("a", [1, 2, 3], [7, 8], 0, 3, True)])
    >>> memory.step([Row("b", [1, 2, 3], [7, 9], 2, 1, True)])  # a hit on block 7
    >>> memory.step([Row("c", [1, 5, 3], [7, 8], 2, 1, True)])  # block 7 holds another prefix
    >>> memory.reads
    [Read(step=3, reader='c', position=1, block=7, whose='a')]
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.reads: list[Read] = []
        self.steps = self.tokens = self.same_step = self.plan = 0
        # Block -> who wrote each slot last, and at which position.
        self._slots: dict[int, tuple[list[str], list[int]]] = defaultdict(
            lambda: ([NOBODY] * block_size, [0] * block_size)
        )
        self._rows: dict[str, Row] = {}
        self._chains: dict[str, list[int]] = {}

    def _chain(self, name: str) -> list[int]:
        # Asynchronous scheduling writes a token before the host knows it, so hash it when a slot is read.
        chain = self._chains.setdefault(name, [])
        for token in self._rows[name].tokens[len(chain) :] if name in self._rows else ():
            chain.append(hash((chain[-1] if chain else 1, token)))
        return chain

    def _written(self, row: Row, position: int) -> tuple[str, int]:
        writers, positions = self._slots[row.blocks[position // self.block_size]]
        return writers[position % self.block_size], positions[position % self.block_size]

    def _is_wrong(self, row: Row, position: int) -> bool:
        writer, at = self._written(row, position)
        chain = self._chain(writer)
        return (chain[at] if at < len(chain) else 0) != self._chain(row.name)[position]

    def _wrong(self, row: Row) -> set[int]:
        self._rows[row.name] = row
        found: set[int] = set()
        for first, block in zip(range(0, row.start, self.block_size), row.blocks, strict=False):
            here = range(first, min(first + self.block_size, row.start))
            writers, positions = self._slots[block]
            # Compare a block at once if one request wrote it at these positions, as in most blocks.
            alike = positions[: len(here)] == [*here] and writers[: len(here)].count(writers[0]) == len(here)
            part = slice(here.start, here.stop)
            if not alike or self._chain(writers[0])[part] != self._chain(row.name)[part]:
                found.update(p for p in here if self._is_wrong(row, p))
        return found

    def write(self, row: Row, positions: range) -> None:
        """Write the keys and values of these positions of a request."""
        self._rows[row.name] = row
        for first in range(
            positions.start - positions.start % self.block_size, positions.stop, self.block_size
        ):
            here = range(max(first, positions.start), min(first + self.block_size, positions.stop))
            slots = slice(here.start - first, here.stop - first)
            writers, at = self._slots[row.blocks[first // self.block_size]]
            writers[slots], at[slots] = [row.name] * len(here), here

    def step(self, rows: Sequence[Row]) -> None:
        """Read the hits of the step's requests, write what the step computes, and read the hits again."""
        self.steps += 1
        self.plan = hash((self.plan, *((row.name, row.start, row.more) for row in rows)))
        fresh = [row for row in rows if row.hits and row.start]
        early = [self._wrong(row) for row in fresh]
        for row in rows:
            self.write(row, range(row.start, row.start + row.more))
        for row, before in zip(fresh, early, strict=True):
            self.tokens += row.start
            after = self._wrong(row)
            self.same_step += len(before - after)
            for p in sorted(after):
                block = row.blocks[p // self.block_size]
                self.reads.append(Read(self.steps, row.name, p, block, self._written(row, p)[0]))

    def zero(self, blocks: Sequence[int]) -> None:
        """Zero blocks before the next step."""
        for block in blocks:
            self._slots[block] = [ZEROS] * self.block_size, [0] * self.block_size

    @property
    def verdict(self) -> str:
        """``written``; ``a stranger's`` if a hit contains another request's bytes; else ``unwritten``."""
        foreign = any(read.whose not in (read.reader, ZEROS, NOBODY) for read in self.reads)
        return FOREIGN if foreign else UNWRITTEN if self.reads else WRITTEN


def serve(engine: Any, load: Sequence[Arrival], limit: int = 5000) -> Memory:
    """Run a load to its end, on a :class:`Miniature` or on vLLM's scheduler (:class:`.real.Real`).

    Raises:
        ValueError: it does not end within ``limit`` steps.
    """
    left, step = [*load], 0
    while left or engine.running():
        alive = engine.running() | {arrival.name for arrival in left}
        for arrival in [*left]:
            if step >= arrival.at and arrival.after not in alive:
                engine.add(arrival)
                left.remove(arrival)
        engine.step()
        step += 1
        require(step < limit, "load", f"one that ends within {limit} steps", f"{len(left)} to come")
    memory: Memory = engine.memory
    return memory


def tenants() -> list[Arrival]:
    """The miniature's load, for seven blocks of four tokens.

    A tenant fills the pool and ends. Then a victim of low priority is computed in chunks, a chat of high
    priority needs one block more than is free, and at last a stranger sends the victim's prompt again.
    """
    prompt = [100 + i for i in range(24)]
    return [
        Arrival("tenant", [50 + i for i in range(24)], 1),
        Arrival("victim", prompt, 2, priority=10, after="tenant"),
        Arrival("chat", [10 + i for i in range(4)], 3, at=4, after="tenant"),
        Arrival("stranger", [*prompt, 9], 1, priority=10, after="victim"),
    ]


def one_victim(other: int = 46) -> list[Arrival]:
    """A long prompt of low priority in chunks, and a chat of high priority that soon needs a block more.

    A small request runs at the same time: from 0.31.0 on vLLM does not split a lone prefill into chunks.
    """
    return [
        Arrival("small", [3] * 9, 60),
        Arrival("victim", [100 + i for i in range(300)], 4, priority=10),
        Arrival("chat", [5 + i for i in range(other)], 6, at=1),
    ]


@cache
def burst(seed: int) -> tuple[int, list[Arrival]]:
    """48 chats of higher priority arrive during the prefill of a long document, which then comes again.

    Returns:
        The blocks of a pool, 280 to 419, and the load. The load was tuned until the fault appeared, so its
        frequency here is not that of real servers.
    """
    draw = random.Random(seed)
    blocks = draw.randrange(280, 420)
    document = [draw.randrange(3, 500) for _ in range(draw.randrange(3000, 4200))]
    when = draw.randrange(2, 5)
    sizes = [(draw.randrange(20, 90), draw.randrange(4, 20)) for _ in range(48)]
    chats = [
        Arrival(f"chat{i}", [draw.randrange(3, 500) for _ in range(size)], reply, at=when)
        for i, (size, reply) in enumerate(sizes)
    ]
    stranger = Arrival("stranger", [*document, *[7] * 20], 8, priority=5, after="victim")
    small = Arrival("small", [3] * 9, 150)
    return blocks, [small, Arrival("victim", document, 16, priority=10), *chats, stranger]


class Event(NamedTuple):
    """What happened to a block: ``write``, ``publish``, ``withdraw``, ``reuse``, ``evict`` or ``hit``."""

    step: int
    block: int
    what: str
    who: str


@dataclass(eq=False)
class _Request:
    arrival: Arrival
    order: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    hits: bool = True


SIZE = 4


def _hashes(tokens: Sequence[int]) -> Iterator[int]:
    key = 1
    for end in range(SIZE, len(tokens) + 1, SIZE):
        yield (key := hash((key, *tokens[end - SIZE : end])))


@dataclass
class Miniature:
    """A scheduler with a prefix cache, in which a step is planned and then written; blocks of four tokens.

    Its arguments are the ingredients of the fault.

    Attributes:
        blocks: of the pool.
        policy: ``priority`` preempts the request with the lowest priority, which may be in the plan already;
            ``fcfs`` preempts the last request, which is not in it yet.
        threshold: most tokens of a request in a step.
        caching: whether there is prefix caching.
        publish: when hashes are published: at ``plan`` or after the ``write``.
        late: requests in addition to those of :func:`tenants`.
        remedy: see :mod:`.broken`.
        events: what happened to each block.

    Raises:
        ValueError: a pool of no block, or an unknown policy or time.
    """

    blocks: int = 7
    policy: str = "priority"
    threshold: int = 8
    caching: bool = True
    publish: str = "plan"
    late: tuple[Arrival, ...] = ()
    remedy: Remedy = NONE
    events: list[Event] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        require(self.blocks > 0, "blocks", "a pool of at least one block", self.blocks)
        require(self.policy in ("priority", "fcfs"), "policy", "priority or fcfs", self.policy)
        require(self.publish in ("plan", "write"), "publish", "plan or write", self.publish)
        self.memory = Memory(SIZE)
        self._free = [*range(self.blocks)]
        self._users = [0] * self.blocks
        self._hash: dict[int, int] = {}  # block -> hash
        self._table: dict[int, int] = {}  # hash -> block
        self._fresh: set[int] = set()  # blocks that this step published
        self._running: list[_Request] = []
        self._waiting: list[_Request] = []
        self._orders = 0

    def run(self) -> Miniature:
        """Run the load on a new miniature with these ingredients, and return that miniature."""
        engine = replace(self)
        serve(engine, [*tenants(), *self.late])
        return engine

    def add(self, arrival: Arrival) -> None:
        """Queue a request."""
        self._waiting.append(_Request(arrival, self._orders, [*arrival.prompt]))
        self._orders += 1

    def running(self) -> set[str]:
        """Requests that have not ended."""
        return {request.arrival.name for request in (*self._running, *self._waiting)}

    def _note(self, blocks: Sequence[int], what: str, request: _Request) -> None:
        self.events += [Event(self.memory.steps + 1, block, what, request.arrival.name) for block in blocks]

    def _rank(self, request: _Request) -> tuple[int, int]:
        return (request.arrival.priority if self.policy == "priority" else 0), request.order

    def _evict(self, block: int) -> bool:
        key = self._hash.pop(block, None)
        if key is not None and self._table.get(key) == block:
            del self._table[key]
        return key is not None

    def _allocate(self, request: _Request, count: int) -> bool:
        more = -(-(request.computed + count) // SIZE) - len(request.blocks)
        if more > len(self._free):
            return False
        taken, self._free = self._free[:more], self._free[more:]
        for block in taken:
            self._users[block] = 1
            self._note([block], "evict" if self._evict(block) else "reuse", request)
        self.memory.zero(taken if self.remedy.zeroes else ())
        request.blocks += taken
        if self.publish == "plan":
            self._publish(request, request.computed + count)
        return True

    def _publish(self, request: _Request, tokens: int) -> None:
        keys, full = [*_hashes(request.tokens)], tokens // SIZE
        for at in range(request.cached, full if self.caching else 0):
            block = request.blocks[at]
            self._hash[block] = keys[at]
            self._table.setdefault(keys[at], block)
            self._fresh.add(block)
            self._note([block], "publish", request)
        request.cached = max(request.cached, full)

    def _release(self, request: _Request) -> None:
        for block in reversed(request.blocks):
            self._users[block] -= 1
            if not self._users[block]:
                # Blocks without a hash are taken again first.
                self._free.insert(len(self._free) if block in self._hash else 0, block)
        request.blocks, request.cached, request.computed = [], 0, 0

    def _preempt(self, victim: _Request) -> None:
        computed = victim.computed // SIZE
        for block in self.remedy.taken_back(victim.blocks, computed, self.blocks):
            self._evict(block)
        self._note(victim.blocks[computed:], "withdraw", victim)
        self._release(victim)
        victim.hits = True
        self._running.remove(victim)
        self._waiting.append(victim)

    def _hit(self, request: _Request) -> None:
        # The last token is always computed, because its logits are needed.
        for key in [*_hashes(request.tokens)][: (len(request.tokens) - 1) // SIZE]:
            block = self._table.get(key) if self.caching else None
            if block is None or (self.remedy.guards and block in self._fresh):
                break
            request.blocks.append(block)
        for block in request.blocks:
            if not self._users[block]:
                self._free.remove(block)
            self._users[block] += 1
        request.cached = len(request.blocks)
        request.computed = request.cached * SIZE

    def step(self) -> None:
        """Plan a step; then write it."""
        self._fresh.clear()
        plan: dict[_Request, int] = {}
        waiting = [*self._waiting]
        for request in [*self._running]:
            count = min(len(request.tokens) - request.computed, self.threshold)
            while request in self._running and not self._allocate(request, count):
                victim = max(self._running, key=self._rank)
                plan.pop(victim, None)
                self._preempt(victim)
            if request in self._running:
                plan[request] = count
        # After a preemption nothing new is admitted.
        for request in sorted(waiting, key=self._rank) if waiting == self._waiting else ():
            self._hit(request)
            count = min(len(request.tokens) - request.computed, self.threshold)
            if not self._allocate(request, count):
                self._release(request)
                break
            self._waiting.remove(request)
            self._running.append(request)
            plan[request] = count
        self._write(plan)

    def _write(self, plan: dict[_Request, int]) -> None:
        rows = []
        for request, count in plan.items():
            name, blocks = request.arrival.name, [*request.blocks]
            rows.append(Row(name, request.tokens, blocks, request.computed, count, request.hits))
            first, last = request.computed // SIZE, (request.computed + count - 1) // SIZE
            self._note(blocks[:first] if request.hits else (), "hit", request)
            self._note(blocks[first : last + 1], "write", request)
        self.memory.step(rows)
        for request, count in plan.items():
            request.computed, request.hits = request.computed + count, False
            if self.publish == "write":
                self._publish(request, request.computed)
            if request.computed == len(request.tokens):
                request.tokens.append(5 + len(request.tokens) * 7 % 450)
                if len(request.tokens) - len(request.arrival.prompt) == request.arrival.reply:
                    self._running.remove(request)
                    self._release(request)
