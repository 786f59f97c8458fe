"""Patch for incident 5: the padding of swizzled FP4 scales is zero."""

from __future__ import annotations

from typing import Any

from staleproof.vllm.hooks import Arguments, Keywords, Target, argument
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence, Sources

OPS = "vllm._custom_ops"
NAMES = ("m", "n", "device", "is_sf_swizzled_layout")


def _zeroed(args: Arguments, kwargs: Keywords) -> Any:
    """Allocate vLLM's swizzled scale tensor zeroed: int32, four scales an element."""
    import torch

    from staleproof.ops.reference.nvfp4 import create_fp4_scale_tensor

    m, n, device, swizzled = (argument(args, kwargs, i, NAMES[i]) for i in range(4))
    if not swizzled:
        return NotImplemented
    scales = create_fp4_scale_tensor(m, n, swizzled=True, device=device)
    return scales.view(torch.int32)


def _probe(sources: Sources) -> Evidence:
    if "def create_fp4_scale_tensor(" not in sources.text("_custom_ops.py"):
        return Evidence(False, "_custom_ops.py has no create_fp4_scale_tensor")
    found = sources.function("_custom_ops.py", "create_fp4_scale_tensor")
    swizzled = found.text.partition("if is_sf_swizzled_layout:")[2].partition("else:")[0]
    if "return torch.empty" not in swizzled:
        return Evidence(False, f"{found.place} allocates zeros")
    if "kernel explicitly zeroes every padded scale" in swizzled:
        return Evidence(False, f"{found.place} is empty, and the kernel writes the padding")
    return Evidence(True, f"{found.place} is empty, and the kernel leaves the padding")


PATCHES = (
    Patch(
        name="scale_padding",
        incident="scale_padding",
        summary="allocates swizzled FP4 scales zeroed",
        versions=(("0.18.0", "0.19.1"), ("0.22.1", "0.24.0")),
        targets=(Target(OPS, "create_fp4_scale_tensor", NAMES, instead=_zeroed),),
        probe=_probe,
        mechanism=(
            "Swizzled scales are padded to tiles of 128 rows by 4 columns, and the quantising "
            "kernel leaves the padding as it was. A scale of 0x7F or 0xFF there is a NaN to "
            "whatever reads the whole tile. With the patch the tensor starts as zeros."
        ),
        threads=("vLLM #38148", "vLLM #42988", "vLLM #45741", "vLLM #45739", "vLLM #53568"),
        cost="one fill of the scales, 1/16 byte an element; RECORDED as patch scale_padding",
        traced=True,
    ),
)
