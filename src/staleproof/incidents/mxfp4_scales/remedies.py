"""Remedies that upstream or users tried against the bytes after the scales."""

from __future__ import annotations

from dataclasses import dataclass

from staleproof.incidents.mxfp4_scales.broken import GROUPS, LANES, SHIPPED, Kernel
from staleproof.kernels.vllm_matmul_ogs import Edit

_LAYOUT = "tensor_details/layout_details/hopper_scale.py"
_ALIGN = "        SWIZZLE_ALIGN_K = {}\n"
_KERNEL = "matmul_ogs_details/_matmul_ogs.py"
_LOAD = "unswizzle_mxfp4_scale_hopper(tl.load(WMxScalePtrs), mx_axis=1, num_warps=num_warps)"
_LANE_MASK = "mask=((offs_k_scale // 32) * MX_PACK_DIVISOR < k)[None, :], other=0"
_MASKED_LOAD = _LOAD.replace("WMxScalePtrs)", f"WMxScalePtrs, {_LANE_MASK})")
_KEPT = "(tl.arange(0, MX_SCALE_BLOCK_K) * MX_PACK_DIVISOR < k)[None, :]"
_CLEARED = f"tl.where({_KEPT}, {_LOAD}, tl.zeros([BLOCK_N, MX_SCALE_BLOCK_K], tl.uint8))"


@dataclass(frozen=True)
class Remedy:
    """One remedy.

    Attributes:
        kernel: our replica with the remedy.
        edit: the line of the package that it changes; ``None``: the package is unchanged.
        pads: whether the loader pads the scales to 4 groups before it converts them.
        filters: whether NaN in the layer's output become 0.
    """

    kernel: Kernel = SHIPPED
    edit: Edit | None = None
    pads: bool = False
    filters: bool = False


REMEDIES = {
    # vLLM 0.16.0 to 0.25.1.
    "none": Remedy(),
    # vLLM #47910, SGLang #36456.
    "loader_pads": Remedy(Kernel(align=4), pads=True),
    # triton #10800.
    "layout_pads": Remedy(Kernel(align=4), Edit(_LAYOUT, _ALIGN.format(2), _ALIGN.format(4))),
    # triton #10190.
    "mask_after_load": Remedy(Kernel(mask=GROUPS), Edit(_KERNEL, _LOAD, _CLEARED)),
    # vLLM #47323.
    "mask_load": Remedy(Kernel(mask=LANES), Edit(_KERNEL, _LOAD, _MASKED_LOAD)),
    # Applied to the layer's output.
    "nan_to_num": Remedy(filters=True),
    # Zeroes the bytes after the scales at load, but a later owner of that memory writes it again.
    "zero_once": Remedy(),
}
