"""What a command cannot do is one line that names the argument, and exit code 2; help says the rest."""

from __future__ import annotations

import os
import re
import signal
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from fakes import clean, one_line

from staleproof import device
from staleproof.cli import app as cli
from staleproof.cli import common
from staleproof.report import terminal
from staleproof.vllm import sources


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "nope"], "incidents: unknown incident 'nope'; known: fake (1)"),
        (["run", "fak"], "did you mean fake?"),
        (["run", "--device", "tpu"], "device: expected cpu, cuda or auto, got 'tpu'"),
        (["run", "--json", "{root}/a_file/x.jsonl"], "--json: {root}/a_file/x.jsonl: cannot be written"),
        (["run", "--json", "{root}"], "cannot be written: it is a folder"),
        (["record", "--out", "{root}/a_file"], "--out: {root}/a_file/"),
        (["compare", "here", "there"], "first: here: neither a run folder nor a recorded machine"),
        (["audit", "{root}/nope.py"], "modules: {root}/nope.py: expected a Python file or a module"),
        (["audit", "typing", "no_such.module"], "modules: no_such.module: expected a Python file"),
        (["audit"], "staleproof audit: Missing argument 'modules'"),
        (["audit", "typing", "--onto", "x.jsonl"], "No such option: --onto"),
        (
            ["audit", "typing", "--json", "{root}/a.svg", "--picture", "{root}/a.svg"],
            "--picture: expected another file than --json",
        ),
        (["audit", "typing", "--device", "tpu"], "device: expected cpu, cuda or auto"),
        (["audit", "typing", "--json", "{root}"], "--json: {root}: cannot be written: it is a folder"),
        (
            ["audit", "typing", "--scripts", "{root}/a_file"],
            "--scripts: expected a folder, got the file {root}",
        ),
        (
            ["audit", "typing", "--scripts", "{root}/a_file/s"],
            "--scripts: {root}/a_file/s/script.py: cannot be written",
        ),
        (
            ["audit", "typing", "--picture", "{root}/a_file/p.svg"],
            "--picture: {root}/a_file/p.svg: cannot be",
        ),
        (
            ["audit", "typing", "--picture", "p.png"],
            "--picture: expected a file that ends in .svg, got p.png",
        ),
        (
            ["watch", "localhost:1"],
            "url: expected HOST:PORT of a server with STALEPROOF_WATCH=1, got 'localhost:1'",
        ),
        (["patches", "--version", "9.9"], "--version: vLLM 9.9 is not a release we know (nearest: 0.33.0)"),
        (["patches", "--version", "main"], "--version: vLLM main is not a version"),
        (["patches", "--explain", "nope"], "--explain: unknown patch 'nope'; known: mla_padding"),
        (["patches", "--explain", "mla_padding", "--version", "0.18.1"], "expected no --version beside it"),
        (
            ["patches", "--explain", "mla_padding", "--json"],
            "--explain: prints a text about a patch; expected",
        ),
        (
            ["patches", "--live", "a:1", "--version", "0.18.1"],
            "--live: asks a server that runs; expected no --version",
        ),
        (["patches", "--live", "a:1", "--explain", "mla_padding"], "expected no --explain beside it"),
        (["patches", "--live", "localhost:abc"], "--live: expected HOST:PORT, the port from 1 to 65535, got"),
        (["patches", "--live", "http://localhost:1/"], "--live: http://localhost:1/health says nothing of"),
        (["watch", "localhost:99999"], "url: expected HOST:PORT, the port from 1 to 65535, got 'localhost:9"),
        (["watch", "localhost"], "url: expected HOST:PORT, the port from 1 to 65535, got 'localhost'"),
        (
            ["patches"],
            "staleproof: no vLLM is installed; name a release: staleproof patches --version 0.18.1",
        ),
        (["nope"], "staleproof: No such command 'nope' (see staleproof --help)"),
        (["run", "--nope"], "staleproof run: No such option: --nope"),
        (["run", "--json"], "staleproof: Option '--json' requires an argument"),
        (["compare", "one"], "staleproof compare: Missing argument 'second'"),
        (["watch", "localhost:1", "--json"], "staleproof: watch: --json needs --once"),
    ],
)
def test_bad_input_is_one_line_and_2(root, incident, capsys, monkeypatch, arguments, said):
    asked = incident(clean)
    monkeypatch.setattr(sources, "_version_of", lambda name: None)
    monkeypatch.setattr(
        sources, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    )
    (root / "a_file").write_text("in the way")
    assert cli.main([a.format(root=root) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert said.format(root=root) in one_line(captured.err)
    assert captured.out == ""
    assert asked == []
    assert (root / "a_file").read_text() == "in the way"
    assert not root.with_name(f"{root.name}.lock").exists()


def test_an_argument_that_nobody_gave_is_not_named(root, incident, capsys):
    incident(clean)
    (root / "workbook/_build/findings.jsonl").mkdir(parents=True)
    assert cli.main(["run"]) == 2
    said = one_line(capsys.readouterr().err)
    assert re.match(r"staleproof: /.*/findings\.jsonl: cannot be written: it is a folder", said), said


@pytest.mark.parametrize(("given", "code"), [(3, 3), (0, 0), ("a text", 1), (None, 1)])
def test_what_ends_the_process_from_inside_a_command_is_no_success_unless_it_says_so(
    monkeypatch, given, code
):
    def leave(**_: object) -> None:
        raise SystemExit(given)

    monkeypatch.setattr(cli, "app", leave)
    assert cli.main(["run"]) == code


@pytest.mark.parametrize(("ended", "code"), [(KeyboardInterrupt(), 130), (common.Ended(signal.SIGTERM), 143)])
def test_a_command_that_keeps_nothing_is_interrupted_in_one_line(monkeypatch, capsys, ended, code):
    monkeypatch.setattr(device, "select", Mock(side_effect=ended))
    assert cli.main(["list"]) == code
    assert one_line(capsys.readouterr().err) == "staleproof: interrupted"


def test_a_reader_that_has_gone_is_no_verdict(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # the command may replace it
    # Its own: what a console could not print it prints later, and after this it prints nothing more.
    alone = terminal.Console(highlight=False)
    monkeypatch.setattr(terminal, "console", lambda: alone)
    assert cli.main(["patches", "--version", "0.18.1"]) == 141


def test_help_is_one_screen_and_says_every_exit_code(capsys):
    assert cli.main(["-h"]) == 0
    said = capsys.readouterr().out
    assert len(said.splitlines()) <= 36
    assert said.index("staleproof diagnose") < said.index("Exit codes") < said.index("Options:")
    for code in ("0", "1", "2", "3", "130", "143"):
        assert re.search(rf"\b{code}\b", said), code
    assert "..." not in said.partition("Commands:")[2]


def test_a_device_that_is_absent_is_2(root, incident, capsys, monkeypatch):
    incident(clean)
    monkeypatch.setattr(device, "has_cuda", lambda: False)
    assert cli.main(["run", "--device", "cuda"]) == 2
    assert "torch sees no CUDA device" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("missing", "ends"),
    [*((name, 2) for name in ("torch", "prometheus_client")), ("a_module_of_ours", ModuleNotFoundError)],
)
def test_a_package_that_staleproof_needs_and_nobody_installed_is_one_line(
    root, incident, capsys, monkeypatch, missing, ends
):
    incident(clean)

    def select(device: str | None = None) -> str:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(device, "select", select)
    if ends != 2:
        with pytest.raises(ends):
            cli.main(["run"])
        return
    assert cli.main(["run"]) == 2
    assert one_line(capsys.readouterr().err) == f"staleproof: this command needs {missing}: pip install -e ."
