"""The questions about the buffer of one layer: who else writes it, and what it holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from staleproof.cases.case import Reading, reading
from staleproof.cases.graph import capture
from staleproof.evidence.canary import plant, row_states
from staleproof.evidence.ledger import owned_tensors
from staleproof.incidents.decode_buffer.model import Attention
from staleproof.incidents.decode_buffer.setups import SMALL, Setup, Wiring
from staleproof.ops.decode_workspace import WorkspaceLocked

ROWS, LIVE, LAYERS = 8, 3, 4
POOL = "without a buffer these are blocks of the graph's memory pool, which its allocator hands out"


def part(wiring: Wiring, device: str, **sizes: int) -> Attention:
    """One layer's attention, of few and small heads."""
    small: dict[str, Any] = {"batch": ROWS, "heads": 8, "rank": 64, "layers": 1, **sizes}
    part = wiring.attention(replace(SMALL, **small), device)
    assert isinstance(part, Attention)
    return part


def query(attn: Attention, rows: int, stage: int) -> torch.Tensor:
    """(rows, heads, rank) whose every element is the canary ``stage``."""
    return plant(attn.weight.new_empty(rows, *attn.weight.shape), stage)


def ones(rows: int, device: str) -> torch.Tensor:
    """The ``seq_lens`` of a full batch."""
    return torch.ones(rows, dtype=torch.int32, device=device)


def _changed(x: torch.Tensor, stage: int) -> int:
    """The number of rows in which some canary of ``stage`` was overwritten."""
    return sum(state != "unwritten" for state in row_states(x, stage))


@contextlib.contextmanager
def _serving(setup: Setup, device: str, lanes: int = 1) -> Iterator[tuple[Attention, list[torch.Tensor]]]:
    """A layer that decoded once for each micro-batch, and is ready to serve; the query of each."""
    with setup.process() as wiring:
        attn = part(wiring, device)
        queries = [query(attn, ROWS, 1 + lane) for lane in range(lanes)]
        for lane, q in enumerate(queries):
            attn.decode(q, ones(ROWS, device), lane)
        wiring.ready()
        yield attn, queries


def _mixed(rows: int, of: int) -> Reading:
    return reading("mixed" if rows else "separate", mixed_rows=rows, rows=of)


def overlap(setup: Setup, device: str, rounds: int = 20) -> Reading:
    """Whether one of two micro-batches in flight reads the other's output; each has its canary.

    On CUDA they run on two streams, with a delay before the output is read; elsewhere they alternate
    on the host, as in a dual-batch engine.
    """
    seq_lens, mixed = ones(ROWS, device), 0
    with _serving(setup, device, lanes=2) as (attn, queries):
        copies = [torch.empty_like(q) for q in queries]
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
            mixed += sum(_changed(x, stage) for stage, x in enumerate(copies, 1))
    return _mixed(mixed, 2 * ROWS * rounds)


def other_model(setup: Setup, device: str) -> Reading:
    """The shape that a model gets after a draft model of other heads and rank has decoded."""
    with setup.process() as wiring:
        draft, target = part(wiring, device, heads=4, rank=32), part(wiring, device)
        draft.decode(query(draft, ROWS, 1), ones(ROWS, device))
        q = query(target, ROWS, 2)
        got = target.output(q, 0).shape
    return reading("right shape" if got == q.shape else "wrong shape", asked=list(q.shape), got=list(got))


def _kept(attn: Attention) -> dict[int, torch.Tensor]:
    """Address -> memory that the layer keeps after a call, without weights."""
    weights = {p.data_ptr() for p in attn.parameters()}
    owned = {t.untyped_storage().data_ptr(): t for _, _, t in owned_tensors(attn)}
    return {at: t for at, t in owned.items() if at not in weights}


def growth(setup: Setup, device: str) -> Reading:
    """Whether a captured graph writes freed memory after a batch larger than the captured one.

    A CUDA graph keeps addresses, not tensors. On CUDA another tensor takes the freed block; elsewhere
    the old buffer itself takes its place.
    """
    numbers: dict[str, Any] = {}
    with _serving(setup, device) as (attn, (q,)):
        seq_lens = ones(ROWS, device)
        graph = capture(lambda: attn.decode(q, seq_lens), device)
        before = _kept(attn)
        try:
            attn.decode(query(attn, 2 * ROWS, 2), ones(2 * ROWS, device))
        except WorkspaceLocked as refusal:
            return reading("refused", said=str(refusal))
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
            numbers["damaged_rows"] = _changed(tenant, 3)
    return reading("writes freed memory" if numbers.get("damaged_rows") else "safe", **numbers)


def empty_rows(setup: Setup, device: str) -> Reading:
    """What the seven empty rows of eight contain after a replay over canaries."""
    with _serving(setup, device) as (attn, (q,)):
        seq_lens = ones(ROWS, device)
        outs: list[torch.Tensor] = []
        graph = capture(lambda: outs.append(attn.decode(q, seq_lens)), device)
        plant(outs[-1], 2)
        seq_lens[1:] = 0
        graph.replay()
        states = row_states(outs[-1][1:], 2)
    verdict = "cleared" if set(states) == {"zero"} else "stale"
    return reading(verdict, zero_rows=states.count("zero"), rows=len(states))


class Turn(NamedTuple):
    """Result of layers that decoded in turn: wrong live rows, and whose rows the empty rows contain."""

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
        wrong = sum(_changed(x[:LIVE], 1 + i) for i, x in enumerate(read))
        for i, q in enumerate(queries):
            plant(q, 11 + i)
        seq_lens[LIVE:] = 0
        graph.replay()
        wrong += sum(_changed(x[:LIVE], 11 + i) for i, x in enumerate(read))
        return Turn(wrong, sorted({_owner(x[LIVE:], i) for i, x in enumerate(read)}))


def layers_in_turn(name: str, device: str, turn: Turn) -> Reading:
    """Whether layers that decode one after another disturb each other's live rows."""
    return reading("mixed" if turn.wrong_rows else "separate", wrong_rows=turn.wrong_rows, layers=LAYERS)


def in_empty_rows(name: str, device: str, turn: Turn) -> Reading:
    """Whose rows of the full step the empty ones hold: the worst, since layers may differ.

    In a shared buffer, the layer that decoded last finds its own rows.
    """
    worst_first = ("another layer's", "nobody's", "its own", "cleared")
    note = POOL if name == "no_buffer" else ""
    return reading(next(one for one in worst_first if one in turn.owners), owners=turn.owners, note=note)


def _owner(rows: torch.Tensor, layer: int) -> str:
    """Which layer's canaries these rows contain."""
    for other in range(LAYERS):
        if _changed(rows, 1 + other) == 0:
            return "its own" if other == layer else "another layer's"
    return "cleared" if set(row_states(rows)) == {"zero"} else "nobody's"
