"""sglang's Triton sources, executed unchanged."""

from __future__ import annotations

from functools import partial

import torch

from staleproof.kernels import references, subject

_OPS = "sglang.kernels.ops"
_DECODE = (f"{_OPS}.attention.decode_attention", f"{_OPS}.attention.score_mod")


_attention = partial(subject.attention, package="sglang")
_rows = partial(subject.rows, package="sglang")
_routing = partial(subject.routing, package="sglang")
_kv_write = partial(
    subject.kv_write, package="sglang", files=(f"{_OPS}.kvcache.mla_buffer",), kv_heads=1, pad_slot=0
)


@_attention(name="Triton decode, MLA", files=_DECODE, layout="mla")
def decode_mla(q, kv_cache, block_table, seq_lens, softmax_scale, out):
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    size, kv = kv_cache.shape[1], kv_cache.flatten(0, 1).unsqueeze(1)
    token = torch.arange(block_table.shape[1] * size, device=q.device)
    slots = block_table[:, token // size] * size + token % size
    starts = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0)).int()
    indices, v = slots[token < seq_lens[:, None]].long(), kv[..., : out.shape[-1]]
    parts = torch.empty(*q.shape[:2], 2, out.shape[-1], device=q.device)
    lse, splits = torch.empty_like(parts[..., 0]), torch.full_like(seq_lens, 2)
    decode_attention_fwd(q, kv, v, out, starts, indices, parts, lse, splits, 2, softmax_scale, 1.0, 1.0)
    return out


@_attention(name="Triton decode, grouped heads", files=_DECODE)
def decode_grouped(q, k_cache, v_cache, block_table, seq_lens, softmax_scale, out):
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    size, k, v = k_cache.shape[1], k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    token = torch.arange(block_table.shape[1] * size, device=q.device)
    slots = block_table[:, token // size] * size + token % size
    starts = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0)).int()
    indices = slots[token < seq_lens[:, None]].long()
    parts = torch.empty(*q.shape[:2], 2, out.shape[-1], device=q.device)
    lse, splits = torch.empty_like(parts[..., 0]), torch.full_like(seq_lens, 2)
    decode_attention_fwd(q, k, v, out, starts, indices, parts, lse, splits, 2, softmax_scale, 1.0, 1.0)
    return out


@subject.merge(name="Triton merge_state", package="sglang", files=(f"{_OPS}.attention.merge_state",))
def merge_state(out_a, lse_a, out_b, lse_b):
    from sglang.kernels.ops.attention.merge_state import merge_state_triton

    return merge_state_triton(out_a, lse_a, out_b, lse_b)


@_kv_write(name="Triton set_mla_kv_buffer")
def set_mla_kv_buffer(key, value, k_cache, v_cache, slot_mapping):
    from sglang.kernels.ops.kvcache.mla_buffer import set_mla_kv_buffer_triton

    # The kernel writes both to one buffer; split it again, so that each can be compared.
    both = torch.cat([k_cache, v_cache], -1).flatten(0, 1)
    set_mla_kv_buffer_triton(both, slot_mapping, key, value)
    parts = both.view(*k_cache.shape[:3], -1).chunk(2, -1)
    k_cache.copy_(parts[0])
    v_cache.copy_(parts[1])


@_kv_write(name="Triton set_mla_kv_buffer without rope")
def set_mla_kv_buffer_norope(key, value, k_cache, v_cache, slot_mapping):
    from sglang.kernels.ops.kvcache.mla_buffer import set_mla_kv_buffer_triton

    set_mla_kv_buffer_triton(k_cache.flatten(0, 1), slot_mapping, key, None)
    set_mla_kv_buffer_triton(v_cache.flatten(0, 1), slot_mapping, value, None)


@subject.state(
    name="Triton causal_conv1d_update", package="sglang", files=(f"{_OPS}.mamba.causal_conv1d_triton",)
)
def conv1d_update(x, state, weight, state_indices):
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

    return causal_conv1d_update(x, state, weight, None, None, conv_state_indices=state_indices)


@_rows(name="per_token_quant_int8", files=(f"{_OPS}.quantization.int8_kernel",))
def per_token_int8(x):
    from sglang.kernels.ops.quantization.int8_kernel import per_token_quant_int8

    return per_token_quant_int8(x)


@_rows(name="per_token_group_quant_int8", files=(f"{_OPS}.quantization.int8_kernel",))
def per_token_group_int8(x):
    from sglang.kernels.ops.quantization.int8_kernel import per_token_group_quant_int8

    return per_token_group_quant_int8(x, 32)


