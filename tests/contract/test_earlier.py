"""An audit that goes on from an earlier one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from staleproof import device as devices
from staleproof.cases.finding import RunFileError
from staleproof.cli.app import main
from staleproof.contract import earlier, runner
from staleproof.contract.contract import Row, Verdict, read_rows, write_rows
from staleproof.kernels.subject import Subject

SUBJECT = Subject("merge", "merge", print, package="kernels")
ROW = Row("merge", "kernels", "1.0", "0", Verdict.HOLDS, "", "CPU", "INTERPRETED")
BROKEN = replace(ROW, clause="E", verdict=Verdict.BREAKS, note="NaN", counterexample="old\n")
REST = [replace(ROW, clause=clause) for clause in "RO"]
ABSENT = replace(ROW, verdict=Verdict.NOT_RUN, note="no GPU")
MODULE = """
from staleproof import audit

@audit.rows(name="shared scale")
def shared(x):
    return x / x.abs().max()

@audit.rows(name="right")
def right(x):
    return 2 * x
"""


def test_a_subject_that_ran_is_not_asked_again_and_one_that_did_not_is_asked_everything():
    everything = ("0", "E", "R", "O")
    assert earlier.open_clauses(SUBJECT, "1.0", [ROW, BROKEN, *REST]) == ()
    assert earlier.open_clauses(SUBJECT, "1.0", [ABSENT]) == everything
    assert earlier.open_clauses(SUBJECT, "2.0", [ROW]) == everything
    assert earlier.open_clauses(SUBJECT, "1.0", [replace(ROW, subject="other")]) == everything


def test_a_clause_that_the_earlier_audit_did_not_know_is_asked():
    assert earlier.open_clauses(SUBJECT, "1.0", [ROW, BROKEN, REST[0]]) == ("0", "O")
    # Clause 0 without a reference is an answer to the others all the same.
    unchecked = replace(ROW, verdict=Verdict.NOT_RUN, note="not checked, no reference")
    assert earlier.open_clauses(SUBJECT, "1.0", [unchecked, BROKEN, *REST]) == ()


def test_broken_clauses_are_asked_again_with_clean_input_before_them():
    again = (Verdict.BREAKS,)
    assert earlier.open_clauses(SUBJECT, "1.0", [ROW, BROKEN, *REST], again) == ("0", "E")
    whole = replace(BROKEN, verdict=Verdict.HOLDS)
    assert earlier.open_clauses(SUBJECT, "1.0", [ROW, whole, *REST], again) == ()


def test_an_answer_replaces_a_gap_and_a_gap_replaces_no_answer():
    assert earlier.merged([ABSENT], [ROW]) == [ROW]
    assert earlier.merged([ROW], [ABSENT]) == [ROW]
    newer = replace(ABSENT, note="no such GPU")
    assert earlier.merged([ABSENT], [newer]) == [newer]
    renewed = replace(BROKEN, counterexample="new\n")
    assert earlier.merged([ROW, BROKEN], [renewed]) == [ROW, renewed]


def test_an_answer_that_did_not_come_in_time_replaces_no_answer():
    late = replace(ROW, verdict=Verdict.BREAKS, note="no answer within 40 s")
    assert earlier.merged([ROW], [late]) == [ROW]
    assert earlier.merged([late], [ROW]) == [ROW]
    assert earlier.merged([ABSENT], [late]) == [late]


def test_a_package_that_was_not_there_goes_when_a_release_of_it_came():
    nowhere = replace(ABSENT, version="", note="kernels is not here")
    assert earlier.merged([nowhere], [ROW]) == [ROW]
    assert earlier.merged([ROW], [nowhere]) == [ROW]
    assert earlier.merged([nowhere], []) == [nowhere]


def test_an_audit_of_another_machine_is_refused():
    with pytest.raises(RunFileError, match="expected an audit of GPU, got one of CPU"):
        earlier.check_machine([ROW], "GPU")


def test_the_command_asks_what_was_left_open_and_writes_both(tmp_path, monkeypatch, capsys):
    (tmp_path / "kernels.py").write_text(MODULE)
    rows = [row for found in runner.audit([str(tmp_path / "kernels.py")], "cpu") for row in found]
    kept = [replace(row, note="kept") if row.subject == "right" else row for row in rows]
    gaps = [replace(row, verdict=Verdict.NOT_RUN) if row.subject != "right" else row for row in kept]
    write_rows(tmp_path / "old.jsonl", gaps)
    new = str(tmp_path / "new.jsonl")
    command = ["audit", str(tmp_path / "kernels.py"), "--device", "cpu", "--json", new]
    assert main([*command, "--onto", str(tmp_path / "old.jsonl")]) == 1
    assert read_rows(tmp_path / "new.jsonl") == kept
    write_rows(tmp_path / "old.jsonl", [replace(row, machine="another") for row in rows])
    assert main([*command, "--onto", str(tmp_path / "old.jsonl")]) == 2
    machine = devices.machine().name
    assert f"onto: expected an audit of {machine}, got one of another" in capsys.readouterr().err
