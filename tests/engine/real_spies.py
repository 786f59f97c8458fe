"""Run by ``test_spies.py`` with a real vLLM 0.22.1 on the path, without a GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from vllm.model_executor.model_loader import weight_utils
from vllm.v1.worker.utils import KVBlockZeroer

import vllm
from staleproof.engine import spies
from staleproof.vllm.sources import Sources
from staleproof.vllm.watch import Settings
from staleproof.vllm.watch_hooks import Hooks

watch = spies.Rows()
for name in (
    *("attention", "stages", "logits", "routing", "staging", "ledger", "lazy_buffers", "no_zeroing"),
):
    zero = KVBlockZeroer.zero_block_ids
    getattr(spies, name)(watch)
    if name == "no_zeroing":
        KVBlockZeroer.zero_block_ids = zero
    print("fits", name)

spies.living_weights()
layer = torch.nn.Sequential(torch.nn.Linear(64, 256, bias=False), torch.nn.RMSNorm(256))
weight_utils.initialize_dummy_weights(layer, None)
gain = float(layer[0](torch.randn(512, 64, generator=torch.Generator().manual_seed(0))).std())
print(f"fits living_weights: norm {float(layer[1].weight[0])}, gain {gain:.1f}")

small = torch.zeros(8, 64, dtype=torch.float8_e4m3fn)
weight_utils.initialize_single_dummy_weight(small)
assert float(small.float().std()) > 0.1, "weights of one byte are drawn too"

zeroer = KVBlockZeroer(torch.device("cpu"), pin_memory=False)
zeroer._meta = (torch.zeros(1, dtype=torch.uint64), 0, 1, 0)
zeroer._id_cap = 8
zeroer._ids_pinned = torch.zeros(8, dtype=torch.int64)
zeroer._ids_gpu = torch.zeros(8, dtype=torch.int64)
try:
    zeroer.zero_block_ids([3, 2])
except Exception as error:  # a grid of no programs: only the ids matter here
    print("kernel:", type(error).__name__, error)
print("fits zeroing:", *[f"{asked} as {read.tolist()}" for asked, read in watch.zeroed])

sources = Sources(Path(vllm.__file__).parent)
targets = Hooks(Settings()).targets()
for target in targets:
    target.check(sources)
print(f"fits watch: {len(targets)} functions")
