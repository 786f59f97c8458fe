"""The commands: what they print, keep and refuse, and their exit codes."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from fakes import absent, clean, interrupted, leaked, one_line, verified, wrong
from prometheus_client.samples import Sample
from tests.made import finding, off_on_off

from staleproof import child, device
from staleproof import runs as store
from staleproof.cli import app as cli
from staleproof.cli import common, incidents
from staleproof.lab import Answer, Finding, Incident, Scene, good
from staleproof.report import terminal
from staleproof.runs import read_findings, write_findings


def test_help_answers_at_once_and_imports_no_torch():
    code = (
        "import sys\nfrom staleproof.cli.app import main\n"
        "code = main(['--help'])\n"
        "print(sorted({'torch', 'triton', 'pandas', 'nbconvert', 'rich'} & set(sys.modules)))\n"
        "sys.exit(code)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "compare" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
    # The promise is 0.3 s on a quiet machine; what others do on it takes no time of this process.
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 1.0


@pytest.mark.parametrize("there", [importlib.metadata.version("staleproof"), None])
def test_the_version_is_one_line_and_says_if_no_package_is_installed(monkeypatch, capsys, there):
    monkeypatch.setattr(device, "version_of", {"staleproof": there}.get)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"staleproof {there or '(not installed)'}\n"


def test_a_command_runs_in_a_thread_too(root, incident):
    """Where no signal can be caught."""
    incident(clean)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(cli.main, ["run"]).result() == 0


def test_list_says_of_each_incident_what_is_seen_why_and_where_it_is_told(root, incident, capsys):
    incident(clean)
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[:6] == [
        "1  fake: a fake",
        "   symptom   it looks true",
        "   cause     it lies",
        "   notebook  notebooks/01_fake.ipynb",
        "Read notebooks/00_orientation.ipynb first. For kernels of yours: 06_audit_your_kernels.ipynb.",
        "",
    ]


def test_run_prints_the_conclusion_and_keeps_the_findings(kept, incident, capsys):
    asked = incident(leaked, clean, absent, verified)
    assert cli.main(["run"]) == 0
    out = capsys.readouterr().out
    word = device.provenance()
    lines = [line for line in out.splitlines() if line]
    assert lines[0] == "fake: a fake"
    assert "  symptom  it looks true" in lines
    assert "  fixed    ours" in lines
    assert f"3 as expected, 0 not as expected, 1 not run ({word}, evidence: replica)" in out
    assert "not run: 1 needs SM100 (-v lists them)" in lines
    # Neither single findings nor matrices.
    assert "empty_row" not in out
    assert asked == ["cuda" if word == "MEASURED" else "cpu"]
    assert [f.verdict for f in read_findings(kept)] == ["leaked", "clean", "not run", "fixed"]


def test_run_v_prints_each_finding_and_the_matrices_after_the_conclusion(root, incident, capsys):
    incident(leaked, clean, absent, verified)
    assert cli.main(["run", "-v"]) == 0
    out = capsys.readouterr().out
    word = device.provenance()
    assert f"{word}  fake, empty_row, broken: leaked  (replica)  [bad_rows 3]" in out
    assert f"{word}  fake, empty_row, cutlass: not run: needs SM100" in out
    assert (
        out.index("broken: leaked") < out.index("fake: a fake") < out.index("fake     evidence  empty_row\n")
    )
    assert "not run: fake, cutlass: needs SM100 (empty_row)" in out


def test_run_keeps_what_other_incidents_found_and_says_of_which_source(kept, incident, capsys):
    other = finding("mla_padding", "q", "v", "clean")
    write_findings(kept, [other, replace(other, incident="kv_reuse", commit="older")])
    incident(leaked)
    assert cli.main(["run"]) == 0
    assert [f.incident for f in read_findings(kept)] == ["fake", "mla_padding", "kv_reuse"]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("kept")]
    assert said[0].startswith("kept      mla_padding: 1 finding, ")
    assert said[0].endswith(other.origin)
    assert "kv_reuse: 1 finding" in said[1]
    assert f", older, {other.date}" in said[1]


def test_an_interrupted_run_keeps_its_earlier_answers_to_what_was_not_asked_again(kept, incident):
    incident(clean, leaked)
    assert cli.main(["run"]) == 0
    incident(clean, interrupted)
    assert cli.main(["run"]) == 130
    assert [f.variant for f in read_findings(kept)] == ["ours", "broken"]
    # One that came to its end replaces all of them.
    incident(clean)
    assert cli.main(["run"]) == 0
    assert [f.variant for f in read_findings(kept)] == ["ours"]


def test_a_kept_file_that_cannot_be_read_ends_the_run_before_it_begins(kept, incident, capsys):
    asked = incident(clean)
    write_findings(kept, [leaked()])
    kept.write_text(kept.read_text()[:-9])
    before = kept.read_bytes()
    assert cli.main(["run"]) == 2
    assert "its findings would be lost: move the file, or name another" in one_line(capsys.readouterr().err)
    assert (asked, kept.read_bytes()) == ([], before)


@pytest.mark.parametrize("name", ["fake", "1"])
def test_run_takes_a_name_or_a_number_and_asks_once_in_the_order_given(root, incident, name):
    assert incidents._chosen(["3", "1", "3"]) == ["moe_routing", "mla_padding"]
    asked = incident(clean)
    assert cli.main(["run", name, "fake"]) == 0
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("found", "spoilt", "stopped", "code"),
    [
        ([clean, absent], [], [], 0),
        ([wrong, clean, wrong], ["a run"], [], 1),
        ([clean], ["a run"], ["a notebook"], 1),
        ([], [], ["a notebook"], 1),
        ([clean], ["a run"], [], 2),
    ],
)
def test_a_command_ends_with_2_only_where_all_that_is_wrong_is_a_recorded_run(
    capsys, found, spoilt, stopped, code
):
    with pytest.raises(typer.Exit) if code else nullcontext() as ended:
        common.finish([make() for make in found], spoilt, stopped)
    unexpected = ["2 verdicts are not as expected"] * (wrong in found)
    lines = [f"staleproof: {line}" for line in (*stopped, *unexpected, *spoilt)]
    assert capsys.readouterr().err.splitlines() == lines
    assert ended is None or ended.value.exit_code == code


@pytest.mark.parametrize(("off", "off_again"), [("clean", "leaked"), ("leaked", "clean")])
def test_run_refuses_fixed_where_the_reproduction_did_not_fail(root, incident, capsys, off, off_again):
    incident(lambda: off_on_off("fake", "ours", off=off, on="clean", again=off_again))
    assert cli.main(["run"]) == 1
    out = capsys.readouterr().out
    assert "ours: not reproduced (expected fixed)" in out
    assert "  fixed    no fix was shown to hold by this run" in out


@pytest.mark.parametrize("pressed_in", ["a question", "the output"])
def test_ctrl_c_ends_the_children(root, incident, monkeypatch, tmp_path, pressed_in):
    incident()
    started, ended = [], []

    def begin(device: str) -> child.Child:
        started.append(child.start(time.sleep, 600))
        return started[0]

    def ask(variant: str, device: str, sleeper: child.Child) -> Answer:
        assert sleeper.poll() is None
        if (variant, pressed_in) == ("second", "a question"):
            raise KeyboardInterrupt
        return good("clean")

    def say(line: str = "") -> None:
        if "first" in line and pressed_in == "the output" and not ended:
            raise KeyboardInterrupt

    def echo(line: str = "", **options: object) -> None:
        if "interrupted" in line:
            ended.append(started[0].poll())

    fake = Incident("fake")
    fake.question("q", ["first", "second"], expect="clean", scene=Scene("a child", begin))(ask)
    monkeypatch.setattr(sys.modules["staleproof.incidents.fake.questions"], "incident", fake)
    monkeypatch.setattr(terminal, "say", say)
    monkeypatch.setattr(typer, "echo", echo)
    assert cli.main(["run", "-v", "--json", str(tmp_path / "x.jsonl")]) == 130
    assert [found.variant for found in read_findings(tmp_path / "x.jsonl")] == ["first"]
    assert ended == [-signal.SIGKILL]


def test_sigterm_keeps_and_prints_the_findings_so_far(kept, incident, capsys):
    """As a batch system ends a job."""

    def ended() -> Finding:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        return clean()

    # Whatever a test before this one has left.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    incident(leaked, verified, ended)
    assert cli.main(["run"]) == 143
    assert [f.verdict for f in read_findings(kept)] == ["leaked", "fixed"]
    captured = capsys.readouterr()
    assert "  fixed    ours" in captured.out
    assert one_line(captured.err) == f"staleproof: interrupted; 2 findings kept: {kept}"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_full_disk_loses_no_verdict_on_the_screen(kept, incident, capsys, monkeypatch):
    write_findings(kept, [clean()])
    before = kept.read_bytes()

    def full(self: Path, *_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    incident(leaked, verified)
    monkeypatch.setattr(Path, "write_text", full)
    assert cli.main(["run"]) == 2
    captured = capsys.readouterr()
    assert "  fixed    ours" in captured.out
    said = one_line(captured.err)
    why = f"findings are not kept: {kept}: cannot be written: No space left on device"
    assert said == f"staleproof: 2 {why}"
    assert kept.read_bytes() == before
    incident(leaked, interrupted)
    assert cli.main(["run"]) == 130
    assert capsys.readouterr().err.splitlines() == [f"staleproof: 1 {why}", "staleproof: interrupted"]


def test_two_runs_in_one_checkout_keep_the_findings_of_both(kept, incident):
    """The second ends while the first still asks: what it has written meanwhile stays."""
    other = finding("kv_reuse", "q", "v", "clean")

    def meanwhile() -> Finding:
        write_findings(kept, [other])
        return clean()

    incident(leaked, meanwhile)
    assert cli.main(["run"]) == 0
    assert [f.incident for f in read_findings(kept)] == ["fake", "fake", "kv_reuse"]


def test_one_run_waits_while_another_writes(tmp_path, monkeypatch):
    path, read = tmp_path / "f", store.read_kept

    def write(variant: str) -> str | None:
        return common._keep(path, [finding("kv_reuse", "q", variant, "clean")], [])

    monkeypatch.setattr(store, "read_kept", lambda path: (read(path), time.sleep(0.1))[0])
    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(write, "abc")] == [None] * 3
    assert {found.variant for found in read_findings(path)} == {*"abc"}


def test_where_there_are_no_locks_findings_are_kept_without_one(kept, incident, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    incident(clean)
    monkeypatch.setattr("fcntl.flock", flock)
    assert cli.main(["run"]) == 0
    assert len(read_findings(kept)) == 1


def test_ctrl_c_before_the_first_finding_keeps_the_earlier_file(kept, incident, capsys):
    write_findings(kept, [leaked()])
    incident(interrupted)
    for _ in range(2):
        assert cli.main(["run"]) == 130
        assert one_line(capsys.readouterr().err) == "staleproof: interrupted; no finding yet"
        if kept.exists():
            assert len(read_findings(kept)) == 1
            kept.unlink()
    assert not kept.exists()


def test_an_error_in_a_question_keeps_the_findings_so_far(kept, incident):
    def broken() -> Finding:
        raise ZeroDivisionError

    incident(leaked, broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["run"])
    assert len(read_findings(kept)) == 1


def test_without_a_checkout_run_and_list_work_and_the_rest_says_so(incident, capsys, monkeypatch, tmp_path):
    incident(clean)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("staleproof.machine.root", lambda: None)
    assert cli.main(["run"]) == 0
    assert len(read_findings(tmp_path / "staleproof-findings.jsonl")) == 1
    assert cli.main(["list"]) == 0
    capsys.readouterr()
    assert cli.main(["record"]) == 2
    assert "clone the repository" in one_line(capsys.readouterr().err)


def test_list_ends_with_what_this_machine_skips_and_why(root, incident, capsys):
    incident(clean)
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    assert str(device.provenance()) in out
    names = "Triton kernels|CUDA graphs|compute-sanitizer|nvcc|FlashInfer kernels|SM100 kernels"
    for name in f"{names}|vLLM Triton MLA|NCCL, two GPUs".split("|"):
        (line,) = (line for line in out.splitlines() if line[6:].startswith(name))
        assert line[:6] in ("yes   ", "skip  ")
        assert line[26:].strip(), line


@pytest.mark.parametrize(
    ("place", "command", "result", "handed"),
    [
        (
            "staleproof.contract.runner.audit",
            ["audit", "typing", "--device", "cpu", "--limit", "7", "--scripts", "folder"],
            [],
            [["typing"], "cpu", 7.0, Path("folder")],
        ),
        (
            "staleproof.vllm.watch_client.follow",
            ["watch", "host:1/metrics/", "--every", "7"],
            None,
            ["http://host:1/metrics", 7.0],
        ),
        ("staleproof.vllm.watch_client.follow", ["watch", "host:1"], None, ["http://host:1", 2.0]),
        ("staleproof.device.select", ["record", "--device", "cpu"], "cpu", ["cpu"]),
    ],
)
def test_what_is_given_is_handed_on(root, incident, monkeypatch, tmp_path, place, command, result, handed):
    incident(clean)
    monkeypatch.chdir(tmp_path)  # --scripts makes its folder.
    asked = []
    monkeypatch.setattr("staleproof.vllm.watch_client.fetch", lambda url: [Sample("watch_up", {}, 1.0)])
    monkeypatch.setattr(place, lambda *args, **options: asked.append([*args, *options.values()]) or result)
    cli.main(command)
    assert asked
    assert [one for given in asked for one in handed if one not in given] == []


@pytest.mark.parametrize(
    ("arguments", "replacement"),
    [
        (["bench", "topk"], "bench: removed in 0.2.0: python benchmarks/NAME.py"),
        (["doctor"], "doctor: removed in 0.2.0: staleproof list"),
        (["engine", "--record"], "engine: removed in 0.2.0: workbook/whole-vllm.md"),
        (["lab", "--", "--port", "1"], "lab: removed in 0.2.0: make lab"),
        (["report", "--execute"], "report: removed in 0.2.0: make workbook"),
        (["moe-module", "build"], "moe-module: removed in 0.2.0: staleproof run"),
    ],
)
def test_removed_command_names_its_replacement(capsys, arguments, replacement):
    assert cli.main(arguments) == 2
    assert one_line(capsys.readouterr().err).startswith(f"staleproof {replacement}")
