"""What stands in this process: one line when the engine or the worker in it is ready."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from staleproof.vllm import hooks, standing
from staleproof.vllm.arguments import Arguments, Keywords
from staleproof.vllm.hooks import Target, logger
from staleproof.vllm.patch import FACTORS

# By now all modules that this process needs are imported. A worker may share the engine's process.
ENGINE = "vllm.v1.engine.core", "EngineCore.__init__"
WORKER = "vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model"
# The process in which an engine is starting.
_starting: list[int] = []


def say(text: str) -> None:
    """Log a line that must not be lost.

    vLLM 0.33.0 configures logging after it has loaded plugins. Until then only warnings are printed.
    """
    level = logging.INFO if logger.hasHandlers() else logging.WARNING
    logger.log(level, "staleproof%s", text)


def state(name: str) -> tuple[str, str]:
    """Return what became of a patch in this process, and why.

    Returns:
        ``in place``, ``partly``, ``refused``, ``not needed`` or, if vLLM has imported none of its
        targets here, ``will be patched``; and the reason, or an empty text.

    >>> standing.note("a", "vllm.ops:double", "in place")
    >>> standing.note("a", "vllm.ops:halve", "halve was wrapped by other")
    >>> state("a")
    ('partly', 'halve was wrapped by other')
    >>> standing.forget("a")
    """
    hooks.settle()
    why = standing.stepped_back.get(name)
    if why is not None:
        return ("off" if standing.SWITCHED in why else "refused"), why
    states = [*hooks.checked(name).values()]
    if name in traced and "in place" in states:
        states += [value for value in hooks.checked(standing.CACHE).values()]
    left = [value for value in states if value not in ("in place", "waiting", "not needed")]
    if "in place" in states:
        return ("partly", "; ".join(left)) if left else ("in place", "")
    if left:
        return "refused", "; ".join(left)
    return ("will be patched", "") if "waiting" in states or not states else ("not needed", "")


def line(version: str, names: Sequence[str], refused: Mapping[str, str]) -> str:
    """Say in one line what stands.

    Args:
        names: the patches that were put in place, or wait for an import.
        refused: patch -> why it was refused when the plugin was loaded.

    >>> line("0.18.1", ["a"], {"b": "no Triton"})
    ' on vLLM 0.18.1, this process: refused: b (no Triton); will be patched: a (not imported here)'
    """
    found: dict[str, list[str]] = {"in place": [], "partly": [], "refused": []}
    for name, (is_now, why) in {name: state(name) for name in names}.items():
        why = "not imported here" if is_now == "will be patched" else why
        found.setdefault(is_now, []).append(f"{name} ({why})" if why else name)
    found["refused"] += [f"{name} ({why})" for name, why in refused.items()]
    states = "; ".join(f"{is_now}: {', '.join(of)}" for is_now, of in found.items() if of)
    return f" on vLLM {version}, this process: {states or 'nothing to patch'}"


def watch(version: str, names: Sequence[str], refused: Mapping[str, str]) -> None:
    """Log :func:`line` when the engine of this process is ready, or the worker if there is none."""

    def starting(args: Arguments, kwargs: Keywords) -> None:
        _starting[:] = [os.getpid()]

    def engine_ready(result: Any, args: Arguments, kwargs: Keywords) -> Any:
        _starting.clear()
        say(line(version, names, refused))
        return result

    def worker_ready(result: Any, args: Arguments, kwargs: Keywords) -> Any:
        if _starting != [os.getpid()]:
            say(line(version, names, refused))
        return result

    # Two functions that everything needs: that they are wrapped is no news.
    hooks._announced.add(standing.REPORT)
    hooks.wrap(
        standing.REPORT,
        Target(*ENGINE, ("self",), before=starting, after=engine_ready),
        Target(*WORKER, ("self",), after=worker_ready),
    )
