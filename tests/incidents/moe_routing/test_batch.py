"""Expert ids of a batch are what they are called, on every machine."""

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


def test_a_row_with_an_expert_twice_is_found_wherever_they_stand():
    ids = torch.tensor([[1, 2, 3], [1, 2, 1], [3, 1, 3], [-1, -1, 2]])
    assert rows_with_duplicates(ids).tolist() == [False, True, True, True]
