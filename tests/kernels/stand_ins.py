"""Packages of kernels, made up: each function takes the real one's arguments and keeps the padding contract.

They compute in float64 from what they are given, and refuse what the real kernels would misread: other
dtypes, shapes and sizes. ``CHOSEN`` holds the backends that adapters asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.nn import functional

from staleproof.ops.reference.nvfp4 import quantize_nvfp4

Tensors = Sequence[torch.Tensor]
CHOSEN: list[Any] = []
MODULES: dict[str, dict[str, Any]] = {}
E4M3 = torch.float8_e4m3fn


def of(*modules: str) -> Callable[[Any], Any]:
    """Put a function or a class into modules, under its name without the underscore at its end."""

    def put(value: Any) -> Any:
        for module in modules:
            also(module, **{value.__name__.removesuffix("_"): value})
        return value

    return put


def also(module: str, **members: Any) -> None:
    """Put these into a module under their names."""
    MODULES.setdefault(module, {}).update(members)


@contextmanager
def installed() -> Iterator[None]:
    """Let ``import`` find these packages and no others of their names."""
    made: dict[str, Any] = {}
    for name, members in MODULES.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            made.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end]))).__path__ = []
        vars(made[name]).update(members)

    def taken_out() -> dict[str, Any]:
        return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in made}

    before = taken_out()
    sys.modules.update(made)
    try:
        yield
    finally:
        taken_out()
        sys.modules.update(before)


class OnGpu(torch.overrides.TorchFunctionMode):
    """A tensor that an adapter makes lies on the device that it names; ``cuda`` is the CPU here."""

    MAKERS: ClassVar = "zeros", "ones", "empty", "full", "arange", "eye", "tensor"
    MAKES: ClassVar = {getattr(torch, name) for name in MAKERS}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, caller = dict(kwargs or {}), sys._getframe(1)
        if caller.f_code.co_name == "call":
            # What dirties the memory of torch.empty.
            caller = caller.f_back or caller
        file = caller.f_code.co_filename
        # Those of transformers move what they make to where the logits are.
        if function in self.MAKES and "staleproof/kernels" in file and "transformers" not in file:
            assert "device" in kwargs, f"{function.__name__} without a device"
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        if function is torch.zeros and isinstance(args[0], int) and args[0] >= 2**26:
            return function(1, **kwargs).expand(args[0])
        return function(*args, **kwargs)


# Attention


def attend(q: torch.Tensor, starts: Any, keys: Tensors, values: Tensors, scale: float) -> Tensors:
    """Causal; q (tokens, heads, dim), keys and values a request (n, kv_heads, dim); rows past the last: 0."""
    out = q.new_zeros(*q.shape[:2], values[0].shape[-1])
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    starts = torch.as_tensor(starts).tolist()
    for (start, end), k, v in zip(pairwise(starts), keys, values, strict=True):
        if len(k) and end > start:
            k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->qhk", q[start:end].double(), k) * scale
            last = torch.arange(len(k) - (end - start), len(k))
            scores = scores.masked_fill(torch.arange(len(k)) > last[:, None, None], float("-inf"))
            out[start:end] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
            lse[start:end] = scores.logsumexp(-1).float()
    return out, lse


def paged(cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
    """The tokens of each request; cache (pages, size, kv_heads, dim)."""
    assert (cache.ndim, table.dtype, lengths.dtype) == (4, torch.int32, torch.int32)
    size = cache.shape[1]
    return [
        cache[row[: -(-n // size)].long()].flatten(0, 1)[:n]
        for row, n in zip(table, lengths.tolist(), strict=True)
    ]


def listed(buffer: torch.Tensor, starts: torch.Tensor, indices: torch.Tensor) -> list[torch.Tensor]:
    """The tokens of each request; buffer (slots, kv_heads, dim)."""
    assert (buffer.ndim, starts.dtype, len(indices)) == (3, torch.int32, int(starts[-1]))
    return [buffer[indices[start:end].long()] for start, end in pairwise(starts.tolist())]


def into(out: torch.Tensor, found: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    assert out.shape == found.shape, (out.shape, found.shape)
    out[:rows] = found[:rows].to(out.dtype)
    return out


def one_each(q: torch.Tensor) -> range:
    return range(len(q) + 1)


@of("vllm.v1.attention.ops.triton_decode_attention")
def decode_attention_fwd(
    q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits, sm_scale,
    page_size=1,
):  # fmt: skip
    assert attn_logits.dtype == torch.float32
    assert page_size == k_buffer.shape[1]
    assert attn_logits.shape == (*q.shape[:2], num_kv_splits, o.shape[-1] + 1)
    k, v = (paged(x, req_to_token, b_seq_len) for x in (k_buffer, v_buffer))
    found = attend(q, one_each(q), k, v, sm_scale)
    into(o, found[0]), into(lse, found[1])


def _right_lengths(table, size, starts, q_len, kv_len):
    assert (q_len, kv_len) == (int(starts.diff().max()), table.shape[1] * size)


def attend_pages(q, k, v, starts, q_len, lengths, kv_len, table, scale):
    _right_lengths(table, k.shape[1], starts, q_len, kv_len)
    keys, values = (paged(x, table, lengths) for x in (k, v))
    return attend(q, starts, keys, values, scale)


@of("vllm.v1.attention.ops.triton_unified_attention")
def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
    block_table, softcap, q_descale, k_descale, v_descale,
):  # fmt: skip
    assert (causal, window_size, softcap, q_descale, k_descale, v_descale) == (
        True, (-1, -1), 0, None, None, None,
    )  # fmt: skip
    given = cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, block_table, softmax_scale
    into(out, attend_pages(q, k, v, *given)[0], int(cu_seqlens_q[-1]))


def _after_a_prefix(q, starts, prefix, new, scale):
    """K and V of the query tokens come beside those of the prefix."""
    spans = [*pairwise(starts.tolist())]
    both = [
        [torch.cat([a, x[s:e]]) for a, (s, e) in zip(old, spans, strict=True)]
        for old, x in zip(prefix, new, strict=True)
    ]
    return attend(q, starts, *both, scale)[0]


@of("vllm.v1.attention.ops.prefix_prefill")
def context_attention_fwd(
    q, k, v, o, kv_cache_dtype, k_cache, v_cache, b_loc, b_start_loc, b_seq_len, max_seq_len, max_input_len,
    k_scale, v_scale, sm_scale=None,
):  # fmt: skip
    size, x = k_cache.shape[3], 16 // k_cache.element_size()
    assert (kv_cache_dtype, k_cache.shape[4], k_scale.item(), v_scale.item()) == ("auto", x, 1.0, 1.0)
    _right_lengths(b_loc, size, b_start_loc, max_input_len, max_seq_len)
    q_lens = b_start_loc.diff()
    live = (b_seq_len > 0).int()
    prefix = ((b_seq_len - q_lens) * live).int()
    caches = k_cache.permute(0, 3, 1, 2, 4).flatten(3), v_cache.permute(0, 3, 1, 2)
    old = [paged(cache, b_loc, prefix) for cache in caches]
    found = _after_a_prefix(q, b_start_loc, old, (k, v), sm_scale)
    found[torch.repeat_interleave(b_seq_len == 0, q_lens).nonzero()] = 0
    into(o, found, int(b_start_loc[-1]))


@of("vllm.vllm_flash_attn")
def flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, *, seqused_k, block_table, softmax_scale, causal, out,
    fa_version, q_v=None, num_splits=0,
):  # fmt: skip
    CHOSEN.append((fa_version, num_splits))
    assert causal
    # With q_v, V is the latent, which is part of the keys too.
    q, k = (q, k) if q_v is None else (torch.cat([q_v, q], -1), torch.cat([v, k], -1))
    given = cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, block_table, softmax_scale
    return into(out, attend_pages(q, k, v, *given)[0], int(cu_seqlens_q[-1]))


@of("vllm.v1.attention.ops.flashmla")
def get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
    assert (num_heads_per_head_k, num_heads_k) == (16, 1)
    return ("plan", cache_seqlens), "splits"


def _flash_mla(q, kv, table, lengths, head_dim_v, scale):
    assert (q.ndim, q.shape[1], kv.shape[2]) == (4, 1, 1)
    keys = paged(kv, table, lengths)
    out, lse = attend(q[:, 0], one_each(q), keys, [k[..., :head_dim_v] for k in keys], scale)
    return out[:, None], lse[..., None]


@of("vllm.v1.attention.ops.flashmla")
def flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, splits, scale):
    assert (metadata[0], splits) == ("plan", "splits")
    assert metadata[1] is cache_seqlens
    return _flash_mla(q, k_cache, block_table, cache_seqlens, head_dim_v, scale)


def _legacy(q, k_cache, block_table, cache_seqlens, head_dim_v, plan, splits, scale, *, use_legacy):
    assert (plan, splits, use_legacy) == ("plan", None, True)
    return _flash_mla(q, k_cache, block_table, cache_seqlens, head_dim_v, scale)


also("flash_mla", get_mla_metadata=lambda: ("plan", None), flash_mla_with_kvcache=_legacy)


def _cute(q, k, v, *, cu_seqlens_q, max_seqlen_q, max_seqlen_k, seqused_k, page_table, softmax_scale, causal):
    assert causal
    given = cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, page_table, softmax_scale
    return attend_pages(q, k, v, *given)


also("flash_attn.cute", flash_attn_varlen_func=_cute)


@of("sglang.kernels.ops.attention.decode_attention")
def decode_attention_fwd_(
    q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits, max_kv_splits,
    sm_scale, k_scale, v_scale,
):  # fmt: skip
    assert num_kv_splits.tolist() == [max_kv_splits] * len(q)
    assert (k_scale, v_scale) == (1.0, 1.0)
    assert attn_logits.dtype == attn_lse.dtype == torch.float32
    assert attn_logits.shape == (*attn_lse.shape, o.shape[-1]) == (*q.shape[:2], max_kv_splits, o.shape[-1])
    keys, values = (listed(x, kv_indptr, kv_indices) for x in (k_buffer, v_buffer))
    into(o, attend(q, one_each(q), keys, values, sm_scale)[0])


_EXTEND = "sglang.kernels.ops.attention.extend_attention"


@of(_EXTEND)
def extend_attention_fwd(
    q_extend, k_extend, v_extend, o_extend, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices,
    custom_mask, is_causal, mask_indptr, max_len_extend, k_scale, v_scale, sm_scale=None,
):  # fmt: skip
    assert (custom_mask, is_causal, mask_indptr, k_scale, v_scale) == (None, True, None, 1.0, 1.0)
    assert max_len_extend == int(qo_indptr.diff().max())
    old = [listed(x, kv_indptr, kv_indices) for x in (k_buffer, v_buffer)]
    found = _after_a_prefix(q_extend, qo_indptr, old, (k_extend, v_extend), sm_scale)
    into(o_extend, found, int(qo_indptr[-1]))


@of(_EXTEND)
def extend_attention_fwd_unified(
    q, o, k_buffer, v_buffer, k_scale, v_scale, qo_indptr, kv_indptr, kv_indices, prefix_lens,
    max_len_extend, sm_scale=None,
):  # fmt: skip
    assert (k_scale, v_scale, max_len_extend) == (1.0, 1.0, int(qo_indptr.diff().max()))
    assert prefix_lens.tolist() == (kv_indptr.diff() - qo_indptr.diff()).tolist()
    keys, values = (listed(x, kv_indptr, kv_indices) for x in (k_buffer, v_buffer))
    into(o, attend(q, qo_indptr, keys, values, sm_scale)[0], int(qo_indptr[-1]))


class _Planned:
    """FlashInfer's wrappers: a plan of starts and pages, then launches."""

    # Its documentation recommends 128 MiB.
    layout, room = "NHD", 2**27

    def __init__(self, workspace: torch.Tensor, *layout: str, backend: str = "auto") -> None:
        assert (workspace.dtype, workspace.numel()) == (torch.uint8, self.room)
        assert not workspace[:64].any()
        assert layout == ((self.layout,) if self.layout else ())
        self.backend = backend
        CHOSEN.append(backend)

    def keys(self, cache: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        starts = self.starts.tolist()
        assert (cache.shape[1], self.indices.dtype, len(self.indices)) == (self.size, torch.int32, starts[-1])
        return [
            cache[self.indices[s:e].long()].flatten(0, 1)[:n]
            for (s, e), n in zip(pairwise(starts), lengths, strict=True)
        ]


class _Pages(_Planned):
    def plan_pages(self, starts, indices, last_page_len, heads, kv_heads, head_dim, page_size, scale):
        self.starts, self.indices, self.size, self.scale = starts, indices, page_size, scale
        counts = starts.diff()
        self.lengths = [(n - 1) * page_size + last if n else 0 for n, last in
                        zip(counts.tolist(), last_page_len.tolist(), strict=True)]  # fmt: skip
        # The last page of an empty request holds no tokens.
        assert not last_page_len[counts == 0].any()
        self.sizes = heads, kv_heads, head_dim

    def attend(self, q, cache, starts, out):
        k, v = cache
        assert (q.shape[1], k.shape[2], q.shape[2], q.dtype) == (*self.sizes, self.dtype)
        found = attend(q, starts, *(self.keys(x, self.lengths) for x in (k, v)), self.scale)
        return into(out, found[0])


@of("flashinfer.decode")
class BatchDecodeWithPagedKVCacheWrapper(_Pages):
    room = 2**26

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        q_data_type, kv_data_type, sm_scale,
    ):  # fmt: skip
        assert q_data_type == kv_data_type
        self.dtype = q_data_type
        given = indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, sm_scale
        self.plan_pages(*given)

    def run(self, q, paged_kv_cache, *, out):
        return self.attend(q, paged_kv_cache, one_each(q), out)


