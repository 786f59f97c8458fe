"""One card an incident: picture, three sentences, off / on / off, cost, what to do, grade."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from staleproof.cases.finding import OFF_ON_OFF, Finding
from staleproof.incidents.registry import INCIDENTS
from staleproof.report import matrix
from staleproof.report.page import texts
from staleproof.report.page.chapters import FIRST_BAD, Chapter
from staleproof.report.page.meaning import meaning
from staleproof.report.page.tables import cell, table, verdict
from staleproof.triage.table import Row
from staleproof.vllm.plugin import patches

# Incident -> what breaks, why, and what cures it: one sentence each.
SENTENCES: Mapping[str, str] = tomllib.loads(Path(__file__).with_name("incidents.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Card:
    """What the template shows of one incident."""

    name: str
    number: int
    title: str
    notebook: str
    sentences: Markup
    picture: Markup
    proof: Markup
    cost: list[Markup]
    do_now: Sequence[Markup]
    patch: str
    grade: str
    journey: Sequence[tuple[str, str]]


def build(
    findings: Sequence[Finding],
    chapters: Iterable[Chapter],
    do_now: Mapping[str, Sequence[Markup]],
    known: Mapping[str, texts.Term],
) -> list[Card]:
    """The cards of all incidents.

    Args:
        findings: those whose off / on / off is shown: of this machine, or else of a recorded one.
        chapters: the notebooks, from which the picture comes.
        do_now: incident -> what an operator does now, from the triage table.
        known: words of the glossary, which are linked.
    """
    by_stem = {chapter.stem: chapter for chapter in chapters}
    cards = []
    for name, about in INCIDENTS.items():
        chapter = by_stem.get(about.notebook.removesuffix(".ipynb"))
        first_bad = chapter.section(FIRST_BAD) if chapter else None
        proofs = [one for one in findings if (one.incident, one.question) == (name, OFF_ON_OFF)]
        mine = [patch for patch in patches().values() if patch.incident == name]
        cost = [Markup("<code>{}</code>: {}").format(patch.name, patch.cost) for patch in mine]
        wanted = ("symptom", "fix", "in production", "real engine")
        places = [chapter.section(word) for word in wanted] if chapter else []
        cards.append(
            Card(
                name=name,
                number=about.number,
                title=about.title,
                notebook=chapter.stem if chapter else "",
                sentences=texts.with_terms(SENTENCES.get(name, about.summary), known),
                picture=first_bad.take_figure() if first_bad else Markup(""),
                proof=_proof(proofs),
                cost=cost,
                do_now=do_now.get(name, ()),
                patch=f"STALEPROOF_PATCHES={','.join(patch.name for patch in mine)} vllm serve ...",
                grade=matrix.grades(proofs),
                journey=[(place.title, place.anchor) for place in places if place],
            )
        )
    return cards


def _proof(proofs: Sequence[Finding]) -> Markup:
    """Off / on / off, remedies with the same three verdicts in one row."""
    rows: dict[tuple[str, ...], list[Finding]] = {}
    for one in proofs:
        if one.three is not None:
            three = one.three
            key = (three.words, three.off, three.on, three.again, one.verdict, one.grade)
            rows.setdefault(key, []).append(one)
    if not rows:
        return Markup("<p>Not run on this machine or a recorded one.</p>")
    lines = []
    for (words, off, on, again, *_), alike in rows.items():
        names = [one.variant for one in alike]
        said = ", ".join(names[:3]) + (f" and {len(names) - 3} more like it" if len(names) > 3 else "")
        three_cells = (cell(word, meaning(words, word)) for word in (off, on, again))
        lines.append((said, *three_cells, verdict(alike[0]), matrix.grades(alike)))
    where = matrix.provenance(proofs)
    machines = ", ".join(sorted({str(one.machine.get("name", "unknown machine")) for one in proofs}))
    return table(
        ("remedy", "off", "on", "off again", "so it is", "asked of"),
        lines,
        caption=f"{where}, {machines}. The same detector and input three times: without the remedy, with it, "
        "and without it again.",
        row_heads=True,
    )


def do_now(row: Row) -> Markup:
    """What a row of the triage table says to do, and how to confirm it."""
    text = f"**{row.see}** {row.do} Confirm: {row.confirm}"
    return Markup(str(texts.render(text)).strip().removeprefix("<p>").removesuffix("</p>"))
