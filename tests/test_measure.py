"""What becomes of the events of a timing, of a wrong result, and of the inputs; the events need a GPU."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace as Space

import pytest
from tests.made import measurement

from staleproof import machine, measure
from staleproof.device import DeviceError, Provenance
from staleproof.measure import WrongResult


@dataclass
class Mark:
    """Stands for a CUDA event, reached at so many milliseconds."""

    at: float

    def elapsed_time(self, end: Mark) -> float:
        return end.at - self.at


def test_quantiles_are_microseconds_a_launch():
    marks = [(Mark(0.0), Mark(ms)) for ms in (5.0, 1.0, 3.0, 2.0, 4.0, 6.0)]
    times = measure.times_between(marks, launches=10)
    assert (times.p20, times.p50, times.p80) == pytest.approx((200.0, 350.0, 500.0))
    assert measure.times_between(marks).p50 == pytest.approx(3500.0)


@pytest.mark.parametrize(
    ("turns", "where"),
    [(measure.rotation(10**9, l2=1), measure.COLD), (measure.WARM, measure.WARM), (None, None)],
)
def test_times_of_a_provider_with_a_wrong_result_are_left_out(turns, where, capsys):
    taken = dict.fromkeys(("limit: none", "peer", "peer without limits"), measure.Times(2.0, 1.0, 3.0))
    wrong = {"peer": "", "peer without limits": "row 3 is stale"}.__getitem__
    timing = measure.Timing(
        *("a", "k", "bf16", "rows", 4, 8, taken, turns, wrong), more=lambda name: {"x": name}
    )
    rows = [*timing.rows()]
    expected = [("limit: none", "limit: none", where), ("peer", "peer", where)]
    assert [(row["provider"], row["x"], row["cache"]) for row in rows] == expected
    said = {"incident": "a", "kernel": "k", "x_name": "rows", "x_value": 4, "bytes": 8}
    assert rows[0].items() >= (said | {"p50": 2.0, "p20": 1.0, "p80": 3.0}).items()
    assert capsys.readouterr().out == "peer without limits: refused, row 3 is stale, bf16, 4 rows\n"


def test_timing_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(measure.device, "provenance", lambda: Provenance.INTERPRETED)
    with pytest.raises(DeviceError, match="says nothing about time"):
        measure.graph_times([lambda: None])


def test_wrong_result_of_ours_stops_the_benchmark_and_a_peers_is_left_out(capsys):
    provider = "zeros, then staleproof"
    with pytest.raises(WrongResult, match=rf"^{provider}: row 3 is stale$"):
        measure.checked(provider, False, "row 3 is stale")
    assert measure.checked(provider, True, "row 3 is stale")
    assert capsys.readouterr().out == ""
    assert [measure.checked("vLLM", right, "row 3 is stale") for right in (False, True)] == [False, True]
    assert capsys.readouterr().out == "vLLM: refused, row 3 is stale\n"


def test_rows_come_with_the_benchmark_and_the_commit(tmp_path):
    path = tmp_path / "clear.py"
    path.write_text("def rows():\n    yield {'p50': 1.0}\n    raise KeyError\n")
    rows = measure.benchmark_rows(path)
    assert next(rows) == {"p50": 1.0, "benchmark": "clear", "commit": machine.commit()}
    with pytest.raises(KeyError):
        next(rows)


L2 = 1000


class Cache:
    """An L2 that keeps what was read last; counts the bytes that a timed call has to fetch."""

    def __init__(self) -> None:
        self.lines: OrderedDict[str, int] = OrderedDict()
        self.fetched: list[int] = []
        self.graph: list | None = None

    def read(self, name: str, size: int) -> None:
        if self.graph is not None:
            return self.graph.append(partial(self.read, name, size))
        self.fetched.append(size - min(size, self.lines.pop(name, 0)))
        self.lines[name] = size
        while sum(self.lines.values()) > L2:
            self.lines.popitem(last=False)

    def replay(self, graph: list) -> None:
        for call in graph:
            call()

    @contextlib.contextmanager
    def capture(self, graph):
        self.graph = graph.calls
        yield
        self.graph = None


@pytest.fixture(name="cache")
def cache_fixture(monkeypatch):
    """A device whose graphs replay on this L2. Only calls after the first event count."""
    cache = Cache()

    class Event:
        reached = False

        def record(self) -> None:
            self.reached = True

        def elapsed_time(self, end: Event) -> float:
            assert self.reached
            assert end.reached
            return float(len(cache.fetched))

    class Graph:
        def __init__(self) -> None:
            self.calls: list = []

        def replay(self) -> None:
            cache.replay(self.calls)

    cache.waits = []
    side, current = (
        Space(wait_stream=lambda other, name=name: cache.waits.append(name)) for name in ("side", "current")
    )
    fake = {
        "Stream": lambda: side,
        "current_stream": lambda: current,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "CUDAGraph": Graph,
        "graph": cache.capture,
        "Event": lambda enable_timing: Event(),
    }
    for name, value in fake.items():
        monkeypatch.setattr(measure.torch.cuda, name, value)
    monkeypatch.setattr(measure, "require_gpu", lambda: None)
    monkeypatch.setattr(measure, "l2_bytes", lambda: L2)
    flush = lambda: [cache.lines.clear(), cache.lines.update(flushed=L2)]  # noqa: E731
    monkeypatch.setattr(measure, "read_more_than_l2", flush)
    return cache


@pytest.mark.parametrize("size", [1, 23, 24, 150, 160, 1000, 5000])
def test_cold_inputs_are_fetched_and_warm_ones_are_not(cache, size):
    turns = measure.rotation(size)
    calls = [partial(cache.read, f"set {index}", size) for index in range(turns.sets)]
    fetched = {}
    for where, times in measure.cached_times(calls, turns):
        timed = measure.launches_for(turns.sets) * measure.REPLAYS
        # The events of this device say how many calls were made before the end: that is in "ms".
        assert times.p20 == times.p80 == len(cache.fetched) * 1000 / measure.launches_for(turns.sets)
        fetched[where] = set(cache.fetched[-timed:])
    if size < L2:
        assert fetched[measure.COLD] == {size}
    # Small inputs are measured in both ways; for others the copies would not fit.
    assert (measure.WARM in fetched) == (3 * L2 / size >= measure.MOST_SETS)
    assert fetched.get(measure.WARM, {0}) == {0}


@pytest.mark.parametrize("size", [1, 24, 3000])
def test_sets_exceed_three_times_the_l2_or_fit_into_half_of_it(size):
    turns = measure.rotation(size, l2=L2)
    both = turns.caches == (measure.WARM, measure.COLD)
    assert turns.sets * size < L2 / 2 if both else turns.sets * size > 3 * L2
    assert turns.sets <= measure.MOST_SETS
    most = measure.MOST_SETS - 1
    assert [measure.rotation(3, l2=l2).sets for l2 in (most, most + 1)] == [most + 1, measure.LAUNCHES]


def test_too_few_input_sets_are_refused(cache):
    turns = measure.rotation(10)
    with pytest.raises(ValueError, match="calls: expected 20, one a set, got 1"):
        next(measure.cached_times([lambda: None], turns))


def _printed(mode, x_value, provider, p50):
    numbers = {"p50": p50, "p20": p50 / 2, "p80": 2 * p50, "bytes": 8_000_000}
    return {"mode": mode, "x_name": "rows", "x_value": x_value, "provider": provider} | numbers


LONG = "a provider whose name is longer than 33"
PRINTED = [
    _printed("bf16", 1, "staleproof", 2.0),
    _printed("bf16", 1, "peer", 3.0),
    _printed("bf16", 2, "staleproof", 4.0),
    _printed("bf16", 2, LONG, 6.0),
    # Not measured there: the last of the mode.
    _printed("bf16", 3, "peer", 2.0),
    _printed("fp8", 1, "peer", 5.0),
]
NUMBERS = ["2.00 1.00 4.00 4.00 {}", "3.00 1.50 6.00 2.67 {}", "4.00 2.00 8.00 2.00 {}"]
NUMBERS += ["6.00 3.00 12.00 1.33 {}", "2.00 1.00 4.00 4.00 {}", "5.00 2.50 10.00 1.60 {}"]


@pytest.mark.parametrize(
    ("baseline", "ratios"),
    [
        ("staleproof", ["1.00", "1.50", "1.00", "1.50", "0.50", "-"]),
        ("peer", ["0.67", "1.00", "2.00", "3.00", "1.00", "1.00"]),
    ],
)
def test_printed_rows_have_rate_and_ratio_and_fit_a_narrow_terminal(baseline, ratios, capsys):
    name = "x ours" if baseline == "staleproof" else "x peer"
    numbers = [line.format(ratio) for line, ratio in zip(NUMBERS, ratios, strict=True)]
    measure.print_rows(PRINTED, baseline=baseline)
    head, *lines = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert head == f"mode case provider p50 us p20 p80 TB/s {name}"
    assert lines == [
        f"{row['mode']} rows {row['x_value']} {row['provider']} {line}"
        for row, line in zip(PRINTED, numbers, strict=True)
    ]
    measure.print_rows(PRINTED, baseline=baseline, width=80)
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in text.splitlines())
    head, *lines = (" ".join(line.split()) for line in text.splitlines())
    assert head == f"provider p50 us p20 p80 TB/s {name}"
    assert lines == [
        *("", "bf16, rows 1", f"staleproof {numbers[0]}", f"peer {numbers[1]}"),
        *("", "bf16, rows 2", f"staleproof {numbers[2]}", LONG, numbers[3]),
        *("", "bf16, rows 3", f"peer {numbers[4]}"),
        *("", "fp8, rows 1", f"peer {numbers[5]}"),
    ]


def test_host_times_take_turns_so_that_a_drift_hits_all_alike():
    made: list[str] = []
    calls = {name: lambda name=name: made.append(name) for name in ("ours", "bare")}
    found = measure.host_times(calls, rounds=2, each=3)
    assert made == (["ours"] * 3 + ["bare"] * 3) * 5  # three rounds are not timed
    assert all(0 <= times.p20 <= times.p50 <= times.p80 for times in found.values())


def test_benchmark_script_without_a_gpu_or_with_a_wrong_result_ends_in_one_line(capsys):
    def without_gpu():
        raise DeviceError("timings need a CUDA GPU")

    def wrong():
        raise measure.WrongResult("ours: row 3 is stale")

    for rows, code, line in ((without_gpu, 2, "timings need a CUDA GPU"), (wrong, 1, "ours: row 3 is stale")):
        assert measure.main(rows, baseline="staleproof") == code
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == ("", f"{line}\n")
    assert measure.main(lambda: [measurement()], baseline="staleproof") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == ["graph", "live", "1", "staleproof"]
