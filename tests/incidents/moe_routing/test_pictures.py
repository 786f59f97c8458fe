"""The map's picture crosses from one builder to the other between 256 and 257 tokens."""

import pytest

from staleproof.incidents.moe_routing.batch import Batch, make_ids, rows_with_duplicates
from staleproof.incidents.moe_routing.pictures import map_picture


@pytest.mark.parametrize(("tokens", "one_block"), [(256, True), (257, False)])
def test_holes_are_in_the_tokens_with_a_duplicate_and_only_past_256(tokens, one_block):
    batch = Batch(tokens, 8, 128)
    picture = map_picture(batch, "cpu")
    assert picture.one_block == one_block
    again = rows_with_duplicates(make_ids("partly equal", batch, seed=1)).tolist()
    assert [any(line) for line in picture.holes] == [flag and not one_block for flag in again]
    assert picture.unwritten == (0 if one_block else 7 * sum(again))
    assert map_picture(batch, "cpu", "distinct").unwritten == 0
    assert picture.title.startswith(f"{tokens} tokens: {'one kernel' if one_block else 'three kernels'}, ")