@of("flashinfer.prefill")
class BatchPrefillWithPagedKVCacheWrapper(_Pages):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, *, causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert causal
        assert q_data_type == kv_data_type
        self.dtype, self.rows = q_data_type, qo_indptr
        given = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads
        self.plan_pages(*given, head_dim_qk, page_size, sm_scale)

    def run(self, q, paged_kv_cache, *, out):
        assert len(q) == int(self.rows[-1])
        return self.attend(q, paged_kv_cache, self.rows, out)


@of("flashinfer.mla")
class BatchMLAPagedAttentionWrapper(_Planned):
    layout = ""

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
        causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        self.starts, self.indices, self.size, self.rows = kv_indptr, kv_indices, page_size, qo_indptr
        self.sizes, self.lengths, self.scale = (num_heads, head_dim_ckv, head_dim_kpe), kv_len_arr, sm_scale
        assert (qo_indptr.dtype, kv_indptr.dtype) == (torch.int32,) * 2
        assert causal == bool((qo_indptr.diff() > 1).any())
        assert q_data_type == kv_data_type

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, *, out, lse=None, return_lse=False, kv_len=None,
            page_table=None, return_lse_base_on_e=False):  # fmt: skip
        q, cache = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1).unsqueeze(2)
        if self.backend == "cutlass":
            assert page_table.shape[1] * cache.shape[1] % 128 == 0
            keys, rows, scale = paged(cache, page_table, kv_len), one_each(q), 192**-0.5
        else:
            assert (q.shape[1], q_nope.shape[2], q_pe.shape[2]) == self.sizes
            keys, rows, scale = self.keys(cache, self.lengths.tolist()), self.rows, self.scale
            assert return_lse
            assert return_lse_base_on_e
        found = attend(q, rows, keys, [k[..., :512] for k in keys], scale)
        into(out, found[0])
        return (out, into(lse, found[1])) if return_lse else out


