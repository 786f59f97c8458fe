"""The hooks of incident 2's patch on plain tensors; tests/vllm has them in the real vLLM."""

from types import SimpleNamespace as Space

import pytest
import torch

from staleproof.vllm import plugin
from staleproof.vllm.patches import decode_buffer as patch


@pytest.mark.parametrize("fp8", [False, True])
def test_the_buffer_is_zeros_whatever_the_memory_held(monkeypatch, fp8):
    monkeypatch.setattr(torch, "empty", lambda *shape, **given: torch.full(shape, torch.nan, **given))
    impl = Space(kv_cache_dtype="fp8_e4m3" if fp8 else "auto", kv_lora_rank=16, _decode_out=torch.ones(1))
    q = torch.ones(3, 2, 24)
    with patch._cutlass((impl, (q, q[..., :8])), {}):
        assert impl._decode_out.shape == (3, patch.CUTLASS_HEADS, 16)
    metadata = Space(num_decodes=3)
    for around, heads in ((patch._cutlass, patch.CUTLASS_HEADS), (patch._flashinfer, 2)):
        with around((impl, q, None, metadata), {}):
            assert impl._decode_out.shape == (3, heads, 16)
            assert impl._decode_out.dtype == (torch.bfloat16 if fp8 else torch.float32)
            # What the kernel leaves unwritten stays 0, as in vLLM's own buffer.
            assert not impl._decode_out.count_nonzero()
        assert impl._decode_out is None
        impl._decode_out = torch.ones(1)


def test_several_query_tokens_get_no_buffer():
    impl = Space(kv_cache_dtype="auto", kv_lora_rank=16, _decode_out=None)
    with patch._flashinfer((impl, torch.ones(12, 2, 24), None, Space(num_decodes=3)), {}):
        assert impl._decode_out is None


@pytest.mark.parametrize("name", ["mla_padding", "topk_nan"])
def test_a_patch_with_kernels_needs_triton(name):
    assert plugin.patches()[name].triton
