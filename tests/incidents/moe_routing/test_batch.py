"""Expert ids of a batch are what they are called, on every machine."""

import pytest

from staleproof.incidents.moe_routing.batch import Batch, make_ids

BATCH = Batch(50, 10, 64)


def test_an_unknown_kind_and_too_many_slots_are_named():
    with pytest.raises(ValueError, match=r"kind: expected distinct or all equal or .*, got 'equal'"):
        make_ids("equal", BATCH)
    with pytest.raises(ValueError, match="top_k: expected at most 4 experts, got 5"):
        make_ids("distinct", Batch(1, 5, 4))
    assert sorted(make_ids("distinct", Batch(1, 4, 4))[0].tolist()) == [0, 1, 2, 3]
