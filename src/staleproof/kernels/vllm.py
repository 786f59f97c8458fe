"""vLLM: its Triton sources, executed unchanged, the compiled operations of its wheel, and its MLA peers.

A release is installed, or unpacked in the cache (``vllm-<version>``).
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from staleproof import device
from staleproof.cases.machine import VLLM_TRITON_MLA
from staleproof.device import Provenance
from staleproof.kernels import references, subject
from staleproof.kernels.adapter import RANK, Peer, pages_in_use, peer
from staleproof.kernels.vllm_sources import UnavailableError, load
from staleproof.vllm.sources import vllm_file

VERSIONS = ("0.20.2", "0.22.1", "0.33.0")
_OPS = "vllm.v1.attention.ops"
_DECODE = (f"{_OPS}.triton_decode_attention",)
_UNIFIED = (f"{_OPS}.triton_unified_attention", f"{_OPS}.triton_attention_helpers", f"{_OPS}.metadata")


_attention = partial(subject.attention, package="vllm", versions=VERSIONS)
_merge = partial(subject.merge, package="vllm", versions=VERSIONS)
_kv_write = partial(subject.kv_write, package="vllm", versions=VERSIONS)
_rows = partial(subject.rows, package="vllm", versions=VERSIONS, needs="cuda", hidden=256)
_routing = partial(subject.routing, package="vllm", versions=VERSIONS, needs="cuda")


@_attention(name="Triton MLA decode", layout="mla", files=_DECODE, prepared=True)
def decode_mla(q, kv_cache, block_table, seq_lens, softmax_scale, out, lse, num_kv_splits=4, **more):
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    parts = torch.empty(*q.shape[:2], num_kv_splits, out.shape[-1] + 1, device=q.device)
    kv = kv_cache.unsqueeze(2)
    given = out, lse, block_table, seq_lens, parts, num_kv_splits, softmax_scale, kv.shape[1]
    return lambda: (decode_attention_fwd(q, kv, kv[..., : out.shape[-1]], *given, **more), (out, lse))[1]


@subject.attention(name="Triton decode, grouped heads", package="vllm", files=_DECODE, versions=VERSIONS[-1:])
def decode_grouped(q, k_cache, v_cache, block_table, seq_lens, softmax_scale, out, lse):
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    parts = torch.empty(*q.shape[:2], 2, out.shape[-1] + 1, device=q.device)
    decode_attention_fwd(
        q, k_cache, v_cache, out, lse, block_table, seq_lens, parts, 2, softmax_scale, k_cache.shape[1]
    )
    return out, lse


@_attention(name="Triton unified attention", files=_UNIFIED, q_len=0)
def unified(
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_q_len, max_seq_len, softmax_scale, out
):
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    unified_attention(
        q, k_cache, v_cache, out, query_start_loc, max_q_len, seq_lens, max_seq_len, softmax_scale,
        True, (-1, -1), block_table, 0, None, None, None,
    )  # fmt: skip
    return out


@subject.attention(
    name="Triton prefix prefill",
    package="vllm",
    files=(f"{_OPS}.prefix_prefill",),
    versions=VERSIONS[-1:],
    q_len=0,
)
def prefix_prefill(
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_q_len, max_seq_len, softmax_scale, out
):
    from vllm.v1.attention.ops.prefix_prefill import context_attention_fwd

    # K and V of the new tokens are passed separately from the cache, as vLLM does.
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


@_merge(name="Triton merge_attn_states", files=(f"{_OPS}.triton_merge_attn_states",))
def merge_attn_states(out_a, lse_a, out_b, lse_b):
    from vllm.v1.attention.ops.triton_merge_attn_states import merge_attn_states

    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a.T.contiguous())
    merge_attn_states(out, out_a, lse_a.T.contiguous(), out_b, lse_b.T.contiguous(), lse)
    return out, lse.T


@_kv_write(name="Triton reshape_and_cache_flash", files=(f"{_OPS}.triton_reshape_and_cache_flash",))
def reshape_and_cache(key, value, k_cache, v_cache, slot_mapping):
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    one = torch.ones(1, device=key.device)
    triton_reshape_and_cache_flash(key, value, k_cache, v_cache, slot_mapping, "auto", one, one)


@subject.state(
    name="Triton causal_conv1d_update",
    package="vllm",
    files=("vllm.model_executor.layers.mamba.ops.causal_conv1d",),
    versions=VERSIONS,
    pad_index=0,
)
def conv1d_update(x, state, weight, state_indices):
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    return causal_conv1d_update(x, state, weight, None, None, conv_state_indices=state_indices)


@_rows(
    name="fp8 per tensor, dynamic",
    documented={"R": 'scaled_fp8_quant without a scale: "per_tensor or per_token", one scale for the tensor'},
)
def fp8_per_tensor(x):
    from vllm._custom_ops import scaled_fp8_quant

    return scaled_fp8_quant(x)


@_rows(name="fp8 per token, dynamic")
def fp8_per_token(x):
    from vllm._custom_ops import scaled_fp8_quant

    return scaled_fp8_quant(x, use_per_token_if_dynamic=True)


@_rows(name="fp8 per group of 128")
def fp8_per_group(x):
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    return per_token_group_quant_fp8(x, 128)


@_rows(name="rms_norm", reference=references.rms_norm)
def rms_norm(x):
    from vllm._custom_ops import rms_norm

    out = torch.empty_like(x)
    rms_norm(out, x, torch.ones_like(x[0]), 1e-6)
    return out


@_rows(name="rms_norm, then fp8 per token", reference=references.rms_norm)
def rms_norm_quant(x):
    from vllm._custom_ops import rms_norm_dynamic_per_token_quant

    return rms_norm_dynamic_per_token_quant(x, torch.ones_like(x[0]), 1e-6, torch.float8_e4m3fn)


@_routing(name="topk_softmax")
def topk_softmax(router_logits, top_k, bias=None):
    from vllm._custom_ops import topk_softmax

    weights = torch.empty(len(router_logits), top_k, device=router_logits.device)
    ids, source = torch.empty(2, len(router_logits), top_k, device=weights.device, dtype=torch.int32)
    topk_softmax(weights, ids, source, router_logits, False, bias)
    return weights, ids


@_routing(name="topk_sigmoid")
def topk_sigmoid(router_logits, top_k, bias=None):
    from vllm._custom_ops import topk_sigmoid

    weights = torch.empty(len(router_logits), top_k, device=router_logits.device)
    ids, source = torch.empty(2, len(router_logits), top_k, device=weights.device, dtype=torch.int32)
    topk_sigmoid(weights, ids, source, router_logits, False, bias)
    return weights, ids


@_routing(name="grouped_topk", grouped=True)
def grouped_topk(router_logits, top_k, bias=None):
    from vllm._custom_ops import grouped_topk

    bias = torch.zeros_like(router_logits[0]) if bias is None else bias
    return grouped_topk(router_logits.sigmoid(), 4, 2, top_k, True, 1.0, bias)


_PAGED = {"package": "vllm", "versions": VERSIONS, "q_len": 0, "head_dim": 64}


@subject.attention(name="flash attention 3, paged", needs="sm90", **_PAGED, given={"fa_version": 3})
@subject.attention(name="flash attention 2, paged", needs="cuda", **_PAGED, given={"fa_version": 2})
def flash_attention(
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_q_len, max_seq_len, softmax_scale, out,
    fa_version,
):  # fmt: skip
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        q, k_cache, v_cache, max_q_len, query_start_loc, max_seq_len, seqused_k=seq_lens,
        block_table=block_table, softmax_scale=softmax_scale, causal=True, out=out, fa_version=fa_version,
    )  # fmt: skip


@_attention(name="FlashMLA, dense", needs="sm90", layout="mla", heads=16, page_size=64, planned=True)
def flash_mla(q, kv_cache, block_table, seq_lens, softmax_scale):
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    metadata, splits = get_mla_metadata(seq_lens, q.shape[1], 1)

    def launch():
        out, lse = flash_mla_with_kvcache(
            q.unsqueeze(1), kv_cache.unsqueeze(2), block_table, seq_lens, 512, metadata, splits, softmax_scale
        )
        return out.squeeze(1), lse.squeeze(-1)

    return launch


@_rows(name="fused_add_rms_norm", reference=references.add_rms_norm)
def fused_add_rms_norm(x):
    from vllm._custom_ops import fused_add_rms_norm

    x, residual = x.clone(), x.clone()
    fused_add_rms_norm(x, residual, torch.ones_like(x[0]), 1e-6)
    return x, residual


@_merge(name="merge_attn_states, compiled", needs="cuda")
def merge_compiled(out_a, lse_a, out_b, lse_b):
    from vllm._custom_ops import merge_attn_states

    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a.T.contiguous())
    merge_attn_states(out, out_a, lse_a.T.contiguous(), out_b, lse_b.T.contiguous(), lse)
    return out, lse.T


@_kv_write(name="reshape_and_cache_flash, compiled", needs="cuda")
def reshape_and_cache_compiled(key, value, k_cache, v_cache, slot_mapping):
    from vllm._custom_ops import reshape_and_cache_flash

    one = torch.ones(1, device=key.device)
    reshape_and_cache_flash(key, value, k_cache, v_cache, slot_mapping, "auto", one, one)


@_kv_write(name="concat_and_cache_mla", needs="cuda", kv_heads=1, head_dim=64)
def concat_and_cache_mla(key, value, k_cache, v_cache, slot_mapping):
    from vllm._custom_ops import concat_and_cache_mla

    # The kernel writes both to one cache; split it again, so that each can be compared.
    both = torch.cat([k_cache, v_cache], -1)[:, :, 0].contiguous()
    concat_and_cache_mla(key[:, 0], value[:, 0], both, slot_mapping, "auto", torch.ones(1, device=key.device))
    parts = both.unsqueeze(2).chunk(2, -1)
    k_cache.copy_(parts[0])
    v_cache.copy_(parts[1])


@subject.experts(
    name="moe_align_block_size, then a product a block", package="vllm", versions=VERSIONS, needs="cuda"
)
def moe_align(x, w1, w2, topk_weights, topk_ids):
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


FA3_LIBRARY = "vllm_flash_attn/_vllm_fa3_C.abi3.so"
FLASHMLA_LIBRARY, FLASHMLA_VARIABLE = "_flashmla_C.abi3.so", "STALEPROOF_FLASHMLA_SO"
# In the same folder of the wheel.
FLASHMLA_FP8_LIBRARY = "_flashmla_extension_C.abi3.so"


@cache
def vllm_triton_mla_module() -> types.ModuleType:
    """Execute the Triton MLA source file of an importable vLLM, and return its module.

    The package is not imported; :mod:`staleproof.kernels.vllm_sources` has stubs for its other modules.

    Raises:
        UnavailableError: Triton or such a vLLM is missing, or the file does not load.
    """
    if not device.has_triton():
        raise UnavailableError("Triton is not installed")
    for path in VLLM_TRITON_MLA:
        file = vllm_file(path)
        if file is not None:
            device.load_triton()
            name = f"vllm.{path.removesuffix('.py').replace('/', '.')}"
            return load(file.parents[path.count("/")], name)[0]
    raise UnavailableError("no vllm with a Triton MLA kernel is installed")


def vllm_splits(max_seq_len: int, processors: int) -> int:
    """The parts that vLLM's Triton MLA splits the keys into, from 0.20.0 on; before that always 4.

    Args:
        max_seq_len: longest request of the batch. In a captured graph it is the longest that the
            server takes, whatever the batch holds.
        processors: multiprocessors of the GPU.

    >>> [vllm_splits(tokens, 132) for tokens in (1, 512, 4096, 40000, 1_000_000)]
    [1, 1, 8, 128, 264]
    """
    wanted = max(1, max_seq_len // 512)
    return min(1 << (wanted - 1).bit_length(), 2 * processors)


def _triton_unavailable_reason() -> str | None:
    try:
        vllm_triton_mla_module()
    except UnavailableError as error:
        return str(error)
    return None


def _vllm() -> str:
    return f"vLLM {device.version_of('vllm') or ''}".strip()


@wraps(decode_mla)
def _of_installed_source(**arguments: Any) -> Callable[[], Any]:
    module = vllm_triton_mla_module()
    one = torch.ones(1, dtype=torch.float32, device=arguments["q"].device)
    # vLLM passes these. Older releases do not have all of them.
    known = inspect.signature(module.decode_attention_fwd).parameters
    passed = {"k_scale": one, "v_scale": one, "is_mla": True}
    more = {name: value for name, value in passed.items() if name in known}
    # The adapter imports the module under its newest name.
    with mock.patch.dict(sys.modules, {_DECODE[0]: module}):
        return decode_mla(**arguments, **more)


def vllm_triton() -> Peer:
    """vLLM's Triton MLA, whether it can run here or not.

    >>> vllm_triton().name.endswith("Triton MLA")
    True
    """
    return peer(
        f"{_vllm()} Triton MLA", _triton_unavailable_reason(), wraps(decode_mla)(_of_installed_source)
    )


def _needs_sm90() -> str | None:
    if device.provenance() is not Provenance.MEASURED:
        return "needs a CUDA device"
    return device.needs_sm90()


def fa3_unavailable_reason() -> str | None:
    """Why FA3 of vLLM's wheel cannot run here, in one line, or ``None``."""
    found = vllm_file(FA3_LIBRARY)
    return _needs_sm90() or (None if found else f"no vllm with {FA3_LIBRARY} is installed")


