"""Widths, packing and chance of expert ids."""

import itertools

import pytest
import torch

from staleproof.incidents.scale_padding import broken, ids


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (4, 2), (4, 3), (5, 4), (3, 4)])
def test_birthday_formula_equals_a_full_count(experts, top_k):
    draws = list(itertools.product(range(experts), repeat=top_k))
    twice = sum(len(set(draw)) < top_k for draw in draws)
    assert ids.duplicate_chance(experts, top_k) == pytest.approx(twice / len(draws))


def test_packed_int32_ids_return_and_int64_ids_do_not():
    weights, drawn = ids.simulate_routing(32, 64, 4)
    weights = torch.rand_like(weights) - 0.5
    packed = ids.pack_topk(drawn, weights)
    assert packed.dtype == torch.int32
    back = ids.unpack_topk(packed)
    assert torch.equal(back[0], drawn)
    assert torch.equal(back[1], weights.bfloat16().float())
    assert torch.equal(packed, broken.pack_in_the_width_of_the_ids(drawn, weights))
    wide = broken.pack_in_the_width_of_the_ids(drawn.long(), weights)
    assert wide.dtype == torch.int64
    assert ids.unpack_topk(broken.read_as_int32(wide))[0][:, 1::2].eq(0).all()


def test_int64_ids_are_refused_by_name():
    drawn = ids.simulate_routing(4, 8, 2)[1].long()
    message = "topk_ids: expected torch.int32, got torch.int64"
    with pytest.raises(ValueError, match=message):
        ids.require_int32_ids(drawn)
    with pytest.raises(ValueError, match=message):
        ids.pack_topk(drawn, torch.ones(4, 2))
    assert ids.require_int32_ids(drawn.int()).dtype == torch.int32
    # A kernel that is given the pointer reads them row by row.
    with pytest.raises(ValueError, match="topk_ids: expected a contiguous tensor"):
        ids.require_int32_ids(drawn.int().T)


def test_bad_size_is_refused_by_name():
    for draw in (ids.simulate_routing, broken.simulate_with_replacement):
        with pytest.raises(ValueError, match="tokens: expected at least 1, got 0"):
            draw(0, 8, 2)
        with pytest.raises(ValueError, match="top_k: expected 1 to 8 experts, got 9"):
            draw(1, 8, 9)
    assert sorted(ids.simulate_routing(1, 8, 8)[1][0].tolist()) == [*range(8)], "a token may get all"
    with pytest.raises(ValueError, match="experts: expected at least 1"):
        ids.duplicate_chance(0, 1)
    with pytest.raises(ValueError, match="topk_weights: expected shape"):
        ids.pack_topk(torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 3))
