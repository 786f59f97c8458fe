"""Run by ``test_ranks.py`` with a real vLLM on the path, without a GPU."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import torch
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from staleproof.engine import ranks, session
from staleproof.engine.models import write_config
from staleproof.engine.spies import Rows

order = ranks.ORDER
given = {**session.OPTIONS, **order.options}
print("fits options:", sorted({*given} - {field.name for field in dataclasses.fields(EngineArgs)}))
with tempfile.TemporaryDirectory() as folder:
    from transformers import AutoConfig

    write_config(Path(folder), order.model, {})
    config = AutoConfig.from_pretrained(folder)
    print("fits model:", type(config).__name__, config.num_experts, config.num_experts_per_tok)

# What the processes of an order set, without starting the second.
started = []
session.children.start = lambda function, order, env: started.append((function, order.ranks, env))
session._other_ranks(order)
((function, alone, env),) = started
for variables in (os.environ, {**os.environ, **env}):
    os.environ.update(variables)
    parallel = ParallelConfig(distributed_executor_backend="uni", enable_expert_parallel=True)
    same = str(parallel.data_parallel_master_port) == env["VLLM_DP_MASTER_PORT"]
    print(f"fits rank {parallel.data_parallel_rank} of {parallel.data_parallel_size}: {same}")
print(f"fits second: {function.__name__}, {alone}")

# The spies around vLLM's own methods, which run as far as a stand-in lets them.
watch = Rows()
GPUModelRunner.execute_model = lambda self, scheduler_output, tensors=None: self.serve()
GPUModelRunner._dummy_run = lambda self, num_tokens, uniform_decode=False: self.serve()
BaseRouter.select_experts = lambda self, hidden_states, router_logits, *, input_ids=None: router_logits
ranks.router_logits(watch)


class Runner(GPUModelRunner):
    def __init__(self) -> None:
        self.routers = [object(), object()]

    def serve(self) -> str:
        logits = torch.zeros(8, 4)
        logits[6, 1], logits[7, 0] = torch.nan, torch.inf
        BaseRouter.select_experts(self.routers[0], hidden_states=None, router_logits=torch.zeros(8, 4))
        BaseRouter.select_experts(self.routers[1], hidden_states=None, router_logits=logits, input_ids=None)
        return "served"


class Scheduled:
    total_num_scheduled_tokens = 7


runner = Runner()
runner._dummy_run(num_tokens=8)
watch.steps = []
assert runner.execute_model(Scheduled()) == runner._dummy_run(1, uniform_decode=True) == "served"
print("fits steps:", watch.steps)