@of("flashinfer.decode")
def trtllm_batch_decode_with_kv_cache_mla(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables,
    seq_lens, max_seq_len, *, out, bmm1_scale, bmm2_scale,
):  # fmt: skip
    assert (workspace_buffer.dtype, workspace_buffer.numel()) == (torch.uint8, 2**27)
    assert not workspace_buffer[:64].any()
    assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, bmm2_scale) == (128, 512, 64, 1.0)
    size = kv_cache.shape[2]
    assert kv_cache.shape[1] == 1
    assert max_seq_len == block_tables.shape[1] * size
    assert max_seq_len % 128 == 0
    # A program that finds no key follows no entry of the table.
    keys = paged(kv_cache[:, 0, :, None], block_tables, seq_lens)
    b, q_len = query.shape[:2]
    found = attend(query.flatten(0, 1), range(0, b * q_len + 1, q_len), keys, [k[..., :512] for k in keys],
                   bmm1_scale)[0]  # fmt: skip
    into(out, found.unflatten(0, (b, q_len)))


@of("torch.nn.attention.varlen")
def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, seqused_k, block_table, window_size
):
    # A window without an end on the left and of no token on the right is causal.
    assert (cu_seq_k, window_size, key.shape[1] % 256) == (None, (-1, 0), 0)
    return attend_pages(query, key, value, cu_seq_q, max_q, seqused_k, max_k, block_table, scale)[0]


