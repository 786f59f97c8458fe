"""Map builder and finalise step: which entries nobody writes, and what follows from it."""

from __future__ import annotations

import pytest
import torch

from staleproof.incidents.moe_routing import broken, consumer
from staleproof.incidents.moe_routing.consumer import CANARY, ILLEGAL_ACCESS, RIGHT, SILENT, observe
from staleproof.ops.topk import topk_softmax

FORMS = {"triton": consumer.build_map, "torch": consumer.build_map_torch}


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
        (256, 8, 510, True),
        (128, 6, 128, True),
        (257, 8, 128, False),
        (4, 10, 128, False),
        (4, 3, 128, False),
        (4, 8, 511, False),
    ],
)
def test_which_builder_is_taken(tokens: int, top_k: int, experts: int, expected: bool) -> None:
    assert consumer.takes_one_block(tokens, top_k, experts) is expected
    built = consumer.build_map_torch(torch.zeros(tokens, top_k, dtype=torch.int32), experts)
    assert built.one_block is expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("one_block", [True, False])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "dtype"),
    [(5, 3, 7, torch.int32), (37, 10, 40, torch.int64), (260, 2, 17, torch.int32)],
)
def test_the_map_is_the_one_of_a_search_slot_by_slot(
    device: str, form: str, one_block: bool, tokens: int, top_k: int, experts: int, dtype: torch.dtype
) -> None:
    ids = mixed_ids(tokens, top_k, experts, dtype).to(device)
    built = FORMS[form](ids, experts, one_block=one_block)
    row_of_slot, first_row = brute_force(ids, experts, one_block)
    assert built.row_of_slot.tolist() == row_of_slot
    assert built.first_row.tolist() == first_row
    written = [(row, slot) for slot, row in enumerate(row_of_slot) if row != CANARY]
    slot_of_row = [slot for _, slot in sorted(written)]
    assert built.slot_of_row.tolist() == slot_of_row + [CANARY] * (ids.numel() - len(written))


@pytest.mark.parametrize("form", FORMS)
def test_unwritten_entries_are_what_the_memory_held(device: str, form: str) -> None:
    ids = torch.tensor([[3, 3], [1, 2], [9, 1]], dtype=torch.int32, device=device)
    held = torch.arange(100, 106, dtype=torch.int32, device=device)
    built = FORMS[form](ids, 4, held=held, one_block=False)
    # Slot 1 of token 0 repeats expert 3; slot 0 of token 2 has no expert.
    assert built.row_of_slot.tolist() == [3, 0, 102, 103, 2, 1]
    assert held.tolist() == [*range(100, 106)]


