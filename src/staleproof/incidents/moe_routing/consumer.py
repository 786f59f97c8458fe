"""What a fused MoE does with expert ids, re-implemented small: expert map and finalise step.

Follows FlashInfer's ``cutlass_fused_moe`` (``cutlass_fused_moe_kernels.cuh``), which expects the k
experts of a token to be distinct. Its three-step map builder searches a token's slots for an expert
and stops at the first match, so the other slots of a duplicate get no entry. The finalise step then
follows whatever the memory contained before. Nothing crashes here: an entry that points out of the buffer
is counted, and adds 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

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
from staleproof.lab import Answer, good_if
from staleproof.vllm.routing_calls import sorts_in_one_block

# Marks map entries that nobody wrote. The bytes 0x7f make an index far outside any buffer.
CANARY = 0x7F7F7F7F
# Up to this many bits of an expert's number, one block can handle all its tokens in 160 KiB of shared memory.
ROOMY_BITS = 8
HIDDEN = 16


class ExpertMap(NamedTuple):
    """Where the expert output of each slot lies; rows are sorted by expert.

    Attributes:
        row_of_slot: (top_k * tokens,) int32, entry ``slot * tokens + token``
            (upstream: ``unpermuted_row_to_permuted_row``).
        slot_of_row: (top_k * tokens,) int32, its inverse (``permuted_row_to_unpermuted_row``).
        first_row: (experts + 1,) int32, where each expert's rows begin; the last entry is their end.
        one_block: whether the one-block builder made it, or the three-step builder.
    """

    row_of_slot: torch.Tensor
    slot_of_row: torch.Tensor
    first_row: torch.Tensor
    one_block: bool


def takes_one_block(tokens: int, top_k: int, experts: int) -> bool:
    """Whether FlashInfer builds the map in one block of at most 160 KiB. Duplicates do no harm there."""
    return sorts_in_one_block(tokens, top_k, experts, ROOMY_BITS)


def build_map(
    topk_ids: torch.Tensor,
    num_experts: int,
    *,
    before: torch.Tensor | None = None,
    one_block: bool | None = None,
) -> ExpertMap:
    """Sort the slots of a batch by expert, as FlashInfer does.

    Args:
        topk_ids: (tokens, top_k) int32 or int64; a slot whose id is out of range has no expert.
        num_experts: experts of the layer.
        before: (top_k * tokens,) int32, what the memory of ``row_of_slot`` contains before the build;
            it is copied. :data:`CANARY` everywhere by default.
        one_block: which builder to use; FlashInfer's choice (:func:`takes_one_block`) by default.

    Returns:
        The map. The three-step builder leaves two kinds of entries as they were in ``before``: slots
        without an expert, and all but the first slot of a duplicate.

    >>> build_map(torch.tensor([[3, 3], [1, 2]]), 4, before=torch.zeros(4).int(), one_block=False).row_of_slot
    tensor([2, 0, 0, 1], dtype=torch.int32)
    """
    tokens, top_k = topk_ids.shape
    canaries = torch.full((top_k * tokens,), CANARY, dtype=torch.int32, device=topk_ids.device)
    row_of_slot = canaries.clone() if before is None else before.clone()
    if one_block is None:
        one_block = takes_one_block(tokens, top_k, num_experts)
    in_range = (topk_ids >= 0) & (topk_ids < num_experts)
    # The one-block builder ranks every slot; slots without an expert come last. The three-step builder scans
    # the tokens for each expert, and stops at the first slot of a token that matches.
    again = (topk_ids[:, :, None] == topk_ids[:, None, :]).tril(-1).any(-1)
    found = torch.ones_like(in_range) if one_block else in_range & ~again
    key = torch.where(in_range & found, topk_ids, num_experts).flatten()
    by_expert = key.argsort(stable=True)[: int(found.sum())]
    slots = by_expert % top_k * tokens + by_expert // top_k
    row_of_slot[slots] = torch.arange(len(slots)).to(row_of_slot)
    slot_of_row = canaries
    slot_of_row[: len(slots)] = slots.int()
    counts = torch.bincount(key, minlength=num_experts + 1)
    return ExpertMap(row_of_slot, slot_of_row, (counts.cumsum(0) - counts).int(), one_block)


def holes(expert_map: ExpertMap, topk_ids: torch.Tensor) -> torch.Tensor:
    """(tokens, top_k) bool: slots that have an expert and whose entry nobody wrote.

    Args:
        expert_map: built over :data:`CANARY`.
        topk_ids: (tokens, top_k), the ids that it was built from.
    """
    tokens, top_k = topk_ids.shape
    unwritten = (expert_map.row_of_slot == CANARY).view(top_k, tokens).T
    return unwritten & (topk_ids >= 0) & (topk_ids < len(expert_map.first_row) - 1)


def finalise(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: ExpertMap,
    *,
    guard: bool = False,
) -> tuple[torch.Tensor, int]:
    """Sum each token's expert outputs, as FlashInfer's ``finalizeMoeRoutingKernel``.

    Args:
        rows: (top_k * tokens, hidden) float32, the expert outputs in the order of the map.
        topk_weights: (tokens, top_k) float32.
        topk_ids: (tokens, top_k) int32 or int64; a slot whose id is out of range adds 0.
        expert_map: from :func:`build_map`.
        guard: whether entries outside ``rows`` are skipped, as in FlashInfer since 0.6.10 (FlashInfer
            #2762). They add 0 either way; without the guard they are counted as wild reads.

    Returns:
        The layer's output (tokens, hidden) float32, and the number of map entries outside the buffer that
        upstream would have followed.
    """
    tokens, top_k = topk_ids.shape
    out, wild_reads = rows.new_zeros(tokens, rows.shape[1]), 0
    experts = len(expert_map.first_row) - 1
    for k in range(top_k):
        row = expert_map.row_of_slot[k * tokens : (k + 1) * tokens].long()
        has_expert = (topk_ids[:, k] >= 0) & (topk_ids[:, k] < experts)
        inside = (row >= 0) & (row < len(rows))
        wild_reads += 0 if guard else int((has_expert & ~inside).sum())
        read = has_expert & inside
        out[read] += topk_weights[read, k, None] * rows[row[read]]
    return out, wild_reads


def layer(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    table: torch.Tensor,
    *,
    from_the_end: bool = False,
) -> torch.Tensor:
    """The right answer: each token's weighted sum over its experts, counting duplicates.

    An expert here only multiplies by its row of ``table``, so that the result shows which one ran.

    Args:
        x: (tokens, hidden) float32.
        topk_weights: (tokens, top_k) float32.
        topk_ids: (tokens, top_k); an id out of range adds 0.
        table: (experts, hidden) float32.
        from_the_end: index with the unchanged ids, so that the padding id -1 is the last expert, as in Python
            (vLLM #46428's ids reached such consumers); in a kernel the address would be before the buffer.

    Returns:
        (tokens, hidden) float32.
    """
    out, lowest = torch.zeros_like(x), -len(table) if from_the_end else 0
    for k in range(topk_ids.shape[1]):
        expert = topk_ids[:, k].long()
        read = (expert >= lowest) & (expert < len(table))
        out[read] += topk_weights[read, k, None] * (x[read] * table[expert[read]])
    return out


def observe(
    batch: Batch, ids: str | torch.Tensor, device: str = "cpu", *, before: str = "canary", guard: bool = False
) -> Answer:
    """Send one batch through map and finalise step, and compare the result with :func:`layer`.

    Args:
        batch: the shape.
        ids: one of :data:`batch.IDS`, or the ids (tokens, top_k) that a routing chose.
        device: where it runs.
        before: what the memory of the map contains: ``canary``; ``zeros``; ``previous map``, of a batch with
            other, distinct ids, where the memory of the expert outputs contains that batch's rows; or
            ``previous map, NaN rows``, where it contains another tensor with NaN.
        guard: see :func:`finalise`.

    Returns:
        :data:`RIGHT`, :data:`ILLEGAL_ACCESS`, :data:`NAN_ROWS` or :data:`SILENT`, with these numbers:
        ``one_block``, whether the one-block builder made the map; ``unwritten``, map entries that nobody
        wrote and that the finalise step reads; ``wild_reads``, entries that it would have followed out of the
        buffer; ``duplicate_rows``, tokens with an expert twice; ``wrong_rows``, tokens whose output is wrong;
        ``wrong_clean_rows``, of these, tokens with distinct experts; ``nan_rows``, tokens with NaN.
    """
    tokens, top_k, experts = batch
    topk_ids = make_ids(ids, batch, seed=1, device=device) if isinstance(ids, str) else ids
    # Misread ids name experts that the router did not choose.
    misread = isinstance(ids, str) and ids == MISREAD
    meant = make_ids("distinct", batch, seed=1, device=device) if misread else topk_ids
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
    out, wild_reads = finalise(outputs(topk_ids, built, memory), weights, topk_ids, built, guard=guard)
    wrong = ~torch.isclose(out, layer(x, weights, meant, table), atol=1e-5).all(1)
    nan, duplicates = out.isnan().any(1), rows_with_duplicates(topk_ids)
    outcome = NAN_ROWS if bool(nan.any()) else SILENT if bool(wrong.any()) else RIGHT
    outcome = ILLEGAL_ACCESS if wild_reads else outcome
    return good_if(
        outcome == RIGHT,
        outcome,
        one_block=built.one_block,
        unwritten=int(holes(over_canary, topk_ids).sum()),
        wild_reads=wild_reads,
        duplicate_rows=int(duplicates.sum()),
        wrong_rows=int(wrong.sum()),
        wrong_clean_rows=int((wrong & ~duplicates).sum()),
        nan_rows=int(nan.sum()),
    )
