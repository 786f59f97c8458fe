"""The incidents that are listed, and their questions."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from staleproof import device as devices
from staleproof import lab
from staleproof.incidents import registry
from staleproof.incidents.registry import INCIDENTS

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> lab.Incident:
    """A folder ``fake`` with one question, which says that it is of this incident."""
    module = types.ModuleType("staleproof.incidents.fake.questions")
    module.incident = incident = lab.Incident(name)  # type: ignore[attr-defined]
    incident.question("q", ["v"], expect="clean")(lambda variant, device: lab.good("clean", device=device))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(devices, "has_triton", lambda: True)
    return incident


def test_questions_run_on_the_device_with_progress(monkeypatch):
    lines = []
    install(monkeypatch, "fake")
    (found,) = registry.ask_all("fake", "cuda", lines.append)
    assert (found.key[:3], found.numbers) == (("fake", "q", "v"), {"device": "cuda"})
    assert lines == ["fake 1/1: q, v"]


def test_without_triton_nothing_runs_and_one_line_gives_the_reason(monkeypatch):
    monkeypatch.setattr(devices, "has_triton", lambda: False)
    (found,) = registry.ask_all("mla_padding", "cpu", lambda line: None)
    assert (found.verdict, found.note) == ("not run", devices.TRITON_MISSING)


def test_questions_under_the_name_of_another_incident_are_refused(monkeypatch):
    install(monkeypatch, "fakes")
    with pytest.raises(ValueError, match=r"^incident of fake: expected 'fake', got 'fakes'"):
        next(registry.ask_all("fake", "cpu", print))


def test_title_is_the_heading_of_the_notebook():
    for about in INCIDENTS.values():
        cells = json.loads((NOTEBOOKS / about.notebook).read_text())["cells"]
        heading = "".join(cells[0]["source"]).splitlines()[0]
        assert heading == f"# {about.notebook[:2]} · {about.title}"


@pytest.mark.parametrize("name", INCIDENTS)
def test_remedies_that_were_tried_are_variants_of_the_questions_that_serve_them(name):
    about = INCIDENTS[name]
    cases = registry.questions_of(name).cases
    assert {case.key.question for case in cases} >= {*about.served}
    assert {case.key.variant for case in cases if case.key.question in about.served} >= {*about.tried}
