"""Single source files of a vLLM, executed under their own names, with stand-ins for the rest.

Importing the package starts its platform detection, and needs its compiled libraries and some
fifty dependencies. Here the named files run as they are, and every other ``vllm`` module is an
empty one whose names are classes that accept anything: enough to call what the files define.
"""

from __future__ import annotations

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


class _Anything:
    """Stands for a class or function of a module that is not there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> type:
        return cls


class _StandIn(types.ModuleType):
    """A module in which every public name is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (_Anything,), {})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root, self.names = root, names

    def find_spec(
        self, name: str, path: Any, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        if name in self.names:
            file = self.root.parent / (name.replace(".", "/") + ".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

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
    """Make ``import vllm...`` find these files and stand-ins for the length of a ``with``.

    Args:
        root: the folder ``vllm``.
        names: modules to execute, e.g. ``vllm.v1.worker.utils``.
    """
    before = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "vllm"}
    for name in before:
        del sys.modules[name]
    finder = _Finder(root, names)
    # Behind a patch's finder, which asks the others; in front of an installed vLLM's.
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(before)
