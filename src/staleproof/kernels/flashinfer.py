"""FlashInfer: its Triton kernels, its compiled kernels (nvcc or its wheel of modules), its MLA peers."""

from __future__ import annotations

from functools import partial

import torch

from staleproof import device
from staleproof.device import Provenance
from staleproof.kernels import references, subject
from staleproof.kernels.adapter import Peer, peer

_UTILS = "flashinfer.triton.utils"
_NORM = (
    "flashinfer.triton.norm",
    "flashinfer.triton.kernels.norm",
    "flashinfer.triton.kernels.quant",
    _UTILS,
)
_ACTIVATION = ("flashinfer.triton.activation", "flashinfer.triton.kernels.activation", *_NORM[1:])


_rows = partial(subject.rows, package="flashinfer-python")
_norm = partial(subject.rows, package="flashinfer-python", needs="cuda", hidden=256)
_sampling = partial(subject.rows, package="flashinfer-python", needs="cuda", dtype="float32")


@_rows(name="triton.norm.rms_norm", reference=references.rms_norm, files=_NORM)
def triton_rms_norm(x):
    from flashinfer.triton.norm import rms_norm

    out = torch.empty_like(x)
    rms_norm(x, torch.ones(x.shape[1], device=x.device, dtype=x.dtype), out, 1e-6)
    return out


@_rows(name="triton.norm.rms_norm_add_residual", reference=references.add_rms_norm, files=_NORM)
def triton_rms_norm_add_residual(x):
    from flashinfer.triton.norm import rms_norm_add_residual

    x, residual = x.clone(), x.clone()
    rms_norm_add_residual(x, residual, torch.ones(x.shape[1], device=x.device, dtype=x.dtype), 1e-6)
    return x, residual


@_rows(name="triton.activation.silu_and_mul", reference=references.silu_and_mul, files=_ACTIVATION)
def triton_silu_and_mul(x):
    from flashinfer.triton.activation import silu_and_mul

    return silu_and_mul(x)


_PLANNED = {"planned": True, "package": "flashinfer-python", "needs": "cuda"}
_MLA = {"layout": "mla", "heads": 16, "page_size": 64}


@subject.attention(name="MLA fa3", **_MLA, **_PLANNED | {"needs": "sm90"}, given={"backend": "fa3"})
@subject.attention(name="MLA fa2", **_MLA, **_PLANNED, given={"backend": "fa2"})
def mla(q, kv_cache, block_table, seq_lens, softmax_scale, out, lse, backend):
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    space = torch.zeros(2**27, dtype=torch.uint8, device=q.device)
    wrapper = BatchMLAPagedAttentionWrapper(space, backend=backend)
    size, q_len = kv_cache.shape[1], q.shape[1] if q.ndim == 4 else 1
    counts = (seq_lens + size - 1) // size
    used = torch.arange(block_table.shape[1], device=q.device) < counts[:, None]
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    rows = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device) * q_len
    # plan() reads the lengths on the host, so it cannot be part of a captured launch.
    wrapper.plan(
        rows, starts, block_table[used].int(), seq_lens, q.shape[-2], 512, 64, size, q_len > 1,
        softmax_scale, q.dtype, kv_cache.dtype,
    )  # fmt: skip
    # The query tokens of all requests, one after another.
    q, out, lse = q.flatten(0, -3), out.flatten(0, -3), lse.flatten(0, -2)
    parts = q[..., :512], q[..., 512:], kv_cache[..., :512], kv_cache[..., 512:]
    return lambda: wrapper.run(*parts, out=out, lse=lse, return_lse=True, return_lse_base_on_e=True)


@subject.attention(name="paged decode", head_dim=64, **_PLANNED)
def paged_decode(q, k_cache, v_cache, block_table, seq_lens, softmax_scale, out):
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