def flash_attention_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale,
    seqused_k,
):  # fmt: skip
    assert (dropout_p, is_causal, return_debug_mask) == (0.0, True, False)
    assert (max_q, [max_k]) == (int(cum_seq_q.diff().max()), cum_seq_k.diff().unique().tolist())
    keys, values = (
        [x[start : start + n] for start, n in zip(cum_seq_k.tolist(), seqused_k.tolist(), strict=False)]
        for x in (key, value)
    )
    out, lse = attend(query, cum_seq_q, keys, values, scale)
    return out, lse.T, None, None, None


# Merges, writes and states


def merged(a, lse_a, b, lse_b, base=torch.e):
    """Outputs (tokens, heads, dim) of two parts, and their logarithms (tokens, heads) to a base."""
    assert lse_a.dtype == lse_b.dtype == torch.float32
    assert lse_a.shape == a.shape[:2]
    log = torch.tensor(base).double().log()
    lse = torch.stack([lse_a, lse_b]).double() * log
    total = lse.logsumexp(0)
    weight = torch.where(lse == float("-inf"), 0.0, (lse - total).exp())[..., None]
    out = torch.where(weight > 0, weight * torch.stack([a, b]).double(), 0.0).sum(0)
    return out.to(a.dtype), (total / log).float()


@of("vllm.v1.attention.ops.triton_merge_attn_states", "vllm._custom_ops")
def merge_attn_states(output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse):
    assert prefix_lse.is_contiguous()
    assert suffix_lse.is_contiguous()
    assert output_lse.is_contiguous()
    out, lse = merged(prefix_output, prefix_lse.T, suffix_output, suffix_lse.T)
    into(output, out), into(output_lse, lse.T)


# Logarithms to the base of 2.
also("flashinfer.triton.cascade", merge_state=lambda v_a, s_a, v_b, s_b: merged(v_a, s_a, v_b, s_b, 2.0))
also("sglang.kernels.ops.attention.merge_state", merge_state_triton=merged)


@of("flashinfer.cascade")
def merge_state_(v_a, s_a, v_b, s_b):
    # It is compiled for these.
    assert v_a.shape[2] in (64, 128, 256)
    return merged(v_a, s_a, v_b, s_b, 2.0)


