"""Executes single source files of a package, mostly vLLM, under their own names, with stubs for the rest.

Importing the whole package starts its platform detection, and needs its compiled libraries and some
fifty dependencies. Here only the named files run. Every other module of the package is a stub: each
public name in it is a class that takes any arguments and has any enumeration member. That is enough
to load the files and to call what they define.
"""

from __future__ import annotations

import abc
import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from staleproof.lab import MissingError
from staleproof.vllm.sources import PatchError, installed


class UnavailableError(RuntimeError):
    """Files of vLLM cannot be executed here; the message is one line that says why."""


class _AnyMember(abc.ABCMeta):
    """Makes every public attribute of a stub class a member of it, as in an enumeration."""

    def __getattr__(cls, name: str) -> Any:
        # A class that vLLM derives from a stub has only the attributes that vLLM defines.
        if name.startswith("_") or _Anything not in cls.__bases__:
            raise AttributeError(f"{cls.__name__} has no {name}")
        member = cls()
        setattr(cls, name, member)
        return member


class _Anything(metaclass=_AnyMember):
    """The base of all stub classes; takes any arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> type:
        return cls


def _stand_in(name: str) -> types.ModuleType:
    """A module that has every public name; each is a stub class.

    It is a plain ModuleType, not a subclass: Dynamo of torch 2.11 traces an import only of a plain module.
    """
    module = types.ModuleType(name)

    def member(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _AnyMember(name, (_Anything,), {})
        setattr(module, name, value)
        return value

    vars(module)["__getattr__"] = member
    return module


def _no(*args: Any, **kwargs: Any) -> bool:
    return False


def _known(root: Path, cuda: bool) -> dict[str, dict[str, Any]]:
    """Real values that stubs need, by module, so that the files load and can be called."""
    import torch
    import triton
    import triton.language as tl

    def every(names: str, answer: Callable[..., Any]) -> dict[str, Any]:
        return dict.fromkeys(names.split(), answer)

    platform: dict[str, Any] = every("is_rocm is_xpu is_cpu is_fp8_fnuz is_arch_support_pdl", _no)
    platform |= every("is_device_capability_family", _no)
    platform |= every("is_cuda is_cuda_alike", lambda: True)
    more: dict[str, Any] = {
        "import_kernels": lambda: None,
        "has_device_capability": lambda capability: capability <= 90,
        "get_device_capability": lambda: (9, 0),
        "fp8_dtype": lambda: torch.float8_e4m3fn,
        "num_compute_units": lambda *args: 132,
    }
    platform |= more
    modes = "NONE FP8_PER_TENSOR INT8_PER_TOKEN_HEAD FP8_PER_TOKEN_HEAD INT4_PER_TOKEN_HEAD"
    quantized: dict[str, Any] = {"is_quantized_kv_cache": lambda name: name != "auto"}
    fp8 = torch.finfo(torch.float8_e4m3fn)
    sglang = every("is_hip is_npu is_xpu is_cpu is_musa is_hpu is_sm120_supported is_gfx95_supported", _no)
    sglang |= every("is_gfx1250_supported get_bool_env_var cpu_has_amx_support", _no)
    sglang |= every("is_cuda", lambda: cuda) | every("get_device_core_count", lambda *args: 132)
    sglang |= every("ceil_div", lambda a, b: -(-a // b))
    environment = types.SimpleNamespace(get=_no)
    triton_runs = types.SimpleNamespace(capabilities=types.SimpleNamespace(supports_triton=True))
    return {
        "vllm": {"__file__": str(root / "__init__.py")},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.scalar_type": {"scalar_types": _Anything(), "ScalarType": _Anything},
        "vllm.utils.math_utils": {
            "largest_power_of_2_divisor": lambda n: n & -n,
            "round_up": lambda n, to: -(-n // to) * to,
        },
        "vllm.v1.worker.workspace": {"is_workspace_manager_initialized": _no},
        "vllm.utils.torch_utils": quantized,
        "vllm.platforms": {"current_platform": types.SimpleNamespace(**platform)},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": enum.IntEnum("KVQuantMode", modes, start=0)}
        | quantized,
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "get_fp8_min_max": lambda: (fp8.min, fp8.max),
            "FP8_DTYPE": torch.float8_e4m3fn,
        },
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "sglang.srt.utils": sglang,
        "sglang.srt.environ": {"envs": type("Envs", (), {"__getattr__": lambda self, name: environment})()},
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": _no},
        "sglang.srt.utils.patch_torch": {"register_fake_if_exists": lambda *args: lambda function: function},
        "sglang.srt.platforms": {"current_platform": triton_runs},
        "sglang.kernels.kernel_api_logging": {"debug_kernel_api": lambda function: function},
        "sglang.kernels.ops.quantization.fp8_utils": {"fp8_dtype_to_triton": lambda dtype: tl.float8e4nv},
        "sglang.kernels.ops.kvcache.set_mla_kv_buffer": {"can_use_set_mla_kv_buffer": _no},
    }


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds these files of a package in a folder, and stubs for its other modules.

    Args:
        root: the folder of the package.
        names: modules to execute.
        package: its top-level name.
        cuda: whether the stubs report a CUDA machine.
    """

    def __init__(self, root: Path, names: Sequence[str], package: str = "vllm", cuda: bool = True) -> None:
        self.root, self.names, self.package, self.cuda = root, names, package, cuda

    def find_spec(
        self, name: str, path: Any, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        if name in self.names:
            file = self.root.joinpath(*name.split(".")[1:]).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _stand_in(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__.update(_known(self.root, self.cuda).get(module.__name__, {}))


@contextmanager
def executed(root: Path, *names: str, of: str = "vllm") -> Iterator[None]:
    """Let ``import vllm...`` find these files, and stubs for all others, inside a ``with``.

    Args:
        root: the folder ``vllm``.
        names: modules to execute, e.g. ``vllm.v1.worker.utils``.
        of: the package, if it is another one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "size.py").write_text("from vllm.utils.math_utils import round_up")
    ...     with executed(Path(folder), "vllm.size"):
    ...         importlib.import_module("vllm.size").round_up(17, 16)
    32
    """
    before = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == of}
    for name in before:
        del sys.modules[name]
    finder = Finder(root, names, of)
    # Before the finders that would find an installed vLLM. A patch that is applied inside the ``with`` puts
    # its finder before this one, and that calls this one.
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] == of]:
            del sys.modules[name]
        sys.modules.update(before)


