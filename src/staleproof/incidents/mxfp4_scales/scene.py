"""A layer of gpt-oss' experts with chosen bytes after its scales in memory, and functions that judge it.

:func:`layer` computes it with our replica, :func:`.released.layer` with the scales of vLLM's own loader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from staleproof.evidence.compare import rounding
from staleproof.incidents.mxfp4_scales import broken
from staleproof.incidents.mxfp4_scales.broken import Kernel, Matrix, Shape
from staleproof.incidents.mxfp4_scales.remedies import REMEDIES
from staleproof.incidents.mxfp4_scales.weights import dequantized, quantized
from staleproof.lab import Answer, good_if

RIGHT, NAN, WRONG = "right", "NaN", "wrong, finite"
# Allowed relative error of a row: intermediate and result are rounded to bf16. The kernels' is below 5e-3.
BUDGET = rounding(torch.bfloat16, 2)
# Bytes after the scales that a test fills; the kernel reads the first 64.
TAIL = 4096


class Size(NamedTuple):
    """A layer: ``hidden`` is K of the first product, ``inter`` of the second."""

    experts: int
    hidden: int
    inter: int
    top_k: int


# Its first product reads past the end, its second does not.
SMALL = Size(4, 192, 128, 2)
TOKENS = 12


@dataclass(frozen=True)
class Layer:
    """Weights and one batch.

    Attributes:
        w13: gate and up, interleaved rows.
        w2: the second projection.
        x: (tokens, hidden) bf16.
        topk_ids: (tokens, top_k) int64, distinct in a row.
        topk_weights: (tokens, top_k) fp32.
    """

    w13: Matrix
    w2: Matrix
    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def hit(self) -> torch.Tensor:
        """(tokens,) bool: the tokens that are routed to the last expert."""
        return (self.topk_ids == self.w13.shape.experts - 1).any(1)


def layer_of(size: Size = SMALL, tokens: int = TOKENS) -> Layer:
    """A layer and a batch, on the CPU; the first token is always routed to the last experts.

    Args:
        size: of the layer.
        tokens: in the batch.
    """
    generator = torch.Generator().manual_seed(0)
    w13 = quantized(Shape(size.experts, 2 * size.inter, size.hidden), generator)
    w2 = quantized(Shape(size.experts, size.hidden, size.inter), generator)
    x = torch.randn(tokens, size.hidden, generator=generator)
    ids = torch.rand(tokens, size.experts, generator=generator).argsort(1)
    ids[0] = torch.arange(size.experts - 1, -1, -1)
    weights = torch.rand(tokens, size.top_k, generator=generator).softmax(1)
    return Layer(w13, w2, x.bfloat16(), ids[:, : size.top_k], weights)


def experts(
    a: Layer, product: Callable[[torch.Tensor, Matrix, int], torch.Tensor], drops_nan: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's output and intermediate; ``product(x, matrix, expert)`` computes one expert's product."""
    out, inners = torch.zeros(a.x.shape, device=a.x.device), []
    for expert in range(a.w13.shape.experts):
        token, place = (a.topk_ids == expert).nonzero(as_tuple=True)
        inner = broken.swiglu(product(a.x[token], a.w13, expert), drops_nan).bfloat16().float()
        inners.append(inner)
        out.index_add_(0, token, product(inner, a.w2, expert) * a.topk_weights[token, place, None])
    return out, torch.cat(inners)


def exact(x: torch.Tensor, matrix: Matrix, expert: int) -> torch.Tensor:
    """One expert's product in fp32, from the checkpoint itself, (rows, n)."""
    return x.float() @ dequantized(matrix.weight[expert], matrix.scale[expert]).T


