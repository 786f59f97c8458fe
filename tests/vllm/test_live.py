"""One truth a server: several processes, a switch, and the command that asks."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from staleproof.cli import app as cli
from staleproof.vllm import hooks, live, process, watch_port
from staleproof.vllm.live import Here
from staleproof.vllm.standing import registry

pytest.importorskip("prometheus_client")
SRC = str(Path(__file__).parents[2] / "src")
# A process of a server, in which one patch is as its argument says; it ends with its input.
CHILD = """
import sys
from staleproof.vllm import live
from staleproof.vllm.standing import registry
name, place, state = sys.argv[1:4]
live.BEAT_S = 0.05
registry.of(name).targets[place] = state
first = live.enter(live.Here("0.22.1", [name], incidents={name: "kv_reuse"}), reports=True)
live.beat()
print(first, flush=True)
sys.stdin.read()
"""


@pytest.fixture(name="here")
def here_fixture(monkeypatch):
    """This process as the first of a server with one patch, which waits for its module."""
    monkeypatch.delenv(live.FOLDER, raising=False)
    monkeypatch.delenv(live.SWITCH, raising=False)
    registry.of("undrained_ids").targets["vllm.sched:schedule"] = "waiting"
    here = Here("0.22.1", ["undrained_ids"], incidents={"undrained_ids": "kv_reuse"})
    assert live.enter(here, reports=True)
    yield here
    live._leave(os.environ[live.FOLDER], os.getpid())
    registry.forget("undrained_ids")
    live._here.clear()


def child(*arguments):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    env = os.environ | {"PYTHONPATH": SRC}
    process = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], env=env, **pipes)
    assert process.stdout
    assert process.stdout.readline() == "False\n"
    return process


def until(true):
    end = time.monotonic() + 20
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


def ask(capsys, port, *more):
    code = cli.main(["patches", "--live", f"localhost:{port}", *more])
    return code, capsys.readouterr().out


def test_the_truth_is_that_of_all_processes(here, capsys, monkeypatch):
    """A patch of the engine core does not wait for ever, and what fails there is seen."""
    port = watch_port.serve(None, 0)
    number = port.server_address[1]
    code, text = ask(capsys, number)
    assert (code, "will be patched" in text) == (0, True)
    assert text.endswith("\nnothing is refused, partly in place, or required and off\n")
    with child("undrained_ids", "vllm.sched:schedule", "in place"):
        assert live.health()["patches"] == {"undrained_ids": ("in place", "")}
        assert len(live.health()["processes"]) == 2
    with child("undrained_ids", "vllm.sched:schedule", "schedule was replaced"):
        code, text = ask(capsys, number)
        assert code == 3
        assert "refused" in text
        assert "schedule was replaced" in text
        assert text.endswith("\nsomething is refused, partly in place, or required and off\n")
        assert "vLLM 0.22.1" in text
        code, text = ask(capsys, number, "--json")
        assert code == 3
        assert json.loads(text)["patches"]["undrained_ids"] == ["refused", "schedule was replaced"]
    # It is gone, and so is what it said.
    assert ask(capsys, number)[0] == 0
    monkeypatch.setenv(process.REQUIRE, "undrained_ids")
    assert live.health(os.environ[process.REQUIRE])["ok"]
    registry.switch(["undrained_ids"], "the test")
    assert live.health()["ok"]
    assert ask(capsys, number)[0] == 3, "it is required, and switched off"
    port.shutdown()
    assert cli.main(["patches", "--live", "localhost:1"]) == 2


@pytest.mark.parametrize("answer", ['{"status": "ok"}', "3", "not JSON", ""])
def test_a_server_that_knows_nothing_of_staleproof_is_bad_input(capsys, monkeypatch, answer):
    asked = []

    def urlopen(url, timeout):
        # Nor is one waited for that never answers.
        asked.append((url, timeout < 60))
        return io.BytesIO(answer.encode())

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    for server in ("somewhere:9464", "http://somewhere:9464"):
        assert cli.main(["patches", "--live", server]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(
            "staleproof: --live: http://somewhere:9464/health says nothing of staleproof ("
        )
        assert asked.pop() == ("http://somewhere:9464/health", True)


@pytest.mark.parametrize(
    ("states", "stands", "ok"),
    [
        (["in place", "partly"], "partly", False),
        (["partly", "refused"], "refused", False),
        (["in place", "off"], "off", True),
        (["off", "partly"], "partly", False),
        (["will be patched", "in place"], "in place", True),
        (["not needed", "will be patched"], "will be patched", True),
        ([], None, False),
    ],
)
def test_the_server_stands_as_the_worst_of_its_processes(monkeypatch, states, stands, ok):
    told = [
        {"vllm": "1", "model": m, "patches": {"a": [s, s]}} for s, m in zip(states, ("", "m"), strict=False)
    ]
    for processes in (told, told[::-1]):
        monkeypatch.setattr(live, "gather", lambda processes=processes: processes)
        health = live.health()
        assert health["patches"] == ({"a": (stands, stands)} if states else {})
        assert (health["ok"], health["model"]) == (ok, "m" if states else "")


def test_a_switch_reaches_every_process_and_needs_no_restart(here, tmp_path, monkeypatch):
    file = tmp_path / "off"
    monkeypatch.setenv(live.SWITCH, str(file))
    with child("undrained_ids", "vllm.sched:schedule", "in place"):
        for words, state in (
            ("kv_reuse\n", "off"),
            (None, "in place"),
            ("", "off"),
            ("mla_padding", "in place"),
        ):
            file.unlink(missing_ok=True)
            if words is not None:
                file.write_text(words)
            assert until(lambda state=state: live.health()["patches"]["undrained_ids"][0] == state), words


@pytest.mark.parametrize(
    ("words", "off", "said"),
    [
        ([b"all"], True, None),
        ([b"undrained_ids,mla"], True, "names mla, which is no patch"),
        ([b"\xff\xfe"], False, "cannot be read, nothing is switched"),
        # Nor is anything switched on again.
        ([b"all", b"\xff\xfe"], True, "cannot be read, nothing is switched"),
        ([b"mla"], False, "names mla, which is no patch"),
    ],
)
def test_what_a_switch_says(here, tmp_path, caplog, words, off, said):
    for each in words:
        (tmp_path / "off").write_bytes(each)
        live.look_at_switch(str(tmp_path / "off"), here)
    assert (process.state("undrained_ids")[0] == "off") is off
    assert said is None or said in caplog.text
    caplog.clear()
    live.look_at_switch(str(tmp_path / "off"), here)
    assert not caplog.records


@pytest.mark.parametrize(
    ("words", "off"), [("mla_padding", ["mla_padding"]), ("kv_reuse", ["undrained_ids"])]
)
def test_a_word_for_a_patch_spares_the_others_of_an_incident_of_that_name(
    tmp_path, monkeypatch, caplog, words, off
):
    switched = []
    monkeypatch.setattr(registry, "switch", lambda names, why: switched.append(names) or [])
    incidents = {"mla_padding": "mla_padding", "fp8_scale": "mla_padding", "undrained_ids": "kv_reuse"}
    (tmp_path / "off").write_text(words)
    live.look_at_switch(str(tmp_path / "off"), Here("0.22.1", [*incidents], incidents=incidents))
    assert (switched, caplog.messages) == ([off], [])


def test_one_look_at_a_switch_is_one_line_of_all_that_is_off_and_no_error(here, tmp_path, caplog):
    here.names.append("unpublish")
    registry.of("unpublish").targets["vllm.sched:preempt"] = "waiting"
    here.incidents["unpublish"] = "published_unwritten"
    file = tmp_path / "off"
    for words in ("kv_reuse", "", None):
        file.unlink(missing_ok=True)
        if words is not None:
            file.write_text(words)
        live.look_at_switch(str(file), here)
    registry.forget("unpublish")
    by, both = f"switched off by {file}", "undrained_ids, unpublish"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"staleproof: undrained_ids: {by}; in service: unpublish"),
        ("WARNING", f"staleproof: unpublish: {by}; out of service: {both}; in service: nothing"),
        ("WARNING", f"staleproof: {both}: in service again"),
    ]


def test_each_second_what_may_come_back_is_put_in_place_again(here, monkeypatch):
    renewed = []
    monkeypatch.setattr(hooks, "renew", lambda: renewed.append(True))
    registry.of("undrained_ids").on_host = True
    registry.step_back("undrained_ids", "it failed", again_at=-1e9)
    live.tick()
    assert (process.state("undrained_ids")[0], renewed) == ("will be patched", [True])


def test_a_start_with_the_switch_is_off_from_the_beginning(here, tmp_path, monkeypatch):
    (tmp_path / "off").write_text("")
    monkeypatch.setenv(live.SWITCH, str(tmp_path / "off"))
    live.enter(here, reports=True)
    assert process.state("undrained_ids")[0] == "off"


def test_a_forked_process_has_its_own_thread(here):
    live.beat()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if [t.name for t in __import__("threading").enumerate()].count("staleproof") == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_without_a_folder_only_the_answer_is_missing(here, monkeypatch, caplog):
    # Taken back before the fixture ends the server, or its folder's name would stay in this process.
    with monkeypatch.context() as patched:
        patched.setenv(live.FOLDER, "/no/such/folder")
        process.contained(here.publish, "the state of this process cannot be asked")
        assert live.health()["patches"] == {"undrained_ids": ("will be patched", "")}
    assert "the state of this process cannot be asked: FileNotFoundError" in caplog.text


def test_a_fork_that_ends_leaves_the_servers_folder(here):
    live._leave(os.environ[live.FOLDER], os.getpid() + 1)
    assert Path(os.environ[live.FOLDER]).is_dir()
