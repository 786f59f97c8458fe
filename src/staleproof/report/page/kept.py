"""What the workbook keeps besides runs and notebooks, gathered for the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from staleproof.cases import predictions, store
from staleproof.cases.predictions import Outcome
from staleproof.cases.store import Run
from staleproof.contract.contract import Row
from staleproof.report import engine, service
from staleproof.report.audit import recorded_audits
from staleproof.report.page import cards
from staleproof.triage import table

# Release of vLLM -> question -> two answers: without the patches and with them.
Patched = Mapping[str, Mapping[str, Sequence[str]]]


@dataclass(frozen=True)
class Kept:
    """What the workbook keeps besides runs and notebooks; each may be missing.

    Attributes:
        patched: what tests on real releases of vLLM found (``workbook/patches.json``).
        compiled: what the compiler says for other GPUs (``workbook/architectures.json``).
        predicted: verdicts predicted for SM100, and what the recorded runs say of them.
        audited: rows of recorded audits (``workbook/audits``).
        served: what :func:`staleproof.report.service.section` returns.
        engine: the same of benches in a real engine.
        documents: pages of the workbook, file name -> markdown.
        triage: the triage table, as HTML.
        do_now: incident -> what an operator does now.
        origins: a line for each incident: which source the findings are of.
    """

    patched: Patched | None = None
    compiled: Mapping[str, Any] | None = None
    predicted: Sequence[Outcome] = ()
    audited: Sequence[Row] = ()
    served: str = ""
    engine: str = ""
    documents: Mapping[str, str] = field(default_factory=dict)
    triage: str = ""
    do_now: Mapping[str, Sequence[Markup]] = field(default_factory=dict)
    origins: Sequence[str] = ()


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON file of the workbook; ``None`` if it was never made."""
    return dict(json.loads(path.read_text())) if path.exists() else None


def kept_in_the_workbook(runs: Sequence[Run], origins: Sequence[str] = ()) -> Kept:
    """Everything that the report shows besides findings and notebooks.

    Args:
        runs: recorded runs, which the predictions are compared with.
        origins: which source the findings of this machine are of, a line an incident.
    """
    book = store.checkout() / "workbook"
    names = "patches", "architectures", "plugin-faults", "soak-cpu", "soak-engine"
    patched, compiled, faults, on_cpu, on_gpu = (read_json(book / f"{name}.json") for name in names)
    soaks = {"vLLM's scheduler on a CPU": on_cpu, "A whole engine on a GPU": on_gpu}
    do_now: dict[str, list[Markup]] = {}
    for row in table.rows():
        do_now.setdefault(row.incident, []).append(cards.do_now(row))
    return Kept(
        origins=origins,
        triage=table.html(lambda row: f"#{row.incident}"),
        do_now=do_now,
        patched=patched,
        compiled=compiled,
        predicted=predictions.of_all(runs),
        audited=recorded_audits(),
        engine=engine.section(),
        served=service.section(faults, {title: soak for title, soak in soaks.items() if soak}),
        documents={path.name: path.read_text() for path in sorted(book.glob("*.md"))},
    )
