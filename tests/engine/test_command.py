"""``staleproof engine``: bad input is one line, findings are kept, and a run can be recorded."""

import dataclasses
import json

import pytest
from tests.made import finding

from staleproof import device
from staleproof.cases import store
from staleproof.cases.store import read
from staleproof.cli import app as cli
from staleproof.engine import command, orders


def test_an_unknown_question_is_one_line(capsys):
    assert cli.main(["engine", "mla", "moe", "gpu", "--device", "cpu"]) == 2
    known = "mla, starts, blocks, hybrid, router, ranks, watch, memory"
    assert capsys.readouterr().err == f"staleproof: unknown question 'moe'; known: {known}\n"


@pytest.fixture
def without_gpu(monkeypatch):
    """No engine is started, also where one could be."""
    monkeypatch.setattr(device, "select", lambda name=None: "cpu")


def test_findings_are_printed_and_kept_and_a_run_of_nothing_is_not_recorded(capsys, without_gpu, tmp_path):
    path = tmp_path / "engine.jsonl"
    options = ["--device", "cpu", "--json", str(path), "--out", str(tmp_path / "runs")]
    assert cli.main(["engine", "blocks", *options]) == 2
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["verdict"] for row in rows} == {"not run"}
    said = capsys.readouterr()
    # The reason once, not a line for each question.
    assert f"\nnot run: {len(rows)} a real engine needs a CUDA GPU" in said.out
    assert said.out.count("a real engine needs") == 1
    assert f"nothing ran here ({len(rows)} not run), so nothing is recorded" in said.err
    assert not [*(tmp_path / "runs").iterdir()]


def test_an_unexpected_verdict_is_not_recorded(capsys, without_gpu, monkeypatch, tmp_path):
    bad = finding("engine", "q", "v", "leaked", expected="clean")
    asked = []
    monkeypatch.setattr(command, "ask", lambda *given: asked.append(given) or [bad])
    options = f"--limit 7 --device cpu --json {tmp_path}/engine.jsonl --out {tmp_path}/runs"
    assert cli.main(["engine", *options.split()]) == 1
    assert "1 verdicts are not as expected" in capsys.readouterr().err
    assert not [*(tmp_path / "runs").iterdir()]
    assert asked[0][-1] == 7.0


def test_a_run_is_recorded_only_if_that_was_asked_for(capsys, without_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(store, "runs_folder", lambda: tmp_path / "runs")
    found = [finding("engine", "q", "v", "clean"), finding("engine", "q", "w", "not run")]
    monkeypatch.setattr(command, "ask", lambda *_: found)
    options = ["--device", "cpu", "--json", str(tmp_path / "engine.jsonl")]
    for more, count in (([], 0), (["--record"], 1)):
        assert cli.main(["engine", *options, *more]) == 0
        assert len([*(tmp_path / "runs").glob("*-engine")]) == count
        said = capsys.readouterr().out
        assert ("recorded: " in said, "verdicts 1 as expected" in said) == (bool(count), True)
    (folder,) = (tmp_path / "runs").iterdir()
    assert [one.key for one in read(folder).findings] == [one.key for one in found]
    # Without a checkout they are printed, and kept nowhere.
    monkeypatch.setattr(store, "PACKAGE", tmp_path)
    assert cli.main(["engine", "--device", "cpu"]) == 0


class Answers:
    """A table of findings; it notes the time its engines have, and that it was closed."""

    def __init__(self, *found):
        self.found, self.noted = found, []

    def run(self, device, progress):
        self.noted.append((device, round(orders.left_s()) if orders.left_s() < 1e9 else None))
        progress("begins")
        try:
            yield from self.found
        finally:
            self.noted.append("closed")


@pytest.mark.parametrize("limit", [None, 50.0])
def test_every_finding_is_said_as_it_comes_and_kept_once(tmp_path, limit):
    one, two = (finding("engine", "q", name, "clean") for name in "ab")
    table, lines, said, path = Answers(one, two), [], [], tmp_path / "engine.jsonl"
    assert command.ask(table, "cuda", lines.append, said.append, path, limit) == said == [one, two]
    assert (lines, table.noted) == (["begins"], [("cuda", limit), "closed"])
    assert [json.loads(line)["variant"] for line in path.read_text().splitlines()] == ["a", "b"]
    assert orders.left_s() > 1e9


def test_nothing_is_written_nowhere_and_no_findings_are_no_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    one = finding("engine", "q", "v", "clean")
    assert command.ask(Answers(one), "cpu", print, print, None) == [one]
    old = tmp_path / "engine.jsonl"
    old.write_text("what a run before this one found")
    assert command.ask(Answers(), "cpu", print, print, old) == []
    assert old.read_text() == "what a run before this one found"
    assert [*tmp_path.iterdir()] == [old]


def test_an_interrupt_ends_the_engines_and_what_was_answered_is_kept(tmp_path):
    def interrupt(found):
        raise KeyboardInterrupt

    table = Answers(finding("engine", "q", "v", "clean"))
    with pytest.raises(KeyboardInterrupt):
        command.ask(table, "cpu", print, interrupt, tmp_path / "engine.jsonl")
    assert table.noted[-1] == "closed"
    assert json.loads((tmp_path / "engine.jsonl").read_text())["variant"] == "v"


def test_only_another_release_is_named_by_its_run():
    here = device.machine()
    for vllm, end in (("0.22.1", ""), (None, ""), ("none", ""), ("0.26.0", "-0.26.0")):
        machine = dataclasses.replace(here, name="NVIDIA H200", vllm=vllm)
        assert command.run_name(machine) == f"nvidia-h200-engine{end}"
