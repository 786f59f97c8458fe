"""Engines take turns across processes: a vLLM that is made up stands in for the real one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from staleproof.engine import cost
from staleproof.engine.orders import Order, run

# Steps leave their times in a file: two engines must never step at the same time.
FAKE = """
import json, os, time
from pathlib import Path
import torch

torch.cuda.synchronize = lambda *_: None
LOG = Path(os.environ["STEPS"])

class SamplingParams:
    def __init__(self, **options):
        self.tokens = options["max_tokens"]

class Engine:
    left = {}
    def add_request(self, name, prompt, parameters):
        self.left[name] = parameters.tokens
    def has_unfinished_requests(self):
        return bool(self.left)
    def step(self):
        if os.environ["STALEPROOF_PATCHES"] == os.environ.get("FAILS"):
            raise RuntimeError("no memory")
        begun = time.monotonic()
        time.sleep(0.0005)
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1}
        with LOG.open("a") as log:
            log.write(json.dumps([os.getpid(), begun, time.monotonic(), len(self.left)]) + "\\n")

class LLM:
    def __init__(self, model, **options):
        kind = json.loads(Path(model, "config.json").read_text())["model_type"]
        if kind != "qwen3":
            raise ValueError(f"1 validation error for ModelConfig\\n  {kind} is not supported")
        self.llm_engine = Engine()
"""


@pytest.fixture(name="steps")
def steps_fixture(tmp_path, monkeypatch) -> Path:
    """A made-up vLLM on the path of the engines' processes, and the file of their steps."""
    package = tmp_path / "fake/vllm"
    loader = package / "model_executor/model_loader"
    loader.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE)
    (package / "plugins.py").write_text("def load_general_plugins(): pass\n")
    (package / "model_executor/__init__.py").touch()
    (loader / "__init__.py").touch()
    for name in ("dummy_loader", "weight_utils"):
        (loader / f"{name}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "fake"))
    monkeypatch.setenv("STEPS", str(tmp_path / "steps"))
    return tmp_path / "steps"


def players(live: list[int], rounds: int) -> dict[str, Order]:
    turns = {"players": 3, "live": live, "rounds": rounds, "steps": 5}
    patches = ("none", "all", "none")
    return {
        name: Order("qwen3", {"turns": {"player": i, **turns}}, patches=patches[i])
        for i, name in enumerate(("off", "on", "again"))
    }


def test_one_engine_steps_at_a_time_and_each_is_timed_in_every_round(steps):
    told = dict(cost.take_turns(players([2, 4], rounds=3), timeout_s=120))
    assert {name: one.failed for name, one in told.items()} == {"off": None, "on": None, "again": None}
    times = told["on"].answers["turns"]
    assert {count: len(rounds) for count, rounds in times.items()} == {2: 3, 4: 3}
    assert all(0.0005 <= seconds < 1 for rounds in times.values() for seconds in rounds)
    ran = sorted(map(json.loads, steps.read_text().splitlines()), key=lambda step: step[1])
    assert len({pid for pid, *_ in ran}) == 3
    assert all(one[2] <= two[1] for one, two in itertools.pairwise(ran)), "two at the same time"
    assert {left for *_, left in ran} <= {0, 2, 4}
    # Requests last through every timed step.
    assert sum(left == 4 for *_, left in ran) >= 3 * 3 * 5


def test_an_engine_that_fails_ends_the_wait_of_the_others(steps, monkeypatch):
    monkeypatch.setenv("FAILS", "all")
    told = dict(cost.take_turns(players([2], rounds=2), timeout_s=60))
    assert told["on"].failed == "turns: RuntimeError: no memory"
    assert "another engine of this bench failed" in str(told["off"].failed)


def test_a_model_that_does_not_load_is_one_line(steps):
    ((_, told),) = run({"one": Order("qwen3_next", {"start": {}, "rows": {}})}, timeout_s=60, at_once=1)
    expected = "start, rows: ValueError: 1 validation error for ModelConfig qwen3_next is not supported"
    assert told.failed == expected


def test_a_probe_that_fails_leaves_those_behind_it_their_turn(steps):
    # A made-up engine has no configuration, so the first probe fails.
    probes = {"start": {}, "turns": {"player": 0, "players": 1, "live": [2], "rounds": 1, "steps": 2}}
    order = Order("qwen3", {**probes, "turns": {**probes["turns"], "folder": str(steps.parent)}})
    ((_, told),) = run({"one": order}, timeout_s=60, at_once=1)
    assert [*told.answers["turns"]] == [2]
    assert str(told.failed).startswith("start: AttributeError")
