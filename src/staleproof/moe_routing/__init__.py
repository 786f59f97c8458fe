"""Incident 3: NaN router logits pick one expert k times (vLLM #39593, fixed by #39391)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleproof.moe_routing.kernels import grouped_topk, topk_sigmoid, topk_softmax

__all__ = ["grouped_topk", "topk_sigmoid", "topk_softmax"]


def __getattr__(name: str) -> object:
    # Late, so that reference.py stays importable where Triton has no wheel.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.kernels"), name)
