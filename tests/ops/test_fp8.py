"""quantize_fp8_per_tensor against its reference, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.reference import fp8 as reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LIVE: dict[str, Any] = {
    "all": lambda device: None,
    "none": lambda device: 0,
    "int": lambda device: 3,
    "int, all": lambda device: 9,
    "device tensor": lambda device: torch.tensor([4], dtype=torch.int32, device=device),
    "mask": lambda device: torch.arange(9, device=device) % 3 == 1,
    "mask, none": lambda device: torch.zeros(9, dtype=torch.bool, device=device),
}


def payload(x_fp8: torch.Tensor) -> torch.Tensor:
    return x_fp8.view(torch.uint8)


def live_index(live_rows: Any, rows: int, device: str) -> torch.Tensor:
    if isinstance(live_rows, torch.Tensor) and live_rows.dtype == torch.bool:
        return live_rows
    count = rows if live_rows is None else int(live_rows)
    return torch.arange(rows, device=device) < count


def batch(dtype: torch.dtype, device: str, hidden: int = 300) -> torch.Tensor:
    return torch.randn(9, hidden, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("live", LIVE)
@pytest.mark.parametrize("hidden", [1, 300, 8192 + 40])
def test_matches_reference(device: str, dtype: torch.dtype, live: str, hidden: int) -> None:
    x = batch(dtype, device, hidden)
    live_rows = LIVE[live](device)
    want, want_scale = reference.quantize_fp8_per_tensor(x, live_rows=live_rows)
    got, scale = quantize_fp8_per_tensor(x, live_rows=live_rows)
    assert got.dtype == torch.float8_e4m3fn
    assert torch.equal(scale, want_scale)
    assert torch.equal(payload(got), payload(want))


def test_every_rounding_case(device: str) -> None:
    # With 448 among the values the scale is 1, and each value meets the cast as it is: every
    # E4M3 number, every midpoint, and their neighbours in float32.
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = codes[~codes.isnan()].sort().values.unique()
    middle = (grid[1:] + grid[:-1]) / 2
    points = torch.cat([grid, middle])
    x = torch.cat([points, points.nextafter(points + 1), points.nextafter(points - 1)])
    x = x.clamp(-448, 448).reshape(1, -1).to(device)
    got, scale = quantize_fp8_per_tensor(x)
    assert scale.item() == 1.0
    assert torch.equal(payload(got), payload(x.to(torch.float8_e4m3fn)))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("live", ["int", "device tensor", "mask", "none"])
def test_padding_changes_no_bit_and_comes_out_zero(device: str, poison: float, live: str) -> None:
    x = batch(torch.bfloat16, device)
    live_rows = LIVE[live](device)
    index = live_index(live_rows, 9, device)
    want, want_scale = quantize_fp8_per_tensor(x, live_rows=live_rows)
    x[~index] = poison
    got, scale = quantize_fp8_per_tensor(x, live_rows=live_rows)
    assert torch.equal(payload(got), payload(want))
    assert torch.equal(scale, want_scale)
    assert int(payload(got)[~index].count_nonzero()) == 0


def test_a_live_nan_stays_visible(device: str) -> None:
    x = batch(torch.bfloat16, device)
    x[1, 7] = torch.nan
    got, scale = quantize_fp8_per_tensor(x, live_rows=3)
    assert bool(scale.isnan().all())
    assert bool(got[:3].float().isnan().all())
    assert int(payload(got)[3:].count_nonzero()) == 0


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_all_zero_has_a_usable_scale(device: str, value: float) -> None:
    got, scale = quantize_fp8_per_tensor(torch.full((2, 40), value, device=device))
    assert scale.item() == 1.0
    assert bool((got.float() == 0).all())


def test_tiny_values_have_a_usable_scale(device: str) -> None:
    x = torch.full((2, 40), 1e-40, device=device)
    got, scale = quantize_fp8_per_tensor(x)
    assert scale.item() == torch.finfo(torch.float32).tiny
    assert bool(got.float().isfinite().all())


def test_strided_rows(device: str) -> None:
    wide = batch(torch.bfloat16, device, 600)
    got, scale = quantize_fp8_per_tensor(wide[:, :300], live_rows=5)
    want, want_scale = quantize_fp8_per_tensor(wide[:, :300].contiguous(), live_rows=5)
    assert torch.equal(payload(got), payload(want))
    assert torch.equal(scale, want_scale)


@pytest.mark.gpu
def test_graph_replay_with_live_count_down_then_up(device: str) -> None:
    x = torch.randn(1024, 7168, device=device).bfloat16()
    count = torch.tensor([1024], dtype=torch.int32, device=device)
    quantize_fp8_per_tensor(x, live_rows=count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, scale = quantize_fp8_per_tensor(x, live_rows=count)
    for live in (1024, 1, 128, 0, 1024):
        count.fill_(live)
        poisoned = x.clone()
        x[live:] = torch.nan
        graph.replay()
        want, want_scale = reference.quantize_fp8_per_tensor(poisoned, live_rows=live)
        assert torch.equal(payload(got), payload(want))
        assert torch.equal(scale, want_scale)
        x.copy_(poisoned)


BAD_INPUTS: dict[str, tuple[Any, Any, str]] = {
    "rank": (lambda x: x[0], None, r"x: expected a tensor of rank 2, got shape"),
    "dtype": (lambda x: x.double(), None, r"x: expected .*got torch.float64"),
    "empty": (lambda x: x[:0], None, r"x: expected at least one element, got shape"),
    "layout": (lambda x: x.T.contiguous().T, None, r"x: expected a contiguous last axis, got"),
    "too many": (None, 10, r"live_rows: expected 0 to 9 rows, got 10"),
    "negative": (None, -1, r"live_rows: expected 0 to 9 rows, got -1"),
    "float": (None, 2.0, r"live_rows: expected 0 to 9 rows, got 2.0"),
    "count dtype": (None, torch.tensor([2]), r"live_rows: expected torch.int32, got torch.int64"),
    "count shape": (
        None,
        torch.tensor([2, 3], dtype=torch.int32),
        r"live_rows: expected shape \(1\), got shape \(2,\)",
    ),
    "mask shape": (
        None,
        torch.ones(8, dtype=torch.bool),
        r"live_rows: expected shape \(9\), got shape \(8,\)",
    ),
    "mask layout": (None, torch.ones(18, dtype=torch.bool)[::2], r"live_rows: expected a contiguous tensor"),
    "other device": (
        None,
        torch.ones(9, dtype=torch.bool, device="meta"),
        r"live_rows: expected a tensor on \w+.*, got one on meta",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_named(device: str, case: str) -> None:
    change, live_rows, message = BAD_INPUTS[case]
    x = batch(torch.bfloat16, device)
    if isinstance(live_rows, torch.Tensor) and live_rows.device.type == "cpu":
        # Sliced after the move, so that a stride survives it.
        stride = live_rows.stride(0)
        live_rows = live_rows.repeat_interleave(stride).to(device)[::stride]
    with pytest.raises(ValueError, match=message):
        quantize_fp8_per_tensor(x if change is None else change(x), live_rows=live_rows)
