"""Remedies that upstream or users tried against the bytes after the scales."""

from __future__ import annotations

from dataclasses import dataclass

from staleproof.incidents.mxfp4_scales.broken import GROUPS, LANES, SHIPPED, Kernel


@dataclass(frozen=True)
class Remedy:
    """One remedy.

    Attributes:
        kernel: our replica with the remedy.
        filters: whether NaN in the layer's output become 0.
    """

    kernel: Kernel = SHIPPED
    filters: bool = False


REMEDIES = {
    # vLLM 0.16.0 to 0.25.1.
    "none": Remedy(),
    # vLLM #47910, SGLang #36456. The layout stores the same bytes as with layout_pads.
    "loader_pads": Remedy(Kernel(align=4)),
    # triton #10800.
    "layout_pads": Remedy(Kernel(align=4)),
    # triton #10190.
    "mask_after_load": Remedy(Kernel(mask=GROUPS)),
    # vLLM #47323.
    "mask_load": Remedy(Kernel(mask=LANES)),
    # Applied to the layer's output.
    "nan_to_num": Remedy(filters=True),
    # Zeroes the bytes after the scales at load, but a later owner of that memory writes it again.
    "zero_once": Remedy(),
}
# Remedies that change which scales are read or used. The other two do not change the kernel's reads.
READERS = [name for name in REMEDIES if name not in ("nan_to_num", "zero_once")]