def load(root: Path, *names: str) -> list[types.ModuleType]:
    """Execute these files with stubs for the rest, and return their modules.

    Args:
        root: the folder ``vllm``.
        names: see :func:`executed`.

    Raises:
        UnavailableError: a file is absent, or needs something that the stubs do not have.
    """
    with executed(root, *names):
        modules = []
        for name in names:
            try:
                modules.append(importlib.import_module(name))
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
                raise UnavailableError(f"{name} does not load with stand-ins: {reason}") from error
    return modules


@lru_cache(maxsize=8)  # A class keeps its whole release in memory.
def _parameters(call: Callable[..., Any]) -> Mapping[str, Any]:
    # AsyncScheduler has the parameters of its base class.
    base = getattr(call, "__mro__", (call, call))[1] if call.__name__ == "AsyncScheduler" else call
    return inspect.signature(base).parameters


def fitting(call: Callable[..., Any], **keywords: Any) -> Any:
    """Call with the keywords that this release knows."""
    known = _parameters(call)
    return call(**{name: value for name, value in keywords.items() if name in known})


class Unset(types.SimpleNamespace):
    """A configuration in which every option that is not named is ``None``."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def package(version: str) -> Path:
    """The folder ``vllm`` of a release: installed, or unpacked by ``tests/vllm/environment.py``.

    Raises:
        MissingError: it is neither installed nor unpacked.
    """
    with suppress(PatchError):
        found, sources = installed()
        if found.partition("+")[0] == version:
            return sources.package
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "staleproof/vllm"
    folder = Path(os.environ.get("STALEPROOF_VLLM_CACHE", home)) / version / "vllm"
    if not folder.is_dir():
        where = "neither installed nor in the cache of tests/vllm"
        raise MissingError(f"the source of vLLM {version} is {where}")
    return folder
