"""The triage table: read from ``triage.toml``, rendered as Markdown, HTML, text and a rich table."""

from __future__ import annotations

import html
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleproof.check import require
from staleproof.triage.text import wrapped
from staleproof.vllm.patches import NOTEBOOKS
from staleproof.vllm.releases import spans
from staleproof.vllm.releases import table as probes

if TYPE_CHECKING:
    from rich.table import Table

SOURCE = Path(__file__).with_name("triage.toml")
# What vLLM's sources say of each release; written by tools/engine_lines.py.
ENGINE = Path(__file__).with_name("engine.json")
CAPTION = (
    "Releases come from reading each release's source. A flag does what that source says; none was tried on "
    "a production server. Evidence: real (third-party code ran, as released unless the row says what was "
    "changed), source (released code says so), replica (our code ran, after the cited source)."
)
# Strongest first.
GRADES = "real", "source", "replica", "arithmetic"


@dataclass(frozen=True)
class Evidence:
    """What one claim of a row rests on.

    Attributes:
        grade: one of ``GRADES``.
        says: the claim.
        finding: incident, question, variant and verdict, as in a recorded run; empty if it is a file.
        file: a file of the checkout, if it is no finding.
        backends: the attention backends that it is about; empty if it holds for any.
    """

    grade: str
    says: str
    finding: tuple[str, ...] = ()
    file: str = ""
    backends: tuple[str, ...] = ()

    @property
    def rests_on(self) -> str:
        """The finding or the file, in a few words."""
        if not self.finding:
            return self.file
        incident, question, variant, verdict = self.finding
        return f"{incident}: {question} / {variant} = {verdict}"


@dataclass(frozen=True)
class Row:
    """One line of the table; :mod:`staleproof.triage` has what its fields are for.

    Attributes:
        key: its name.
        incident: the incident whose notebook walks through it.
        patches: names of the patches that help.
        symptoms: keys of :func:`symptoms`.
        see, not_when, flag, confirm: cells, in Markdown with code spans.
        control: what to compare with, so that ``confirm`` proves something.
        evidence: the evidence for its claims.
        unpatched: releases with the defect and without a patch.
        needs: fact -> values, of which one must be true.
        excludes: fact -> values that rule it out.
        also: a further condition that no option shows; empty if there is none.
        weighs: fact -> value -> where the incident did not show.
        hints: fact -> value -> where it was reported.
        signs: texts that a log has in this case.
        remedies: keys of the table's remedies that cure it.
        touches: patch -> fact -> the backends that it changes; a patch that is not named changes any.
    """

    key: str
    incident: str
    patches: tuple[str, ...]
    symptoms: tuple[str, ...]
    see: str
    not_when: str
    flag: str
    confirm: str
    control: str
    evidence: tuple[Evidence, ...]
    needs: Mapping[str, Sequence[str]]
    unpatched: tuple[str, ...] = ()
    also: str = ""
    weighs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    hints: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    signs: tuple[str, ...] = ()
    excludes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    remedies: tuple[str, ...] = ()
    touches: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)

    @property
    def releases(self) -> tuple[str, ...]:
        """The releases with the defect, oldest first, by the recorded probes.

        >>> {row.key: row.releases[0] for row in rows()}["decode_buffer"]
        '0.18.0'
        """
        found = [
            name
            for name, patches in probes().items()
            if name in (*self.unpatched, *engine()["defects"].get(self.key, ()))
            or any(patches[patch]["needed"] for patch in self.patches)
        ]
        return tuple(found)

    @property
    def affected(self) -> str:
        """The releases with the defect, as spans."""
        return spans(self.releases)

    @property
    def release(self) -> str:
        """The releases that came later and do not have it.

        >>> [row.release for row in rows() if row.key in ("decode_buffer", "empty_rows", "scale_padding")]
        ['none up to 0.33.0', '0.20.0 or later', '0.20.0 to 0.21.0, 0.25.0 to 0.29.0']
        """
        known = [*probes()]
        later = known[known.index(self.releases[0]) :]
        without = [name for name in later if name not in self.releases]
        if not without:
            return f"none up to {known[-1]}"
        first, _, last = spans(without).rpartition(", ")
        if without[-1] == known[-1]:
            last = f"{last.partition(' ')[0]} or later"
        return f"{first}, {last}" if first else last

    def refused(self, patch: str) -> str:
        """The releases with the defect that a patch refuses, as spans; empty if it applies to all of them.

        >>> {row.key: row.refused("scale_padding") for row in rows() if "scale_padding" in row.patches}
        {'scale_padding': '0.16.0 to 0.17.1'}
        """
        names = [name for name in self.releases if patch in _refused(name)]
        return spans(names)

    @property
    def notebook(self) -> str:
        """File name of the chapter."""
        return NOTEBOOKS[self.incident]

    @property
    def grade(self) -> str:
        """The strongest grade among its evidence."""
        return min((item.grade for item in self.evidence), key=GRADES.index)

    @property
    def do(self) -> str:
        """Flag, release and patch, in one cell."""
        patches = [
            f"`{name}`" + (f" (not on {no})" if (no := self.refused(name)) else "") for name in self.patches
        ]
        return f"Flag: {self.flag}. Release: {self.release}. Patch: {', '.join(patches) or 'none'}."

    @property
    def rests_on(self) -> str:
        """The strongest piece of evidence, in one cell; ``diagnose`` shows all."""
        item = min(self.evidence, key=lambda item: GRADES.index(item.grade))
        return f"{item.grade}: {item.says}"

    @property
    def cells(self) -> dict[str, str]:
        """Column -> Markdown, for every rendering but the chapter's link."""
        return {
            "What you see": self.see,
            "Not seen": self.not_when,
            "vLLM": self.affected,
            "Do now": self.do,
            "Confirm": f"{self.confirm} Control: {self.control}",
            "Evidence": self.rests_on,
        }


