"""What a fused MoE does with expert ids, re-implemented small: expert map and finalise step.

Follows FlashInfer's ``cutlass_fused_moe`` (``cutlass_fused_moe_kernels.cuh``), which expects the k
experts of a token to be distinct. Its three-step map builder searches a token's slots for an expert
and stops at the first match, so the other slots of a duplicate get no entry. The finalise step then
follows whatever the memory contained before. Nothing crashes here: an entry that points out of the buffer
is counted, and adds 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from staleproof import check
from staleproof.vllm.routing_calls import sorts_in_one_block

# Marks map entries that nobody wrote. The bytes 0x7f make an index far outside any buffer.
CANARY = 0x7F7F7F7F
# Bits of an expert's number with which one block takes all its tokens in 160 KiB of shared memory.
ROOMY_BITS = 8
IDS_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class ExpertMap:
    """Where the expert output of each slot lies; rows are sorted by expert.

    Attributes:
        row_of_slot: (top_k * tokens,) int32, entry ``slot * tokens + token``
            (upstream: ``unpermuted_row_to_permuted_row``).
        slot_of_row: (top_k * tokens,) int32, its inverse (``permuted_row_to_unpermuted_row``).
        first_row: (experts + 1,) int32, where each expert's rows begin; the last entry is their end.
        one_block: which of the two builders made it.
    """

    row_of_slot: torch.Tensor
    slot_of_row: torch.Tensor
    first_row: torch.Tensor
    one_block: bool


@dataclass(frozen=True)
class Finalised:
    """The layer's output.

    Attributes:
        out: (tokens, hidden) float32.
        wild_reads: map entries outside the buffer that upstream would have followed.
    """

    out: torch.Tensor
    wild_reads: int


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

    Raises:
        ValueError: an argument does not fit.

    >>> build_map(torch.tensor([[3, 3], [1, 2]]), 4, before=torch.zeros(4).int(), one_block=False).row_of_slot
    tensor([2, 0, 0, 1], dtype=torch.int32)
    """
    check.tensor("topk_ids", topk_ids, ndim=2, dtype=IDS_DTYPES)
    tokens, top_k = topk_ids.shape
    check.require(topk_ids.numel() > 0, "topk_ids", "at least one token and slot", (tokens, top_k))
    check.require(num_experts > 0, "num_experts", "at least 1", num_experts)
    if before is None:
        row_of_slot = torch.full((top_k * tokens,), CANARY, dtype=torch.int32, device=topk_ids.device)
    else:
        check.tensor("before", before, shape=(top_k * tokens,), dtype=torch.int32, like=topk_ids)
        row_of_slot = before.clone()
    if one_block is None:
        one_block = takes_one_block(tokens, top_k, num_experts)
    in_range = (topk_ids >= 0) & (topk_ids < num_experts)
    # One block ranks every slot, those without an expert last. The three steps look through the tokens for
    # each expert, and stop at the first slot of a token that matches.
    again = (topk_ids[:, :, None] == topk_ids[:, None, :]).tril(-1).any(-1)
    found = torch.ones_like(in_range) if one_block else in_range & ~again
    key = torch.where(in_range & found, topk_ids, num_experts).flatten()
    by_expert = key.argsort(stable=True)[: int(found.sum())]
    slots = by_expert % top_k * tokens + by_expert // top_k
    row_of_slot[slots] = torch.arange(len(slots)).to(row_of_slot)
    slot_of_row = torch.full_like(row_of_slot, CANARY)
    slot_of_row[: len(slots)] = slots.int()
    counts = torch.bincount(key, minlength=num_experts + 1)
    return ExpertMap(row_of_slot, slot_of_row, (counts.cumsum(0) - counts).int(), one_block)


def finalise(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: ExpertMap,
    *,
    guard: bool = False,
) -> Finalised:
    """Sum each token's expert outputs, as FlashInfer's ``finalizeMoeRoutingKernel``.

    Args:
        rows: (top_k * tokens, hidden) float32, the expert outputs in the order of the map.
        topk_weights: (tokens, top_k) float32.
        topk_ids: (tokens, top_k) int32 or int64; a slot whose id is out of range adds 0.
        expert_map: from :func:`build_map`.
        guard: whether entries outside ``rows`` are skipped, as in FlashInfer since 0.6.10 (FlashInfer
            #2762). They add 0 either way; without the guard they are counted as wild reads.

    Raises:
        ValueError: an argument does not fit.
    """
    check.tensor("topk_ids", topk_ids, ndim=2, dtype=IDS_DTYPES)
    tokens, top_k = topk_ids.shape
    check.tensor("topk_weights", topk_weights, shape=(tokens, top_k), dtype=torch.float32, like=topk_ids)
    slots = topk_ids.numel()
    check.tensor("rows", rows, shape=(slots, None), dtype=torch.float32, like=topk_ids)
    check.tensor("expert_map", expert_map.row_of_slot, shape=(slots,), like=topk_ids)
    out, wild_reads = rows.new_zeros(tokens, rows.shape[1]), 0
    experts = len(expert_map.first_row) - 1
    for k in range(top_k):
        row = expert_map.row_of_slot[k * tokens : (k + 1) * tokens].long()
        has_expert = (topk_ids[:, k] >= 0) & (topk_ids[:, k] < experts)
        inside = (row >= 0) & (row < len(rows))
        wild_reads += 0 if guard else int((has_expert & ~inside).sum())
        read = has_expert & inside
        out[read] += topk_weights[read, k, None] * rows[row[read]]
    return Finalised(out, wild_reads)


def layer(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """The right answer: each token's weighted sum over its experts, counting duplicates.

    An expert here only multiplies by its row of ``table``, so that the result shows which one ran.

    Args:
        x: (tokens, hidden) float32.
        topk_weights: (tokens, top_k) float32.
        topk_ids: (tokens, top_k); an id out of range adds 0.
        table: (experts, hidden) float32.

    Returns:
        (tokens, hidden) float32.
    """
    return _sum_over_slots(x, topk_weights, topk_ids, table, lowest=0).out


def index_directly(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, table: torch.Tensor
) -> Finalised:
    """A consumer that indexes with the ids as they are, the padding id -1 included.

    In Python -1 is the last expert (the ids of vLLM #46428 met such consumers); in a kernel the
    address would lie before the buffer. Ids outside ``table`` either way are counted, and add 0.
    Arguments are those of :func:`layer`.
    """
    return _sum_over_slots(x, topk_weights, topk_ids, table, lowest=-len(table))


def _sum_over_slots(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, table: torch.Tensor, lowest: int
) -> Finalised:
    out, skipped = torch.zeros_like(x), 0
    for k in range(ids.shape[1]):
        expert = ids[:, k].long()
        read = (expert >= lowest) & (expert < len(table))
        skipped += int((~read).sum())
        out[read] += weights[read, k, None] * (x[read] * table[expert[read]])
    return Finalised(out, skipped)
