"""vLLM's own profile run, and the lines of it that are named."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from staleproof.cases.case import MissingError
from staleproof.incidents.decode_buffer import released
from staleproof.incidents.decode_buffer.released import Released, profiled
from staleproof.kernels.vllm_sources import package


def folder(version: str) -> Path:
    try:
        return package(version)
    except MissingError as error:
        pytest.skip(str(error))


@cache
def said(version: str, backend: str, **change: Any) -> dict[str, Any]:
    return profiled(Released(version, backend, tuple(change.items())), folder(version))


@pytest.mark.parametrize("backend", released.BACKENDS)
def test_each_of_the_five_steps_is_taken(backend: str) -> None:
    steps = said("0.18.1", backend)
    assert (steps["is_profile"], steps["force_eager"], steps["graph_mode"]) == (True, True, "NONE")
    assert (steps["metadata_built"], steps["decode_calls"], steps["kept_by_profile"]) == (False, 0, 0)
    # One layer's buffer: 8 rows of 128 heads of 512 bf16 numbers, made once by two captures.
    assert steps["kept_by_capture"] == 8 * 128 * 512 * 2
    assert steps["capture_calls"] == 2
    assert steps["out_given"]


def test_the_lse_is_allocated_in_each_call_and_the_workspace_is_not_zeroed() -> None:
    for version in ("0.18.1", "0.19.1"):
        steps = said(version, "CUTLASS")
        assert not steps["lse_kept"]
        assert not steps["workspace_zeroed"]


def test_the_revert_keeps_nothing_and_gives_flashinfer_no_output() -> None:
    assert said("0.20.0", "CUTLASS")["kept_by_capture"] == 0
    flashinfer = said("0.20.0", "FlashInfer")
    assert flashinfer["kept_by_capture"] == 0
    assert not flashinfer["out_given"]


def test_metadata_makes_the_profile_decode() -> None:
    steps = said("0.18.1", "CUTLASS", force_attention=True)
    assert (steps["graph_mode"], steps["decode_calls"]) == ("NONE", 1)


def test_being_a_profile_and_being_too_large_each_forbid_a_graph() -> None:
    fits = {"num_tokens": released.ROWS, "uniform_decode": True}
    alone = [said("0.18.1", "CUTLASS", is_profile=False), said("0.18.1", "CUTLASS", **fits)]
    names = ("is_profile", "force_eager", "graph_mode")
    assert [[one[name] for name in names] for one in alone] == [[False, False, "NONE"], [True, True, "NONE"]]
    assert said("0.18.1", "CUTLASS", is_profile=False, **fits)["graph_mode"] == "FULL"


def test_nothing_stays_behind() -> None:
    before = {name: sys.modules.get(name) for name in ("vllm", "flashinfer", "flashinfer.decode")}
    profiled(Released("0.18.1", "FlashInfer"), folder("0.18.1"))
    assert {name: sys.modules.get(name) for name in before} == before
    assert torch.empty(2, device="meta").is_meta


def test_the_lines_that_are_named_are_those_of_the_release() -> None:
    root = folder("0.18.1")
    assert released.__doc__ is not None
    wanted = {
        5516: "= self._dummy_run(",
        5053: "force_eager=is_profile",
        3362: "{CUDAGraphMode.NONE} if force_eager",
        5111: "if force_attention or cudagraph_runtime_mode == CUDAGraphMode.FULL",
    }
    runner = (root / "v1/worker/gpu_model_runner.py").read_text().splitlines()
    assert {int(n) for n in re.findall(r"line (\d+)", released.__doc__)} == wanted.keys()
    assert all(text in runner[number - 1] for number, text in wanted.items())
    for file, number in re.findall(r"``(\S+\.py):(\d+)``", released.__doc__):
        line = (root / file).read_text().splitlines()[int(number) - 1]
        assert "attn_metadata is None" in line or "new_zeros" in line
