"""Findings on disk, their grade, and whether they are as expected."""

import json
from dataclasses import replace
from importlib.metadata import version

import pytest

from staleproof import device
from staleproof.cases import finding as cases

KEY = cases.Key("a", "q", "v")


def test_findings_come_back_as_recorded(tmp_path):
    path = tmp_path / "deep" / "er" / "findings.jsonl"
    three = cases.Three("rows", "leaked", "clean", "leaked", right=True)
    written = [
        cases.finding(KEY, "rows", "leaked", expected="leaked", rows=3, amax=float("nan")),
        cases.finding(cases.Key("a", "off/on/off", "v", "0.22.1"), "fix", "fixed", three=three),
    ]
    cases.write_findings(path, written)
    read, fixed = cases.read_findings(path)
    assert read.provenance == "RECORDED"
    assert (read.key, read.verdict, read.numbers["rows"]) == (KEY, "leaked", 3)
    assert read.numbers["amax"] != read.numbers["amax"]
    assert (fixed.three, fixed.release) == (three, "0.22.1")
    assert read.machine == written[0].machine
    assert cases.read_findings(path, recorded=False)[1] == written[1]
    assert [p.name for p in path.parent.iterdir()] == ["findings.jsonl"]
    assert json.loads(path.read_text().splitlines()[0])["outcome"] == "bad"


GOOD = json.loads(cases.finding(KEY, "rows", "clean").to_json())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"incident": "a"', r"findings\.jsonl:1: truncated or not JSON"),
        (f'{json.dumps(GOOD)}\n{{"incident": "a", "schema": 3}}\n', r"findings\.jsonl:2: not a finding"),
        ("[1]\n", r"findings\.jsonl:1: expected an object, got list"),
        (json.dumps(GOOD), "the last line has no end"),
        *(
            (json.dumps(GOOD | changes) + "\n", said)
            for changes, said in (
                ({"surprise": 1}, r"finding: expected the fields of a finding, got also \['surprise'\]"),
                ({"schema": 2}, "schema: expected 3, which this staleproof reads, got 2"),
                ({"schema": 4}, "schema: expected 3"),
                ({"verdict": "leeked"}, "got 'leeked'"),
                ({"words": "nope"}, "got 'nope'"),
                ({"outcome": "bad"}, "outcome: expected good for clean, got bad"),
            )
        ),
    ],
)
def test_spoilt_findings_are_refused(tmp_path, text, said):
    path = tmp_path / "findings.jsonl"
    path.write_text(text)
    with pytest.raises(cases.RunFileError, match=said):
        cases.read_findings(path)


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff")
    for name, why in (("absent.jsonl", "No such file or directory$"), ("bytes.jsonl", "'utf-8' codec can't")):
        with pytest.raises(cases.RunFileError, match=rf"{name}: cannot be read: {why}"):
            cases.read_findings(tmp_path / name)
    (tmp_path / "empty.jsonl").touch()
    assert cases.read_findings(tmp_path / "empty.jsonl") == []


def test_a_failed_write_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "findings.jsonl"
    cases.write_findings(path, [cases.finding(KEY, "rows", "clean")])
    before = path.read_text()
    (tmp_path / "findings.jsonl.part").mkdir()
    with pytest.raises(cases.RunFileError, match="cannot be written"):
        cases.write_findings(path, [])
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("verdict", "expected", "ok", "failed"),
    [
        # A word within another, or that begins like it, is not that word.
        *(("hits: written", "unwritten", False, True), ("hits: unwritten", "written", False, True)),
        ("experts: distinct, not the best", "distinct", False, True),
        ("clean", "clean", True, False),
        ("clean", "leaked", False, True),
        ("wrong, finite", "clean", False, True),
        ("leaked", None, True, False),
        ("not run", "clean", False, False),
        ("not run", None, False, False),
    ],
)
def test_ok_failed_and_not_run(verdict, expected, ok, failed):
    family, _, word = verdict.rpartition(": ")
    found = cases.finding(KEY, family or "rows", word, expected=expected)
    assert (found.ok, found.failed, found.ran) == (ok, failed, word != "not run")


def test_a_real_finding_names_whose_code_ran_and_an_absent_one_has_no_grade():
    found = cases.finding(KEY, "rows", "leaked", evidence=cases.real("torch", "topk"))
    assert (found.grade, found.of) == ("real", f"torch {version('torch')} topk")
    absent = cases.not_run(KEY, "rows", "no GPU")
    assert (absent.grade, absent.of, cases.finding(KEY, "rows", "clean").grade) == ("", "", "replica")
    with pytest.raises(ValueError, match="of: expected the package and version whose code ran"):
        cases.Evidence(cases.Grade.REAL)


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
    assert cases.real_file("vllm", given).of == "vLLM, unknown release, _C_stable_libtorch"
    for name, release in (("aaa", "9.9"), ("vllm", "0.22.1")):
        info = tmp_path / f"unpacked/{name}-{release}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    assert cases.real_file("vllm", given).of == "vLLM 0.22.1 _C_stable_libtorch"


def test_a_library_that_lies_alone_is_of_no_known_release(tmp_path):
    """Another vLLM in the same folder says nothing about it."""
    info = tmp_path / "vllm-0.22.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.22.1\n")
    for folder in ("libraries", "vllm_libraries"):
        assert cases.real_file("vllm", tmp_path / folder / "_C.abi3.so").of == "vLLM, unknown release, _C"


def test_a_remedy_with_an_open_answer_is_not_fixed_whatever_was_compared():
    assert cases.Three("scales", "NaN", "0xff now and then", "NaN", right=True).verdict == "not fixed"


def test_a_finding_of_an_earlier_bookkeeping_is_stale():
    found = cases.finding(KEY, "rows", "clean")
    assert not found.stale
    assert replace(found, machinery=found.machinery - 1).stale
