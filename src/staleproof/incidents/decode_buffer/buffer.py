"""The questions about the buffer of one layer: who else writes it, and what it holds."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from staleproof.cases.case import Reading, absent, reading
from staleproof.cases.graph import LaunchList, capture
from staleproof.evidence.canary import plant, row_states
from staleproof.evidence.ledger import owned_tensors
from staleproof.incidents.decode_buffer import broken
from staleproof.incidents.decode_buffer.driver import DriverError, kernel_nodes
from staleproof.incidents.decode_buffer.model import Attention
from staleproof.incidents.decode_buffer.setups import (
    ANOTHER,
    CLEARED,
    FREED,
    ITS_OWN,
    MIXED,
    REFUSED,
    RIGHT_SHAPE,
    SAFE,
    SEPARATE,
    SETUPS,
    SMALL,
    STALE,
    WRONG_SHAPE,
    Setup,
    Wiring,
)
from staleproof.ops.decode_workspace import WorkspaceLocked


def part(wiring: Wiring, device: str, **sizes: int) -> Attention:
    small: dict[str, Any] = {"batch": 8, "heads": 8, "rank": 64, "layers": 1, **sizes}
    part = wiring.attention(replace(SMALL, **small), device)
    assert isinstance(part, Attention)
    return part


def query(attn: Attention, rows: int, stage: int) -> torch.Tensor:
    """(rows, heads, rank) whose every element is the canary ``stage``."""
    return plant(attn.weight.new_empty(rows, *attn.weight.shape), stage)


def ones(rows: int, device: str) -> torch.Tensor:
    return torch.ones(rows, dtype=torch.int32, device=device)


def overlap(setup: Setup, device: str, rounds: int = 20) -> Reading:
    """Whether one of two micro-batches in flight reads the other's output; each has its canary.

    On CUDA they run on two streams, with a delay before the output is read; elsewhere they alternate
    on the host, as in a dual-batch engine.
    """
    rows, seq_lens = 8, ones(8, device)
    mixed = 0
    with setup.process() as wiring:
        attn = part(wiring, device)
        queries = [query(attn, rows, stage) for stage in (1, 2)]
        copies = [torch.empty_like(q) for q in queries]
        for lane, q in enumerate(queries):
            attn.decode(q, seq_lens, lane)
        wiring.ready()
        lanes: list[Any] = [contextlib.nullcontext()] * 2
        if device == "cuda":
            torch.cuda.synchronize()
            lanes = [torch.cuda.stream(torch.cuda.Stream()) for _ in queries]
        for _ in range(rounds):
            outs = []
            for lane, q in enumerate(queries):
                with lanes[lane]:
                    outs.append(attn.decode(q, seq_lens, lane))
                    if device == "cuda":
                        torch.cuda._sleep(200_000)
            for lane, out in enumerate(outs):
                with lanes[lane]:
                    copies[lane].copy_(out)
            if device == "cuda":
                torch.cuda.synchronize()
            # "unwritten" says that every canary of this stage is still there, bit for bit.
            states = [row_states(x, stage) for stage, x in enumerate(copies, 1)]
            mixed += sum(state != "unwritten" for one in states for state in one)
    return reading(MIXED if mixed else SEPARATE, mixed_rows=mixed, rows=2 * rows * rounds)


def other_model(setup: Setup, device: str) -> Reading:
    """The shape that a model gets after a draft model of other heads and rank has decoded."""
    with setup.process() as wiring:
        draft, target = part(wiring, device, heads=4, rank=32), part(wiring, device)
        draft.decode(query(draft, 8, 1), ones(8, device))
        q = query(target, 8, 2)
        got = target.output(q, 0).shape
    return reading(RIGHT_SHAPE if got == q.shape else WRONG_SHAPE, asked=list(q.shape), got=list(got))


def _kept(attn: Attention) -> dict[int, torch.Tensor]:
    """Address -> memory that outlives a call, weights aside."""
    weights = {p.data_ptr() for p in attn.parameters()}
    owned = {t.untyped_storage().data_ptr(): t for _, _, t in owned_tensors(attn)}
    return {at: t for at, t in owned.items() if at not in weights}


def growth(setup: Setup, device: str) -> Reading:
    """Whether a captured graph writes freed memory after a batch larger than the captured one.

    A CUDA graph keeps addresses, not tensors. On CUDA another tensor takes the freed block; elsewhere
    the old buffer itself takes its place.
    """
    numbers: dict[str, Any] = {}
    verdict = SAFE
    with setup.process() as wiring:
        attn = part(wiring, device)
        q, seq_lens = query(attn, 8, 1), ones(8, device)
        attn.decode(q, seq_lens)
        wiring.ready()
        graph = capture(lambda: attn.decode(q, seq_lens), device)
        before = _kept(attn)
        try:
            attn.decode(query(attn, 16, 2), ones(16, device))
        except WorkspaceLocked as refusal:
            return reading(REFUSED, said=str(refusal))
        freed = {at: x for at, x in before.items() if at not in _kept(attn)}
        if freed:
            at, tenant = next(iter(freed.items()))
            if device == "cuda":
                shape, dtype = tenant.shape, tenant.dtype
                del before, freed, tenant
                tenant = torch.empty(shape, dtype=dtype, device=device)
                numbers["same_address"] = tenant.data_ptr() == at
            plant(tenant, 3)
            graph.replay()
            damaged = sum(state != "unwritten" for state in row_states(tenant, 3))
            verdict = FREED if damaged else SAFE
            numbers["damaged_rows"] = damaged
    return reading(verdict, **numbers)


def empty_rows(setup: Setup, device: str) -> Reading:
    """What the seven empty rows of eight hold after a replay; canaries were there before."""
    with setup.process() as wiring:
        attn = part(wiring, device)
        q, seq_lens = query(attn, 8, 1), ones(8, device)
        outs: list[torch.Tensor] = []
        graph = capture(lambda: outs.append(attn.decode(q, seq_lens)), device)
        plant(outs[-1], 2)
        seq_lens[1:] = 0
        graph.replay()
        states = row_states(outs[-1][1:], 2)
    verdict = CLEARED if set(states) == {"zero"} else STALE
    return reading(verdict, zero_rows=states.count("zero"), rows=len(states))


ROWS, LIVE, LAYERS = 8, 3, 4


class Turn(NamedTuple):
    """What layers that decoded in turn left: wrong live rows, and whose rows the empty ones hold."""

    wrong_rows: int
    owners: list[str]


def in_turn(setup: Setup, device: str) -> Turn:
    """Layers that decode one after another, with one batch in flight, over one captured step.

    Each layer's output is read before the next layer decodes, as a model does. First all rows are live,
    then three of eight.
    """
    with setup.process() as wiring:
        layers = [part(wiring, device) for _ in range(LAYERS)]
        queries = [query(layer, ROWS, 1 + i) for i, layer in enumerate(layers)]
        seq_lens = ones(ROWS, device)
        read = [torch.empty_like(q) for q in queries]
        for layer, q in zip(layers, queries, strict=True):
            layer.decode(q, seq_lens)
        wiring.ready()

        def step() -> None:
            for layer, q, copy in zip(layers, queries, read, strict=True):
                copy.copy_(layer.decode(q, seq_lens))

        graph = capture(step, device)
        graph.replay()
        before = [x.clone() for x in read]
        for i, q in enumerate(queries):
            plant(q, 11 + i)
        seq_lens[LIVE:] = 0
        graph.replay()
        full, live = (
            [row_states(x[:LIVE], stage + i) for i, x in enumerate(seen)]
            for stage, seen in ((1, before), (11, read))
        )
        wrong = sum(state != "unwritten" for rows in (*full, *live) for state in rows)
        return Turn(wrong, sorted({_owner(x[LIVE:], i) for i, x in enumerate(read)}))


def layers_in_turn(name: str, device: str, turn: Turn) -> Reading:
    """Whether layers that decode one after another disturb each other's live rows."""
    return reading(MIXED if turn.wrong_rows else SEPARATE, wrong_rows=turn.wrong_rows, layers=LAYERS)


