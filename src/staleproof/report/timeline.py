"""The timeline of the five incidents and the claims of their threads, as tables and a picture.

Both are in ``workbook/timeline.json``. ``python -m staleproof.report.timeline`` writes
``workbook/timeline.md`` from it.
"""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleproof.cases.finding import Finding, Grade
from staleproof.cases.store import checkout
from staleproof.check import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Number of the incident -> its folder and a few words on it.
LANES = {
    1: ("mla_padding", "empty rows of MLA decode"),
    2: ("decode_buffer", "a buffer no profile saw"),
    3: ("moe_routing", "NaN logits, one expert twice"),
    4: ("kv_reuse", "KV blocks that were Mamba state"),
    5: ("scale_padding", "what the revert blamed"),
}

LEGEND = (
    "Lines marked *reported* are what a thread says; the figures in them are its authors', on "
    "GB200 or B200 hardware unless they say otherwise, and were not measured here. Lines marked "
    "*checked* we read in the released wheel (*source*) or ran from it (*real*); a wheel's date is "
    "its build's."
)

CLAIMS_LEGEND = """\
The first twenty by number, then those that a first check raised. The grade says what the mark rests on:

| grade | |
|---|---|
| real | The code of vLLM, FlashInfer or torch ran, in the finding that is named. |
| source | What shipped source says, by file and line, or a shipped binary, by file and offset; that code \
did not run here. A finding beside it shows the same on a replica, or says what could not be run. |
| replica | Our code ran, which follows a cited source. About a kernel that never ran here, the best mark \
is then *consistent with a replica*. |
| arithmetic | Computed from sizes or from bits. |

*Shown by* names the walkthrough and, where one finding says it, that finding: incident, question, variant,
verdict, as `staleproof run` prints them. Paths are those of the named release: of its source distribution, or
of its wheel."""

INK = "#808080"
# Okabe and Ito's colours, one for each incident: colour-blind readers can tell them apart.
COLOURS = {1: "#0072B2", 2: "#D55E00", 3: "#009E73", 4: "#CC79A7", 5: "#E69F00"}


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
# Package, release, file and lines; of a binary the offset.
_WHERE = re.compile(r"(vLLM|FlashInfer|flashinfer-cubin) \S+ \S+:(\d+(-\d+)?|0x[0-9a-f]+)")


@dataclass(frozen=True)
class Claim:
    """A claim of a thread, and whether it was confirmed.

    Attributes:
        number: its number among the first twenty claims, or ``None``.
        source: the usual name of the thread.
        url: its address.
        claim: the claim, in our words.
        mark: one of :data:`MARKS`.
        grade: the :class:`~staleproof.cases.finding.Grade` of what the mark rests on; ``None`` if it
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
        ValueError: an entry lacks a field, has an unknown one, an unknown mark or grade, or a mark that
            its grade does not carry.
    """
    return [_claim(number, row) for number, row in enumerate(_read(path)["claims"], 1)]


def _claim(number: int, row: dict[str, Any]) -> Claim:
    fields = set(Claim.__annotations__)
    name = f"claim {number}"
    require(set(row) == fields, name, f"the fields {sorted(fields)}", sorted(row))
    mark, grade, shown = row["mark"], row["grade"], row["finding"]
    require(mark in MARKS, f"{name}, mark", f"one of {MARKS}", mark)
    grades = {NOT_HERE: (None,), CONSISTENT: (Grade.REPLICA,)}.get(mark, tuple(Grade))
    require(grade in grades, f"{name}, grade of {mark!r}", f"one of {[str(g) for g in grades]}", grade)
    _require_where(row, name)
    read = bool(row["where"]) or grade != Grade.SOURCE
    require(read, f"{name}, where", "the lines that say it", row["where"])
    ok = shown is None or len(shown) == 4
    require(ok, f"{name}, finding", "incident, question, variant, verdict", shown)
    return Claim(**row | {"finding": tuple(shown) if shown else None, "where": tuple(row["where"])})


def _require_where(row: dict[str, Any], name: str) -> None:
    for where in row["where"]:
        expected = "package, release, file:line"
        require(_WHERE.fullmatch(where) is not None, f"{name}, where", expected, where)


def disagrees(claim: Claim, shown: Finding) -> str | None:
    """Why the finding that a claim names does not carry its mark, or ``None`` if it does.

    A claim graded ``source`` rests on the lines it names, so the finding beside it may have any grade.
    """
    if claim.finding is None or shown.verdict != claim.finding[3]:
        return f"the finding says {shown.verdict!r}, the claim names {claim.finding}"
    # Runs recorded before there were grades have none.
    if claim.grade in (Grade.SOURCE, shown.grade) or not (shown.grade and shown.ran):
        return None
    return f"the claim is graded {claim.grade}, its finding {shown.grade}"


def _read(path: Path | None) -> dict[str, Any]:
    path = path or checkout() / "workbook" / "timeline.json"
    rows: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return rows


def load(path: Path | None = None) -> list[Event]:
    """The events, in order of date.

    Args:
        path: instead of ``workbook/timeline.json``.

    Raises:
        RunFileError: staleproof is installed without its checkout.
        ValueError: an entry lacks a field, has an unknown one, or names an unknown incident, or
            the entries are not in order of date.
    """
    events = [_event(number, row) for number, row in enumerate(_read(path)["events"], 1)]
    dates = [e.date for e in events]
    require(dates == sorted(dates), "events", "entries in order of date", "another order")
    return events


