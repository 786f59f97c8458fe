"""One batch through map and finalise step: which entries nobody wrote, and which rows came out wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from staleproof import check
from staleproof.incidents.moe_routing.batch import (
    ILLEGAL_ACCESS,
    MISREAD,
    NAN_ROWS,
    RIGHT,
    SILENT,
    Batch,
    make_ids,
    rows_with_duplicates,
)
from staleproof.incidents.moe_routing.consumer import CANARY, ExpertMap, build_map, finalise, layer

# What the memory of the map may contain before the map is built, and that of the experts' output rows:
# the previous map's rows, or with "NaN rows" those of another tensor.
MEMORY = ("canary", "zeros", "previous map", "previous map, NaN rows")
HIDDEN = 16


@dataclass(frozen=True)
class Observation:
    """What became of one batch.

    Attributes:
        outcome: :data:`RIGHT`, :data:`ILLEGAL_ACCESS`, :data:`NAN_ROWS` or :data:`SILENT`.
        one_block: whether the one-block builder made the map.
        unwritten: map entries that nobody wrote and that the finalise step reads.
        wild_reads: entries that it would have followed out of the buffer.
        duplicate_rows: tokens with an expert twice.
        wrong_rows: tokens whose output is wrong.
        wrong_clean_rows: of these, tokens with distinct experts.
        nan_rows: tokens whose output has a NaN.
    """

    outcome: str
    one_block: bool
    unwritten: int
    wild_reads: int
    duplicate_rows: int
    wrong_rows: int
    wrong_clean_rows: int
    nan_rows: int


def holes(expert_map: ExpertMap, topk_ids: torch.Tensor) -> torch.Tensor:
    """(tokens, top_k) bool: slots that have an expert and whose entry nobody wrote.

    Args:
        expert_map: built over :data:`CANARY`.
        topk_ids: (tokens, top_k), the ids that it was built from.
    """
    tokens, top_k = topk_ids.shape
    unwritten = (expert_map.row_of_slot == CANARY).view(top_k, tokens).T
    return unwritten & (topk_ids >= 0) & (topk_ids < len(expert_map.first_row) - 1)


def observe(
    batch: Batch, ids: str | torch.Tensor, device: str = "cpu", *, before: str = "canary", guard: bool = False
) -> Observation:
    """Send one batch through map and finalise step, and compare the result with :func:`layer`.

    Args:
        batch: the shape.
        ids: one of :data:`batch.IDS`, or the ids (tokens, top_k) that a routing chose.
        device: where it runs.
        before: what the memory of map and expert outputs contains, one of :data:`MEMORY`; the
            previous map is that of a batch with other, distinct ids.
        guard: see :func:`finalise`.

    Raises:
        ValueError: an argument does not fit.
    """
    tokens, top_k, experts = batch
    check.require(before in MEMORY, "before", " or ".join(MEMORY), repr(before))
    topk_ids = make_ids(ids, batch, seed=1, device=device) if isinstance(ids, str) else ids
    check.tensor("ids", topk_ids, shape=(tokens, top_k))
    generator = torch.Generator().manual_seed(2)
    x, table = (torch.randn(n, HIDDEN, generator=generator).to(device) for n in (tokens, experts))
    weights = torch.rand(tokens, top_k, generator=generator).softmax(1).to(device)

    def outputs(ids: torch.Tensor, expert_map: ExpertMap, memory: torch.Tensor) -> torch.Tensor:
        """The experts' output rows, written over ``memory``."""
        slots = expert_map.slot_of_row[: int(expert_map.first_row[-1])].long()
        token, slot = slots % tokens, slots // tokens
        rows = memory.clone()
        rows[: len(slots)] = x[token] * table[ids[token, slot].long()]
        return rows

    memory = x.new_zeros(tokens * top_k, HIDDEN)
    over_canary = built = build_map(topk_ids, experts)
    if before == "zeros":
        built = build_map(topk_ids, experts, before=torch.zeros_like(over_canary.row_of_slot))
    elif before != "canary":
        earlier_ids = make_ids("distinct", batch, seed=3, device=device)
        earlier = build_map(earlier_ids, experts)
        built = build_map(topk_ids, experts, before=earlier.row_of_slot)
        memory = outputs(earlier_ids, earlier, memory)
        if before == "previous map, NaN rows":
            memory.fill_(torch.nan)
    # Misread ids name other experts than those that the router chose.
    meant = (
        make_ids("distinct", batch, seed=1, device=device)
        if isinstance(ids, str) and ids == MISREAD
        else topk_ids
    )
    got = finalise(outputs(topk_ids, built, memory), weights, topk_ids, built, guard=guard)
    wrong = ~torch.isclose(got.out, layer(x, weights, meant, table), atol=1e-5).all(1)
    nan = got.out.isnan().any(1)
    duplicates = rows_with_duplicates(topk_ids)
    outcome = NAN_ROWS if bool(nan.any()) else SILENT if bool(wrong.any()) else RIGHT
    return Observation(
        ILLEGAL_ACCESS if got.wild_reads else outcome,
        one_block=built.one_block,
        unwritten=int(holes(over_canary, topk_ids).sum()),
        wild_reads=got.wild_reads,
        duplicate_rows=int(duplicates.sum()),
        wrong_rows=int(wrong.sum()),
        wrong_clean_rows=int((wrong & ~duplicates).sum()),
        nan_rows=int(nan.sum()),
    )
