"""The stages of the layer in which each token shows the fault."""

from __future__ import annotations

import torch

from staleproof.incidents.mxfp4_scales import broken, scene
from staleproof.incidents.mxfp4_scales.broken import SHIPPED, Kernel

STAGES = ("first product", "SwiGLU", "second product and sum")


def stages(fill: str, kernel: Kernel = SHIPPED, hidden: int = scene.SMALL.hidden) -> list[list[str]]:
    """For each token of the small layer, and each of :data:`STAGES`: finite, NaN, or wrong and finite.

    Args:
        fill: the bytes after the scales, a name in :data:`staleproof.incidents.mxfp4_scales.scene.BEHIND`.
        kernel: the fault, or a remedy.
        hidden: K of the first product, a multiple of 32.

    >>> stages("0xff")[0]
    ['NaN in a live row', 'wrong, finite', 'wrong, finite']
    >>> stages("0xfe")[0]
    ['finite', 'finite', 'finite']
    >>> stages("0xff", hidden=224)[0]
    ['finite', 'finite', 'finite']
    """
    a = scene.layer_of(scene.SMALL._replace(hidden=hidden))

    def of(name: str) -> list[torch.Tensor]:
        slab = torch.cat([broken.swizzled(a.w13.scale, kernel), scene.bytes_of(name)])
        # (tokens, top_k, n): the product of each token with its experts.
        first = broken.product(a.x, a.w13, slab, kernel)[a.topk_ids.T, torch.arange(len(a.x))].transpose(0, 1)
        inner = broken.swiglu(first, kernel.drops_nan)
        return [first, inner, scene.layer(a, scene.bytes_of(name), kernel)[0]]

    def state(got: torch.Tensor, clean: torch.Tensor) -> str:
        if not got.isfinite().all():
            return "NaN in a live row"
        return "finite" if got.equal(clean) else "wrong, finite"

    pairs = [*zip(of(fill), of("0x00"), strict=True)]
    return [[state(got[token], clean[token]) for got, clean in pairs] for token in range(len(a.x))]
