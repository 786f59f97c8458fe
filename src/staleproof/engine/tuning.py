"""Kernels of which several configurations are timed: two starts of an engine can keep different ones."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
from collections import Counter
from typing import Any

from staleproof.engine.probes import Engine
from staleproof.engine.spies import Rows

# From 0.26.0 on the second.
LINEAR_ATTENTION = "vllm.model_executor.layers.fla.ops", "vllm.third_party.flash_linear_attention.ops"


def first_configs(watch: Rows) -> None:
    """Let the kernels of linear attention run with the first of their configurations, and time none.

    vLLM compiles and times about a hundred of them (``triton.autotune`` in its ``fla/ops``), in each engine
    anew: minutes of CPU time if some engines start together. And two engines that keep different ones
    need not agree in their bits.
    """
    for name in LINEAR_ATTENTION:
        if importlib.util.find_spec(name.rpartition(".")[0]) is None:
            continue
        package = importlib.import_module(name)
        for module in pkgutil.iter_modules(package.__path__):
            # Some need packages that only other backends have.
            with contextlib.suppress(ImportError):
                for kernel in vars(importlib.import_module(f"{name}.{module.name}")).values():
                    keep_first(kernel)


def keep_first(kernel: Any) -> int:
    """Leave an autotuned kernel its first configuration; return how many there were, 0 if it is none.

    >>> import types
    >>> keep_first(types.SimpleNamespace(fn=None)), keep_first(3)
    (0, 0)
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import KernelInterface

    # triton.heuristics may stand around triton.autotune.
    while isinstance(kernel, KernelInterface) and not isinstance(kernel, Autotuner):
        kernel = getattr(kernel, "fn", None)
    if not isinstance(kernel, Autotuner):
        return 0
    count = len(kernel.configs)
    kernel.configs = kernel.configs[:1]
    return count


def compiled_kernels(engine: Engine) -> dict[str, int]:
    """The Triton kernels that torch.compile made for this engine and has run, each with its configuration.

    Returns:
        ``"name: configuration"`` -> how many of them. Empty if nothing was compiled.
    """
    import gc

    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    # vLLM takes the objects of the start out of the collector, and so out of this list.
    gc.unfreeze()
    found: Counter[str] = Counter()
    for kernel in gc.get_objects():
        # Not isinstance, which asks each object for its __class__.
        if issubclass(type(kernel), CachingAutotuner) and kernel.launchers:
            name = kernel.inductor_meta.get("kernel_name") or kernel.fn.__name__
            found[f"{name}: {kernel.launchers[0].config}"] += 1
    return dict(found)
