"""Autotuned kernels keep their first configuration, and the kernels that torch.compile made are told."""

from __future__ import annotations

import types

import pytest

from staleproof import device
from staleproof.engine import tuning


def test_an_autotuned_kernel_keeps_its_first_configuration():
    device.load_triton()
    import triton

    def kernel(x, N):
        return None

    configs = [triton.Config({"N": n}) for n in (16, 32, 64)]
    tuned = triton.autotune(configs=configs, key=["x"])(triton.jit(kernel))
    # As vLLM's: a heuristic around it.
    outer = triton.heuristics({"N": lambda args: 1})(tuned)
    assert tuning.keep_first(outer) == 3
    assert tuned.configs == configs[:1]
    assert tuning.keep_first(outer) == 1
    assert tuning.keep_first(triton.jit(kernel)) == 0


def test_compiled_kernels_are_told_by_name_and_configuration():
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    kernel = heuristics.CachingAutotuner.__new__(heuristics.CachingAutotuner)
    kernel.inductor_meta = {"kernel_name": "triton_red_fused_norm_0"}
    kernel.launchers = [types.SimpleNamespace(config="XBLOCK: 1, num_warps: 4")]
    idle = heuristics.CachingAutotuner.__new__(heuristics.CachingAutotuner)
    idle.launchers = []
    # Beside those that other tests of this process have compiled.
    assert tuning.compiled_kernels(None)["triton_red_fused_norm_0: XBLOCK: 1, num_warps: 4"] == 1
