"""The report: one HTML file that loads nothing else."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from staleproof.cases.finding import OFF_ON_OFF, Finding
from staleproof.cases.predictions import Outcome
from staleproof.cases.store import Run, compare
from staleproof.contract.contract import Row
from staleproof.report import plots, timeline
from staleproof.report.audit import heat_map
from staleproof.report.engine import is_engine
from staleproof.report.notebooks import Execution
from staleproof.report.page import beside, cards, chapters, matrices, pictures, reference, texts
from staleproof.report.page.kept import Kept, Patched
from staleproof.report.page.meaning import meaning
from staleproof.report.page.tables import cell, fold, table

COMPILED_COLUMNS = (
    *("kernel", "specialisations", "warps", "registers", "spilled", "shared", "limit"),
    *("problems", "accepted"),
)
MEASURED_COLUMNS = ("kernel", "provider", "mode", "x_name", "x_value", "p50", "p20", "p80", "unit")
# Pages of the workbook that are not shown as they are: these have a section of their own.
OWN_PLACE = {
    "glossary.md": "glossary",
    "timeline.md": "timeline",
    "index.md": "incidents",
    "README.md": "triage",
}


@dataclass(frozen=True)
class Entry:
    """A line of the contents."""

    anchor: str
    title: str
    below: Sequence[Entry] = ()


@dataclass(frozen=True)
class Section:
    """A part of the page under a heading of the second level."""

    anchor: str
    title: str
    body: object
    below: Sequence[Entry] = ()

    def __html__(self) -> str:
        return Markup('<section id="{}">\n<h2>{}</h2>\n{}\n</section>').format(
            self.anchor, self.title, self.body
        )


def _proofs(told: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Off / on / off of each incident: of this machine, which is first, or else of a recorded one."""
    proofs: list[Finding] = []
    for incident in cards.INCIDENTS:
        asked = (
            [one for one in found if (one.incident, one.question) == (incident, OFF_ON_OFF)] for found in told
        )
        proofs += next((some for some in asked if any(one.ran for one in some)), [])
    return proofs


def page(
    findings: Sequence[Finding], runs: Sequence[Run], notebooks: Sequence[Execution], kept: Kept | None = None
) -> str:
    """The whole report.

    Args:
        findings: of this machine: of this process, or of an earlier one, read as RECORDED.
        runs: recorded runs to show beside them.
        notebooks: executed copies, in reading order.
        kept: what else the workbook holds.
    """
    kept = kept or Kept()
    read = [chapters.read(execution) for execution in notebooks]
    # Whole engines have a section of their own.
    runs = [run for run in runs if not is_engine(run)]
    # What a whole vLLM answered stands before what our engine in miniature did.
    first = [
        *([Section("engine", "In a real engine", Markup(kept.engine))] if kept.engine else []),
        Section("verdicts", "This machine beside the recorded ones", _verdicts(findings, runs, kept.origins)),
    ]
    last = [
        *(one for one in _optional(kept) if one.body),
        *_book(kept.documents),
        Section("api", "Public API", reference.html()),
    ]
    proofs = _proofs([findings, *(run.findings for run in runs)])
    known = texts.terms(kept.documents.get("glossary.md", ""))
    environment = Environment(
        loader=PackageLoader("staleproof.report.page"), autoescape=True, undefined=StrictUndefined
    )
    style, script = (Markup(environment.get_template(name).render()) for name in ("style.css", "script.js"))
    made = environment.get_template("report.html").render(
        style=style,
        script=script,
        about=_about(findings),
        triage=Markup(kept.triage or "<p>The triage table is missing.</p>"),
        cards=cards.build(proofs, read, kept.do_now, known),
        contents=_contents(first, read, last),
        sections=[*first, *(chapter.html() for chapter in read), *last],
    )
    anchors = set(re.findall(r"\bid=[\"']([^\"']+)[\"']", made))
    places = {f"{chapter.stem}.ipynb": chapter.stem for chapter in read}
    places |= {name: OWN_PLACE.get(name, _anchor(name)) for name in (*kept.documents, *OWN_PLACE)}
    return texts.settle_links(made, anchors, places, known).rstrip() + "\n"