def _event(number: int, row: dict[str, Any]) -> Event:
    fields = set(Event.__annotations__) - {"incidents"} | {"incident"}
    name = f"timeline entry {number}"
    require(set(row) == fields, name, f"the fields {sorted(fields)}", sorted(row))
    incident = row["incident"]
    incidents = tuple(incident if isinstance(incident, list) else [incident])
    known = bool(incidents) and set(incidents) <= set(LANES)
    require(known, f"{name}, incident", f"some of {list(LANES)}", incident)
    grades = (Grade.REAL, Grade.SOURCE) if row["checked"] else (None, Grade.SOURCE)
    require(row["grade"] in grades, f"{name}, grade", f"one of {[str(g) for g in grades]}", row["grade"])
    _require_where(row, name)
    return Event(
        date=datetime.date.fromisoformat(row["date"]),
        source=row["source"],
        url=row["url"],
        incidents=incidents,
        label=row["label"],
        event=row["event"],
        checked=row["checked"],
        reported=tuple(row["reported"]),
        grade=row["grade"],
        where=tuple(row["where"]),
    )


def markdown(events: list[Event] | None = None, asserted: list[Claim] | None = None) -> str:
    """The text of ``workbook/timeline.md``: tables of the incidents, the events and the claims."""
    events = load() if events is None else events
    asserted = claims() if asserted is None else asserted
    lines = [
        "# Timeline",
        "",
        "<!-- Made from timeline.json by `python -m staleproof.report.timeline`; edit that. -->",
        "",
        LEGEND,
        "",
        "| incident | name | what it is |",
        "|---|---|---|",
        *(f"| {n} | `{name}` | {what} |" for n, (name, what) in LANES.items()),
        "",
        "| date | source | incident | what happened | figures, as reported | |",
        "|---|---|---|---|---|---|",
    ]
    for e in events:
        source = f"[{e.source}]({e.url})" if e.url else e.source
        numbers = ", ".join(map(str, e.incidents))
        figures = "<br>".join(e.reported)
        mark = ", ".join(filter(None, ("checked" if e.checked else "reported", e.grade)))
        row = [e.date.isoformat(), source, numbers, e.event, figures, mark + _lines_read(e.where)]
        lines.append(_line(row))
    lines += ["", "## What the threads claim, and what became of it", "", CLAIMS_LEGEND, ""]
    lines += [
        "| | source | claim | | grade | under which conditions | shown by |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in asserted:
        number = "" if c.number is None else str(c.number)
        shown = f"[{c.notebook[:2]}](../notebooks/{c.notebook})"
        if c.finding:
            shown += ": " + ", ".join(f"`{part}`" for part in c.finding)
        cells = [number, f"[{c.source}]({c.url})", c.claim, c.mark, c.grade or "", c.note]
        lines.append(_line([*cells, shown + _lines_read(c.where)]))
    return "\n".join(lines) + "\n"


def _lines_read(where: tuple[str, ...]) -> str:
    """One ``<br>``-separated list, the package and release once for lines of the same one."""
    said, last = "", ""
    for one in where:
        package, _, line = one.rpartition(" ")
        said += f"<br>{package} `{line}`" if package != last else f"<br>`{line}`"
        last = package
    return said


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def figure(events: list[Event] | None = None) -> Figure:
    """The timeline as a picture: a lane for each incident, dates along x.

    A full dot is an event that was checked, a ring one that is only reported. Transparent, in
    mid-grey, so that it can be read on a light and on a dark page.

    Returns:
        A figure that pyplot does not keep; ``.savefig("timeline.svg")`` writes it.
    """
    from matplotlib.dates import ConciseDateFormatter, MonthLocator, date2num
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    events = load() if events is None else events
    # In inches: the page, the space for lane names, one line of text.
    width, left, right, line = 11.0, 2.35, 0.1, 0.19
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

    fig = Figure(figsize=(width, height), facecolor="none")
    box = (left / width, bottom / height, 1 - (left + right) / width, units * line / height)
    ax = fig.add_axes(box, facecolor="none")
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
                at = (x + 0.05 / day, y)
                ax.annotate(e.label, at, color=INK, fontsize=8, va="center", annotation_clip=False)
            fill = colour if e.checked else "none"
            ax.plot(x, base, "o", markersize=6, color=colour, markerfacecolor=fill)
    names = [f"{n}  {name}\n{what}" for n, (name, what) in LANES.items()]
    ax.set_yticks(middles, names, color=INK, fontsize=8)
    ax.tick_params(axis="x", colors=INK, labelsize=8)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MonthLocator())
    ax.xaxis.set_major_formatter(ConciseDateFormatter(MonthLocator(), show_offset=False))
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(INK)
    marks = [
        Line2D([], [], color=INK, marker="o", linestyle="", markerfacecolor=fill, label=label)
        for fill, label in ((INK, "checked in the release"), ("none", "reported"))
    ]
    fig.legend(handles=marks, loc="lower left", ncols=2, fontsize=8, frameon=False, labelcolor=INK)
    return fig


def _inches(text: str) -> float:
    """Width of a label of the picture, with the gap before it and some space after it."""
    from matplotlib.textpath import TextPath

    return TextPath((0, 0), text, size=8).get_extents().width / 72 + 0.15


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


if __name__ == "__main__":
    table = checkout() / "workbook" / "timeline.md"
    table.write_text(markdown(), encoding="utf-8")
    print(f"{table.name} written")
