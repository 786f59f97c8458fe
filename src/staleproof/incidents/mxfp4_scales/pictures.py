"""Which stage of the layer each token's fault is seen in."""

from __future__ import annotations

import torch

from staleproof.incidents.mxfp4_scales import broken, scene

STAGES = ("first product", "SwiGLU", "second product and sum")


def stages(fill: str) -> list[list[str]]:
    """For each token of the small layer, and each of :data:`STAGES`: finite, NaN, or wrong and finite.

    >>> stages("0xff")[0]
    ['NaN in a live row', 'wrong, finite', 'wrong, finite']
    >>> stages("0xfe")[0]
    ['finite', 'finite', 'finite']
    """
    a = scene.layer_on("cpu")

    def of(name: str) -> list[torch.Tensor]:
        behind = scene.bytes_of(name)
        slab = torch.cat([broken.swizzled(a.w13.scale), behind])
        # (tokens, top_k, n): what each token's experts give it.
        first = broken.product(a.x, a.w13, slab)[a.topk_ids.T, torch.arange(len(a.x))].transpose(0, 1)
        return [first, broken.swiglu(first), scene.layer(a, behind)[0]]

    def state(got: torch.Tensor, clean: torch.Tensor) -> str:
        if not got.isfinite().all():
            return "NaN in a live row"
        return "finite" if got.equal(clean) else "wrong, finite"

    pairs = [*zip(of(fill), of("0x00"), strict=True)]
    return [[state(got[token], clean[token]) for got, clean in pairs] for token in range(len(a.x))]
