"""Finds a package under audit, installed or unpacked in a cache folder, and makes it importable.

The cache is ``~/.cache/staleproof/audit``; ``STALEPROOF_AUDIT_PACKAGES`` names another. It holds one
folder a release, ``<distribution>-<version>``, made with ``pip install --no-deps --target``. vLLM's
releases are also found where ``tests/vllm/environment.py`` unpacks their source distributions.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as remembered
from pathlib import Path

import torch

from staleproof import device as devices
from staleproof.kernels import vllm_sources
from staleproof.kernels.subject import Subject

# An assertion in this header of torch leaves its condition, the header's path and the line in a library.
_HEADER = "c10/core/TensorImpl.h"
_NAMED = f'/torch/include/{_HEADER}":'.encode()
_ASSERTION = re.compile(
    rb'([ -~]{1,200}) INTERNAL ASSERT FAILED at "[ -~]{0,300}' + re.escape(_NAMED) + rb"(\d+)"
)


@dataclass(frozen=True)
class Release:
    """One release of a package.

    Attributes:
        version: of the distribution; ``""`` for the user's own module.
        folder: what to put on ``sys.path``; ``None`` if it is installed.
    """

    version: str
    folder: Path | None = None


def cache() -> Path:
    """The folder of unpacked packages."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("STALEPROOF_AUDIT_PACKAGES", home / "staleproof/audit"))


def fetch(release: str, wanted: str, folder: Path) -> None:
    """Download the wheel of a release for Linux, and keep some of its files.

    Args:
        release: ``distribution==version``.
        wanted: a regular expression that matches the whole name of each file to keep.
        folder: where they go; its present content is deleted.

    Raises:
        subprocess.CalledProcessError: pip could not download it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        target = [
            "--platform=manylinux_2_28_x86_64",
            "--platform=manylinux2014_x86_64",
            "--python-version=3.12",
        ]
        subprocess.run([*pip, *target, "--implementation=cp", "-d", work, release], check=True)
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            for name in filter(re.compile(wanted).fullmatch, wheel.namelist()):
                wheel.extract(name, f"{work}/kept")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(f"{work}/kept", folder)


def _cached(package: str) -> list[Release]:
    stem = re.sub(r"[-_.]+", "_", package)
    found = [Release(folder.name.rpartition("-")[2], folder) for folder in cache().glob(f"{stem}-[0-9]*")]
    if package == "vllm":
        default = cache().parent / "vllm"
        sources = Path(os.environ.get("STALEPROOF_VLLM_CACHE", default))
        found += [
            Release(folder.name, folder) for folder in sources.glob("[0-9]*") if (folder / "vllm").exists()
        ]
    return sorted(found, key=lambda release: [*map(int, re.findall(r"\d+", release.version))])


def unpacked(package: str, version: str) -> list[Path]:
    """The folders of the cache that hold a release of a package."""
    return [found.folder for found in _cached(package) if found.version == version and found.folder]


def releases(subject: Subject) -> list[Release]:
    """The releases of a subject's package that are here, installed first; empty if there are none."""
    if not subject.package:
        return [Release("")]
    installed = devices.version_of(subject.package)
    if subject.package == "staleproof" and not installed:
        # staleproof runs from a checkout that is not installed.
        return [Release("checkout")]
    found = [Release(installed)] if installed else []
    found += [release for release in _cached(subject.package) if release.version != installed]
    if subject.versions:
        found = [release for release in found if release.version in subject.versions]
    return found


def unavailable_reason(subject: Subject) -> str:
    """Why this machine cannot run a subject whose package is here, or ``""``."""
    capability = devices.machine().capability
    if subject.needs in ("cuda", "sm90", "sm100") and capability is None:
        return "needs a CUDA GPU"
    if subject.needs == "sm90" and (why := devices.needs_sm90()):
        return why
    if subject.needs == "sm100" and capability not in ("sm_100", "sm_103"):
        return f"needs an SM100 GPU (B200, GB200); this is {capability}"
    if subject.needs == "cpu" and capability is not None:
        return "runs on CPU tensors only"
    return ""


def make_importable(subjects: Sequence[Subject], release: Release) -> None:
    """Let this process import the release for these subjects; it stays so until the process ends."""
    cuda = devices.machine().kind == "cuda"
    if devices.interpreting() and devices.has_triton():
        devices.load_triton()
        from staleproof.kernels import interpreter

        interpreter.repair()
    if release.folder is not None:
        sys.path.insert(0, str(release.folder))
    files = sorted({file for subject in subjects for file in subject.files})
    if not files or (cuda and release.folder is None):
        return
    root = release.folder
    top = files[0].partition(".")[0]
    if root is None:
        spec = importlib.util.find_spec(top)
        assert spec is not None, f"{top} is installed without files"
        root = Path(str(spec.origin)).parents[1]
    sys.meta_path.insert(0, vllm_sources.Finder(root / top, files, top, cuda))


def _imported(subject: Subject) -> list[str]:
    """The modules that an adapter imports from its package."""
    call = subject.function
    if not inspect.isfunction(call):
        # This process does not have the user's function, see runner.listed.
        return []
    tree = ast.parse(textwrap.dedent(inspect.getsource(call)))
    named = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return [name for name in named if not name.startswith(("torch", "staleproof"))]


def imported_elsewhere(subject: Subject, release: Release) -> str:
    """Which module of an adapter was not imported from the release's folder, or ``""``.

    If the folder lacks files of the package, Python imports them from an installed release.
    """
    if release.folder is None:
        return ""
    for name in _imported(subject):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and not Path(file).resolve().is_relative_to(release.folder.resolve()):
            return f"{name} was imported from another release"
    return ""


@remembered
def fits(library: Path) -> bool:
    """Whether the assertions compiled into a library are at the same lines in this torch's header."""
    header = Path(torch.__file__).parent / "include" / _HEADER
    if not header.exists():
        return True
    lines = header.read_text().splitlines()
    held, place = library.read_bytes(), -1
    while (place := held.find(_NAMED, place + 1)) >= 0:
        found = _ASSERTION.search(held, max(0, place - 600), place + len(_NAMED) + 8)
        if found is not None:
            # For a call of several lines, compilers differ in which line they name.
            number = int(found[2])
            around = "".join("".join(lines[max(0, number - 4) : number + 3]).split())
            if "".join(found[1].decode().split()) not in around:
                return False
    return True


def other_torch(subject: Subject, release: Release) -> str:
    """Which library of a subject's package was compiled against another torch than this one, or ``""``.

    C++ code that inlines torch's headers has the tensor layout of the torch that it was compiled with
    compiled in. The metadata of a wheel need not name that torch, but assertions of ``TensorImpl.h`` in the
    library name their line numbers. A library that uses torch's stable ABI has no such assertions.

    Args:
        subject: the kernel. The user's own kernels and Triton sources use no library of a package.
        release: of its package.
    """
    if not subject.package or subject.files:
        return ""
    for top in sorted({name.partition(".")[0] for name in _imported(subject)}):
        folder = release.folder and release.folder / top
        if folder is None:
            spec = importlib.util.find_spec(top)
            folder = Path(str(spec.origin)).parent if spec else None
        for library in sorted(folder.rglob("*.so")) if folder else ():
            if not fits(library):
                here = torch.__version__.partition("+")[0]
                return f"{library.name} was compiled against another torch than {here}, the one here"
    return ""
