"""Each kernel of ours compiles for a B200 and fits there. No GPU is needed, and no value is computed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from staleproof import device

PROGRAM = Path(__file__).with_name("compiled.py")
KERNELS = {
    "amax_kernel",
    "bad_logits_kernel",
    "clear_empty_rows_kernel",
    "count_routing_kernel",
    "count_rows_kernel",
    "distinct_kernel",
    "merge_splits_kernel",
    "mla_decode_kernel",
    "quantize_kernel",
    "quantize_nvfp4_kernel",
    "topk_kernel",
    "whole_kernel",
    "zero_kernel",
    "zero_listed_kernel",
}


@pytest.mark.slow
@pytest.mark.skipif(
    not device.has_triton() or importlib.util.find_spec("triton.backends.nvidia") is None,
    reason="this Triton brings no compiler for NVIDIA GPUs",
)
def test_each_kernel_compiles_for_sm100_fits_and_spills_nothing(tmp_path):
    env = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DUMP_PTXAS_LOG": "1",
    }
    command = [sys.executable, str(PROGRAM), "100"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {one["kernel"] for one in found} == KERNELS
    assert [one for one in found if one["shared"] > 227 * 1024] == []
    assert [one for one in found if one["spilled"]] == []
