"""What runs in an engine's own process: it starts a real ``vllm.LLM`` and answers probes."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from staleproof.cases.children import tell
from staleproof.check import require
from staleproof.engine import (
    cost_probes,
    hybrid_probes,
    memory_probes,
    probes,
    router_probes,
    spies,
    tenants,
    tuning,
    watch_probes,
)
from staleproof.engine.models import write_config
from staleproof.engine.orders import OPTIONS, Order

PROBES = (probes, memory_probes, hybrid_probes, router_probes, cost_probes, watch_probes, tuning)
SPIES = (spies, tenants, tuning)


def serve(order: Order) -> None:
    """Start an engine, put every probe of the order to it, tell each answer at once, and exit.

    Runs in a process of its own (:func:`staleproof.engine.orders.run`).
    """
    try:
        with tempfile.TemporaryDirectory(prefix=order.model) as folder:
            write_config(Path(folder), order.model, order.config)
            engine = start(order, folder)
            for name, arguments in order.probes.items():
                try:
                    tell((name, find(name, PROBES)(engine, **arguments)))
                except Exception as error:
                    # The probes after this one may still answer.
                    _tell_error(error)
    except Exception as error:
        _tell_error(error)
    sys.stdout.flush()
    sys.stderr.flush()
    # The answers are written. vLLM's own teardown takes seconds and can fail.
    os._exit(0)


def _tell_error(error: Exception) -> None:
    import traceback

    traceback.print_exc()
    tell(("error", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))


def find(name: str, modules: Sequence[ModuleType]) -> Any:
    """The probe or the spy of this name.

    Raises:
        ValueError: none has it.

    >>> find("rows", PROBES) is probes.rows
    True
    """
    found = [getattr(module, name) for module in modules if hasattr(module, name)]
    require(bool(found), "name", f"a function of {[module.__name__ for module in modules]}", name)
    return found[0]


def start(order: Order, folder: str) -> probes.Engine:
    """Start the engine of an order with its spies; ``folder`` holds its ``config.json``."""
    if order.packages is not None:
        sys.path += filter(None, os.environ.get(order.packages, "").split(os.pathsep))
    import vllm.plugins

    begun = time.perf_counter()
    # First the plugin, so that spies see what it makes of a kernel's result.
    vllm.plugins.load_general_plugins()
    spies.living_weights()
    watch = spies.Rows()
    for name in order.spies:
        find(name, SPIES)(watch)
    from vllm import LLM

    options: dict[str, Any] = {**OPTIONS, **order.options}
    llm = LLM(model=folder, **options)
    return probes.Engine(llm, watch, time.perf_counter() - begun)
