"""Each probe on the lines of vLLM that it looks for, with the defect and with its cure.

``test_real_vllm.py`` asks the same of every release; some cures are in none yet.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from staleproof.vllm.patches import mla_padding
from staleproof.vllm.plugin import patches
from staleproof.vllm.sources import NotShippedError, Sources

SCHEDULER = "v1/core/sched/scheduler.py"
CACHE = "v1/core/kv_cache_manager.py"
MANAGER = "v1/core/single_type_kv_cache_manager.py"
WORKER = "v1/worker/utils.py"
RUNNER = "v1/worker/gpu_model_runner.py"
CPU_RUNNER = "v1/worker/cpu_model_runner.py"
BACKENDS = "v1/attention/backends/mla"
CUTLASS = f"{BACKENDS}/cutlass_mla.py"
SIMULATOR = "model_executor/layers/fused_moe/router/routing_simulator_router.py"
OPS = "_custom_ops.py"
EXPERTS = "model_executor/layers/fused_moe/utils.py"
MXFP4 = "model_executor/layers/quantization/utils/mxfp4_utils.py"
TOPK, HASH = "csrc/topk_softmax_kernels.cu", "csrc/topk_softplus_sqrt_kernels.cu"
BIASED, ROW_BIASED = "val = val + bias[expert];\n", "val = val + row_bias[expert];\n"
CLAMPED = "val = isnan(val) ? 0 : val;\n"
SELECTION = {OPS: "def topk_hash_softplus_sqrt(x): pass"}


def method(class_: str, name: str, *lines: str) -> str:
    body = "".join(f"        {line}\n" for line in lines or ("pass",))
    return f"class {class_}:\n    def {name}(self):\n{body}"


def recorded(condition: str) -> str:
    return method("SingleTypeKVCacheManager", "allocate_new_blocks", condition)


def simulator(draw: str, dtype: str) -> str:
    text = method("DistributionBasedRouting", "_sample_expert_ids", f"return {draw}")
    return text + f"    def route_tokens(self):\n        return {dtype}\n"


def allocated(how: str) -> str:
    return (
        "def create_fp4_scale_tensor(m, n, device, is_sf_swizzled_layout):\n    if is_sf_swizzled_layout:\n"
        f"        return torch.{how}((128, 4))\n    else:\n        return torch.empty((m, n))\n"
    )


TAKEN = "ids = self.kv_cache_manager.take_new_block_ids()"
ASKED = f"if self.needs_kv_cache_zeroing: {TAKEN}"
PINNED = "gpu.copy_(self._ids_pinned[:n_blocks], non_blocking=True)"
SKIPS = "type(spec) is not FullAttentionSpec"
PUBLISHES = {CACHE: method("KVCacheManager", "allocate_slots", "self.coordinator.cache_blocks(request)")}
PREEMPTS = {SCHEDULER: method("Scheduler", "_preempt_request")}
QUANTIZES = "def _fp8_quantize(A, A_scale):\n    {}\n"
SWIZZLE = "def _swizzle_mxfp4(quant_tensor, scale):\n    {}\n    return scale\n"
GDN = "v1/attention/backends/gdn_attn.py"
SPLIT = "from u import split_decodes_and_prefills\nx = split_decodes_and_prefills(\n    m, {}\n)\n"
BUILDERS = {
    f"v1/attention/backends/{name}_attn.py": SPLIT.format("treat_short_extends_as_decodes=False")
    for name in ("gdn", "linear", "mamba")
}
GATHERED, EXCHANGED = "v1/attention/ops/common.py", "v1/attention/ops/dcp_alltoall.py"
MERGE = "def _correct_attn_cp_out_kernel(outputs_ptr):\n    {}\n"
WEIGHS = "weight = tl.where(weight != weight, 0.0, weight)\n"
# Patch, whether it is needed, files.
CASES = [
    ("undrained_ids", 1, {SCHEDULER: method("Scheduler", "schedule", ASKED)}),
    ("undrained_ids", 0, {SCHEDULER: method("Scheduler", "schedule", TAKEN)}),
    ("staging_race", 1, {WORKER: method("KVBlockZeroer", "zero_block_ids", PINNED)}),
    ("staging_race", 0, {WORKER: method("KVBlockZeroer", "zero_block_ids", "gpu = torch.tensor(block_ids)")}),
    ("staging_race", 0, {WORKER: method("KVBlockZeroer", "zero_block_ids", PINNED.replace("_ids", "_own"))}),
    ("staging_race", 0, {WORKER: "x = 1\n"}),
    ("mla_recording", 1, {MANAGER: recorded("type(spec) is FullAttentionSpec")}),
    ("mla_recording", 0, {MANAGER: recorded("type(spec) in (FullAttentionSpec, MLAAttentionSpec)")}),
    ("mla_recording", 0, {MANAGER: recorded("True")}),
    ("mla_zeroing", 1, {WORKER: method("KVBlockZeroer", "init_meta", SKIPS)}),
    ("mla_zeroing", 1, {WORKER: method("KVBlockZeroer", "__init__", SKIPS)}),
    ("mla_zeroing", 0, {WORKER: method("KVBlockZeroer", "init_meta")}),
    ("mla_zeroing", 0, {WORKER: "x = 1\n"}),
    ("cpu_block_zeroing", 1, {CPU_RUNNER: method("CPUModelRunner", "_zero_block_ids")}),
    (
        "cpu_block_zeroing",
        0,
        {CPU_RUNNER: method("CPUModelRunner", "_zero_block_ids", "kv[block_id].zero_()")},
    ),
    ("cpu_block_zeroing", 0, {CPU_RUNNER: "class CPUModelRunner: pass\n"}),
    ("dummy_slots", 1, {RUNNER: method("GPUModelRunner", "_dummy_run")}),
    ("dummy_slots", 0, {RUNNER: method("GPUModelRunner", "_dummy_run", "slots.fill_(-1)")}),
    ("fp8_scale", 1, {EXPERTS: QUANTIZES.format("return ops.scaled_fp8_quant(A, A_scale)")}),
    ("fp8_scale", 0, {EXPERTS: QUANTIZES.format("return ops.scaled_fp8_quant(A, A_scale, is_padding=p)")}),
    ("fp8_scale", 0, {EXPERTS: QUANTIZES.format("return per_token(A)")}),
    ("unpublish", 1, PUBLISHES | PREEMPTS),
    ("unpublish", 0, PUBLISHES | {SCHEDULER: method("Scheduler", "_preempt_request", "evict_blocks()")}),
    ("unpublish", 0, PREEMPTS | {CACHE: method("KVCacheManager", "allocate_slots")}),
    ("decode_buffer", 1, {CUTLASS: "o = self._decode_out\n"}),
    ("decode_buffer", 0, {CUTLASS: "o = q.new_empty(1)\n"}),
    ("topk_nan", 1, {TOPK: BIASED}),
    ("topk_nan", 0, {TOPK: CLAMPED + BIASED}),
    ("topk_nan_bias", 1, {TOPK: CLAMPED + BIASED}),
    ("topk_nan_bias", 0, {TOPK: f"{CLAMPED}isnan(bias[expert]);\n{BIASED}"}),
    ("topk_nan_bias", 0, {TOPK: BIASED}),
    ("hash_topk_nan", 1, SELECTION | {HASH: ROW_BIASED}),
    ("hash_topk_nan", 1, SELECTION | {HASH: CLAMPED + ROW_BIASED}),
    ("hash_topk_nan", 1, SELECTION | {HASH: f"isfinite(row_bias[expert]);\n{ROW_BIASED}"}),
    ("hash_topk_nan", 0, SELECTION | {HASH: f"{CLAMPED}isnan(row_bias[expert]);\n{ROW_BIASED}"}),
    ("hash_topk_nan", 0, {OPS: "", HASH: ROW_BIASED}),
    ("routing_simulator", 1, {SIMULATOR: simulator("torch.randint(0, 8, (2,))", "torch.int32")}),
    ("routing_simulator", 1, {SIMULATOR: simulator("scores.topk(2)", "torch.long")}),
    ("routing_simulator", 0, {SIMULATOR: simulator("scores.topk(2)", "torch.int32")}),
    ("scale_padding", 1, {OPS: allocated("empty")}),
    ("scale_padding", 0, {OPS: allocated("zeros")}),
    ("scale_padding", 1, {OPS: "def scaled_fp4_quant(x):\n    output_scale = torch.empty(\n        2)\n"}),
    ("scale_padding", 0, {OPS: "x = 1"}),
    ("one_token_prompt", 1, BUILDERS | {GDN: SPLIT.format("decode_threshold=1")}),
    ("one_token_prompt", 0, BUILDERS),
    ("dcp_merge", 1, {GATHERED: MERGE.format("output = output * factor")}),
    ("dcp_merge", 0, {GATHERED: MERGE.format("output = tl.where(factor == 0.0, 0.0, output * factor)")}),
    ("dcp_merge", 1, {GATHERED: "", EXCHANGED: WEIGHS}),
    ("dcp_merge", 0, {GATHERED: "", EXCHANGED: f"{WEIGHS}partial = tl.where(weight == 0.0, 0.0, partial)\n"}),
    ("dcp_merge", 0, {GATHERED: ""}),
    ("mxfp4_scale_tail", 1, {MXFP4: SWIZZLE.format("pass")}),
    ("mxfp4_scale_tail", 0, {MXFP4: SWIZZLE.format("pad_k = -K % 4")}),
]


def written(folder: Path, files: dict[str, str]) -> Sources:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return Sources(folder, folder / "csrc")


@pytest.mark.parametrize("name", dict.fromkeys(name for name, *_ in CASES))
def test_a_probe_tells_the_defect_from_its_cure_and_names_the_line(tmp_path, name):
    reasons: dict[bool, set[str]] = {True: set(), False: set()}
    for number, (of, needed, files) in enumerate(CASES):
        if of == name:
            found = patches()[name].is_needed(written(tmp_path / str(number), files))
            assert found.needed == needed, files
            assert not needed or re.search(r":\d+", found.why), found.why
            reasons[found.needed].add(re.sub(r":\d+", "", found.why))
    assert reasons[True].isdisjoint(reasons[False])


def test_without_the_cuda_sources_a_probe_does_not_guess(tmp_path):
    written(tmp_path, SELECTION)
    with pytest.raises(NotShippedError):
        patches()["hash_topk_nan"].is_needed(Sources(tmp_path))


@pytest.mark.parametrize(("version", "needed"), [("0.6.9", True), ("0.6.10", False), (None, False)])
def test_the_probe_of_flashinfer_reads_its_version(tmp_path, version, needed):
    found = patches()["duplicate_experts"].is_needed(Sources(tmp_path, flashinfer=version))
    assert (found.needed, " reads " in found.why) == (needed, needed)


STAGE2, SHARED = "v1/attention/ops/triton_decode_attention.py", "v1/attention/ops/triton_turboquant_decode.py"
DIVIDES = "def _fwd_kernel_stage2(acc, e_sum):\n    return acc / e_sum\n"
CLEARS = "o[seq_lens == 0] = 0"
MLA = {
    STAGE2: DIVIDES,
    SHARED: "def triton_turboquant_decode_attention(query):\n    _fwd_kernel_stage2[(1,)](query)\n",
    CUTLASS: method("CutlassMLAImpl", "_sm100_cutlass_mla_decode"),
    f"{BACKENDS}/flashinfer_mla.py": method("FlashInferMLAImpl", "forward_mqa"),
}
CURED = {
    STAGE2: DIVIDES.replace("    return", "    if e_sum == 0: return 0\n    return"),
    CUTLASS: method("CutlassMLAImpl", "_sm100_cutlass_mla_decode", CLEARS),
    f"{BACKENDS}/flashinfer_mla.py": method("FlashInferMLAImpl", "forward_mqa", "o.masked_fill(empty, 0)"),
}


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, [1, 1, 1, 1]),
        # The guard of a later release, in the kernel that Triton MLA and TurboQuant share.
        ({STAGE2: CURED[STAGE2]}, [0, 1, 1, 0]),
        ({STAGE2: CURED[STAGE2].replace("==", ">")}, [0, 1, 1, 0]),
        *(({CUTLASS: CURED[CUTLASS].replace("==", sign)}, [1, 0, 1, 1]) for sign in ("==", "!=")),
        (CURED, [0, 0, 0, 0]),
        ({SHARED: MLA[SHARED].replace("_fwd_kernel_stage2", "_own")}, [1, 1, 1, 0]),
        ({SHARED: None}, [1, 1, 1, 0]),
    ],
)
def test_each_backend_has_a_probe(tmp_path, changes, needed):
    sources = written(tmp_path, {path: text for path, text in (MLA | changes).items() if text is not None})
    assert [target.probe(sources).needed for target in mla_padding.TARGETS] == needed
    found = mla_padding._probe(sources)
    assert found.needed == any(needed)
    # What is cured is no evidence, unless all is.
    named = [file in found.why for file in ("triton_decode", "cutlass_mla", "flashinfer_mla")]
    assert named == ([bool(one) for one in needed[:3]] if any(needed) else [True] * 3)