def mla_fa3(q, kv_cache, block_table, seq_lens, softmax_scale, max_seq_len, out, num_kv_splits=0):
    # As vLLM calls it (v1/attention/backends/mla/flashattn_mla.py): q and k are the rotary parts, v is the
    # latent, and q_v is the latent part of the query.
    attend = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    k, v = kv_cache[..., RANK:].unsqueeze(-2), kv_cache[..., :RANK].unsqueeze(-2)

    def launch():
        attend(
            q=q[..., RANK:], k=k, v=v, q_v=q[..., :RANK], max_seqlen_q=1, cu_seqlens_q=starts,
            max_seqlen_k=max_seq_len, seqused_k=seq_lens, block_table=block_table,
            softmax_scale=softmax_scale, causal=True, num_splits=num_kv_splits, fa_version=3, out=out,
        )  # fmt: skip
        return out

    return launch


def vllm_fa3() -> Peer:
    """FA3 of vLLM's wheel, the kernel behind its FLASH_ATTN_MLA backend, whether it can run here or not.

    >>> vllm_fa3().name.endswith("FA3 MLA")
    True
    """
    return peer(f"{_vllm()} FA3 MLA", fa3_unavailable_reason(), mla_fa3)


def flashmla_library() -> Path | None:
    """vLLM's compiled FlashMLA: the file that the environment variable names, or an installed vLLM's."""
    named = os.environ.get(FLASHMLA_VARIABLE)
    found = Path(named) if named else vllm_file(FLASHMLA_LIBRARY)
    return found if found is not None and found.is_file() else None


