"""vLLM's Triton sources, executed as they are: installed, or from the source distribution of a release."""

from __future__ import annotations

from staleproof import audit

VERSIONS = ("0.20.2", "0.22.1", "0.33.0")
_OPS = "vllm.v1.attention.ops"
_DECODE = (f"{_OPS}.triton_decode_attention",)
_UNIFIED = (f"{_OPS}.triton_unified_attention", f"{_OPS}.triton_attention_helpers", f"{_OPS}.metadata")


@audit.attention(name="Triton MLA decode", package="vllm", layout="mla", files=_DECODE, versions=VERSIONS)
def decode_mla(q, kv_cache, block_table, seq_lens, softmax_scale, out, lse):
    import torch
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    parts = torch.empty(*q.shape[:2], 2, out.shape[-1] + 1, device=q.device)
    kv = kv_cache.unsqueeze(2)
    decode_attention_fwd(
        q, kv, kv[..., : out.shape[-1]], out, lse, block_table, seq_lens, parts, 2, softmax_scale, kv.shape[1]
    )
    return out, lse


@audit.attention(name="Triton decode, grouped heads", package="vllm", files=_DECODE, versions=VERSIONS[-1:])
def decode_grouped(q, k_cache, v_cache, block_table, seq_lens, softmax_scale, out, lse):
    import torch
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    parts = torch.empty(*q.shape[:2], 2, out.shape[-1] + 1, device=q.device)
    decode_attention_fwd(
        q, k_cache, v_cache, out, lse, block_table, seq_lens, parts, 2, softmax_scale, k_cache.shape[1]
    )
    return out, lse


@audit.attention(name="Triton unified attention", package="vllm", files=_UNIFIED, versions=VERSIONS, q_len=0)
def unified(
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_q_len, max_seq_len, softmax_scale, out
):
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    unified_attention(
        q, k_cache, v_cache, out, query_start_loc, max_q_len, seq_lens, max_seq_len, softmax_scale,
        True, (-1, -1), block_table, 0, None, None, None,
    )  # fmt: skip
    return out


@audit.attention(
    name="Triton prefix prefill",
    package="vllm",
    files=(f"{_OPS}.prefix_prefill",),
    versions=VERSIONS[-1:],
    q_len=0,
)
def prefix_prefill(
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_q_len, max_seq_len, softmax_scale, out
):
    import torch
    from vllm.v1.attention.ops.prefix_prefill import context_attention_fwd

    # The new tokens' K and V come beside the cache, as vLLM passes them.
    q_lens = query_start_loc.diff()
    request = torch.repeat_interleave(torch.arange(len(q_lens), device=q.device), q_lens)
    token = (
        torch.arange(len(request), device=q.device) - query_start_loc[request] + (seq_lens - q_lens)[request]
    )
    page = block_table[request, token.clamp(min=0) // k_cache.shape[1]].long()
    k, v = (cache[page, token % cache.shape[1]] for cache in (k_cache, v_cache))
    x = 16 // k_cache.element_size()
    k_pages = k_cache.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4).contiguous()
    v_pages = v_cache.permute(0, 2, 3, 1).contiguous()
    one = torch.ones(1, device=q.device)
    context_attention_fwd(
        q, k, v, out, "auto", k_pages, v_pages, block_table, query_start_loc, seq_lens, max_seq_len,
        max_q_len, one, one, sm_scale=softmax_scale,
    )  # fmt: skip
    return out


@audit.merge(
    name="Triton merge_attn_states",
    package="vllm",
    files=(f"{_OPS}.triton_merge_attn_states",),
    versions=VERSIONS,
)
def merge_attn_states(out_a, lse_a, out_b, lse_b):
    import torch
    from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states

    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a.T.contiguous())
    merge_attn_states(out, out_a, lse_a.T.contiguous(), out_b, lse_b.T.contiguous(), lse)
    return out, lse.T


@audit.kv_write(
    name="Triton reshape_and_cache_flash",
    package="vllm",
    files=(f"{_OPS}.triton_reshape_and_cache_flash",),
    versions=VERSIONS,
)
def reshape_and_cache(key, value, k_cache, v_cache, slot_mapping):
    import torch
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    one = torch.ones(1, device=key.device)
    triton_reshape_and_cache_flash(key, value, k_cache, v_cache, slot_mapping, "auto", one, one)


@audit.state(
    name="Triton causal_conv1d_update",
    package="vllm",
    files=("vllm.model_executor.layers.mamba.ops.causal_conv1d",),
    versions=VERSIONS,
    pad_index=0,
)
def conv1d_update(x, state, weight, state_indices):
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    return causal_conv1d_update(x, state, weight, None, None, conv_state_indices=state_indices)
