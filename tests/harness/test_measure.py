"""What becomes of the events of a timing; the events themselves need a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from staleproof.device import DeviceError, Provenance
from staleproof.harness import measure


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
    with pytest.raises(DeviceError, match="silent on time"):
        measure.graph_times([lambda: None])