def _flashmla_unavailable_reason() -> str | None:
    if why := _needs_sm90():
        return why
    if flashmla_library() is None:
        return f"{FLASHMLA_VARIABLE} does not name the {FLASHMLA_LIBRARY} of a vLLM wheel"
    return None


def mla_flashmla(q, kv_cache, block_table, seq_lens, softmax_scale, out):
    """As vLLM calls its library (third_party/flashmla/flash_mla_interface.py)."""
    library = flashmla_library()
    assert library is not None
    query = q if q.ndim == 4 else q.unsqueeze(1)
    # The kernel follows every entry of the table, so set the entries after a request's last page to page 0.
    _, used = pages_in_use(block_table, seq_lens, kv_cache.shape[1])
    given = (
        kv_cache.unsqueeze(2),
        RANK,
        seq_lens,
        torch.where(used, block_table, 0),
        softmax_scale,
        q.ndim == 4,
    )
    if kv_cache.dtype == torch.float8_e4m3fn:
        return _flashmla_fp8(library, query, given, out)
    torch.ops.load_library(str(library))
    decode = torch.ops._flashmla_C.dense_decode_fwd
    # In the kernel's output the heads of all query tokens are one axis.
    target = out.view(len(q), 1, -1, RANK)
    # The first call plans the work of each program from the lengths; vLLM does that once a step.
    *_, plan, splits = decode(query, *given, None, None, target)

    def launch():
        _, lse, *_ = decode(query, *given, plan, splits, target)
        return out if q.ndim == 4 else (out, lse)

    return launch


def _flashmla_fp8(library: Path, q: torch.Tensor, given: tuple[Any, ...], out: torch.Tensor) -> Any:
    """FlashMLA for an E4M3 cache, whose queries are E4M3 too (v1/attention/ops/flashmla.py).

    The launch is timed. It includes neither the rounding of the queries nor the copy to ``out``, which is
    needed because the kernel returns its own memory.
    """
    torch.ops.load_library(str(library.with_name(FLASHMLA_FP8_LIBRARY)))
    kernels = torch.ops._flashmla_extension_C
    query, one = q.to(torch.float8_e4m3fn), torch.ones(1, device=q.device)
    plan = kernels.get_mla_decoding_metadata_dense_fp8(given[2], q.shape[1] * q.shape[2], 1)

    def launch() -> torch.Tensor:
        result, _ = kernels.fwd_kvcache_mla_fp8(query, *given, *plan, one, one)
        return result

    out.copy_(launch().view(out.shape))
    return launch


def flashmla() -> Peer:
    """Dense FlashMLA of vLLM's wheel, whether it can run here or not.

    >>> flashmla().name
    'FlashMLA of vLLM'
    """
    return peer("FlashMLA of vLLM", _flashmla_unavailable_reason(), mla_flashmla)
