"""Routing in plain PyTorch: distinct experts, whatever bits the logits hold.

The contract, whose absence vLLM #39593 reports: the expert ids of a row are distinct and in range and
its weights are finite. A NaN or an infinity among the scores counts as a score of 0, a NaN in the
bias as 0, and among equal scores the lower index comes first.

Each step is one rounding in float32, and sums are exact, so that two machines agree on every bit.
"""

from __future__ import annotations

from typing import Any

import torch

LOG2_E = 1.4426950408889634
# ln 2 in two parts: the first has few bits, so that its product with an exponent is exact.
LN2_HIGH, LN2_LOW = 0.693359375, -0.00021219444005469058
# exp(r) = 1 + r + r * r * (a polynomial), fitted for |r| <= ln(2) / 2 to 3e-9 of the result.
EXP_POLYNOMIAL = (0.00138146126, 0.00836871006, 0.0416683902, 0.166665211, 0.49999994)
# Below this the result is nearer to 0 than to the smallest float32.
EXP_SMALLEST = -104.0


def exp(x: torch.Tensor) -> torch.Tensor:
    """e to the power of ``x`` <= 0 in float32; 0 for a NaN.

    Computed from products and sums, because the exponentials of GPUs, numpy and PyTorch differ in
    the last bits, which changes the choice among nearly equal scores.
    """
    x = torch.where(x > EXP_SMALLEST, x, EXP_SMALLEST)
    power = (x * LOG2_E).round()
    r = x - power * LN2_HIGH - power * LN2_LOW
    q = torch.full_like(r, EXP_POLYNOMIAL[0])
    for coefficient in EXP_POLYNOMIAL[1:]:
        q = q * r + coefficient
    value = q * (r * r) + r + 1.0
    # In two factors, because one float32 factor cannot lead to a denormal.
    half = power.int() >> 1
    for part in (half, power.int() - half):
        value = value * ((part + 127) << 23).view(torch.float32)
    return value


def exact_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last axis of numbers in [0, 2), in fixed point (multiples of 2**-40). Keeps the axis."""
    return (x * 2.0**40).long().sum(-1, keepdim=True).double().float() * 2.0**-40


def softmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of a row, and the logits, which order experts as the scores do.

    A NaN, a +inf, or a row of only -inf makes every score of the row NaN. All scores and logits of
    such a row count as 0.
    """
    peak = x.amax(-1, keepdim=True)
    lost = x.isnan().any(-1, keepdim=True) | peak.isinf()
    x, peak = torch.where(lost, 0.0, x), torch.where(lost, 0.0, peak)
    exponentials = exp(x - peak)
    inverse = torch.where(lost, 0.0, torch.ones_like(peak) / exact_sum(exponentials))
    return exponentials * inverse, x


def sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of a row, and the logits, which order experts as the scores do. A NaN counts as -inf."""
    x = torch.where(x.isnan(), -torch.inf, x)
    small = exp(-x.abs())
    return torch.where(x < 0, small, 1.0) / (1.0 + small), x


# 2 atanh(z) = 2 z + z ** 3 (2 / 3 + 2 / 5 z ** 2 + ...), here up to z ** 13; for z <= 1/3 to 1e-8 of it.
LOG_SERIES = (2 / 13, 2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3)


def softplus_sqrt(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores sqrt(log(1 + exp(x))) of a row, and the logits, which order experts as the scores do.

    A NaN and +inf count as -inf.
    """
    x = torch.where(x.isfinite(), x, -torch.inf)
    small = exp(-x.abs())
    z = small / (small + 2.0)
    q = torch.full_like(z, LOG_SERIES[0])
    for coefficient in LOG_SERIES[1:]:
        q = q * (z * z) + coefficient
    score = torch.where(x > 0, x, 0.0) + (q * (z * z) * z + z + z)
    # In float64, because torch's float32 square root on a CPU may be one bit off.
    return score.double().sqrt().float(), x


