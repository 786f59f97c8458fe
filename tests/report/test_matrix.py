"""The verdict matrix as text and as a terminal table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console
from tests.made import finding, not_run, off_on_off

from staleproof.cases.finding import Finding, real
from staleproof.device import Provenance
from staleproof.report import conclusion, matrix

TEXT = """\
INTERPRETED

mla_padding  asked of      empty_row  amax                     off/on/off
-----------  ------------  ---------  -----------------------  ----------
unwritten    real+replica  leaked     pad_only                 -
ours         replica       clean      leaked (expected clean)  fixed
cutlass      -             not run    not run                  not run

mla_padding      asked of  ablation
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


def test_text_is_this_and_differs_between_machines_in_the_word_only():
    assert matrix.text(findings()) == TEXT
    elsewhere = [
        replace(f, provenance=Provenance.MEASURED, machine={"name": "NVIDIA H200"}, date="2030")
        for f in findings()
    ]
    assert matrix.text(elsewhere) == TEXT.replace("INTERPRETED", "MEASURED")
    assert matrix.text(findings()).isascii()


def test_rows_and_columns_keep_the_order_of_asking():
    built, ablation = matrix.build(findings())
    assert ablation.questions == ["ablation"]
    assert built.variants == ["unwritten", "ours", "cutlass"]
    assert built.questions == ["empty_row", "amax", "off/on/off"]


def test_no_panel_holds_two_incidents():
    both = [*findings(), finding("kv_reuse", "ablation", "all four", "clean")]
    shown = [m.incident for m in matrix.build(both)]
    assert shown == ["mla_padding", "mla_padding", "kv_reuse"]


def test_fixed_is_not_printed_where_the_reproduction_did_not_fail():
    shown = matrix.text([off_on_off("a", "ours", off="clean", on="clean", again="leaked")])
    assert "not reproduced (expected fixed)" in shown
    assert "1 not as expected" in shown


def test_an_unexpected_finding_is_not_hidden_by_a_later_good_one():
    bad = finding("a", "q", "v", "leaked", expected="clean")
    good = finding("a", "q", "v", "clean", expected="clean")
    for order in ([bad, good], [good, bad]):
        assert "leaked (expected clean)" in matrix.text(order)


def test_not_run_is_counted_apart():
    assert matrix.counts([not_run("a", "q", "v", "no GPU")]) == (
        "0 as expected, 0 not as expected, 1 not run"
    )


def test_the_terminal_table_shows_every_cell():
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as captured:
        for table in matrix.tables(findings()):
            console.print(table)
    drawn = captured.get()
    for word in ("INTERPRETED", "unwritten", "leaked (expected clean)", "not run", "fixed"):
        assert word in drawn


def test_an_unexpected_cell_is_red_and_an_expected_one_green():
    (table,) = matrix.tables([f for f in findings() if f.question == "amax"], 200)
    styles = {cell.plain: str(cell.style) for cell in table.columns[-1]._cells}
    assert styles == {"pad_only": "green", "leaked (expected clean)": "bold red", "not run": "dim"}


def test_a_question_put_to_less_than_half_of_the_variants_has_a_panel_of_its_own():
    asked = {"all": "abcde", "most": "abc", "few": "ab"}
    found = [finding("a", question, v, "clean") for question, variants in asked.items() for v in variants]
    assert [panel.questions for panel in matrix.build(found)] == [["all", "most"], ["few"]]


@pytest.mark.parametrize("expected", ["clean", "leaked"])
def test_a_run_with_an_unexpected_verdict_confirms_no_cause(expected):
    said = conclusion.text([finding("mla_padding", "empty_row", "v", "leaked", expected=expected)], 400)
    assert ("; not confirmed by this run" in said) is (expected == "clean")