@cache
def _refused(release: str) -> frozenset[str]:
    """The patches that a release needs and that refuse it, by the recorded probes."""
    from staleproof.vllm.plugin import REFUSED, decisions

    return frozenset(d.patch.name for d in decisions(release) if d.state == REFUSED)


@cache
def _source() -> dict[str, Any]:
    return tomllib.loads(SOURCE.read_text(encoding="utf-8"))


@cache
def engine() -> dict[str, Any]:
    """What was read out of vLLM's sources: ``lines``, ``gpus``, ``defects``, ``architectures``, ``releases``.

    >>> engine()["gpus"]["flash_attn_mla"], engine()["architectures"]["Qwen3NextForCausalLM"]
    (['sm90'], 'hybrid no-mla')
    """
    found: dict[str, Any] = json.loads(ENGINE.read_text(encoding="utf-8"))
    return found


def terms(name: str) -> Any:
    """What people and logs write for models, GPUs, choices and remedies: one table of ``[terms]``.

    >>> terms("choices")["graphs"]["none"]
    ['eager', 'off', 'no']
    """
    return _source()["terms"][name]


@cache
def rows() -> tuple[Row, ...]:
    """Every row, in the order of the file.

    >>> len({row.key for row in rows()}) == len(rows())
    True
    """
    return tuple(_row(**entry) for entry in _source()["row"])


def _row(evidence: Sequence[Mapping[str, Any]], **entry: Any) -> Row:
    return Row(evidence=tuple(Evidence(**_fixed(item)) for item in evidence), **_fixed(entry))


def _fixed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Lists become tuples, so that what is cached cannot change."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


def of(incident: str) -> tuple[Row, ...]:
    """The rows that an incident's notebook walks through.

    Raises:
        ValueError: no incident has this name.

    >>> [row.key for row in of("decode_buffer")]
    ['decode_buffer']
    """
    require(incident in NOTEBOOKS, "incident", f"one of {', '.join(NOTEBOOKS)}", repr(incident))
    return tuple(row for row in rows() if row.incident == incident)


def symptom(incident: str) -> str:
    """What an operator sees first of an incident, without Markdown's marks; empty if no row is about it.

    >>> symptom("decode_buffer")[:17]
    'OOM after upgrade'
    """
    return plain(next((row.see for row in rows() if row.incident == incident), ""))


def symptoms() -> Mapping[str, Mapping[str, str]]:
    """Symptom -> ``says``, one phrase; ``words`` that people type, a pattern; ``next``, what to do then.

    >>> symptoms()["leak"]["says"]
    'host memory grows'
    """
    found: Mapping[str, Mapping[str, str]] = _source()["symptoms"]
    return found


