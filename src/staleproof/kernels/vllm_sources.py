"""Executes single source files of a vLLM under their own names, with stand-ins for the rest.

Importing the whole package starts its platform detection, and needs its compiled libraries and some
fifty dependencies. Here only the named files run. Every other ``vllm`` module is a stand-in: each
public name in it is a class that takes any arguments and has any enumeration member. That is enough
to load the files and to call what they define.
"""

from __future__ import annotations

import abc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from staleproof.vllm.sources import file_of


class UnavailableError(RuntimeError):
    """Files of vLLM cannot be executed here; the message is one line that says why."""


class _AnyMember(abc.ABCMeta):
    """Makes every public attribute of a stand-in class a member of it, as in an enumeration."""

    def __getattr__(cls, name: str) -> Any:
        # A class that vLLM derives from a stand-in has only what vLLM gave it.
        if name.startswith("_") or _Anything not in cls.__bases__:
            raise AttributeError(f"{cls.__name__} has no {name}")
        member = cls()
        setattr(cls, name, member)
        return member


class _Anything(metaclass=_AnyMember):
    """The base of all stand-in classes; takes any arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> type:
        return cls


def _stand_in(name: str) -> types.ModuleType:
    """A module that has every public name, each a stand-in class.

    No class of its own: Dynamo of torch 2.11 traces an import only if it gives a plain module.
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


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root, self.names = root, names

    def find_spec(
        self, name: str, path: Any, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        if name in self.names:
            return importlib.util.spec_from_file_location(name, self.root / file_of(name))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _stand_in(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        import torch
        import triton
        import triton.language as tl

        known: dict[str, dict[str, Any]] = {
            "vllm": {"__file__": str(self.root / "__init__.py")},
            "vllm.logger": {"init_logger": logging.getLogger},
            "vllm.triton_utils": {"tl": tl, "triton": triton},
            "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
            "vllm.scalar_type": {"scalar_types": _Anything(), "ScalarType": _Anything},
            "vllm.utils.math_utils": {
                "largest_power_of_2_divisor": lambda n: n & -n,
                "round_up": lambda n, to: -(-n // to) * to,
            },
            "vllm.v1.worker.workspace": {"is_workspace_manager_initialized": lambda: False},
            "vllm.utils.torch_utils": {"is_quantized_kv_cache": lambda name: name != "auto"},
            "vllm.platforms": {
                "current_platform": types.SimpleNamespace(
                    is_rocm=lambda: False,
                    is_cuda=lambda: True,
                    is_xpu=lambda: False,
                    is_cpu=lambda: False,
                    is_cuda_alike=lambda: True,
                    import_kernels=lambda: None,
                    fp8_dtype=lambda: torch.float8_e4m3fn,
                )
            },
        }
        module.__dict__.update(known.get(module.__name__, {}))


@contextmanager
def executed(root: Path, *names: str) -> Iterator[None]:
    """Let ``import vllm...`` find these files, and stand-ins for all others, inside a ``with``.

    Args:
        root: the folder ``vllm``.
        names: modules to execute, e.g. ``vllm.v1.worker.utils``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "size.py").write_text("from vllm.utils.math_utils import round_up")
    ...     with executed(Path(folder), "vllm.size"):
    ...         importlib.import_module("vllm.size").round_up(17, 16)
    32
    """
    before = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "vllm"}
    for name in before:
        del sys.modules[name]
    finder = _Finder(root, names)
    # In front of the finders that would find an installed vLLM. The finder of a patch that is
    # applied inside the ``with`` goes in front of this one, and asks it.
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(before)


def load(root: Path, *names: str) -> list[types.ModuleType]:
    """Execute these files with stand-ins, and return their modules.

    Args:
        root: the folder ``vllm``.
        names: see :func:`executed`.

    Raises:
        UnavailableError: a file is absent, or needs something that the stand-ins do not have.
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
