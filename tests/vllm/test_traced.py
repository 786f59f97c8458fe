"""Patched functions inside a compiled caller: one graph, vLLM's own answer if a hook fails.

vLLM compiles its models with ``fullgraph=True``: a patch that Dynamo cannot trace would stop it.
The functions of vLLM are stubs here that model their faults; real_routing.py traces the real ones.
"""

import logging
from types import SimpleNamespace as Space

import pytest
import torch
from made_up import imported, planted, planted_at_the_end

from staleproof.vllm import hooks, patch, standing
from staleproof.vllm.hooks import Target
from staleproof.vllm.plugin import patches
from staleproof.vllm.standing import registry

OPS = """
import torch


def _select(scores, bias, k):
    # No comparison with NaN is true, so that the first expert is chosen again and again.
    choice = scores if bias is None else scores + bias
    ids = torch.where(choice.isnan().any(-1, keepdim=True), 0, choice.topk(k).indices)
    return scores.gather(1, ids), ids


def grouped_topk(
    scores, num_expert_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func=0
):
    return _select(scores.sigmoid() if scoring_func else scores, bias, topk)


def create_fp4_scale_tensor(m, n, device, is_sf_swizzled_layout):
    return torch.full((128, 4), 0x7F7F7F7F, dtype=torch.int32, device=device)
"""
IN_PLACE = """
def {name}(
    topk_weights, {ids}, token_expert_indices, gating_output, {rest}
):
    weights, ids = _select({scores}, e_score_correction_bias, {ids}.shape[1])
    topk_weights.copy_(weights)
    {ids}.copy_(ids)
"""
BIASED = "renormalize, e_score_correction_bias=None"
HASHED = (
    "renormalize=False, routed_scaling_factor=1.0, e_score_correction_bias=None, input_tokens=None, "
    "hash_indices_table=None"
)
for name, ids, rest, scores in (
    ("topk_softmax", "topk_ids", BIASED, "gating_output.softmax(-1)"),
    ("topk_sigmoid", "topk_ids", BIASED, "gating_output.sigmoid()"),
    ("topk_hash_softplus_sqrt", "topk_indices", HASHED, "torch.nn.functional.softplus(gating_output).sqrt()"),
):
    OPS += IN_PLACE.format(name=name, ids=ids, rest=rest, scores=scores)
MLA = """
import torch


class {name}:
    kv_lora_rank = 16
    kv_cache_dtype = "auto"

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer):
        if getattr(self, "_decode_out", None) is None:
            self._decode_out = q.new_zeros(*q.shape[:2], self.kv_lora_rank)
        # Rows of empty requests are not written.
        empty = attn_metadata.decode.seq_lens.logical_not()[:, None, None]
        return torch.where(empty, torch.nan, torch.ones_like(self._decode_out)), None

    def _sm100_cutlass_mla_decode(self):
        pass
"""
MOE = """
class FlashInferExperts:
    def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids):
        return topk_weights * 1, topk_ids * 1
"""
SIMULATOR = """
import torch


class DistributionBasedRouting:
    distribution = "uniform"

    def _sample_expert_ids(self, num_tokens, num_experts, top_k, device, indices_type):
        return torch.zeros(num_tokens, top_k, dtype=indices_type, device=device)

    def route_tokens(self, hidden_states, router_logits, top_k, indices_type=None):
        experts, device = router_logits.shape[1], hidden_states.device
        return self._sample_expert_ids(len(hidden_states), experts, top_k, device, indices_type or torch.long)
"""
FILES = {
    "v1.attention.ops.triton_decode_attention": "def _fwd_kernel_stage2(acc, e_sum): return acc / e_sum",
    "_custom_ops": OPS,
    "v1.attention.backends.mla.cutlass_mla": MLA.format(name="CutlassMLAImpl"),
    "v1.attention.backends.mla.flashinfer_mla": MLA.format(name="FlashInferMLAImpl"),
    "model_executor.layers.fused_moe.flashinfer_cutlass_moe": MOE,
    "model_executor.layers.fused_moe.router.routing_simulator_router": SIMULATOR,
    "simple": "def double(x):\n    return 2 * x\n",
}
# Functions of vLLM's scheduler, worker and loader: Python outside of any compiled model.
HOST = {name for name, patch in patches().items() if patch.on_host}


@pytest.fixture(name="vllm")
def vllm_fixture(made_up):
    """Imports a module of a made-up vLLM by its name below ``vllm``."""
    made_up(FILES)
    torch._dynamo.reset()
    return imported


def _compiled(call):
    return torch.compile(call, fullgraph=True, backend="aot_eager")


def _select(ops, name, logits, bias):
    if name == "grouped_topk":
        return ops.grouped_topk(logits, 1, 1, 4, True, 1.0, bias, 1)[1]
    ids = torch.empty(len(logits), 4, dtype=torch.int32)
    scaling = [1.0] if name == "topk_hash_softplus_sqrt" else []
    getattr(ops, name)(torch.empty(len(logits), 4), ids, torch.empty_like(ids), logits, False, *scaling, bias)
    return ids


def _repeats(ids):
    return sum(len({*row}) < len(row) for row in ids.tolist())


