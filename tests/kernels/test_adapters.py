"""MLA kernels of other packages get from our adapters what a right decode needs.

In the place of a package stands a function that takes the real one's arguments, refuses what the kernel
would misread, and decodes in float64.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from staleproof.kernels import flashinfer, mla, vllm
from staleproof.ops.reference.mla_decode import mla_decode

Tensors = Sequence[torch.Tensor]


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
    assert (table.dtype, lengths.dtype) == (torch.int32, torch.int32)
    size = cache.shape[1]
    rows = zip(table, lengths.tolist(), strict=True)
    return [cache[row[: -(-n // size)].long()].flatten(0, 1)[:n] for row, n in rows]


class Planned:
    """FlashInfer's wrappers: a plan of starts and pages, then launches."""

    def __init__(self, workspace: torch.Tensor, *layout: str, backend: str = "auto") -> None:
        # Its documentation recommends 128 MiB, which start at zero.
        assert (workspace.dtype, workspace.numel()) == (torch.uint8, 2**27)
        self.backend = backend

    def keys(self, cache: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
        assert (cache.shape[1], self.indices.dtype) == (self.size, torch.int32)
        rows = zip(pairwise(self.starts.tolist()), lengths, strict=True)
        return [cache[self.indices[s:e].long()].flatten(0, 1)[:n] for (s, e), n in rows]


class Prefill(Planned):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, *, causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert causal
        assert q_data_type == kv_data_type
        self.rows, self.starts, self.indices = qo_indptr, paged_kv_indptr, paged_kv_indices
        self.size, self.scale, counts = page_size, sm_scale, paged_kv_indptr.diff()
        # The last page of an empty request holds no tokens.
        assert not paged_kv_last_page_len[counts == 0].any()
        self.lengths = ((counts - 1).clamp(min=0) * page_size + paged_kv_last_page_len).tolist()

    def run(self, q, paged_kv_cache, *, out):
        keys, values = (self.keys(cache, self.lengths) for cache in paged_kv_cache)
        return out.copy_(attend(q, self.rows, keys, values, self.scale)[0])


class MLA(Planned):
    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe, page_size,
        causal, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        self.starts, self.indices, self.size, self.rows = kv_indptr, kv_indices, page_size, qo_indptr
        self.lengths, self.scale = kv_len_arr, sm_scale
        assert (head_dim_ckv, head_dim_kpe, q_data_type) == (512, 64, kv_data_type)
        assert causal == bool((qo_indptr.diff() > 1).any())

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, *, out, lse=None, return_lse=False, kv_len=None,
            page_table=None, return_lse_base_on_e=False):  # fmt: skip
        q, cache = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1).unsqueeze(2)
        if self.backend == "cutlass":
            assert page_table.shape[1] * cache.shape[1] % 128 == 0
            keys, rows, scale = paged(cache, page_table, kv_len), range(len(q) + 1), 192**-0.5
        else:
            keys, rows, scale = self.keys(cache, self.lengths.tolist()), self.rows, self.scale
            assert return_lse
            assert return_lse_base_on_e
        found = attend(q, rows, keys, [k[..., :512] for k in keys], scale)
        out.copy_(found[0])
        return (out, lse.copy_(found[1])) if return_lse else out


def trtllm_batch_decode_with_kv_cache_mla(
    query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, block_tables,
    seq_lens, max_seq_len, *, out, bmm1_scale, bmm2_scale,
):  # fmt: skip
    assert not workspace_buffer[:64].any()
    assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim, bmm2_scale) == (128, 512, 64, 1.0)
    assert max_seq_len == block_tables.shape[1] * kv_cache.shape[2]
    assert max_seq_len % 128 == 0
    keys = paged(kv_cache[:, 0, :, None], block_tables, seq_lens)
    b, q_len = query.shape[:2]
    values, starts = [k[..., :512] for k in keys], range(0, b * q_len + 1, q_len)
    found = attend(query.flatten(0, 1), starts, keys, values, bmm1_scale)[0]
    out.copy_(found.unflatten(0, (b, q_len)))


def flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, *, seqused_k, block_table, softmax_scale, causal, out,
    fa_version, q_v=None, num_splits=0,
):  # fmt: skip
    assert (causal, fa_version, num_splits) == (True, 3, 0)
    # V is the latent, which is part of the keys too.
    table = block_table.clamp(0, len(k) - 1)
    keys = paged(torch.cat([v, k], -1), table, seqused_k)
    values = [x[..., : v.shape[-1]] for x in keys]
    out.copy_(attend(torch.cat([q_v, q], -1), cu_seqlens_q, keys, values, softmax_scale)[0])


@pytest.fixture
def packages(monkeypatch) -> Iterator[None]:
    """The packages that adapters import, and ``cuda`` as the CPU."""
    made = {
        "flashinfer": {},
        "flashinfer.mla": {"BatchMLAPagedAttentionWrapper": MLA},
        "flashinfer.prefill": {"BatchPrefillWithPagedKVCacheWrapper": Prefill},
        "flashinfer.decode": {"trtllm_batch_decode_with_kv_cache_mla": trtllm_batch_decode_with_kv_cache_mla},
        "vllm": {},
        "vllm.vllm_flash_attn": {"flash_attn_varlen_func": flash_attn_varlen_func},
    }
    for name, members in made.items():
        module = ModuleType(name)
        vars(module).update(members, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("zeros", "arange"):
        real = getattr(torch, name)

        def on_cpu(*args, real=real, **given):
            if str(given.get("device")) == "cuda":
                given["device"] = "cpu"
            # A workspace of 128 MiB need not be there.
            if args[0] == 2**27:
                return real(1, **given).expand(2**27)
            return real(*args, **given)

        monkeypatch.setattr(torch, name, on_cpu)


PEERS = {**flashinfer.flashinfer_peers(), "vllm_fa3": vllm.vllm_fa3(), "torch_sdpa": mla.torch_sdpa()}


ONE_TOKEN = "torch_sdpa", "vllm_fa3", "flashinfer_cutlass"


@pytest.mark.parametrize(
    ("name", "q_len"),
    [(name, q_len) for name in PEERS for q_len in (1, 2) if q_len == 1 or name not in ONE_TOKEN],
)
def test_peer_decodes_as_the_reference(packages, name, q_len):
    """Entries of the table past a request's pages are arbitrary, and one request is empty."""
    q, kv_cache = torch.randn(3, q_len, 16, 576), torch.randn(7, 64, 576)
    block_table = torch.tensor([[4, 2, 6], [3, 99, -1], [-1, 5, 5]], dtype=torch.int32)
    seq_lens, out = torch.tensor([130, 64, 0], dtype=torch.int32), torch.empty(3 * q_len, 16 * 512)
    scale = 192**-0.5 if name == "flashinfer_cutlass" else 0.07
    peer = replace(PEERS[name], unavailable_reason=None)
    found, lse = peer(q, kv_cache, block_table, seq_lens, softmax_scale=scale, out=out)
    want, want_lse = mla_decode(q, kv_cache, block_table, seq_lens, softmax_scale=scale)
    if q_len == 1:
        want, want_lse = want[:, 0], want_lse[:, 0]
    torch.testing.assert_close(found[:2], want[:2], rtol=1e-4, atol=1e-4)
    assert found.data_ptr() == out.data_ptr()
    if name in ("flashinfer_fa2", "flashinfer_fa3"):
        torch.testing.assert_close(lse[:2], want_lse[:2], rtol=1e-4, atol=1e-4)
    else:
        assert lse is None


def test_prefill_attends_to_the_pages_of_each_request(packages):
    q, k, v = torch.randn(4, 2, 64), torch.randn(5, 16, 1, 64), torch.randn(5, 16, 1, 64)
    table = torch.tensor([[4, 2], [3, 9], [-1, 1]], dtype=torch.int32)
    lengths, starts = (torch.tensor(x, dtype=torch.int32) for x in ([20, 16, 0], [0, 2, 3, 4]))
    out = torch.zeros_like(q)
    flashinfer.prefill(q, k, v, table, lengths, starts, 0.2, out, "fa2")()
    keys, values = (paged(cache, table.clamp(0, 4), lengths) for cache in (k, v))
    torch.testing.assert_close(out, attend(q, starts, keys, values, 0.2)[0])
