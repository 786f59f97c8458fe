"""The soak of real servers (soak_serve.py), with servers that are made up in vLLM's place."""

from __future__ import annotations

import json
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.tools import made_server
from tools.soak_serve import judged, scrape, soak

from staleproof.vllm.watch import Settings, Watch
from tools import soak_serve

pytest.importorskip("prometheus_client")

# Answers like vLLM; its watch has no device. DIES ends it at the third request.
FAKE = """
asked = [0]
watch = None
if "STALEPROOF_WATCH" in os.environ:
    import logging, types
    from staleproof.vllm import watch_hooks, watch_port
    from staleproof.vllm.watch import Reading, read_settings
    from staleproof.vllm.sources import PatchError

    logging.basicConfig(format="WARNING [x.py:1] %(message)s")
    logging.getLogger("vllm.staleproof").setLevel("INFO")
    try:
        chosen = read_settings()
    except PatchError:
        watch_hooks.install("0.22.1")
    else:
        watch = types.SimpleNamespace(latest=Reading(), settings=chosen, steps=0)
        watch_port.serve(watch, chosen.port)
if importlib.util.find_spec("soak_fault"):
    print("staleproof: watch: a call failed: RuntimeError: a fault inside the watch", file=sys.stderr)

def answer(body):
    asked[0] += 1
    if asked[0] == 3 and os.environ.get("DIES") == "1":
        os._exit(1)
    if watch is not None:
        steps = asked[0]
        stage = "attention", "layers.0"
        watch.latest = Reading(steps, steps, {stage: (5 * steps, 0)}, runs={stage: steps})
    tokens = body["sampling_params"]["max_tokens"]
    return json.dumps({"choices": [{"token_ids": [5] * tokens}]}).encode()
"""


@pytest.fixture(name="command")
def command_fixture(tmp_path) -> list[str]:
    return made_server.command(tmp_path, FAKE)


def test_servers_are_driven_and_judged(tmp_path, command, monkeypatch):
    monkeypatch.setattr(soak_serve, "START_S", 60.0)
    # The stub has no patches to switch off.
    names = [name for name in soak_serve.SERVERS if name != "switched"]
    said: list[str] = []
    found = soak(tmp_path, command, 4.0, said.append, names=names)
    assert {name: one["wrong"] for name, one in found.items()} == {name: [] for name in names}
    assert found["watch"]["load"]["sent"] == found["watch"]["load"]["answered"] == 96
    scraped = found["watch"]["scraped"]
    assert (scraped["killed"] >= 1, scraped["failed"]) == (True, [])
    assert scraped["last"]["bad_rows ('layer', 'layers.0') ('rows', 'padding') ('stage', 'attention')"] > 100
    assert len(said) == 2 * len(names)


def test_an_answer_of_other_tokens_is_none(monkeypatch):
    answered = json.dumps({"choices": [{"token_ids": [5] * 8}]}).encode()
    monkeypatch.setattr(soak_serve.urllib.request, "urlopen", lambda request, timeout: BytesIO(answered))
    assert soak_serve.ask("http://127.0.0.1:1", 0) >= 0
    with pytest.raises(RuntimeError, match="8 tokens for 9"):
        soak_serve.ask("http://127.0.0.1:1", 1)


def test_a_load_tells_what_went_wrong(monkeypatch):
    def ask(url, number):
        if number % 2:
            raise RuntimeError(f"request {number}")
        return number / 100

    monkeypatch.setattr(soak_serve, "ask", ask)
    found = soak_serve.load("a url", 0.02, 1000.0)
    assert (found["sent"], found["answered"]) == (20, 10)
    assert len({*found["errors"]}) == 5
    assert {*found["errors"]} <= {f"RuntimeError: request {number}" for number in range(1, 20, 2)}
    assert found["seconds"] == {"p50": 0.09, "p99": 0.18, "max": 0.18}


def test_the_99th_percentile_is_that():
    assert soak_serve.quantiles([*map(float, range(300))]) == {"p50": 149.5, "p99": 297.0, "max": 299.0}
    assert soak_serve.quantiles([]) == {}


def test_every_tenth_scraper_is_killed(monkeypatch):
    killed, left = [], [None] * 26
    monkeypatch.setattr(soak_serve, "fetch", lambda url: [])
    monkeypatch.setattr(soak_serve, "kill_a_scraper", killed.append)
    found = scrape(7, SimpleNamespace(wait=lambda seconds: not left or left.pop()))
    assert (found["scrapes"], found["killed"], killed) == (26, 3, [7] * 3)


def test_lines_about_the_watch_count_once(tmp_path):
    log = tmp_path / "log"
    log.write_text("(1) staleproof: watch on port 7\n(2) staleproof: watch on port 7\nstaleproof: else\n")
    assert soak_serve.Server.lines(SimpleNamespace(log=log)) == ["watch on port 7"]


@pytest.mark.parametrize("deaf", [False, True])
def test_a_server_ends_with_all_it_started_if_need_be_by_force(monkeypatch, deaf):
    sent, waited = [], []

    def wait(*seconds):
        waited.append(seconds)
        if deaf and seconds:
            raise subprocess.TimeoutExpired("serve", *seconds)

    monkeypatch.setattr(soak_serve.os, "killpg", lambda *given: sent.append(given))
    soak_serve.Server.end(SimpleNamespace(process=SimpleNamespace(pid=7, wait=wait), taken=None))
    assert (sent, waited) == (([(7, 15), (7, 9)], [(10,), ()]) if deaf else ([(7, 15)], [(10,)]))


