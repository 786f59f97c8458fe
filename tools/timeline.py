"""Writes ``workbook/timeline.md`` from ``timeline.json``: ``python -m tools.timeline``."""

from __future__ import annotations

from staleproof.cases.store import checkout
from staleproof.report.timeline import LANES, Claim, Event, claims, load

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


def markdown(events: list[Event] | None = None, asserted: list[Claim] | None = None) -> str:
    """The text of ``workbook/timeline.md``: tables of the incidents, the events and the claims."""
    events = load() if events is None else events
    asserted = claims() if asserted is None else asserted
    lines = [
        "# Timeline",
        "",
        "<!-- Made from timeline.json by `python -m tools.timeline`; edit that. -->",
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


if __name__ == "__main__":
    table = checkout() / "workbook" / "timeline.md"
    table.write_text(markdown(), encoding="utf-8")
    print(f"{table.name} written")
