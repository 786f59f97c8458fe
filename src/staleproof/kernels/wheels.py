"""Kernels of smaller wheels: FlashAttention-4, sgl-flash-mla, sgl-deep-gemm."""

from __future__ import annotations

import torch

from staleproof.kernels import references, subject

_FLASH = {"package": "flash-attn-4", "needs": "sm90", "q_len": 0, "head_dim": 64}


@subject.attention(name="flash_attn_varlen_func, pages of 16", **_FLASH)
@subject.attention(
    name="flash_attn_varlen_func, pages of 128",
    **_FLASH,
    page_size=128,
    documented={"T": 'its docstring: rows past seqused_k in a last page "must be finite"'},
)
def flash_attn_4(
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_q_len, max_seq_len, softmax_scale
):
    from flash_attn.cute import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q, k_cache, v_cache, cu_seqlens_q=query_start_loc, max_seqlen_q=max_q_len, max_seqlen_k=max_seq_len,
        seqused_k=seq_lens, page_table=block_table, softmax_scale=softmax_scale, causal=True,
    )[0]  # fmt: skip


@subject.attention(
    name="dense decode, legacy", package="sgl-flash-mla", needs="sm90", layout="mla", heads=64, page_size=64
)
def flash_mla(q, kv_cache, block_table, seq_lens, softmax_scale):
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    plan, _ = get_mla_metadata()
    out, lse = flash_mla_with_kvcache(
        q.unsqueeze(1), kv_cache.unsqueeze(2), block_table, seq_lens, 512, plan, None, softmax_scale,
        use_legacy=True,
    )  # fmt: skip
    return out.squeeze(1), lse.squeeze(-1)


@subject.ragged(
    name="m_grouped_bf16_gemm_nt_masked",
    reference=references.masked_product,
    package="sgl-deep-gemm",
    needs="sm90",
    hidden=128,
    dtype="bfloat16",
)
def deep_gemm_masked(x, starts):
    from deep_gemm import m_grouped_bf16_gemm_nt_masked

    torch.manual_seed(0)
    counts = starts.diff()
    weights = torch.randn(len(counts), 128, x.shape[1]).to(x)
    # Each group has room for 128 rows; rows past its count belong to no group.
    groups, out = x.new_zeros(len(counts), 128, x.shape[1]), x.new_empty(len(counts), 128, 128)
    row = torch.arange(len(x), device=x.device)
    group = torch.searchsorted(starts[1:-1].contiguous(), row, right=True)
    groups[group, row - starts[group]] = x
    m_grouped_bf16_gemm_nt_masked(groups, weights, out, counts, 16)
    return out[group, row - starts[group]]
