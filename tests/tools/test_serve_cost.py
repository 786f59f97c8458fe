"""The cost while serving (serve_cost.py), with servers and a client that are made up in vLLM's place."""

from __future__ import annotations

import json
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
from tests.tools import made_server
from tools.serve_cost import OFF, PLUGIN, REMEDY, in_turns, lines_of, measure, summary

from staleproof.cases import store
from tools import figures, serve_cost

# Answers to /health, and says in its log what its variables and plugins are.
FAKE = """
print("x] plugins", os.environ["VLLM_PLUGINS"], "patches", os.environ["STALEPROOF_PATCHES"], flush=True)
if importlib.util.find_spec("soak_fault"):
    print("nan_to_num before the router", flush=True)
if os.environ["STALEPROOF_PATCHES"] == "all" and "SILENT" not in os.environ:
    print("x] staleproof on vLLM 0.22.1: in place", flush=True)

if "DIES" in os.environ:
    sys.exit(1)
"""


def answers(port, model, rate, requests, seed):
    """A client that sends nothing."""
    assert {file.name for file in model.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    return {"completed": requests, **dict.fromkeys(serve_cost.METRICS, 2.0 + seed)}


@pytest.fixture(name="command")
def command_fixture(tmp_path) -> list[str]:
    return made_server.command(tmp_path, FAKE)


def test_equal_servers_run_what_their_names_say(tmp_path, command):
    said: list[str] = []
    found = measure(tmp_path, command, lambda: answers, 60.0, said.append)
    assert [*found["servers"]] == [*serve_cost.SERVERS]
    assert all([*rates] == ["32.0", "96.0", "inf"] for rates in found["servers"].values())
    assert {*found["run"]["logged"]} == {PLUGIN, REMEDY}
    ran = {
        name: (tmp_path / f"serve-{name.replace(' ', '-')}.log").read_text() for name in serve_cost.SERVERS
    }
    assert {name: text.count("before the router") for name, text in ran.items()} == dict.fromkeys(ran, 0) | {
        REMEDY: 1
    }
    assert "plugins  patches none" in ran[OFF]
    assert "plugins staleproof patches all" in ran[PLUGIN]
    assert len(serve_cost.table(found)) == 2 + 3 * len(serve_cost.METRICS)


@pytest.mark.parametrize(
    ("variable", "why"),
    [
        ("SILENT", "the log of plugin does not say"),
        ("DIES", r"did not start: off, off again, plugin, nan_to_num; see .*/serve-off\.log$"),
    ],
)
def test_a_server_that_does_not_do_what_its_name_says_ends_the_run(
    tmp_path, command, monkeypatch, variable, why
):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(RuntimeError, match=why):
        measure(tmp_path, command, lambda: answers, 20.0, lambda line: None)


def test_a_request_without_an_answer_ends_the_run(tmp_path):
    def lost(*given):
        return {"completed": 1, **dict.fromkeys(serve_cost.METRICS, 1.0)}

    with pytest.raises(RuntimeError, match="1 answers of"):
        in_turns({OFF: (1, tmp_path)}, lost, time.monotonic() + 5, lambda line: None)


def test_servers_take_turns_in_every_repetition_and_late_ones_are_left_out(tmp_path, monkeypatch):
    asked: list[tuple[int, float, int]] = []

    def bench(port, model, rate, requests, seed):
        asked.append((port, rate, seed))
        time.sleep(0.01)
        return {"completed": requests, **dict.fromkeys(serve_cost.METRICS, 1.0)}

    servers = {name: (port, tmp_path) for port, name in enumerate(serve_cost.SERVERS)}
    found, seconds = in_turns(servers, bench, time.monotonic() + 600, lambda line: None)
    assert seconds == serve_cost.RUN_S
    # Each rate twice, to warm up.
    runs = asked[2 * len(servers) * len(serve_cost.RATES) :]
    # Four neighbours are one rate and seed on all servers, and not always in one order.
    turns = [runs[at : at + 4] for at in range(0, len(runs), 4)]
    assert len(turns) == serve_cost.REPETITIONS * len(serve_cost.RATES)
    assert all(len({port for port, *_ in turn}) == 4 for turn in turns)
    assert all(len({(rate, seed) for _, rate, seed in turn}) == 1 for turn in turns)
    assert len({tuple(port for port, *_ in turn) for turn in turns}) > 1
    said: list[str] = []
    found, seconds = in_turns(servers, bench, time.monotonic() + 0.45, said.append)
    assert seconds == 1.0
    assert said[0].endswith("repetitions left out")
    assert 1 <= len(found[OFF]["inf"]) < serve_cost.REPETITIONS


def test_a_repetition_that_would_not_be_over_in_time_is_left_out(tmp_path, monkeypatch):
    asked: list[str] = []

    def bench(port, model, rate, requests, seed):
        asked.append("a second")
        return {"completed": requests, **dict.fromkeys(serve_cost.METRICS, 1.0)}

    monkeypatch.setattr(serve_cost.time, "monotonic", lambda: float(len(asked)))
    # Six to warm up, and three a repetition.
    for until, done in ((12.0, 2), (14.0, 2), (15.0, 3)):
        asked.clear()
        said: list[str] = []
        found, _ = in_turns({OFF: (1, tmp_path)}, bench, until, said.append)
        assert ([len(runs) for runs in found[OFF].values()], said) == (
            [done] * 3,
            [f"{serve_cost.REPETITIONS - done} repetitions left out"],
        )


def test_the_client_is_asked_for_this_load(monkeypatch, tmp_path):
    names = (
        *("backend", "endpoint", "dataset-name", "host", "port", "model", "served-model-name", "temperature"),
        *("request-rate", "num-prompts", "seed", "metric-percentiles", *serve_cost.LOAD),
    )

    def add_cli_args(parser):
        parser.add_argument("--disable-tqdm", action="store_true")
        for name in names:
            parser.add_argument(f"--{name}")

    async def main_async(given):
        return vars(given)

    serve = SimpleNamespace(add_cli_args=add_cli_args, main_async=main_async)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.benchmarks", SimpleNamespace(serve=serve))
    given = serve_cost.client()(8001, tmp_path, 32.0, 80, 3)
    asked = {"port": "8001", "model": str(tmp_path), "request_rate": "32.0", "num_prompts": "80", "seed": "3"}
    asked |= {name.replace("-", "_"): str(value) for name, value in serve_cost.LOAD.items()}
    # The table has these percentiles, and all servers one name.
    asked |= {"metric_percentiles": "50,99", "served_model_name": "dummy", "temperature": "0"}
    assert {name: given[name] for name in asked} == asked


def test_a_run_is_recorded_somewhere_or_not_begun(capsys):
    with pytest.raises(SystemExit) as ended:
        serve_cost.main([])
    assert ended.value.code == 2
    assert "--out: expected where the run is recorded, or --page" in capsys.readouterr().err


def test_a_server_stands_beside_off_of_the_same_repetition():
    def of(values):
        return {"32.0": [dict.fromkeys(serve_cost.METRICS, value) for value in values]}

    # The machine drifts, and the plugin takes 2 % more in every repetition.
    found = summary({OFF: of([1.0, 2.0, 4.0]), PLUGIN: of([1.02, 2.04, 4.08])})
    here = found[PLUGIN]["32.0"]["p99_itl_ms"]
    assert here["beside_off_percent"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert here["each"] == [1.02, 2.04, 4.08]
    assert here["high"] - here["low"] > 3
    assert "beside_off_percent" not in found[OFF]["32.0"]["p99_itl_ms"]


def test_the_page_holds_the_recorded_run():
    book = store.checkout() / "workbook"
    recorded = json.loads((book / "runs/nvidia-h200-engine/serving.json").read_text())
    page = (book / "serving.md").read_text()
    written = page.split(serve_cost.BEGIN)[1].split(figures.END)[0].strip().splitlines()
    assert written == serve_cost.table(recorded)
    # Every repetition of every server, and each did what its name says.
    for rates in recorded["servers"].values():
        for metrics in rates.values():
            assert len(metrics["p50_tpot_ms"]["each"]) == serve_cost.REPETITIONS
    assert all(recorded["run"]["logged"].values())


def test_lines_of_a_log_are_told_once(tmp_path):
    server = type("Server", (), {"log": tmp_path / "log"})()
    server.log.write_text("(1) [a.py:3] staleproof: two\n(2) [a.py:3] staleproof: two\nother\n")
    assert lines_of(server, "staleproof") == ["staleproof: two"]
