"""Engines take turns across processes: a vLLM that is made up stands in for the real one."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.engine.engine_answers import findings, results
from tests.vllm import made_up
from tools.engine_cost_probes import State, states

from staleproof.cases import children
from staleproof.engine import orders, session
from staleproof.engine.session import Order
from staleproof.vllm import watch_hooks
from staleproof.vllm.watch import Settings
from tools import engine_cost as cost
from tools import engine_cost_probes as cost_probes

# Steps leave their times in a file: two engines must never step at the same time.
FAKE = """
import json, os, time, traceback, types
from pathlib import Path
import torch

torch.cuda.synchronize = lambda *_: None
LOG = Path(os.environ["STALEPROOF_TEST_STEPS"])

class SamplingParams:
    def __init__(self, **options):
        self.tokens = options["max_tokens"]

class Engine:
    left = {}
    def __init__(self, runner):
        self.runner = runner
        worker = types.SimpleNamespace(model_runner=runner)
        executor = types.SimpleNamespace(driver_worker=types.SimpleNamespace(worker=worker))
        self.engine_core = types.SimpleNamespace(engine_core=types.SimpleNamespace(model_executor=executor))
    def add_request(self, name, prompt, parameters):
        self.left[name] = parameters.tokens
    def has_unfinished_requests(self):
        return bool(self.left)
    def step(self):
        if os.environ["STALEPROOF_TEST_NAME"] == os.environ.get("STALEPROOF_TEST_FAILS"):
            raise RuntimeError("no memory")
        begun = time.monotonic()
        time.sleep(0.0005)
        output = types.SimpleNamespace(total_num_scheduled_tokens=len(self.left), num_scheduled_tokens={})
        self.runner.execute_model(output)
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1}
        with LOG.open("a") as log:
            end = time.monotonic()
            graph, hooked = self.runner.replayed(), self.runner.hooked()
            log.write(json.dumps([os.getpid(), begun, end, len(self.left), timing(), graph, hooked]) + "\\n")

def timing():
    return any(frame.f_code.co_name == "timed" for frame, _ in traceback.walk_stack(None))

class LLM:
    def __init__(self, model, **options):
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner
        self.llm_engine = Engine(GPUModelRunner())
"""
RUNNER = """
from vllm.compilation.cuda_graph import CUDAGraphWrapper

class GPUModelRunner:
    device = "cpu"
    def __init__(self):
        self.graph = CUDAGraphWrapper()
    def capture_model(self):
        self.graph.concrete_cudagraph_entries["batch"] = "watch" if self.hooked() else "plain"
    def hooked(self):
        return self.execute_model.__code__.co_name != "execute_model"
    def replayed(self):
        return self.graph.concrete_cudagraph_entries.get("batch")
    def _prepare_inputs(self, scheduler_output): ...
    def _dummy_run(self): ...
    def execute_model(self, scheduler_output): ...
"""
GRAPHS = """
class CUDAGraphWrapper:
    _all_instances = []
    def __init__(self):
        self.concrete_cudagraph_entries = {}
        self._all_instances.append(self)
"""


@pytest.fixture(name="steps")
def steps_fixture(tmp_path, monkeypatch) -> Path:
    """A made-up vLLM on the path of the engines' processes, and the file of their steps."""
    install = "from staleproof.vllm import watch_hooks; watch_hooks.install('0.22.1')"
    loader = "model_executor.model_loader"
    modules = {
        "__init__": FAKE,
        "plugins": f"def load_general_plugins():\n    {install}\n",
        "v1.worker.gpu_model_runner": RUNNER,
        "compilation.cuda_graph": GRAPHS,
        **dict.fromkeys(("model_executor.__init__", f"{loader}.__init__"), ""),
        **dict.fromkeys((f"{loader}.dummy_loader", f"{loader}.weight_utils"), ""),
    }
    made_up.write(tmp_path / "fake", modules)
    monkeypatch.syspath_prepend(str(tmp_path / "fake"))
    monkeypatch.setenv("STALEPROOF_TEST_STEPS", str(tmp_path / "steps"))

    def start(order: Order, compiled: Path) -> children.Child:
        """Without the variables of a real vLLM, so that it can be a fork."""
        return children.start(session.serve, order, env={"STALEPROOF_PATCHES": order.patches, **order.env})

    monkeypatch.setattr(orders, "start", start)
    return tmp_path / "steps"


