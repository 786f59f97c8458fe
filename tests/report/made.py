"""Findings and notebooks that the tests of the report show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbformat import v4
from tests.made import finding, not_run, off_on_off

from staleproof.cases.finding import Finding

INCIDENT = "mla_padding"


def found(
    question: str,
    variant: str,
    verdict: str,
    expected: str | None = None,
    incident: str = INCIDENT,
    **more: Any,
) -> Finding:
    return finding(incident, question, variant, verdict, expected=expected, **more)


def absent(question: str, variant: str, why: str, incident: str = INCIDENT) -> Finding:
    return not_run(incident, question, variant, why)


def fix(variant: str, on: str = "clean", wrong: str | None = None, incident: str = INCIDENT) -> Finding:
    """Off / on / off of a remedy that behaves so; its verdict is the expected one."""
    expected = "not fixed" if on != "clean" else "fixed" if wrong is None else "wrong"
    return off_on_off(incident, variant, off="leaked", on=on, again="leaked", wrong=wrong, expected=expected)


def write(path: Path, *cells: nbformat.NotebookNode) -> Path:
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path


def drawing(printed: str = "", **about: str) -> nbformat.NotebookNode:
    """A cell that shows a picture, and prints."""
    outputs = [v4.new_output("stream", text=printed)] if printed else []
    shown = v4.new_output("display_data", {"image/svg+xml": "<svg><path d='M 0 0'/></svg>"})
    shown.metadata = {"image/svg+xml": about} if about else {}
    return v4.new_code_cell("draw()", outputs=[*outputs, shown])
