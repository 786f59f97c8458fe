"""What the tests of benches share: made-up answers of engines, and what a bench makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from staleproof.cases.finding import Evidence, Finding, Grade
from staleproof.cases.run import Table
from staleproof.engine import bench as benches
from staleproof.engine import cases
from staleproof.engine.bench import Bench, Results
from staleproof.engine.orders import EngineResult

# By the name of the engine: what its probes told, or also how it failed.
Engines = Mapping[str, Mapping[str, object] | EngineResult]


def three(name: str, off: object, on: object, again: object = None) -> dict[str, object]:
    """The engines of off / on / off; the last one tells what the first does, unless it is given."""
    told = off, on, off if again is None else again
    return {f"{name}, {state}": one for state, one in zip(benches.STATES, told, strict=True)}


def results(engines: Engines) -> dict[str, EngineResult]:
    return {
        n: one if isinstance(one, EngineResult) else EngineResult(one, None) for n, one in engines.items()
    }


def ended(engines: Engines) -> Results:
    """The results of engines that have ended."""
    return Results(iter(()), results(engines))


def findings(table: Table, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Finding]:
    """The findings of a table, as on a machine with a GPU and a vLLM."""
    monkeypatch.setattr(benches, "unavailable", lambda device: None)
    monkeypatch.setattr(benches, "real", lambda package: Evidence(Grade.REAL, "vLLM 0.22.1"))
    answers = {(said.question, said.variant): said for said in table.run("cuda")}
    for said in answers.values():
        # A run is written only if every finding can be.
        json.loads(said.to_json())
    return answers


def asked(bench: Bench, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Finding]:
    """The findings of a bench whose engines told this."""
    monkeypatch.setattr(cases, "run", lambda *_: iter(results(engines).items()))
    return findings(cases.table(bench.name), monkeypatch)
