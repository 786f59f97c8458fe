"""Commands that read or write recorded runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import MEASUREMENT, absent, clean, interrupted, leaked, one_line, wrong
from tests.made import finding

from staleproof import device, machine, runs
from staleproof.cli import app as cli
from staleproof.lab import Finding
from staleproof.runs import read_findings


def _record(root: Path, findings: list[Finding], name: str = "a-gpu") -> Path:
    folder = root / "workbook/runs" / name
    runs.write(folder, findings, [MEASUREMENT])
    return folder


@pytest.mark.parametrize("command", ["run", "list", "compare"])
def test_a_spoilt_recorded_run_is_named_and_hides_no_other(root, incident, capsys, command):
    """What else makes a run one that cannot be read: tests/test_runs.py."""
    incident(clean)
    folder = _record(root, [leaked(), clean()])
    _record(root, [leaked(), clean()], "b-gpu")
    findings = folder / "findings.jsonl"
    findings.write_text(findings.read_text()[:40])
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert cli.main([command, *(["a-gpu", "b-gpu"] if command == "compare" else [])]) == 2
    captured = capsys.readouterr()
    said = one_line(captured.err)
    assert "truncated" in said
    assert str(folder) in said
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    if command != "compare":
        assert captured.out.count(runs.read(root / "workbook/runs/b-gpu").title) == 1


def test_run_shows_recorded_runs_beside(root, incident, capsys, monkeypatch):
    incident(leaked, clean)
    _record(root, [leaked(), wrong()])
    assert cli.main(["run"]) == 0
    out = capsys.readouterr().out
    name = device.machine().name
    assert f"RECORDED  {name}, {leaked().origin}" in out
    assert "1 match, 0 mismatch, 1 only in the first, 1 only in the second" in out


def test_record_on_a_cpu_writes_findings_and_no_timing(root, incident, capsys, monkeypatch):
    incident(leaked, clean)
    (root / "benchmarks/clear.py").write_text("raise SystemError('nothing is timed here')")
    monkeypatch.setattr(device, "select", lambda *_: "cpu")
    assert cli.main(["record"]) == 0
    assert "verdicts 2 as expected, 0 not as expected" in capsys.readouterr().out
    (run,) = runs.read_all()
    assert run.folder.name == device.machine().slug
    assert [f.verdict for f in run.findings] == ["leaked", "clean"]
    assert {f.provenance for f in run.findings} == {device.Provenance.RECORDED}
    assert run.measurements == []
    assert [p.name for p in run.folder.parent.iterdir()] == [run.folder.name]


@pytest.mark.parametrize("second", [wrong, interrupted])
def test_record_never_replaces_a_run_by_a_failed_one(root, incident, capsys, second):
    incident(leaked)
    assert cli.main(["record"]) == 0
    (before,) = runs.read_all()
    incident(clean, second)
    assert cli.main(["record"]) == (1 if second is wrong else 130)
    (after,) = runs.read_all()
    assert after == before
    assert [p.name for p in before.folder.parent.iterdir()] == [before.folder.name]
    # What was found is not lost either.
    kept = root / "workbook/_build/findings.jsonl"
    assert read_findings(kept)[0].variant == "ours"
    said = capsys.readouterr().err.splitlines()[-1]
    assert second is interrupted or said.endswith(f"not recorded, a verdict is not as expected: {kept}")


BENCHMARK = """
from staleproof import measure
def rows():
    for provider in {providers}:
        if measure.checked(provider, provider == "right", "row 3 is stale"):
            yield {row!r} | {{"provider": provider}}
"""


def test_a_wrong_result_of_ours_is_1_and_records_nothing(root, incident, capsys, monkeypatch):
    incident(leaked)
    monkeypatch.setattr(device, "select", lambda *_: "cuda")
    assert cli.main(["record"]) == 0
    (before,) = runs.read_all()
    text = BENCHMARK.format(providers=["right", "staleproof, all rows"], row=MEASUREMENT)
    (root / "benchmarks/clear.py").write_text(text)
    capsys.readouterr()
    assert cli.main(["record"]) == 1
    said = one_line(capsys.readouterr().err)
    assert said == "staleproof: clear: no speed for a wrong result: staleproof, all rows: row 3 is stale"
    assert runs.read_all() == [before]


def test_record_on_a_gpu_keeps_every_row_but_a_peers_wrong_one(root, incident, capsys, monkeypatch, tmp_path):
    incident(leaked)
    path = root / "benchmarks/clear.py"
    path.write_text(BENCHMARK.format(providers=["right", "wrong peer", "right"], row=MEASUREMENT))
    monkeypatch.setattr(device, "select", lambda *_: "cuda")
    assert cli.main(["record", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "wrong peer: refused, row 3 is stale" in said
    (run,) = runs.read_all(tmp_path / "out")
    assert said.splitlines()[-2:] == [
        "clear, right, graph, live 1: 2 us (p20 1.9, p80 2.2)",
        f"recorded: {run.folder} (1 findings, 2 measurements)",
    ]
    stamp = {"provider": "right", "benchmark": "clear", "commit": machine.commit()}
    assert run.measurements == [MEASUREMENT | stamp] * 2


def test_record_leaves_a_folder_that_is_no_run_alone(root, incident, capsys):
    asked = incident(clean)
    mine = root / "workbook/runs" / device.machine().slug
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    assert cli.main(["record"]) == 2
    assert "not a recorded run" in one_line(capsys.readouterr().err)
    assert asked == []
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_compare_is_1_where_a_verdict_differs_0_of_a_run_with_itself_and_says_which_is_no_run(root, capsys):
    """What it prints: tests/report/test_terminal.py."""
    _record(root, [leaked(), clean()], "a-gpu")
    changed = finding("fake", "empty_row", "ours", "leaked", expected="clean")
    folder = _record(root, [leaked(), changed, absent()], "b-gpu")
    for second, code, said in ((str(folder), 1, "1 match, 1 mismatch"), ("a-gpu", 0, "2 match, 0 mismatch")):
        assert cli.main(["compare", "a-gpu", second]) == code
        assert said in capsys.readouterr().out
    assert cli.main(["compare", "a-gpu", "there"]) == 2
    assert one_line(capsys.readouterr().err).startswith("staleproof: second: there: neither a run folder")
