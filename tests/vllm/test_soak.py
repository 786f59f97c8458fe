"""The recorded long run of the scheduler (soak.py); test_groups.py serves some of its requests anew."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import soak


def test_the_recorded_run():
    found = json.loads(soak.OUT.read_text())
    assert found["requests"] == 200_000
    soak.check(found)
    off, on = (found[state]["curves"] for state in soak.STATES)
    # In KiB: a list of 788,070 numbers, against the noise of a process.
    assert off["rss_kib"][-1] - off["rss_kib"][0] > 8_000
    assert on["rss_kib"][-1] - on["rss_kib"][0] < 500
    # Without a trend: the plugin's steps are as fast in the second half as in the first.
    half = len(on["step_us"]) // 2
    first, second = (statistics.median(steps) for steps in (on["step_us"][:half], on["step_us"][half:]))
    assert second < 1.3 * first
