"""Where a package under audit lies: installed, or unpacked in a cache folder, and how it is imported.

The cache is ``~/.cache/staleproof/audit``; ``STALEPROOF_AUDIT_PACKAGES`` names another. It holds one
folder a release, ``<distribution>-<version>``, made with ``pip install --no-deps --target``. vLLM's
releases are also found where ``tests/vllm/environment.py`` unpacks their source distributions.
"""

from __future__ import annotations

import ast
import enum
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import re
import sys
import textwrap
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as remembered
from pathlib import Path
from typing import Any

import torch

from staleproof import device as devices
from staleproof.contract.registry import Subject
from staleproof.kernels import vllm_sources

# What an assertion in this header of torch leaves in a library: its condition, the path, and the line.
_HEADER = "c10/core/TensorImpl.h"
_NAMED = f'/torch/include/{_HEADER}":'.encode()
_ASSERTION = re.compile(
    rb'([ -~]{1,200}) INTERNAL ASSERT FAILED at "[ -~]{0,300}' + re.escape(_NAMED) + rb"(\d+)"
)


@dataclass(frozen=True)
class Release:
    """One release of a package.

    Attributes:
        version: of the distribution; ``""`` for a module of the user's.
        folder: what to put on ``sys.path``; ``None`` if it is installed.
    """

    version: str
    folder: Path | None = None


def cache() -> Path:
    """The folder of unpacked packages."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("STALEPROOF_AUDIT_PACKAGES", home / "staleproof/audit"))


def _cached(package: str) -> list[Release]:
    stem = re.sub(r"[-_.]+", "_", package)
    found = [Release(folder.name.rpartition("-")[2], folder) for folder in cache().glob(f"{stem}-[0-9]*")]
    if package == "vllm":
        default = cache().parent / "vllm"
        sources = Path(os.environ.get("STALEPROOF_VLLM_CACHE", default))
        found += [
            Release(folder.name, folder) for folder in sources.glob("[0-9]*") if (folder / "vllm").exists()
        ]
    return sorted(found, key=lambda release: release.version)


def releases(subject: Subject) -> list[Release]:
    """The releases of a subject's package that are here, installed first; empty if there are none."""
    if not subject.package:
        return [Release("")]
    installed = devices.version_of(subject.package)
    if subject.package == "staleproof" and not installed:
        # Imported from a checkout that is not installed.
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


def _no(*args: Any, **kwargs: Any) -> bool:
    return False


def _known(cuda: bool) -> dict[str, dict[str, Any]]:
    """What the stand-ins of other packages must answer, by module."""
    sglang: dict[str, Any] = {}
    for name in ("is_hip", "is_npu", "is_xpu", "is_cpu", "is_musa", "is_hpu", "is_sm120_supported"):
        sglang[name] = _no
    for name in ("is_gfx95_supported", "is_gfx1250_supported", "get_bool_env_var", "cpu_has_amx_support"):
        sglang[name] = _no
    sglang["is_cuda"] = lambda: cuda
    sglang["get_device_core_count"] = lambda *args: 132
    sglang["ceil_div"] = lambda a, b: -(-a // b)
    environment = types.SimpleNamespace(get=_no)
    fp8 = torch.finfo(torch.float8_e4m3fn)
    platform: dict[str, Any] = {}
    for name in ("is_rocm", "is_xpu", "is_cpu", "is_fp8_fnuz", "is_arch_support_pdl"):
        platform[name] = _no
    platform["is_cuda"] = platform["is_cuda_alike"] = lambda: True
    platform["has_device_capability"] = lambda capability: capability <= 90
    platform["is_device_capability_family"] = _no
    platform["get_device_capability"] = lambda: (9, 0)
    platform["fp8_dtype"] = lambda: torch.float8_e4m3fn
    platform["num_compute_units"] = lambda *args: 132
    return {
        "vllm.platforms": {"current_platform": types.SimpleNamespace(**platform)},
        "vllm.v1.kv_cache_interface": {
            "KVQuantMode": enum.IntEnum(
                "KVQuantMode",
                "NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD",
                start=0,
            ),
            "is_quantized_kv_cache": lambda name: name != "auto",
        },
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "get_fp8_min_max": lambda: (fp8.min, fp8.max),
            "FP8_DTYPE": torch.float8_e4m3fn,
        },
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "sglang.srt.utils": sglang,
        "sglang.srt.environ": {"envs": type("Envs", (), {"__getattr__": lambda self, name: environment})()},
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": _no},
        "sglang.srt.utils.patch_torch": {"register_fake_if_exists": lambda *args: lambda function: function},
        "sglang.srt.platforms": {
            "current_platform": types.SimpleNamespace(
                capabilities=types.SimpleNamespace(supports_triton=True)
            )
        },
        "sglang.kernels.kernel_api_logging": {"debug_kernel_api": lambda function: function},
        "sglang.kernels.ops.quantization.fp8_utils": {
            "fp8_dtype_to_triton": lambda dtype: __import__("triton").language.float8e4nv
        },
        "sglang.kernels.ops.kvcache.set_mla_kv_buffer": {"can_use_set_mla_kv_buffer": _no},
    }


