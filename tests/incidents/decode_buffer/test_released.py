"""vLLM's own profile run, and the lines of it that are named."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import environment
import torch

from staleproof.incidents.decode_buffer import released
from staleproof.incidents.decode_buffer.released import Released, profiled


def folder(version: str) -> Path:
    return environment.sources(version) / "vllm"


def test_profile_of_a_release_leaves_no_module_behind():
    before = {name: sys.modules.get(name) for name in ("vllm", "flashinfer", "flashinfer.decode")}
    profiled(Released("0.18.1", "FlashInfer"), folder("0.18.1"))
    assert {name: sys.modules.get(name) for name in before} == before
    assert torch.empty(2, device="meta").is_meta


def test_lines_in_the_docstring_are_those_of_the_release():
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