@_rows(name="fused_rmsnorm", reference=references.rms_norm, files=(f"{_OPS}.layernorm.fused_rmsnorm",))
def fused_rmsnorm(x):
    from sglang.kernels.ops.layernorm.fused_rmsnorm import fused_rmsnorm

    return fused_rmsnorm(x, torch.ones(x.shape[1], device=x.device, dtype=x.dtype), 1e-6)


_EXTEND = (f"{_OPS}.attention.extend_attention", *_DECODE)


@_attention(
    name="Triton extend, causal",
    files=_EXTEND,
    q_len=0,
    skip={"E": "it takes no seq_lens: each query token brings its own key"},
)
def extend(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_q_len, softmax_scale, out):
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    size, k, v = k_cache.shape[1], k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    token = torch.arange(block_table.shape[1] * size, device=q.device)
    slots = (block_table[:, token // size] * size + token % size).long()
    # The cache holds the prefix. K and V of the query tokens are passed separately.
    q_lens = query_start_loc.diff()
    prefix = (seq_lens - q_lens).clamp(min=0)
    starts = torch.nn.functional.pad(prefix.cumsum(0), (1, 0)).int()
    request = torch.repeat_interleave(torch.arange(len(q_lens), device=q.device), q_lens)
    place = torch.arange(len(request), device=q.device) - query_start_loc[request] + prefix[request]
    new, old = slots[request, place], slots[token < prefix[:, None]]
    extend_attention_fwd(
        q, k[new], v[new], out, k, v, query_start_loc, starts, old, None, True, None, max_q_len,
        1.0, 1.0, sm_scale=softmax_scale,
    )  # fmt: skip
    return out


@_attention(name="Triton extend, unified", files=_EXTEND, q_len=0)
def extend_unified(
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_q_len, softmax_scale, out
):
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd_unified

    size, k, v = k_cache.shape[1], k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    token = torch.arange(block_table.shape[1] * size, device=q.device)
    slots = block_table[:, token // size] * size + token % size
    starts = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0)).int()
    indices, prefix = slots[token < seq_lens[:, None]].long(), seq_lens - query_start_loc.diff()
    extend_attention_fwd_unified(
        q, out, k, v, 1.0, 1.0, query_start_loc, starts, indices, prefix, max_q_len, sm_scale=softmax_scale
    )
    return out


_GATE = (f"{_OPS}.moe.moe_fused_gate",)


@_routing(name="Triton moe_fused_gate, softmax", files=_GATE)
def fused_gate_softmax(router_logits, top_k, bias=None):
    from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate

    return moe_fused_gate(router_logits, bias, top_k, "softmax")


@_routing(name="Triton moe_fused_gate, sigmoid in groups", files=_GATE, grouped=True)
def fused_gate_sigmoid(router_logits, top_k, bias=None):
    from sglang.kernels.ops.moe.moe_fused_gate import moe_fused_gate

    bias = torch.zeros_like(router_logits[0]) if bias is None else bias
    return moe_fused_gate(router_logits, bias, top_k, "sigmoid", num_expert_group=4, topk_group=2)


@_routing(name="Triton gate_topk", files=(f"{_OPS}.moe.gate_topk",))
def gate_topk(router_logits, top_k):
    from sglang.kernels.ops.moe.gate_topk import gate_topk

    return gate_topk(router_logits, top_k)


@_routing(name="Triton fused_moe_router_cudacore", files=(f"{_OPS}.moe.router",))
def router_cudacore(router_logits, top_k, bias=None):
    from sglang.kernels.ops.moe.router import fused_moe_router_cudacore

    # The weight is the identity, so that the logits equal the hidden states.
    weight = torch.eye(router_logits.shape[1], device=router_logits.device)
    return fused_moe_router_cudacore(router_logits, weight, top_k, 0.0, bias)


_FP8 = (f"{_OPS}.quantization.fp8_kernel",)


@_rows(name="Triton per_tensor_quant_mla_fp8", files=_FP8)
def per_tensor_mla_fp8(x):
    from sglang.kernels.ops.quantization.fp8_kernel import per_tensor_quant_mla_fp8

    values, scale = per_tensor_quant_mla_fp8(x[None], torch.zeros(1, device=x.device))
    return values[0], scale


@_rows(name="Triton per_token_group_quant_fp8", files=_FP8)
def per_token_group_fp8(x):
    from sglang.kernels.ops.quantization.fp8_kernel import _per_token_group_quant_8bit_raw

    return _per_token_group_quant_8bit_raw(x, 32)


@_rows(
    name="act_quant, tilelang",
    needs="cuda",
    hidden=128,
    files=("sglang.kernels.ops.quantization.act_quant_tilelang",),
)
def tilelang_act_quant(x):
    from sglang.kernels.ops.quantization.act_quant_tilelang import act_quant

    return act_quant(x)
