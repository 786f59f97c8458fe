"""What the tests of benches share: made-up answers of engines, and what a bench makes of them."""

from __future__ import annotations

import json

import pytest

from staleproof.cases.answers import Answer
from staleproof.cases.finding import Evidence, Grade
from staleproof.engine import bench as benches
from staleproof.engine.bench import Bench, Results
from staleproof.engine.orders import Told


def results(**by_order: dict[str, object]) -> Results:
    return Results({name: Told(answers, None) for name, answers in by_order.items()})


def asked(bench: Bench, told: Results, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Answer]:
    """The answers of a bench whose engines told this."""
    monkeypatch.setattr(benches, "unavailable", lambda device: None)
    monkeypatch.setattr(benches, "real", lambda package: Evidence(Grade.REAL, "vLLM 0.22.1"))
    here = Bench(bench.name, bench.about, bench.orders, bench.cells, together=lambda *_, **__: told.items())
    answers = {(said.question, said.variant): said for said in here.ask("cuda")}
    for said in answers.values():
        # A run is written only if every finding can be.
        json.dumps(said.numbers, sort_keys=True)
    return answers
