"""Findings and notebooks that the tests of the report show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbformat import v4

from staleproof.cases.finding import OFF_ON_OFF, REPLICA, Evidence, Finding, Key, Three, finding, not_run

INCIDENT = "mla_padding"


def found(
    question: str,
    variant: str,
    verdict: str,
    expected: str | None = None,
    incident: str = INCIDENT,
    words: str = "rows",
    evidence: Evidence = REPLICA,
    **numbers: Any,
) -> Finding:
    key = Key(incident, question, variant)
    return finding(key, words, verdict, expected=expected, evidence=evidence, **numbers)


def absent(question: str, variant: str, why: str, incident: str = INCIDENT) -> Finding:
    return not_run(Key(incident, question, variant), "rows", why)


def fix(
    variant: str,
    on: str = "clean",
    wrong: str = "",
    incident: str = INCIDENT,
    expected: str | None = None,
    **numbers: Any,
) -> Finding:
    """Off / on / off of a remedy that behaves so; its verdict is expected by default."""
    three = Three("rows", "leaked", on, "leaked", right=None if on != "clean" else not wrong, wrong=wrong)
    key = Key(incident, OFF_ON_OFF, variant)
    return finding(key, "fix", three.verdict, expected=expected or three.verdict, three=three, **numbers)


def write(path: Path, *cells: nbformat.NotebookNode) -> Path:
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path


def drawing(printed: str = "", **about: str) -> nbformat.NotebookNode:
    """A cell that shows a picture, and prints."""
    outputs = [v4.new_output("stream", text=printed)] if printed else []
    shown = v4.new_output("display_data", {"image/svg+xml": "<svg><path d='M 0 0'/></svg>"})
    shown.metadata = {"image/svg+xml": about} if about else {}
    return v4.new_code_cell("draw()", outputs=[*outputs, shown])
