"""Autotuned kernels keep their first configuration, and the kernels that torch.compile made are told."""

import gc
import types

import pytest
from tests.vllm.made_up import made_up

from staleproof import device
from staleproof.engine import tuning
from staleproof.engine.spies import Rows


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


@pytest.mark.parametrize("package", ["model_executor.layers.fla", "third_party.flash_linear_attention"])
def test_kernels_of_linear_attention_time_none_wherever_a_release_has_them(monkeypatch, tmp_path, package):
    kernels = {"chunk": "a, b = 1, 2", "needs": "import no_such_package", "later": "c = 3"}
    seen = []
    monkeypatch.setattr(tuning, "keep_first", lambda kernel: isinstance(kernel, int) and seen.append(kernel))
    with made_up(tmp_path) as write:
        write({f"{package}.ops.{name}": text for name, text in kernels.items()})
        write(dict.fromkeys(("model_executor.layers.other", "third_party.other"), ""))
        tuning.first_configs(Rows())
    assert sorted(seen) == [1, 2, 3]


def test_compiled_kernels_are_told_by_name_and_configuration():
    heuristics = pytest.importorskip("torch._inductor.runtime.triton_heuristics")
    made = []
    for name, configs in (
        ("triton_red_fused_norm_0", ["XBLOCK: 1, num_warps: 4", "XBLOCK: 2"]),
        ("triton_red_fused_norm_0", ["XBLOCK: 1, num_warps: 4"]),
        (None, ["XBLOCK: 8"]),
        # It was never launched.
        ("triton_idle", []),
    ):
        kernel = heuristics.CachingAutotuner.__new__(heuristics.CachingAutotuner)
        kernel.inductor_meta = {"kernel_name": name} if name else {}
        kernel.fn = types.SimpleNamespace(__name__="triton_of_a_user")
        kernel.launchers = [types.SimpleNamespace(config=config) for config in configs]
        made.append(kernel)
    # vLLM takes what the start made out of the collector's list.
    gc.freeze()
    told = tuning.compiled_kernels(None)
    # Beside those that other tests of this process have compiled.
    ours = {name: count for name, count in told.items() if "norm_0: XBLOCK" in name or "user" in name}
    assert ours == {"triton_red_fused_norm_0: XBLOCK: 1, num_warps: 4": 2, "triton_of_a_user: XBLOCK: 8": 1}
    assert not any("idle" in name for name in told)
