"""The compiled operations of vLLM's wheel: installed, or unpacked in the cache (``vllm-<version>``)."""

from __future__ import annotations

from staleproof import audit
from staleproof.kernels.vllm import VERSIONS


@audit.rows(
    name="fp8 per tensor, dynamic",
    package="vllm",
    versions=VERSIONS,
    needs="cuda",
    hidden=256,
    documented={"R": 'scaled_fp8_quant without a scale: "per_tensor or per_token", one scale for the tensor'},
)
def fp8_per_tensor(x):
    from vllm._custom_ops import scaled_fp8_quant

    return scaled_fp8_quant(x)


@audit.rows(name="fp8 per token, dynamic", package="vllm", versions=VERSIONS, needs="cuda", hidden=256)
def fp8_per_token(x):
    from vllm._custom_ops import scaled_fp8_quant

    return scaled_fp8_quant(x, use_per_token_if_dynamic=True)


@audit.rows(name="fp8 per group of 128", package="vllm", versions=VERSIONS, needs="cuda", hidden=256)
def fp8_per_group(x):
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    return per_token_group_quant_fp8(x, 128)


@audit.rows(name="rms_norm", package="vllm", versions=VERSIONS, needs="cuda", hidden=256)
def rms_norm(x):
    import torch
    from vllm._custom_ops import rms_norm

    out = torch.empty_like(x)
    rms_norm(out, x, torch.ones_like(x[0]), 1e-6)
    return out


@audit.rows(name="rms_norm, then fp8 per token", package="vllm", versions=VERSIONS, needs="cuda", hidden=256)
def rms_norm_quant(x):
    import torch
    from vllm._custom_ops import rms_norm_dynamic_per_token_quant

    return rms_norm_dynamic_per_token_quant(x, torch.ones_like(x[0]), 1e-6, torch.float8_e4m3fn)


@audit.routing(name="topk_softmax", package="vllm", versions=VERSIONS, needs="cuda")
def topk_softmax(router_logits, top_k, bias=None):
    import torch
    from vllm._custom_ops import topk_softmax

    weights = torch.empty(len(router_logits), top_k, device=router_logits.device)
    ids, source = torch.empty(2, len(router_logits), top_k, device=weights.device, dtype=torch.int32)
    topk_softmax(weights, ids, source, router_logits, False, bias)
    return weights, ids


@audit.routing(name="topk_sigmoid", package="vllm", versions=VERSIONS, needs="cuda")
def topk_sigmoid(router_logits, top_k, bias=None):
    import torch
    from vllm._custom_ops import topk_sigmoid

    weights = torch.empty(len(router_logits), top_k, device=router_logits.device)
    ids, source = torch.empty(2, len(router_logits), top_k, device=weights.device, dtype=torch.int32)
    topk_sigmoid(weights, ids, source, router_logits, False, bias)
    return weights, ids


@audit.routing(name="grouped_topk", package="vllm", versions=VERSIONS, needs="cuda", grouped=True)
def grouped_topk(router_logits, top_k, bias=None):
    import torch
    from vllm._custom_ops import grouped_topk

    bias = torch.zeros_like(router_logits[0]) if bias is None else bias
    return grouped_topk(router_logits.sigmoid(), 4, 2, top_k, True, 1.0, bias)


@audit.attention(
    name="flash attention 2, paged",
    package="vllm",
    versions=VERSIONS,
    needs="cuda",
    q_len=0,
    head_dim=64,
    value_dim=64,
)
def fa2(
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_q_len, max_seq_len, softmax_scale, out
):
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q, k_cache, v_cache, max_q_len, query_start_loc, max_seq_len, seqused_k=seq_lens,
        block_table=block_table, softmax_scale=softmax_scale, causal=True, out=out, fa_version=2,
    )  # fmt: skip


