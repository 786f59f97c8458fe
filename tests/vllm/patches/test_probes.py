"""Each probe on the lines of vLLM that it looks for, with the defect and without."""

from __future__ import annotations

import pytest

from staleproof.vllm.plugin import patches
from staleproof.vllm.sources import Sources

SCHEDULER = "v1/core/sched/scheduler.py"
MANAGER = "v1/core/single_type_kv_cache_manager.py"
WORKER = "v1/worker/utils.py"
RUNNER = "v1/worker/gpu_model_runner.py"
CUTLASS = "v1/attention/backends/mla/cutlass_mla.py"
SIMULATOR = "model_executor/layers/fused_moe/router/routing_simulator_router.py"
TOPK = "csrc/topk_softmax_kernels.cu"
BIASED = "val = val + bias[expert];\n"


def method(class_: str, name: str, *lines: str) -> str:
    body = "".join(f"        {line}\n" for line in lines or ("pass",))
    return f"class {class_}:\n    def {name}(self):\n{body}"


def simulator(draw: str, dtype: str) -> str:
    text = method("DistributionBasedRouting", "_sample_expert_ids", f"return {draw}")
    return text + f"    def route_tokens(self):\n        return {dtype}\n"


TAKEN = "ids = self.kv_cache_manager.take_new_block_ids()"
PINNED = "gpu.copy_(self._ids_pinned[:n_blocks], non_blocking=True)"
CASES = [
    (
        "undrained_ids",
        SCHEDULER,
        True,
        method("Scheduler", "schedule", f"if self.needs_kv_cache_zeroing: {TAKEN}"),
    ),
    ("undrained_ids", SCHEDULER, False, method("Scheduler", "schedule", TAKEN)),
    ("staging_race", WORKER, True, method("KVBlockZeroer", "zero_block_ids", PINNED)),
    (
        "staging_race",
        WORKER,
        False,
        method("KVBlockZeroer", "zero_block_ids", "gpu = torch.tensor(block_ids)"),
    ),
    ("staging_race", WORKER, False, "x = 1\n"),
    ("mla_recording", MANAGER, True, "type(spec) is FullAttentionSpec"),
    ("mla_recording", MANAGER, False, "type(spec) in (FullAttentionSpec, MLAAttentionSpec)"),
    (
        "mla_zeroing",
        WORKER,
        True,
        method("KVBlockZeroer", "init_meta", "type(spec) is not FullAttentionSpec"),
    ),
    ("mla_zeroing", WORKER, True, method("KVBlockZeroer", "__init__", "type(spec) is not FullAttentionSpec")),
    ("mla_zeroing", WORKER, False, method("KVBlockZeroer", "init_meta")),
    ("mla_zeroing", WORKER, False, "x = 1\n"),
    ("dummy_slots", RUNNER, True, method("GPUModelRunner", "_dummy_run")),
    ("dummy_slots", RUNNER, False, method("GPUModelRunner", "_dummy_run", "slots.fill_(-1)")),
    ("decode_buffer", CUTLASS, True, "o = self._decode_out\n"),
    ("decode_buffer", CUTLASS, False, "o = q.new_empty(1)\n"),
    ("topk_nan", TOPK, True, BIASED),
    ("topk_nan", TOPK, False, f"val = isnan(val) ? 0 : val;\n{BIASED}"),
    ("topk_nan_bias", TOPK, True, f"val = isnan(val) ? 0 : val;\n{BIASED}"),
    ("topk_nan_bias", TOPK, False, f"val = isnan(val) ? 0 : val;\nisnan(bias[expert]);\n{BIASED}"),
    ("topk_nan_bias", TOPK, False, BIASED),
    ("routing_simulator", SIMULATOR, True, simulator("torch.randint(0, 8, (2,))", "torch.int32")),
    ("routing_simulator", SIMULATOR, True, simulator("scores.topk(2)", "torch.long")),
    ("routing_simulator", SIMULATOR, False, simulator("scores.topk(2)", "torch.int32")),
]


@pytest.mark.parametrize(("name", "path", "needed", "text"), CASES)
def test_a_probe_tells_the_defect_from_its_cure(tmp_path, name, path, needed, text):
    if path == MANAGER:
        text = method("SingleTypeKVCacheManager", "allocate_new_blocks", text)
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert patches()[name].is_needed(Sources(tmp_path, tmp_path / "csrc")).needed is needed


@pytest.mark.parametrize(("version", "needed"), [("0.6.9", True), ("0.6.10", False), (None, False)])
def test_the_probe_of_flashinfer_reads_its_version(tmp_path, version, needed):
    found = patches()["duplicate_experts"].is_needed(Sources(tmp_path, flashinfer=version))
    assert found.needed is needed
