"""Orders: one engine to start in a process of its own, and what to ask it there.

An engine takes a minute or so to start, so several engines start at once, and each answers many questions.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from staleproof import device as devices
from staleproof.cases import children
from staleproof.cases.children import Child, ChildError, Ended
from staleproof.engine import session
from staleproof.engine.session import Order
from staleproof.kernels import whole_vllm
from staleproof.vllm.sources import numbers

# The releases of vLLM that these orders were written for: names of spied functions, keywords of LLM.
OLDEST, NEWEST = "0.22.1", "0.26.0"
NEEDED = f"vLLM {OLDEST} to {NEWEST} with the torch it pins"
# Device memory an engine of the table takes, in bytes: cache, weights, graphs, CUDA context.
EACH = 8 * 2**30
# Names a folder for what the engines print.
LOGS = "STALEPROOF_ENGINE_LOGS"

ENVIRONMENT = {
    **whole_vllm.ENVIRONMENT,
    # Its key does not name the plugin's patches: an engine would run what another one compiled without them.
    # Inductor's own cache has the traced graph as its key.
    "VLLM_DISABLE_COMPILE_CACHE": "1",
}
CACHE = "TORCHINDUCTOR_CACHE_DIR"


def start(order: Order, compiled: Path) -> Child:
    """Start the process of an engine.

    Args:
        order: the engine.
        compiled: the folder where torch.compile keeps graphs, kernels and what it has timed.
    """
    env = {**ENVIRONMENT, "STALEPROOF_PATCHES": order.patches, CACHE: str(compiled), **order.env}
    return children.start(session.serve, order, env=env)


def unavailable(device: str) -> str | None:
    """Why no engine can run here, with what to install; ``None`` if one can.

    >>> unavailable("cpu")
    'a real engine needs a CUDA GPU, and vLLM 0.22.1 to 0.26.0 with the torch it pins'
    """
    if device != "cuda":
        return f"a real engine needs a CUDA GPU, and {NEEDED}"
    version = devices.version_of("vllm")
    if version is None:
        return f"vLLM is not installed; install {NEEDED}, e.g. pip install vllm=={OLDEST}"
    if not _in_range(version):
        return f"vLLM {version} is not one that these questions know; install {NEEDED}"
    free = _free_bytes()
    if free < EACH:
        return f"an engine needs {EACH // 2**30} GiB of free GPU memory; {free / 2**30:.1f} GiB are free"
    return None


def _free_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0])


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _in_range(version: str) -> bool:
    return numbers(OLDEST) <= numbers(version) <= numbers(NEWEST)


@dataclass(frozen=True)
class EngineResult:
    """What one engine's process answered.

    Attributes:
        answers: probe -> what it returned; without the probes that it did not reach.
        failed: how the process ended, in one line, if it did not answer every probe.
    """

    answers: Mapping[str, Any]
    failed: str | None


def result_of(order: Order, ended: Ended) -> EngineResult:
    """The answers of a process that ended, and what went wrong if some are missing."""
    answers = dict(ended.told)
    missing = [probe.__name__ for probe in order.probes if probe.__name__ not in answers]
    if not missing:
        return EngineResult(answers, None)
    reason = answers.get("error")
    if reason is None:
        try:
            ended.answer()
            reason = "ended early"
        except ChildError as error:
            reason = str(error)
    return EngineResult(answers, f"{', '.join(missing)}: {reason}")


def keep_log(name: str, ended: Ended) -> None:
    """Write what an engine's process printed to the folder that :data:`LOGS` names, if it names one."""
    folder = os.environ.get(LOGS)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{_slug(name)}.log").write_text(f"{ended.told}\n{ended.stdout}\n{ended.stderr}")


def _slug(name: str) -> str:
    """The name as a name of a file."""
    return re.sub(r"[^a-zA-Z0-9]+", "-", name)


def width(free_bytes: int, cores: int) -> int:
    """How many engines may start at once: each takes :data:`EACH` of memory and a core; two are left.

    >>> width(139 * 2**30, 16), width(10 * 2**30, 64)
    (14, 1)
    """
    return max(1, min(free_bytes // EACH, cores - 2))


def run(
    orders: Mapping[str, Order], timeout_s: float = 240.0, at_once: int | None = None
) -> Iterator[tuple[str, EngineResult]]:
    """Start these engines, as many at a time as fit, and yield the answers of each as it ends.

    Args:
        orders: name -> order.
        timeout_s: for each engine; it is ended then, and what it told by then counts.
        at_once: how many run at a time; by default what :func:`width` says of this machine.
    """
    if at_once is None:
        at_once = width(_free_bytes(), os.cpu_count() or 2)
    waiting = dict(orders)
    running: dict[str, tuple[Order, Child, float, float]] = {}
    with tempfile.TemporaryDirectory(prefix="staleproof-compiled-", ignore_cleanup_errors=True) as folder:
        while waiting or running:
            if time.monotonic() > _end:
                yield from (
                    (name, EngineResult({}, "the time of all engines ended first")) for name in waiting
                )
                waiting.clear()
            compiling = {order.kernels for order, *_ in running.values()} - {None}
            ready = [name for name, order in waiting.items() if order.kernels not in compiling]
            if ready and len(running) < at_once:
                name, now = ready[0], time.monotonic()
                order = waiting.pop(name)
                if order.ranks > 1 and order.ranks > (gpus := _gpus()):
                    yield name, EngineResult({}, f"needs {order.ranks} GPUs, this machine has {gpus}")
                    continue
                compiled = Path(folder, _slug(order.kernels or name))
                running[name] = order, start(order, compiled), now, min(now + timeout_s, _end)
                continue
            for name, (order, child, begun, deadline) in [*running.items()]:
                if child.poll() is not None or time.monotonic() > deadline:
                    del running[name]
                    ended = replace(child.wait(0), limit_s=deadline - begun)
                    keep_log(name, ended)
                    yield name, result_of(order, ended)
            time.sleep(0.05)


# When the engines that run must have ended, on the clock of time.monotonic.
_end = math.inf


def left_s() -> float:
    """Seconds until the engines that run must have ended; infinite without a limit.

    >>> with at_most(9):
    ...     8 < left_s() <= 9
    True
    """
    return _end - time.monotonic()


@contextlib.contextmanager
def at_most(seconds: float | None) -> Iterator[None]:
    """End the engines that :func:`run` starts inside after so many seconds together; ``None``: no such limit.

    What an engine told by then counts.
    """
    global _end
    before, _end = _end, min(_end, time.monotonic() + (math.inf if seconds is None else seconds))
    try:
        yield
    finally:
        _end = before