STATES = "off", "on", "watch", "seldom"


def players(live: list[int], seconds: float = 0.2) -> dict[str, Order]:
    asked = {
        "off": State(),
        "on": State(patches=True),
        "watch": State(patches=True, watch=Settings()),
        "seldom": State(every=4),
    }
    named = {"players": ["one", "other"], "asked": asked, "live": dict.fromkeys(live, seconds), "steps": 5}
    return {
        name: Order(
            "qwen3",
            {states: {"name": name, **named, "captures": 2 * (name == "one")}},
            env={"STALEPROOF_WATCH": "1", "STALEPROOF_TEST_NAME": name},
        )
        for name in ("one", "other")
    }


def test_one_engine_steps_at_a_time_and_is_timed_in_every_state_with_its_graphs_and_hooks(steps):
    told = dict(cost.take_turns(players([2, 4]), timeout_s=120))
    assert {name: one.failed for name, one in told.items()} == {"one": None, "other": None}
    for one in told.values():
        for count in (2, 4):
            times = one.answers[f"{count} live"]
            assert {*times} == set(STATES)
            assert len({len(rounds) for rounds in times.values()}) == 1
            seldom = times.pop("seldom")
            assert all(0.0005 <= seconds < 1 for of in times.values() for seconds in of)
            assert [seconds is None for seconds in seldom] == [i % 4 > 0 for i in range(len(seldom))]
    # Each state has graphs of its own; an engine without graphs has none.
    assert told["one"].answers["states"]["captured"] == dict.fromkeys(STATES, 1)
    assert told["other"].answers["states"]["captured"] == dict.fromkeys(STATES, 0)
    ran = sorted(map(json.loads, steps.read_text().splitlines()), key=lambda step: step[1])
    # Warming up is not timed. Then the engines take turns.
    timed = [step for step in ran if step[4]]
    assert len({pid for pid, *_ in timed}) == 2
    assert all(a[2] <= b[1] for a, b in itertools.pairwise(timed)), "two at the same time"
    # Each engine is timed on a core of its own, if there are some.
    assert all(len(told[name].answers["states"]["cores"]) == 1 for name in told)
    assert {left for _, _, _, left, *_ in timed} <= {2, 4}, "requests last through every timed step"
    # Graph that was replayed, hooks in place: the watch's "execute_model" is seen in its state only.
    seen = {(graph, hooked) for *_, graph, hooked in ran}
    assert seen == {("plain", False), ("watch", True), (None, False), (None, True)}


def test_rounds_go_through_the_captures_in_turn(monkeypatch):
    wrapper = SimpleNamespace(concrete_cudagraph_entries={})
    made = itertools.count()
    capture = lambda: wrapper.concrete_cudagraph_entries.update(batch=next(made))  # noqa: E731
    runner = SimpleNamespace(device="cpu", capture_model=capture)
    monkeypatch.setattr(cost_probes, "_wrappers", lambda: [wrapper])
    monkeypatch.setattr(watch_hooks, "installed", [SimpleNamespace(watch=None)])
    switch = cost_probes.Switch(SimpleNamespace(runner=runner), {"off": State(), "on": State()})
    for name in ("off", "on", "on", "off"):
        assert switch.capture(name) == 1
    ran = []
    for number in range(3):
        for name in ("off", "on"):
            switch.enter(name, number)
            ran.append(wrapper.concrete_cudagraph_entries["batch"])
    assert ran == [0, 1, 3, 2, 0, 1]


