"""What this machine can run, what is skipped, and why."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from staleproof import device
from staleproof.vllm.sources import vllm_file

PACKAGES = (
    "staleproof",
    "torch",
    "triton",
    "numpy",
    "flashinfer-python",
    "vllm",
    "nvidia-ml-py",
    "jupyterlab",
    "nbclient",
    "nbconvert",
    "nbval",
)
# Where vLLM has kept its Triton MLA decode, newest first.
VLLM_TRITON_MLA = ("v1/attention/ops/triton_decode_attention.py", "attention/ops/triton_decode_attention.py")


def root() -> Path | None:
    """The checkout that this package is installed from in editable mode; ``None`` if there is none."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "notebooks").is_dir() and (folder / "pyproject.toml").is_file() else None


@cache
def commit() -> str:
    """The commit of the checkout, with ``-dirty`` if files differ from it; empty if it is not known."""
    if (folder := root()) is None:
        return ""
    ask = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


@dataclass(frozen=True)
class Capability:
    """One thing that some questions need.

    Attributes:
        name: what is needed.
        available: whether this process has it on this machine.
        detail: its version, or what is skipped without it and why.
    """

    name: str
    available: bool
    detail: str


def packages() -> dict[str, str | None]:
    """The installed version of each package that a result can depend on; ``None`` if absent."""
    return {name: device.version_of(name) for name in PACKAGES}


def capabilities() -> list[Capability]:
    """What this process can run and what it skips. Call :func:`staleproof.device.select` first."""
    import torch

    on_gpu = device.provenance() is device.Provenance.MEASURED
    machine = device.machine()
    no_gpu = "no CUDA GPU" if not device.has_cuda() else "the CPU was chosen"
    found = []

    def add(name: str, available: bool, there: str, absent: str) -> None:
        found.append(Capability(name, available, there if available else absent))

    add(
        "Triton kernels",
        device.has_triton(),
        f"{machine.triton}, {'compiled' if on_gpu else 'through the CPU interpreter'}",
        device.TRITON_MISSING,
    )
    add(
        "timings",
        on_gpu,
        f"{machine.name}, {machine.capability}, {machine.memory_gib} GiB, driver {machine.driver}",
        f"{no_gpu}: values only, no timing is printed",
    )
    add(
        "CUDA graphs",
        on_gpu,
        f"CUDA {torch.version.cuda}",
        f"{no_gpu}: a captured step is a recorded list of launches over the same static tensors",
    )
    nvcc = tool("nvcc")
    add("nvcc", nvcc is not None, _version(nvcc), "not found: no inline CUDA is compiled")
    sanitizer = tool("compute-sanitizer")
    add(
        "compute-sanitizer",
        on_gpu and sanitizer is not None,
        _version(sanitizer),
        "not found: memcheck and racecheck are skipped" if on_gpu else f"{no_gpu}: skipped",
    )
    add(
        "FlashInfer kernels",
        on_gpu and machine.flashinfer is not None,
        f"{machine.flashinfer}",
        'not installed: pip install -e ".[flashinfer]"'
        if machine.flashinfer is None
        else f"{no_gpu}: only the signatures of {machine.flashinfer} are checked",
    )
    add(
        "SM100 kernels",
        device.is_sm100(),
        f"{machine.capability}",
        f"{machine.capability or no_gpu}: CUTLASS MLA and trtllm-gen MLA need SM100 or SM103",
    )
    add(
        "vLLM Triton MLA",
        vllm_file(*VLLM_TRITON_MLA) is not None,
        f"vllm {machine.vllm}",
        f"vllm {machine.vllm} has no Triton MLA at a known place"
        if machine.vllm
        else "vllm is not installed: its kernel is not run",
    )
    gpus = torch.cuda.device_count() if on_gpu else 0
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    add(
        "NCCL, two GPUs",
        nccl and gpus >= 2,
        f"{gpus} GPUs",
        f"{gpus} GPU{'' if gpus == 1 else 's'}{'' if nccl else ', torch has no NCCL'}: skipped",
    )
    return found


def tool(name: str) -> Path | None:
    """A program of the CUDA toolkit: on the path, in ``$CUDA_HOME`` or in ``/usr/local/cuda``."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    on_path = shutil.which(name)
    places = [Path(on_path)] if on_path else []
    places += [Path(home) / "bin" / name for home in homes if home]
    return next((place for place in places if place.is_file()), None)


def _version(tool: Path | None) -> str:
    if tool is None:
        return ""
    try:
        output = subprocess.run(
            [tool, "--version"], capture_output=True, text=True, timeout=20, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return "version unknown"
    match = re.search(r"(?:release|[Vv]ersion) (\d[\d.]*\d)", output)
    return match.group(1) if match else "version unknown"
