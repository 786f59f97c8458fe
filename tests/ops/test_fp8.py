"""quantize_fp8_per_tensor against its reference, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.bits import assert_same_bits

from staleproof.ops import fp8
from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.reference import fp8 as reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Keywords that say which of 9 rows are live.
LIVE: dict[str, Callable[[str], dict[str, Any]]] = {
    "all": lambda device: {},
    "none": lambda device: {"live_rows": 0},
    "int": lambda device: {"live_rows": 3},
    "int, all": lambda device: {"live_rows": 9},
    "device tensor": lambda device: {"live_rows": torch.tensor([4], dtype=torch.int32, device=device)},
    "mask": lambda device: {"live_rows": torch.arange(9, device=device) % 3 == 1},
    "mask, none": lambda device: {"live_rows": torch.zeros(9, dtype=torch.bool, device=device)},
    "padding": lambda device: {"is_padding": torch.arange(9, device=device) % 3 == 1},
}


# Elements a row, of 9 rows: what one program quantises by itself, and what many do.
HIDDEN = [300, 1000]


def payload(x_fp8: torch.Tensor) -> torch.Tensor:
    return x_fp8.view(torch.uint8)


def live_index(keywords: dict[str, Any], device: str) -> torch.Tensor:
    if "is_padding" in keywords:
        return ~keywords["is_padding"]
    live_rows = keywords.get("live_rows", 9)
    if isinstance(live_rows, torch.Tensor) and live_rows.dtype == torch.bool:
        return live_rows
    return torch.arange(9, device=device) < int(live_rows)


def batch(dtype: torch.dtype, device: str, hidden: int = 300) -> torch.Tensor:
    return torch.randn(9, hidden, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)


# Elements a row of which one program takes all, of which many take some, one alone, and more than a tile.
@pytest.mark.parametrize(
    ("hidden", "live"),
    [*((HIDDEN[i % 2], live) for i, live in enumerate(LIVE)), (1, "mask"), (1000, "int"), (8192 + 40, "int")],
)
def test_matches_reference(device: str, live: str, hidden: int) -> None:
    for dtype in DTYPES if hidden < 8192 else DTYPES[:1]:
        # Of a wider tensor.
        x = batch(dtype, device, 2 * hidden)[:, :hidden]
        keywords = LIVE[live](device)
        got = quantize_fp8_per_tensor(x, **keywords)
        assert got[0].dtype == torch.float8_e4m3fn
        assert_same_bits(got, reference.quantize_fp8_per_tensor(x, **keywords))


@pytest.mark.parametrize(("hidden", "bad"), [(300, torch.nan), (300, torch.inf), (1000, -torch.nan)])
def test_a_saturated_nan_stays_in_its_row(device: str, hidden: int, bad: float) -> None:
    x = batch(torch.bfloat16, device, hidden)
    want, _ = quantize_fp8_per_tensor(x, live_rows=5)
    x[2, 7], x[6] = bad, torch.nan
    got, scale = quantize_fp8_per_tensor(x, live_rows=5, saturate_nan=True)
    assert_same_bits((got, scale), reference.quantize_fp8_per_tensor(x, live_rows=5, saturate_nan=True))
    # vLLM's kernel: fmax drops NaN from the scale and the clamp makes it 448; an infinity counts.
    assert got[2, 7].float().item() == 448
    assert bool(scale.isinf()) == (bad == torch.inf)
    if bad != torch.inf:
        assert torch.equal(payload(got[[0, 1, 3, 4]]), payload(want[[0, 1, 3, 4]]))


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


@pytest.mark.parametrize(
    ("hidden", "live"),
    [(300, "int"), (1000, "device tensor"), (300, "mask"), (1000, "padding"), (300, "none")],
)
def test_padding_changes_no_bit_and_comes_out_zero(device: str, hidden: int, live: str) -> None:
    x = batch(torch.bfloat16, device, hidden)
    keywords = LIVE[live](device)
    index = live_index(keywords, device)
    want = quantize_fp8_per_tensor(x, **keywords)
    for poison in (torch.nan, torch.inf, 3e38):
        x[~index] = poison
        got = quantize_fp8_per_tensor(x, **keywords)
        assert_same_bits(got, want)
        assert int(payload(got[0])[~index].count_nonzero()) == 0


@pytest.mark.parametrize(("hidden", "live"), [(300, "padding"), (1000, "device tensor"), (8232, "mask")])
def test_the_largest_value_counts_in_the_first_and_the_last_live_tile(
    device: str, hidden: int, live: str
) -> None:
    for at_end, column in ((False, 0), (True, 0), (False, -1), (True, -1)):
        x = batch(torch.float32, device, hidden)
        keywords = LIVE[live](device)
        row = live_index(keywords, device).nonzero()[-1 if at_end else 0].item()
        x[row, column] = -4480.0
        _, scale = quantize_fp8_per_tensor(x, **keywords)
        assert scale.item() == 10.0


@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_live_nan_of_any_payload_stays_visible(device: str, hidden: int) -> None:
    for bits in (0x7F800001, 0x7FFFFFFF, -0x7FFFFF):
        x = batch(torch.float32, device, hidden)
        x.view(torch.int32)[2, 7] = bits
        got = quantize_fp8_per_tensor(x, saturate_nan=True)
        assert_same_bits(got, reference.quantize_fp8_per_tensor(x, saturate_nan=True))
        got, scale = quantize_fp8_per_tensor(x, live_rows=3)
        assert bool(scale.isnan().all())
        assert bool(got[:3].float().isnan().all())
        assert int(payload(got)[3:].count_nonzero()) == 0


@pytest.mark.parametrize(
    ("hidden", "value", "expected"),
    [(40, 0.0, 1.0), (8000, -0.0, 1.0), (40, 1e-40, torch.finfo(torch.float32).tiny)],
)
def test_zeros_and_tiny_values_have_a_usable_scale(
    device: str, hidden: int, value: float, expected: float
) -> None:
    got, scale = quantize_fp8_per_tensor(torch.full((2, hidden), value, device=device))
    assert scale.item() == expected
    assert bool(got.float().isfinite().all())
    assert bool((got.float() == 0).all()) == (value == 0)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_out_is_written_and_returned(device: str, hidden: int) -> None:
    x = batch(torch.bfloat16, device, hidden)
    want = quantize_fp8_per_tensor(x, live_rows=4)
    x_fp8 = torch.full_like(payload(want[0]), 0x7F).view(torch.float8_e4m3fn)
    scale = torch.full((1,), torch.nan, device=device)
    got = quantize_fp8_per_tensor(x, live_rows=4, out=(x_fp8, scale))
    assert got[0] is x_fp8
    assert got[1] is scale
    assert_same_bits(got, want)


@pytest.mark.parametrize(("hidden", "count", "as_if"), [(300, -3, 0), (1000, 12, 9)])
def test_a_count_out_of_range_is_cut_to_it(device: str, hidden: int, count: int, as_if: int) -> None:
    x = batch(torch.bfloat16, device, hidden)
    live = torch.tensor([count], dtype=torch.int32, device=device)
    got = quantize_fp8_per_tensor(x, live_rows=live)
    assert_same_bits(got, quantize_fp8_per_tensor(x, live_rows=as_if))
    live.fill_(as_if)
    quantize_fp8_per_tensor(x, live_rows=live, validate=True)


@pytest.mark.parametrize(("rows", "hidden", "launches"), [(1, 8192, 1), (16, 512, 1), (17, 512, 2)])
def test_what_one_program_holds_takes_one_launch(
    monkeypatch, device: str, rows: int, hidden: int, launches: int
) -> None:
    made = []
    launched = fp8.launched

    def counted(kernel, *args, **options):
        made.append(kernel)
        return launched(kernel, *args, **options)

    monkeypatch.setattr(fp8, "launched", counted)
    quantize_fp8_per_tensor(torch.ones(rows, hidden, device=device))
    assert len(made) == launches


def test_rows_between_powers_of_two_are_all_written(device: str) -> None:
    # 6,000 elements, and 9,600 where each row counts up to the next power of two: too many for one program.
    x = torch.randn(150, 40, generator=torch.Generator().manual_seed(2)).to(device)
    want = reference.quantize_fp8_per_tensor(x)
    out = tuple(torch.full_like(result, 7.0) for result in want)
    quantize_fp8_per_tensor(x, out=out)
    assert_same_bits(out, want)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "hidden"), [(1024, 7168), (16, 512)])
def test_graph_replay_with_live_count_down_then_up(device: str, rows: int, hidden: int) -> None:
    x = torch.randn(rows, hidden, device=device).bfloat16()
    count = torch.tensor([rows], dtype=torch.int32, device=device)
    quantize_fp8_per_tensor(x, live_rows=count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got, scale = quantize_fp8_per_tensor(x, live_rows=count)
    for live in (rows, 1, rows // 8, 0, rows):
        count.fill_(live)
        poisoned = x.clone()
        x[live:] = torch.nan
        graph.replay()
        assert_same_bits((got, scale), reference.quantize_fp8_per_tensor(poisoned, live_rows=live))
        x.copy_(poisoned)


def _out(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bytes_ = torch.full((9, 300), 7, dtype=torch.uint8, device=x.device)
    return bytes_.view(torch.float8_e4m3fn), torch.full((1,), 7.0, device=x.device)


# Each made of x.
BAD_INPUTS: dict[str, tuple[Callable[[torch.Tensor], dict[str, Any]], str]] = {
    "rank": (lambda x: {"x": x[0]}, r"x: expected a tensor of rank 2, got shape"),
    "dtype": (lambda x: {"x": x.double()}, r"x: expected .*got torch.float64"),
    "empty": (lambda x: {"x": x[:0]}, r"x: expected at least one element, got shape"),
    "layout": (lambda x: {"x": x.T.contiguous().T}, r"x: expected a contiguous last axis, got"),
    "too many": (lambda x: {"live_rows": 10}, r"live_rows: expected 0 to 9 rows, got 10"),
    "negative": (lambda x: {"live_rows": -1}, r"live_rows: expected 0 to 9 rows, got -1"),
    "float": (lambda x: {"live_rows": 2.0}, r"live_rows: expected 0 to 9 rows, got 2.0"),
    "count dtype": (
        lambda x: {"live_rows": x.new_ones(1).long()},
        r"live_rows: expected torch.int32, got .*64",
    ),
    "count on the device": (
        lambda x: {"live_rows": x.new_full((1,), 10).int(), "validate": True},
        r"live_rows: expected 0 to 9 rows, got 10",
    ),
    "both masks": (
        lambda x: {"is_padding": x.new_ones(9).bool(), "live_rows": 3},
        r"is_padding: expected None beside live_rows, got both",
    ),
    "out alone": (lambda x: {"out": _out(x)[0]}, r"out: expected \(x_fp8, scale\), got Tensor"),
    "out of three": (lambda x: {"out": [1, 2, 3]}, r"out: expected \(x_fp8, scale\), got a list of 3"),
}


def test_bad_input_is_named_and_nothing_is_written(device: str) -> None:
    x = batch(torch.bfloat16, device)
    x_fp8, scale = _out(x)
    for change, message in BAD_INPUTS.values():
        with pytest.raises(ValueError, match=message):
            quantize_fp8_per_tensor(**{"x": x, "out": (x_fp8, scale)} | change(x))
    assert bool((payload(x_fp8) == 7).all())
    assert scale.item() == 7.0


@pytest.mark.parametrize(("gpu", "by_bits"), [((8, 6), True), ((8, 9), False)])
def test_codes_are_made_from_bits_where_the_gpu_has_no_cast_to_e4m3(monkeypatch, gpu, by_bits):
    monkeypatch.setattr(fp8, "INTERPRET", False)
    monkeypatch.setattr(fp8, "capability", lambda index: gpu)
    assert fp8._by_bits(torch.ones(1)) is by_bits