@audit.attention(
    name="flash attention 3, paged",
    package="vllm",
    versions=VERSIONS,
    needs="sm90",
    q_len=0,
    head_dim=64,
    value_dim=64,
)
def fa3(
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_q_len, max_seq_len, softmax_scale, out
):
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q, k_cache, v_cache, max_q_len, query_start_loc, max_seq_len, seqused_k=seq_lens,
        block_table=block_table, softmax_scale=softmax_scale, causal=True, out=out, fa_version=3,
    )  # fmt: skip


@audit.attention(
    name="FlashMLA, dense",
    package="vllm",
    versions=VERSIONS,
    needs="sm90",
    layout="mla",
    heads=16,
    page_size=64,
    planned=True,
)
def flash_mla(q, kv_cache, block_table, seq_lens, softmax_scale):
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    metadata, splits = get_mla_metadata(seq_lens, q.shape[1], 1)

    def launch():
        out, lse = flash_mla_with_kvcache(
            q.unsqueeze(1), kv_cache.unsqueeze(2), block_table, seq_lens, 512, metadata, splits, softmax_scale
        )
        return out.squeeze(1), lse.squeeze(-1)

    return launch


@audit.rows(name="fused_add_rms_norm", package="vllm", versions=VERSIONS, needs="cuda", hidden=256)
def fused_add_rms_norm(x):
    import torch
    from vllm._custom_ops import fused_add_rms_norm

    x, residual = x.clone(), x.clone()
    fused_add_rms_norm(x, residual, torch.ones_like(x[0]), 1e-6)
    return x, residual


@audit.merge(name="merge_attn_states, compiled", package="vllm", versions=VERSIONS, needs="cuda")
def merge_attn_states(out_a, lse_a, out_b, lse_b):
    import torch
    from vllm._custom_ops import merge_attn_states

    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a.T.contiguous())
    merge_attn_states(out, out_a, lse_a.T.contiguous(), out_b, lse_b.T.contiguous(), lse)
    return out, lse.T


@audit.kv_write(name="reshape_and_cache_flash, compiled", package="vllm", versions=VERSIONS, needs="cuda")
def reshape_and_cache_flash(key, value, k_cache, v_cache, slot_mapping):
    import torch
    from vllm._custom_ops import reshape_and_cache_flash

    one = torch.ones(1, device=key.device)
    reshape_and_cache_flash(key, value, k_cache, v_cache, slot_mapping, "auto", one, one)


@audit.kv_write(
    name="concat_and_cache_mla", package="vllm", versions=VERSIONS, needs="cuda", kv_heads=1, head_dim=64
)
def concat_and_cache_mla(key, value, k_cache, v_cache, slot_mapping):
    import torch
    from vllm._custom_ops import concat_and_cache_mla

    # One cache holds both; here they are taken apart again, so that each can be compared.
    both = torch.cat([k_cache, v_cache], -1)[:, :, 0].contiguous()
    concat_and_cache_mla(key[:, 0], value[:, 0], both, slot_mapping, "auto", torch.ones(1, device=key.device))
    parts = both.unsqueeze(2).chunk(2, -1)
    k_cache.copy_(parts[0])
    v_cache.copy_(parts[1])


@audit.experts(
    name="moe_align_block_size, then a product a block", package="vllm", versions=VERSIONS, needs="cuda"
)
def moe_align(x, w1, w2, topk_weights, topk_ids):
    import torch
    from vllm._custom_ops import moe_align_block_size

    size, slots = 8, topk_ids.numel() + len(w1) * 7
    tokens, experts = (torch.empty(n, dtype=torch.int32, device="cuda") for n in (slots, -(-slots // size)))
    count, out = torch.empty(1, dtype=torch.int32, device="cuda"), torch.zeros_like(x)
    moe_align_block_size(topk_ids.int(), len(w1), size, tokens, experts, count)
    for block in range(int(count) // size):
        expert = int(experts[block])
        for slot in tokens[block * size : (block + 1) * size].tolist():
            if slot < topk_ids.numel() and expert >= 0:
                gate, up = (w1[expert] @ x[slot // 2]).chunk(2)
                weight = topk_weights.flatten()[slot].to(x.dtype)
                out[slot // 2] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return out
