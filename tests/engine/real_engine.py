"""Run by ``test_real_engine.py`` with a real vLLM on the path, without a GPU."""

import dataclasses
import os
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoConfig
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.model_loader import weight_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import KVBlockZeroer

import vllm
from staleproof.engine import ranks, session, spies, tenants, tuning
from staleproof.engine.models import write_config
from staleproof.vllm.sources import Sources
from staleproof.vllm.watch import Settings
from staleproof.vllm.watch_hooks import Hooks


def autotuned():
    name = next(name for name in tuning.LINEAR_ATTENTION if find_spec(name.rpartition(".")[0]))
    kernel = import_module(f"{name}.chunk_o").chunk_fwd_kernel_o
    while not hasattr(kernel, "configs"):
        kernel = kernel.fn
    return kernel


timed = len(autotuned().configs)
watch = spies.Rows()
zeroed = []
KVBlockZeroer.zero_block_ids = lambda self, block_ids: zeroed.append(block_ids)
for spy in (
    spies.attention,
    spies.stages,
    spies.logits,
    spies.routing,
    spies.ledger,
    spies.lazy_buffers,
    tenants.whole_tiles,
    tenants.tenants,
    tuning.first_configs,
):
    spy(watch)
    print("fits", spy.__name__)

spies.scaled_weights()
layer = torch.nn.Sequential(torch.nn.Linear(64, 256, bias=False), torch.nn.RMSNorm(256))
weight_utils.initialize_dummy_weights(layer, None)
gain = float(layer[0](torch.randn(512, 64, generator=torch.Generator().manual_seed(0))).std())
print(f"fits scaled_weights: norm {float(layer[1].weight[0])}, gain {gain:.1f}")

small = torch.zeros(8, 64, dtype=torch.float8_e4m3fn)
weight_utils.initialize_single_dummy_weight(small)
assert float(small.float().std()) > 0.1, "weights of one byte are drawn too"

# From 0.26.0 on its caches are given to it at once; here it has none.
zeroer = KVBlockZeroer.__new__(KVBlockZeroer)
zeroer.zero_block_ids([3, 2])
watch.tenants.zeroing = False
zeroer.zero_block_ids([4])
print(f"fits switches: zeroed {zeroed}")
print(f"fits routing: {BaseRouter.select_experts.__qualname__.partition('.')[0]}")
print(f"fits first_configs: {timed} and {len(autotuned().configs)}")

sources = Sources(Path(vllm.__file__).parent)
targets = Hooks(Settings(), vllm.__version__).targets()
for target in targets:
    target.check(sources)
print(f"fits watch: {len(targets)} functions")

order = ranks.ORDER
given = {**session.OPTIONS, **order.options}
print("fits options:", sorted({*given} - {field.name for field in dataclasses.fields(EngineArgs)}))
with tempfile.TemporaryDirectory() as folder:
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

# The spies of the ranks around vLLM's own methods, which run as far as a stand-in lets them.
watch = spies.Rows()
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
