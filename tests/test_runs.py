"""Recorded runs: written whole or not at all, read with their old rows, and compared."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from staleproof import machine, runs
from staleproof.device import Provenance
from staleproof.lab import Key, bad, finding, good, not_run
from staleproof.runs import RunFileError, merged, origins, read_kept, write_findings

ROW = {
    "kernel": "k",
    "provider": "ours",
    "mode": "graph",
    "x_name": "n",
    "x_value": 1,
    "p50": 4.0,
    "unit": "us",
}


def found(variant="v", answer=None, incident="a", question="q"):
    return finding(Key(incident, question, variant), answer or good("clean"))


CLEAN = found()


def stored(folder, findings=(), rows=()):
    """A run that was written and read again."""
    runs.write(folder, [*findings], [*rows])
    return runs.read(folder)


def test_run_comes_back_whole_and_says_commit_and_date(tmp_path):
    run = stored(tmp_path / "a-gpu", [CLEAN], [ROW])
    assert run.findings == [replace(CLEAN, provenance=Provenance.RECORDED)]
    assert run.measurements == [ROW]
    assert run.title == f"{CLEAN.machine['name']}, {machine.commit()}, {CLEAN.date}"
    assert {"packages", "capabilities", "commit", "date", "schema"} <= run.environment.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["a-gpu"]


def test_run_of_several_days_names_the_first_and_the_last(tmp_path):
    rows = [ROW | {"date": "2020-02-29"}, ROW]
    run = stored(tmp_path / "a", [CLEAN, replace(CLEAN, variant="older", date="2020-01-31")], rows)
    assert run.date == f"2020-01-31 to {CLEAN.date}"
    assert run.only(run.findings[:1]).date == CLEAN.date
    assert run.only(rows=rows[:1]).date == "2020-02-29"


def test_recorded_runs_of_the_workbook_are_read_with_the_outcomes_in_their_rows():
    read = 0
    for run in runs.read_all():
        for number, row in enumerate(runs.read_lines(run.folder / runs.FINDINGS)):
            one = run.findings[number]
            assert (one.verdict, one.outcome, one.expected) == (
                row["verdict"],
                row["outcome"],
                row["expected"],
            )
            assert one.provenance is Provenance.RECORDED
            read += 1
    assert read


def test_fixed_in_an_old_row_without_a_right_comparison_is_not_read_as_fixed(tmp_path):
    three = {"words": "rows", "off": "leaked", "on": "clean", "again": "leaked", "right": None, "wrong": ""}
    old = {"incident": "a", "question": "off/on/off", "variant": "v", "words": "fix", "verdict": "fixed"}
    old |= {"outcome": "good", "schema": 3, "three": three, "source_digest": "x", "machinery": 1}
    path = tmp_path / "findings.jsonl"
    path.write_text(json.dumps(old) + "\n")
    (one,) = runs.read_findings(path)
    assert (one.verdict, one.outcome, one.ok) == ("wrong", "bad", False)
    old["three"] = three | {"on": "leaked", "right": True}
    path.write_text(json.dumps(old) + "\n")
    with pytest.raises(RunFileError, match="not a finding: outcomes: expected one outcome of each verdict"):
        runs.read_findings(path)


def test_spoilt_run_hides_no_other(tmp_path):
    for name in ("a", "b", "c"):
        runs.write(tmp_path / name, [CLEAN], [])
    path = tmp_path / "b" / "findings.jsonl"
    path.write_text(path.read_text()[:-20])
    errors = []
    assert [run.folder.name for run in runs.read_all(tmp_path, on_error=errors.append)] == ["a", "c"]
    assert [str(path) in str(error) and "truncated" in str(error) for error in errors] == [True]
    with pytest.raises(RunFileError, match="truncated"):
        runs.read_all(tmp_path)


def test_draft_of_a_killed_recording_is_no_run(tmp_path):
    for name in ("a", "a.earlier.part"):
        runs.write(tmp_path / name, [], [])
    runs.open_for_writing(tmp_path / "b")
    assert [run.folder.name for run in runs.read_all(tmp_path)] == ["a"]


@pytest.mark.parametrize("fails_at", ["environment.json", "the swap"])
def test_failed_write_leaves_the_earlier_run(tmp_path, monkeypatch, fails_at):
    folder = tmp_path / "a"
    before = stored(folder, [CLEAN], [ROW])
    replace = Path.replace

    def full_disk(self, target):
        if target.name == fails_at or (fails_at == "the swap" and self.name == "a.part"):
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(RunFileError, match="No space left"):
        runs.write(folder, [], [])
    assert runs.read(folder) == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_run_is_found_by_its_folder_or_by_its_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "root", lambda: tmp_path)
    folder = tmp_path / "workbook/runs"
    for name in ("b-gpu", "a-cpu"):
        runs.write(folder / name, [CLEAN], [ROW])
    assert runs.find("a-cpu") == runs.find(str(folder / "a-cpu")) == runs.read(folder / "a-cpu")
    for name in ("c-gpu", "../runs/a-cpu"):
        with pytest.raises(RunFileError, match=r"neither .* \(recorded: a-cpu, b-gpu\)$"):
            runs.find(name)


def test_installation_without_its_checkout_says_so(monkeypatch):
    monkeypatch.setattr(machine, "root", lambda: None)
    with pytest.raises(runs.CheckoutError, match="installed without one: clone the repository"):
        runs.runs_folder()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"schema": 2}, r"environment\.json: schema 2, and this staleproof reads 3 and 4$"),
        (
            {"lines": {"findings.jsonl": 2, "measurements.jsonl": 1}},
            r"findings\.jsonl: truncated: expected 2 ",
        ),
        (
            {"lines": {"findings.jsonl": 1, "measurements.jsonl": 0}},
            r"measurements\.jsonl: truncated: .* got 1$",
        ),
        ({"lines": [1, 1]}, "truncated or not a run's environment$"),
        ({"machine": {"name": 7}}, "truncated or not a run's environment$"),
        ("", "truncated or not a run's environment"),
        ("[]", "truncated or not a run's environment"),
    ],
)
def test_run_that_is_not_whole_is_refused(tmp_path, changes, error):
    runs.write(tmp_path / "a", [CLEAN], [ROW])
    path = tmp_path / "a/environment.json"
    about = json.loads(path.read_text())
    path.write_text(changes if isinstance(changes, str) else json.dumps(about | changes))
    with pytest.raises(RunFileError, match=error):
        runs.read(tmp_path / "a")
    path.unlink()
    with pytest.raises(RunFileError, match=r"a: not a recorded run: environment\.json is missing$"):
        runs.read(tmp_path / "a")


def test_what_is_no_recorded_run_is_not_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(RunFileError, match="mine: exists and is not a recorded run; it is left as it is"):
        runs.write(tmp_path / "mine", [], [])
    (tmp_path / "file").touch()
    with pytest.raises(RunFileError, match=r"file/run: cannot be written: (Not a directory|File exists)"):
        runs.write(tmp_path / "file/run", [], [])


def test_what_is_no_plain_file_is_not_replaced(tmp_path):
    fifo, away, out = (tmp_path / name for name in ("fifo", "away", "out"))
    os.mkfifo(fifo)
    away.symlink_to("/proc/nothing")
    plain = "expected a plain file, got a device, a pipe"
    for path, error in ((fifo, plain), (away, ""), (tmp_path, "it is a folder")):
        with pytest.raises(RunFileError, match=f"{path}: cannot be written: {error}"):
            runs.check_writable(path)
    program = (
        "from pathlib import Path; from staleproof import runs; runs.check_writable(Path('/dev/stdout'))"
    )
    with out.open("w") as file:
        done = subprocess.run([sys.executable, "-c", program], stdout=file, stderr=subprocess.PIPE, text=True)
    assert f"/dev/stdout: cannot be written: {plain} or" in done.stderr


def test_link_stays_and_its_file_is_written(tmp_path):
    link, target = tmp_path / "link.jsonl", tmp_path / "folder/target.jsonl"
    link.symlink_to(target)
    for _ in range(2):
        runs.check_writable(link)
        write_findings(link, [CLEAN])
        assert (link.is_symlink(), len(read_kept(target))) == (True, 1)
    assert {*tmp_path.rglob("*.*")} == {link, target}


def test_comparison_counts_each_key_once_and_not_run_never_matches():
    def answers(**verdicts):
        return [found(variant, answer) for variant, answer in verdicts.items()]

    clean, absent = good("clean"), not_run("no GPU")
    first = answers(same=clean, other=clean, gone=clean, absent_here=absent, absent=absent)
    second = answers(same=clean, other=bad("leaked"), absent_here=clean, absent=absent)
    result = runs.compare(first, second)
    assert result.mismatch == {("a", "q", "other", ""): ("clean", "leaked")}
    assert (
        result.summary
        == "1 match, 1 mismatch, 1 only in the first, 1 only in the second, 1 not run in either"
    )


def test_timings_are_compared_only_where_key_and_unit_agree(tmp_path):
    other = stored(tmp_path / "b", rows=[ROW | {"p50": 6.0}, ROW | {"x_value": 2, "unit": "ms"}])
    first = stored(tmp_path / "a", rows=[ROW, ROW | {"x_value": 2}, ROW | {"mode": "eager"}])
    assert runs.compare_timings(first, other) == [(ROW | {"p50_second": 6.0}, 1.5)]


def test_recorded_environment_has_no_path_and_no_host_name(tmp_path):
    import getpass
    import socket

    runs.write(tmp_path / "a", [], [])
    text = (tmp_path / "a" / "environment.json").read_text()
    for private in (
        str(tmp_path),
        str(Path.home()) + "/",
        f'"{socket.gethostname()}"',
        f'"{getpass.getuser()}"',
    ):
        assert private not in text


def test_answers_of_other_incidents_stay_and_keep_their_provenance(tmp_path):
    path = tmp_path / "findings.jsonl"
    assert read_kept(path) == []
    old = replace(found(incident="b"), provenance=Provenance.MEASURED, commit="then")
    write_findings(path, [old, CLEAN])
    new = found(answer=bad("leaked"))
    assert merged(read_kept(path), [new], ["a"], ["a", "b"]) == [new, old]
    (line,) = origins([old])
    assert line == f"b: 1 finding, MEASURED on {old.machine['name']}, then, {old.date}"


def test_removed_question_leaves_with_a_complete_run_only():
    gone, new = found(question="gone"), found(answer=bad("leaked"))
    assert merged([gone, CLEAN], [new], ["a"], ["a"]) == [new]
    assert merged([gone, CLEAN], [new], [], ["a"]) == [new, gone]


@pytest.mark.parametrize("spoil", [lambda text: text[:-9], lambda text: text.replace("INTERP", "OTHER")])
def test_kept_file_that_cannot_be_read_is_not_overwritten(tmp_path, spoil):
    path = tmp_path / "findings.jsonl"
    write_findings(path, [replace(CLEAN, provenance=Provenance.INTERPRETED)])
    path.write_text(spoil(path.read_text()))
    with pytest.raises(RunFileError, match="its findings would be lost: move the file, or name another"):
        read_kept(path)
