"""Canaries tell unwritten memory from computed NaN."""

import pytest
import torch

from staleproof.evidence import plant, row_states


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stage", [1, 5, 62])
def test_states(device, dtype, stage):
    x = plant(torch.empty(8, 3, 4, dtype=dtype, device=device), stage)
    x[1] = 0.0
    x[2, 0] = 1.5
    x[2, 1:] = 0.0
    x[3] = float("nan")
    x[4, 0] = 2.0
    x[5] = torch.zeros((), dtype=dtype, device=device) / 0
    x[6], x[7] = 1.0, 1.0
    x[6, 2, 3], x[7, 0, 0] = float("inf"), -float("inf")
    expected = ["unwritten", "zero", "finite", "nan", "partly written", "nan", "nan", "nan"]
    assert row_states(x, stage) == expected
    assert row_states(plant(x)) == ["unwritten"] * 8


def test_another_stages_canary_is_a_computed_nan(device):
    x = plant(torch.empty(1, 4, dtype=torch.bfloat16, device=device), stage=3)
    assert row_states(x, stage=4) == ["nan"]


@pytest.mark.parametrize(
    ("dtype", "stage", "message"),
    [
        (torch.float8_e4m3fn, 1, "x: expected bfloat16, float16 or float32"),
        (torch.bfloat16, 0, "stage: expected 1 to 62"),
        (torch.bfloat16, 63, "stage: expected 1 to 62"),
        (torch.bfloat16, "1", "stage: expected 1 to 62 .* got '1'"),
    ],
)
def test_bad_input(dtype, stage, message):
    x = torch.zeros(2, 2).to(dtype)
    with pytest.raises(ValueError, match=message):
        plant(x, stage)
    assert x.float().eq(0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plant([1.0]), "x: expected a torch.Tensor, got list"),
        (lambda: row_states([1.0]), "x: expected a torch.Tensor, got list"),
        (lambda: row_states(torch.ones(())), "x: expected rows, at least one axis"),
    ],
)
def test_what_has_no_rows_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    assert row_states(torch.ones(0, 3)) == []
