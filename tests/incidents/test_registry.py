"""The registry puts the cases of an incident's table."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from staleproof import device as devices
from staleproof.cases.case import Reading, each, reading
from staleproof.cases.finding import Finding, Key, finding
from staleproof.cases.run import Table
from staleproof.incidents import registry
from staleproof.incidents.registry import INCIDENTS, Incident

ABOUT = Incident(99, "a title", "99_a_title.ipynb", "a cause")
NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def install(monkeypatch: pytest.MonkeyPatch, table: object) -> None:
    module = types.ModuleType("staleproof.incidents.fake.cases")
    module.TABLE = table  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(devices, "has_triton", lambda: True)


def test_the_table_is_asked_on_the_device_with_progress(monkeypatch):
    lines = []

    def ask(variant: str, device: str) -> Reading:
        return reading("clean", device=device)

    install(monkeypatch, Table("fake", each("q", "rows", ["v"], ask, expect="clean")))
    (found,) = registry.put_questions("fake", "cuda", lines.append)
    assert (found.key[:3], found.numbers) == (("fake", "q", "v"), {"device": "cuda"})
    assert lines == ["fake 1/1: q, v"]


def test_closing_it_closes_the_table(monkeypatch):
    events = []

    def run(device: str, progress: object) -> Iterator[Finding]:
        try:
            yield finding(Key("fake", "q", "v"), "rows", "clean")
            events.append("asked on")
        finally:
            events.append("closed")

    install(monkeypatch, types.SimpleNamespace(incident="fake", run=run))
    answers = registry.put_questions("fake", "cpu", lambda line: None)
    next(answers)
    answers.close()
    assert events == ["closed"]


def test_without_triton_one_line_says_so(monkeypatch):
    monkeypatch.setattr(devices, "has_triton", lambda: False)
    (found,) = registry.put_questions("mla_padding", "cpu", lambda line: None)
    assert (found.verdict, found.note) == ("not run", devices.TRITON_MISSING)


def test_a_table_of_another_name_is_refused_before_it_is_asked(monkeypatch):
    install(monkeypatch, Table("fakes", each("q", "rows", ["v"], pytest.fail, expect="clean")))
    with pytest.raises(ValueError, match=r"^TABLE of fake: expected 'fake', got 'fakes'"):
        next(registry.put_questions("fake", "cpu", print))


@pytest.mark.parametrize(
    ("name", "about", "said"),
    [
        ("kv_reuse", ABOUT, "expected a new name, got one that is there"),
        ("ghost", ABOUT, "expected its cases in incidents/ghost/cases.py, got no such file"),
        ("ghost", ABOUT[:4], "expected Incident.*, got "),
        ("ghost", ABOUT._replace(number="99"), "expected Incident.*, got "),
        ("ghost", ABOUT._replace(summary=None), "expected Incident.*, got "),
    ],
)
def test_an_incident_that_is_added_is_new_and_whole(name, about, said):
    before = dict(INCIDENTS)
    with pytest.raises(ValueError, match=rf"^INCIDENTS\['{name}'\]: {said}"):
        INCIDENTS[name] = about
    assert before == INCIDENTS


def test_incidents_are_numbered():
    assert [about.number for about in INCIDENTS.values()] == [*range(1, len(INCIDENTS) + 1)]


def test_a_title_is_the_heading_of_its_notebook():
    for about in INCIDENTS.values():
        cells = json.loads((NOTEBOOKS / about.notebook).read_text())["cells"]
        heading = "".join(cells[0]["source"]).splitlines()[0]
        assert heading == f"# {about.notebook[:2]} · {about.title}"


@pytest.mark.parametrize("name", INCIDENTS)
def test_remedies_that_were_tried_are_variants_of_the_questions_that_serve_them(name):
    about = INCIDENTS[name]
    cases = registry.table_of(name).cases
    assert {case.key.question for case in cases} >= {*about.served}
    assert {case.key.variant for case in cases if case.key.question in about.served} >= {*about.tried}
