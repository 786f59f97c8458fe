"""What becomes of the events of a timing, and of a wrong result; the events need a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from staleproof.device import DeviceError, Provenance
from staleproof.harness import measure
from staleproof.harness.digest import file_digest
from staleproof.harness.measure import WrongResult


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


def test_no_time_without_a_gpu(monkeypatch):
    monkeypatch.setattr(measure.device, "provenance", lambda: Provenance.INTERPRETED)
    with pytest.raises(DeviceError, match="says nothing about time"):
        measure.graph_times([lambda: None])


@pytest.mark.parametrize("provider", ["staleproof", "staleproof, all rows", "zeros, then staleproof"])
def test_a_wrong_result_of_ours_stops_the_benchmark(provider, capsys):
    with pytest.raises(WrongResult, match=rf"^{provider}: row 3 is stale$"):
        measure.checked(provider, False, "row 3 is stale")
    assert measure.checked(provider, True, "row 3 is stale")
    assert capsys.readouterr().out == ""


def test_a_wrong_result_of_a_peer_is_refused_and_the_benchmark_goes_on(capsys):
    assert not measure.checked("vLLM", False, "row 3 is stale")
    assert measure.checked("FlashInfer", True, "row 3 is stale")
    assert capsys.readouterr().out == "vLLM: refused, row 3 is stale\n"


def test_rows_come_with_the_benchmark_and_its_digest(tmp_path):
    path = tmp_path / "clear.py"
    path.write_text("def rows():\n    yield {'p50': 1.0}\n    raise KeyError\n")
    rows = measure.benchmark_rows(path)
    assert next(rows) == {"p50": 1.0, "benchmark": "clear", "source_digest": file_digest(path)}
    with pytest.raises(KeyError):
        next(rows)
