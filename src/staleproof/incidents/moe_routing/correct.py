"""Whether a choice of experts is the right one: the consumer only shows that ids are distinct."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from staleproof.cases.compare import other_bits, too_far
from staleproof.incidents.moe_routing.batch import rows_with_duplicates
from staleproof.incidents.moe_routing.scene import LIVE, OURS, RoutingCase, routed, router_input
from staleproof.ops.reference import topk as reference

# Shares of the largest weight. Our kernels follow the reference's arithmetic bit by bit; the replicas
# take torch's softmax and sigmoid.
BUDGET = {OURS: 2**-22, "grouped_topk": 2**-22}
REPLICA_BUDGET = 2**-18


def wrong(case: RoutingCase, device: str) -> str | None:
    """What is wrong with the case's choice, in one line, or ``None``.

    Live rows must have the reference's experts and weights, whatever padding rows contain. Rows of
    padding must have distinct experts and finite weights, or the id -1 and weights 0; of our own
    kernels, the reference's, which also says what a row of NaN gets.
    """
    return next(filter(None, _comparisons(case, device)), None)


def _comparisons(case: RoutingCase, device: str) -> Iterator[str | None]:
    given, top_k = router_input(case, device), case.batch.top_k
    weights, ids = routed(case, device)
    if case.choice == "grouped_topk":
        want = reference.grouped_topk(given.logits, top_k, num_expert_group=8, topk_group=4, bias=given.bias)
    else:
        choose = reference.topk_softmax if given.softmax else reference.topk_sigmoid
        want = choose(given.logits, top_k, bias=given.bias)
    budget = BUDGET.get(case.choice, REPLICA_BUDGET)
    rows = len(ids) if case.choice in BUDGET else LIVE
    what = "all rows" if case.choice in BUDGET else "live rows"
    yield other_bits(f"ids, {what}", ids[:rows].int(), want[1][:rows].int())
    yield too_far(f"weights, {what}", weights[:rows], want[0][:rows], budget)
    skipped = (ids == -1).all(1)
    in_range = ((ids >= 0) & (ids < case.batch.experts)).all(1)
    yield None if bool((skipped | in_range).all()) else "ids out of range"
    yield "an expert twice" if bool(rows_with_duplicates(ids[in_range]).any()) else None
    yield None if bool(weights.isfinite().all()) else "weights that are not finite"
    yield "weights of a skipped row" if bool(weights[skipped].any()) else None
    if case.bad == "padding":
        other = routed(replace(case, bad="nowhere"), device)
        yield other_bits("ids, live rows, over clean padding", other[1][:LIVE], ids[:LIVE])
        yield other_bits("weights, live rows, over clean padding", other[0][:LIVE], weights[:LIVE])
