"""Run by ``test_spies.py`` with a real vLLM on the path, without a GPU."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from vllm.model_executor.model_loader import weight_utils
from vllm.v1.worker.utils import KVBlockZeroer

import vllm
from staleproof.engine import spies, tenants, tuning
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

from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

print(f"fits routing: {BaseRouter.select_experts.__qualname__.partition('.')[0]}")

print(f"fits first_configs: {timed} and {len(autotuned().configs)}")

sources = Sources(Path(vllm.__file__).parent)
targets = Hooks(Settings(), vllm.__version__).targets()
for target in targets:
    target.check(sources)
print(f"fits watch: {len(targets)} functions")
