"""The command line: what it prints, keeps, refuses, and which exit code says so."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from staleproof import cli, device
from staleproof.harness import environment, recorded
from staleproof.harness.findings import Finding, finding, not_run, off_on_off, read_findings, write_findings
from staleproof.incidents.registry import INCIDENTS, Incident

MEASUREMENT = {
    "kernel": "clear",
    "provider": "staleproof",
    "mode": "graph",
    "x_name": "live",
    "x_value": 1,
    "p50": 2.0,
    "p20": 1.9,
    "p80": 2.2,
    "unit": "us",
    "bytes": 4_000_000,
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own, so that no test touches this one."""
    for name in ("notebooks", "benchmarks", "workbook/runs"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(recorded, "checkout", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def incident(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Replaces the registry by one incident, ``fake``, that answers as it is told.

    Returns what was asked for: one entry, the device, each time the questions were put.
    """

    def install(*answers: Callable[[], Finding]) -> list[str]:
        asked: list[str] = []

        def run(device_name: str, progress: Callable[[str], None]) -> Iterator[Finding]:
            asked.append(device_name)
            progress("the fake step")
            for answer in answers:
                yield answer()

        experiment = types.ModuleType("staleproof.incidents.fake.questions")
        experiment.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "staleproof.incidents.fake.questions", experiment)
        monkeypatch.setattr(device, "has_triton", lambda: True)
        for name in [*INCIDENTS]:
            monkeypatch.delitem(INCIDENTS, name)
        monkeypatch.setitem(INCIDENTS, "fake", Incident(1, "a fake", "01_fake.ipynb", "it lies"))
        return asked

    return install


def leaked() -> Finding:
    return finding("fake", "empty_row", "broken", "leaked", expected="leaked", bad_rows=3)


def clean() -> Finding:
    return finding("fake", "empty_row", "ours", "clean", expected="clean")


def wrong() -> Finding:
    return finding("fake", "empty_row", "remedy", "clean", expected="leaked")


def absent() -> Finding:
    return not_run("fake", "empty_row", "cutlass", "needs SM100")


def verified() -> Finding:
    return off_on_off("fake", "ours", off="leaked", on="clean", off_again="leaked")


def interrupted() -> Finding:
    raise KeyboardInterrupt


def one_line(captured: str) -> str:
    lines = captured.strip().splitlines()
    assert len(lines) == 1, captured
    return lines[0]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)


def test_help_answers_at_once_and_imports_no_torch():
    code = (
        "import sys\nfrom staleproof.cli import main\n"
        "code = main(['--help'])\n"
        "print(sorted({'torch', 'triton', 'pandas', 'nbconvert', 'rich'} & set(sys.modules)))\n"
        "sys.exit(code)"
    )
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        done = python(code)
        seconds.append(time.perf_counter() - begin)
    assert done.returncode == 0, done.stderr
    assert "compare" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
    # The promise is 0.3 s on a quiet machine; tests share theirs.
    assert min(seconds) < 1.0


def test_importing_the_package_imports_no_torch():
    done = python("import sys, staleproof as s; print('torch' in sys.modules, set(s.__all__) <= set(dir(s)))")
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_run_prints_findings_then_matrix_and_keeps_them(root, incident, capsys):
    asked = incident(leaked, clean, absent, verified)
    assert cli.main(["run"]) == 0
    out = capsys.readouterr().out
    word = device.provenance()
    assert f"{word}  fake, empty_row, broken: leaked  [bad_rows 3]" in out
    assert f"{word}  fake, empty_row, cutlass: not run: needs SM100" in out
    assert out.index("broken: leaked") < out.index("fake     empty_row\n")
    assert "3 as expected, 0 not as expected, 1 not run" in out
    assert asked == ["cuda" if word == "MEASURED" else "cpu"]
    kept = read_findings(root / "workbook/_build/findings.jsonl")
    assert [f.verdict for f in kept] == ["leaked", "clean", "not run", "fixed"]


@pytest.mark.parametrize("name", ["fake", "1"])
def test_run_takes_a_name_or_a_number_and_asks_once(root, incident, name):
    asked = incident(clean)
    assert cli.main(["run", name, "fake"]) == 0
    assert len(asked) == 1


def test_run_exits_1_where_a_verdict_is_not_as_expected(root, incident, capsys):
    incident(clean, wrong)
    assert cli.main(["run"]) == 1
    captured = capsys.readouterr()
    assert "clean (expected leaked)" in captured.out
    assert one_line(captured.err) == "staleproof: 1 verdicts are not as expected"


def test_not_run_is_no_failure_and_no_pass(root, incident, capsys):
    incident(absent)
    assert cli.main(["run"]) == 0
    assert "0 as expected, 0 not as expected, 1 not run" in capsys.readouterr().out


@pytest.mark.parametrize(("off", "off_again"), [("clean", "leaked"), ("leaked", "clean")])
def test_run_refuses_fixed_where_the_reproduction_did_not_fail(root, incident, capsys, off, off_again):
    def boast() -> Finding:
        seen = {"off": off, "on": "clean", "off_again": off_again}
        return finding("fake", "off/on/off", "ours", "fixed", expected="fixed", **seen)

    incident(boast)
    assert cli.main(["run"]) == 1
    out = capsys.readouterr().out
    assert "ours: not reproduced (expected fixed)" in out
    assert "ours: fixed" not in out
    (kept,) = read_findings(root / "workbook/_build/findings.jsonl")
    assert kept.verdict == "not reproduced"


def test_ctrl_c_keeps_the_findings_so_far(root, incident, capsys, tmp_path):
    incident(leaked, clean, interrupted, verified)
    path = tmp_path / "mine.jsonl"
    assert cli.main(["run", "--json", str(path)]) == 130
    assert [f.verdict for f in read_findings(path)] == ["leaked", "clean"]
    assert one_line(capsys.readouterr().err) == (f"staleproof: interrupted; 2 findings kept: {path}")


def test_ctrl_c_before_the_first_finding_keeps_the_earlier_file(root, incident, capsys):
    kept = root / "workbook/_build/findings.jsonl"
    write_findings(kept, [leaked()])
    incident(interrupted)
    assert cli.main(["run"]) == 130
    assert len(read_findings(kept)) == 1
    assert "no finding yet" in capsys.readouterr().err


def test_an_error_in_an_experiment_keeps_the_findings_so_far(root, incident):
    def broken() -> Finding:
        raise ZeroDivisionError

    incident(leaked, broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["run"])
    assert len(read_findings(root / "workbook/_build/findings.jsonl")) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "nope"], "unknown incident 'nope'; known: fake"),
        (["run", "--device", "tpu"], "device: expected cpu, cuda or auto, got 'tpu'"),
        (["run", "--json", "{root}/a_file/x.jsonl"], "cannot be written"),
        (["run", "--json", "{root}"], "cannot be written: it is a folder"),
        (["record", "--out", "{root}/a_file"], "cannot be written"),
        (["compare", "here", "there"], "neither a run folder nor a recorded machine"),
        (["bench", "nope"], "unknown kernel 'nope'"),
    ],
)
def test_bad_input_is_one_line_and_2(root, incident, capsys, arguments, said):
    asked = incident(clean)
    (root / "a_file").write_text("in the way")
    assert cli.main([a.format(root=root) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert said in one_line(captured.err)
    assert captured.out == ""
    assert asked == []
    assert (root / "a_file").read_text() == "in the way"


@pytest.mark.parametrize("arguments", [["nope"], ["run", "--nope"], ["compare", "one"]])
def test_unknown_commands_and_options_are_2(capsys, arguments):
    assert cli.main(arguments) == 2
    assert "nope" in (said := capsys.readouterr().err) or "Missing argument" in said


def test_a_device_that_is_absent_is_2(root, incident, capsys, monkeypatch):
    incident(clean)
    monkeypatch.setattr(device, "has_cuda", lambda: False)
    assert cli.main(["run", "--device", "cuda"]) == 2
    assert "torch sees no CUDA device" in one_line(capsys.readouterr().err)


def _record(root: Path, findings: list[Finding], name: str = "a-gpu") -> Path:
    folder = root / "workbook/runs" / name
    recorded.write(folder, findings, [MEASUREMENT])
    return folder


def _cut(folder: Path) -> None:
    path = folder / "findings.jsonl"
    path.write_text(path.read_text()[:-20])


def _drop_a_line(folder: Path) -> None:
    path = folder / "findings.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def _cut_environment(folder: Path) -> None:
    path = folder / "environment.json"
    path.write_text(path.read_text()[:40])


def _newer_findings(folder: Path) -> None:
    path = folder / "findings.jsonl"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))


def _newer_environment(folder: Path) -> None:
    path = folder / "environment.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_cut, "truncated"),
        (_drop_a_line, "truncated: expected 2 lines, got 1"),
        (_cut_environment, "truncated"),
        (_newer_findings, "newer"),
        (_newer_environment, "newer"),
    ],
)
@pytest.mark.parametrize("command", ["run", "list", "report", "compare"])
def test_a_spoilt_recorded_run_is_one_line_and_2_and_is_kept(root, incident, capsys, spoil, said, command):
    asked = incident(clean)
    folder = _record(root, [leaked(), clean()])
    spoil(folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    more = ["a-gpu", "a-gpu"] if command == "compare" else []
    assert cli.main([command, *more]) == 2
    assert said in one_line(capsys.readouterr().err)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    # It is found before the long work, not after it.
    assert asked == []


def test_run_shows_recorded_runs_beside_and_marks_moved_source(root, incident, capsys, monkeypatch):
    incident(leaked, clean)
    _record(root, [leaked(), wrong()])
    assert cli.main(["run"]) == 0
    out = capsys.readouterr().out
    name = device.machine().name
    assert f"RECORDED  {name}, {leaked().date}, same source" in out
    assert "1 match, 0 mismatch, 1 only in the first, 1 only in the second" in out
    monkeypatch.setattr("staleproof.harness.findings.source_digest", lambda incident: "another")
    assert cli.main(["list"]) == 0
    assert "source changed since: fake" in capsys.readouterr().out


def test_without_a_checkout_run_works_and_the_rest_says_so(incident, capsys, monkeypatch, tmp_path):
    incident(clean)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recorded, "PACKAGE", tmp_path / "site-packages" / "staleproof")
    assert cli.main(["run"]) == 0
    assert len(read_findings(tmp_path / "staleproof-findings.jsonl")) == 1
    capsys.readouterr()
    for command in ("report", "lab", "bench", "record"):
        assert cli.main([command]) == 2
        assert "clone the repository" in one_line(capsys.readouterr().err)


def test_record_on_a_cpu_writes_findings_and_no_timing(root, incident, capsys, monkeypatch):
    incident(leaked, clean)
    (root / "benchmarks/clear.py").write_text("raise SystemError('nothing is timed here')")
    monkeypatch.setattr(device, "select", lambda *_: "cpu")
    assert cli.main(["record"]) == 0
    (run,) = recorded.read_all()
    assert run.folder.name == device.machine().slug
    assert [f.verdict for f in run.findings] == ["leaked", "clean"]
    assert {f.provenance for f in run.findings} == {device.Provenance.RECORDED}
    assert run.measurements == []
    assert [p.name for p in run.folder.parent.iterdir()] == [run.folder.name]


def test_record_on_a_gpu_keeps_every_row(root, incident, monkeypatch, tmp_path):
    incident(clean)
    (root / "benchmarks/clear.py").write_text(f"def rows():\n    yield {MEASUREMENT!r}\n")
    monkeypatch.setattr(device, "select", lambda *_: "cuda")
    assert cli.main(["record", "--out", str(tmp_path / "out")]) == 0
    (run,) = recorded.read_all(tmp_path / "out")
    assert run.measurements == [MEASUREMENT]


@pytest.mark.parametrize("second", [wrong, interrupted])
def test_record_never_replaces_a_run_by_a_failed_one(root, incident, capsys, second):
    incident(leaked)
    assert cli.main(["record"]) == 0
    (before,) = recorded.read_all()
    incident(clean, second)
    assert cli.main(["record"]) == (1 if second is wrong else 130)
    (after,) = recorded.read_all()
    assert after == before
    assert [p.name for p in before.folder.parent.iterdir()] == [before.folder.name]
    # What was found is not lost either.
    assert read_findings(root / "workbook/_build/findings.jsonl")[0].variant == "ours"


def test_record_keeps_the_earlier_run_when_a_benchmark_fails(root, incident, capsys, monkeypatch):
    incident(leaked)
    monkeypatch.setattr(device, "select", lambda *_: "cuda")
    assert cli.main(["record"]) == 0
    (before,) = recorded.read_all()
    (root / "benchmarks/clear.py").write_text(
        "from staleproof.harness.measure import WrongResult\n"
        "def rows():\n"
        f"    yield {MEASUREMENT!r}\n"
        "    raise WrongResult('row 3 is stale')\n"
    )
    for command in ("record", "bench"):
        assert cli.main([command]) == 1
        said = one_line(capsys.readouterr().err)
        assert said == "staleproof: clear: no speed for a wrong result: row 3 is stale"
    assert recorded.read_all() == [before]


def test_record_leaves_a_folder_that_is_no_run_alone(root, incident, capsys):
    asked = incident(clean)
    mine = root / "workbook/runs" / device.machine().slug
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    assert cli.main(["record"]) == 2
    assert "not a recorded run" in one_line(capsys.readouterr().err)
    assert asked == []
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_compare_prints_verdicts_first_and_timings_second(root, capsys):
    _record(root, [leaked(), clean()], "a-gpu")
    changed = finding("fake", "empty_row", "ours", "leaked", expected="clean")
    folder = _record(root, [leaked(), changed, absent()], "b-gpu")
    path = folder / "measurements.jsonl"
    path.write_text(json.dumps(MEASUREMENT | {"p50": 3.0}) + "\n")
    assert cli.main(["compare", "a-gpu", str(folder)]) == 1
    out = capsys.readouterr().out
    assert "mismatch        fake, empty_row, ours: clean / leaked" in out
    assert "in neither      fake, empty_row, cutlass" in out
    assert "1 match, 1 mismatch, 0 only in the first, 0 only in the second, 1 not run" in out
    assert "clear, staleproof, graph, live 1: 2 us (p20 1.9, p80 2.2) -> 3 (1.50)" in out
    assert out.index("1 match") < out.index("clear, staleproof")


def test_compare_of_a_run_with_itself_is_0(root, capsys):
    _record(root, [leaked(), clean()])
    assert cli.main(["compare", "a-gpu", "a-gpu"]) == 0
    assert "2 match, 0 mismatch" in capsys.readouterr().out


def test_bench_is_refused_without_a_gpu(root, capsys, monkeypatch):
    (root / "benchmarks/clear.py").write_text("raise SystemError('not to be run')")
    monkeypatch.setattr(device, "select", lambda *_: "cpu")
    assert cli.main(["bench"]) == 2
    assert "need a CUDA GPU" in one_line(capsys.readouterr().err)


def test_bench_prints_each_row(root, capsys, monkeypatch):
    (root / "benchmarks/clear.py").write_text(f"def rows():\n    yield {MEASUREMENT!r}\n")
    (root / "benchmarks/other.py").write_text("raise SystemError('not asked')")
    monkeypatch.setattr(device, "select", lambda *_: "cuda")
    assert cli.main(["bench", "clear"]) == 0
    _, row = capsys.readouterr().out.splitlines()
    assert row.split() == ["graph", "live", "1", "staleproof", "2.00", "1.90", "2.20", "2.00", "1.00"]


def test_lab_opens_the_notebooks_with_this_python(root, monkeypatch):
    calls = []
    monkeypatch.setattr(cli.os, "execv", lambda path, argv: calls.append((path, argv)))
    assert cli.main(["lab"]) == 0
    notebooks = str(root / "notebooks")
    assert calls == [(sys.executable, [sys.executable, "-m", "jupyterlab", notebooks])]


def test_doctor_names_what_is_skipped_and_why(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert str(device.provenance()) in out
    for name in (
        "Triton kernels",
        "CUDA graphs",
        "compute-sanitizer",
        "nvcc",
        "FlashInfer kernels",
        "SM100 kernels",
        "vLLM Triton MLA",
        "NCCL, two GPUs",
    ):
        (line,) = (line for line in out.splitlines() if line[6:].startswith(name))
        assert line[:6] in ("yes   ", "skip  ")
        assert line[26:].strip(), line


@pytest.mark.parametrize(
    ("triton", "numpy", "interpreting", "warned"),
    [
        ("3.6.0", "2.4.6", True, True),
        ("3.6.0", "2.5.2", False, False),
        ("3.6.0", "2.3.5", True, False),
        ("3.7.1", "2.4.6", True, False),
        ("3.10.0", "2.10.0", True, False),
    ],
)
def test_doctor_warns_of_the_bad_combination(capsys, monkeypatch, triton, numpy, interpreting, warned):
    versions = {"triton": triton, "numpy": numpy}
    monkeypatch.setattr(device, "version_of", versions.get)
    monkeypatch.setattr(device, "interpreting", lambda: interpreting)
    assert bool(environment.warnings()) is warned
