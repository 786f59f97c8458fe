"""What notebook cells print."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.made import finding, not_run, off_on_off

from staleproof import device as devices
from staleproof import runs as store
from staleproof.grades import real
from staleproof.lab import Outcome
from staleproof.report import show


def test_start_prints_one_banner_line(device, capsys, monkeypatch):
    assert show.start("auto") == device
    m = devices.machine()
    driver = f" · driver {m.driver}" if m.driver else ""
    versions = f"Python {m.python} · torch {m.torch} · triton {m.triton} · flashinfer {m.flashinfer}"
    line = f"machine: {m.name}{driver} · {versions} · vllm {m.vllm} · {devices.provenance()}\n"
    assert capsys.readouterr().out == line
    monkeypatch.setattr(devices, "machine", lambda: replace(m, driver="580.1"))
    show.start("auto")
    assert f"machine: {m.name} · driver 580.1 · Python" in capsys.readouterr().out


def test_observed_holds_what_came_out_and_what_was_claimed():
    seen = show.observed("rows", 5, 3, real("torch 2"))
    assert (seen.verdict, seen.expected, seen.failed) == ("otherwise", "as claimed", True)
    assert (seen.numbers, seen.grade, seen.of) == ({"found": "5", "claimed": "3"}, "real", "torch 2")


def test_cell_that_ends_in_a_verdict_shows_its_line_only(capsys):
    pytest.importorskip("IPython")
    from IPython.core.formatters import DisplayFormatter

    printed = show.verdict("H1 held", show.observed("rows", 3, 3))
    assert capsys.readouterr().out == f"{devices.provenance()} replica: H1 held\n"
    assert DisplayFormatter().format(printed) == ({}, {})
    assert (bool(printed), repr(printed), repr(show.Printed(0))) == (True, "True", "False")


ABSENT = not_run("mla_padding", "served", "theirs", "needs an SM100 GPU")


def test_verdict_of_what_did_not_run_prints_the_reason_instead(capsys):
    here = show.observed("rows", 3, 3)
    assert not show.verdict("H1 held", [here, ABSENT], ("as claimed", "leaked"))
    assert not show.verdict("H1 held", [here, replace(ABSENT, expected=None)])
    assert not show.ran([here, ABSENT, replace(ABSENT, variant="ours", note="no GPU")])
    reason = "not run, so no verdict: served, theirs: needs an SM100 GPU\n"
    other = "not run, so no verdict: served, ours: no GPU\n"
    assert capsys.readouterr().out == 3 * reason + other


@pytest.mark.parametrize("says", [None, ("as claimed", "as claimed")])
def test_finding_with_another_verdict_stops_the_cell(says, capsys):
    found = [show.observed("rows", 3, 3), show.observed("columns", 35, 3)]
    with pytest.raises(AssertionError, match="columns"):
        show.verdict("H1 held", found, says)
    assert capsys.readouterr().out == ""


def test_expected_verdicts_by_variant_and_in_order(capsys):
    found = [finding("mla_padding", "served", name, name) for name in ("clean", "leaked")]
    assert show.verdict("both", found, {"clean": "clean", "leaked": "leaked"})
    assert show.verdict("both", found, ("clean", "leaked"))
    assert show.verdict("the first", replace(found[0], expected="leaked"), "clean")
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_verdict_without_findings_or_expected_verdict_is_refused():
    with pytest.raises(ValueError, match="findings: expected those that the verdict rests on, got none"):
        show.verdict("H1 held", [])
    with pytest.raises(ValueError, match="expected: expected a verdict for every finding"):
        show.verdict("H1 held", finding("mla_padding", "served", "theirs", "nan"))
    with pytest.raises(ValueError, match="expected: expected 1 verdicts, got 2"):
        show.verdict("H1 held", show.observed("rows", 3, 3), ("as claimed", "as claimed"))


def test_cell_has_the_colour_of_the_answer_and_a_plain_word_has_none():
    good, bad = (finding("a", "q", variant, variant) for variant in ("clean", "finite"))
    rows = [("<a>", bad), ("b", good), ("c", ABSENT), ("d", ("finite", Outcome.GOOD)), ("e", "finite")]
    shown = show.Table(("variant", "verdict"), rows)._repr_html_()
    assert re.sub(r"<[^>]+>", " ", shown).split() == [
        *("variant", "verdict", "&lt;a&gt;", "finite", "b", "clean", "c", "not", "run"),
        *("d", "finite", "e", "finite"),
    ]
    colours = re.findall(r"text-align: left; ([^']*)'>(?:finite|clean|not run)<", shown)
    looks = [show.STYLES[outcome] for outcome in ("bad", "good", "not run", "good")]
    assert colours == [*looks, ""]


def test_fixes_are_coloured_run_by_run_and_what_did_not_run_is_left_out(monkeypatch):
    shown = []
    monkeypatch.setattr(show, "_show", shown.append)
    claim = off_on_off("a", "ours", off="leaked", on="clean", again="leaked")
    show.fixes([claim, replace(ABSENT, question="off/on/off")])
    (table,) = shown
    assert table.rows == [["ours", "leaked", "clean", "leaked", "fixed"]]
    assert table.styles == [["", *(show.STYLES[one] for one in ("bad", "good", "bad", "good"))]]


def test_table_in_a_notebook_is_displayed_and_not_printed(monkeypatch, capsys):
    ipython = pytest.importorskip("IPython")
    shown: list[object] = []
    monkeypatch.setattr(ipython, "get_ipython", lambda: "a kernel")
    monkeypatch.setattr("IPython.display.display", shown.append)
    bad = finding("mla_padding", "empty row", "theirs", "unwritten")
    show.answers([bad])
    assert capsys.readouterr().out == ""
    (table,) = shown
    assert repr(table).splitlines()[-1].split() == ["theirs", "unwritten"]
    assert table.styles == [["", show.STYLES["bad"]]]


def test_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="rows: expected 2 cells a row, got 1"):
        show.table(("a", "b"), [("only one",)])


def test_answers_show_every_question_and_the_reason_of_what_did_not_run(capsys):
    show.answers(
        [
            finding("mla_padding", "empty row", "ours", "zero", note="it ran"),
            finding("mla_padding", "past seq_len", "ours", "clean"),
            not_run("mla_padding", "empty row", "theirs", "needs an SM100 GPU"),
            not_run("mla_padding", "past seq_len", "theirs", "needs vLLM"),
            finding("mla_padding", "empty row", "late", "zero"),
        ]
    )
    assert capsys.readouterr().out.splitlines() == [
        "        empty row  past seq_len",
        "------  ---------  ------------",
        "ours    zero       clean",
        "theirs  not run    not run",
        "late    zero       -",
        "not run: theirs: needs an SM100 GPU",
        "not run: theirs: needs vLLM",
    ]


def test_recorded_answers_come_with_machine_and_date(runs, capsys):
    answers = [
        finding("mla_padding", question, "vllm_triton", verdict)
        for question, verdict in (("empty row", "nan"), ("past seq_len", "clean"))
    ]
    other = finding("kv_reuse", "empty row", "theirs", "nan")
    store.write(runs / "gpu", [*answers, other], [])
    (run,) = store.read_all(runs)
    # A spoilt run is named, and hides no other.
    store.write(runs / "cut", answers, [])
    (runs / "cut/environment.json").write_text("{")
    show.recorded_answers("mla_padding", "another question")
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in said] == ["not shown", "no recorded run has this question yet"]
    shutil.rmtree(runs / "cut")
    show.recorded_answers("mla_padding", "empty row")
    title, _, _, line = capsys.readouterr().out.splitlines()
    assert title == f"RECORDED {run.title}"
    assert line.split() == ["vllm_triton", "nan"]
    # Several questions are one table; what was not run there is counted.
    late = [*answers, not_run("mla_padding", "empty row", "cutlass", "needs an SM100 GPU")]
    store.write(runs / "gpu", [replace(one, of="vLLM 1.0") for one in late], [])
    show.recorded_answers("mla_padding", "empty row", "past seq_len", variants=("vllm", "cutlass"))
    title, _, _, *lines, count = capsys.readouterr().out.splitlines()
    assert title.startswith(f"RECORDED vLLM 1.0, {run.machine}, ")
    assert [line.split()[-2:] for line in lines] == [["vllm_triton", "nan"], ["vllm_triton", "clean"]]
    assert count == "not run there: 1"
    show.recorded_answers("mla_padding", "empty row", variants="another")
    assert capsys.readouterr().out.startswith("no recorded run has this question yet")


def test_control_is_a_slider_a_toggle_or_a_menu(monkeypatch):
    ipywidgets = pytest.importorskip("ipywidgets")
    seen: list[object] = []
    monkeypatch.setattr(ipywidgets, "interact", lambda draw, **by: seen.append((draw, by)))
    monkeypatch.setattr(show, "has_front_end", lambda: True)
    knobs = {"live": range(1, 17), "amax": ("torch.max", "fmax"), "remedy": ("a", "b", "c")}
    show.turn(print, lambda: seen.append("table"), **knobs)
    ((draw, handles),) = seen
    assert draw is print
    live, amax, remedy = handles.values()
    assert (live.min, live.max, live.step, live.value) == (1, 16, 1, 1)
    assert (type(amax).__name__, amax.options) == ("ToggleButtons", ("torch.max", "fmax"))
    assert (type(remedy).__name__, remedy.options) == ("Dropdown", ("a", "b", "c"))
    show.turn(print, lambda: seen.append("table"), every=range(2, 20, 4))
    slider = seen[1][1]["every"]
    assert (slider.min, slider.max, slider.step, slider.value) == (2, 18, 4, 2)


@pytest.mark.parametrize(
    ("shell", "session", "there"),
    [({"x": 1}, None, False), ({"__vsc_ipynb_file__": "a"}, None, True), (None, "a.ipynb", True)],
)
def test_control_needs_a_front_end(shell, session, there, monkeypatch):
    pytest.importorskip("ipywidgets")
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    if session:
        monkeypatch.setenv("JPY_SESSION_NAME", session)
    kernel = None if shell is None else SimpleNamespace(user_ns=shell)
    monkeypatch.setattr("IPython.get_ipython", lambda: kernel)
    assert show.has_front_end() is there


def test_without_ipywidgets_the_table_is_shown(monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "01.ipynb")
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    seen: list[str] = []
    show.turn(print, lambda: seen.append("table"), live=range(1, 17))
    assert seen == ["table"]
