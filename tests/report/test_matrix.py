"""The verdict matrix as text and as a terminal table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console
from tests.made import finding, not_run, off_on_off

from staleproof.device import Provenance
from staleproof.grades import real
from staleproof.incidents.registry import Incident
from staleproof.lab import Finding
from staleproof.report import conclusion, matrix

TEXT = """\
INTERPRETED

mla_padding  evidence      empty_row  amax                     off/on/off
-----------  ------------  ---------  -----------------------  ----------
unwritten    real+replica  leaked     pad_only                 -
ours         replica       clean      leaked (expected clean)  fixed
cutlass      -             not run    not run                  not run

mla_padding      evidence  ablation
---------------  --------  --------
all four         replica   leaked
no padding rows  replica   clean

not run: mla_padding, cutlass: needs <SM100> (empty_row; amax; off/on/off)
6 as expected, 1 not as expected, 3 not run"""


def findings() -> list[Finding]:
    name = "mla_padding"
    found = [
        finding(
            name,
            "empty_row",
            "unwritten",
            "leaked",
            expected="leaked",
            evidence=real("torch", "<empty>"),
            rows=3,
        ),
        finding(name, "empty_row", "ours", "clean", expected="clean"),
        finding(name, "amax", "unwritten", "pad_only", expected="pad_only"),
        finding(name, "amax", "ours", "leaked", expected="clean", us=1.25),
        not_run(name, "empty_row", "cutlass", "needs <SM100>"),
        not_run(name, "amax", "cutlass", "needs <SM100>"),
        off_on_off(name, "ours", off="leaked", on="clean", again="leaked"),
        not_run(name, "off/on/off", "cutlass", "needs <SM100>"),
        finding(name, "ablation", "all four", "leaked", expected="leaked"),
        finding(name, "ablation", "no padding rows", "clean", expected="clean"),
    ]
    return [replace(f, provenance=Provenance.INTERPRETED) for f in found]


def test_text_differs_between_machines_in_the_provenance_only():
    assert matrix.text(findings()) == TEXT
    elsewhere = [
        replace(f, provenance=Provenance.MEASURED, machine={"name": "NVIDIA H200"}, date="2030")
        for f in findings()
    ]
    assert matrix.text(elsewhere) == TEXT.replace("INTERPRETED", "MEASURED")
    assert matrix.text(findings()).isascii()


def test_no_panel_holds_two_incidents():
    both = [*findings(), finding("kv_reuse", "ablation", "all four", "clean")]
    shown = [m.incident for m in matrix.build(both)]
    assert shown == ["mla_padding", "mla_padding", "kv_reuse"]
    # The title is about this one alone.
    both[-1] = replace(both[-1], provenance=Provenance.RECORDED)
    titles = ["mla_padding, INTERPRETED"] * 2 + ["kv_reuse, RECORDED"]
    assert [str(table.title) for table in matrix.tables(both)] == titles


def test_not_run_without_a_reason_is_listed():
    absent = [replace(not_run("a", question, "v", "x"), note="") for question in "qr"]
    assert matrix.absences(absent) == ["not run: a, v: no reason given (q; r)"]


def test_unexpected_finding_is_not_hidden_by_a_later_good_one():
    bad = finding("a", "q", "v", "leaked", expected="clean")
    good = finding("a", "q", "v", "clean", expected="clean")
    for order in ([bad, good], [good, bad]):
        assert "leaked (expected clean)" in matrix.text(order)
    (panel,) = matrix.build([not_run("a", "q", "v", "no GPU"), good])
    assert panel.cells["v", "q"] is good


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        # A table is as wide as its cells, three columns more each, and a border.
        (79, [["empty_row", "amax", "off/on/off"]]),
        (78, [["empty_row", "amax"], ["off/on/off"]]),
        (65, [["empty_row"], ["amax"], ["off/on/off"]]),
    ],
)
def test_terminal_tables_split_where_they_do_not_fit(width, parts):
    *tables, ablation = matrix.tables(findings(), width)
    assert [[str(column.header) for column in table.columns] for table in tables] == [
        ["variant", "evidence", *part] for part in parts
    ]
    assert {str(table.title) for table in (*tables, ablation)} == {"mla_padding, INTERPRETED"}
    cells = {
        str(c.header): [(str(one), str(one.style)) for one in c._cells] for t in tables for c in t.columns
    }
    assert cells == {
        "variant": [(name, "") for name in ("unwritten", "ours", "cutlass")],
        "evidence": [(grade, "") for grade in ("real+replica", "replica", "-")],
        "empty_row": [("leaked", "green"), ("clean", "green"), ("not run", "dim")],
        "amax": [("pad_only", "green"), ("leaked (expected clean)", "bold red"), ("not run", "dim")],
        "off/on/off": [("-", "dim"), ("fixed", "green"), ("not run", "dim")],
    }
    assert [str(cell) for cell in ablation.columns[-1]._cells] == ["leaked", "clean"]
    console = Console(width=80)
    for table in tables if width == 79 else ():
        assert console.measure(table).maximum == width


def test_question_about_less_than_half_of_the_variants_has_its_own_panel():
    asked = {"all": "abcdef", "half": "abc", "few": "ab"}
    found = [finding("a", question, v, "clean") for question, variants in asked.items() for v in variants]
    assert [panel.questions for panel in matrix.build(found)] == [["all", "half"], ["few"]]


ABOUT = Incident(3, "A title", "03_a.ipynb", "it lies", served=("served a", "b"), tried=("late", "clamp"))
SAID = """\
a: A title
  wrong    q, v0: clean, expected leaked; q, v1: clean, expected leaked;
           q, v2: clean, expected leaked; q, v3: clean, expected leaked;
           q, v4: clean, expected leaked; and 1 more
  symptom  it looks true
  cause    it lies; not confirmed by this run
  fails    clamp (NaN bias: leaked; a: leaked); late (a: leaked); shared
           (cures none of 2 causes)
  fixed    clamp (in the other cases), ours (top 4; graphs; x), many (4
           cases)
  verdicts 18 as expected, 6 not as expected, 1 not run (INTERPRETED,
           evidence: real, replica)
  next     staleproof run a -v: every finding and the matrices

