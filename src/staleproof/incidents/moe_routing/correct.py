"""Whether a choice of experts is the right one: the consumer only shows that ids are distinct."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from staleproof.evidence.compare import other_bits, rounding, too_far
from staleproof.incidents.moe_routing.batch import Batch, rows_with_duplicates
from staleproof.incidents.moe_routing.scene import (
    TORCHS_SCORES,
    RoutingCase,
    is_padding,
    routed,
    router_input,
)
from staleproof.ops.reference import topk as reference

MORE = Batch(24, 8, 128)


def wrong(case: RoutingCase, device: str) -> str | None:
    """What is wrong with the case's choice, in one line, or ``None``.

    Live rows must have the reference's experts and weights, whatever padding rows contain. Padding rows must
    have distinct experts and finite weights, or the id -1 and weights 0. With our own kernels they must have
    the reference's experts and weights, even in a row of NaN. The same is checked with other bad values in
    padding, with padding between live rows, with NaN in only a part of the bias, and with more rows and
    experts. Ids must be int32, and weights fp32.
    """
    return next(filter(None, _comparisons(case, device)), None)


def _comparisons(case: RoutingCase, device: str) -> Iterator[str | None]:
    yield from _choice(case, device)
    yield from _choice(replace(case, batch=MORE), device)
    if case.bad == "padding":
        yield from _choice(replace(case, bad="odd padding"), device)
        yield from _choice(replace(case, spread=True), device)
    elif case.bad == "bias":
        yield from _choice(replace(case, bad="part of the bias"), device)


def _choice(case: RoutingCase, device: str) -> Iterator[str | None]:
    given, top_k, live = router_input(case, device), case.batch.top_k, ~is_padding(case, device)
    weights, ids = routed(case, device)
    if (weights.dtype, ids.dtype) != (torch.float32, torch.int32):
        yield f"weights are {weights.dtype}, ids {ids.dtype}"
    skipped = (ids == -1).all(1)
    if case.choice == "grouped_topk":
        want = reference.grouped_topk(given.logits, top_k, num_expert_group=8, topk_group=4, bias=given.bias)
    else:
        choose = reference.topk_softmax if given.softmax else reference.topk_sigmoid
        want = choose(given.logits, top_k, bias=given.bias)
    if case.choice in TORCHS_SCORES:
        yield other_bits("ids, live rows", ids[live].int(), want[1][live].int())
        # The replicas use torch's softmax and sigmoid: roundings of a sum over the experts, and three more.
        budget = rounding(torch.float32, case.batch.experts + 3)
        yield too_far("weights, live rows", weights[live], want[0][live], budget)
    else:
        # Our kernels follow the reference's arithmetic bit by bit. Padding rows may have no experts.
        chosen = live | ~skipped
        yield other_bits("ids", ids[chosen].int(), want[1][chosen].int())
        yield other_bits("weights", weights[chosen], want[0][chosen])
    in_range = ((ids >= 0) & (ids < case.batch.experts)).all(1)
    yield None if bool((skipped | in_range).all()) else "ids out of range"
    yield "an expert twice" if bool(rows_with_duplicates(ids[in_range]).any()) else None
    yield None if bool(weights.isfinite().all()) else "weights that are not finite"
    yield "weights of a skipped row" if bool(weights[skipped].any()) else None
    if "padding" in case.bad:
        other = routed(replace(case, bad="nowhere"), device)
        yield other_bits("ids, live rows, over clean padding", other[1][live], ids[live])
        yield other_bits("weights, live rows, over clean padding", other[0][live], weights[live])
