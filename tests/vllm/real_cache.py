"""Starts of a vLLM model with torch.compile, on a CPU; run inside a vLLM environment only.

    python real_cache.py fails all all none uninstalled bypassed

Each start is a process that loads the plugins with that ``STALEPROOF_PATCHES``, or without ours, and
compiles a router with vLLM's own ``@support_torch_compile``. In a start that ``fails`` all patches are
applied, and a hook raises while torch.compile traces it; in one that is ``bypassed`` another plugin has
replaced the function since. Prints, a start, whether our plugin was loaded, whether the graph came from
vLLM's cache (below ``VLLM_CACHE_ROOT``), how many of 6 rows name an expert twice, and what the plugin says
of its patch at the end.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import real_routing

ops = importlib.import_module("vllm._custom_ops")
configs = importlib.import_module("vllm.config")
contexts = importlib.import_module("vllm.forward_context")
decorators = importlib.import_module("vllm.compilation.decorators")
fixing = importlib.import_module("vllm.compilation.passes.utility.fix_functionalization")


@decorators.support_torch_compile(dynamic_arg_dims={"logits": 0})
class Router(torch.nn.Module):
    """Top 4 of 32 experts by vLLM's ``topk_softmax``."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def forward(self, logits: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        # Nothing that inductor would have g++ compile, in each start: the patch alone adds such work.
        weights = torch.empty(logits.shape[0], 4)
        ids = torch.empty(logits.shape[0], 4, dtype=torch.int32)
        ops.topk_softmax(weights, ids, torch.empty_like(ids), logits, False, bias)
        return ids


def _fails(*args: Any) -> Any:
    raise RuntimeError("planted")


def start(patches: str) -> dict[str, Any]:
    """Load the plugins, compile or load the model, and run it once."""
    # VLLM_PLUGINS would not do: it is a factor of vLLM's cache key.
    if patches != "uninstalled":
        fault = patches if patches in ("fails", "bypassed") else None
        os.environ["STALEPROOF_PATCHES"] = "all" if fault else patches
        own = ops.topk_softmax
        importlib.import_module("vllm.plugins").load_general_plugins()
        if fault == "fails":
            importlib.import_module("staleproof.vllm.routing_calls")._cleaned = _fails
        elif fault == "bypassed":
            ops.topk_softmax = functools.wraps(own)(lambda *args: own(*args))
    stub = real_routing.CompiledOps(clamped=False)
    # This pass names operators of vLLM's CUDA library, which is not here.
    fixing.FixFunctionalizationPass.__call__ = lambda self, graph: None
    passes = configs.PassConfig()
    for name in vars(passes):
        # Fusions that are on by default, though this platform has none of them.
        if name.startswith(("fuse_", "enable_")):
            setattr(passes, name, False)
    none = {"custom_ops": ["none"], "cudagraph_mode": "NONE", "splitting_ops": [], "compile_sizes": []}
    config = configs.VllmConfig(
        device_config=configs.DeviceConfig(device="cpu"),
        compilation_config=configs.CompilationConfig(mode=3, pass_config=passes, **none),
    )
    logits = torch.randn(6, 32, generator=torch.Generator().manual_seed(2))
    bias = torch.zeros(32)
    bias[:30] = torch.nan
    with configs.set_current_vllm_config(config), torch.inference_mode():
        model = Router(vllm_config=config)
        with contexts.set_forward_context(None, config):
            ids = model(logits, bias)
    found = {
        "plugin": "staleproof.vllm.plugin" in sys.modules,
        "repeated": real_routing._duplicates(ids),
        "from disk": model.was_aot_compile_fn_loaded_from_disk,
    }
    if found["plugin"]:
        process = importlib.import_module("staleproof.vllm.process")
        states = [process.state(name) for name in ("topk_nan", "topk_nan_bias")]
        found["says"] = next((": ".join(state) for state in states if state[0] != "will be patched"), "")
    stub.library._destroy()
    return found


if __name__ == "__main__":
    # What each start would import and hash for a second.
    importlib.import_module("vllm.v1.executor")
    importlib.import_module("torch._inductor.codecache").CacheBase.get_system()
    context = multiprocessing.get_context("fork")
    results = []
    for patches in sys.argv[1:]:
        with context.Pool(1) as pool:
            results.append(pool.apply(start, (patches,)))
    print(json.dumps(results))