def biased(scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Scores plus bias, for the choice only."""
    if bias is None:
        return scores
    return scores + torch.where(bias.isnan(), 0.0, bias.float())


def open_experts(choice: torch.Tensor, num_expert_group: int, topk_group: int) -> torch.Tensor:
    """Which experts are in the best groups, (tokens, experts) bool; two experts make a group's score."""
    groups = choice.unflatten(-1, (num_expert_group, -1))
    best, second = groups.sort(descending=True).values[..., :2].unbind(-1)
    # The second is at least a finite number, because +inf + -inf would be a NaN.
    sums = best + second.clamp(min=torch.finfo(torch.float32).min)
    order = sums.argsort(descending=True, stable=True)
    chosen = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, order[:, :topk_group], True)
    return chosen[..., None].expand_as(groups).flatten(-2)


def _pick(
    scored: tuple[torch.Tensor, torch.Tensor],
    top_k: int,
    *,
    bias: torch.Tensor | None = None,
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    is_padding: torch.Tensor | None = None,
    padding_id: int = -1,
    topk_ids_dtype: torch.dtype = torch.int32,
    groups: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by logit, or by score and bias.

    ``scored`` is scores and logits; ``groups`` is the number of groups, and how many of them are chosen.
    """
    scores, logits = scored
    choice = logits if bias is None and groups is None else biased(scores, bias)
    order = choice.argsort(dim=-1, descending=True, stable=True)
    if groups is not None:
        is_open = open_experts(choice, *groups)
        closed_last = (~is_open).gather(-1, order).int().argsort(dim=-1, stable=True)
        order = order.gather(-1, closed_last)
    ids = order[:, :top_k]
    weights = scores.gather(-1, ids)
    if renormalize:
        # First scaled by a power of two, so that the largest weight is in [1, 2).
        largest = weights.amax(-1, keepdim=True).view(torch.int32) & 0x7F800000
        scaled = weights * (0x7F000000 - largest).view(torch.float32)
        total = exact_sum(scaled)
        weights = torch.where(total > 0, scaled / total, weights)
    weights = weights * routed_scaling_factor
    if is_padding is not None:
        weights = weights.masked_fill(is_padding[:, None], 0.0)
        ids = ids.masked_fill(is_padding[:, None], padding_id)
    return weights, ids.to(topk_ids_dtype)


def topk_softmax(
    router_logits: torch.Tensor, top_k: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` experts of largest softmax score a row.

    Args and results are those of :func:`staleproof.ops.topk.topk_softmax`, but for ``out``.

    >>> topk_softmax(torch.tensor([[0.0, 2.0, 1.0], [0.0, float("nan"), 1.0]]), 2)[1].tolist()
    [[1, 2], [0, 1]]
    """
    return _pick(softmax(router_logits.float()), top_k, **options)


def topk_sigmoid(
    router_logits: torch.Tensor, top_k: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` experts of largest sigmoid score a row.

    Args and results are those of :func:`staleproof.ops.topk.topk_sigmoid`, but for ``out``.

    >>> topk_sigmoid(torch.tensor([[0.0, float("nan"), 1.0]]), 3)[1].tolist()
    [[2, 0, 1]]
    """
    return _pick(sigmoid(router_logits.float()), top_k, **options)


def topk_softplus_sqrt(
    router_logits: torch.Tensor, top_k: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` experts of largest sqrt(log(1 + exp(logit))) a row.

    Args and results are those of :func:`staleproof.ops.topk.topk_softplus_sqrt`, but for ``out``.

    >>> topk_softplus_sqrt(torch.tensor([[0.0, float("nan"), 1.0]]), 3)[1].tolist()
    [[2, 0, 1]]
    """
    return _pick(softplus_sqrt(router_logits.float()), top_k, **options)


def grouped_topk(
    router_logits: torch.Tensor,
    top_k: int,
    *,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` experts of largest sigmoid score within the ``topk_group`` best groups.

    Args and results are those of :func:`staleproof.ops.topk.grouped_topk`, but for ``out``.

    >>> logits = torch.tensor([[9.0, -9.0, 1.0, 1.0]])
    >>> grouped_topk(logits, 2, num_expert_group=2, topk_group=1)[1].tolist()
    [[2, 3]]
    """
    groups, scored = (num_expert_group, topk_group), sigmoid(router_logits.float())
    return _pick(scored, top_k, groups=groups, renormalize=renormalize, **options)
