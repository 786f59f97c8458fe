"""Recorded engine runs: one section for each notebook."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.made import finding, not_run, off_on_off

from staleproof.cases import store
from staleproof.cases.finding import Finding
from staleproof.cases.store import Run
from staleproof.engine import hybrid, mla
from staleproof.engine.cases import BENCHES
from staleproof.report import engine
from tools import engine_cost

MLA = "TRITON_MLA, full graphs"
FIXED = off_on_off("engine", MLA, off="pad_only", on="clean", again="pad_only")
LEAK = finding(
    "engine",
    mla.NAN_ROWS,
    MLA,
    "leaked",
    live={"3 of 8": {"mlp": "3 in 2 of 4 layers"}},
    in_order_of_execution=["attention", "mlp"],
    padding={},
    sizes=["3 of 8"],
)
ABSENT = not_run("engine", hybrid.BITS, hybrid.KIMI, "start: ValueError: no such model <here>")


def run(*findings: Finding, name: str = "h200-engine") -> Run:
    return Run(Path(name), {"machine": {"name": "NVIDIA H200"}, "date": "2026-11-21"}, list(findings), [])


def test_every_question_has_a_chapter_and_a_line_of_figures():
    assert {*engine.CHAPTERS} == {*BENCHES, "cost"}
    cases = [*engine_cost.table().cases, *(case for bench in BENCHES.values() for case in bench.cases)]
    assert {case.key.question for case in cases} == {*engine.SEEN}


@pytest.mark.parametrize("runs", [[], [run(finding("mla_padding", "q", "v", "clean"))]])
def test_without_an_engine_run_it_says_so(runs):
    assert engine.chapter("mla_padding", runs) == [engine.NONE]


def test_a_notebook_shows_its_own_incident_only():
    stale = finding("engine", "undrained block ids", "Qwen3 dense", "grows", ids=[0, 9], requests=[0, 1000])
    lines = "\n".join(engine.chapter("kv_reuse", [run(FIXED, stale, ABSENT)]))
    assert "| undrained block ids | Qwen3 dense | grows | 9 ids after 1000 requests |" in lines
    assert "1 more questions were not run" in lines
    assert "pad_only" not in lines
    assert "pad_only" in "\n".join(engine.chapter("mla_padding", [run(FIXED, stale)]))


def test_stages_are_named_in_order_of_execution_and_phases_in_theirs():
    assert engine.seen(LEAK) == "live rows, 3 of 8: 3 in 2 of 4 layers; in mlp"
    phases = {name: {"device": 2**20} for name in ("capture", "kv cache", "profile")}
    account = finding(
        "engine",
        "account of the start",
        "V1",
        "balances",
        phases=phases,
        unexplained_bytes=dict.fromkeys(phases, 0),
    )
    assert engine.seen(account).startswith("profile: the device gave 1 MiB, unexplained 0 B; kv cache")


def test_numbers_of_another_release_of_the_bench_are_shown_as_they_are():
    old = finding("engine", mla.NAN_ROWS, MLA, "clean", rows=3)
    assert engine.seen(old) == "rows 3"


@pytest.mark.parametrize(
    ("incident", "said"),
    [
        ("mla_padding", "padding reaches live rows"),
        ("decode_buffer", "predicted 4 GiB, taken 4 GiB"),
        ("moe_routing", "duplicates"),
        ("kv_reuse", "ids after 1000 requests"),
    ],
)
def test_the_recorded_run_has_something_for_each_notebook(incident, said):
    assert said in "\n".join(engine.chapter(incident, store.read_all()))


def test_the_remark_of_a_run_stands_above_its_table():
    busy = run(LEAK)
    busy.environment["remark"] = "The host was busy."
    assert "The host was busy." in engine.chapter("mla_padding", [busy])
