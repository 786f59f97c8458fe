"""Incident 1: NaN from the empty rows of MLA decode (vLLM #37442, #57017)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleproof.mla_padding.kernels import clear_empty_rows, mla_decode, quantize_fp8_per_tensor

__all__ = ["clear_empty_rows", "mla_decode", "quantize_fp8_per_tensor"]


def __getattr__(name: str) -> object:
    # Late, so that reference.py stays importable where Triton has no wheel.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.kernels"), name)
