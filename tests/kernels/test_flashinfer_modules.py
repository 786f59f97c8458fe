"""The compiled modules that the audit names are those that FlashInfer's own code asks for.

The installed release is asked, and the releases in the audit's cache.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import warm

from staleproof.kernels import packages
from staleproof.kernels.packages import Release
from staleproof.kernels.subject import Subject

RELEASES = packages.releases(Subject("any", "rows", print, package="flashinfer-python"))
_OF = "dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_"
_SIZES = f"{_OF}qk_64_head_dim_vo_64_posenc_0_use_swa_False_use_logits_cap_False"
MLA = f"batch_mla_attention_{_OF}ckv_512_head_dim_kpe_64_profiler_False"
PREFILL = f"batch_prefill_with_kv_cache_{_SIZES}_f16qk_False"
# Subject -> its module. A module of attention is one of its dtypes and sizes, those of the adapter.
ASKED = {
    "MLA fa2": MLA,
    "MLA fa3": f"{MLA}_sm90",
    "paged decode": f"batch_decode_with_kv_cache_{_SIZES}",
    "paged prefill fa2": PREFILL,
    "paged prefill fa3": f"{PREFILL}_sm90",
    "cascade.merge_state": "cascade",
    "softmax, then top_k": "topk",
    "sampling.softmax": "sampling",
    "sampling.top_k_renorm_probs": "sampling",
    "sampling.top_p_renorm_probs": "sampling",
    "norm.rmsnorm": "norm",
    "norm.gemma_rmsnorm": "norm",
    "norm.fused_add_rmsnorm": "norm",
    "norm.rmsnorm_quant, static scale": "norm",
    "activation.silu_and_mul": "silu_and_mul",
    "fused_moe.cutlass_fused_moe": "fused_moe_90",
    "fused_moe.cutlass_fused_moe, two ranks with all-to-all": "fused_moe_90",
}
# The kernel of paged fa2 that reads K and V of equal strides has a module of its own since 0.7.
SINCE_0_7 = {
    "MLA fa2": f"{MLA}_planabi2",
    "MLA fa3": f"{MLA}_planabi2_sm90",
    "paged prefill fa2": f"{PREFILL}_kv_stride_equal",
}


def _asked(release: Release) -> dict[str, str]:
    script = Path(__file__).with_name("flashinfer_modules.py")
    folder = [str(release.folder)] if release.folder else []
    done = warm.run(str(script), *folder, env=os.environ, timeout=300, vllm=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not RELEASES, reason="FlashInfer is not here")
@pytest.mark.parametrize("release", RELEASES, ids=[release.version for release in RELEASES])
def test_a_module_that_is_not_compiled_is_named_as_flashinfer_names_it(release):
    found = _asked(release)
    wanted = ASKED | (SINCE_0_7 if int(release.version.split(".")[1]) >= 7 else {})
    said = {backend: found.pop(f"kv_reuse {backend}") for backend in ("fa2", "fa3")}
    after = "is not here; nvcc compiles it at a call without FLASHINFER_DISABLE_JIT"
    assert found == {name: f"its compiled module {module} {after}" for name, module in wanted.items()}
    for backend, why in said.items():
        module = wanted[f"paged prefill {backend}"]
        assert why == f"FlashInfer's module {module} is not compiled, and may not or cannot be here"
