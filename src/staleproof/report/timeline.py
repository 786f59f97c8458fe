"""The timeline of the incidents and the claims of their threads, and a picture of them.

Both are in ``workbook/timeline.json``; ``workbook/timeline.md`` is the page with the same lines.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from staleproof.report.plots import FONT, INK, STYLE
from staleproof.runs import checkout

# Number of the incident -> its folder and a few words on it.
LANES = {
    1: ("mla_padding", "empty rows of MLA decode"),
    2: ("decode_buffer", "a buffer no profile saw"),
    3: ("moe_routing", "NaN logits, one expert twice"),
    4: ("kv_reuse", "KV blocks that were Mamba state"),
    5: ("scale_padding", "what the revert blamed"),
    6: ("mxfp4_scales", "the byte behind the last scale"),
    7: ("published_unwritten", "hashes of blocks that nobody wrote"),
}

# Okabe and Ito's colours, one for each incident: colour-blind readers can tell them apart.
COLOURS = {1: "#0072B2", 2: "#D55E00", 3: "#009E73", 4: "#CC79A7", 5: "#E69F00", 6: "#999933", 7: "#56B4E9"}


@dataclass(frozen=True)
class Event:
    """One line of the timeline.

    Attributes:
        date: the day.
        source: the usual name of the thread or release.
        url: its address; ``None`` for a release that was read from its wheel.
        incidents: numbers of the incidents it belongs to.
        label: a few words for the picture; ``None``: a dot only.
        event: what happened, in our words.
        checked: True if we read it in the released code or ran that code; False if the thread says
            so.
        reported: figures of the thread, on GB200 or B200 unless the figure says otherwise.
        grade: of what we checked: ``real`` or ``source``; ``None`` if the thread says it and we did not.
        where: the lines we read, each ``"vLLM 0.18.1 vllm/envs.py:247"``.
    """

    date: datetime.date
    source: str
    url: str | None
    incidents: tuple[int, ...]
    label: str | None
    event: str
    checked: bool
    reported: tuple[str, ...]
    grade: str | None
    where: tuple[str, ...]


HELD, HELD_IN_PART, NOT_HELD = "held", "held in part", "did not hold"
CONSISTENT, NOT_HERE = "consistent with a replica", "could not be run here"
MARKS = (HELD, HELD_IN_PART, NOT_HELD, CONSISTENT, NOT_HERE)


@dataclass(frozen=True)
class Claim:
    """A claim of a thread, and whether it was confirmed.

    Attributes:
        number: its number among the first twenty claims, or ``None``.
        source: the usual name of the thread.
        url: its address.
        claim: the claim, in our words.
        mark: one of :data:`MARKS`.
        grade: the :class:`~staleproof.grades.Grade` of what the mark rests on; ``None`` if it
            could not be run here.
        note: under which conditions, one line.
        where: for the grade ``source`` the lines that say it, like those of an :class:`Event`.
        notebook: the walkthrough whose cells show it.
        finding: incident, question, variant and verdict that show it; ``None`` if a recorded timing
            shows it, or nothing does.
    """

    number: int | None
    source: str
    url: str
    claim: str
    mark: str
    grade: str | None
    note: str
    where: tuple[str, ...]
    notebook: str
    finding: tuple[str, str, str, str] | None


def claims(path: Path | None = None) -> list[Claim]:
    """The claims, in the order of the file.

    Args:
        path: instead of ``workbook/timeline.json``.

    Raises:
        RunFileError: staleproof is installed without its checkout.
    """
    return [
        Claim(**row | {"finding": tuple(row["finding"] or ()) or None, "where": tuple(row["where"])})
        for row in _read(path)["claims"]
    ]


def load(path: Path | None = None) -> list[Event]:
    """The events, in order of date.

    Args:
        path: instead of ``workbook/timeline.json``.

    Raises:
        RunFileError: staleproof is installed without its checkout.
    """
    events = []
    for row in _read(path)["events"]:
        incident = row.pop("incident")
        row |= {
            "date": datetime.date.fromisoformat(row["date"]),
            "incidents": tuple(incident if isinstance(incident, list) else [incident]),
            "reported": tuple(row["reported"]),
            "where": tuple(row["where"]),
        }
        events.append(Event(**row))
    return sorted(events, key=lambda event: event.date)


def _read(path: Path | None) -> dict[str, Any]:
    path = path or checkout() / "workbook" / "timeline.json"
    rows: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return rows


@mpl.rc_context(STYLE | {"axes.spines.left": False, "ytick.major.size": 0})
def figure(events: list[Event] | None = None) -> Figure:
    """The timeline as a picture: a lane for each incident, dates along x.

    A full dot is an event that was checked, a ring one that is only reported. Transparent, in
    mid-grey, so that it can be read on a light and on a dark page.

    Returns:
        A figure that pyplot does not keep; ``.savefig("timeline.svg")`` writes it.
    """
    from matplotlib.dates import ConciseDateFormatter, MonthLocator, date2num
    from matplotlib.lines import Line2D

    events = load() if events is None else events
    # In inches: width of the page, left and right margins (lane names are left), height of a line of text.
    width, left, right, line = 9.0, 2.45, 0.1, 0.21
    first, last = (float(date2num(e.date)) for e in (events[0], events[-1]))
    start, end = first - 8, last + 45
    day = (width - left - right) / (end - start)

    levels, heights = {}, {}
    for n in LANES:
        lane = [e for e in events if n in e.incidents and e.label]
        levels[n] = _levels([(float(date2num(e.date)), _inches(e.label or "") / day) for e in lane])
        heights[n] = 2 + max(levels[n], default=0)
    units = sum(heights.values())
    bottom, top = 0.6, 0.1
    height = units * line + bottom + top

    fig = Figure(figsize=(width, height))
    box = (left / width, bottom / height, 1 - (left + right) / width, units * line / height)
    ax = fig.add_axes(box)
    ax.set(xlim=(start, end), ylim=(units, 0))
    foot = 0.0
    middles = []
    for n, colour in COLOURS.items():
        middles.append(foot + heights[n] / 2)
        foot += heights[n]
        base = foot - 0.6
        ax.plot([start, end], [base, base], color=INK, linewidth=0.5)
        level = iter(levels[n])
        for e in (e for e in events if n in e.incidents):
            x = float(date2num(e.date))
            if e.label:
                y = base - 0.75 - next(level)
                ax.plot([x, x], [base, y], color=colour, linewidth=0.8)
                ax.annotate(e.label, (x + 0.05 / day, y), va="center", annotation_clip=False)
            fill = colour if e.checked else "none"
            ax.plot(x, base, "o", markersize=6, color=colour, markerfacecolor=fill)
    names = [f"{n}  {name}\n{what}" for n, (name, what) in LANES.items()]
    ax.set_yticks(middles, names)
    ax.xaxis.set_major_locator(MonthLocator())
    ax.xaxis.set_major_formatter(ConciseDateFormatter(MonthLocator(), show_offset=False))
    marks = [
        Line2D([], [], color=INK, marker="o", linestyle="", markerfacecolor=fill, label=label)
        for fill, label in ((INK, "checked in the release"), ("none", "reported"))
    ]
    fig.legend(handles=marks, loc="lower left", ncols=2)
    return fig


def _inches(text: str) -> float:
    """Width of a label of the picture, with the gap before it and some space after it."""
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), text, size=FONT).get_extents().width / 72 + 0.15


def _levels(labels: list[tuple[float, float]]) -> list[int]:
    """A height for each label (start, width), so that no label overlaps another or its line.

    Labels are sorted by start and extend to the right. So an earlier label may pass above a later
    one, whose line then ends below it.
    """
    levels: list[int] = []
    for index in reversed(range(len(labels))):
        start, width = labels[index]
        later = zip(labels[index + 1 :], levels, strict=True)
        levels.insert(0, max((lv + 1 for (x, _), lv in later if x < start + width), default=0))
    return levels