@pytest.mark.parametrize("guard", [False, True])
def test_both_finalise_forms_give_the_weighted_sum(device: str, guard: bool) -> None:
    ids = mixed_ids(37, 3, 9, torch.int32).to(device)
    built = consumer.build_map_torch(ids, 9, one_block=False)
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
    for finalise in (consumer.finalise, consumer.finalise_torch):
        got = finalise(rows, weights, ids, built, guard=guard)
        torch.testing.assert_close(got.out, expected)
        assert got.wild_reads == (0 if guard else wild)


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(257, 8, 128), (20, 10, 64), (4, 8, 512)])
def test_all_but_the_first_slot_of_a_duplicate_are_unwritten(
    device: str, tokens: int, top_k: int, experts: int
) -> None:
    for ids, rows in (("distinct", 0), ("all equal", tokens), ("partly equal", -(-tokens // 5))):
        seen = observe(tokens, top_k, experts, ids, device=device)
        assert not seen.one_block
        assert seen.duplicate_rows == rows
        assert seen.unwritten == seen.wild_reads == rows * (top_k - 1)
        assert seen.outcome == (ILLEGAL_ACCESS if rows else RIGHT)
        # Nothing to lose for the other rows of the batch: the damage stays where it was done.
        assert (seen.wrong_rows, seen.wrong_clean_rows) == (rows, 0)


@pytest.mark.parametrize("ids", consumer.IDS)
@pytest.mark.parametrize(("tokens", "one_block"), [(256, True), (257, False)])
def test_one_token_more_and_duplicates_hurt(ids: str, tokens: int, one_block: bool) -> None:
    seen = observe(tokens, 8, 128, ids, in_torch=True)
    assert seen.one_block is one_block
    assert (seen.outcome == RIGHT) is (one_block or ids == "distinct")


@pytest.mark.parametrize("guard", [False, True])
def test_what_the_memory_held_decides(guard: bool) -> None:
    def wrong(held: str, ids: str = "all equal") -> tuple[str, int, int]:
        seen = observe(512, 8, 128, ids, held=held, guard=guard, in_torch=True)
        return seen.outcome, seen.wild_reads, seen.wrong_rows

    # Token 0 owns row 0, which zeros lead every other token to.
    assert wrong("zeros") == (SILENT, 0, 511)
    assert wrong("previous map") == (SILENT, 0, 512)
    assert wrong("previous map", "partly equal") == (SILENT, 0, 103)
    if guard:
        # No crash, and only the first slot counts.
        assert wrong("canary") == (SILENT, 0, 512)
    else:
        assert wrong("canary") == (ILLEGAL_ACCESS, 512 * 7, 512)


def test_an_id_out_of_range_adds_nothing(device: str) -> None:
    ids = consumer.make_ids("distinct", 20, 10, 64).to(device)
    ids[:5], ids[5:10] = -1, 64
    for held in consumer.HELD:
        seen = observe(20, 10, 64, ids, held=held, device=device)
        assert (seen.outcome, seen.unwritten, seen.wild_reads) == (RIGHT, 0, 0)


def test_indexing_with_the_padding_id_takes_the_last_expert() -> None:
    x, table = torch.ones(2, 1), torch.tensor([[10.0], [20.0], [30.0]])
    weights = torch.ones(2, 2)
    ids = torch.tensor([[0, -1], [1, 3]])
    assert consumer.layer(x, weights, ids, table).tolist() == [[10.0], [20.0]]
    got = consumer.index_directly(x, weights, ids, table)
    assert got.out.tolist() == [[40.0], [20.0]]
    assert got.wild_reads == 1


def test_our_routing_in_front_leaves_nothing_unwritten(device: str) -> None:
    logits = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).to(device)
    logits[:7] = float("nan")
    _, ids = broken.route(broken.warp_keeps_its_first_column, logits, 10)
    off = observe(20, 10, 64, ids, device=device)
    assert (off.outcome, off.unwritten) == (ILLEGAL_ACCESS, 7 * 9)
    _, ids = topk_softmax(logits, 10)
    on = observe(20, 10, 64, ids, device=device)
    assert (on.outcome, on.unwritten, on.duplicate_rows) == (RIGHT, 0, 0)


def test_ids_are_the_same_everywhere_and_what_they_are_called() -> None:
    distinct = consumer.make_ids("distinct", 50, 10, 64)
    assert not bool(broken.rows_with_duplicates(distinct).any())
    assert int(distinct.min()) >= 0
    assert int(distinct.max()) < 64
    assert torch.equal(distinct, consumer.make_ids("distinct", 50, 10, 64))
    equal = consumer.make_ids("all equal", 50, 10, 64)
    assert equal.unique().numel() == 1
    partly = consumer.make_ids("partly equal", 50, 10, 64)
    rows = broken.rows_with_duplicates(partly)
    assert int(rows.sum()) == 10
    assert bool((partly[rows] == partly[rows, :1]).all())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: consumer.build_map(torch.zeros(4), 8), "topk_ids: expected a tensor of rank 2"),
        (lambda: consumer.build_map(torch.zeros(4, 2), 8), "topk_ids: expected torch.int32"),
        (lambda: consumer.build_map(torch.zeros(0, 2).int(), 8), "topk_ids: expected at least one"),
        (lambda: consumer.build_map(torch.zeros(4, 2).int(), 0), "num_experts: expected at least"),
        (
            lambda: consumer.build_map(torch.zeros(4, 2).int(), 8, held=torch.zeros(7).int()),
            r"held: expected shape \(8\)",
        ),
        (lambda: observe(4, 2, 8, "equal"), "kind: expected distinct or all equal"),
        (lambda: observe(4, 2, 8, "distinct", held="noise"), "held: expected canary or zeros"),
        (lambda: observe(4, 9, 8, "distinct"), "top_k: expected at most 8 experts, got 9"),
        (lambda: observe(4, 2, 8, torch.zeros(4, 3).int()), r"ids: expected shape \(4, 2\)"),
    ],
)
def test_bad_input_names_the_argument(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


def test_finalise_refuses_what_does_not_fit() -> None:
    ids = consumer.make_ids("distinct", 4, 2, 8)
    built = consumer.build_map_torch(ids, 8)
    rows, weights = torch.zeros(8, 3), torch.zeros(4, 2)
    for finalise in (consumer.finalise, consumer.finalise_torch):
        with pytest.raises(ValueError, match=r"rows: expected shape \(8, \*\)"):
            finalise(rows[:7], weights, ids, built)
        with pytest.raises(ValueError, match=r"topk_weights: expected shape \(4, 2\)"):
            finalise(rows, weights[:3], ids, built)
        with pytest.raises(ValueError, match=r"expert_map: expected shape \(6\)"):
            finalise(rows[:6], weights[:3], ids[:3], built)
