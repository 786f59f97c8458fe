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

from staleproof import check, device
from staleproof.vllm.routing_calls import sorts_in_one_block

device.load_triton()

import triton
import triton.language as tl

# Marks map entries that nobody wrote. The bytes 0x7f make an index far outside any buffer.
CANARY = 0x7F7F7F7F
# Bits of an expert's number with which one block takes all its tokens in 160 KiB of shared memory.
ROOMY_BITS = 8
IDS_DTYPES = (torch.int32, torch.int64)


@triton.jit
def _rank_kernel(
    keys, row_of_slot, slot_of_row, tokens, top_k, items, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    """The one-block builder: the row of each (token, slot) is its rank by expert, also for duplicates."""
    item = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + item, mask=item < items, other=0)
    rank = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, items, CHUNK):
        other = first + tl.arange(0, CHUNK)
        other_key = tl.load(keys + other, mask=other < items, other=2147483647)
        before = (other_key[None, :] == key[:, None]) & (other[None, :] < item[:, None])
        before = before | (other_key[None, :] < key[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
    slot = (item % top_k) * tokens + item // top_k
    tl.store(row_of_slot + slot, rank, mask=item < items)
    tl.store(slot_of_row + rank, slot.to(tl.int32), mask=item < items)


@triton.jit
def _block_prefix_kernel(
    ids, found, counts, tokens, experts, blocks,
    TOP_K: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Step 1: lists the slots of each expert among the tokens of one block, and counts them."""
    expert = tl.program_id(0).to(tl.int64) * EXPERTS + tl.arange(0, EXPERTS)
    block = tl.program_id(1).to(tl.int64)
    token = block * TOKENS + tl.arange(0, TOKENS)
    slot = tl.full([EXPERTS, TOKENS], -1, dtype=tl.int64)
    for k in tl.static_range(TOP_K):
        chosen = tl.load(ids + token * TOP_K + k, mask=token < tokens, other=-1)
        # Only the first slot that matches, because upstream leaves its loop there.
        first = (chosen[None, :] == expert[:, None]) & (slot < 0)
        slot = tl.where(first, k * tokens + token[None, :], slot)
    matched = (slot >= 0).to(tl.int32)
    place = tl.cumsum(matched, 1) - matched
    where = expert[:, None] * tokens + block * TOKENS + place
    tl.store(found + where, slot.to(tl.int32), mask=(slot >= 0) & (expert[:, None] < experts))
    tl.store(counts + expert * blocks + block, tl.sum(matched, 1), mask=expert < experts)


@triton.jit
def _global_prefix_kernel(counts, first_rows, first_row, experts, blocks, TOTAL: tl.constexpr):
    """Step 2: computes at which row each block of each expert begins."""
    index = tl.arange(0, TOTAL)
    count = tl.load(counts + index, mask=index < experts * blocks, other=0)
    begins = tl.cumsum(count, 0) - count
    tl.store(first_rows + index, begins, mask=index < experts * blocks)
    opens = (index < experts * blocks) & (index % blocks == 0)
    tl.store(first_row + index // blocks, begins, mask=opens)
    tl.store(first_row + experts, tl.sum(count, 0))


@triton.jit
def _merge_kernel(
    found, counts, first_rows, row_of_slot, slot_of_row, tokens, experts, blocks,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Step 3: writes the map and its inverse for the slots of step 1, and no other entry."""
    expert = tl.program_id(0).to(tl.int64) * EXPERTS + tl.arange(0, EXPERTS)
    block = tl.program_id(1).to(tl.int64)
    place = tl.arange(0, TOKENS)[None, :]
    known = expert < experts
    count = tl.load(counts + expert * blocks + block, mask=known, other=0)[:, None]
    begin = tl.load(first_rows + expert * blocks + block, mask=known, other=0)[:, None]
    where = expert[:, None] * tokens + block * TOKENS + place
    slot = tl.load(found + where, mask=place < count, other=0).to(tl.int64)
    row = begin + place
    tl.store(row_of_slot + slot, row, mask=place < count)
    tl.store(slot_of_row + row, slot.to(tl.int32), mask=place < count)


@triton.jit
def _finalise_kernel(
    rows, weights, ids, row_of_slot, out, wild_reads, tokens, experts, hidden,
    GUARD: tl.constexpr, TOP_K: tl.constexpr, TOKENS: tl.constexpr, HIDDEN: tl.constexpr,
):  # fmt: skip
    """Sums each token's slots with their weights, reading each slot from the row that the map gives."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, HIDDEN)[None, :]
    known = token < tokens
    total = tl.zeros([TOKENS, HIDDEN], dtype=tl.float32)
    wild = tl.zeros([TOKENS], dtype=tl.int32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids + token * TOP_K + k, mask=known, other=-1)
        weight = tl.load(weights + token * TOP_K + k, mask=known, other=0.0)
        row = tl.load(row_of_slot + k * tokens + token, mask=known, other=0).to(tl.int64)
        here = (expert >= 0) & (expert < experts)
        inside = (row >= 0) & (row < tokens * TOP_K)
        read = (here & inside)[:, None] & (column < hidden)
        value = tl.load(rows + row[:, None] * hidden + column, mask=read, other=0.0)
        total += tl.where(read, weight[:, None] * value, 0.0)
        wild += tl.where(here & (inside == 0), 1, 0)
    where = out + token[:, None] * hidden + column
    tl.store(where, total, mask=known[:, None] & (column < hidden))
    if not GUARD:
        tl.atomic_add(wild_reads, tl.sum(wild, 0))


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


def _checked_map(
    topk_ids: torch.Tensor, num_experts: int, before: torch.Tensor | None, one_block: bool | None
) -> tuple[torch.Tensor, bool]:
    """The memory of the map before the build, and whether one block builds it."""
    check.tensor("topk_ids", topk_ids, ndim=2, dtype=IDS_DTYPES)
    tokens, top_k = topk_ids.shape
    check.require(topk_ids.numel() > 0, "topk_ids", "at least one token and slot", (tokens, top_k))
    check.require(num_experts > 0, "num_experts", "at least 1", num_experts)
    if before is None:
        memory = torch.full((top_k * tokens,), CANARY, dtype=torch.int32, device=topk_ids.device)
    else:
        check.tensor("before", before, shape=(top_k * tokens,), dtype=torch.int32, like=topk_ids)
        memory = before.clone()
    return memory, takes_one_block(tokens, top_k, num_experts) if one_block is None else one_block


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
    """
    row_of_slot, one_block = _checked_map(topk_ids, num_experts, before, one_block)
    ids, (tokens, top_k) = topk_ids.contiguous(), topk_ids.shape
    slot_of_row = torch.full_like(row_of_slot, CANARY)
    if one_block:
        keys = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts).int()
        _rank_kernel[(triton.cdiv(ids.numel(), 64),)](
            keys, row_of_slot, slot_of_row, tokens, top_k, ids.numel(), BLOCK=64, CHUNK=256
        )
        return ExpertMap(row_of_slot, slot_of_row, _first_row(keys, num_experts), True)
    block, experts = min(256, max(16, triton.next_power_of_2(tokens))), 16
    blocks = triton.cdiv(tokens, block)
    first_row = row_of_slot.new_empty(num_experts + 1)
    found = row_of_slot.new_empty(num_experts * tokens)
    counts = row_of_slot.new_empty(num_experts * blocks)
    first_rows = torch.empty_like(counts)
    grid = (triton.cdiv(num_experts, experts), blocks)
    _block_prefix_kernel[grid](
        ids, found, counts, tokens, num_experts, blocks, TOP_K=top_k, TOKENS=block, EXPERTS=experts
    )
    _global_prefix_kernel[(1,)](
        counts, first_rows, first_row, num_experts, blocks, TOTAL=triton.next_power_of_2(counts.numel())
    )
    _merge_kernel[grid](
        found,
        counts,
        first_rows,
        row_of_slot,
        slot_of_row,
        tokens,
        num_experts,
        blocks,
        TOKENS=block,
        EXPERTS=experts,
    )
    return ExpertMap(row_of_slot, slot_of_row, first_row, False)


def _first_row(keys: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The first row of each expert, from the expert of every slot."""
    counts = torch.bincount(keys.flatten(), minlength=num_experts + 1)
    return (counts.cumsum(0) - counts).int()


def build_map_torch(
    topk_ids: torch.Tensor,
    num_experts: int,
    *,
    before: torch.Tensor | None = None,
    one_block: bool | None = None,
) -> ExpertMap:
    """:func:`build_map` in plain PyTorch."""
    row_of_slot, one_block = _checked_map(topk_ids, num_experts, before, one_block)
    tokens, top_k = topk_ids.shape
    slot_of_row = torch.full_like(row_of_slot, CANARY)
    if one_block:
        in_range = (topk_ids >= 0) & (topk_ids < num_experts)
        keys = torch.where(in_range, topk_ids, num_experts).flatten()
        by_expert = keys.argsort(stable=True)
        slots = by_expert % top_k * tokens + by_expert // top_k
        row_of_slot[slots] = torch.arange(len(slots)).to(row_of_slot)
        slot_of_row[:] = slots
        return ExpertMap(row_of_slot, slot_of_row, _first_row(keys, num_experts), True)
    first_row, row = torch.empty(num_experts + 1).to(row_of_slot), 0
    for expert in range(num_experts):
        first_row[expert] = row
        match = topk_ids == expert
        token = match.any(1).nonzero().flatten()
        # argmax gives the first slot that matches, where upstream's search stops.
        slots = match.int().argmax(1)[token] * tokens + token
        row_of_slot[slots] = torch.arange(row, row + len(slots)).to(row_of_slot)
        slot_of_row[row : row + len(slots)] = slots
        row += len(slots)
    first_row[num_experts] = row
    return ExpertMap(row_of_slot, slot_of_row, first_row, False)


def _check_finalise(
    rows: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: ExpertMap
) -> None:
    check.tensor("topk_ids", topk_ids, ndim=2, dtype=IDS_DTYPES)
    shape = (topk_ids.shape[0], topk_ids.shape[1])
    check.tensor("topk_weights", topk_weights, shape=shape, dtype=torch.float32, like=topk_ids)
    slots = topk_ids.numel()
    check.tensor("rows", rows, shape=(slots, None), dtype=torch.float32, like=topk_ids)
    check.tensor("expert_map", expert_map.row_of_slot, shape=(slots,), like=topk_ids)


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
    _check_finalise(rows, topk_weights, topk_ids, expert_map)
    (tokens, top_k), hidden = topk_ids.shape, rows.shape[1]
    out = rows.new_empty(tokens, hidden)
    wild_reads = torch.zeros(1, dtype=torch.int32, device=rows.device)
    _finalise_kernel[(triton.cdiv(tokens, 32),)](
        rows.contiguous(),
        topk_weights.contiguous(),
        topk_ids.contiguous(),
        expert_map.row_of_slot,
        out,
        wild_reads,
        tokens,
        len(expert_map.first_row) - 1,
        hidden,
        GUARD=guard,
        TOP_K=top_k,
        TOKENS=32,
        HIDDEN=triton.next_power_of_2(hidden),
    )
    return Finalised(out, int(wild_reads))


def finalise_torch(
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: ExpertMap,
    *,
    guard: bool = False,
) -> Finalised:
    """:func:`finalise` in plain PyTorch."""
    _check_finalise(rows, topk_weights, topk_ids, expert_map)
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
