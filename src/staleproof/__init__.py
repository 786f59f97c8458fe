"""Root causes of stale-memory incidents of LLM serving, with the kernels that fix them.

The names below load their module, and torch with it, when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleproof.decode_buffer import DecodeWorkspace
    from staleproof.mla_padding import clear_empty_rows, mla_decode, quantize_fp8_per_tensor

__all__ = ["DecodeWorkspace", "clear_empty_rows", "mla_decode", "quantize_fp8_per_tensor"]

_HOME = {
    "DecodeWorkspace": "staleproof.decode_buffer",
    "clear_empty_rows": "staleproof.mla_padding",
    "mla_decode": "staleproof.mla_padding",
    "quantize_fp8_per_tensor": "staleproof.mla_padding",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