def layer(
    a: Layer, behind: torch.Tensor, kernel: Kernel = broken.SHIPPED
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer as our replica computes it, with the same bytes after the scales of both projections.

    Args:
        a: the layer, on the CPU.
        behind: (n,) uint8, at least the 64 bytes that are read.
        kernel: the fault, or a remedy.

    Returns:
        (tokens, hidden), and (tokens * top_k, inter) sorted by expert; fp32.
    """

    def product(x: torch.Tensor, matrix: Matrix, expert: int) -> torch.Tensor:
        slab = torch.cat([broken.swizzled(matrix.scale, kernel), behind])
        return broken.product(x, matrix, slab, kernel)[expert]

    return experts(a, product, kernel.drops_nan)


# Contents after the scales: a dtype, and a constant, the ends of a range to draw from, or None for N(0, 1).
BEHIND: dict[str, tuple[torch.dtype, Any]] = {
    "0x00": (torch.uint8, 0x00),
    "0x7f": (torch.uint8, 0x7F),
    "0xfe": (torch.uint8, 0xFE),
    "0xff": (torch.uint8, 0xFF),
    "int32 -1": (torch.int32, -1),
    "bf16 -inf": (torch.bfloat16, -torch.inf),
    "fp32 -inf": (torch.float32, -torch.inf),
    # As bits, because a computed NaN may have other bits.
    "bf16 NaN, 0x7fc0": (torch.int16, 0x7FC0),
    "fp32 NaN, 0x7fc00000": (torch.int32, 0x7FC00000),
    "bf16 N(0, 1)": (torch.bfloat16, None),
    "fp32 N(0, 1)": (torch.float32, None),
    "random bytes": (torch.uint8, (0, 256)),
    "other scales": (torch.uint8, (115, 123)),
}


def bytes_of(name: str, n: int = TAIL) -> torch.Tensor:
    """Bytes to put after the scales, (n,) uint8, by their name in :data:`BEHIND`."""
    dtype, what = BEHIND[name]
    generator, sizes = torch.Generator().manual_seed(0), (n // dtype.itemsize,)
    if what is None:
        made = torch.randn(sizes, generator=generator).to(dtype)
    elif isinstance(what, tuple):
        made = torch.randint(what[0], what[1], sizes, dtype=dtype, generator=generator)
    else:
        made = torch.full(sizes, what, dtype=dtype)
    return made.view(torch.uint8)


# Computes output and intermediate of a layer with these bytes after its scales.
Run = Callable[[Layer, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def judged(a: Layer, run: Run, fill: str = "0xff", filters: bool = False) -> Answer:
    """Judge a layer with this content after its scales, against a reference and against zeros.

    Args:
        a: the layer.
        run: computes it.
        fill: a name in :data:`BEHIND`.
        filters: whether NaN in the output are replaced by 0 before the comparison.
    """
    right, _ = experts(a, exact)
    clean, _ = run(a, bytes_of("0x00"))
    out, inner = run(a, bytes_of(fill))
    got = (out.nan_to_num() if filters else out).float()
    nan, changed = ~got.isfinite().all(1), (got != clean.float()).any(1)
    error = (got - right).norm(dim=1) / right.norm(dim=1)
    verdict = NAN if nan.any() else WRONG if (error > BUDGET).any() else RIGHT
    return good_if(
        verdict == RIGHT,
        verdict,
        tokens=len(got),
        routed_to_the_last_expert=int(a.hit.sum()),
        changed=int(changed.sum()),
        changed_are_those_routed=bool(changed.equal(a.hit)),
        rows_with_nan=int(nan.sum()),
        nan_in_the_intermediate=int(inner.isnan().sum()),
        fifty_six_in_the_intermediate=int((inner == 56).sum()),
        worst_error=float(error[~nan].max()) if (~nan).any() else None,
        worst_error_of_rows_not_changed=float(error[~changed].max()) if (~changed).any() else None,
    )


def replica(remedy: str, fill: str = "0xff") -> Answer:
    """Our replica of the small layer with one remedy and these bytes after its scales.

    >>> replica("none", fill="0xfe").verdict, replica("none").verdict
    ('right', 'wrong, finite')
    """
    how = REMEDIES[remedy]
    return judged(layer_of(), partial(layer, kernel=how.kernel), fill, how.filters)


# Factors of the layer's input. With the smallest hardly any gate is clamped, with the largest nearly all are.
LOUDER = (0.25, 1.0, 4.0, 16.0, 64.0)


def watched(a: Layer, run: Run) -> dict[str, list[float]]:
    """By what a monitor after the layer could detect an affected row, for each factor in :data:`LOUDER`.

    Args:
        a: the layer.
        run: computes output and intermediate of a layer with these bytes after its scales.

    Returns:
        For each content after the scales, a list over the inputs: rows with NaN; the norm of the smallest
        affected row divided by that of the largest clean row; the fraction of affected rows of the
        intermediate whose changed numbers are all 56. For clean rows, the false alarms of such a monitor: the
        fraction with a 56, and with 56 in all columns that 0xff changes.
    """
    zeros = bytes_of("0x00")
    one = zeros.index_fill(0, torch.tensor(0), 0xFF)
    behind = {"0xff": bytes_of("0xff"), "fp32 -inf": bytes_of("fp32 -inf"), "one byte": one}
    found: dict[str, list[float]] = defaultdict(list)
    for factor in LOUDER:
        louder = replace(a, x=(a.x * factor).bfloat16())
        clean, inner = (each.float() for each in run(louder, zeros))
        for name, memory in behind.items():
            out, dirty = (each.float() for each in run(louder, memory))
            rows, columns = ((dirty != inner).any(axis) for axis in (1, 0))
            smallest = out[a.hit].norm(dim=1).min() / clean.norm(dim=1).max()
            found[f"{name}: rows with NaN"].append(float((~out.isfinite()).any(1).sum()))
            found[f"{name}: smallest hit row"].append(float(smallest))
            found[f"{name}: hit rows of 56"].append(_part((dirty[rows][:, columns] == 56).all(1)))
            if name == "0xff":
                found["clean rows with a 56"].append(_part((inner == 56).any(1)))
                found["clean rows of 56"].append(_part((inner[:, columns] == 56).all(1)))
    return dict(found)


def _part(of: torch.Tensor) -> float:
    return float(of.float().mean())


def odd_groups(remedy: str) -> Answer:
    """K of three groups, to which the layout itself adds a fourth: does the product change if that is 0xff?

    The package's own mask of the values is wrong for such a K, because it is not a multiple of 64. So the
    product is compared with the product for a fourth group of zeros.

    Args:
        remedy: a name in :data:`REMEDIES`.
    """
    generator, kernel = torch.Generator().manual_seed(2), REMEDIES[remedy].kernel
    matrix = quantized(Shape(2, 256, 96), generator)
    x = torch.randn(16, 96, generator=generator).bfloat16()
    memories = (broken.swizzled(matrix.scale, kernel, pad) for pad in (0x00, 0xFF))
    clean, dirty = (broken.product(x, matrix, memory, kernel) for memory in memories)
    changed = ~((clean == dirty).flatten(0, 1).all(0))
    word = NAN if not dirty.isfinite().all() else WRONG if changed.any() else RIGHT
    return good_if(word == RIGHT, word, columns=dirty.shape[-1], changed_columns=int(changed.sum()))
