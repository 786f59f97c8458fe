"""Recorded engine runs: one section for each notebook."""

from __future__ import annotations

from dataclasses import replace
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


LOGITS = "3 of 9 rows of logits"
BITS = {"logits": 3, "of": 9, "tokens": 2}
KERNELS = "compiled kernels; sets of bits of prefill and of decode"
SPANS = {"profile": 2**30, "kv cache": 3 * 2**20, "capture": 5 * 2**10}
SLOW = {"slowdown_percent": 1.234, "interval_percent": [-0.5, 2.0], "step_ms_off": 7.0, "rounds": 4}
SLOW |= {"tokens_per_s_off": 100, "tokens_per_s_on": 98}
FIFTHS = {"requests": 50, "nan_by_fifth": [0, 1], "changed_bits_by_fifth": [2, 3]}
FIFTHS |= {"blocks_by_fifth": {"given": [4], "nonzero": [5], "nan_in_tail": [6]}}
BY_FIFTH = "by fifth of 50 requests: NaN [0, 1], changed [2, 3]"
BY_FIFTH += "; blocks given [4], not zero [5], NaN behind the prompt [6]"
BUSY = {"padded": 7, "with NaN": 5, "with Inf": 6, "live rows with NaN": 1, "live rows with Inf": 2}
EXPERTS = "NaN at expert 0: 1 live and 2 padding rows; rows that name it 5 → 6"
EXPERTS += "; NaN at expert 7: 3 live and 4 padding rows; rows that name it 8 → 9"
PHASES = (
    "profile: the device gave 1 GiB, unexplained 1 GiB; kv cache: the device gave 3 MiB, unexplained -7 B"
)
# Question -> the numbers of a finding, and the line of them.
FIGURES = [
    (
        "NaN rows",
        {"live": {}, "padding": {"3 of 8": {"attention": "5", "mlp": "4"}}, "sizes": ["3 of 8"]},
        "padding rows, 3 of 8: 5",
    ),
    ("NaN rows", {"live": {}, "padding": {"all": {"mlp": "4"}}, "sizes": []}, "padding rows, all: 4"),
    ("NaN rows", {"live": {}, "padding": {}, "sizes": ["8", "3 of 8"]}, "no row has a NaN: 8, 3 of 8"),
    (
        "live logits, off / on",
        {"off_against_on": BITS, "without_padding": BITS | {"tokens": 0}},
        f"all rounds: {LOGITS}, 2 tokens; rounds without padding: {LOGITS}, 0 tokens",
    ),
    ("live logits, 3 / 8 live", {"a_b": BITS, "why": "x"}, f"a b: {LOGITS}, 2 tokens"),
    (
        "live logits, equal engines",
        {
            "engines_with_equal_kernels": [["a", "b"], ["c"]],
            "engines_with_equal_bits": {
                "8 of 8": {"prefill": [1], "decode": [1, 2]},
                "3 of 8": {"prefill": [1, 2, 3], "decode": []},
                "3 of 3": {"prefill": [1, 2], "decode": [1]},
            },
        },
        f"3 engines with 2 sets of {KERNELS}, 8 of 8: 1 and 2, 3 of 3: 2 and 1",
    ),
    (
        "live logits with a sound bias",
        {
            "steps_with_other_logits": 1,
            "steps_with_other_logits_off_again": 2,
            "requests_with_other_tokens": 3,
        },
        "steps with other logits 1, off again 2; 3 requests with other tokens",
    ),
    (
        "dynamic fp8 quantizers",
        {"scale_alone_scale_with_nan_values_changed": {"a": [1, 2, 3], "b": [4, 5, 6]}},
        "values of sound rows changed: a 3, b 6",
    ),
    ("undrained block ids", {"ids": [0, 7], "requests": [1, 9]}, "7 ids after 9 requests"),
    ("zeroing off", FIFTHS, BY_FIFTH),
    ("zeroing off, cache of NaN", FIFTHS, BY_FIFTH),
    ("staging race", {"blocks_not_zeroed": 4}, "4 blocks reach attention not zeroed"),
    (
        "experts named twice",
        {
            "live_and_padding_rows_by_expert": {"0": [1, 2], "7": [3, 4]},
            "rows_that_name_the_expert": {"0": [5, 6], "7": [8, 9]},
            "nan_tokens_by_expert": {"0": 0, "7": 3},
            "kind": ["greedy", "grouped"],
            "top_k": 8,
        },
        f"{EXPERTS}; 3 NaN tokens at 7; greedy, grouped, top 8",
    ),
    (
        "router logits of padded steps",
        {"busy rank": BUSY},
        "busy rank: 7 padded steps, 5 with NaN, 6 with Inf; live rows 3",
    ),
    (
        "death after start",
        {"predicted": 2**30, "taken": 3 * 2**29, "died": "OutOfMemoryError: all of it"},
        "predicted 1 GiB, taken 1.5 GiB; OutOfMemoryError",
    ),
    (
        "account of the start",
        {
            "phases": {name: {"device": SPANS[name]} for name in sorted(SPANS)},
            "unexplained_bytes": SPANS | {"kv cache": -7},
        },
        f"{PHASES}; capture: the device gave 5 KiB, unexplained 5 KiB",
    ),
    ("memory of graphs", {"estimated": None, "taken": 1023}, "estimated 0 B, taken 1023 B"),
    ("counts of the watch", {"want": [5, 6], "steps": 3}, "5 padding rows a layer in 3 steps"),
    ("cost of a step", SLOW, "+1.23 % [-0.50, +2.00] of 7.000 ms a step; 100 → 98 tokens/s, 4 rounds"),
    # Numbers of another release of the bench are shown as they are, the first three.
    ("NaN rows", {"rows": 3, "b": 1, "c": 2, "d": 4}, "rows 3, b 1, c 2"),
    ("a question of old", {"rows": 3}, "rows 3"),
]


@pytest.mark.parametrize(("question", "numbers", "line"), FIGURES)
def test_the_figures_of_a_finding_are_this_line(question, numbers, line):
    found = finding("engine", question, "v", "clean", **numbers)
    assert (engine.seen(found), engine.seen(replace(found, note="by hand"))) == (line, f"{line}; by hand")


def test_stages_are_named_in_order_of_execution_and_a_fix_by_its_three_answers():
    assert engine.seen(LEAK) == "live rows, 3 of 8: 3 in 2 of 4 layers; in mlp"
    assert engine.seen(FIXED) == "pad_only → clean → pad_only"
    three = {
        f"{name}_{state}": n
        for name in ("nan_tokens", "blocks_not_zeroed")
        for n, state in enumerate(("off", "on", "again"))
    }
    fixed = off_on_off(
        "engine", "v", off="leaked", on="clean", again="leaked", ids_off=[3, 4], ids_on=[1, 2], **three
    )
    assert engine.seen(fixed) == (
        "leaked → clean → leaked; blocks not zeroed 0 → 1 → 2; nan tokens 0 → 1 → 2; ids 4 → 2"
    )
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
        f"| NaN rows | {MLA} | leaked | {engine.seen(LEAK)} |",
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


def test_a_notebook_ends_with_the_chapter_of_the_recorded_runs(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    engine.in_a_real_engine("kv_reuse")
    assert [one.data for one in shown] == ["\n".join(engine.chapter("kv_reuse", store.read_all()))]


def test_the_remark_of_a_run_stands_above_its_table():
    busy = run(LEAK)
    busy.environment["remark"] = "The host was busy."
    assert "The host was busy." in engine.chapter("mla_padding", [busy])
