"""What this machine can run, and how its results are labelled.

Triton reads ``TRITON_INTERPRET`` when a kernel is defined, and chooses between its compiler and its CPU
interpreter. That choice cannot change later, so it is made here once per process, before any kernel
module is imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cache

TRITON_MISSING = (
    "Triton is not installed (it has wheels for Linux only): kernels are not run here; "
    "references, arithmetic and recorded runs still work"
)


class Provenance(StrEnum):
    """Where a value comes from: run on a GPU, interpreted on a CPU, or read from a recorded run."""

    MEASURED = "MEASURED"
    INTERPRETED = "INTERPRETED"
    RECORDED = "RECORDED"


class DeviceError(RuntimeError):
    """The requested device is unknown, absent, or this process already uses the other one."""


class MissingExtraError(ImportError):
    """Packages of one of staleproof's extras are not installed."""


# Import names of the extra "workbook" that the report, the pictures and the notebooks need.
WORKBOOK = (
    *("pandas", "matplotlib", "seaborn", "jupyterlab", "ipykernel"),
    *("jupyter_client", "nbclient", "nbconvert", "nbformat"),
)


def need_workbook(*packages: str) -> None:
    """Raise unless packages of the extra ``workbook`` are installed. It imports none of them.

    Args:
        packages: import names; :data:`WORKBOOK` by default.

    Raises:
        MissingExtraError: naming what is missing and the command that installs it.
    """
    missing = [name for name in packages or WORKBOOK if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f'not installed: {", ".join(missing)}; run: pip install -e ".[workbook]"')


def has_cuda() -> bool:
    """Whether torch can use a CUDA device."""
    import torch

    return torch.cuda.is_available()


def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def flashinfer_missing() -> str | None:
    """Why FlashInfer cannot be imported here, in one line, or ``None``.

    Its import fails if the installed cubins have another version, e.g. the newest in a package index.

    >>> flashinfer_missing() is None or "flashinfer" in flashinfer_missing()
    True
    """
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    version, cubin = version_of("flashinfer-python"), version_of("flashinfer-cubin")
    if cubin in (None, version) or os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        return None
    return f"flashinfer-python {version} refuses to be imported beside flashinfer-cubin {cubin}"


def interpreting() -> bool:
    """Whether this process runs Triton kernels through Triton's CPU interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def select(device: str | None = None) -> str:
    """Choose the device of this process: compiled kernels on CUDA, interpreted ones on the CPU.

    Args:
        device: ``"cpu"``, ``"cuda"``, or ``None`` / ``"auto"`` for CUDA if there is a device
            (``TRITON_INTERPRET=1`` in the environment means ``"cpu"``).

    Returns:
        ``"cpu"`` or ``"cuda"``.

    Raises:
        DeviceError: unknown or absent device, or kernels were already loaded for the other one.

    >>> device = select()
    >>> device in ("cpu", "cuda") and device == select(device)
    True
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
    """Choose the device if it was not chosen yet, and import Triton. Kernel modules call this first.

    Raises:
        ImportError: Triton is not installed.
    """
    if not has_triton():
        raise ImportError(TRITON_MISSING)
    if "TRITON_INTERPRET" not in os.environ:
        select()
    import triton

    if interpreting():
        from staleproof.interpreter import quicken

        quicken()
    # Many faulty variants compute 0 / 0 on purpose. numpy, under the interpreter, would warn each time.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")
    # select() looks for this name: from here on the device cannot change.
    sys.modules.setdefault("staleproof._kernels_loaded", triton)


def provenance() -> Provenance:
    """The label of values that this process computes."""
    return Provenance.INTERPRETED if interpreting() or not has_cuda() else Provenance.MEASURED


@dataclass(frozen=True)
class Machine:
    """The machine and versions a result was obtained on. No host name, no user, no path.

    Attributes:
        name: of the GPU, or ``CPU x86_64``.
        kind: ``cuda`` or ``cpu``.
        capability: ``sm_90``; ``None`` on a CPU.
        memory_gib: memory of the GPU.
        driver: its version; ``None`` without nvidia-ml-py.
        python, torch, triton, flashinfer, vllm: versions, ``None`` if not installed.
    """

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
        """Folder name of this machine's recorded run.

        >>> machine = Machine("NVIDIA H200", "cuda", *[None] * 8)
        >>> machine.slug
        'nvidia-h200'
        """
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    def as_dict(self) -> dict[str, object]:
        """The fields as a dict that ``json`` can write."""
        return asdict(self)


def version_of(package: str) -> str | None:
    """Installed version of a distribution, or ``None``.

    >>> version_of("no-such-distribution") is None
    True
    """
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
    except Exception:  # no nvidia-ml-py, or no driver
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
    """The machine and versions that results of this process carry."""
    return _machine(provenance() is Provenance.MEASURED)


def needs_sm90() -> str | None:
    """Why a kernel for Hopper alone cannot run on the CUDA device, in one line, or ``None``.

    >>> (needs_sm90() is None) == (machine().capability == "sm_90")
    True
    """
    capability = machine().capability
    return None if capability == "sm_90" else f"needs an SM90 GPU (H100, H200); this is {capability}"


def is_sm100() -> bool:
    """Whether the CUDA device is SM100 or SM103 (B200, GB200, B300)."""
    return provenance() is Provenance.MEASURED and machine().capability in ("sm_100", "sm_103")


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch for a ``with`` block: operations of microseconds gain nothing by a second.

    >>> import torch
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
