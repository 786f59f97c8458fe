"""Incident 5: what the revert blamed, and what it was (vLLM #38359, #38148, #39444, #40047)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleproof.scale_padding.kernels import quantize_nvfp4
    from staleproof.scale_padding.reference import create_fp4_scale_tensor, dequantize_nvfp4

__all__ = ["create_fp4_scale_tensor", "dequantize_nvfp4", "quantize_nvfp4"]


def __getattr__(name: str) -> object:
    # Late, so that the rest stays importable where Triton has no wheel, and a vLLM process can
    # load patch.py before it has torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "kernels" if name == "quantize_nvfp4" else "reference"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
