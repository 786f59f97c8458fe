"""Findings are kept from run to run: merged, with the source they are of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from staleproof.cases.finding import RunFileError, finding, write_findings
from staleproof.cases.kept import merged, origins, read_kept
from staleproof.device import Provenance


def test_the_answers_of_other_incidents_stay_and_keep_their_provenance(tmp_path):
    path = tmp_path / "findings.jsonl"
    old = replace(finding("b", "q", "v", "clean"), provenance=Provenance.MEASURED, source_digest="then")
    write_findings(path, [old, finding("a", "q", "v", "clean")])
    after = merged(read_kept(path), [finding("a", "q", "v", "leaked")], ["a"], ["a", "b"])
    assert [(f.incident, f.verdict) for f in after] == [("a", "leaked"), ("b", "clean")]
    assert after[1] == old


def test_a_question_that_is_gone_leaves_with_a_complete_run_only():
    gone, again = finding("a", "gone", "v", "clean"), finding("a", "q", "v", "clean")
    new = finding("a", "q", "v", "leaked")
    assert merged([gone, again], [new], ["a"], ["a"]) == [new]
    assert merged([gone, again], [new], [], ["a"]) == [new, gone]


def test_origins_name_the_source_of_what_is_older(monkeypatch):
    today = finding("mla_padding", "q", "v", "clean")
    old = [replace(today, variant=str(n), source_digest="abc", date="2026-01-02") for n in range(2)]
    first, second = origins([today, *old])
    assert first.endswith("the source as it is now")
    assert second.startswith("mla_padding: 2 findings, ")
    assert "2026-01-02" in second
    assert second.endswith(f"source abc, which is {today.source_digest} now: run it again")


@pytest.mark.parametrize("spoil", [lambda text: text[:-9], lambda text: text.replace("INTERP", "OTHER")])
def test_a_file_that_cannot_be_read_is_refused_and_not_overwritten(tmp_path, spoil):
    path = tmp_path / "findings.jsonl"
    write_findings(path, [replace(finding("a", "q", "v", "clean"), provenance=Provenance.INTERPRETED)])
    path.write_text(spoil(path.read_text()))
    with pytest.raises(RunFileError, match="its findings would be lost: move the file, or name another"):
        read_kept(path)