def _store(cache, slots, rows, pad):
    flat = cache.flatten(0, 1) if cache.ndim == rows.ndim + 1 else cache
    for slot, row in zip(slots.tolist(), rows, strict=True):
        if slot != pad:
            assert slot >= 0, f"slot {slot}"
            flat[slot] = row


@of("vllm._custom_ops")
def reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    assert (kv_cache_dtype, k_scale.item(), v_scale.item()) == ("auto", 1.0, 1.0)
    _store(key_cache, slot_mapping, key, -1), _store(value_cache, slot_mapping, value, -1)


_FLASH = "triton_reshape_and_cache_flash"
also(f"vllm.v1.attention.ops.{_FLASH}", **{_FLASH: reshape_and_cache_flash})


@of("vllm._custom_ops")
def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
    assert (kv_cache_dtype, scale.item(), kv_cache.is_contiguous()) == ("auto", 1.0, True)
    _store(kv_cache, slot_mapping, torch.cat([kv_c, k_pe], -1), -1)


@of("sglang.kernels.ops.kvcache.mla_buffer")
def set_mla_kv_buffer_triton(kv_buffer, loc, cache_k_nope, cache_k_rope):
    rows = cache_k_nope if cache_k_rope is None else torch.cat([cache_k_nope, cache_k_rope], -1)
    assert kv_buffer.shape[1:] == rows.shape[1:]
    _store(kv_buffer, loc, rows, 0)


def _conv(pad: int) -> Callable[..., torch.Tensor]:
    def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, *, conv_state_indices):
        assert (bias, activation) == (None, None)
        out = torch.zeros_like(x)
        for row, index in enumerate(conv_state_indices.tolist()):
            if index != pad:
                window = torch.cat([conv_state[index], x[row, :, None]], -1)
                out[row] = (window.float() * weight.float()).sum(-1)
                conv_state[index] = window[:, 1:]
        return out

    return causal_conv1d_update


also("vllm.model_executor.layers.mamba.ops.causal_conv1d", causal_conv1d_update=_conv(0))
also("sglang.kernels.ops.mamba.causal_conv1d_triton", causal_conv1d_update=_conv(-1))


# Rows


def normed(x, weight, eps, dtype=None):
    assert weight.shape == x.shape[1:]
    assert weight.dtype == (dtype or x.dtype)
    assert eps == 1e-6
    x64 = x.double()
    return (x64 * (x64.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()).to(x.dtype)


@of("fla.modules.norm.layernorm")
def rms_norm(x, weight, bias, eps=1e-5):
    assert bias is None
    return normed(x, weight, 1e-6)


@of("liger_kernel.ops.rms_norm")
def rms_norm_forward(X, W, eps, offset, casting_mode, row_mode):
    assert (offset, casting_mode, row_mode) == (0.0, "llama", None)
    return normed(X, W, eps), X, None


@of("liger_kernel.ops.layer_norm")
def layer_norm_forward(X, W, B, eps):
    assert (W.dtype, B.dtype, eps) == (X.dtype, X.dtype, 1e-6)
    return functional.layer_norm(X.double(), W.shape, W.double(), B.double(), eps).to(X.dtype), X, None


def _softmax(x):
    return x.double().softmax(-1).to(x.dtype)


also("fla.modules.norm.l2norm", l2norm=lambda x: functional.normalize(x.double(), dim=-1).to(x.dtype))
also("liger_kernel.ops.softmax", softmax=_softmax, _softmax_forward=lambda x: (_softmax(x), "tile"))
also("quack.softmax", softmax=_softmax, softmax_fwd=_softmax)
also("quack.rmsnorm", rmsnorm=lambda x, weight: normed(x, weight, 1e-6, torch.float32))
also("sglang.kernels.ops.layernorm.fused_rmsnorm", fused_rmsnorm=normed)
also("flashinfer.norm", rmsnorm=normed, gemma_rmsnorm=lambda x, weight, eps: normed(x, 1 + weight, eps))
also("flashinfer.triton.norm", rms_norm=lambda x, weight, out, eps: into(out, normed(x, weight, eps)))
also("flashinfer.sampling", softmax=_softmax)
# Its real form keeps both for the backward pass.
also("liger_kernel.ops.swiglu", swiglu_forward=lambda a, b: (a, b, silu_and_mul(torch.cat([a, b], -1))))


@of("flashinfer.norm", "vllm._custom_ops")
def fused_add_rms_norm(input, residual, weight, eps):
    residual += input
    input.copy_(normed(residual, weight, eps))


also("flashinfer.norm", fused_add_rmsnorm=fused_add_rms_norm)
also("flashinfer.triton.norm", rms_norm_add_residual=fused_add_rms_norm)


@of("flashinfer.norm")
def rmsnorm_quant(out, input, weight, scale, eps):
    assert (out.dtype, scale.item()) == (E4M3, 1.0)
    out.copy_(normed(input, weight, eps).float().clamp(-448, 448))


@of("flashinfer.triton.activation", "flashinfer.activation")
def silu_and_mul(x):
    gate, up = x.double().chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype)


