"""Root causes of stale-memory incidents of LLM serving, with the kernels that fix them.

Each public name loads its module, and torch with it, on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleproof.ops.clear_empty_rows import clear_empty_rows as clear_empty_rows
    from staleproof.ops.decode_workspace import DecodeWorkspace as DecodeWorkspace
    from staleproof.ops.fp8 import quantize_fp8_per_tensor as quantize_fp8_per_tensor
    from staleproof.ops.mla.decode import mla_decode as mla_decode
    from staleproof.ops.nvfp4 import create_fp4_scale_tensor as create_fp4_scale_tensor
    from staleproof.ops.nvfp4 import dequantize_nvfp4 as dequantize_nvfp4
    from staleproof.ops.nvfp4 import quantize_nvfp4 as quantize_nvfp4
    from staleproof.ops.topk import grouped_topk as grouped_topk
    from staleproof.ops.topk import topk_sigmoid as topk_sigmoid
    from staleproof.ops.topk import topk_softmax as topk_softmax
    from staleproof.ops.zero_blocks import BlockZeroer as BlockZeroer

# Public name -> its module in staleproof.ops.
_MODULES = {
    "BlockZeroer": "zero_blocks",
    "DecodeWorkspace": "decode_workspace",
    "clear_empty_rows": "clear_empty_rows",
    "create_fp4_scale_tensor": "nvfp4",
    "dequantize_nvfp4": "nvfp4",
    "grouped_topk": "topk",
    "mla_decode": "mla.decode",
    "quantize_fp8_per_tensor": "fp8",
    "quantize_nvfp4": "nvfp4",
    "topk_sigmoid": "topk",
    "topk_softmax": "topk",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"staleproof.ops.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