def _anchor(document: str) -> str:
    return f"doc-{document.removesuffix('.md')}"


def _contents(
    first: Sequence[Section], read: Sequence[chapters.Chapter], last: Sequence[Section]
) -> list[Entry]:
    incidents = [Entry(name, f"{about.number} · {about.title}") for name, about in cards.INCIDENTS.items()]
    walked = [
        Entry(one.stem, one.title, [Entry(part.anchor, part.title) for part in one.sections[1:]])
        for one in read
    ]
    start = [Entry("triage", "What do you see?"), Entry("incidents", "The five incidents", incidents)]
    before, after = ([Entry(one.anchor, one.title, one.below) for one in some] for some in (first, last))
    return [*start, *before, *walked, *after]


def _about(findings: Sequence[Finding]) -> str:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    names = sorted({str(found.machine.get("name", "unknown machine")) for found in findings})
    dates = sorted({found.date for found in findings})
    return f"Made {today}" + (f" on {', '.join(names)}; verdicts of {', '.join(dates)}." if names else ".")


def _verdicts(findings: Sequence[Finding], runs: Sequence[Run], origins: Sequence[str]) -> Markup:
    parts = [Markup("<p>{}</p>").format(line) for line in origins]
    if not findings:
        parts.append(Markup("<p>None of this machine yet: <code>staleproof run</code> obtains them.</p>"))
    for run in runs:
        said = f"{compare(findings, run.findings).summary}." if findings else ""
        line = Markup("<p><b>RECORDED</b> {}. {}</p>")
        parts.append(
            line.format(run.title, f"This machine (first) against it (second): {said}" if said else "")
        )
    parts.append(beside.html(findings, runs))
    shown = findings or next((run.findings for run in runs), [])
    if shown:
        title = "Matrices of this machine" if findings else "Matrices of the first recorded run"
        parts += [Markup("<h3>{}</h3>").format(title), matrices.html(shown)]
    timed = [run for run in runs if run.measurements]
    if timed:
        parts.append(Markup("<h3>Timings</h3>"))
    for run in timed:
        rows = ([row.get(name, "") for name in MEASURED_COLUMNS] for row in run.measurements)
        caption = f"RECORDED {run.machine}, {run.date}. p50 is a median; times in the unit of each row."
        body = table(MEASURED_COLUMNS, ([_number(v) for v in row] for row in rows), caption=caption)
        parts.append(fold(f"{run.machine}: {len(run.measurements)} measurements", body, kind="rows"))
    return Markup("\n").join(parts)


def _number(value: object) -> object:
    return cell(value) if isinstance(value, int | float) else value


def _optional(kept: Kept) -> list[Section]:
    """The sections whose data may be missing."""
    return [
        Section("patched", "vLLM, patched", _patched(kept.patched) if kept.patched else ""),
        Section("service", "The plugin in service", Markup(kept.served)),
        Section("compiled", "Compiled for other GPUs", _compiled(kept.compiled) if kept.compiled else ""),
        Section("predicted", "Predicted for SM100", _predicted(kept.predicted) if kept.predicted else ""),
        Section("audited", "The padding contract", _audited(kept.audited) if kept.audited else ""),
    ]


def _book(documents: Mapping[str, str]) -> list[Section]:
    """The timeline, the glossary and the other pages of the workbook, folded."""
    sections = []
    if "timeline.md" in documents:
        alt = "Dates of the five incidents from October 2025 on, a lane each: "
        alt += "; ".join(f"{number} {name}, {what}" for number, (name, what) in timeline.LANES.items())
        caption = "Full dots were checked in a release, rings are what a thread reports. Times are UTC days."
        drawn = pictures.figure(plots.svg(timeline.figure()).data, alt=alt, caption=caption)
        body = drawn + texts.render(documents["timeline.md"].partition("\n")[2], 1)
        sections.append(Section("timeline", "Timeline", fold("The five incidents by date", body)))
    if "glossary.md" in documents:
        count = len(texts.terms(documents["glossary.md"]))
        body = texts.glossary_html(documents["glossary.md"])
        sections.append(Section("glossary", "Glossary", fold(f"{count} words", body)))
    others = {name: text for name, text in documents.items() if name not in OWN_PLACE}
    if others:
        folds, entries = [], []
        for name, text in others.items():
            heading, _, rest = text.partition("\n")
            title = texts.plain(heading.lstrip("# "))
            head = Markup("<h3>{}</h3>").format(title)
            folds.append(fold(head, texts.render(rest, 2), kind="section", name=_anchor(name)))
            entries.append(Entry(_anchor(name), title))
        sections.append(Section("book", "More of the book", Markup("\n").join(folds), entries))
    return sections


