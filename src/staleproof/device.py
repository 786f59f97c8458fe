"""What this machine can run, and the provenance word for it.

Triton decides between its compiler and its CPU interpreter when a kernel is defined, from
``TRITON_INTERPRET``. So the choice is made once a process, here, before any kernel is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import warnings
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache

TRITON_MISSING = (
    "Triton is not installed (it has wheels for Linux only): kernels are not run here; "
    "references, arithmetic and recorded runs still work"
)


class Provenance(StrEnum):
    """Where a value comes from."""

    MEASURED = "MEASURED"
    INTERPRETED = "INTERPRETED"
    RECORDED = "RECORDED"


class DeviceError(RuntimeError):
    """The device asked for is unknown, absent, or no longer to be had in this process."""


def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether this process runs Triton kernels through Triton's CPU interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def select(device: str | None = None) -> str:
    """Choose the device of this process, and with it compiled or interpreted kernels.

    Args:
        device: ``"cpu"``, ``"cuda"``, or ``None`` / ``"auto"`` for the best this machine has
            (``TRITON_INTERPRET=1`` in the environment means ``"cpu"``).

    Returns:
        ``"cpu"`` or ``"cuda"``.

    Raises:
        DeviceError: unknown or absent device, or Triton's kernels are already loaded the other way.
    """
    if device not in (None, "auto", "cpu", "cuda"):
        raise DeviceError(f"device: expected cpu, cuda or auto, got {device!r}")
    if device in (None, "auto"):
        device = "cuda" if has_cuda() and not interpreting() else "cpu"
    if device == "cuda" and not has_cuda():
        raise DeviceError("device: cuda was asked for, but torch sees no CUDA device here")
    interpret = device == "cpu"
    if "staleproof._kernels_loaded" in sys.modules and interpret != interpreting():
        raise DeviceError(
            f"device: {device} was asked for, but this process loaded Triton's kernels for the "
            "other one; choose the device before the first kernel, or start a new process"
        )
    os.environ["TRITON_INTERPRET"] = "1" if interpret else "0"
    return device


def load_triton() -> None:
    """Fix the mode of this process and import Triton. First line of every kernel module.

    Raises:
        ImportError: Triton is not installed.
    """
    if not has_triton():
        raise ImportError(TRITON_MISSING)
    if "TRITON_INTERPRET" not in os.environ:
        select()
    import triton

    # 0 / 0 is what half of the faulty variants are about; numpy need not remark on it.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    # The marker that select() looks for: from here on the mode cannot change.
    sys.modules.setdefault("staleproof._kernels_loaded", triton)


def provenance() -> Provenance:
    """The word for a value computed in this process just now."""
    return Provenance.INTERPRETED if interpreting() or not has_cuda() else Provenance.MEASURED


@dataclass(frozen=True)
class Machine:
    """What a result was obtained on. No host name, no user, no path."""

    name: str
    kind: str
    capability: str | None
    memory_gib: float | None
    driver: str | None
    python: str
    torch: str
    triton: str | None
    flashinfer: str | None
    vllm: str | None

    @property
    def slug(self) -> str:
        """Folder name of this machine's recorded run, e.g. ``nvidia-h200``."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def as_dict(self) -> dict[str, object]:
        """The fields, as JSON wants them."""
        return asdict(self)


def version_of(package: str) -> str | None:
    """Installed version of a distribution, or ``None``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # no NVML, no driver: the field stays empty
        return None


@cache
def _machine(use_cuda: bool) -> Machine:
    import torch

    name, capability, memory, driver = f"CPU {platform.machine()}", None, None, None
    if use_cuda:
        props = torch.cuda.get_device_properties(0)
        name = props.name
        capability = f"sm_{props.major}{props.minor}"
        memory = round(props.total_memory / 2**30, 1)
        driver = _driver()
    return Machine(
        name=name,
        kind="cuda" if use_cuda else "cpu",
        capability=capability,
        memory_gib=memory,
        driver=driver,
        python=platform.python_version(),
        torch=torch.__version__,
        triton=version_of("triton"),
        flashinfer=version_of("flashinfer-python"),
        vllm=version_of("vllm"),
    )


def machine() -> Machine:
    """The machine and the versions that results of this process are labelled with."""
    return _machine(provenance() is Provenance.MEASURED)


def is_sm100() -> bool:
    """Whether the CUDA device is SM100 or SM103 (B200, GB200, B300)."""
    return provenance() is Provenance.MEASURED and machine().capability in ("sm_100", "sm_103")
