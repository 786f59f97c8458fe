"""Our calls bind to the signatures of the kernels that are installed; absent ones say why."""

from __future__ import annotations

import inspect

import pytest
import torch

from staleproof import device as devices
from staleproof.device import Provenance
from staleproof.harness import peers


def call():
    q = torch.zeros(3, 16, 576, dtype=torch.bfloat16)
    kv_cache = torch.zeros(5, 64, 576, dtype=torch.bfloat16)
    block_table = torch.zeros(3, 2, dtype=torch.int32)
    seq_lens = torch.tensor([65, 64, 0], dtype=torch.int32)
    return q, kv_cache, block_table, seq_lens


def test_trtllm_call_binds():
    decode = pytest.importorskip("flashinfer.decode").trtllm_batch_decode_with_kv_cache_mla
    args = peers.flashinfer_trtllm_args(*call(), 0.1, torch.zeros(1), None)
    bound = inspect.signature(decode).bind(**args)
    assert tuple(bound.arguments["query"].shape) == (3, 1, 16, 576)
    assert tuple(bound.arguments["kv_cache"].shape) == (5, 1, 64, 576)


def test_wrapper_calls_bind():
    wrapper = pytest.importorskip("flashinfer.mla").BatchMLAPagedAttentionWrapper
    inspect.signature(wrapper.__init__).bind(None, torch.zeros(1), backend="cutlass")
    plan = peers.flashinfer_plan_args(*call(), 0.1)
    inspect.signature(wrapper.plan).bind(None, **plan)
    for backend in ("fa2", "fa3", "cutlass"):
        q, kv_cache, block_table, seq_lens = call()
        args = peers.flashinfer_run_args(backend, q, kv_cache, block_table, seq_lens, None)
        inspect.signature(wrapper.run).bind(None, **args)


def test_a_call_that_does_not_bind_is_noticed():
    wrapper = pytest.importorskip("flashinfer.mla").BatchMLAPagedAttentionWrapper
    q, kv_cache, block_table, seq_lens = call()
    args = peers.flashinfer_run_args("cutlass", q, kv_cache, block_table, seq_lens, None)
    with pytest.raises(TypeError, match="no_such_keyword"):
        inspect.signature(wrapper.run).bind(None, **args, no_such_keyword=1)


def test_pages_in_use_leave_out_empty_requests_and_unused_entries():
    q, kv_cache, block_table, seq_lens = call()
    block_table[0] = torch.tensor([4, 2])
    block_table[1] = torch.tensor([3, -1])
    block_table[2] = -1
    plan = peers.flashinfer_plan_args(q, kv_cache, block_table, seq_lens, 0.1)
    assert plan["kv_indptr"].tolist() == [0, 2, 3, 3]
    assert plan["kv_indices"].tolist() == [4, 2, 3]


def test_an_absent_peer_says_why_and_refuses():
    for name, peer in peers.peers().items():
        if peer.why_not is None:
            continue
        assert "\n" not in peer.why_not, name
        with pytest.raises(RuntimeError, match="is not available"):
            peer(*call(), softmax_scale=0.1)


def test_sm100_kernels_do_not_run_elsewhere():
    if devices.provenance() is Provenance.MEASURED and devices.is_sm100():
        pytest.skip("this is SM100")
    found = peers.peers()
    assert found["flashinfer_trtllm"].why_not is not None
    assert found["flashinfer_cutlass"].why_not is not None
