"""A made-up engine with vLLM's module and function names: the watch counts it, and never ends it."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any

import pytest
import torch
from made_up import free_port, planted
from tests.made import arrived

from staleproof import device as devices
from staleproof.evidence.board import Board
from staleproof.vllm import watch as watches
from staleproof.vllm import watch_blocks, watch_client, watch_hooks, watch_memory, watch_port
from staleproof.vllm.standing import registry
from staleproof.vllm.watch import Watch

pytest.importorskip("prometheus_client")

# Module -> its code. A batch has eight rows; attention leaves those of no request NaN.
ENGINE = {
    "v1.worker.gpu_worker": """
class Worker:
    device, local_rank = DEVICE, 1
    def load_model(self): return "model"
    def determine_available_memory(self): return 2**30
    def initialize_from_config(self, kv_cache_config): return "cache"
    def compile_or_warm_up_model(self): return "ready"
""",
    "v1.worker.gpu_model_runner": """
import types
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.v1.attention.backends.mla.triton_mla import TritonMLAImpl

class GPUModelRunner:
    def __init__(self):
        self.input_batch = types.SimpleNamespace(req_ids=[])
        self.impl, self.moe = TritonMLAImpl(), MoERunner()
        self.layer = types.SimpleNamespace(layer_name="model.layers.0.self_attn.attn")
    def execute_model(self, scheduler_output):
        self.input_batch.req_ids = [*scheduler_output.num_scheduled_tokens]
        self._prepare_inputs(scheduler_output)
        return self.forward(scheduler_output.total_num_scheduled_tokens)
    def _prepare_inputs(self, scheduler_output): ...
    def _dummy_run(self, rows): return self.forward(0)
    def forward(self, live):
        out, _ = self.impl.forward_mqa(live, None, None, self.layer)
        return self.moe._apply_quant_method(None, out.flatten(1).nan_to_num(), None)[1]
""",
    "v1.attention.backends.mla.triton_mla": """
import torch
class TritonMLAImpl:
    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        out = torch.ones(8, 2, 4, device=DEVICE)
        out[q:] = torch.nan
        return out, None
""",
    "model_executor.layers.fused_moe.runner.moe_runner": """
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
class MoERunner:
    layer_name, router = "model.layers.0.mlp.experts", BaseRouter()
    def _apply_quant_method(self, layer, hidden_states, router_logits):
        weights, ids = self.router.select_experts(hidden_states, router_logits)
        return None, hidden_states * weights.sum(1, keepdim=True)
""",
    "model_executor.layers.fused_moe.router.base_router": """
import torch
class BaseRouter:
    def select_experts(self, hidden_states, router_logits):
        rows = hidden_states.shape[0]
        ids = torch.arange(2 * rows, dtype=torch.int32, device=DEVICE).view(rows, 2)
        ids[0] = 3  # row 0 names an expert twice
        return torch.ones(rows, 2, device=DEVICE), ids
""",
}


@pytest.fixture(name="start")
def start_fixture(made_up, monkeypatch, device):
    """Starts the made-up engine with the watch; returns its runner and the watch's port."""
    made_up({name: f"DEVICE = {devices.select()!r}\n{code}" for name, code in ENGINE.items()})

    def start(version: str = "0.22.1") -> tuple[Any, int]:
        port = free_port()
        monkeypatch.setenv("STALEPROOF_WATCH", "1")
        # The variable names the first worker's port. This is the second worker.
        monkeypatch.setenv("STALEPROOF_WATCH_PORT", str(port - 1))
        watch_hooks.install(version)
        worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker()
        runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner()
        assert worker.load_model() == "model"
        assert worker.determine_available_memory() == 2**30
        assert worker.initialize_from_config(_config()) == "cache"
        runner._dummy_run(8)
        assert worker.compile_or_warm_up_model() == "ready"
        return runner, port

    yield start
    watch_hooks.remove()


def _config() -> Any:
    spec = type("MLAAttentionSpec", (), {"block_size": 16})()
    return Space(kv_cache_groups=[Space(kv_cache_spec=spec)])


def output(*names: str, block: int | None = None) -> Any:
    """What the scheduler says of a step in which each of these requests has one token."""
    new = [Space(req_id=names[0], block_ids=([block],), num_computed_tokens=0)]
    cached = Space(req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[])
    tokens = {"total_num_scheduled_tokens": len(names), "num_scheduled_tokens": dict.fromkeys(names, 1)}
    new = new if block is not None else []
    return Space(**tokens, scheduled_new_reqs=new, scheduled_cached_reqs=cached, finished_req_ids=set())


