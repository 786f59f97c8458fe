"""How long the questions that are left will take, by how long they took last time.

Before the first run on a machine, last time is ``workbook/durations.json``: a run on two cores of a CPU.

>>> from itertools import count
>>> clock = Clock(["a: one", "a: two", "a: three"], {"a: one": 4.0, "a: two": 6.0, "a: three": 5.0})
>>> clock.now = count().__next__
>>> clock.begin(), clock.left()
(None, '0:14 left')
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from staleproof.cases.finding import RunFileError, write_lines

# Before this many seconds of known steps are over, the pace of this run says nothing.
PACE_S = 5.0


class Clock:
    """Elapsed and remaining time of a run.

    Args:
        steps: all steps in their order.
        last: seconds that a step took in an earlier run on this machine. A step that is not in it counts
            like the mean of those that are over.
    """

    now = staticmethod(time.monotonic)

    def __init__(self, steps: Sequence[str], last: Mapping[str, float]) -> None:
        self.steps = steps
        self.last = last
        self.took: dict[str, float] = {}
        self._begun: float | None = None
        self._number = -1

    def begin(self) -> None:
        """The next step begins."""
        self.end()
        self._number += 1
        self._begun = self.now()

    def end(self) -> None:
        """The last step is over."""
        if self._begun is not None and self._number < len(self.steps):
            self.took[self.steps[self._number]] = self.now() - self._begun
        self._begun = None

    def left(self) -> str:
        """The remaining time, e.g. ``2:05 left``; how many steps are left where no time is known."""
        ahead = self.steps[max(self._number, 0) :]
        if 2 * sum(step not in self.last for step in ahead) > len(ahead):
            # Steps take from milliseconds to half a minute: a time made from their number would mislead.
            return f"{len(ahead)} steps left"
        over = [(took, self.last[step]) for step, took in self.took.items() if step in self.last]
        known = sum(last for _, last in over)
        pace = sum(took for took, _ in over) / known if known > PACE_S else 1.0
        mean = sum(self.took.values()) / len(self.took) if self.took else 0.0
        seconds = sum(self.last[step] * pace if step in self.last else mean for step in ahead)
        if self._begun is not None and ahead:
            # Of the step that runs, what is over; it may take longer than last time.
            first = self.last.get(ahead[0], 0.0) * pace if ahead[0] in self.last else mean
            seconds -= min(first, self.now() - self._begun)
        return f"{clock_text(seconds)} left"


def clock_text(seconds: float) -> str:
    """Seconds as minutes and seconds, or as hours, minutes and seconds.

    >>> clock_text(65), clock_text(3661)
    ('1:05', '1:01:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def read_durations(path: Path, device: str) -> dict[str, float]:
    """Seconds a step from an earlier run on this device; empty without one. An estimate needs no error.

    >>> read_durations(Path("no-such-file.json"), "cpu")
    {}
    """
    with contextlib.suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
        return {step: float(took) for step, took in json.loads(path.read_text())[device].items()}
    return {}


def keep_durations(path: Path, device: str, took: Mapping[str, float]) -> None:
    """Write what the steps of a run took, beside those of other incidents and devices."""
    kept = {name: read_durations(path, name) for name in ("cpu", "cuda")}
    kept[device] |= {step: round(seconds, 2) for step, seconds in took.items()}
    with contextlib.suppress(RunFileError):
        write_lines(path, [json.dumps(kept, indent=0)])
