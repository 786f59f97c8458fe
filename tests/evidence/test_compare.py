"""Comparisons with a reference."""

import pytest
import torch

from staleproof.evidence.compare import other_bits, rounding, too_far

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP8])
def test_error_of_rounding_is_allowed_and_twice_that_is_found(dtype):
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


@pytest.mark.parametrize(
    ("columns", "change", "said"),
    [
        (64, {0: 1 / 8}, None),
        *((64, {0: by}, "an element off by 0.125, 0.125 is allowed") for by in (1 / 8 + 1e-6, -1 / 8 - 1e-6)),
        # Half of the elements either way, so that no factor is common.
        (64, dict.fromkeys(range(32), 1 / 8) | dict.fromkeys(range(32, 64), -1 / 8), None),
        (64, dict.fromkeys(range(64), 1 / 32), None),
        (64, dict.fromkeys(range(64), 1 / 32 + 1e-6), "a common factor off by 0.0313, 0.0312 is allowed"),
        (4, dict.fromkeys(range(4), -1 / 16 - 1e-6), "a common factor off by 0.0625, 0.0625 is allowed"),
        (4, dict.fromkeys(range(4), 1 / 16), None),
    ],
)
def test_row_off_by_more_than_the_budget_is_found(columns, change, said):
    """Of ones, with a budget of 1/8: by an element, and by a common factor of it over 4 or over the root."""
    want = torch.ones(3, columns, dtype=torch.float64)
    got = want.clone()
    for column, by in change.items():
        got[1, column] += by
    assert too_far("rows", got, want, 1 / 8) == (said and f"rows: row 1: {said}")
    # One axis is one row, and more than two are rows of what follows.
    one = too_far("rows", got[1], want[1], 1 / 8)
    assert one == (said and f"rows: row 0: {said}")
    three_axes = (x.view(3, 2, -1) for x in (got, want))
    assert too_far("rows", *three_axes, 1 / 8) == (said and f"rows: row 1: {said}")


def test_norm_of_a_row_off_by_more_than_the_budget_is_found():
    """Elements of which each may be off by a share of the largest, but not all together."""
    want = torch.tensor([[8.0, 1.0, 1.0, 1.0, 1.0]])
    error = torch.tensor([[0.0, 1.0, -1.0, 1.0, -1.0]])
    said = f"rows: row 0: the row off by {2 / 68**0.5:.3g}, 0.125 is allowed"
    assert too_far("rows", want + error, want, 1 / 8) == said
    assert too_far("rows", want + error / 2, want, 1 / 8) is None


def test_empty_tensors_are_equal():
    assert too_far("rows", torch.ones(0, 3), torch.ones(0, 3), 0.0) is None
    assert other_bits("rows", torch.ones(0), torch.ones(0)) is None


def test_large_row_does_not_excuse_a_small_one():
    generator = torch.Generator().manual_seed(1)
    want = torch.randn(2, 512, generator=generator) * torch.tensor([[1e-3], [100.0]])
    one, all_of_them = want.clone(), want.clone()
    one[0, 0] += 2**-5 * want[0].abs().max()
    all_of_them[0] += 2**-7 * torch.randn(512, generator=generator).sign() * want[0].abs().max()
    assert too_far("rows", one, want, 2**-6).startswith("rows: row 0: an element off by 0.03")
    assert too_far("rows", all_of_them, want, 2**-6).startswith("rows: row 0: the row off by 0.02")


def test_row_of_zeros_allows_no_error():
    zeros = torch.zeros(2, 3)
    assert too_far("rows", zeros, zeros, 0.0) is None
    assert "row 1" in too_far("rows", torch.tensor([[0.0] * 3, [0.0, 1e-30, 0.0]]), zeros, 1.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_element_that_is_not_finite_is_found(bad):
    got = torch.ones(9)
    got[4] = bad
    assert too_far("rows", got, torch.ones(9), 1e9) == "rows: not finite"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_reference_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="want: expected finite numbers, got a NaN or an infinity"):
        too_far("rows", torch.ones(9), torch.full((9,), bad), 1.0)


def test_bits_are_compared_not_values():
    zeros = torch.tensor([-0.0]), torch.tensor([0.0])
    for pair in (zeros, zeros[::-1]):
        assert other_bits("rows", *pair) == "rows: 1 of 4 bytes differ"
    nan = torch.tensor([torch.nan])
    assert other_bits("rows", nan, nan.clone()) is None


@pytest.mark.parametrize("compare", [other_bits, lambda *a: too_far(*a, 1.0)])
def test_result_of_another_shape_is_refused(compare):
    with pytest.raises(ValueError, match=r"got: expected the shape \(2,\), got \(3,\)"):
        compare("rows", torch.ones(3), torch.ones(2))
    with pytest.raises(ValueError, match=r"got: expected a torch.Tensor, got list"):
        compare("rows", [1.0], torch.ones(2))
