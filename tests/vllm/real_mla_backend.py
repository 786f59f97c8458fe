"""Our attention backend bound to a released vLLM's classes, on a CPU; prints answers as JSON."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

import torch
from vllm.platforms.interface import DeviceCapability

import vllm
from staleproof.ops.reference.mla_decode import mla_decode as reference
from staleproof.vllm.mla_backend import MLADecodeBackend, MLADecodeImpl, MLADecodeMetadataBuilder


def reasons(**changes: Any) -> list[str]:
    """Why this release refuses the backend for a configuration."""
    options = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
        **changes,
    }
    return list(MLADecodeBackend.validate_configuration(**options))


def decoded(q_len: int) -> float:
    """Largest error of a decode step with an empty request, through the class that a layer holds."""
    impl = MLADecodeImpl.__new__(MLADecodeImpl)
    impl.scale, impl.kv_cache_dtype = 0.1, "auto"
    lengths, pages = torch.tensor([70, 0, 9], dtype=torch.int32), torch.randn(6, 64, 576)
    table = torch.tensor([[1, 2], [0, 0], [4, 0]], dtype=torch.int32)
    q = torch.randn(3 * q_len, 4, 576)
    metadata = SimpleNamespace(decode=SimpleNamespace(block_table=table, seq_lens=lengths))
    out, lse = impl.forward_mqa((q[..., :512], q[..., 512:]), pages, metadata, SimpleNamespace())
    want, log = reference(q.view(3, q_len, 4, 576), pages, table, lengths, softmax_scale=0.1)
    empty = out.view(3, q_len, 4, 512)[1]
    assert not empty.any()
    assert (lse.view(3, q_len, 4)[1] == -torch.inf).all()
    torch.testing.assert_close(lse.view_as(log), log, rtol=1e-4, atol=1e-4)
    return float((out.view_as(want) - want).abs().max())


abstract = [c.__name__ for c in (MLADecodeBackend, MLADecodeImpl) if getattr(c, "__abstractmethods__", None)]
refused = {
    "SM80": reasons(device_capability=DeviceCapability(8, 0)),
    "head size": reasons(head_size=320),
    "cache": reasons(kv_cache_dtype="int8"),
    "page": reasons(block_size=16),
    "sparse": reasons(use_sparse=True),
}
print(
    json.dumps(
        {
            "version": vllm.__version__,
            "abstract": abstract,
            "bound": [*inspect.signature(MLADecodeImpl.forward_mqa).parameters],
            "graphs": MLADecodeMetadataBuilder._cudagraph_support.name,
            "accepted": reasons(),
            "fp8": reasons(kv_cache_dtype="fp8_e4m3"),
            "refused": refused,
            "errors": [decoded(1), decoded(2)],
        }
    )
)