class _Package(vllm_sources._Finder):
    """The same stand-ins for any package."""

    def __init__(self, root: Path, names: Sequence[str], cuda: bool) -> None:
        super().__init__(root, names)
        self.package, self.known = names[0].partition(".")[0], _known(cuda)

    def find_spec(
        self, name: str, path: Any, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        if name in self.names:
            file = self.root.joinpath(*name.split(".")[1:]).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        module.__dict__.update(self.known.get(module.__name__, {}))


def make_importable(subjects: Sequence[Subject], release: Release) -> None:
    """Let this process import the release for these subjects; it stays so until the process ends."""
    cuda = devices.machine().kind == "cuda"
    if devices.interpreting() and devices.has_triton():
        devices.load_triton()
        from staleproof.contract import interpreter

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
    sys.meta_path.insert(0, _Package(root / top, files, cuda))


def _imported(subject: Subject) -> list[str]:
    """The modules that an adapter imports from its package."""
    call = inspect.unwrap(subject.call)
    if not inspect.isfunction(call):
        # Of a function of the user's this process has none, see runner.listed.
        return []
    tree = ast.parse(textwrap.dedent(inspect.getsource(call)))
    named = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return [name for name in named if not name.startswith(("torch", "staleproof"))]


def imported_elsewhere(subject: Subject, release: Release) -> str:
    """Which module of an adapter came from another place than the release's folder, or ``""``.

    A folder that lacks files of the package lets an installed release answer in its place.
    """
    if release.folder is None:
        return ""
    for name in _imported(subject):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and not Path(file).resolve().is_relative_to(release.folder.resolve()):
            return f"{name} was imported from another release"
    return ""


@remembered
def _fits(library: Path) -> bool:
    """Whether the assertions that a library holds stand at their lines in this torch's header."""
    header = Path(torch.__file__).parent / "include" / _HEADER
    if not header.exists():
        return True
    lines = header.read_text().splitlines()
    held, place = library.read_bytes(), -1
    while (place := held.find(_NAMED, place + 1)) >= 0:
        found = _ASSERTION.search(held, max(0, place - 600), place + len(_NAMED) + 8)
        if found is not None:
            # Compilers differ in which line of a call of several lines they name.
            number = int(found[2])
            around = "".join("".join(lines[max(0, number - 4) : number + 3]).split())
            if "".join(found[1].decode().split()) not in around:
                return False
    return True


def other_torch(subject: Subject, release: Release) -> str:
    """Which library of a subject's package was compiled against another torch than this one, or ``""``.

    C++ code that inlines torch's headers reads the members of a tensor where they were in the torch that
    it was compiled with. The metadata of a wheel need not name that torch; the assertions of
    ``TensorImpl.h`` in the library name their lines in it. A library of torch's stable interface has none.

    Args:
        subject: the kernel; one of the user's, and one of Triton sources, runs no library of a package.
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
            if not _fits(library):
                here = torch.__version__.partition("+")[0]
                return f"{library.name} was compiled against another torch than {here}, the one here"
    return ""