def in_empty_rows(name: str, device: str, turn: Turn) -> Reading:
    """Whose rows of the full step the empty ones hold: the worst, since layers may differ.

    The last layer to decode finds its own rows in a shared buffer.
    """
    worst = next(owner for owner in (ANOTHER, "nobody's", ITS_OWN, CLEARED) if owner in turn.owners)
    return reading(worst, owners=turn.owners)


def _owner(rows: torch.Tensor, layer: int) -> str:
    """Whose canaries these rows hold."""
    for other in range(LAYERS):
        if set(row_states(rows, 1 + other)) == {"unwritten"}:
            return ITS_OWN if other == layer else ANOTHER
    return CLEARED if set(row_states(rows)) == {"zero"} else "nobody's"


def threads(setup: Setup, device: str) -> Reading:
    """Whether two host threads, each with a micro-batch of its own, read each other's output.

    Each waits for the other between its decode and the read of its output.
    """
    meeting = threading.Barrier(2, timeout=60)
    with setup.process() as wiring:
        attn = part(wiring, device)
        queries = [query(attn, ROWS, stage) for stage in (1, 2)]
        for lane, q in enumerate(queries):
            attn.decode(q, ones(ROWS, device), lane)
        wiring.ready()

        def serve(lane: int) -> int:
            out = attn.decode(queries[lane], ones(ROWS, device), lane)
            if device == "cuda":
                torch.cuda.synchronize()
            meeting.wait()
            return sum(state != "unwritten" for state in row_states(out, lane + 1))

        with ThreadPoolExecutor(2) as pool:
            mixed = sum(pool.map(serve, range(2)))
    return reading(MIXED if mixed else SEPARATE, mixed_rows=mixed, rows=2 * ROWS)