@of("flashinfer.sampling")
def top_k_renorm_probs(probs, top_k):
    kept = probs * (probs >= probs.topk(top_k, -1).values[:, -1:])
    return kept / kept.sum(-1, keepdim=True)


@of("flashinfer.sampling")
def top_p_renorm_probs(probs, top_p):
    best, order = probs.sort(-1, descending=True)
    best = best * (best.cumsum(-1) - best < top_p)
    return torch.empty_like(probs).scatter(1, order, best / best.sum(-1, keepdim=True))


def _groups(x, size, dtype=E4M3, largest=448.0):
    """Values, and a scale for each group of columns."""
    parts = x.float().unflatten(-1, (-1, size))
    scales = parts.abs().amax(-1).clamp(min=1e-10) / largest
    scaled = (parts / scales[..., None]).clamp(-largest, largest)
    scaled = scaled.round() if dtype == torch.int8 else scaled
    return scaled.flatten(-2).to(dtype), scales


def _whole(x):
    scale = (x.float().abs().amax() / 448).reshape(1)
    return (x.float() / scale).clamp(-448, 448).to(E4M3), scale


@of("vllm.model_executor.layers.quantization.utils.fp8_utils")
def per_token_group_quant_fp8(x, group_size):
    CHOSEN.append(group_size)
    return _groups(x, group_size)


_FP8 = "sglang.kernels.ops.quantization.fp8_kernel"
also(_FP8, _per_token_group_quant_8bit_raw=per_token_group_quant_fp8)


def _fp8_quant(input, use_per_token_if_dynamic=False):
    return _groups(input, input.shape[1]) if use_per_token_if_dynamic else _whole(input)


def _nvfp4(a, a_global_sf):
    assert a_global_sf.item() == 1.0
    return quantize_nvfp4(a, a_global_sf)


also(
    "vllm._custom_ops",
    scaled_fp8_quant=_fp8_quant,
    rms_norm=lambda out, input, weight, epsilon: into(out, normed(input, weight, epsilon)),
    rms_norm_dynamic_per_token_quant=lambda x, weight, epsilon, quant_dtype: _groups(
        normed(x, weight, epsilon), x.shape[1], quant_dtype
    ),
)
_INT8 = "sglang.kernels.ops.quantization.int8_kernel"
also(_INT8, per_token_quant_int8=lambda x: _groups(x, x.shape[1], torch.int8, 127.0))
also("sglang.kernels.ops.quantization.act_quant_tilelang", act_quant=lambda x: _groups(x, 128))
also("flashinfer", nvfp4_quantize=_nvfp4)


@of(_INT8)
def per_token_group_quant_int8(x, group_size):
    CHOSEN.append(group_size)
    return _groups(x, group_size, torch.int8, 127.0)


@of(_FP8)
def per_tensor_quant_mla_fp8(x, x_s_out):
    assert (x.ndim, x_s_out.dtype, x_s_out.tolist()) == (3, torch.float32, [0.0])
    values, scale = _whole(x)
    return values, x_s_out.copy_(scale)


@of("flashinfer")
def mxfp8_quantize(input, is_sf_swizzled_layout=True):
    assert not is_sf_swizzled_layout
    parts = input.float().unflatten(-1, (-1, 32))
    exponent = (parts.abs().amax(-1) / 448).log2().ceil()
    values = (parts / exponent.exp2()[..., None]).clamp(-448, 448).flatten(-2).to(E4M3)
    return values, (exponent + 127).to(torch.uint8).flatten()


# Packed sequences


def _gated_delta_rule(length: torch.dtype) -> Callable[..., Any]:
    def rule(q, k, v, g, *, beta, use_qk_l2norm_in_kernel, cu_seqlens):
        assert (len(q), use_qk_l2norm_in_kernel, cu_seqlens.dtype) == (1, True, length)
        out = torch.zeros_like(v)
        q, k, v, g, beta = (x[0].double() for x in (q, k, v, g, beta))
        q, k = (functional.normalize(x, dim=-1) for x in (q, k))
        for start, end in pairwise(cu_seqlens.tolist()):
            state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
            for t in range(start, end):
                state = state * g[t].exp()[:, None, None]
                write = beta[t][:, None] * (v[t] - (state * k[t][..., None]).sum(1))
                state = state + k[t][..., None] * write[:, None]
                out[0, t] = (state * q[t][..., None]).sum(1) * k.shape[2] ** -0.5
        return out, None

    return rule


also("fla.ops.gated_delta_rule", chunk_gated_delta_rule=_gated_delta_rule(torch.int32))
also("fla.ops.gated_delta_rule", fused_recurrent_gated_delta_rule=_gated_delta_rule(torch.int64))


