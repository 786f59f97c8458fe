"""What the commands print."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console
from tests.made import finding, measurement, not_run, off_on_off

from staleproof import runs as store
from staleproof.device import Provenance
from staleproof.grades import real
from staleproof.machine import Capability
from staleproof.report import conclusion, matrix, terminal
from staleproof.runs import write_findings

ROW = measurement("ours")
FIX = off_on_off("a", "v", off="leaked", on="clean", again="leaked")


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (finding("a", "q", "v", "clean"), "a, q, v: clean  (replica)"),
        (finding("a", "q", "v", "clean", expected="clean", rows=3), "a, q, v: clean  (replica)  [rows 3]"),
        (finding("a", "q", "v", "leaked", expected="clean"), "a, q, v: leaked (expected clean)  (replica)"),
        (
            finding("a", "q", "v", "leaked", amax=1 / 3, on="clean"),
            "a, q, v: leaked  (replica)  [amax 0.333333, on clean]",
        ),
        (finding("a", "q", "v", "clean", evidence=real("x 1")), "a, q, v: clean  (real, x 1)"),
        (FIX, f"a, off/on/off, v: fixed  {FIX.three.text}  (replica)"),
        (not_run("a", "q", "v", "needs SM100"), "a, q, v: not run: needs SM100"),
    ],
)
def test_finding_is_one_line(found, line):
    assert terminal.finding_text(replace(found, provenance=Provenance.MEASURED)) == f"MEASURED  {line}"


def test_machine_is_printed_with_what_it_lacks(capsys, monkeypatch):
    monkeypatch.setattr(terminal.machine, "packages", lambda: {"vllm": None, "nbval": "0.11"})
    terminal.print_machine([Capability("a module", False, "no nvcc"), Capability("another", True, "1.2")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("machine  ")
    assert lines[4:6] == ["vllm                not installed", "nbval               0.11"]
    assert "skip  a module            no nvcc" in lines
    assert "yes   another             1.2" in lines


def test_comparison_prints_verdicts_before_timings(tmp_path, capsys):
    def run(name: str, rows: list[dict[str, object]], **verdicts: str) -> store.Run:
        found = [
            not_run("a", "q", v, "no GPU") if verdict == "absent" else finding("a", "q", v, verdict)
            for v, verdict in verdicts.items()
        ]
        store.write(tmp_path / name, found, rows)
        return store.read(tmp_path / name)

    rows = [ROW | {"x_value": n} for n in (1, 2, 3)]
    slower = [row | {"p50": p50} for row, p50 in zip(rows, (1.0, 8.0, 3.0), strict=True)]
    one = run("one", rows, same="clean", other="clean", mine="clean", none="absent")
    two = run("two", slower, same="clean", other="leaked", yours="clean", none="absent")
    assert not terminal.print_comparison(one, two)
    assert capsys.readouterr().out.splitlines() == [
        f"DIFFERENT VERDICTS: {store.compare(one.findings, two.findings).summary}",
        "3 timings, second / first: 0.50 to 4.00, median 1.50",
        f"first   {one.title}",
        f"second  {two.title}",
        "",
        "mismatch        a, q, other: clean / leaked",
        "only in first   a, q, mine",
        "only in second  a, q, yours",
        "in neither      a, q, none",
        "",
        "timings, first -> second (second / first)",
        *(
            f"clear, ours, graph, live {n}: 2 us (p20 1.9, p80 2.2) -> {p50} ({ratio})"
            for n, p50, ratio in ((1, 1, "0.50"), (2, 8, "4.00"), (3, 3, "1.50"))
        ),
    ]
    assert terminal.print_comparison(run("three", [], v="clean"), run("four", [], v="clean"))
    out = capsys.readouterr().out.splitlines()
    assert (out[0], len(out)) == (
        "the same verdicts: 1 match, 0 mismatch, 0 only in the first, 0 only in the second",
        4,
    )
    assert terminal.print_comparison(run("five", [], v="clean"), run("six", [], w="clean"))
    assert capsys.readouterr().out.startswith("no case ran in both: 0 match")


def test_kept_findings_are_printed_with_commit_and_date_of_the_others(tmp_path, monkeypatch, capsys):
    mine, other = finding("a", "q", "v", "clean"), finding("b", "q", "v", "clean")
    path = tmp_path / "findings.jsonl"
    write_findings(path, [mine, other])
    monkeypatch.chdir(tmp_path)
    terminal.print_kept(path, [mine])
    (line,) = store.origins([*store.read_kept(path)][1:])
    assert capsys.readouterr().out.splitlines() == ["findings  findings.jsonl", f"kept      {line}"]
    monkeypatch.chdir("/")
    terminal.print_kept(path, [mine, other])
    assert capsys.readouterr().out == f"findings  {path.relative_to('/')}\n"


def test_verdicts_are_conclusion_recorded_runs_and_on_request_matrices(tmp_path, monkeypatch, capsys):
    found = [finding("a", "q", "v", "clean"), not_run("a", "q", "w", "no GPU")]
    for name, incident, verdict in (("r", "a", "clean"), ("s", "a", "leaked"), ("t", "b", "clean")):
        other = [finding("b", "r", "v", "clean")] if name == "r" else []
        store.write(tmp_path / name, [finding(incident, "q", "v", verdict), *other], [])
    runs = store.read_all(tmp_path)
    beside = []
    for run in (run.only(run.findings[:1]) for run in runs[:2]):
        summary = store.compare(found, run.findings).summary
        beside += [f"RECORDED  {run.title}", f"{' ' * 10}{summary} (first: here)"]
    # Which verdict differs, and how.
    beside.append(f"{' ' * 10}{found[0].key.text}: here clean, recorded leaked")
    for verbose in (False, True):
        terminal.print_verdicts(found, runs, *([True] if verbose else []))
        lines = capsys.readouterr().out.splitlines()
        more = ["", *matrix.text(found).splitlines()] if verbose else []
        own = ["", *conclusion.text(found, 100).splitlines()]
        assert lines == [*own, *beside, *more]
    shown = Console(width=60, force_terminal=True, color_system=None)
    monkeypatch.setattr(terminal, "console", lambda: shown)
    terminal.print_verdicts(found, [], True)
    assert capsys.readouterr().out.splitlines()[-1] == "not run: a, w: no GPU (q)"


@pytest.mark.parametrize("columns", [None, 30])
def test_lines_are_wrapped_in_a_terminal_only(columns, monkeypatch, capsys):
    shown = Console(width=columns, force_terminal=True, color_system=None) if columns else Console()
    monkeypatch.setattr(terminal, "console", lambda: shown)
    assert terminal.width() == columns
    terminal.say("  one two three four five six seven\n/a/path/" + "x" * 30)
    first = (
        ["  one two three four five six", "      seven"]
        if columns
        else ["  one two three four five six seven"]
    )
    assert capsys.readouterr().out.splitlines() == [*first, "/a/path/" + "x" * 30]


def test_texts_without_and_with_a_remedy_are_side_by_side(capsys):
    sick, well = "The sea" + "<|endoftext|>" * 3, "The sea is a vast and mysterious realm, teeming with life."
    texts = {"prompts_off": ["the sea?"], "texts_off": [sick], "texts_on": [well]}
    fixed = off_on_off("a", "words", off="leaked", on="clean", again="leaked", **texts)
    terminal.print_words([FIX, fixed])
    assert capsys.readouterr().out.splitlines() == [
        "",
        "a, off/on/off, words: what users read without it, and with it",
        "  the sea?",
        f"    {'The sea<|endoftext|> x 3':<47} The sea is a vast and mysterious realm, teeming",
        f"    {'':<47} with life.",
    ]
