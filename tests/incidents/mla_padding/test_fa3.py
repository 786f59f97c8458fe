"""FA3 of vLLM's wheel is called as vLLM calls it, or says why not."""

import sys
import types

import pytest
import torch

from staleproof.incidents.mla_padding.cases import ALONE, TABLE
from staleproof.incidents.mla_padding.scene import SCALE, make_call
from staleproof.kernels import vllm as vllm_kernels
from staleproof.ops.reference.mla_decode import mla_decode


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    for question in ALONE:
        (found,) = TABLE.ask(question, "vllm_fa3", device="cpu")
        assert (found.verdict, found.note) == ("not run", "needs a CUDA device")


def test_a_wheel_without_the_library_is_named(monkeypatch):
    monkeypatch.setattr(vllm_kernels.device, "provenance", lambda: vllm_kernels.Provenance.MEASURED)
    monkeypatch.setattr(vllm_kernels.device, "machine", lambda: types.SimpleNamespace(capability="sm_90"))
    monkeypatch.setattr(vllm_kernels, "vllm_file", lambda path: None)
    assert vllm_kernels.fa3_unavailable_reason() == f"no vllm with {vllm_kernels.FA3_LIBRARY} is installed"
    monkeypatch.setattr(vllm_kernels.device, "machine", lambda: types.SimpleNamespace(capability="sm_100"))
    assert vllm_kernels.fa3_unavailable_reason().startswith("needs an SM90 GPU")


def test_its_arguments_are_an_mla_decode(monkeypatch):
    """A stub with FA3's signature rebuilds what it is given and decodes it."""

    def varlen(*, q, k, v, q_v, seqused_k, block_table, softmax_scale, max_seqlen_k, out, **more):
        assert (more["fa_version"], more["causal"], more["max_seqlen_q"]) == (3, True, 1)
        assert max_seqlen_k >= int(seqused_k.max())
        query, cache = torch.cat((q_v, q), -1), torch.cat((v, k), -1).squeeze(-2)
        out.copy_(mla_decode(query, cache, block_table, seqused_k, softmax_scale=softmax_scale)[0])

    module = types.SimpleNamespace(flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", module)
    call = make_call("cpu", rows=4, live=3, tokens=84, dtype=torch.float32)
    got, lse = vllm_kernels.vllm_fa3().prepare(*call, SCALE, None, None)()
    want, _ = mla_decode(*call, softmax_scale=SCALE)
    assert torch.equal(got, want)
    assert lse is None
