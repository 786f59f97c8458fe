"""Recorded runs: written whole or not at all, and compared."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.made import finding, not_run

from staleproof.cases import finding as findings_module
from staleproof.cases import store
from staleproof.cases.digest import file_digest
from staleproof.cases.finding import RunFileError, write_findings
from staleproof.cases.store import merged, origins, read_kept
from staleproof.device import Provenance

ROW = {"kernel": "k", "provider": "ours", "mode": "graph", "x_name": "n", "x_value": 1, "p50": 4.0}


CLEAN = finding("a", "q", "v", "clean")


def stored(folder, findings=(), rows=()):
    """A run that was written and read again."""
    store.write(folder, [*findings], [*rows])
    return store.read(folder)


def test_a_run_comes_back_whole(tmp_path):
    run = stored(tmp_path / "a-gpu", [CLEAN], [ROW])
    assert [f.verdict for f in run.findings] == ["clean"]
    assert run.measurements == [ROW]
    assert run.machine == run.findings[0].machine["name"]
    assert {"packages", "capabilities", "date", "schema"} <= run.environment.keys()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a-gpu"]


def test_a_run_of_several_days_names_the_first_and_the_last(tmp_path):
    run = stored(tmp_path / "a", [CLEAN, replace(CLEAN, variant="older", date="2020-01-31")])
    assert f"2020-01-31 to {CLEAN.date}" in run.title
    # Timings can be older than all findings.
    run = stored(tmp_path / "a", [CLEAN], [ROW | {"date": "2020-02-29"}, ROW])
    assert f"2020-02-29 to {CLEAN.date}" in run.title


def test_a_part_of_a_run_speaks_of_nothing_else(tmp_path):
    row = ROW | {"incident": "b", "date": "2020-02-29", "source_digest": "of old"}
    run = stored(tmp_path / "a", [CLEAN, replace(CLEAN, variant="older", date="2020-01-31")], [row])
    assert run.only(run.findings[:1]).title == f"{run.machine}, {CLEAN.date}, same source"
    assert run.only(rows=[row]).title == f"{run.machine}, 2020-02-29, source changed since: b"
    assert run.only(run.findings).date == f"2020-01-31 to {CLEAN.date}"
    assert run.only().date == run.environment["date"]


def test_a_run_says_when_the_source_of_a_finding_has_changed(tmp_path, monkeypatch):
    run = stored(tmp_path / "a", [replace(CLEAN, incident=name) for name in "ba"])
    assert run.title.endswith("same source")
    monkeypatch.setattr(findings_module, "source_digest", lambda incident: "another")
    assert store.read(tmp_path / "a").title.endswith("source changed since: a, b")


def test_a_run_says_when_the_source_of_a_benchmark_has_changed(tmp_path, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/k.py").write_text("pass\n")
    monkeypatch.setattr(store, "checkout", lambda: tmp_path)
    digest = file_digest(tmp_path / "benchmarks/k.py")
    row = ROW | {"incident": "b", "benchmark": "k", "source_digest": digest}
    for changes, stale in (
        ({}, []),
        ({"source_digest": "an earlier one"}, ["b"]),
        ({"benchmark": "deleted since"}, ["b"]),
    ):
        assert stored(tmp_path / "run", rows=[row | changes]).stale == stale
    # Recordings of before the benchmark was named, and of before rows had a digest.
    for field in ("benchmark", "source_digest"):
        del row[field]
        assert stored(tmp_path / "run", rows=[row]).stale == ["b"]
    # There are no benchmarks to compare with.
    monkeypatch.undo()
    monkeypatch.setattr(store, "PACKAGE", tmp_path / "site-packages" / "staleproof")
    assert store.read(tmp_path / "run").stale == []


def test_a_spoilt_run_hides_no_other(tmp_path):
    for name in ("a", "b", "c"):
        store.write(tmp_path / name, [finding(name, "q", "v", "clean")], [])
    path = tmp_path / "b" / "findings.jsonl"
    path.write_text(path.read_text()[:-20])
    spoilt = []
    assert [run.folder.name for run in store.read_all(tmp_path, spoilt=spoilt.append)] == ["a", "c"]
    (error,) = spoilt
    assert "truncated" in str(error)
    assert str(path) in str(error)
    with pytest.raises(RunFileError, match="truncated"):
        store.read_all(tmp_path)


def test_what_a_killed_recording_left_is_no_run(tmp_path):
    for name in ("a", "a.earlier.part"):
        store.write(tmp_path / name, [], [])
    store.open_for_writing(tmp_path / "b")
    assert [run.folder.name for run in store.read_all(tmp_path)] == ["a"]


@pytest.mark.parametrize("fails_at", ["environment.json", "the swap"])
def test_a_failed_write_leaves_the_earlier_run(tmp_path, monkeypatch, fails_at):
    folder = tmp_path / "a"
    before = stored(folder, [CLEAN], [ROW])
    replace = Path.replace

    def full_disk(self, target):
        if target.name == fails_at or (fails_at == "the swap" and self.name == "a.part"):
            raise OSError(28, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(RunFileError, match="No space left"):
        store.write(folder, [], [])
    assert store.read(folder) == before
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_missing_file_is_refused(tmp_path):
    store.write(tmp_path / "a", [], [ROW])
    (tmp_path / "a" / "measurements.jsonl").unlink()
    with pytest.raises(RunFileError, match=r"measurements\.jsonl: cannot be read"):
        store.read(tmp_path / "a")


def test_a_run_is_found_by_its_folder_or_by_its_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "checkout", lambda: tmp_path)
    assert store.read_all() == []
    with pytest.raises(RunFileError, match=r"^a-cpu: neither a .* machine \(recorded: none\)$"):
        store.find("a-cpu")
    runs = tmp_path / "workbook/runs"
    for name in ("b-gpu", "a-cpu"):
        store.write(runs / name, [finding("a", "q", name, "clean")], [ROW] * 2)
    (runs / "README.md").touch()
    assert [run.folder.name for run in store.read_all()] == ["a-cpu", "b-gpu"]
    assert store.find("a-cpu") == store.find(str(runs / "a-cpu")) == store.read(runs / "a-cpu")
    for name in ("c-gpu", "README.md", "../runs/a-cpu"):
        with pytest.raises(RunFileError, match=r"neither .* \(recorded: a-cpu, b-gpu\)$"):
            store.find(name)


def test_an_installation_without_its_checkout_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "PACKAGE", tmp_path / "src/staleproof")
    project, notebooks = tmp_path / "pyproject.toml", tmp_path / "notebooks"
    for there in ((), (project.touch,), (project.unlink, notebooks.mkdir)):
        for change in there:
            change()
        with pytest.raises(store.CheckoutError, match="installed without one: clone the repository"):
            store.checkout()
    project.touch()
    assert store.checkout() == tmp_path
    expected = tmp_path / "workbook/runs", tmp_path / "workbook/_build"
    assert (store.runs_folder(), store.build_folder()) == expected
    (tmp_path / "benchmarks").mkdir()
    for name in ("b.py", "a.py", "_shared.py", "README.md"):
        (tmp_path / "benchmarks" / name).touch()
    assert store.benchmarks() == {name: tmp_path / f"benchmarks/{name}.py" for name in "ab"}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schema": 2}, r"environment\.json: schema 2, and this staleproof reads 3$"),
        ({"lines": {"findings.jsonl": 2, "measurements.jsonl": 1}},
         r"findings\.jsonl: truncated: expected 2 lines, got 1$"),
        ({"lines": {"findings.jsonl": 1, "measurements.jsonl": 0}},
         r"measurements\.jsonl: truncated: expected 0 lines, got 1$"),
        ({"lines": {"findings.jsonl": 1}}, r"measurements\.jsonl: truncated: expected None lines, got 1$"),
        ({"lines": [1, 1]}, "truncated or not a run's environment$"),
        ({"machine": {"name": 7}}, "truncated or not a run's environment$"),
        ({"date": None}, "truncated or not a run's environment$"),
        *((spoilt, "truncated or not a run's environment") for spoilt in ("", "{}", "[]", {"machine": {}})),
    ],
)  # fmt: skip
def test_a_run_that_is_not_whole_is_refused(tmp_path, changes, why):
    store.write(tmp_path / "a", [CLEAN], [ROW])
    path = tmp_path / "a/environment.json"
    about = json.loads(path.read_text())
    assert (about["schema"], about["lines"]) == (3, {"findings.jsonl": 1, "measurements.jsonl": 1})
    path.write_text(changes if isinstance(changes, str) else json.dumps(about | changes))
    with pytest.raises(RunFileError, match=why):
        store.read(tmp_path / "a")
    path.unlink()
    with pytest.raises(RunFileError, match=r"a: not a recorded run: environment\.json is missing$"):
        store.read(tmp_path / "a")


def test_what_is_no_recorded_run_is_not_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(RunFileError, match="mine: exists and is not a recorded run; it is left as it is"):
        store.write(tmp_path / "mine", [], [])
    (tmp_path / "file").touch()
    with pytest.raises(RunFileError, match=r"file/run: cannot be written: (Not a directory|File exists)"):
        store.write(tmp_path / "file/run", [], [])
    for path, why in ((tmp_path / "mine", "it is a folder"), (tmp_path / "file/x", "")):
        with pytest.raises(RunFileError, match=f"cannot be written: {why}"):
            store.check_writable(path)
    assert stored(tmp_path / "runs/deep").findings == []


def test_what_is_no_plain_file_is_not_replaced(tmp_path):
    fifo, loop, away, out = (tmp_path / name for name in ("fifo", "loop", "away", "out"))
    os.mkfifo(fifo)
    loop.symlink_to(loop)
    # Where nobody can make a file.
    away.symlink_to("/proc/nothing")
    plain = "expected a plain file, got a device, a pipe"
    for path, why in ((fifo, plain), (loop, "Too many levels of"), (away, "")):
        with pytest.raises(RunFileError, match=f"{path}: cannot be written: {why}"):
            store.check_writable(path)
    for name, other in (("stdout", "stderr"), ("stderr", "stdout")):
        program = f"from staleproof.cases.store import *; check_writable(Path('/dev/{name}'))"
        with out.open("w") as file:
            streams = {name: file, other: subprocess.PIPE}
            done = subprocess.run([sys.executable, "-c", program], **streams, text=True)
        assert f"/dev/{name}: cannot be written: {plain} or" in out.read_text() + (done.stderr or "")
    assert {*tmp_path.iterdir()} == {fifo, loop, away, out}


def test_a_link_stays_and_its_file_is_written(tmp_path):
    link, target = tmp_path / "link.jsonl", tmp_path / "folder/target.jsonl"
    link.symlink_to(target)
    for _ in range(2):
        store.check_writable(link)
        write_findings(link, [CLEAN])
        assert (link.is_symlink(), len(read_kept(target))) == (True, 1)
    assert {*tmp_path.rglob("*.*")} == {link, target}


def test_a_comparison_is_told_in_one_line():
    key = ("a", "q", "v", "")
    first = store.Comparison([key] * 2, {key: ("clean", "leaked")}, [key] * 3, [key] * 4, [])
    assert first.summary == "2 match, 1 mismatch, 3 only in the first, 4 only in the second"
    assert replace(first, neither=[key]).summary == first.summary + ", 1 not run in either"


def test_compare_counts_each_key_once():
    def found(**verdicts):
        return [
            finding("a", "q", variant, word) if word else not_run("a", "q", variant, "no GPU")
            for variant, word in verdicts.items()
        ]

    first = found(same="clean", other="clean", gone="clean", absent_here=None, absent=None)
    second = found(same="clean", other="leaked", absent_here="clean", absent=None)
    result = store.compare(first, second)
    assert result.match == [("a", "q", "same", "")]
    assert result.mismatch == {("a", "q", "other", ""): ("clean", "leaked")}
    assert result.only_first == [("a", "q", "gone", "")]
    assert result.only_second == [("a", "q", "absent_here", "")]
    assert result.neither == [("a", "q", "absent", "")]


def test_timings_are_compared_only_where_key_and_unit_agree(tmp_path):
    def compared(*rows):
        return store.compare_timings(stored(tmp_path / "a", rows=rows), other)

    timed = ROW | {"unit": "us"}
    other = stored(tmp_path / "b", rows=[timed | {"p50": 6.0}, ROW | {"x_value": 2, "unit": "ms"}])
    pairs = compared(timed, timed | {"x_value": 2}, ROW | {"x_value": 3})
    assert pairs == [(timed | {"p50_second": 6.0}, 1.5)]
    # One that took no time has no ratio; and every part of a case tells it from others.
    ((_, ratio),) = compared(timed | {"p50": 0.0})
    assert ratio != ratio
    for name in ("kernel", "provider", "mode", "x_name", "x_value"):
        assert compared(timed | {name: "another"}) == []


def test_the_environment_has_no_path_and_no_host_name(tmp_path):
    import getpass
    import socket

    store.write(tmp_path / "a", [], [])
    text = (tmp_path / "a" / "environment.json").read_text()
    json.loads(text)
    assert str(tmp_path) not in text
    assert str(Path.home()) + "/" not in text
    assert f'"{socket.gethostname()}"' not in text
    assert f'"{getpass.getuser()}"' not in text


def test_the_answers_of_other_incidents_stay_and_keep_their_provenance(tmp_path):
    path = tmp_path / "findings.jsonl"
    assert read_kept(path) == []
    old = replace(finding("b", "q", "v", "clean"), provenance=Provenance.MEASURED, source_digest="then")
    write_findings(path, [old, CLEAN])
    after = merged(read_kept(path), [finding("a", "q", "v", "leaked")], ["a"], ["a", "b"])
    assert [(f.incident, f.verdict) for f in after] == [("a", "leaked"), ("b", "clean")]
    assert after[1] == old


def test_a_question_that_is_gone_leaves_with_a_complete_run_only():
    gone, again = finding("a", "gone", "v", "clean"), CLEAN
    new = finding("a", "q", "v", "leaked")
    assert merged([gone, again], [new], ["a"], ["a"]) == [new]
    assert merged([gone, again], [new], [], ["a"]) == [new, gone]


def test_origins_name_the_source_of_what_is_older():
    today = finding("mla_padding", "q", "v", "clean")
    old = [replace(today, variant=str(n), source_digest="abc", date="2026-01-02") for n in range(2)]
    first, second = origins([today, *old])
    assert first.endswith("the source as it is now")
    assert second.startswith("mla_padding: 2 findings, ")
    assert "2026-01-02" in second
    assert second.endswith(f"source abc, which is {today.source_digest} now: run it again")
    (unknown,) = origins([replace(today, source_digest="", machine={})])
    assert " on an unknown machine, " in unknown
    assert unknown.endswith(f"source unknown, which is {today.source_digest} now: run it again")


@pytest.mark.parametrize("spoil", [lambda text: text[:-9], lambda text: text.replace("INTERP", "OTHER")])
def test_a_file_that_cannot_be_read_is_refused_and_not_overwritten(tmp_path, spoil):
    path = tmp_path / "findings.jsonl"
    write_findings(path, [replace(CLEAN, provenance=Provenance.INTERPRETED)])
    path.write_text(spoil(path.read_text()))
    with pytest.raises(RunFileError, match="its findings would be lost: move the file, or name another"):
        read_kept(path)


def test_a_file_in_folders_that_are_not_there_yet_can_be_written(tmp_path):
    store.check_writable(tmp_path / "a/b/c.jsonl")
    assert [*(tmp_path / "a/b").iterdir()] == []