unknown
  verdicts 0 as expected, 0 not as expected, 1 not run

18 as expected, 6 not as expected, 2 not run
not run: 1 needs SM100, 1 no GPU (-v lists them)"""


def fixes() -> list[Finding]:
    held = ["clamp", "ours, top 4", "ours, graphs", "ours, x", *(f"many, {n}" for n in range(4))]
    found = [off_on_off("a", name, off="leaked", on="clean", again="leaked") for name in held]
    bad = {"off": "leaked", "on": "leaked", "again": "leaked", "expected": "not fixed"}
    found.insert(1, off_on_off("a", "clamp, NaN bias", **bad))
    # Of what was served, only what was tried as a remedy, and did not hold.
    for question, variant, verdict in (
        *(("served a", "late", "leaked"), ("b", "late", "clean"), ("b", "never", "leaked")),
        *(("served a", "clamp", "leaked"), ("q", "late", "leaked")),
    ):
        found.append(finding("a", question, variant, verdict, expected=verdict))
    for remedy, verdicts in (("shared", ("not cured", "helped")), ("one", ("not cured", "cured"))):
        found += [finding("a", f"matrix, {remedy}", f"{n}", v, expected=v) for n, v in enumerate(verdicts)]
    return found


def test_conclusion_names_symptom_cause_what_fails_and_what_is_fixed(monkeypatch):
    monkeypatch.setattr(conclusion, "INCIDENTS", {"a": ABOUT})
    monkeypatch.setattr(conclusion, "symptom", lambda name: "it looks true")
    bad = [finding("a", "q", f"v{n}", "clean", expected="leaked", evidence=real("x")) for n in range(6)]
    absent = [not_run("a", "q", "v", "needs SM100"), not_run("unknown", "q", "v", "no GPU")]
    found = [replace(one, provenance=Provenance.INTERPRETED) for one in (*bad, *fixes())]
    assert conclusion.text([*found, *absent], 72) == SAID
    good = conclusion.text(found[6:], 200).splitlines()
    assert good[:2] == ["a: A title", "  symptom  it looks true"]
    assert good[2] == "  cause    it lies"
    # One incident is not counted twice.
    assert good[-2:] == [
        "  verdicts 18 as expected, 0 not as expected, 0 not run (INTERPRETED, evidence: replica)",
        "  next     make lab: the walkthrough, notebooks/03_a.ipynb",
    ]
    # What fails by itself is not said again of each question in which it was served.
    late = [finding("a", "served a", "late", "leaked", expected="leaked")]
    late.append(off_on_off("a", "late", off="leaked", on="leaked", again="leaked", expected="not fixed"))
    assert conclusion.text(late).splitlines()[3] == "  fails    late (leaked)"
    wrong = off_on_off("a", "three", off="leaked", on="clean", again="leaked", wrong="x", expected="wrong")
    said = conclusion.text([wrong]).splitlines()
    assert said[3:5] == ["  fails    three (wrong)", "  fixed    no fix was shown to hold by this run"]


@pytest.mark.parametrize(
    ("reasons", "width", "line"),
    [
        ([], 80, []),
        (["no GPU"], 80, ["not run: 1 no GPU (-v lists them)"]),
        (["a" * 30, "b" * 40, "b" * 40], 60, ["not run: 3 (-v)"]),
        (["b", "b", "a" * 50], 60, ["not run: 2 b, 1 other (-v)"]),
    ],
)
def test_not_run_line_has_the_reasons_that_fit(reasons, width, line):
    absent = [replace(not_run("a", "q", str(n), "x"), note=why) for n, why in enumerate(reasons)]
    assert conclusion.not_run_line([finding("a", "q", "v", "clean"), *absent], width) == line
