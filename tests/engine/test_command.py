"""``staleproof engine``: bad input is one line, findings are kept, and a run can be recorded."""

from __future__ import annotations

import json

import pytest
from tests.made import finding

from staleproof import device
from staleproof.cases.store import read
from staleproof.cli import app as cli
from staleproof.engine import command


def test_an_unknown_question_is_one_line(capsys):
    assert cli.main(["engine", "mla", "moe", "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said == (
        "staleproof: unknown question 'moe'; "
        "known: mla, starts, blocks, hybrid, router, ranks, watch, memory\n"
    )


@pytest.fixture
def without_gpu(monkeypatch):
    """No engine is started, also where one could be."""
    monkeypatch.setattr(device, "select", lambda name=None: "cpu")


def test_findings_are_printed_kept_and_recorded(capsys, without_gpu, tmp_path):
    path = tmp_path / "engine.jsonl"
    options = ["--device", "cpu", "--json", str(path), "--out", str(tmp_path / "runs")]
    assert cli.main(["engine", "blocks", *options]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["verdict"] for row in rows} == {"not run"}
    assert "engine, undrained block ids, Qwen3 dense: not run" in capsys.readouterr().out
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-engine")
    assert [found.key for found in read(folder).findings] == [
        (row["incident"], row["question"], row["variant"], "") for row in rows
    ]


def test_an_unexpected_verdict_is_not_recorded(capsys, without_gpu, monkeypatch, tmp_path):
    bad = finding("engine", "q", "v", "leaked", expected="clean")
    monkeypatch.setattr(command, "ask", lambda *_: [bad])
    options = ["--device", "cpu", "--json", str(tmp_path / "engine.jsonl"), "--out", str(tmp_path / "runs")]
    assert cli.main(["engine", *options]) == 1
    assert "1 verdicts are not as expected" in capsys.readouterr().err
    assert not [*(tmp_path / "runs").iterdir()]


def test_what_was_answered_is_kept_when_the_rest_is_interrupted(tmp_path):
    class Table:
        def run(self, device, progress):
            yield finding("engine", "q", "v", "clean")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        command.ask(Table(), "cpu", lambda line: None, lambda found: None, tmp_path / "engine.jsonl")
    assert json.loads((tmp_path / "engine.jsonl").read_text())["verdict"] == "clean"