@subject.attention(
    name="paged prefill fa3", q_len=0, head_dim=64, **_PLANNED | {"needs": "sm90"}, given={"backend": "fa3"}
)
@subject.attention(name="paged prefill fa2", q_len=0, head_dim=64, **_PLANNED, given={"backend": "fa2"})
def prefill(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, softmax_scale, out, backend):
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    space = torch.zeros(2**27, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(space, "NHD", backend=backend)
    counts, live = (seq_lens + 15) // 16, int(query_start_loc[-1])
    used = torch.arange(block_table.shape[1], device="cuda") < counts[:, None]
    # The last page of an empty request has 0 tokens: fa3 adds this number to the tokens of the pages before.
    last = seq_lens - (counts - 1).clamp(min=0) * 16
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    wrapper.plan(
        query_start_loc, starts, block_table[used], last, q.shape[1], k_cache.shape[2], 64, 16,
        causal=True, sm_scale=softmax_scale, q_data_type=q.dtype, kv_data_type=q.dtype,
    )  # fmt: skip
    return lambda: (wrapper.run(q[:live], (k_cache, v_cache), out=out[:live]), out)[1]


@subject.attention(name="trtllm-gen MLA", **_MLA, package="flashinfer-python", needs="sm100", prepared=True)
def mla_trtllm(q, kv_cache, block_table, seq_lens, softmax_scale, out):
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache_mla

    # It keeps semaphores in the workspace, which must start at zero.
    workspace = torch.zeros(2**27, dtype=torch.uint8, device=q.device)
    # The kernel refuses a table that is not whole tiles of 128 keys. The added entries name page 0.
    size = kv_cache.shape[1]
    table = torch.nn.functional.pad(block_table, (0, -block_table.shape[1] % (128 // size)))
    rows = (q, out) if q.ndim == 4 else (q.unsqueeze(1), out.unsqueeze(1))

    def launch():
        trtllm_batch_decode_with_kv_cache_mla(
            rows[0], kv_cache.unsqueeze(1), workspace, 128, 512, 64, table, seq_lens,
            table.shape[1] * size, out=rows[1], bmm1_scale=softmax_scale, bmm2_scale=1.0,
        )  # fmt: skip
        return out

    return launch


def mla_cutlass(q, kv_cache, block_table, seq_lens, out):
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    space = torch.zeros(2**27, dtype=torch.uint8, device=q.device)
    wrapper = BatchMLAPagedAttentionWrapper(space, backend="cutlass")
    # Padded as for trtllm-gen. The kernel's softmax scale is that of 192 dimensions.
    table = torch.nn.functional.pad(block_table, (0, -block_table.shape[1] % (128 // kv_cache.shape[1])))
    q, out = q.flatten(0, -3), out.flatten(0, -3)
    parts = q[..., :512], q[..., 512:], kv_cache[..., :512], kv_cache[..., 512:]
    return lambda: wrapper.run(*parts, out=out, kv_len=seq_lens, page_table=table)


@subject.merge(name="cascade.merge_state", package="flashinfer-python", needs="cuda", head_dim=64)
def merge_state(out_a, lse_a, out_b, lse_b):
    from flashinfer.cascade import merge_state

    # This kernel's logarithms are to the base 2.
    out, lse = merge_state(out_a, lse_a * 1.4426950408889634, out_b, lse_b * 1.4426950408889634)
    return out, lse / 1.4426950408889634


@subject.routing(name="softmax, then top_k", package="flashinfer-python", needs="cuda")
def top_k(router_logits, top_k):
    from flashinfer import top_k as choose

    weights, ids = choose(router_logits.softmax(-1), top_k, sorted=True)
    return weights, ids


@_sampling(name="sampling.softmax", reference=references.softmax)
def sampling_softmax(x):
    from flashinfer.sampling import softmax

    return softmax(x)


@_sampling(name="sampling.top_k_renorm_probs", reference=references.top_k_renorm)
def top_k_renorm(x):
    from flashinfer.sampling import top_k_renorm_probs

    return top_k_renorm_probs(x.softmax(-1), 4)


@_norm(name="norm.rmsnorm", reference=references.rms_norm)
def rmsnorm(x):
    from flashinfer.norm import rmsnorm

    return rmsnorm(x, torch.ones_like(x[0]), 1e-6)


@_norm(name="norm.fused_add_rmsnorm", reference=references.add_rms_norm)
def fused_add_rmsnorm(x):
    from flashinfer.norm import fused_add_rmsnorm

    x, residual = x.clone(), x.clone()
    fused_add_rmsnorm(x, residual, torch.ones_like(x[0]), 1e-6)
    return x, residual


@_norm(name="activation.silu_and_mul", reference=references.silu_and_mul)
def silu_and_mul(x):
    from flashinfer.activation import silu_and_mul

    return silu_and_mul(x)


@_rows(name="mxfp8_quantize, linear", needs="sm100", hidden=256)
def mxfp8(x):
    from flashinfer import mxfp8_quantize

    values, scales = mxfp8_quantize(x, False)
    return values, scales.view(len(x), -1)


@_rows(name="nvfp4_quantize, 128x4", needs="sm100", hidden=256, skip={"R": "its scales lie in tiles of rows"})
def nvfp4(x):
    from flashinfer import nvfp4_quantize

    return nvfp4_quantize(x, torch.ones(1, device=x.device))


@subject.merge(name="triton.cascade.merge_state", package="flashinfer-python", needs="sm90")
def triton_merge_state(out_a, lse_a, out_b, lse_b):
    from flashinfer.triton.cascade import merge_state

    # This kernel's logarithms are to the base 2.
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


@subject.experts(name="fused_moe.cutlass_fused_moe", **_MOE, given={"ranks": 1})
@subject.experts(name="fused_moe.cutlass_fused_moe, two ranks with all-to-all", **_MOE, given={"ranks": 2})
def fused_moe(x, w1, w2, topk_weights, topk_ids, ranks):
    from flashinfer.fused_moe import cutlass_fused_moe

    # The kernel expects the up projection first.
    gate, up = w1.chunk(2, 1)
    w1, total, share = torch.cat([up, gate], 1), torch.zeros_like(x), len(w1) // ranks
    # Run the ranks one after another and add the results of their experts.
    for rank in range(ranks):
        mine, out = slice(rank * share, (rank + 1) * share), torch.zeros_like(x)
        cutlass_fused_moe(
            x, topk_ids.int(), topk_weights, w1[mine], w2[mine], x.dtype, quant_scales=None, output=out,
            ep_size=ranks, ep_rank=rank, enable_alltoall=ranks > 1,
        )  # fmt: skip
        total += out
    return total


@_sampling(name="sampling.top_p_renorm_probs", reference=references.top_p_renorm)
def top_p_renorm(x):
    from flashinfer.sampling import top_p_renorm_probs

    return top_p_renorm_probs(x.softmax(-1), 0.9)


@_norm(name="norm.gemma_rmsnorm", reference=references.rms_norm)
def gemma_rmsnorm(x):
    from flashinfer.norm import gemma_rmsnorm

    return gemma_rmsnorm(x, torch.zeros_like(x[0]), 1e-6)


@_norm(name="norm.rmsnorm_quant, static scale", reference=references.rms_norm)
def rmsnorm_quant(x):
    from flashinfer.norm import rmsnorm_quant

    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    rmsnorm_quant(out, x, torch.ones_like(x[0]), torch.ones(1, device=x.device), 1e-6)
    return out


def _unavailable_reason(*, sm100: bool) -> str | None:
    if device.provenance() is not Provenance.MEASURED:
        return "needs a CUDA device"
    if why := device.flashinfer_missing():
        return why
    if sm100 and not device.is_sm100():
        return f"needs an SM100 GPU (B200, GB200); this is {device.machine().capability}"
    return None


def flashinfer_peers() -> dict[str, Peer]:
    """Its MLA kernels by their short keys, whether they can run here or not.

    >>> print(*flashinfer_peers())
    flashinfer_fa2 flashinfer_fa3 flashinfer_trtllm flashinfer_cutlass
    """
    flashinfer = f"FlashInfer {device.version_of('flashinfer-python') or ''}".strip()
    fa2, sm100 = (_unavailable_reason(sm100=needed) for needed in (False, True))
    return {
        "flashinfer_fa2": peer(f"{flashinfer} MLA fa2", fa2, mla, backend="fa2"),
        "flashinfer_fa3": peer(f"{flashinfer} MLA fa3", fa2 or device.needs_sm90(), mla, backend="fa3"),
        "flashinfer_trtllm": peer(f"{flashinfer} trtllm-gen MLA", sm100, mla_trtllm),
        "flashinfer_cutlass": peer(f"{flashinfer} CUTLASS MLA", sm100, mla_cutlass),
    }
