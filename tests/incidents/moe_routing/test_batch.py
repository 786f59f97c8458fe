"""Expert ids of a batch are what they are called, on every machine."""

import pytest
import torch

from staleproof.incidents.moe_routing.batch import Batch, make_ids, rows_with_duplicates

BATCH = Batch(50, 10, 64)


def test_ids_are_the_same_everywhere_and_what_they_are_called():
    distinct = make_ids("distinct", BATCH)
    assert not bool(rows_with_duplicates(distinct).any())
    assert int(distinct.min()) >= 0
    assert int(distinct.max()) < 64
    assert torch.equal(distinct, make_ids("distinct", BATCH))
    equal = make_ids("all equal", BATCH)
    assert equal.unique().numel() == 1
    partly = make_ids("partly equal", BATCH)
    rows = rows_with_duplicates(partly)
    assert int(rows.sum()) == 10
    assert bool((partly[rows] == partly[rows, :1]).all())


@pytest.mark.parametrize(("tokens", "twice"), [(1, 1), (5, 1), (8, 2), (10, 2)])
def test_a_fifth_of_the_rows_repeats_an_expert_and_one_at_least(tokens, twice):
    ids = make_ids("partly equal", Batch(tokens, 4, 64))
    assert int(rows_with_duplicates(ids).sum()) == twice


def test_an_unknown_kind_and_too_many_slots_are_named():
    with pytest.raises(ValueError, match=r"kind: expected distinct or all equal or .*, got 'equal'"):
        make_ids("equal", BATCH)
    with pytest.raises(ValueError, match="top_k: expected at most 4 experts, got 5"):
        make_ids("distinct", Batch(1, 5, 4))
    assert sorted(make_ids("distinct", Batch(1, 4, 4))[0].tolist()) == [0, 1, 2, 3]


def test_a_row_with_an_expert_twice_is_found_wherever_they_stand():
    ids = torch.tensor([[1, 2, 3], [1, 2, 1], [3, 1, 3], [-1, -1, 2]])
    assert rows_with_duplicates(ids).tolist() == [False, True, True, True]