@of("fla.modules.causal_conv1d")
def causal_conv1d(x, weight, *, cu_seqlens, backend):
    assert (len(x), weight.dtype, backend) == (1, x.dtype, "triton")
    out = torch.zeros_like(x)
    for start, end in pairwise(cu_seqlens.tolist()):
        padded = functional.pad(x[0, start:end].double(), (0, 0, weight.shape[1] - 1, 0))
        for t in range(end - start):
            out[0, start + t] = (padded[t : t + weight.shape[1]] * weight.T.double()).sum(0)
    return out, None


@of("deep_gemm")
def m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, expected_m):
    assert a.dtype == b.dtype == d.dtype == torch.bfloat16
    assert expected_m > 0
    for group, rows in enumerate(masked_m.tolist()):
        d[group, :rows] = (a[group, :rows].double() @ b[group].double().T).bfloat16()


# Routing and experts


def best(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Distinct ids, whatever a row holds: NaN is the least."""
    scores = torch.where(scores.isnan(), float("-inf"), scores)
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :k]


def route(scores, k, bias=None, renormalize=False, groups=(1, 1)):
    ranked = torch.where(scores.isnan(), float("-inf"), scores)
    ranked = ranked if bias is None else ranked + bias.nan_to_num(0.0)
    parts = ranked.unflatten(-1, (groups[0], -1))
    chosen = best(parts.topk(min(2, parts.shape[-1])).values.sum(-1), groups[1])
    kept = torch.zeros_like(parts[..., 0], dtype=torch.bool).scatter(1, chosen, True)
    # Other groups come last, by a number below that of every score.
    ids = best(torch.where(kept[..., None], parts.clamp(min=-1e30), float("-inf")).flatten(1), k)
    weights = scores.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids.int()


def _vllm_routing(name, score):
    def topk(topk_weights, topk_ids, token_expert_indices, gating_output, renormalize, bias):
        assert (topk_weights.dtype, renormalize) == (torch.float32, False)
        assert topk_ids.dtype == token_expert_indices.dtype == torch.int32
        assert topk_ids.shape == token_expert_indices.shape == topk_weights.shape
        weights, ids = route(score(gating_output), topk_ids.shape[1], bias)
        into(topk_weights, weights), into(topk_ids, ids), token_expert_indices.zero_()

    also("vllm._custom_ops", **{name: topk})


_vllm_routing("topk_softmax", lambda x: x.softmax(-1))
_vllm_routing("topk_sigmoid", torch.sigmoid)


@of("vllm._custom_ops")
def grouped_topk(scores, num_expert_group, topk_group, topk, renormalize, routed_scaling_factor, bias):
    assert (renormalize, routed_scaling_factor) == (True, 1.0)
    return route(scores, topk, bias, True, (num_expert_group, topk_group))


@of("sglang.kernels.ops.moe.moe_fused_gate")
def moe_fused_gate(scores, bias, topk, scoring_func, num_expert_group=1, topk_group=1):
    CHOSEN.append(scoring_func)
    if scoring_func == "softmax":
        # The bias stays in the weights.
        return route((scores if bias is None else scores + bias).softmax(-1), topk, None, True)
    assert (scoring_func, bias is None) == ("sigmoid", False)
    return route(scores.sigmoid(), topk, bias, True, (num_expert_group, topk_group))


@of("sglang.kernels.ops.moe.gate_topk")
def gate_topk(x, k):
    ids = best(x, k).int()
    return x.gather(1, ids.long()), ids


@of("sglang.kernels.ops.moe.router")
def fused_moe_router_cudacore(x, router_weight, topk, moe_softcapping, correction_bias):
    assert (moe_softcapping, router_weight.dtype) == (0.0, x.dtype)
    logits = _product(x, router_weight)
    # The bias stays in the weights.
    return route((logits if correction_bias is None else logits + correction_bias).softmax(-1), topk)


def _product(x, weight):
    """A row without a NaN or inf keeps its numbers; any other is NaN."""
    return torch.where(x.isfinite().all(-1, keepdim=True), x.nan_to_num() @ weight.T, float("nan"))


@of("flashinfer")
def top_k(input, k, sorted=False):
    assert sorted
    ids = best(input, k)
    return input.gather(1, ids), ids


@of("quack.topk")
def topk(x, k, softmax=False):
    ids = best(x, k)
    values = x.gather(1, ids)
    return values.softmax(-1) if softmax else values, ids.int()


# Models whose configuration has another name for the number of their experts than ``num_experts``.
LOCAL = "MixtralTopKRouter", "GptOssTopKRouter", "MiniMaxM2TopKRouter", "DeepseekV3TopkRouter"
EXPERTS = dict.fromkeys(LOCAL, "num_local_experts")


def _router(name, model, score, fields, renormalize, biased=""):
    """A router of transformers, whose ``config`` holds these fields as the model's does."""

    class Router(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            read = [getattr(config, field) for field in fields]
            assert read == [*fields.values()], f"{name}: {read}"
            self.top_k = config.num_experts_per_tok
            experts = getattr(config, EXPERTS.get(name, "num_experts"))
            self.groups = getattr(config, "n_group", 1), getattr(config, "topk_group", 1)
            shape = experts, config.hidden_size
            self.weight = torch.nn.Parameter(torch.full(shape, float("nan")))
            if biased:
                self.register_parameter(biased, torch.nn.Parameter(torch.full(shape[:1], float("nan"))))

        def forward(self, hidden, bias=None):
            logits = _product(hidden, self.weight)
            correction = bias
            if biased == "bias":
                logits = logits + self.bias
            elif biased:
                correction = torch.nan_to_num(getattr(self, biased))
            with torch.no_grad():
                scores = score(logits)
                return logits, *route(scores, self.top_k, correction, renormalize, self.groups)

    also(f"transformers.models.{model}.modeling_{model}", **{name: Router})


_router("MixtralTopKRouter", "mixtral", _softmax, {}, True)
_router("GptOssTopKRouter", "gpt_oss", _softmax, {}, True, "bias")
_router("Qwen3MoeTopKRouter", "qwen3_moe", _softmax, {"norm_topk_prob": True}, True)
_router("OlmoeTopKRouter", "olmoe", _softmax, {"norm_topk_prob": False}, False)
_router("MiniMaxM2TopKRouter", "minimax_m2", torch.sigmoid, {}, True)
_router(
    "DeepseekV3TopkRouter", "deepseek_v3", torch.sigmoid,
    {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 4, "topk_group": 2}, True,
    "e_score_correction_bias",
)  # fmt: skip


def expert_sum(x, w1, w2, ids, weights, first=0):
    """x (tokens, hidden); experts from the number ``first`` on; gate, then up."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for token, slot in (ids >= 0).nonzero().tolist():
        expert = int(ids[token, slot]) - first
        if 0 <= expert < len(w1):
            gate, up = (w1[expert].float() @ x[token].float()).chunk(2)
            out[token] += weights[token, slot] * (w2[expert].float() @ (functional.silu(gate) * up))
    return out.to(x.dtype)


@of("transformers.models.mixtral.modeling_mixtral")
class MixtralExperts(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        assert (config.hidden_act, config._experts_implementation) == ("silu", "eager")
        e, h, i = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj, self.down_proj = (
            torch.nn.Parameter(torch.full(shape, float("nan"))) for shape in ((e, 2 * i, h), (e, h, i))
        )
        self.shapes = self.gate_up_proj.shape, self.down_proj.shape

    def forward(self, hidden_states, top_k_index, top_k_weights):
        assert self.shapes == (self.gate_up_proj.shape, self.down_proj.shape)
        assert top_k_weights.dtype == hidden_states.dtype
        return expert_sum(hidden_states, self.gate_up_proj, self.down_proj, top_k_index, top_k_weights)


@of("liger_kernel.ops.fused_moe")
class LigerFusedMoEFunction:
    @staticmethod
    def apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
        assert (top_k_index.dtype, top_k_weights.dtype) == (torch.int32, x.dtype)
        return expert_sum(x, gate_up_proj, down_proj, top_k_index, top_k_weights)


@of("flashinfer.fused_moe")
def cutlass_fused_moe(
    input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output_dtype,
    *, quant_scales, output, ep_size=1, ep_rank=0, enable_alltoall=False,
):  # fmt: skip
    assert token_selected_experts.dtype == torch.int32
    assert token_final_scales.dtype == torch.float32
    assert (output_dtype, quant_scales, enable_alltoall) == (input.dtype, None, ep_size > 1)
    assert fc1_expert_weights.is_contiguous()
    assert fc2_expert_weights.is_contiguous()
    up, gate = fc1_expert_weights.chunk(2, 1)
    local = len(fc1_expert_weights)
    CHOSEN.append((ep_size, ep_rank, local))
    into(output, expert_sum(input, torch.cat([gate, up], 1), fc2_expert_weights, token_selected_experts,
                            token_final_scales, ep_rank * local))  # fmt: skip


@of("vllm._custom_ops")
def moe_align_block_size(topk_ids, num_experts, block_size, sorted_ids, experts_ids, num_tokens_post_pad):
    assert {x.dtype for x in (topk_ids, sorted_ids, experts_ids, num_tokens_post_pad)} == {torch.int32}
    # The room that vLLM asks callers for.
    assert len(sorted_ids) >= topk_ids.numel() + num_experts * (block_size - 1)
    sorted_ids.fill_(topk_ids.numel()), experts_ids.fill_(-1)
    at = 0
    for expert in range(num_experts):
        slots = (topk_ids.flatten() == expert).nonzero().flatten()
        blocks = -(-len(slots) // block_size)
        sorted_ids[at * block_size :][: len(slots)] = slots.int()
        experts_ids[at : at + blocks] = expert
        at += blocks
    num_tokens_post_pad.fill_(at * block_size)


torch_attention = SimpleNamespace(varlen_attn=MODULES.pop("torch.nn.attention.varlen")["varlen_attn"])