class _Meeting(dict):
    """A dict whose look-ups wait up to half a second for another thread's.

    Two threads that look before they write then both find nothing, every time and not once in a while.
    """

    def __init__(self) -> None:
        super().__init__()
        self._barrier = threading.Barrier(2)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict."""
        found = super().get(key, default)
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(0.5)
        return found


def first_use(setup: Setup, device: str) -> Reading:
    """How many buffers two threads get that ask for the same one, which does not exist yet.

    With two, one thread holds memory that nobody keeps (review of vLLM #37799: the global needs a lock).
    """
    with setup.process() as wiring:
        attn = part(wiring, device)
        shape = query(attn, ROWS, 1)
        keeper: Any = getattr(attn, "workspace", broken)
        name = "_shared_out" if keeper is broken else "_buffers"
        before = getattr(keeper, name)
        try:
            setattr(keeper, name, _Meeting())
            with ThreadPoolExecutor(2) as pool:
                outs = list(pool.map(lambda _: attn.output(shape, 1), range(2)))
        finally:
            setattr(keeper, name, before)
    buffers = len({out.data_ptr() for out in outs})
    return reading("one buffer" if buffers == 1 else "two buffers", buffers=buffers)


def captured_kernels(setup: Setup, device: str) -> Reading:
    """Which kernels one layer's captured decode launches, beside those of a layer without a buffer.

    A graph that launches the same kernels on buffers as large takes the same time, so this says more of
    "it costs no time" than a stopwatch at one size.
    """
    try:
        plain, names = _kernels(SETUPS["no_buffer"], device), _kernels(setup, device)
    except DriverError as error:
        return absent(str(error))
    more = len(names) - len(plain)
    verdict = "the same kernels" if names == plain else "one kernel more" if more == 1 else "other kernels"
    return reading(verdict, kernels=names, without_buffer=plain)


def _kernels(setup: Setup, device: str) -> list[str]:
    with setup.process() as wiring:
        attn = part(wiring, device)
        q, seq_lens = query(attn, ROWS, 1), ones(ROWS, device)
        attn.decode(q, seq_lens)
        wiring.ready()
        if device == "cuda":
            return kernel_nodes(lambda: attn.decode(q, seq_lens))
        graph = LaunchList(lambda: attn.decode(q, seq_lens))
        return graph.names
