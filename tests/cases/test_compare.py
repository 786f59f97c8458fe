"""Comparisons with a reference."""

from __future__ import annotations

import pytest
import torch

from staleproof.cases.compare import other_bits, rounding, too_far

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("factor", "budget", "found"),
    [
        (1.0, 0, None),
        (1.001, 2**-6, None),
        (1.006, 2**-6, "a common factor"),
        (1.1, 2**-6, "an element"),
        (0.0, 0.5, "an element"),
    ],
)
def test_an_error_beyond_the_budget_is_found(factor, budget, found):
    want = torch.linspace(-2, 2, 9)
    said = too_far("rows", want * factor, want, budget)
    assert said is None if found is None else f"row 0: {found} off by" in said


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP8])
def test_what_rounding_does_is_allowed_and_what_it_does_not_is_found(dtype):
    generator = torch.Generator().manual_seed(0)
    want = torch.randn(64, 512, generator=generator, dtype=torch.float64)
    rounded = want.to(dtype).double()
    assert too_far("rows", rounded, want, rounding(dtype)) is None
    share = rounding(dtype)
    louder = (want * (1 + share / 2)).to(dtype).double()
    # In each row by itself, where the rounding's own errors are larger.
    assert all(too_far("row", *rows, share) for rows in zip(louder, want, strict=True))
    one = rounded.clone()
    one[5, 7] += 2 * share * one[5].abs().max()
    assert "row 5: an element" in too_far("rows", one, want, share)
    noise = torch.randn(512, generator=generator, dtype=torch.float64)
    one = rounded.clone()
    one[9] += 2 * share * noise * one[9].norm() / noise.norm()
    assert "row 9" in too_far("rows", one, want, share)


@pytest.mark.parametrize(("elements", "allowed"), [(4, 2), (9, 3), (16, 4), (64, 4)])
def test_of_fewer_elements_less_of_a_factor_averages_out(elements, allowed):
    want = torch.ones(1, elements, dtype=torch.float64)
    assert too_far("rows", want * (1 + 0.99 * 2**-6 / allowed), want, 2**-6) is None
    assert "a common factor" in too_far("rows", want * (1 + 1.01 * 2**-6 / allowed), want, 2**-6)


def test_a_large_row_does_not_excuse_a_small_one():
    generator = torch.Generator().manual_seed(1)
    want = torch.randn(2, 512, generator=generator) * torch.tensor([[1e-3], [100.0]])
    one, all_of_them = want.clone(), want.clone()
    one[0, 0] += 2**-5 * want[0].abs().max()
    all_of_them[0] += 2**-7 * torch.randn(512, generator=generator).sign() * want[0].abs().max()
    assert too_far("rows", one, want, 2**-6).startswith("rows: row 0: an element off by 0.03")
    assert too_far("rows", all_of_them, want, 2**-6).startswith("rows: row 0: the row off by 0.02")


def test_a_row_of_zeros_allows_no_error():
    zeros = torch.zeros(2, 3)
    assert too_far("rows", zeros, zeros, 0.0) is None
    assert "row 1" in too_far("rows", torch.tensor([[0.0] * 3, [0.0, 1e-30, 0.0]]), zeros, 1.0)


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


def test_a_rounding_is_half_a_unit_in_the_last_place():
    assert (rounding(BF16), rounding(torch.float16, times=3)) == (2**-8, 3 * 2**-11)
