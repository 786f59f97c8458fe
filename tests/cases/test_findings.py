"""Findings on disk, and the off/on/off rule."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from staleproof import device
from staleproof.cases.finding import (
    Evidence,
    Finding,
    Grade,
    RunFileError,
    finding,
    not_run,
    off_on_off,
    proved,
    read_findings,
    real,
    real_file,
    write_findings,
)


def test_findings_come_back_as_recorded(tmp_path):
    path = tmp_path / "deep" / "findings.jsonl"
    written = [finding("a", "q", "v", "leaked", expected="leaked", rows=3, amax=float("nan"))]
    write_findings(path, written)
    (read,) = read_findings(path)
    assert read.provenance == "RECORDED"
    assert (read.key, read.verdict, read.numbers["rows"]) == (("a", "q", "v"), "leaked", 3)
    assert read.numbers["amax"] != read.numbers["amax"]
    assert read.machine == written[0].machine
    assert [p.name for p in path.parent.iterdir()] == ["findings.jsonl"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"incident": "a"', "truncated or not JSON"),
        ('{"incident": "a"}\n', "not a finding"),
        ('{"surprise": 1, "incident": "a"}\n', "not a finding"),
        ("[1]\n", "expected an object"),
        ('{"schema": 3}\n', "newer than 2"),
        (finding("a", "q", "v", "clean").to_json(), "the last line has no end"),
    ],
)
def test_spoilt_findings_are_refused(tmp_path, text, said):
    path = tmp_path / "findings.jsonl"
    path.write_text(text)
    with pytest.raises(RunFileError, match=said):
        read_findings(path)


def test_a_failed_write_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "findings.jsonl"
    write_findings(path, [finding("a", "q", "v", "clean")])
    before = path.read_text()
    (tmp_path / "findings.jsonl.part").mkdir()
    with pytest.raises(RunFileError, match="cannot be written"):
        write_findings(path, [])
    assert path.read_text() == before


def test_ok_failed_and_not_run():
    good = finding("a", "q", "v", "clean", expected="clean")
    bad = finding("a", "q", "v", "clean", expected="leaked")
    absent = not_run("a", "q", "v", "no GPU")
    open_question = finding("a", "q", "v", "leaked")
    states = [(f.ok, f.failed, f.ran) for f in (good, bad, absent, open_question)]
    assert states == [(True, False, True), (False, True, True), (False, False, False), (True, False, True)]


@pytest.mark.parametrize(
    ("off", "on", "off_again", "verdict"),
    [
        ("leaked", "clean", "leaked", "fixed"),
        ("pad_only", "clean", "pad_only", "fixed"),
        ("leaked", "leaked", "leaked", "not fixed"),
        ("leaked", "pad_only", "leaked", "not fixed"),
        ("clean", "clean", "leaked", "not reproduced"),
        ("leaked", "clean", "clean", "not reproduced"),
        ("not run", "clean", "leaked", "not reproduced"),
    ],
)
def test_off_on_off(off, on, off_again, verdict):
    found = off_on_off("a", "ours", off=off, on=on, off_again=off_again, wrong=None, steps=4)
    assert found.verdict == verdict
    assert found.ok is (verdict == "fixed")
    assert found.numbers["steps"] == 4
    assert proved(found) is found


@pytest.mark.parametrize(
    ("on", "verdict"), [("clean", "wrong"), ("lives", "wrong"), ("leaked", "not fixed"), (None, "not fixed")]
)
def test_a_fix_with_a_wrong_result_is_wrong_and_fails(on, verdict):
    found = off_on_off(
        "a", "ours", off="leaked", on=on, off_again="leaked", wrong="rows are 3 times too large"
    )
    assert (found.verdict, found.failed, found.numbers["right"]) == (verdict, True, False)
    assert found.note == "rows are 3 times too large"


def test_fixed_without_a_comparison_is_not_believed():
    three = {"off": "leaked", "on": "clean", "off_again": "leaked"}
    for more in ({}, {"right": False}, {"right": "yes"}):
        judged = proved(finding("a", "off/on/off", "ours", "fixed", **three, **more))
        assert (judged.verdict, judged.expected, judged.failed) == ("wrong", "fixed", True)
        assert "nothing shows that the result is right" in judged.note


def test_a_real_finding_names_whose_code_ran_and_an_absent_one_has_no_grade():
    found = finding("a", "q", "v", "nan", evidence=real("torch", "topk"))
    assert (found.grade, found.of) == ("real", f"torch {version('torch')} topk")
    assert (not_run("a", "q", "v", "no GPU").grade, finding("a", "q", "v", "nan").grade) == ("", "replica")
    with pytest.raises(ValueError, match="of: expected the package and version whose code ran"):
        Evidence(Grade.REAL)


@pytest.mark.parametrize("numbers", [{}, {"off": "leaked", "on": "clean"}])
def test_fixed_without_the_three_verdicts_is_not_believed(numbers):
    claim: Finding = finding("a", "off/on/off", "ours", "fixed", **numbers)
    judged = proved(claim)
    assert (judged.verdict, judged.expected) == ("not reproduced", "fixed")
    assert judged.failed


@pytest.mark.parametrize("is_link", [False, True])
def test_a_library_is_of_the_release_beside_it_not_of_the_installed_one(tmp_path, monkeypatch, is_link):
    monkeypatch.setattr(device, "version_of", lambda distribution: "0.20.2")
    library = tmp_path / "unpacked/vllm/_C_stable_libtorch.abi3.so"
    library.parent.mkdir(parents=True)
    library.touch()
    given = library
    if is_link:
        given = tmp_path / "_C.so"
        given.symlink_to(library)
    assert real_file("vllm", given).of == "vLLM, unknown release, _C_stable_libtorch"
    info = tmp_path / "unpacked/vllm-0.22.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.22.1\n")
    assert real_file("vllm", given).of == "vLLM 0.22.1 _C_stable_libtorch"


def test_a_library_that_lies_alone_is_of_no_known_release(tmp_path):
    """Another vLLM in the same folder says nothing about it."""
    info = tmp_path / "vllm-0.22.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.22.1\n")
    assert real_file("vllm", tmp_path / "libraries/_C.abi3.so").of == "vLLM, unknown release, _C"
