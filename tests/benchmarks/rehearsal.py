"""Runs a benchmark without a GPU: on the host, kernels interpreted, nothing timed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Space
from typing import Any

import torch

from staleproof import device
from staleproof.cases import measure

FOLDER = Path(__file__).parents[2] / "benchmarks"
L2 = 4096


def times(calls: Any, **options: Any) -> measure.Times:
    """Run the first call: interpreted kernels are slow."""
    calls[0]()
    return measure.Times(p50=2.0, p20=1.0, p80=3.0)


def host_times(calls: Any, **options: Any) -> dict[str, measure.Times]:
    """Run each call once."""
    return {name: times([call]) for name, call in calls.items()}


def load(name: str, monkeypatch: Any, **sizes: Any) -> ModuleType:
    """The benchmark as a module, with these names replaced by smaller ones."""
    module = ModuleType(f"rehearsed_{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    source = (FOLDER / f"{name}.py").read_text().replace('"cuda"', '"cpu"')
    exec(compile(source, f"{name}.py", "exec"), vars(module))
    for size, value in sizes.items():
        assert hasattr(module, size), size
        setattr(module, size, value)
    monkeypatch.setenv("STALEPROOF_MLA_CELLS", "0")
    for library in ("MOE", "C", "OLD_MOE"):
        monkeypatch.delenv(f"STALEPROOF_VLLM_{library}_SO", raising=False)
    nothing = Space(multi_processor_count=132)
    for place, replaced in {
        measure: {
            "require_gpu": lambda: None,
            "graph_times": times,
            "host_times": host_times,
            "l2_bytes": lambda: L2,
            "memset_async": torch.Tensor.zero_,
        },
        torch.cuda: {"synchronize": lambda: None, "get_device_properties": lambda index: nothing},
    }.items():
        for attribute, value in replaced.items():
            monkeypatch.setattr(place, attribute, value)
    return module


def impossible() -> bool:
    """Whether this process does not interpret kernels."""
    return not device.interpreting()
