"""Comparisons with a reference."""

from __future__ import annotations

import pytest
import torch

from staleproof.cases.compare import other_bits, too_far


@pytest.mark.parametrize(
    ("factor", "budget", "found"),
    [(1.0, 0, False), (1.001, 2**-6, False), (1.1, 2**-6, True), (3.0, 2**-6, True), (0.0, 0.5, True)],
)
def test_an_error_beyond_the_budget_is_found(factor, budget, found):
    want = torch.linspace(-2, 2, 9)
    assert (too_far("rows", want * factor, want, budget) is not None) == found


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_element_that_is_not_finite_is_found(bad):
    got = torch.ones(9)
    got[4] = bad
    assert too_far("rows", got, torch.ones(9), 1e9) == "rows: not finite"


def test_bits_are_compared_not_values():
    assert other_bits("rows", torch.tensor([-0.0]), torch.tensor([0.0])) == "rows: 1 of 4 bytes differ"
    nan = torch.tensor([torch.nan])
    assert other_bits("rows", nan, nan.clone()) is None


@pytest.mark.parametrize("compare", [other_bits, lambda *a: too_far(*a, 1.0)])
def test_another_shape_is_refused(compare):
    with pytest.raises(ValueError, match=r"got: expected the shape \(2,\), got \(3,\)"):
        compare("rows", torch.ones(3), torch.ones(2))