def test_the_probe_that_waits_stands_where_the_watch_stands(monkeypatch):
    on = watch_hooks.Hooks(Settings())
    on.watch = cost_probes._Syncing()
    ids = ["a", "b"]
    cached = SimpleNamespace(req_ids=ids, resumed_req_ids=set(), new_block_ids=[None, None])
    output = SimpleNamespace(
        total_num_scheduled_tokens=2,
        num_scheduled_tokens=dict.fromkeys(ids, 1),
        scheduled_new_reqs=[],
        finished_req_ids=set(),
        scheduled_cached_reqs=cached,
    )
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=ids))
    for _ in range(3):
        on.step_v1((runner, output), {})
    on.idle((), {})
    layer = SimpleNamespace(layer_name="model.layers.0.self_attn.attn")
    waits = []
    monkeypatch.setattr(torch, "isnan", lambda x: waits.append(x) or torch.zeros(1))
    result = torch.ones(2, 4, 8), None
    assert on.mla(result, (None, None, None, None, layer), {}) is result
    assert [x is result[0] for x in waits] == [True]
    assert on.attention(None, (None, layer), {}) is None
    assert len(waits) == 1


def test_an_engine_that_fails_does_not_end_the_others(steps, monkeypatch):
    monkeypatch.setenv("STALEPROOF_TEST_FAILS", "other")
    told = dict(cost.take_turns(players([2]), timeout_s=60))
    assert told["other"].failed == "states: RuntimeError: no memory"
    assert told["one"].failed is None
    assert told["one"].answers["2 live"]["on"]


def asked(told, monkeypatch):
    """The findings about the cost, from what engines told."""
    monkeypatch.setattr(cost, "take_turns", lambda *_: iter(told.items()))
    return findings(cost.table(), monkeypatch)


@pytest.mark.parametrize(
    ("ratio", "said", "watch", "of_watch"),
    [
        # The watch of all stages has a bar of its own.
        (1.001, "under 1 %", 0.00204, "under 3 %"),
        (1.05, "over 1 %", 0.003, "over 3 %"),
        (None, "around 1 %", 0.003, "over 3 %"),
    ],
)
def test_the_interval_decides_about_the_cost(monkeypatch, ratio, said, watch, of_watch):
    spread = [1.0, 1.018] * 4 if ratio is None else [ratio] * 8
    times = {"off": [0.002] * 8, "on": [0.002 * r for r in spread], "watch": [watch] * 8}
    of_states = {"captured": {"off": 3, "on": 3, "watch": 3}, "left_out": {cost.AGAIN: "no memory"}}
    told = results({"full graphs": {"3 live": times, "states": of_states}})
    found = asked(told, monkeypatch)
    assert found[cost.COST, "full graphs, 3 of 8"].verdict == said
    numbers, on = found[cost.COST, "full graphs, 3 of 8"].numbers, statistics.median(times["on"])
    assert (numbers["step_ms_off"], numbers["tokens_per_s_on"]) == (2.0, round(3 / on))
    beside = found[cost.WATCH, "watch, full graphs, 3 of 8"]
    # Beside the plugin, without which there is no watch.
    assert (beside.verdict, beside.numbers["step_ms_off"]) == (of_watch, round(1e3 * on, 4))
    # What was not timed has no verdict, nor has what was timed once: an interval takes two rounds.
    short = {name: each[:1] for name, each in times.items()}
    told = results({"full graphs": {"3 live": short, "states": of_states}})
    once = asked(told, monkeypatch)[cost.COST, "full graphs, 3 of 8"]
    assert (once.verdict, once.note) == ("not run", "full graphs: 1 rounds: an interval takes two")
    assert found[cost.NOISE, "full graphs, 3 of 8"].note == "full graphs: {'off again': 'no memory'}"
    assert found[cost.COST, "full graphs, 50 of 64"].verdict == "not run"


