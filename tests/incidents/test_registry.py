"""The registry asks an incident's table, and believes no claim that its numbers do not show."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from staleproof import device as devices
from staleproof.cases.answers import answer
from staleproof.cases.case import Question, Questions
from staleproof.cases.finding import Finding, finding, read_findings
from staleproof.incidents import registry
from staleproof.incidents.registry import INCIDENTS

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def install(monkeypatch: pytest.MonkeyPatch, questions: object) -> None:
    module = types.ModuleType("staleproof.incidents.fake.questions")
    module.QUESTIONS = questions  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(devices, "has_triton", lambda: True)


def test_the_table_is_asked_on_the_device_with_progress(monkeypatch):
    lines = []
    install(monkeypatch, Questions("fake", Question("q", ["v"], lambda variant, device: answer(device))))
    (found,) = registry.put_questions("fake", "cuda", lines.append)
    assert (found.key, found.verdict) == (("fake", "q", "v"), "cuda")
    assert lines == ["fake 1/1: q, v"]


def test_fixed_needs_three_verdicts_that_show_it(monkeypatch):
    install(monkeypatch, Questions("fake", Question("off/on/off", ["v"], lambda *_: "fixed")))
    (found,) = registry.put_questions("fake", "cpu", lambda line: None)
    assert (found.verdict, found.failed) == ("not reproduced", True)


def test_closing_it_closes_the_table(monkeypatch):
    events = []

    def run(device: str, progress: object) -> Iterator[Finding]:
        try:
            yield finding("fake", "q", "v", "clean")
            events.append("asked on")
        finally:
            events.append("closed")

    install(monkeypatch, types.SimpleNamespace(run=run))
    answers = registry.put_questions("fake", "cpu", lambda line: None)
    next(answers)
    answers.close()
    assert events == ["closed"]


def test_without_triton_one_line_says_so(monkeypatch):
    monkeypatch.setattr(devices, "has_triton", lambda: False)
    (found,) = registry.put_questions("mla_padding", "cpu", lambda line: None)
    assert (found.verdict, found.note) == ("not run", devices.TRITON_MISSING)


def test_each_incident_has_a_number_a_notebook_and_questions():
    assert [about.number for about in INCIDENTS.values()] == [*range(1, len(INCIDENTS) + 1)]
    for name, about in INCIDENTS.items():
        assert (NOTEBOOKS / about.notebook).is_file()
        assert (Path(registry.__file__).parent / name / "questions.py").is_file()


def test_a_title_is_the_heading_of_its_notebook():
    for about in INCIDENTS.values():
        cells = json.loads((NOTEBOOKS / about.notebook).read_text())["cells"]
        heading = "".join(cells[0]["source"]).splitlines()[0]
        assert heading == f"# {about.number:02} · {about.title}"


@pytest.mark.parametrize("name", INCIDENTS)
def test_remedies_that_were_tried_are_variants_of_the_questions_that_serve_them(name):
    about = INCIDENTS[name]
    found = read_findings(NOTEBOOKS.parent / "workbook/runs/nvidia-h200/findings.jsonl")
    served = {f.variant for f in found if f.incident == name and f.question in about.served}
    assert {*about.tried} <= served
    assert {f.question for f in found if f.incident == name} >= {*about.served}


def test_steps_are_what_a_run_says_it_does():
    module = importlib.import_module("staleproof.incidents.scale_padding.questions")
    assert registry.steps("scale_padding") == [f"scale_padding: {step}" for step in module.QUESTIONS.steps]
    assert len(registry.steps("scale_padding")) == sum(len(row.subjects) for row in module.QUESTIONS.rows)
