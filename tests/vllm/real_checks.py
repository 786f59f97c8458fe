"""Runs every check of one vLLM in one process: patches loaded, off, on, off. Prints one JSON object.

Run inside a vLLM environment (environment.py), with staleproof's entry point installed:

    python real_checks.py
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import operator
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

VERSION = importlib.metadata.version("vllm")


def logged(level: int) -> list[str]:
    """What the plugin logs from now on, at this level or above."""
    lines: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.staleproof").addHandler(handler)
    return lines


def of_another_package(own: Callable[..., Any]) -> Any:
    """A function of another package that calls vLLM's."""
    namespace: dict[str, Any] = {"__name__": "other_plugin", "own": own}
    exec("def theirs(*a, **k):\n    return own(*a, **k)", namespace)
    return namespace["theirs"]


def load() -> dict[str, Any]:
    """Let vLLM load its plugins, as each of its processes does, and report what that did."""
    plugins = importlib.import_module("vllm.plugins")
    # 0.33.0 sets its loggers up when an engine starts, and not on import.
    logging.getLogger("vllm.staleproof").setLevel(logging.INFO)
    lines = logged(logging.INFO)
    before = set(sys.modules)
    plugins.load_general_plugins()
    import torch

    from staleproof.vllm import hooks
    from staleproof.vllm import plugin as vllm_plugin

    targets = {t.module for patch in vllm_plugin.patches().values() for t in patch.targets}
    return {
        "lines": [*lines],
        "imported": sorted(targets & (set(sys.modules) - before)),
        "cuda": torch.cuda.is_initialized(),
        "watching": hooks._finder in sys.meta_path,
    }


def checks() -> dict[str, Callable[[], Any]]:
    """Return the checks by name, each a function of no arguments."""
    import real_kernels as kernels
    import real_routing as routing
    import real_scheduler as scheduler

    listed = VERSION < "0.19"
    ragged = hasattr(kernels.mla_module("flashinfer_mla"), "FlashInferMLAMetadata")
    # Where batches may be ragged, each says where its requests start; two rows belong to none.
    uniform = [*range(0, 28, 4)] if ragged else None
    found: dict[str, Callable[[], Any]] = {
        "leak": scheduler.leak,
        "hybrid": lambda: scheduler.hybrid(scheduler.attention_spec()),
        "hybrid MLA": lambda: scheduler.hybrid(scheduler.mla_spec()),
        "race": lambda: scheduler.race(listed),
        "zeroed": lambda: scheduler.zeroed(listed),
        "Triton MLA": kernels.triton_rows,
        "CUTLASS MLA": kernels.cutlass_rows,
        "CUTLASS MLA, 16 heads": lambda: kernels.cutlass_rows(16),
        "FlashInfer MLA": lambda: kernels.flashinfer_rows(1),
        "FlashInfer MLA, q_len 4": lambda: kernels.flashinfer_rows(4, uniform),
        "routing": routing.routing,
        "routing, traced": routing.traced_routing,
        "hash routing": routing.hash_routing,
        "simulator": routing.simulator,
        "fp4 scales": kernels.fp4_padding,
        "fp4 scales, traced": lambda: kernels.fp4_padding(compiled=True),
        "fused MoE": routing.fused_moe_ids,
        "dummy run": scheduler.dummy_slots,
    }
    if ragged:
        # Requests 3 and 5 are empty and own no rows.
        found["FlashInfer MLA, ragged"] = lambda: kernels.flashinfer_rows(3, [0, 2, 3, 6, 6, 7, 7])
    return found


def contained() -> dict[str, Any]:
    """Let our ops fail at each call: vLLM's own answer comes back, and one line is logged."""
    import real_kernels as kernels
    import real_routing as routing

    from staleproof.ops import clear_empty_rows as ours
    from staleproof.ops import topk

    broken = mock.Mock(side_effect=RuntimeError("planted"))
    with mock.patch.object(ours, "clear_empty_rows", broken), mock.patch.object(topk, "route", broken):
        return {
            "rows": [kernels.cutlass_rows()["bad"] for _ in range(2)],
            "routing": routing.routing()["softmax"],
            "asked": broken.call_count,
        }


def main() -> dict[str, Any]:
    """Run everything; the result can be written as JSON."""
    result: dict[str, Any] = {"version": VERSION, "load": load()}
    lines = logged(logging.INFO)
    import environment
    import real_kernels as kernels
    import real_routing as routing
    import torch

    from staleproof.vllm import hooks, standing
    from staleproof.vllm import plugin as vllm_plugin
    from staleproof.vllm.arguments import python_of
    from staleproof.vllm.plugin import WILL

    kernels.stub_flashinfer()
    version, sources = vllm_plugin.installed()
    release = vllm_plugin.base(version).name
    # As if the FlashInfer that this release pins were there.
    sources.flashinfer = environment.pinned_flashinfer(sources.package.parent)
    decided = {d.patch.name: d for d in vllm_plugin.decisions(version, sources)}
    applied = [d.patch for d in decided.values() if d.state == WILL]
    result["decisions"] = {name: d.state for name, d in decided.items()}
    # The routing kernels of csrc were clamped when topk_nan ceased to be needed.
    ops = routing.CompiledOps(clamped=decided["topk_nan"].state != WILL, hash_clamped=VERSION >= "0.28")
    # Dynamo lists torch's functions when it first runs: that must not be while one is mocked.
    torch.compile(torch.neg, backend="eager")(torch.zeros(1))
    asked = checks()

    for patch in applied:
        # FlashInfer's were armed only if the one that is installed needs them.
        patch.apply(release)
        for target in patch.targets_for(release):
            with kernels.cuda_is_cpu():
                importlib.import_module(target.module)
    places = [(sys.modules[t.module], t.name) for p in applied for t in p.targets_for(release)]

    def functions() -> list[Any]:
        """What is at each target now."""
        return [hooks._found(*place)[2] for place in places]

    wrapped = functions()
    result["loaders"] = all(
        type(module.__loader__).__module__ != "staleproof.vllm.hooks" for module, _ in places
    )
    result["lines"] = [*lines]

    # Twice more: vLLM loads plugins again and again.
    vllm_plugin.register()
    for patch in applied:
        patch.apply(release)
    result["idempotent"] = all(map(operator.is_, wrapped, functions()))

    for patch in applied:
        patch.revert()
    for owner in (standing.REPORT, standing.BACKEND):
        hooks.unwrap(owner)
    result["finder gone"] = hooks._finder not in sys.meta_path
    # Nothing of ours stands there: neither a wrapper, nor a kernel of ours, nor one made from vLLM's source.
    ends = [python_of(function).__code__.co_filename for function in functions()]
    result["reverted"] = all(end != hooks.__file__ and "guarded" not in end for end in ends)
    result["off"] = {name: check() for name, check in asked.items()}
    for patch in applied:
        patch.apply(release)
    result["on"] = {name: check() for name, check in asked.items()}
    before = len(lines)
    result["contained"] = contained() | {"lines": lines[before:]}
    for patch in applied:
        patch.revert()
    result["off again"] = {name: check() for name, check in asked.items()}
    ops.library._destroy()
    return result


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main()))
