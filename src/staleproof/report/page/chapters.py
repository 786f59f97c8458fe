"""Executed notebooks as chapters: their sections folded, their code folded, their pictures captioned."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import nbformat
from markupsafe import Markup, escape
from nbconvert.filters import strip_ansi

from staleproof.report.notebooks import Execution
from staleproof.report.page import pictures, texts
from staleproof.report.page.tables import fold

# Kinds of output, best first. HTML, widgets and scripts are left out: their picture or text is shown.
SHOWN = ("image/svg+xml", "image/png", "image/jpeg", "text/markdown", "text/plain")
FIRST_BAD = "first bad stage"


@dataclass
class Section:
    """What stands under one heading of a notebook.

    Attributes:
        title: plain words.
        anchor: unique in the page.
        parts: HTML, in order.
        figures: the pictures among them.
    """

    title: str
    anchor: str
    parts: list[Markup] = field(default_factory=list)
    figures: list[Markup] = field(default_factory=list)

    def take_figure(self) -> Markup:
        """Its first picture, for another place of the page; here it is drawn from there."""
        if not self.figures:
            return Markup("")
        taken = self.figures.pop(0)
        self.parts[self.parts.index(taken)] = pictures.again(taken)
        return taken


@dataclass(frozen=True)
class Chapter:
    """One notebook.

    Attributes:
        stem: file name without ``.ipynb``; the anchor.
        title: its first heading.
        sections: the first has no title: what stands before the first section.
        error: what stopped the notebook, or ``None``.
        claim: rows of its claim box, e.g. ``cost``, as markdown.
        machine: the banner: machine, versions and provenance.
    """

    stem: str
    title: str
    sections: list[Section]
    error: str | None
    claim: dict[str, str]
    machine: str

    def section(self, word: str) -> Section | None:
        """The first section whose title holds this word."""
        return next((one for one in self.sections[1:] if word in one.title.lower()), None)

    def html(self) -> Markup:
        """The chapter: its first words open, each section a fold."""
        stopped = (
            Markup('<p class="stopped">This notebook stopped: {}</p>').format(self.error)
            if self.error
            else ""
        )
        first, *others = self.sections
        folds = [
            fold(
                Markup("<h3>{}</h3>").format(one.title),
                Markup("\n").join(one.parts),
                kind="section",
                name=one.anchor,
            )
            for one in others
        ]
        return Markup('<section id="{}" class="chapter"><h2>{}</h2>{}{}\n{}</section>').format(
            self.stem, self.title, stopped, Markup("\n").join(first.parts), Markup("\n").join(folds)
        )


def read(execution: Execution) -> Chapter:
    """Read one executed notebook."""
    notebook = nbformat.read(execution.path, as_version=4)
    stem = execution.path.stem
    title, machine = stem, ""
    sections = [Section("", stem)]
    claim: dict[str, str] = {}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            for heading, text in _split(cell.source):
                if heading.startswith("# "):
                    title = texts.plain(heading[2:])
                elif heading:
                    name = texts.plain(heading[3:])
                    sections.append(Section(name, f"{stem}-{texts.slug(name)}"))
                if "claim" in sections[-1].title.lower():
                    claim |= dict(re.findall(r"^\| \*\*(\w+)\*\* \| (.*) \|$", text, re.MULTILINE))
                sections[-1].parts.append(texts.render(text, 1))
        elif cell.cell_type == "code" and cell.source.strip():
            printed = "".join(out.text for out in cell.get("outputs", []) if out.output_type == "stream")
            if printed.startswith("machine: "):
                machine = printed.strip().removeprefix("machine: ")
            after = notebook.cells[number + 1] if number + 1 < len(notebook.cells) else None
            _add_code(sections[-1], cell, printed, after, machine)
    return Chapter(stem, title, sections, execution.error, claim, machine)


def _split(source: str) -> list[tuple[str, str]]:
    """Pieces of markdown, each with the heading of first or second level above it, or ``""``."""
    pieces, heading, lines, fenced = [], "", list[str](), False
    for line in source.splitlines():
        fenced ^= line.startswith("```")
        if not fenced and re.match(r"##? \S", line):
            pieces.append((heading, "\n".join(lines)))
            heading, lines = line, []
        else:
            lines.append(line)
    pieces.append((heading, "\n".join(lines)))
    return [(head, text) for head, text in pieces if head or text.strip()]


def _add_code(section: Section, cell: Any, printed: str, after: Any, machine: str) -> None:
    tags = cell.get("metadata", {}).get("tags", [])
    what = "answer" if "answer" in tags else "code"
    section.parts.append(fold(what, texts.code(cell.source), kind="code"))
    outputs = cell.get("outputs", [])
    about = [said for one in outputs for said in one.get("metadata", {}).values() if isinstance(said, dict)]
    captions = [said["caption"] for said in about if said.get("caption")]
    for output in outputs:
        if output.output_type == "stream":
            text = output.text
            for caption in captions:
                # The cell prints it too; here it stands below its picture.
                text = text.replace(caption, "")
            section.parts.append(_block(text))
        elif output.output_type == "error":
            section.parts.append(_block("\n".join(output.traceback)))
        else:
            section.parts.append(_shown(section, output, printed, after, machine))


def _shown(section: Section, output: Any, printed: str, after: Any, machine: str) -> Markup:
    kind = next((kind for kind in SHOWN if kind in output.data), None)
    if kind is None:
        return Markup("")
    value = output.data[kind]
    if kind == "text/plain":
        return _block(value)
    if kind == "text/markdown":
        return texts.render(value, 1)
    about = output.get("metadata", {}).get(kind, {})
    alt = about.get("alt") or _words_for(section, after)
    caption = about.get("caption") or _provenance(printed, machine)
    if kind == "image/svg+xml":
        made = pictures.figure(value, alt=alt, caption=caption)
    else:
        made = pictures.image(kind, value, alt=alt, caption=caption)
    section.figures.append(made)
    return made


def _words_for(section: Section, after: Any) -> str:
    """What the notebook says of a picture without an alternative text: the paragraph after it, or before."""
    about = ""
    if after is not None and after.cell_type == "markdown" and not after.source.startswith("#"):
        about = texts.plain(after.source.split("\n\n")[0])
    if not about:
        said = [part for part in section.parts if part.startswith("<p>")]
        about = texts.plain(str(said[-1]).rstrip().rsplit("<p>", 1)[-1].join(("<p>", ""))) if said else ""
    return ": ".join(filter(None, (section.title, about)))


def _provenance(printed: str, machine: str) -> str:
    """Where a picture's values come from: recorded runs that its cell printed, or the notebook's run."""
    runs = [line.strip() for line in printed.splitlines() if line.startswith("RECORDED ")]
    if runs:
        return "; ".join(dict.fromkeys(runs))
    parts = machine.split(" · ")
    return f"{parts[-1]}, {parts[0]}" if machine else ""


def _block(text: str) -> Markup:
    """Printed text, in a box that the keyboard can scroll."""
    said = strip_ansi(text).rstrip("\n")
    return Markup('<pre tabindex="0">{}</pre>').format(escape(said)) if said.strip() else Markup("")
