"""FlashInfer's compiled kernels. They need nvcc, or its wheel of compiled modules."""

from __future__ import annotations

from staleproof import audit

_PLANNED = {"planned": True, "package": "flashinfer-python", "needs": "cuda"}


@audit.attention(name="MLA fa2", layout="mla", heads=16, page_size=64, **_PLANNED)
def mla_fa2(q, kv_cache, block_table, seq_lens, softmax_scale, out, lse):
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    wrapper = BatchMLAPagedAttentionWrapper(
        torch.zeros(2**27, dtype=torch.uint8, device="cuda"), backend="fa2"
    )
    counts = (seq_lens + 63) // 64
    used = torch.arange(block_table.shape[1], device="cuda") < counts[:, None]
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    rows = torch.arange(len(q) + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(
        rows,
        starts,
        block_table[used],
        seq_lens,
        q.shape[1],
        512,
        64,
        64,
        False,
        softmax_scale,
        q.dtype,
        q.dtype,
    )
    parts = q[..., :512], q[..., 512:], kv_cache[..., :512], kv_cache[..., 512:]
    return lambda: wrapper.run(*parts, out=out, lse=lse, return_lse=True, return_lse_base_on_e=True)


@audit.attention(name="MLA fa3", layout="mla", heads=16, page_size=64, **_PLANNED | {"needs": "sm90"})
def mla_fa3(q, kv_cache, block_table, seq_lens, softmax_scale, out, lse):
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    wrapper = BatchMLAPagedAttentionWrapper(
        torch.zeros(2**27, dtype=torch.uint8, device="cuda"), backend="fa3"
    )
    counts = (seq_lens + 63) // 64
    used = torch.arange(block_table.shape[1], device="cuda") < counts[:, None]
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    rows = torch.arange(len(q) + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(
        rows,
        starts,
        block_table[used],
        seq_lens,
        q.shape[1],
        512,
        64,
        64,
        False,
        softmax_scale,
        q.dtype,
        q.dtype,
    )
    parts = q[..., :512], q[..., 512:], kv_cache[..., :512], kv_cache[..., 512:]
    return lambda: wrapper.run(*parts, out=out, lse=lse, return_lse=True, return_lse_base_on_e=True)


@audit.attention(name="paged decode", head_dim=64, value_dim=64, **_PLANNED)
def paged_decode(q, k_cache, v_cache, block_table, seq_lens, softmax_scale, out):
    import torch
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper

    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.zeros(2**26, dtype=torch.uint8, device="cuda"), "NHD")
    counts = (seq_lens + 15) // 16
    used = torch.arange(block_table.shape[1], device="cuda") < counts[:, None]
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    last = seq_lens - (counts - 1).clamp(min=0) * 16
    wrapper.plan(
        starts, block_table[used], last, q.shape[1], k_cache.shape[2], 64, 16,
        q_data_type=q.dtype, kv_data_type=q.dtype, sm_scale=softmax_scale,
    )  # fmt: skip
    return lambda: wrapper.run(q, (k_cache, v_cache), out=out)


@audit.attention(name="paged prefill fa2", q_len=0, head_dim=64, value_dim=64, **_PLANNED)
def prefill_fa2(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, softmax_scale, out):
    import torch
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    space = torch.zeros(2**27, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa2")
    counts, live = (seq_lens + 15) // 16, int(query_start_loc[-1])
    used = torch.arange(block_table.shape[1], device="cuda") < counts[:, None]
    # An empty request's last page has no tokens: fa3 adds this number to those of the pages before.
    last = seq_lens - (counts - 1).clamp(min=0) * 16
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    wrapper.plan(
        query_start_loc, starts, block_table[used], last, q.shape[1], k_cache.shape[2], 64, 16,
        causal=True, sm_scale=softmax_scale, q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    return lambda: (wrapper.run(q[:live], (k_cache, v_cache), out=out[:live]), out)[1]


@audit.attention(name="paged prefill fa3", q_len=0, head_dim=64, value_dim=64, **_PLANNED | {"needs": "sm90"})
def prefill_fa3(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, softmax_scale, out):
    import torch
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    space = torch.zeros(2**27, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend="fa3")
    counts, live = (seq_lens + 15) // 16, int(query_start_loc[-1])
    used = torch.arange(block_table.shape[1], device="cuda") < counts[:, None]
    # An empty request's last page has no tokens: fa3 adds this number to those of the pages before.
    last = seq_lens - (counts - 1).clamp(min=0) * 16
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    wrapper.plan(
        query_start_loc, starts, block_table[used], last, q.shape[1], k_cache.shape[2], 64, 16,
        causal=True, sm_scale=softmax_scale, q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    return lambda: (wrapper.run(q[:live], (k_cache, v_cache), out=out[:live]), out)[1]


@audit.attention(
    name="trtllm-gen MLA", layout="mla", heads=16, page_size=64, package="flashinfer-python", needs="sm100"
)
def mla_trtllm(q, kv_cache, block_table, seq_lens, softmax_scale, max_seq_len, out):
    import torch
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla

    workspace = torch.zeros(2**27, dtype=torch.uint8, device="cuda")
    table = torch.nn.functional.pad(block_table, (0, -block_table.shape[1] % 2))
    trtllm_batch_decode_with_kv_cache_mla(
        q.unsqueeze(1), kv_cache.unsqueeze(1), workspace, 128, 512, 64, table, seq_lens, max_seq_len,
        out=out.unsqueeze(1), bmm1_scale=softmax_scale, bmm2_scale=1.0,
    )  # fmt: skip
    return out


@audit.merge(name="cascade.merge_state", package="flashinfer-python", needs="cuda", head_dim=64)
def merge_state(out_a, lse_a, out_b, lse_b):
    from flashinfer.cascade import merge_state

    # Its logarithms are to the base 2.
    out, lse = merge_state(out_a, lse_a * 1.4426950408889634, out_b, lse_b * 1.4426950408889634)
    return out, lse / 1.4426950408889634


@audit.routing(name="softmax, then top_k", package="flashinfer-python", needs="cuda")
def top_k(router_logits, top_k):
    from flashinfer import top_k as choose

    weights, ids = choose(router_logits.softmax(-1), top_k, sorted=True)
    return weights, ids


@audit.rows(name="sampling.softmax", package="flashinfer-python", needs="cuda", dtype="float32")
def sampling_softmax(x):
    from flashinfer.sampling import softmax

    return softmax(x)


@audit.rows(name="sampling.top_k_renorm_probs", package="flashinfer-python", needs="cuda", dtype="float32")
def top_k_renorm(x):
    from flashinfer.sampling import top_k_renorm_probs

    return top_k_renorm_probs(x.softmax(-1), 4)


@audit.rows(name="norm.rmsnorm", package="flashinfer-python", needs="cuda", hidden=256)
def rmsnorm(x):
    import torch
    from flashinfer.norm import rmsnorm

    return rmsnorm(x, torch.ones_like(x[0]), 1e-6)


@audit.rows(name="norm.fused_add_rmsnorm", package="flashinfer-python", needs="cuda", hidden=256)
def fused_add_rmsnorm(x):
    import torch
    from flashinfer.norm import fused_add_rmsnorm

    x, residual = x.clone(), x.clone()
    fused_add_rmsnorm(x, residual, torch.ones_like(x[0]), 1e-6)
    return x, residual


@audit.rows(name="activation.silu_and_mul", package="flashinfer-python", needs="cuda", hidden=256)
def silu_and_mul(x):
    from flashinfer.activation import silu_and_mul

    return silu_and_mul(x)


@audit.rows(name="mxfp8_quantize, linear", package="flashinfer-python", needs="sm100", hidden=256)
def mxfp8(x):
    from flashinfer import mxfp8_quantize

    values, scales = mxfp8_quantize(x, False)
    return values, scales.view(len(x), -1)


@audit.rows(
    name="nvfp4_quantize, 128x4", package="flashinfer-python", needs="sm100", hidden=256,
    skip={"R": "its scales lie in tiles of rows"},
)  # fmt: skip
def nvfp4(x):
    import torch
    from flashinfer import nvfp4_quantize

    return nvfp4_quantize(x, torch.ones(1, device=x.device))


@audit.merge(name="triton.cascade.merge_state", package="flashinfer-python", needs="sm90")
def triton_merge_state(out_a, lse_a, out_b, lse_b):
    from flashinfer.triton.cascade import merge_state

    # Its logarithms are to the base 2.
    out, lse = merge_state(out_a, lse_a * 1.4426950408889634, out_b, lse_b * 1.4426950408889634)
    return out, lse / 1.4426950408889634


_MOE = {
    "package": "flashinfer-python",
    "needs": "sm90",
    "experts": 8,
    "hidden": 512,
    "inner": 256,
    "top_k": 3,
}


@audit.experts(name="fused_moe.cutlass_fused_moe", **_MOE)
def fused_moe(x, w1, w2, topk_weights, topk_ids):
    import torch
    from flashinfer.fused_moe import cutlass_fused_moe

    # It wants the up projection first.
    gate, up = w1.chunk(2, 1)
    out = torch.zeros_like(x)
    cutlass_fused_moe(
        x, topk_ids.int(), topk_weights, torch.cat([up, gate], 1), w2, x.dtype, quant_scales=None, output=out
    )
    return out


@audit.experts(name="fused_moe.cutlass_fused_moe, two ranks with all-to-all", **_MOE)
def fused_moe_ranks(x, w1, w2, topk_weights, topk_ids):
    import torch
    from flashinfer.fused_moe import cutlass_fused_moe

    gate, up = w1.chunk(2, 1)
    w1, total, half = torch.cat([up, gate], 1), torch.zeros_like(x), len(w1) // 2
    # The ranks in turn: each adds what its experts give.
    for rank, mine in enumerate((slice(half), slice(half, None))):
        out = torch.zeros_like(x)
        cutlass_fused_moe(
            x, topk_ids.int(), topk_weights, w1[mine].contiguous(), w2[mine].contiguous(), x.dtype,
            quant_scales=None, output=out, ep_size=2, ep_rank=rank, enable_alltoall=True,
        )  # fmt: skip
        total += out
    return total


@audit.rows(name="sampling.top_p_renorm_probs", package="flashinfer-python", needs="cuda", dtype="float32")
def top_p_renorm(x):
    from flashinfer.sampling import top_p_renorm_probs

    return top_p_renorm_probs(x.softmax(-1), 0.9)


@audit.rows(name="norm.gemma_rmsnorm", package="flashinfer-python", needs="cuda", hidden=256)
def gemma_rmsnorm(x):
    import torch
    from flashinfer.norm import gemma_rmsnorm

    return gemma_rmsnorm(x, torch.zeros_like(x[0]), 1e-6)


@audit.rows(name="norm.rmsnorm_quant, static scale", package="flashinfer-python", needs="cuda", hidden=256)
def rmsnorm_quant(x):
    import torch
    from flashinfer.norm import rmsnorm_quant

    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    rmsnorm_quant(out, x, torch.ones_like(x[0]), torch.ones(1, device=x.device), 1e-6)
    return out
