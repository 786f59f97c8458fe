"""What the tests of benches share: made-up answers of engines, and what a bench makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from staleproof.cases.finding import Evidence, Finding, Grade
from staleproof.cases.run import Table
from staleproof.engine import bench as benches
from staleproof.engine import cases
from staleproof.engine.bench import Bench
from staleproof.engine.orders import EngineResult

Answers = dict[str, EngineResult]


def results(**by_order: Mapping[str, object]) -> Answers:
    return {name: EngineResult(answers, None) for name, answers in by_order.items()}


def findings(table: Table, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Finding]:
    """The findings of a table, as on a machine with a GPU and a vLLM."""
    monkeypatch.setattr(benches, "unavailable", lambda device: None)
    monkeypatch.setattr(benches, "real", lambda package: Evidence(Grade.REAL, "vLLM 0.22.1"))
    answers = {(said.question, said.variant): said for said in table.run("cuda")}
    for said in answers.values():
        # A run is written only if every finding can be.
        json.loads(said.to_json())
    return answers


def asked(bench: Bench, told: Answers, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Finding]:
    """The findings of a bench whose engines told this."""
    monkeypatch.setattr(cases, "run", lambda *_: iter(told.items()))
    return findings(cases.table(bench.name), monkeypatch)