def test_a_server_that_runs_and_does_not_answer_is_not_alive(monkeypatch):
    monkeypatch.setattr(soak_serve, "load", lambda url, seconds: {"sent": seconds})
    for last, alive in ((None, False), (0.1, True)):
        answers = [3.0, last]
        server = SimpleNamespace(
            wait=lambda until, answers=answers: answers.pop(0),
            process=SimpleNamespace(poll=lambda: None),
            lines=list,
            name="no watch",
            url="a url",
        )
        now = soak_serve.time.monotonic()
        found = soak_serve.drive(server, now + 9, 4.0, soak_serve.threading.Event(), now + 900)
        assert (found["started_s"], found["alive"], found["load"]) == (3.0, alive, {"sent": 4.0})


def test_a_server_that_dies_and_one_that_does_not_start_are_noticed(tmp_path, command, monkeypatch):
    monkeypatch.setattr(soak_serve, "SERVERS", {"no watch": {"DIES": "1"}, "watch": {}})
    monkeypatch.setattr(soak_serve, "START_S", 30.0)
    found = soak(tmp_path, command, 1.0, lambda line: None, names=["no watch"])
    assert "is not alive at the end" in found["no watch"]["wrong"]
    assert any("answered 2 of 24" in text for text in found["no watch"]["wrong"])
    found = soak(tmp_path, [sys.executable, "-c", "pass"], 1.0, lambda line: None, names=["watch"])
    assert {name: one["wrong"] for name, one in found.items()} == {"watch": ["did not start"]}


def test_a_count_that_goes_back_and_a_failed_scrape_are_noticed():
    good = {
        "started_s": 9.0,
        "alive": True,
        "load": {"sent": 48, "answered": 48},
        "log": ["watch on port 9464: attention"],
        "scraped": {
            "scrapes": 2,
            "failed": [],
            "went_back": 0,
            "steps": [1, 40],
            "last": {"counted_steps": 40, "stage_runs router": 39, "stage_runs attention": 30},
        },
    }

    def wrong(**scraped: object) -> list[str]:
        return judged("watch", good | {"scraped": good["scraped"] | scraped})

    assert wrong() == []
    assert wrong(went_back=1) == ["a count went back"]
    assert wrong(failed=["refused"]) == ["1 scrapes failed of 2"]
    assert wrong(steps=[40, 40]) == ["its steps do not grow"]
    lost = {"counted_steps": 40, "stage_runs router": 30}
    assert wrong(last=lost) == ["its kernels ran 30 times in 40 counted steps"]
    for log in ([], good["log"] * 2):
        assert judged("watch", good | {"log": log}) == ["does not say once: watch on port"]


IN_PLACE, OFF = {"in place": 9, "not needed": 3}, {"off": 9, "not needed": 3}


@pytest.mark.parametrize(
    ("stands", "sound"),
    [
        ([IN_PLACE, OFF, IN_PLACE], True),
        ([IN_PLACE, IN_PLACE, IN_PLACE], False),
        ([IN_PLACE, {"in place": 1, "off": 8, "not needed": 3}, IN_PLACE], False),
        ([IN_PLACE, {"refused": 1, "off": 8, "not needed": 3}, IN_PLACE], False),
        ([IN_PLACE, OFF, OFF], False),
        ([OFF, OFF, OFF], False),
    ],
)
def test_a_switch_that_does_not_switch_is_noticed(stands, sound):
    good = {"started_s": 9.0, "alive": True, "load": {"sent": 48, "answered": 48}, "log": []}
    assert (judged("switched", good | {"stands": stands}) == []) is sound


def test_the_fault_is_raised_from_the_watch_of_today(monkeypatch):
    inner = Watch.begin_step
    scope: dict[str, object] = {}
    exec(soak_serve.FAULT, scope)
    monkeypatch.setattr(Watch, "begin_step", inner)
    scope["register"]()
    faulty = Watch(Settings(), "cpu")
    for _ in range(5):
        faulty.begin_step(3, True)
    with pytest.raises(RuntimeError, match="a fault inside the watch"):
        faulty.begin_step(3, True)


def test_the_recorded_run_is_as_it_must_be():
    found = json.loads((Path(__file__).parents[2] / "workbook/soak-serve.json").read_text())
    assert {*found} == {*soak_serve.SERVERS}
    assert {name: judged(name, one) for name, one in found.items()} == {name: [] for name in found}
    assert found["watch"]["load"]["sent"] == found["switched"]["load"]["sent"] > 2000


def test_a_count_that_falls_or_vanishes_went_back_and_a_gauge_may(monkeypatch):
    gauges = dict.fromkeys(("unprofiled_bytes", "reading_age_seconds", "ok", "watch_up", "patch_info"), 1)
    told = [{"steps": 1, "bad_rows": 9, **gauges}, {"steps": 2, "bad_rows": 9, "ok": 0}, {"steps": 1}]

    def fetch(url):
        return [SimpleNamespace(name=name, labels={}, value=value) for name, value in told.pop(0).items()]

    monkeypatch.setattr(soak_serve, "fetch", fetch)
    found = scrape(1, SimpleNamespace(wait=lambda seconds: not told))
    assert (found["scrapes"], found["steps"], found["went_back"]) == (3, [1, 2, 1], 2)
    assert found["last"] == {"steps": 1}


def test_a_switch_is_off_at_first_on_in_the_middle_and_off_at_the_end(tmp_path, monkeypatch):
    server, slept = SimpleNamespace(switch=tmp_path / "switch", watch_port=7), []
    monkeypatch.setattr(soak_serve.time, "sleep", slept.append)
    monkeypatch.setattr(soak_serve, "stands", lambda port: {port: server.switch.exists()})
    assert soak_serve.flip(server, 6.0) == [{7: False}, {7: True}, {7: False}]
    assert slept == [2.0] * 3
