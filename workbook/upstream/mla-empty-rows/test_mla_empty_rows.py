# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The decode output of requests without tokens is defined: 0, with an lse of -inf."""

import math
from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.ops.clear_empty_rows import clear_empty_rows
from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

DEVICE = current_platform.device_type or "cpu"


def _stale(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=dtype, device=DEVICE)


def _lens(*lens: int) -> torch.Tensor:
    return torch.tensor(lens, dtype=torch.int32, device=DEVICE)


def _assert_cleared(out, lse, empty: list[int]) -> None:
    for row in range(len(out)):
        assert torch.all(out[row] == 0).item() == (row in empty), row
        assert torch.all(lse[row] == -math.inf).item() == (row in empty), row


@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_requests_without_tokens_are_cleared(query_len, dtype):
    # The kernel of 128 heads returns a slice for a model with fewer.
    out = _stale(4 * query_len, 6, 40, dtype=dtype)[:, :3]
    lse = _stale(4 * query_len, 6)[:, :3]
    clear_empty_rows(out, lse, _lens(5, 0, 7, 0))
    first, second = query_len, 3 * query_len
    empty = [*range(first, first + query_len), *range(second, second + query_len)]
    _assert_cleared(out, lse, empty)
    for row in {*range(4 * query_len)} - {*empty}:
        assert out[row].isnan().all() and lse[row].isnan().all()


def test_ragged_queries_and_rows_behind_the_last_request():
    # Two tokens, none, three of an empty request, one; two rows belong to nobody.
    out, lse = _stale(8, 2, 16), _stale(8, 2)
    clear_empty_rows(out, lse, _lens(9, 4, 0, 3), _lens(0, 2, 2, 5, 6))
    _assert_cleared(out, lse, [2, 3, 4, 6, 7])


def test_the_lse_may_be_left_out_and_no_row_is_no_error():
    out = _stale(2, 2, 16)
    clear_empty_rows(out, None, _lens(0, 1))
    assert torch.all(out[0] == 0) and out[1].isnan().all()
    clear_empty_rows(_stale(0, 2, 16), None, _lens(0, 1))


def test_triton_decode_writes_zeros_for_a_request_without_tokens():
    heads, rank, dim, page = 4, 32, 48, 16
    q = torch.randn(3, heads, dim, device=DEVICE)
    cache = torch.randn(4, page, 1, dim, device=DEVICE)
    table = _lens(1, 2, 3).unsqueeze(1)
    out, lse = _stale(3, heads, rank), _stale(3, heads)
    parts = _stale(3, heads, 2, rank + 1)
    decode_attention_fwd(
        q,
        cache,
        cache[..., :rank],
        out,
        lse,
        table,
        _lens(9, 0, 3),
        parts,
        2,
        1.0,
        page,
    )
    _assert_cleared(out, lse, [1])
    assert out[0].isfinite().all() and out[2].isfinite().all()


@pytest.mark.parametrize("need_lse", [True, False])
def test_cutlass_clears_what_its_kernel_leaves(monkeypatch, need_lse):
    try:
        from vllm.v1.attention.backends.mla import cutlass_mla
    except (ImportError, AssertionError) as error:
        pytest.skip(f"no CUTLASS MLA here: {error}")

    def decode_live_rows(out, lse, q_nope, *rest):
        out[:], lse[:] = math.nan, math.nan
        out[0] = 1.0
        if need_lse:
            lse[0] = 1.0

    monkeypatch.setattr(
        cutlass_mla.ops, "sm100_cutlass_mla_decode", decode_live_rows, raising=False
    )
    impl = object.__new__(cutlass_mla.CutlassMLAImpl)
    impl.need_to_return_lse_for_decode = need_lse
    impl.kv_cache_dtype, impl.scale, impl._num_kv_splits = "auto", 1.0, -1
    impl._workspace = SimpleNamespace(ensure_size=lambda *_: None, get_buf=lambda: None)
    decode = SimpleNamespace(
        seq_lens=_lens(4, 0), block_table=torch.zeros_like(_lens(1, 1)).unsqueeze(1)
    )
    bf16 = torch.bfloat16
    q = torch.zeros(2, 16, 512, dtype=bf16), torch.zeros(2, 16, 64, dtype=bf16)
    cache = torch.zeros(1, 128, 576, dtype=bf16)
    layer = SimpleNamespace(_q_scale_float=1.0, _k_scale_float=1.0)
    out, lse = impl.forward_mqa(
        tuple(part.to(DEVICE) for part in q),
        cache.to(DEVICE),
        SimpleNamespace(decode=decode),
        layer,
    )
    assert torch.all(out[0] == 1) and torch.all(out[1] == 0)
    assert (lse is None) == (not need_lse)
    if need_lse:
        assert torch.all(lse[0] == 1) and torch.all(lse[1] == -math.inf)


def test_flashinfer_clears_what_its_kernel_leaves(monkeypatch):
    try:
        from vllm.v1.attention.backends.mla import flashinfer_mla
    except ImportError as error:
        pytest.skip(f"no FlashInfer MLA here: {error}")

    def decode_live_rows(query, **rest):
        out = _stale(*query.shape[:-1], 512)
        out[0] = 1.0
        return out

    monkeypatch.setattr(
        flashinfer_mla, "trtllm_batch_decode_with_kv_cache_mla", decode_live_rows
    )
    monkeypatch.setattr(flashinfer_mla, "_get_workspace_buffer", lambda *_: None)
    impl = object.__new__(flashinfer_mla.FlashInferMLAImpl)
    impl.need_to_return_lse_for_decode, impl.dcp_world_size = False, 1
    impl.kv_cache_dtype, impl.scale = "auto", 1.0
    impl.bmm1_scale = impl.bmm2_scale = 1.0
    impl.qk_nope_head_dim, impl.kv_lora_rank, impl.qk_rope_head_dim = 128, 512, 64
    decode = SimpleNamespace(
        seq_lens=_lens(4, 0),
        block_table=torch.zeros_like(_lens(1, 1)).unsqueeze(1),
        max_query_len=1,
        query_start_loc=_lens(0, 1, 2),
    )
    metadata = SimpleNamespace(
        decode=decode, num_decodes=2, num_decode_tokens=2, causal=True, max_seq_len=4
    )
    # 16 tokens a page: a size for which no counters are kept.
    q, cache = torch.zeros(2, 16, 576), torch.zeros(1, 16, 576)
    out, lse = impl.forward_mqa(q.to(DEVICE), cache.to(DEVICE), metadata, None)
    assert lse is None
    assert torch.all(out[0] == 1) and torch.all(out[1] == 0)
