"""What the tests of benches share: made-up answers of engines, and what a bench makes of them."""

from __future__ import annotations

import json

import pytest

from staleproof.cases.finding import Evidence, Finding, Grade
from staleproof.cases.run import Table
from staleproof.engine import bench as benches
from staleproof.engine.bench import Bench, Results
from staleproof.engine.orders import EngineResult


def results(**by_order: dict[str, object]) -> Results:
    return Results({name: EngineResult(answers, None) for name, answers in by_order.items()})


def asked(bench: Bench, told: Results, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Finding]:
    """The findings of a bench whose engines told this."""
    monkeypatch.setattr(benches, "unavailable", lambda device: None)
    monkeypatch.setattr(benches, "real", lambda package: Evidence(Grade.REAL, "vLLM 0.22.1"))
    here = Bench(bench.name, bench.about, bench.orders, bench.cases, together=lambda *_, **__: told.items())
    answers = {(said.question, said.variant): said for said in Table("engine", here.rows()).run("cuda")}
    for said in answers.values():
        # A run is written only if every finding can be.
        json.loads(said.to_json())
    return answers
