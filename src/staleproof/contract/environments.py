"""What must be installed to run a counterexample alone, as comment lines at its top.

If a package is small, it is installed with the dependencies of its own metadata. vLLM and sglang would bring
gigabytes of CUDA wheels: without a GPU, only their sources are installed, and what importing them needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from staleproof import device as devices
from staleproof.kernels.subject import Subject

# What `import` of the package asks for, beside torch, Triton and numpy. Found by importing each in an empty
# environment; tests/contract/alone.py does it again.
IMPORTS = {
    "vllm": "packaging regex",
    "sglang": "packaging orjson psutil pybase64 requests pillow starlette msgspec pyzmq tqdm ipython pydantic"
    " aiohttp",
    # Their metadata does not name it, and they import it.
    "fla-core": "packaging",
    "liger-kernel": "packaging",
}
# Kernels without Triton.
PLAIN = ("torch", "transformers", "sgl-flash-mla", "sgl-deep-gemm")
# Packages that fix the torch they are installed with.
PINNED = ("vllm", "sglang")


@dataclass(frozen=True)
class Installed:
    """The versions with which a script showed its break.

    Attributes:
        torch: its version without the local part, e.g. ``2.13.0``.
        triton: its version, or ``""``.
        cuda: whether it ran on a GPU.

    >>> Installed("2.13.0", "3.9.0", cuda=False).torch
    '2.13.0'
    """

    torch: str
    triton: str
    cuda: bool


def here() -> Installed:
    """What this process has."""
    machine = devices.machine()
    return Installed(machine.torch.partition("+")[0], machine.triton or "", machine.kind == "cuda")


def commands(subject: Subject, version: str, seen: Installed) -> list[str]:
    """The shell commands that install what a script of this subject imports, into an empty environment.

    Args:
        subject: the kernel.
        version: release of its package.
        seen: the versions with which the script showed its break.

    Returns:
        One or two commands; none for a module of the user's.

    >>> from staleproof.kernels.subject import Subject
    >>> seen = Installed("2.13.0", "3.9.0", cuda=False)
    >>> commands(Subject("decode", "attention", print, package="vllm"), "0.33.0", seen)
    ['pip install torch==2.13.0 triton==3.9.0 numpy packaging regex', 'pip install --no-deps vllm==0.33.0']
    """
    if not subject.package:
        return []
    wanted = f"{subject.package}=={version.partition('+')[0]}"
    torch = f"torch=={seen.torch}"
    if subject.package == "torch":
        return [f"pip install {wanted} numpy"]
    if subject.package in PINNED and seen.cuda:
        return [f"pip install {wanted}  # seen with {torch} triton=={seen.triton}"]
    more = [torch, *([] if subject.package in PLAIN else [f"triton=={seen.triton}"]), "numpy"]
    more += IMPORTS.get(subject.package, "").split()
    if subject.package in PINNED:
        return [f"pip install {' '.join(more)}", f"pip install --no-deps {wanted}"]
    return [f"pip install {' '.join([*more, wanted])}"]


def head(subject: Subject, version: str, sentence: str, seen: Installed) -> list[str]:
    """The first lines of a script: what it shows, and how to install what it needs.

    Args:
        subject: the kernel.
        version: release of its package, ``""`` for a module of the user's.
        sentence: what it shows.
        seen: the versions with which it showed that.
    """
    package = f"{subject.package} {version}" if subject.package else "your module"
    lines = [f"# {subject.name} ({package}). {sentence}"]
    return lines + [f"# {command}" for command in commands(subject, version, seen)]