def _patched(releases: Patched) -> Markup:
    """A row for each question, a column for each release; both answers if the patches change it."""
    questions = dict.fromkeys(question for answers in releases.values() for question in answers)
    rows = []
    for question in questions:
        row: list[object] = [question]
        for answers in releases.values():
            off, on = answers.get(question, ("-", "-"))
            row.append(cell(off, "absent") if off == on else cell(f"{off} → {on}", "cured"))
        rows.append(row)
    return Markup(
        "<p>RECORDED. Real releases on a CPU, each question without staleproof's patches → with them; grey "
        "where nothing changes. The Triton kernel is vLLM's, interpreted; stand-ins that model their faults "
        "take the place of the compiled ones.</p>"
    ) + fold(f"{len(rows)} questions", table(("question", *releases), rows, row_heads=True), kind="rows")


def _compiled(kept: Mapping[str, Any]) -> Markup:
    """A row for each kernel on each architecture."""
    rows = []
    for row in kept["rows"]:
        values = ["; ".join(row[n]) if isinstance(row[n], list) else row[n] for n in COMPILED_COLUMNS]
        mark = cell(f"sm_{row['capability']}", "harm" if row["problems"] else "clean")
        rows.append([mark, *map(_number, values)])
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    bad = sum(bool(row["problems"]) for row in kept["rows"])
    return Markup(
        "<p>Every Triton kernel, in each specialisation that the public functions launch at DeepSeek's and "
        "Qwen's shapes, compiled on a machine without a GPU; the worst of its specialisations. {} of {} have "
        "a problem. {}, {}.</p>"
    ).format(bad, len(rows), kept["date"], versions) + fold(
        f"{len(rows)} kernels",
        table(
            ("GPU", *COMPILED_COLUMNS), rows, caption="spilled: bytes a thread. shared, limit: bytes a block."
        ),
        kind="rows",
    )


def _predicted(outcomes: Sequence[Outcome]) -> Markup:
    """A row for each prediction, the refuted first."""
    rows = [
        (
            cell(one.state, meaning("prediction", one.state)),
            *one.prediction.key[:3],
            one.prediction.predicted,
            one.verdict or "",
            one.prediction.why,
        )
        for one in outcomes
    ]
    names = ("state", "incident", "question", "variant", "predicted", "got", "why")
    states = [one.state for one in outcomes]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return Markup(
        "<p>Registered before anybody ran these questions on such a GPU; open until a recorded run answers: "
        "{}.</p>"
    ).format(counts) + fold(f"{len(rows)} predictions", table(names, rows), kind="rows")


def _audited(rows: Sequence[Row]) -> Markup:
    """The heat map of recorded audits."""
    ran = [row for row in rows if row.verdict != "not run"]
    counts = {
        verdict: sum(row.verdict == verdict for row in ran) for verdict in ("holds", "breaks", "undefined")
    }
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    subjects = len({(row.package, row.version, row.subject) for row in ran})
    drawn = pictures.figure(
        plots.svg(heat_map(rows)).data,
        alt=f"Kernels of packages by clause of the padding contract: of {subjects} kernels, {said}.",
        caption="RECORDED. A row a kernel, a column a clause: + holds, X breaks, u undefined.",
    )
    return Markup(
        "<p>RECORDED. Kernels of packages by clause: {}. Subjects that did not run are left out. The clauses "
        'are in <a href="contract.md">contract.md</a>.</p>'
    ).format(said) + fold(f"{subjects} kernels, clause by clause", drawn, kind="rows")