def test_every_mode_is_timed_at_every_size_and_the_watch_has_its_bars():
    keys = [case.key[1:3] for case in cost.table().cases]
    assert sum(question == cost.COST for question, _ in keys) == 9
    assert {"watch, eager, 3 live", "watch, one layer in four, full graphs, 256 of 256"} <= {
        variant for question, variant in keys if question == cost.WATCH
    }


def test_engines_and_states_that_are_left_out_leave_their_time_to_the_others(monkeypatch):
    began = {}

    def run(told, timeout_s, at_once):
        began.update(told)
        return iter(())

    monkeypatch.setattr(cost.running, "run", run)
    table = cost.table(["eager", "isnan", "VLLM"])
    findings(table, monkeypatch)
    asked = {mode: order.probes[states] for mode, order in began.items()}
    assert [*asked] == ["full graphs", "piecewise graphs"]
    assert all(one["players"] == [*asked] for one in asked.values()), "nobody waits for an engine left out"
    assert {*asked["full graphs"]["asked"]} == {
        "off", "off again", "on", "watch", "watch, one layer in four", "watch, one step in four"
    }  # fmt: skip
    whole = sum(sum(seconds) for _, seconds in cost.FURTHER.values())
    assert sum(sum(one["live"].values()) for one in asked.values()) == pytest.approx(whole)
    # A limit that ends the engines earlier leaves less, so that the last of them is timed too.
    with cost.running.at_most(190):
        findings(table, monkeypatch)
    less = sum(sum(order.probes[states]["live"].values()) for order in began.values())
    assert 85 < less <= 190 - cost.READY_S


@pytest.mark.parametrize(
    ("us", "noise", "said"), [(0.05, 0, "under 1 %"), (0.95, 0.5, "around 1 %"), (2.0, 0, "over 1 %")]
)
def test_the_cost_by_layers_is_a_line(monkeypatch, us, noise, said):
    # A step takes 100 us a layer, and with the plugin 3 us and so many a layer more, in some rounds fewer.
    each = (us - noise, us, us + noise)

    def times(layers: int) -> dict[str, list[float | None]]:
        off = layers * 1e-4
        return {
            "off": [off] * 6,
            "on": [time for us in each for time in (off + 3e-6 + layers * us * 1e-6, None)],
        }

    told = results({f"{layers} layers": {"3 live": times(layers)} for layers in cost.LAYERS})
    monkeypatch.setattr(cost, "take_turns", lambda *_: iter(told.items()))
    found = findings(cost.table_by_layers(), monkeypatch)
    here = found[cost.BY_LAYERS, "full graphs, 3 of 8, 4, 16, 61 layers"]
    assert here.verdict == said
    assert here.numbers["us_a_layer"] == pytest.approx(us)
    assert here.numbers["us_at_no_layer"] == pytest.approx(3.0)
    assert here.numbers["us_at_61_layers"] == pytest.approx(3 + 61 * us, abs=0.01)
    assert here.numbers["rounds"] == [3, 3, 3]
    assert found[cost.BY_LAYERS, "full graphs, 500 of 512, 4, 16, 61 layers"].verdict == "not run"


def test_engines_of_many_layers_hold_the_tokens_of_all_their_requests():
    for order in {**cost.orders(), **cost.orders_by_layers()}.values():
        assert order.env["STALEPROOF_WATCH"] == "1", "the watch's hooks are there to be taken out"
        graphs = "enforce_eager" not in order.options
        assert (order.probes[states]["captures"] > 0) is graphs
    for order in cost.orders_by_layers().values():
        options, layers = order.options, order.config["num_hidden_layers"]
        assert options["max_num_seqs"] == max(options["compilation_config"]["cudagraph_capture_sizes"]) == 512
        assert options["kv_cache_memory_bytes"] > layers * 500 * (cost_probes.TOKENS + 64) * 576 * 2
