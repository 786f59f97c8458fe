"""Root causes of stale-memory incidents of LLM serving, with the kernels that fix them.

The names below load their module, and torch with it, when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleproof.decode_buffer import DecodeWorkspace
    from staleproof.mla_padding import clear_empty_rows, mla_decode, quantize_fp8_per_tensor
    from staleproof.moe_routing import grouped_topk, topk_sigmoid, topk_softmax

__all__ = [
    "DecodeWorkspace",
    "clear_empty_rows",
    "grouped_topk",
    "mla_decode",
    "quantize_fp8_per_tensor",
    "topk_sigmoid",
    "topk_softmax",
]

_HOME = {
    "DecodeWorkspace": "staleproof.decode_buffer",
    "clear_empty_rows": "staleproof.mla_padding",
    "grouped_topk": "staleproof.moe_routing",
    "mla_decode": "staleproof.mla_padding",
    "quantize_fp8_per_tensor": "staleproof.mla_padding",
    "topk_sigmoid": "staleproof.moe_routing",
    "topk_softmax": "staleproof.moe_routing",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
