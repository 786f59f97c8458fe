"""Root causes of stale-memory incidents of LLM serving, with the kernels that fix them.

The names below load their module, and torch with it, when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleproof.decode_buffer import DecodeWorkspace
    from staleproof.kv_reuse import BlockZeroer
    from staleproof.mla_padding import clear_empty_rows, mla_decode, quantize_fp8_per_tensor
    from staleproof.moe_routing import grouped_topk, topk_sigmoid, topk_softmax
    from staleproof.scale_padding import create_fp4_scale_tensor, dequantize_nvfp4, quantize_nvfp4

__all__ = [
    "BlockZeroer",
    "DecodeWorkspace",
    "clear_empty_rows",
    "create_fp4_scale_tensor",
    "dequantize_nvfp4",
    "grouped_topk",
    "mla_decode",
    "quantize_fp8_per_tensor",
    "quantize_nvfp4",
    "topk_sigmoid",
    "topk_softmax",
]

_HOME = {
    "BlockZeroer": "staleproof.kv_reuse",
    "DecodeWorkspace": "staleproof.decode_buffer",
    "clear_empty_rows": "staleproof.mla_padding",
    "create_fp4_scale_tensor": "staleproof.scale_padding",
    "dequantize_nvfp4": "staleproof.scale_padding",
    "grouped_topk": "staleproof.moe_routing",
    "mla_decode": "staleproof.mla_padding",
    "quantize_fp8_per_tensor": "staleproof.mla_padding",
    "quantize_nvfp4": "staleproof.scale_padding",
    "topk_sigmoid": "staleproof.moe_routing",
    "topk_softmax": "staleproof.moe_routing",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
