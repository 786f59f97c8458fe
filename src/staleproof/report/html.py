"""The report: one HTML file that loads nothing else.

``templates/report.html`` is the page. This module gathers what it shows: the triage table, a card an
incident, findings of this machine beside the recorded ones, the notebooks, and the pages of the workbook.
"""

from __future__ import annotations

import base64
import datetime
import html as markup
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import or_
from pathlib import Path, PurePosixPath
from typing import Any

import nbformat
from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup
from nbconvert.filters import strip_ansi
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from staleproof import runs as store
from staleproof.incidents.registry import INCIDENTS
from staleproof.lab import OFF_ON_OFF, Finding, Key
from staleproof.report import matrix, plots, timeline
from staleproof.report.notebooks import Execution
from staleproof.runs import Run, compare
from staleproof.triage import table
from staleproof.vllm.plugin import patches

TEMPLATES = Path(__file__).with_name("templates")
# The pictures' grey is readable on white and on black, but on neither with a contrast of 4.5. The page lays
# each picture on a light ground of its own, so it can be darker there.
DARKER = "#4a525b"
THIS = "this machine"
# Kinds of output, best first. HTML, widgets and scripts are left out: their picture or text is shown.
SHOWN = ("image/svg+xml", "image/png", "text/markdown", "text/plain")
# CommonMark, so that a line that begins with "#57036" is no heading.
_MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
_LINK = re.compile(r"<a\b([^>]*?)\bhref=([\"'])(.*?)\2([^>]*)>(.*?)</a>", re.DOTALL)
_TERM = re.compile(r"<a id=\"([^\"]+)\"></a>\s*\*\*[^*]+\*\* - (.+?)(?=\n\s*\n|\Z)", re.DOTALL)


@dataclass
class Picture:
    """A picture as the page shows it: an address with the data in it, and the words beside it."""

    uri: str
    alt: str
    caption: str


@dataclass
class Section:
    """What stands under one heading of a notebook, in order: (kind, content)."""

    title: str
    anchor: str
    parts: list[tuple[str, Any]] = field(default_factory=list)


@dataclass
class Chapter:
    """One notebook; the first section is what stands before the first heading."""

    stem: str
    title: str
    error: str | None
    sections: list[Section]

    def section(self, word: str) -> Section | None:
        """The first section whose title holds this word."""
        return next((one for one in self.sections[1:] if word in one.title.lower()), None)


def page(
    findings: Sequence[Finding],
    runs: Sequence[Run],
    notebooks: Sequence[Execution],
    origins: Sequence[str] = (),
) -> str:
    """The whole report.

    Args:
        findings: of this machine: of this process, or of an earlier one, read as RECORDED.
        runs: recorded runs to show beside them.
        notebooks: executed copies or the stored notebooks, in reading order.
        origins: which source the findings are of, a line an incident.

    Raises:
        CheckoutError: staleproof is installed without its checkout.
    """
    book = store.checkout() / "workbook"
    patched = book / "patches.json"
    documents = {path.name: path.read_text() for path in sorted(book.glob("*.md"))}
    known = {anchor: plain(text) for anchor, text in _TERM.findall(documents.get("glossary.md", ""))}
    chapters = [chapter(one) for one in notebooks]
    # Runs of a whole vLLM have questions of their own; notebooks 01 to 04 show them.
    machines = [run for run in runs if any(found.incident != "engine" for found in run.findings)]
    told = [findings, *(run.findings for run in machines)]
    environment = Environment(
        loader=PackageLoader("staleproof.report"), autoescape=True, undefined=StrictUndefined
    )
    environment.filters |= {"md": render, "code": code}
    environment.globals |= {"grades": matrix.grades, "provenance": matrix.provenance}
    made = environment.get_template("report.html").render(
        style=Markup((TEMPLATES / "style.css").read_text()),
        script=Markup((TEMPLATES / "script.js").read_text()),
        about=_about(findings),
        triage=table.rows(),
        numbers={name: about.number for name, about in INCIDENTS.items()},
        caption=table.CAPTION,
        releases=[*table.probes()],
        cards=[_card(number, chapters, told) for number in INCIDENTS],
        origins=origins,
        guided=guided(),
        beside=[(run, compare(findings, run.findings)) for run in machines],
        findings=findings,
        **_answers(findings, machines),
        panels=groupby(matrix.build(next(filter(None, told), [])), lambda one: one.incident),
        absent=matrix.absences(findings),
        patched=json.loads(patched.read_text()) if patched.exists() else {},
        chapters=chapters,
        timeline=_timeline() if "timeline.md" in documents else None,
        # The index is the page itself.
        documents={n: text for n, text in documents.items() if n != "index.md"},
    )
    places = {f"{one.stem}.ipynb": one.stem for one in chapters} | {"README.md": "triage"}
    places |= {name: f"doc-{name.removesuffix('.md')}" for name in documents} | {"index.md": "incidents"}
    return settle_links(made, places, known).rstrip() + "\n"