ROUTING = [
    (patch, release, in_logits, name)
    for patch, release, in_logits in (("topk_nan", "0.18.1", True), ("topk_nan_bias", "0.20.2", False))
    for name in ("topk_softmax", "topk_sigmoid", "grouped_topk")
]
ROUTING += [
    ("hash_topk_nan", release, in_logits, "topk_hash_softplus_sqrt")
    for release, in_logits in (("0.22.1", True), ("0.22.1", False), ("0.28.0", False))
]


@pytest.mark.parametrize(("patch", "release", "in_logits", "name"), ROUTING)
def test_routing(vllm, patch, release, in_logits, name, tmp_path):
    if release == "0.28.0":
        file = tmp_path / "vllm/_custom_ops.py"
        file.write_text(OPS.replace(HASHED, f"{HASHED}, is_padding=None"))
    ops = vllm("_custom_ops")
    logits, bias = torch.randn(6, 32), torch.zeros(32)
    (logits[3] if in_logits else bias)[0] = torch.nan

    def caller(x, b):
        return _select(ops, name, x * 1, b)

    assert _repeats(caller(logits, bias)) > 0
    with patches()[patch].applied(release):
        assert _repeats(_compiled(caller)(logits, bias)) == 0


def test_scale_padding(vllm):
    ops = vllm("_custom_ops")
    with patches()["scale_padding"].applied("0.18.1"):
        scales = _compiled(lambda x: ops.create_fp4_scale_tensor(len(x), 64, x.device, True) + 0)(
            torch.ones(5)
        )
    assert not scales.count_nonzero()
    assert scales.shape == (128, 1)


@pytest.mark.parametrize(
    ("patch", "name"),
    [("mla_padding", "cutlass"), ("mla_padding", "flashinfer"), ("decode_buffer", "cutlass")],
)
def test_mla(vllm, device, patch, name):
    module = vllm(f"v1.attention.backends.mla.{name}_mla")
    impl = next(cls for cls in vars(module).values() if isinstance(cls, type))()
    seq_lens = torch.tensor([3, 0, 5], dtype=torch.int32, device=device)
    metadata = Space(decode=Space(seq_lens=seq_lens), num_decodes=3)
    with patches()[patch].applied("0.18.1"):
        traced = _compiled(lambda q: impl.forward_mqa(q * 1, None, metadata, None)[0])
        out = traced(torch.ones(3, 128, 24, device=device))
    assert out[::2].eq(1).all()
    assert out[1].isnan().any() == (patch != "mla_padding")
    assert (impl._decode_out is None) == (patch == "decode_buffer")


def test_duplicate_experts(vllm, device):
    experts = vllm("model_executor.layers.fused_moe.flashinfer_cutlass_moe").FlashInferExperts()
    weights = torch.tensor([[0.4, 0.3, 0.2, 0.1]], device=device)
    ids, x = torch.tensor([[3, 1, 3, 2]], dtype=torch.int32, device=device), torch.zeros(1, 2, device=device)
    with patches()["duplicate_experts"].applied("0.18.1"):
        # This batch alone needs nothing, but the trace serves others too.
        assert experts.apply(x, x, x, x, weights, ids)[1].tolist() == ids.tolist()
        _, ids = _compiled(lambda w, i: experts.apply(x, x, x, x, w, i))(weights, ids)
    assert ids.tolist() == [[3, 1, -1, 2]]


def test_routing_simulator(vllm):
    router = vllm(
        "model_executor.layers.fused_moe.router.routing_simulator_router"
    ).DistributionBasedRouting()
    with patches()["routing_simulator"].applied("0.18.1"):
        ids = _compiled(lambda h, x: router.route_tokens(h, x, 4))(torch.ones(6, 8), torch.ones(6, 32))
    assert ids.dtype == torch.int32
    assert _repeats(ids) == 0


def test_no_patch_is_left_out():
    tested = {"topk_nan", "topk_nan_bias", "scale_padding", "mla_padding", "decode_buffer"}
    tested |= {"duplicate_experts", "routing_simulator", "hash_topk_nan"}
    # vLLM's experts and its MLA layer are one operation each to torch.compile, which looks into none.
    assert tested | HOST | {"fp8_scale", "dcp_merge"} == {*patches()}
    assert not any(patches()[name].traced for name in HOST)


@pytest.mark.parametrize(
    ("hook", "what"),
    [
        ({"around": planted}, "entering a call"),
        ({"around": lambda args, kwargs: planted_at_the_end()}, "leaving a call"),
        ({"before": planted}, "preparing a call"),
        ({"instead": planted}, "the replacement"),
        ({"after": planted}, "finishing a call"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_failing_hook_leaves_the_call_to_vllm_and_is_named_after_the_trace(vllm, caplog, hook, what):
    simple = vllm("simple")
    hooks.wrap("p", Target("vllm.simple", "double", ("x",), **hook))
    # Not torch's own lines.
    caplog.set_level(logging.WARNING)
    assert _compiled(lambda x: simple.double(x + 1))(torch.ones(3)).tolist() == [4.0] * 3
    assert not caplog.records
    hooks.settle()
    (line,) = caplog.messages
    assert line == (
        f"staleproof: p: {what} of double failed while torch.compile traced it (RuntimeError), "
        "vLLM's own code is in the graph; out of service: p; in service: nothing"
    )


def test_a_graph_is_not_saved_once_the_key_of_the_cache_has_stepped_back():
    registry.step_back(standing.CACHE, "planted")
    try:
        assert patch._unproved() == "planted"
    finally:
        registry.forget(standing.CACHE)
