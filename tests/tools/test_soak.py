"""The recorded long run of the scheduler (soak.py); test_groups.py serves some of its requests anew."""

from __future__ import annotations

import json
import statistics

import pytest

from tools import soak


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


def served(**changes: object) -> dict[str, object]:
    curves = {"requests": [50, 100], "pending": [150, 251], "log_lines": [3, 3]}
    totals = {"steps": 9, "preemptions": 2, "cached_tokens": 101}
    return {
        "curves": curves | {name: changes[name] for name in curves if name in changes},
        "totals": totals | {name: changes[name] for name in totals if name in changes},
    }


@pytest.mark.parametrize(
    ("off", "on"),
    [
        ({"requests": [50, 99]}, {}),
        ({}, {"requests": [50, 99]}),
        ({"requests": [50, 99]}, {"requests": [50, 99]}),
        # Other decisions of the scheduler.
        ({}, {"steps": 8}),
        # Too quiet: nothing was preempted, no prefix was found.
        ({"preemptions": 1}, {"preemptions": 1}),
        ({"cached_tokens": 100}, {"cached_tokens": 100}),
        # What the plugin is for, and what it mends.
        ({}, {"pending": [0, 1]}),
        ({}, {"pending": [1, 0]}),
        ({"pending": [150, 250]}, {}),
        # Something is logged for each request.
        ({"log_lines": [3, 4]}, {}),
        ({}, {"log_lines": [3, 4]}),
        ({"log_lines": [4, 4]}, {"log_lines": [3, 4]}),
    ],
)
def test_a_run_that_shows_nothing_or_grows_is_refused(off, on):
    nothing = {"pending": [0, 0]}
    soak.check({"requests": 100, "off": served(), "on": served(**nothing)})
    with pytest.raises(AssertionError):
        soak.check({"requests": 100, "off": served(**off), "on": served(**nothing | on)})
