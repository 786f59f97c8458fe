"""One batch through map and finalise step: what is unwritten, what is wrong, and how it ends."""

from __future__ import annotations

import pytest
import torch

from staleproof.incidents.moe_routing.batch import ILLEGAL_ACCESS, RIGHT, SILENT, Batch, make_ids
from staleproof.incidents.moe_routing.observation import MEMORY, observe

BATCH = Batch(20, 10, 64)


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(257, 8, 128), (20, 10, 64), (4, 8, 512)])
def test_all_but_the_first_slot_of_a_duplicate_are_unwritten(
    device: str, tokens: int, top_k: int, experts: int
) -> None:
    for ids, rows in (("distinct", 0), ("all equal", tokens), ("partly equal", -(-tokens // 5))):
        seen = observe(Batch(tokens, top_k, experts), ids, device)
        assert not seen.one_block
        assert seen.duplicate_rows == rows
        assert seen.unwritten == seen.wild_reads == rows * (top_k - 1)
        assert seen.outcome == (ILLEGAL_ACCESS if rows else RIGHT)
        # Nothing to lose for the other rows of the batch: the damage stays where it was done.
        assert (seen.wrong_rows, seen.wrong_clean_rows) == (rows, 0)


@pytest.mark.parametrize("guard", [False, True])
def test_what_the_memory_contained_decides(guard: bool) -> None:
    def wrong(before: str, ids: str = "all equal") -> tuple[str, int, int]:
        seen = observe(Batch(512, 8, 128), ids, before=before, guard=guard)
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
    ids = make_ids("distinct", BATCH, device=device)
    ids[:5], ids[5:10] = -1, 64
    for before in MEMORY:
        seen = observe(BATCH, ids, device, before=before)
        assert (seen.outcome, seen.unwritten, seen.wild_reads) == (RIGHT, 0, 0)


@pytest.mark.parametrize(
    ("batch", "ids", "before", "message"),
    [
        (Batch(4, 2, 8), "equal", "canary", "kind: expected distinct or all equal"),
        (Batch(4, 2, 8), "distinct", "noise", "before: expected canary or zeros"),
        (Batch(4, 9, 8), "distinct", "canary", "top_k: expected at most 8 experts, got 9"),
        (Batch(4, 2, 8), torch.zeros(4, 3).int(), "canary", r"ids: expected shape \(4, 2\)"),
    ],
)
def test_bad_input_names_the_argument(
    batch: Batch, ids: str | torch.Tensor, before: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        observe(batch, ids, before=before)
