"""One layer with its decode buffer, ready to serve, and layers that decode in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from staleproof.evidence.canary import plant, row_states
from staleproof.evidence.ledger import owned_tensors
from staleproof.graph import capture
from staleproof.incidents.decode_buffer.model import Attention
from staleproof.incidents.decode_buffer.setups import SMALL, Wiring, process

ROWS, LIVE, LAYERS = 8, 3, 4


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


def changed(x: torch.Tensor, stage: int) -> int:
    """The number of rows in which some canary of ``stage`` was overwritten."""
    return sum(state != "unwritten" for state in row_states(x, stage))


@contextlib.contextmanager
def serving(variant: str, device: str, lanes: int = 1) -> Iterator[tuple[Attention, list[torch.Tensor]]]:
    """A layer that decoded once for each micro-batch, and is ready to serve; the query of each."""
    with process(variant) as wiring:
        attn = part(wiring, device)
        queries = [query(attn, ROWS, 1 + lane) for lane in range(lanes)]
        for lane, q in enumerate(queries):
            attn.decode(q, ones(ROWS, device), lane)
        wiring.ready()
        yield attn, queries


def kept(attn: Attention) -> dict[int, torch.Tensor]:
    """Address -> memory that the layer keeps after a call, without weights."""
    weights = {p.data_ptr() for p in attn.parameters()}
    owned = {t.untyped_storage().data_ptr(): t for _, _, t in owned_tensors(attn)}
    return {at: t for at, t in owned.items() if at not in weights}


class Turn(NamedTuple):
    """Result of layers that decoded in turn: wrong live rows, and whose rows the empty rows contain."""

    wrong_rows: int
    owners: list[str]


def in_turn(variant: str, device: str) -> Turn:
    """Layers that decode one after another, with one batch in flight, over one captured step.

    Each layer's output is read before the next layer decodes, as a model does. First all rows are live,
    then three of eight.
    """
    with process(variant) as wiring:
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
        wrong = sum(changed(x[:LIVE], 1 + i) for i, x in enumerate(read))
        for i, q in enumerate(queries):
            plant(q, 11 + i)
        seq_lens[LIVE:] = 0
        graph.replay()
        wrong += sum(changed(x[:LIVE], 11 + i) for i, x in enumerate(read))
        return Turn(wrong, sorted({_owner(x[LIVE:], i) for i, x in enumerate(read)}))


def _owner(rows: torch.Tensor, layer: int) -> str:
    """Which layer's canaries these rows contain."""
    for other in range(LAYERS):
        if changed(rows, 1 + other) == 0:
            return "its own" if other == layer else "another layer's"
    return "cleared" if set(row_states(rows)) == {"zero"} else "nobody's"