def others() -> Sequence[Mapping[str, Any]]:
    """Failures of another kind: ``words`` of a log's line, or ``needs``; and ``says``, what it is.

    >>> others()[0]["says"].partition(":")[0]
    'a rank that hangs or died'
    """
    found: Sequence[Mapping[str, Any]] = _source()["other"]
    return found


def elsewhere() -> Sequence[Mapping[str, Any]]:
    """The same faults in other servers: ``server``, ``symptoms``, ``needs``, ``thread`` and ``says``."""
    found: Sequence[Mapping[str, Any]] = _source()["elsewhere"]
    return found


def plain(cell: str) -> str:
    """A cell without Markdown's marks.

    >>> plain("with `--enforce-eager`")
    'with --enforce-eager'
    """
    return cell.replace("`", "")


def markdown(chapter: Callable[[Row], str]) -> str:
    """The table in Markdown, with its caption: three columns, which fit a page of 830 pixels.

    Args:
        chapter: address of a row's notebook, as seen from the page.

    >>> markdown(lambda row: f"notebooks/{row.notebook}").splitlines()[0]
    '| What you see | Do now | Chapter |'
    """
    lines = [["What you see", "Do now", "Chapter"], ["---"] * 3]
    for row in rows():
        see = f"{row.see}. vLLM {row.affected}. (`{row.key}`)"
        lines.append([see, row.do, f"[{row.notebook[:2]}]({chapter(row)}), {row.grade}"])
    text = "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)
    return f"{text}\n\n{CAPTION}"


def rich_table() -> Table:
    """The table for a terminal: a section a row, a line a column, so that 80 columns are enough."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.HORIZONTALS, show_header=False, caption=CAPTION, caption_justify="left")
    drawn.add_column(style="bold", no_wrap=True)
    drawn.add_column(overflow="fold")
    for row in rows():
        for name, cell in {**row.cells, "Chapter": f"notebooks/{row.notebook}"}.items():
            drawn.add_row(name, Text(plain(cell)))
        drawn.add_section()
    return drawn


@dataclass(frozen=True)
class Production:
    """What to do about an incident, a row a symptom: text of at most 100 columns, in a notebook a table."""

    rows: tuple[Row, ...]

    def __repr__(self) -> str:
        return "\n".join(line for row in self.rows for line in self._lines(row))

    @staticmethod
    def _lines(row: Row) -> list[str]:
        lines = wrapped(plain(row.see), 100)
        for name, text in (
            ("releases", row.affected),
            ("flag", plain(row.flag)),
            ("release", row.release),
            ("patch", ", ".join(row.patches) or "none"),
            ("confirm", plain(row.confirm)),
            ("control", plain(row.control)),
        ):
            lines += wrapped(text, 100, f"  {name:<9}", " " * 11)
        return lines

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in ("What you see", "Do now", "Confirm", "Control"))
        body = "".join(
            f"<tr><td><b>{_html(row.see)}</b><br>vLLM {row.affected}</td>"
            f"<td><b>Flag:</b> {_html(row.flag)}<br><b>Release:</b> {row.release}<br>"
            f"<b>Patch:</b> {', '.join(map(_code, row.patches)) or 'none'}</td>"
            f"<td>{_html(row.confirm)}</td><td>{_html(row.control)}</td></tr>\n"
            for row in self.rows
        )
        left = "text-align: left; vertical-align: top"
        table = f"<table class='production'><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"
        return re.sub("<t([dh])>", rf"<t\1 style='{left}'>", table)


def _code(text: str) -> str:
    return f"<code>{text}</code>"


def _html(cell: str) -> str:
    """A cell as HTML, its code spans too."""
    return re.sub("`([^`]+)`", lambda span: _code(span[1]), html.escape(cell, quote=False))


def in_production(incident: str) -> Production:
    """What to do in production about an incident: flag, release, patch, how to confirm, with what control.

    The text is the same on every machine.

    Raises:
        ValueError: no incident has this name.

    >>> in_production("decode_buffer")  # doctest: +ELLIPSIS
    OOM after upgrade to 0.18 or 0.19: ...
    """
    return Production(of(incident))