def serve(runner: Any, steps: int = 4) -> list[torch.Tensor]:
    return [runner.execute_model(output("a", "b", "c", block=4)) for _ in range(steps)]


def test_a_whole_start_and_some_steps_are_counted(start, caplog):
    runner, port = start()
    assert all(out.shape == (8, 8) for out in serve(runner))
    runner._dummy_run(8)  # its eight NaN rows are nobody's
    serve(runner, 1)
    watch = watch_hooks.installed[0].watch
    arrived(watch)
    rows = watch_client.rows(watch_client.fetch(f"localhost:{port}"))
    assert {row[:2]: row[2:] for row in rows} == {
        ("attention", "layers.0"): (25, 0),
        ("router", "layers.0"): (0, 0),
        ("experts", "layers.0"): (0, 0),
        ("expert twice", "layers.0"): (0, 5),
    }
    assert watch.latest.steps == 5
    stale = next(s for s in watch_client.fetch(f"localhost:{port}") if s.name == "stale_blocks_read")
    assert stale.value == 4  # the block comes to its second to fifth owner with another's bytes
    assert sum("first padding row" in line for line in caplog.messages) == 1


def steady(*names: str) -> Any:
    """What the scheduler says of a decode step in which nobody comes or goes."""
    said = output(*names)
    said.scheduled_cached_reqs.new_block_ids = [None] * len(names)
    return said


def test_steady_steps_are_counted_without_a_call_each(start, monkeypatch):
    runner, _ = start()
    watch, begun = watch_hooks.installed[0].watch, []
    watch._due = float("inf")  # no copy in between, however slow this machine is
    monkeypatch.setattr(watches, "SPAN", 8)
    inner = Watch.begin_step
    monkeypatch.setattr(
        Watch, "begin_step", lambda self, *rest: begun.append(self.steps + 1) or inner(self, *rest)
    )
    for _ in range(18):
        runner.execute_model(steady("a", "b", "c"))
    # The step that the device is told of, the one that names its requests, and so again after a span.
    assert begun == [1, 2, 9, 10, 17, 18]
    runner._dummy_run(8)  # its eight NaN rows are nobody's
    for _ in range(5):
        runner.execute_model(steady("a", "b", "c"))
    reading = arrived(watch)
    assert reading.bad["attention", "layers.0"] == (5 * 23, 0)
    assert (reading.steps, reading.counted) == (23, 23)
    assert [*watch._spans] == [[1, 8], [9, 16], [17, 18], [19, 23]]
    assert [(step, requests) for step, requests, _ in watch._recent] == [
        (step, ("a", "b", "c")) for step in (1, 9, 17, 19)
    ]


FAULTS: dict[str, tuple[Any, str]] = {
    "making it": (Watch, "__init__"),
    "a step": (Watch, "begin_step"),
    "requests": (Watch, "name_requests"),
    "a stage": (Board, "count"),
    "a dummy batch": (Watch, "pause"),
    "a reading": (Watch, "reading"),
    "being ready": (Watch, "reset"),
    "blocks": (watch_blocks.Blocks, "scheduled"),
    "groups of the cache": (watch_blocks, "of"),
    "the ledger": (watch_memory, "of"),
    "a phase": (watch_memory.Memory, "phase"),
    "memory": (watch_memory.Memory, "unprofiled"),
    "the port": (watch_port, "serve"),
    "padding": (watch_hooks, "padding_mask"),
}


@pytest.mark.parametrize("where", FAULTS)
def test_the_engine_survives_an_exception_anywhere_in_the_watch(start, monkeypatch, caplog, where):
    owner, name = FAULTS[where]
    monkeypatch.setattr(owner, name, planted)
    # Only releases with a mask of padding rows are asked for one.
    runner, _ = start("0.25.1" if where == "padding" else "0.22.1")
    first, *_, last = serve(runner)
    runner._dummy_run(8)
    serve(runner)
    assert torch.equal(first, last)
    assert first[0].tolist() == [2.0] * 8
    assert sum("RuntimeError: planted" in line for line in caplog.messages) == 1
    assert registry.reason("watch"), "it is out of service, and costs nothing more"


def test_the_made_up_engine_has_vllms_names():
    """What is wrapped here are the functions that the watch wraps in 0.22.1."""
    modules = {target.module for target in watch_hooks.Hooks(watch_hooks.Settings()).targets()}
    assert {f"vllm.{name}" for name in ENGINE} <= modules
    assert Path(__file__).with_name("real_watch.py").exists()
