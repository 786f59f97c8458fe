"""RowCounters count by stage and by row, and keep the first crossing inside a replayed step."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch._subclasses import FakeTensorMode

from staleproof.cases.graph import capture
from staleproof.evidence import Crossing, RowCounters, counters

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_counts_match_a_count_on_the_host(device, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(37, 70, generator=generator)
    x[torch.rand(37, 70, generator=generator) < 0.02] = NAN
    x[torch.rand(37, 70, generator=generator) < 0.01] = -INF
    x = x.to(dtype)
    live = torch.rand(37, generator=generator) < 0.5
    counters = RowCounters(["only"], device)
    counters.begin()
    counters.observe("only", x.to(device), live.to(device))
    bad = ~torch.isfinite(x.float())
    seen = counters.read()["only"]
    assert seen.pad_values == int(bad[~live].sum()) > 0
    assert seen.live_values == int(bad[live].sum()) > 0
    assert seen.pad_rows == int(bad[~live].any(1).sum())
    assert seen.live_rows == int(bad[live].any(1).sum())
    first = int((bad.any(1) & live).nonzero()[0])
    assert counters.first_crossing == Crossing(1, "only", first)


def test_first_crossing_is_ordered_by_replay_then_stage_then_row(device):
    a = torch.zeros(6, 4, device=device)
    b = torch.zeros(6, 4, device=device)
    live = torch.tensor([9, 9, 0], dtype=torch.int32, device=device)
    counters = RowCounters(["a", "b"], device)

    def step():
        counters.begin()
        counters.observe("a", a, live)
        counters.observe("b", b, live)

    graph = capture(step, device)
    counters.reset()
    graph.replay()
    assert counters.first_crossing is None
    a[4:] = NAN
    graph.replay()
    assert counters.first_crossing is None
    assert counters.read()["a"].pad_rows == 2
    b[1] = INF
    b[3] = INF
    graph.replay()
    assert counters.first_crossing == Crossing(3, "b", 1)
    a[0] = NAN
    graph.replay()
    assert counters.first_crossing == Crossing(3, "b", 1)


def test_reset_forgets_and_the_captured_step_goes_on_counting(device):
    x = torch.full((2, 4), NAN, device=device)
    live = torch.ones(2, dtype=torch.bool, device=device)
    counters = RowCounters(["a"], device)

    def step():
        counters.begin()
        counters.observe("a", x, live)

    graph = capture(step, device)
    graph.replay()
    counters.reset()
    assert counters.read()["a"].live_values == 0
    assert counters.first_crossing is None
    graph.replay()
    assert counters.read()["a"].live_values == 8
    assert counters.first_crossing == Crossing(1, "a", 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch asks the driver for the device of a fake tensor")
def test_the_kernel_launches_on_the_device_of_its_tensors(monkeypatch):
    launches, current = [], torch.device("cuda", 0)

    @contextmanager
    def switched(device):
        nonlocal current
        before, current = current, device
        yield
        current = before

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: launches.append(current)

    monkeypatch.setattr(torch.cuda, "device", switched)
    monkeypatch.setattr(counters, "_count_bad_kernel", Kernel())
    with FakeTensorMode():
        second = torch.device("cuda", 1)
        x = torch.zeros(2, 4, device=second)
        RowCounters(["a"], second).observe("a", x, torch.ones(2, dtype=torch.int32, device=second))
        RowCounters(["a"], "cpu").observe("a", torch.zeros(2, 4), torch.ones(2))
    assert launches == [second, torch.device("cuda", 0)]


@pytest.mark.gpu
def test_on_cuda_it_counts_on_a_device_that_is_not_current(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x = torch.full((2, 4), NAN, device="cuda:1")
    on_second = RowCounters(["a"], "cuda:1")
    on_second.observe("a", x, torch.ones(2, dtype=torch.int32, device="cuda:1"))
    assert torch.cuda.current_device() == 0
    assert on_second.read()["a"].live_values == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, x, n: RowCounters([], x.device), "stages: expected 1 to 256 distinct names"),
        (lambda c, x, n: RowCounters(["a", "a"], x.device), "stages: expected 1 to 256 distinct"),
        (lambda c, x, n: c.observe("b", x, n), "stage: expected one of"),
        (lambda c, x, n: c.observe("a", x.long(), n), "x: expected torch.float32"),
        (lambda c, x, n: c.observe("a", x.T, n), "x: expected a contiguous tensor"),
        (lambda c, x, n: c.observe("a", x, n[:3]), "live: expected a length that divides the 4"),
    ],
)
def test_bad_input(device, call, message):
    counters = RowCounters(["a"], device)
    x = torch.full((4, 3), NAN, device=device)
    live = torch.ones(4, dtype=torch.bool, device=device)
    with pytest.raises(ValueError, match=message):
        call(counters, x, live)
    assert counters.read()["a"].live_values == 0
