"""Incident 2: the out-of-memory that the first fix caused (vLLM #37442, #37777, #37799)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleproof.decode_buffer.reference import DecodeWorkspace, WorkspaceLocked

__all__ = ["DecodeWorkspace", "WorkspaceLocked"]


def __getattr__(name: str) -> object:
    # Late, so that a vLLM process can load patch.py before it has torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.reference"), name)
