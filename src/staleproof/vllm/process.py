"""The state of the patches in this process, logged in one line when its engine or worker is ready."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from staleproof.vllm import hooks
from staleproof.vllm.hooks import Target, logger, warn_once
from staleproof.vllm.sources import PatchError
from staleproof.vllm.standing import CACHE, REPORT, registry

# By now all modules that this process needs are imported. A worker may share the engine's process.
ENGINE = "vllm.v1.engine.core", "EngineCore.__init__"
WORKER = "vllm.v1.worker.gpu_worker", "Worker.compile_or_warm_up_model"
# Its subclass, which does not call it.
CPU_WORKER = "vllm.v1.worker.cpu_worker", "CPUWorker.compile_or_warm_up_model"
# An engine core that is spawned loads its plugins in its own __init__. Its scheduler is made last.
CORE = "vllm.v1.core.sched.scheduler", "Scheduler.__init__"
REQUIRE = "STALEPROOF_REQUIRE"
IN_PLACE, PARTLY, REFUSED, OFF, WAITING, NOT_NEEDED = (
    *("in place", "partly", "refused", "off"),
    *("will be patched", "not needed"),
)
# The process in which an engine is starting.
_starting: list[int] = []


class RequirementError(RuntimeError):
    """``STALEPROOF_REQUIRE`` names a patch that is not in place: vLLM must not start."""


def say(text: str) -> None:
    """Log a line that must not be lost.

    vLLM 0.33.0 configures logging after it has loaded plugins. Until then only warnings are printed.
    """
    level = logging.INFO if logger.hasHandlers() else logging.WARNING
    logger.log(level, "staleproof%s", text)


def state(name: str) -> tuple[str, str]:
    """Return what became of a patch in this process, and why. Functions in place are looked at anew.

    Returns:
        ``in place``, ``partly``, ``refused``, ``off`` (switched off), ``not needed`` or, if vLLM has
        imported none of its targets here, ``will be patched``; and the reason, or an empty text.

    >>> registry.of("a").targets |= {"vllm.ops:double": "in place", "vllm.ops:halve": "wrapped by other"}
    >>> state("a")
    ('partly', 'wrapped by other')
    >>> registry.forget("a")
    """
    hooks.settle()
    why = registry.reason(name)
    if why is not None:
        return (OFF if registry.is_switched_off(name) else REFUSED), why
    states = [*hooks.checked(name).values()]
    if IN_PLACE in states and registry.of(name).traced:
        states += hooks.checked(CACHE).values()
    left = [value for value in states if value not in (IN_PLACE, "waiting", NOT_NEEDED)]
    if IN_PLACE in states:
        return (PARTLY, "; ".join(left)) if left else (IN_PLACE, "")
    if left:
        return REFUSED, "; ".join(left)
    return (WAITING if "waiting" in states or not states else NOT_NEEDED), ""


def line(version: str, found: Mapping[str, tuple[str, str]]) -> str:
    """Say in one line what stands; ``found`` is patch -> state and reason.

    >>> line("0.18.1", {"a": ("will be patched", ""), "b": ("refused", "no Triton")})
    ' on vLLM 0.18.1, this process: refused: b (no Triton); will be patched: a (not imported here)'
    """
    states: dict[str, list[str]] = {IN_PLACE: [], PARTLY: [], REFUSED: []}
    for name, (state, why) in found.items():
        why = "not imported here" if state == WAITING else why
        states.setdefault(state, []).append(f"{name} ({why})" if why else name)
    text = "; ".join(f"{state}: {', '.join(names)}" for state, names in states.items() if names)
    return f" on vLLM {version}, this process: {text or 'nothing to patch'}"


def required(text: str | None, found: Mapping[str, tuple[str, str]], known: Iterable[str]) -> None:
    """Check that the patches of ``STALEPROOF_REQUIRE`` stand, as far as vLLM has imported their targets.

    Args:
        text: names of patches.
        found: patch -> its state and the reason. What is not listed is not needed here.
        known: the names of all patches.

    Raises:
        RequirementError: one does not stand, or no patch has that name.

    >>> required("a", {"a": (IN_PLACE, "")}, ["a"])
    """
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    unknown = [f"{name} is no patch (known: {', '.join(known)})" for name in names if name not in known]
    bad = {name: state for name, state in found.items() if state[0] not in (IN_PLACE, WAITING, NOT_NEEDED)}
    missing = [f"{name} is {bad[name][0]} ({bad[name][1]})" for name in names if name in bad]
    if unknown or missing:
        raise RequirementError(f"vLLM does not start: {REQUIRE}={text}: {'; '.join(unknown + missing)}")


def watch(ready: Callable[[Any], None]) -> None:
    """Call ``ready`` with the engine of this process when it is ready; or the worker, or the scheduler.

    It may be called twice. What it raises ends vLLM.
    """

    def starting(engine: bool, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start(*args: Any, **kwargs: Any) -> Any:
            if engine:
                _starting[:] = [os.getpid()]
            result = original(*args, **kwargs)
            if engine or _starting != [os.getpid()]:
                _starting.clear()
                ready(args[0])
            return result

        start.staleproof_replaces = original  # type: ignore[attr-defined]
        return start

    # Functions that everything needs: that they are wrapped is no news. Exchanged, and not hooked,
    # because what a hook raises is contained.
    registry.of(REPORT).announced = True
    for place in (ENGINE, WORKER, CPU_WORKER, CORE):
        swap = functools.partial(starting, place == ENGINE)
        hooks.wrap(REPORT, Target(*place, ("self",), swap=swap))


def contained(call: Callable[[], Any], what: str) -> Any:
    """Call something of ours that vLLM does not need; what goes wrong is one line, and ``None``.

    >>> contained(lambda: 1, "counting")
    1
    """
    try:
        return call()
    except (Exception, SystemExit) as error:
        # Ours are worded for the reader.
        kind = "" if isinstance(error, PatchError) else f"{type(error).__name__}: "
        warn_once(f"{what}: {kind}{error}")
        return None