def guided() -> list[dict[str, Any]]:
    """The stages of the guided figure, each with the states of its rows."""
    return [*accumulate(tomllib.loads((TEMPLATES / "guided.toml").read_text())["stage"], or_)]


def _about(findings: Sequence[Finding]) -> str:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    names = sorted({str(found.machine.get("name", "unknown machine")) for found in findings})
    dates = sorted({found.date for found in findings})
    return f"Made {today}" + (f" on {', '.join(names)}; verdicts of {', '.join(dates)}." if names else ".")


def _card(name: str, chapters: Iterable[Chapter], told: Iterable[Sequence[Finding]]) -> dict[str, Any]:
    """One incident: its chapter's picture, its proof here or else on a recorded machine, and what to do."""
    sentences = tomllib.loads((TEMPLATES / "incidents.toml").read_text())
    about = INCIDENTS[name]
    walked = next((one for one in chapters if f"{one.stem}.ipynb" == about.notebook), None)
    wanted = ("symptom", "first bad stage", "fix", "in production", "real engine")
    places = [place for word in wanted if walked and (place := walked.section(word))]
    bad = walked.section("first bad stage") if walked else None
    asked = ([one for one in found if one.key[:2] == (name, OFF_ON_OFF) and one.ran] for found in told)
    proofs: list[Finding] = next(filter(None, asked), [])
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for one in proofs:
        if three := one.three:
            key = (three.off, three.on, three.again, one.verdict, one.grade)
            alike.setdefault(key, []).append(one)
    return {
        "name": name,
        "about": about,
        "sentences": sentences.get(name, about.summary),
        "rows": [row for row in table.rows() if row.incident == name],
        "patches": [patch for patch in patches().values() if patch.incident == name],
        "chapter": walked,
        "places": places,
        "picture": next((part for kind, part in bad.parts if kind == "picture"), None) if bad else None,
        "alike": [*alike.values()],
        "proofs": proofs,
    }


def _answers(findings: Sequence[Finding], runs: Sequence[Run]) -> dict[str, Any]:
    """Every question with its answers, a column a machine: first where verdicts differ, then the others."""
    columns = {THIS: findings} if findings else {}
    columns |= {f"{run.machine}, {run.folder.name}": run.findings for run in runs}
    answers: dict[Key, dict[str, Finding]] = {}
    for machine, found in columns.items():
        for one in found:
            row = answers.setdefault(one.key, {})
            # An unexpected verdict is not hidden by a later one.
            if machine not in row or not row[machine].failed:
                row[machine] = one

    def is_open(row: Mapping[str, Finding]) -> bool:
        ran = [one for one in row.values() if one.ran]
        return any(one.failed for one in ran) or len({one.verdict for one in ran}) > 1

    differ = {key: row for key, row in answers.items() if is_open(row)}
    same = {key: row for key, row in answers.items() if key not in differ}
    return {"columns": [*columns], "differ": differ, "same": same}


def _timeline() -> Picture:
    alt = "Dates of the incidents from October 2025 on, a lane each: "
    alt += "; ".join(f"{number} {name}, {what}" for number, (name, what) in timeline.LANES.items())
    caption = "Full dots were checked in a release, rings are what a thread reports. Times are UTC days."
    return _picture("image/svg+xml", plots.svg(timeline.figure()).data, alt, caption)


def _picture(kind: str, data: str, alt: str, caption: str) -> Picture:
    if kind == "image/svg+xml":
        # Hundredths of a point are enough for a screen. A scale is a factor, not a place.
        data = re.sub(r"(?s)<!--.*?-->|<metadata>.*?</metadata>|(?<=>)\s+(?=<)", "", data)
        data = re.sub(r"scale\([^)]*\)|-?\d+\.\d{3,}", _rounded, data).replace(plots.INK, DARKER)
        # A style that is repeated becomes a class: a grid has hundreds of the same cell.
        rules = ""
        for number, (style, count) in enumerate(Counter(re.findall(r' style="([^"]+)"', data)).items()):
            if count > 2:
                data = data.replace(f' style="{style}"', f' class="s{number}"')
                rules += f".s{number}{{{style}}}"
        data = re.sub(r"(<svg[^>]*>)", rf"\1<style>{rules}</style>", data, count=1)
        # As an image of its own: its ids and styles cannot meet those of the page.
        data = base64.b64encode(data.encode()).decode()
    return Picture(f"data:{kind};base64,{data.strip()}", alt, caption)


