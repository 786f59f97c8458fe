"""Map builder and finalise step: which entries nobody writes, and what a slot's row adds."""

from __future__ import annotations

import pytest
import torch

from staleproof.incidents.moe_routing import consumer
from staleproof.incidents.moe_routing.consumer import CANARY


def mixed_ids(tokens: int, top_k: int, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Ids with duplicates at random, some of them out of range on either side."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(-2, experts + 2, (tokens, top_k), generator=generator).to(dtype)


def brute_force(ids: torch.Tensor, experts: int, one_block: bool) -> tuple[list[int], list[int]]:
    """Rows and first rows, slot by slot in plain Python."""
    tokens, top_k = ids.shape
    row_of_slot, first_row, row = [CANARY] * ids.numel(), [], 0
    chosen = [[e if 0 <= e < experts else experts for e in line] for line in ids.tolist()]
    # In one block the slots without an expert get rows too, behind all others.
    for expert in range(experts + 1):
        first_row.append(row)
        if expert == experts and not one_block:
            break
        for token in range(tokens):
            for slot in range(top_k):
                if chosen[token][slot] == expert:
                    row_of_slot[slot * tokens + token] = row
                    row += 1
                    if not one_block:
                        break
    return row_of_slot, first_row


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "expected"),
    [
        (1, 1, 1, True),
        (256, 8, 254, True),
        (128, 6, 128, True),
        (257, 8, 128, False),
        (4, 10, 128, False),
        (4, 8, 511, False),
    ],
)
def test_which_builder_is_taken(tokens, top_k, experts, expected):
    assert consumer.takes_one_block(tokens, top_k, experts) is expected
    built = consumer.build_map(torch.zeros(tokens, top_k, dtype=torch.int32), experts)
    assert built.one_block is expected


@pytest.mark.parametrize(
    ("one_block", "tokens", "top_k", "experts", "dtype"),
    [(True, 5, 3, 7, torch.int32), (False, 37, 10, 40, torch.int64), (False, 260, 2, 17, torch.int32)],
)
def test_the_map_is_the_one_of_a_search_slot_by_slot(device, one_block, tokens, top_k, experts, dtype):
    ids = mixed_ids(tokens, top_k, experts, dtype).to(device)
    built = consumer.build_map(ids, experts, one_block=one_block)
    row_of_slot, first_row = brute_force(ids, experts, one_block)
    assert built.row_of_slot.tolist() == row_of_slot
    assert built.first_row.tolist() == first_row
    written = [(row, slot) for slot, row in enumerate(row_of_slot) if row != CANARY]
    slot_of_row = [slot for _, slot in sorted(written)]
    assert built.slot_of_row.tolist() == slot_of_row + [CANARY] * (ids.numel() - len(written))


@pytest.mark.parametrize("guard", [False, True])
def test_the_finalise_step_gives_the_weighted_sum(device, guard):
    ids = mixed_ids(37, 3, 9, torch.int32).to(device)
    built = consumer.build_map(ids, 9, one_block=False)
    built.row_of_slot[:3] = torch.tensor([-1, 37 * 3, 5])
    rows, weights = torch.randn(37 * 3, 20, device=device), torch.rand(37, 3, device=device)
    expected, wild = torch.zeros(37, 20, device=device), 0
    for token in range(37):
        for slot in range(3):
            row = int(built.row_of_slot[slot * 37 + token])
            if 0 <= int(ids[token, slot]) < 9:
                if 0 <= row < len(rows):
                    expected[token] += weights[token, slot] * rows[row]
                else:
                    wild += 1
    assert wild > 2
    got, wild_reads = consumer.finalise(rows, weights, ids, built, guard=guard)
    torch.testing.assert_close(got, expected)
    assert wild_reads == (0 if guard else wild)
