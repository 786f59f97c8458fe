"""The remaining time is told from what the steps took last time, and not from their number."""

from __future__ import annotations

import json
from pathlib import Path

from staleproof.incidents.registry import INCIDENTS, steps
from staleproof.report import progress
from staleproof.report.progress import Clock, keep_durations, read_durations

KEPT = Path(__file__).parents[2] / "workbook/durations.json"
STEPS = ["a: short", "a: long", "b: short", "b: longest"]
LAST = {"a: short": 1.0, "a: long": 10.0, "b: short": 1.0, "b: longest": 40.0}


class Watch:
    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def _clock(last: dict[str, float]) -> tuple[Clock, Watch]:
    clock, watch = Clock(STEPS, last), Watch()
    clock.now = watch  # type: ignore[method-assign, assignment]
    return clock, watch


def test_what_is_left_is_the_sum_of_the_steps_that_are_left():
    clock, watch = _clock(LAST)
    clock.begin()
    assert clock.left() == "0:52 left"
    watch.time = 1.0
    clock.begin()
    watch.time = 5.0
    assert clock.left() == "0:47 left"
    watch.time = 90.0  # longer than last time: the step that runs is over soon, the others are not
    assert clock.left() == "0:41 left"


def test_a_machine_of_half_the_pace_takes_twice_as_long():
    clock, watch = _clock(LAST)
    for time in (0.0, 2.0, 22.0):
        watch.time = time
        clock.begin()
    assert clock.left() == "1:22 left"
    assert clock.took == {"a: short": 2.0, "a: long": 20.0}


def test_without_an_earlier_run_no_time_is_made_up():
    clock, watch = _clock({})
    clock.begin()
    watch.time = 3.0
    clock.begin()
    assert clock.left() == "3 steps left"


def test_durations_are_kept_beside_those_of_other_devices(tmp_path):
    path = tmp_path / "durations.json"
    keep_durations(path, "cpu", {"a: short": 1.234})
    keep_durations(path, "cuda", {"a: short": 0.5})
    keep_durations(path, "cpu", {"a: long": 2.0})
    assert read_durations(path, "cpu") == {"a: short": 1.23, "a: long": 2.0}
    assert read_durations(path, "cuda") == {"a: short": 0.5}
    for spoilt in ("", "[]", '{"cpu": 3}', '{"cpu": {"a": "x"}}'):
        path.write_text(spoilt)
        assert read_durations(path, "cpu") == {}


def test_the_durations_in_the_workbook_are_of_the_questions_that_are_asked():
    known = json.loads(KEPT.read_text())["cpu"]
    asked = {step for name in INCIDENTS for step in steps(name)}
    assert len(asked & known.keys()) > 0.9 * len(asked), f"write {KEPT} again: copy workbook/_build's"
    assert progress.clock_text(sum(known.values())) < "9"
