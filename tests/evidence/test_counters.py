"""RowCounters count by stage and by row, and keep the first crossing inside a replayed step."""

import pytest
import torch

from staleproof.evidence import Crossing, RowCounters
from staleproof.evidence.counters import StageCount
from staleproof.graph import capture

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("dtype", "given"),
    [(torch.float32, torch.bool), (torch.bfloat16, torch.int32), (torch.float8_e4m3fn, torch.int64)],
)
def test_counts_match_a_count_on_the_host(device, dtype, given):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(38, 7, 10, generator=draw)
    x[torch.rand(x.shape, generator=draw) < 0.02] = NAN
    x = x.to(dtype)
    live = torch.randint(0, 2, (19,), generator=draw) * (1 if given is torch.bool else 7)
    counters = RowCounters(["other", "asked"], device)
    counters.begin()
    counters.observe("asked", x.to(device), live.to(given).to(device))
    bad, is_live = ~torch.isfinite(x.float()).flatten(1).all(1), live.bool().repeat_interleave(2)
    seen = counters.read()
    assert (seen["other"].pad_rows, seen["other"].live_rows) == (0, 0)
    assert seen["asked"].pad_rows == int(bad[~is_live].sum()) > 0
    assert seen["asked"].live_rows == int(bad[is_live].sum()) > 0
    assert counters.first_crossing == Crossing(1, "asked", int((bad & is_live).nonzero()[0]))


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
    assert counters.read()["a"].live_rows == 0
    assert counters.first_crossing is None
    graph.replay()
    assert counters.read()["a"].live_rows == 2
    assert counters.first_crossing == Crossing(1, "a", 0)


@pytest.mark.gpu
def test_on_cuda_it_counts_on_a_device_that_is_not_current(device):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x = torch.full((2, 4), NAN, device="cuda:1")
    on_second = RowCounters(["a"], "cuda:1")
    on_second.observe("a", x, torch.ones(2, dtype=torch.int32, device="cuda:1"))
    assert torch.cuda.current_device() == 0
    assert on_second.read()["a"].live_rows == 2


BAD_INPUTS = [
    (lambda c, x, n: RowCounters([], x.device), "stages: expected 1 to 256 distinct names"),
    (lambda c, x, n: RowCounters([*map(str, range(257))], x.device), "stages: expected 1 to 256"),
    (lambda c, x, n: RowCounters(["a", "a"], x.device), "stages: expected 1 to 256 distinct"),
    (lambda c, x, n: c.observe("b", x, n), "stage: expected one of"),
    (lambda c, x, n: c.observe("a", x.long(), n), "x: expected torch.float32"),
    (lambda c, x, n: c.observe("a", x.T, n), "x: expected a contiguous tensor"),
    (lambda c, x, n: c.observe("a", x, n[:3]), "live: expected a length that divides the 4"),
    (lambda c, x, n: c.observe("a", x, n[:0]), "live: expected a length that divides the 4"),
    (lambda c, x, n: c.observe("a", x[:0], n), "live: expected a length that divides the 0"),
    (lambda c, x, n: c.observe("a", x[0, 0], n), "live: expected a length that divides the 0"),
]


def test_bad_input(device):
    for call, message in BAD_INPUTS:
        counters = RowCounters(["a"], device)
        x = torch.full((4, 3), NAN, device=device)
        live = torch.ones(4, dtype=torch.bool, device=device)
        with pytest.raises(ValueError, match=message):
            call(counters, x, live)
        assert counters.read()["a"].live_rows == 0


def test_one_live_entry_may_stand_for_all_rows(device):
    counters = RowCounters(["a", *map(str, range(255))], device)
    for live in (0, 1, 1):
        counters.observe("a", torch.full((4, 3), NAN, device=device), torch.tensor([live], device=device))
    assert counters.read()["a"] == StageCount(pad_rows=4, live_rows=8)
