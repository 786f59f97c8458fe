"""Each process says once what stands in it, when its engine or worker is ready."""

from __future__ import annotations

import logging
import os
import sys

import pytest
import warm
from made_up import imported, planted

from staleproof.vllm import hooks, process, standing
from staleproof.vllm.hooks import Target
from staleproof.vllm.standing import registry

FILES = {
    "ops": "def double(x):\n    return 2 * x\n\n\ndef halve(x):\n    return x / 2\n",
    "late": "def late():\n    pass\n",
    "v1.engine.core": "class EngineCore:\n    def __init__(self, worker=None):\n"
    "        if worker:\n            worker.compile_or_warm_up_model()\n        import vllm.ops\n",
    "v1.core.sched.scheduler": "class Scheduler:\n    def __init__(self):\n        pass\n",
    "v1.worker.gpu_worker": "class Worker:\n    def compile_or_warm_up_model(self):\n        return 1.5\n",
    "v1.worker.cpu_worker": "from vllm.v1.worker.gpu_worker import Worker\n\n\nclass CPUWorker(Worker):\n"
    "    def compile_or_warm_up_model(self):\n        return 1.5\n",
}


@pytest.fixture(name="vllm")
def vllm_fixture(made_up):
    """Imports a module of a made-up vLLM."""
    made_up(FILES)
    return imported


def _lines(caplog) -> list[str]:
    return [line for line in caplog.messages if "this process" in line]


def said(*names: str, **decided: tuple[str, str]) -> str:
    return process.line("0.18.1", {name: process.state(name) for name in names} | decided)


def _after(name: str, module: str = "ops") -> Target:
    return Target(f"vllm.{module}", name, (), after=lambda r, a, k: r)


def test_one_line_when_the_engine_is_ready(vllm, caplog):
    caplog.set_level(logging.INFO, "vllm.staleproof")
    hooks.wrap("a", _after("double"))
    hooks.wrap("b", _after("late", "late"))
    hooks.wrap("c", _after("halve"), Target("vllm.ops", "double", ("z",), after=planted))
    process.watch(lambda engine: process.say(said("a", "b", "c", d=("refused", "no Triton"))))
    worker = vllm("v1.worker.gpu_worker").Worker()
    assert not _lines(caplog)
    # The worker is ready in the middle of the engine's start, and another line would be half the truth.
    vllm("v1.engine.core").EngineCore(worker)
    (line,) = _lines(caplog)
    assert line == (
        "staleproof on vLLM 0.18.1, this process: in place: a; partly: c "
        "(vllm/ops.py:1 double takes (x), not what was expected); "
        "refused: d (no Triton); will be patched: b (not imported here)"
    )
    # A worker that is started behind the engine says so itself.
    vllm("v1.worker.gpu_worker").Worker().compile_or_warm_up_model()
    assert len(_lines(caplog)) == 2


@pytest.mark.parametrize("where", [process.WORKER, process.CPU_WORKER])
def test_a_worker_in_a_process_of_its_own(vllm, caplog, monkeypatch, where):
    caplog.set_level(logging.INFO, "vllm.staleproof")
    process.watch(lambda engine: process.say(said()))
    monkeypatch.setattr(process, "_starting", [os.getpid() + 1])
    module, name = where
    worker = getattr(vllm(module.removeprefix("vllm.")), name.partition(".")[0])()
    assert worker.compile_or_warm_up_model() == 1.5
    assert _lines(caplog) == ["staleproof on vLLM 0.18.1, this process: nothing to patch"]
    # The two functions that it waits for are no patches.
    assert "is in place" not in caplog.text
    assert registry.in_service() == []


def test_engine_core_that_is_spawned_is_ready_when_its_scheduler_is_made(vllm, monkeypatch):
    """It loads its plugins inside its own __init__, which is not wrapped any more then."""
    ready = []
    process.watch(ready.append)
    monkeypatch.setattr(process, "_starting", [])
    scheduler = vllm("v1.core.sched.scheduler").Scheduler()
    assert ready == [scheduler]


@pytest.mark.parametrize("configured", [True, False])
def test_a_line_is_not_lost_before_logging_is_configured(monkeypatch, configured):
    """vLLM 0.33.0 loads plugins first; Python prints warnings alone until there is a handler."""
    seen = []
    monkeypatch.setattr(hooks.logger, "hasHandlers", lambda: configured)
    monkeypatch.setattr(hooks.logger, "log", lambda level, *rest: seen.append(level))
    process.say(": off")
    assert seen == [logging.INFO if configured else logging.WARNING]


def test_an_unconfigured_process_prints_the_summary(tmp_path):
    program = "from staleproof.vllm.plugin import register; register()"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "STALEPROOF_PATCHES": "none"}
    assert warm.new("-c", program, env=env).stderr == "staleproof: off by STALEPROOF_PATCHES\n"


@pytest.mark.slow
def test_the_summary_of_the_real_0_33_0_is_not_lost():
    program = "from vllm.plugins import load_general_plugins as load; load()"
    done = warm.released("0.33.0", "-c", program, STALEPROOF_PATCHES="all")
    said = [line for line in done.stderr.splitlines() if "staleproof on vLLM 0.33.0: will be patched" in line]
    assert len(said) == 1, done.stderr[-2000:]


@pytest.mark.parametrize("state", ["partly", "refused", "off"])
def test_a_patch_that_stands_in_part_or_not_at_all_does_not_meet_the_requirement(state):
    with pytest.raises(process.RequirementError, match=rf"a is {state} \(halve\)"):
        process.required("a", {"a": (state, "halve")}, ["a"])


def test_all_that_is_wrong_with_a_requirement_is_said_at_once():
    with pytest.raises(process.RequirementError, match=r"c is no patch \(known: a\); a is off \(a file\)$"):
        process.required("a, c", {"a": ("off", "a file")}, ["a"])


@pytest.mark.parametrize("state", ["in place", "not needed", "will be patched"])
def test_a_patch_that_stands_or_is_not_needed_meets_the_requirement(state):
    process.required("a", {"a": (state, "")}, ["a"])


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (("in place", "not needed", "waiting"), ("in place", "")),
        (("in place", "gone"), ("partly", "gone")),
        (("not needed", "gone", "waiting"), ("refused", "gone")),
        (("not needed", "waiting"), ("will be patched", "")),
        (("not needed",), ("not needed", "")),
        ((), ("will be patched", "")),
    ],
)
def test_a_function_without_the_defect_is_not_missed(states, state):
    for number, each in enumerate(states):
        registry.of("a").targets[f"vllm.ops:{number}"] = each
    found = process.state("a")
    registry.forget("a")
    assert found == state


def test_a_patch_whose_hook_failed_in_a_trace_is_refused_as_soon_as_somebody_asks():
    registry.of("a").targets["vllm.ops:double"] = "in place"
    registry.of("a").failed_in_trace = "planted"
    found = process.state("a")
    registry.forget("a")
    assert found == ("refused", "planted")


def test_a_traced_patch_stands_in_part_if_it_is_no_factor_of_the_compile_cache():
    registry.of("a").traced = True
    for owner, state in (("a", "in place"), ("b", "in place"), (standing.CACHE, "gone")):
        registry.of(owner).targets["vllm.ops:double"] = state
    found = process.state("a"), process.state("b")
    for owner in ("a", "b", standing.CACHE):
        registry.forget(owner)
    assert found == (("partly", "gone"), ("in place", ""))
