"""The benchmark of the patches: a row named "patched" is a patched one."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from staleproof.harness import measure
from staleproof.harness.vllm_files import executed

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))

import environment

TRACED = ("topk_nan_bias", "topk_softmax")


@pytest.fixture(name="bench", scope="module")
def bench_fixture():
    names = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/patches.py"))
    root = environment.cache() / names["VERSION"] / "vllm"
    if not root.exists():
        pytest.skip(f"vLLM {names['VERSION']} was not fetched")
    return SimpleNamespace(**names, root=root)


def rows(bench, files: tuple[str, ...], monkeypatch) -> list[bool]:
    """Whether vLLM's function is wrapped while each of the two rows is timed."""
    patch, name = TRACED
    wrapped = []

    def timed(calls):
        wrapped.append(hasattr(getattr(importlib.import_module(bench.OPS), name), "__wrapped__"))
        return measure.Times(1.0, 1.0, 1.0)

    monkeypatch.setattr(measure, "graph_times", timed)
    with executed(bench.root, *files):
        assert len([*bench._pair(patch, "mode", lambda: None, 0)]) == 2
    return wrapped


def test_a_traced_patch_is_in_place_while_it_is_timed(bench, monkeypatch):
    assert rows(bench, bench.FILES, monkeypatch) == [False, True]


def test_a_patch_that_steps_back_gets_no_row(bench, monkeypatch):
    without = tuple(name for name in bench.FILES if name != "vllm.envs")
    with pytest.raises(measure.WrongResult, match=r"topk_nan_bias is not in place.*compile_factors"):
        rows(bench, without, monkeypatch)
