"""Incident 4: KV blocks that were Mamba state (vLLM #35138, #35219)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleproof.kv_reuse.kernels import BlockZeroer

__all__ = ["BlockZeroer"]


def __getattr__(name: str) -> object:
    # Late, so that reference.py stays importable where Triton has no wheel.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.kernels"), name)
