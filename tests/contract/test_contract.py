"""Answers of an audit: compared between releases, counted in the document, shown once for each kernel."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from staleproof import device
from staleproof.cases.finding import Finding, read_findings, write_findings
from staleproof.cli.app import main
from staleproof.contract import contract
from staleproof.contract.contract import BREAKS, CLAUSES, CONTRACT, HOLDS, KINDS, UNDEFINED
from staleproof.kernels.subject import ARGUMENTS, SIZES
from staleproof.report.audit import print_changes

ROW = Finding(*(CONTRACT, "E", "decode", BREAKS, "bad", "kernels 1.0"), machine={"name": "CPU"}, note="NaN")
NOT_RUN = replace(ROW, verdict="not run", outcome="not run")
WORKBOOK = Path(__file__).parents[2] / "workbook"


def test_a_release_is_compared_with_the_newest_before_it_of_its_own_package():
    before = [replace(ROW, release="kernels 1.9"), replace(ROW, release="kernels 1.10", verdict=HOLDS)]
    (change,) = contract.compare(before, [replace(ROW, release="kernels 1.11")])
    assert change.before is not None
    assert (change.before.release, change.after.verdict) == ("kernels 1.10", BREAKS)
    # The same release, where it was asked before.
    assert contract.compare([ROW, replace(ROW, release="kernels 2.0", verdict=HOLDS)], [ROW]) == []
    assert contract.compare([replace(ROW, variant="other", verdict=HOLDS), ROW], [ROW]) == []
    theirs = replace(ROW, release="others 2.0", verdict=HOLDS)
    assert contract.compare([ROW, theirs], [replace(ROW, release="kernels 1.1")]) == []
    assert contract.compare([], [ROW]) == [(None, ROW)]


def test_releases_within_one_audit_are_compared_on_the_same_machine():
    fixed = replace(ROW, release="kernels 1.1", verdict=HOLDS)
    elsewhere = replace(ROW, release="kernels 1.2", machine={"name": "GPU"})
    same = replace(fixed, release="kernels 1.10")
    absent = replace(NOT_RUN, release="kernels 1.0.5")
    assert contract.between_releases([same, elsewhere, absent, fixed, ROW]) == [(ROW, fixed)]


def test_a_pre_release_is_before_its_release_and_a_build_of_it_after():
    versions = [
        "1.9",
        "1.9+cu129",
        "1.9.post1",
        "1.10.dev3",
        "1.10rc1",
        "1.10",
        "1.10+cu130",
        "1.10.1",
        "1.11a1",
    ]
    # Another verdict each time.
    rows = [
        replace(ROW, release=f"kernels {version}", verdict=(HOLDS, BREAKS)[n % 2])
        for n, version in enumerate(versions)
    ]
    changes = contract.between_releases(rows[::-1])
    assert [change.after for change in changes] == rows[1:]
    (change,) = contract.compare(rows[:4], [replace(rows[4], verdict=HOLDS)])
    assert change.before == rows[3]


def test_an_audit_given_twice_shows_what_each_release_changed(tmp_path, capsys):
    path, other = tmp_path / "audit.jsonl", tmp_path / "other.jsonl"
    for file in (path, other):
        write_findings(file, [replace(ROW, verdict=HOLDS), replace(ROW, release="kernels 1.1")])
    assert print_changes(path, path) == 1
    changed = "E  kernels 1.1 decode: holds (1.0) -> breaks: NaN"
    assert capsys.readouterr().out.splitlines() == ["1 change, 1 for the worse", changed]
    assert print_changes(path, other) == 0


def test_the_document_has_every_clause_and_counts_what_the_recorded_audits_hold():
    text = (WORKBOOK / "contract.md").read_text()
    assert set(re.findall(r"\*\*([0-9A-Z]b?)\*\*", text)) == set(CLAUSES)
    files = [*(WORKBOOK / "audits").glob("*.jsonl")]
    assert len(files) == 2
    for path in files:
        rows = read_findings(path, recorded=False)
        ran = {(row.release, row.variant) for row in rows if row.ran}
        ours = sum(release.startswith("staleproof ") for release, _ in ran)
        verdicts = Counter(row.verdict for row in rows)
        counted = [verdicts[word] for word in (HOLDS, BREAKS, UNDEFINED, "not run")]
        counted = [len(ran) - ours, ours, *counted, sum(bool(row.script) for row in rows)]
        assert f"| `{path.name}` | {' | '.join(map(str, counted))} |" in text
        assert not [row for row in rows if row.failed]
        # A script of these two would hold the interpreter's repairs; incident 6 shows them.
        unshown = [row for row in rows if row.verdict == BREAKS and not row.script]
        scales = {("matmul_ogs", "O"), ("triton_kernels.matmul", "O")}
        assert {(row.variant.partition(",")[0], row.question) for row in unshown} <= scales


def test_every_clause_belongs_to_a_kind_and_every_kind_has_a_decorator():
    assert {clause for clauses in KINDS.values() for clause in clauses} == set(CLAUSES)
    assert set(SIZES) == set(KINDS)


@pytest.mark.skipif(not device.interpreting(), reason="the document shows an audit on a CPU")
def test_the_first_five_minutes_of_the_document_go_as_it_says(tmp_path, capsys):
    text = (WORKBOOK / "contract.md").read_text().partition("## Verdicts")[0]
    (sample,), (shown,) = (
        re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "text")
    )
    assert len([line for line in sample.splitlines() if line not in ("", "import torch")]) == 5
    file = tmp_path / "my_kernels.py"
    file.write_text(sample)
    command = ["audit", str(file), "--device", "cpu"]
    assert main(command) == 1
    machine = r"(INTERPRETED on ).*(: 1 of 1)"
    lines = [re.sub(machine, r"\1\2", line).split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [re.sub(machine, r"\1\2", line).split() for line in shown.splitlines()]
    assert main([*command, "--scripts", str(tmp_path / "scripts")]) == 1
    assert len([*(tmp_path / "scripts").iterdir()]) == 1
    mended = sample.replace("x.abs().max()", re.findall(r"`(x\.abs\(\)\.amax.*?)`", text)[0])
    (documented,) = re.findall(r"`(documented=.*?)`", text)
    for change in (mended, sample.replace("rows()", f"rows({documented})")):
        file.write_text(change)
        assert change != sample
        assert main(command) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_document_lists_every_argument_of_a_kind(kind):
    text = (WORKBOOK / "contract.md").read_text()
    (line,) = re.findall(rf"^\| `audit\.{kind}` \| (.*)$", text, re.MULTILINE)
    named = set(re.findall(r"`(\w+)", line))
    assert {*ARGUMENTS[kind], *SIZES[kind]} <= named
