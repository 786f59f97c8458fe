"""Recorded engine runs: one section for each notebook."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.made import finding, not_run

from staleproof.cases import store
from staleproof.cases.finding import Finding
from staleproof.cases.store import Run
from staleproof.engine import hybrid, mla
from staleproof.engine.cases import BENCHES
from staleproof.incidents.registry import INCIDENTS
from staleproof.report import engine
from tools import engine_cost

MLA = "TRITON_MLA, full graphs"
LEAK = finding(
    "engine",
    mla.NAN_ROWS,
    MLA,
    "leaked",
    live={"3 of 8": {"mlp": "3 in 2 of 4 layers"}},
    in_order_of_execution=["attention", "mlp"],
)
ABSENT = not_run("engine", hybrid.BITS, hybrid.KIMI, "start: ValueError: no such model <here>")


def run(*findings: Finding, name: str = "h200-engine") -> Run:
    return Run(Path(name), {"machine": {"name": "NVIDIA H200"}, "date": "2026-11-21"}, list(findings), [])


def test_every_question_has_a_chapter_and_a_line_of_figures():
    assert {*engine.CHAPTERS} == {*BENCHES, "cost"}
    cases = [*engine_cost.table().cases, *(case for bench in BENCHES.values() for case in bench.cases)]
    assert {case.key.question for case in cases} == {*engine.SEEN}
    # Recorded, too: otherwise no notebook would show what becomes of them.
    assert {*engine.SEEN} <= {one.question for run in store.read_all() for one in run.findings if one.ran}


def test_a_title_has_the_release_of_what_ran():
    assert engine.title(run(ABSENT, replace(LEAK, of="vLLM 1.0"))).startswith("vLLM 1.0, NVIDIA H200, ")
    assert engine.title(run(ABSENT)).startswith("vLLM, NVIDIA H200, ")


@pytest.mark.parametrize("runs", [[], [run(finding("mla_padding", "q", "v", "clean"))]])
def test_without_an_engine_run_it_says_so(runs):
    assert engine.chapter("mla_padding", runs) == [engine.NONE]


BUSY = {"padded": 7, "with NaN": 5, "with Inf": 6, "live rows with NaN": 1, "live rows with Inf": 2}
BUSY_LINE = "busy rank: 7 padded steps, 5 with NaN, 6 with Inf; live rows 3"
# What no recorded run has. Of numbers of another release of the bench the first three are shown as they are.
UNRECORDED = [
    ("NaN rows", {"live": {}, "padding": {}, "sizes": ["8", "3 of 8"]}, "no row has a NaN: 8, 3 of 8"),
    ("NaN rows", {"rows": 3, "b": 1, "c": 2, "d": 4}, "rows 3, b 1, c 2"),
    ("a question of old", {"rows": 3}, "rows 3"),
    ("NaN rows", {"live": {}, "padding": {"all": {"mlp": "4", "attention": "5"}}}, "padding rows, all: 5"),
    ("router logits of padded steps", {"busy rank": BUSY}, BUSY_LINE),
    ("memory of graphs", {"estimated": None, "taken": 1023}, "estimated 0 B, taken 1023 B"),
    ("memory of graphs", {"estimated": 0, "taken": -7168}, "estimated 0 B, taken -7 KiB"),
]


@pytest.mark.parametrize(("question", "numbers", "line"), UNRECORDED)
def test_the_figures_of_a_finding_are_this_line(question, numbers, line):
    found = finding("engine", question, "v", "clean", **numbers)
    assert (engine.seen(found), engine.seen(replace(found, note="by hand"))) == (line, f"{line}; by hand")


def test_a_question_that_was_not_run_says_why():
    assert engine.seen(ABSENT) == ABSENT.note


def test_a_chapter_is_this():
    found = replace(LEAK, of="vLLM 1.0")
    mixed = run(found, finding("mla_padding", "q", "v", "clean"))
    lines = engine.chapter("mla_padding", [mixed, run(ABSENT, found)])
    assert lines == [
        "",
        f"RECORDED, vLLM 1.0, {run(found).title}",
        "",
        "| asked | of | answer | seen |",
        "|---|---|---|---|",
        f"| NaN rows | {MLA} | leaked | live rows, 3 of 8: 3 in 2 of 4 layers; in mlp |",
    ]
    # A run in which this incident was not asked has no table; a bar in a cell would end it.
    stale = finding(
        "engine", "undrained block ids", "Qwen3 dense", "grows", ids=[0, 9], requests=[0, 1], note="a|b"
    )
    assert engine.chapter("moe_routing", [run(LEAK)]) == [engine.NONE]
    assert engine.chapter("kv_reuse", [run(stale, ABSENT)])[-1] == "\n1 more questions were not run."
    assert "1 requests; a/b |" in "\n".join(engine.chapter("kv_reuse", [run(stale)]))
    # What another chapter shows is no matter of this one's title.
    both = run(found, replace(stale, date="2020-01-31"))
    assert {name: "2020" in engine.chapter(name, [both])[1] for name in ("mla_padding", "kv_reuse")} == {
        "mla_padding": False,
        "kv_reuse": True,
    }


@pytest.mark.parametrize("incident", sorted({*engine.CHAPTERS.values()}))
def test_the_rows_of_a_chapter_are_those_that_its_notebook_holds(incident):
    """Every figure of a recorded run, as its committed notebook shows it."""
    notebook = json.loads((store.checkout() / "notebooks" / INCIDENTS[incident].notebook).read_text())
    *_, section = (cell for cell in notebook["cells"] if "in_a_real_engine" in "".join(cell["source"]))
    (shown,) = section["outputs"]
    text = "".join(shown["data"]["text/markdown"])
    rows = [line for line in engine.chapter(incident, store.read_all()) if line.startswith("|")]
    assert [line for line in text.splitlines() if line.startswith("|")] == rows != []


def test_a_notebook_ends_with_the_chapter_of_the_recorded_runs(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    engine.in_a_real_engine("kv_reuse")
    assert [one.data for one in shown] == ["\n".join(engine.chapter("kv_reuse", store.read_all()))]


def test_the_remark_of_a_run_stands_above_its_table():
    busy = run(LEAK)
    busy.environment["remark"] = "The host was busy."
    assert "The host was busy." in engine.chapter("mla_padding", [busy])