def _rounded(match: re.Match[str]) -> str:
    return match[0] if match[0].startswith("scale") else f"{float(match[0]):.2f}".rstrip("0").rstrip(".")


def chapter(execution: Execution) -> Chapter:
    """Read one notebook, executed or stored."""
    notebook = nbformat.read(execution.path, as_version=4)
    made = Chapter(execution.path.stem, execution.path.stem, execution.error, [])
    made.sections.append(Section("", made.stem))
    for cell in notebook.cells:
        parts = made.sections[-1].parts
        if cell.cell_type == "code" and cell.source.strip():
            parts.append(("answer" if "answer" in cell.metadata.get("tags", []) else "code", cell.source))
            for output in cell.get("outputs", []):
                parts.extend(_shown(output, made.sections[-1].title or made.title))
        for text in re.split(r"(?m)^(?=##? \S)", cell.source) if cell.cell_type == "markdown" else ():
            heading = re.match(r"(##?) (.+)\n?", text)
            if heading and heading[1] == "#":
                made.title = plain(heading[2])
            elif heading:
                title = plain(heading[2])
                made.sections.append(Section(title, f"{made.stem}-{slug(title)}"))
            made.sections[-1].parts.append(("markdown", text[heading.end() :] if heading else text))
    return made


def _shown(output: Any, title: str) -> Iterable[tuple[str, Any]]:
    if output.output_type == "stream":
        # The caption stands below its picture.
        lines = [line for line in output.text.splitlines() if not line.startswith("Picture, ")]
        if any(line.strip() for line in lines):
            yield "printed", strip_ansi("\n".join(lines))
    elif output.output_type == "error":
        yield "printed", strip_ansi("\n".join(output.traceback))
    elif kind := next((kind for kind in SHOWN if kind in output.data), None):
        if kind.startswith("image/"):
            told = output.metadata.get(kind, {})
            yield (
                "picture",
                _picture(kind, output.data[kind], told.get("alt", title), told.get("caption", "")),
            )
        else:
            yield ("markdown" if kind == "text/markdown" else "printed"), strip_ansi(output.data[kind])


def render(text: str, level: int = 1) -> Markup:
    """Markdown as HTML, its headings lowered by ``level`` so that they fit under those of the page.

    >>> print(render("#57036 is a number.").strip())
    <p>#57036 is a number.</p>
    """
    made = re.sub(
        r"(</?h)([1-6])\b", lambda found: f"{found[1]}{min(int(found[2]) + level, 6)}", _MARKDOWN.render(text)
    )
    made = made.replace("<th></th>", "<td></td>").replace("<th>", '<th scope="col">')
    return Markup(made.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>"))


def code(source: str) -> Markup:
    """Python with its tokens marked for the page's style, in a box that the keyboard can scroll."""
    made = highlight(source, PythonLexer(), HtmlFormatter(cssclass="highlight"))
    # Names, operators and punctuation have no colour: without their marks it is half of the bytes.
    made = re.sub(r'<span class="(?:n|o|p|w|nn)">([^<]*)</span>', r"\1", made)
    return Markup(made.replace("<pre>", '<pre tabindex="0">').replace("<span></span>", ""))


def plain(text: str) -> str:
    """The words of some markdown, on one line."""
    return Markup(_MARKDOWN.render(text)).striptags()


def slug(title: str) -> str:
    """The anchor of a heading.

    >>> slug("1 · What `stale` means: a NaN")
    'what-stale-means-a-nan'
    """
    return re.sub(r"[^\w]+", "-", re.sub(r"^\d+ · ", "", title).lower()).strip("-")


def settle_links(page: str, places: Mapping[str, str], known: Mapping[str, str]) -> str:
    """Make each link of the finished page lead into the page or to the web; another becomes its text.

    Args:
        page: HTML.
        places: file name -> the anchor of its place in the page, e.g. ``glossary.md``.
        known: anchor of a word of the glossary -> its definition, which its links get as a tooltip.
    """
    anchors = set(re.findall(r"\bid=[\"']([^\"']+)[\"']", page))

    def settle(match: re.Match[str]) -> str:
        before, _, target, after, text = match.groups()
        target = markup.unescape(target)
        if re.match(r"https?://|mailto:", target):
            return match[0]
        path, _, anchor = target.partition("#")
        place = places.get(PurePosixPath(path).name, "") if path else ""
        if place == "doc-glossary" and anchor in known:
            return f'<a class="term" href="#{anchor}" title="{markup.escape(known[anchor])}">{text}</a>'
        for wanted in (f"{place}-{slug(anchor)}" if place and anchor else "", place, "" if path else anchor):
            if wanted in anchors:
                return f'<a{before}href="#{wanted}"{after}>{text}</a>'
        return text

    return _LINK.sub(settle, page)
