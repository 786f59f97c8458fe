"""Patch for incident 6: pads MXFP4 scales to whole tiles before vLLM converts them for Hopper."""

from __future__ import annotations

import sys
from typing import Any

from staleproof.vllm.arguments import Arguments, Keywords, argument, replaced
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence, Sources, file_of

UTILS, FUNCTION = "vllm.model_executor.layers.quantization.utils.mxfp4_utils", "_swizzle_mxfp4"
# Groups of scales in a tile of the kernel, and what upstream's cure (vLLM #47910) says.
TILE, CURE = 4, "-K % 4"


def _pad(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords] | None:
    """Pad the scales, (experts, n, groups) uint8, with zeros to whole tiles on a Hopper GPU."""
    scale = argument(args, kwargs, 1, "scale")
    platform: Any = vars(sys.modules[UTILS])["current_platform"]
    missing = -scale.shape[-1] % TILE
    if not (missing and scale.numel() and platform.is_cuda() and platform.is_device_capability(90)):
        return None
    import torch

    return replaced(args, kwargs, 1, "scale", torch.nn.functional.pad(scale, (0, missing)))


def _probe(sources: Sources) -> Evidence:
    found = sources.function(file_of(UTILS), FUNCTION)
    if CURE in found.text:
        return Evidence(False, f"{found.at(CURE)} pads the scales to whole tiles")
    return Evidence(True, f"{found.place} converts scales whose last tile is not whole")


PATCHES = (
    Patch(
        name="mxfp4_scale_tail",
        incident="mxfp4_scales",
        summary="pads MXFP4 scales to whole tiles on Hopper",
        models="MXFP4 MoE models (gpt-oss) on Hopper, with the Triton backend",
        versions=(("0.16.0", "0.25.1"),),
        targets=(Target(UTILS, FUNCTION, ("quant_tensor", "scale"), before=_pad),),
        probe=_probe,
        mechanism=(
            "On Hopper the kernel of triton_kernels takes K in tiles of 128 values and reads their scales in "
            "fours, but the layout pads the scales to pairs. If K modulo 128 is 1 to 64, as for the 2880 of "
            "gpt-oss, the last row of the last expert reads 64 bytes behind the tensor, without a mask. A "
            "byte 0xFF there is an infinite scale, and times a weight of 0 a NaN. SwiGLU's clamps make a "
            "finite constant of it, so tokens of the last expert get wrong values and nobody sees a NaN. "
            "Where the tensor ends at the end of its mapping, the read is an illegal access. With the patch "
            "the loader pads the scales with zeros, as vLLM does from 0.26.0 on."
        ),
        threads=("vLLM #47303", "vLLM #47910", "Triton #10772", "SGLang #36456"),
        cost="none a step; 2.2 % more memory for scales, 14 MB for gpt-oss-20b and 83 MB for gpt-oss-120b",
        on_host=True,
    ),
)
