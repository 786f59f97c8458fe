"""The verdict matrix: a row for each variant, a column for each question, in panels.

>>> from staleproof.lab import Key
>>> from staleproof.lab import finding, good
>>> key = Key("an_incident", "empty row", "ours")
>>> print(text([finding(key, good("clean"), expected="clean")]).partition("\\n")[2])
<BLANKLINE>
an_incident  evidence  empty row
-----------  --------  ---------
ours         replica   clean
<BLANKLINE>
1 as expected, 0 not as expected, 0 not run
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from staleproof.grades import Grade
from staleproof.lab import NOT_RUN, Finding
from staleproof.triage.text import aligned

if TYPE_CHECKING:
    from rich.table import Table

NOT_ASKED = "-"
EVIDENCE = "evidence"


@dataclass(frozen=True)
class Matrix:
    """One panel: some questions of one incident, about much the same variants.

    Attributes:
        incident: folder name.
        questions: columns, in the order of asking.
        variants: rows, in the order of asking.
        cells: the finding of each (variant, question).
    """

    incident: str
    questions: list[str]
    variants: list[str]
    cells: dict[tuple[str, str], Finding]

    def row(self, variant: str) -> list[Finding]:
        """The findings of one variant."""
        return [found for (name, _), found in self.cells.items() if name == variant]


def build(findings: Iterable[Finding]) -> list[Matrix]:
    """The panels of every incident, in the order of asking.

    Successive questions share a panel if they were about much the same variants: one table of
    all questions would be wide and mostly empty. If a cell has two findings, an unexpected verdict is
    shown; otherwise the later one.
    """
    answers: dict[tuple[str, str], dict[str, Finding]] = {}
    for found in findings:
        row = answers.setdefault((found.incident, found.question), {})
        if found.variant not in row or not row[found.variant].failed:
            row[found.variant] = found
    panels: list[Matrix] = []
    for (incident, question), row in answers.items():
        here = [p for p in panels[-1:] if p.incident == incident and _alike(p.variants, row)]
        if not here:
            here = [Matrix(incident, [], [], {})]
            panels += here
        (panel,) = here
        panel.questions.append(question)
        panel.variants.extend(variant for variant in row if variant not in panel.variants)
        panel.cells.update({(variant, question): found for variant, found in row.items()})
    return panels


def _alike(one: Iterable[str], two: Iterable[str]) -> bool:
    """Whether one set of variants contains the other, which is at least half as large."""
    small, large = sorted((set(one), set(two)), key=len)
    return small <= large and 2 * len(small) >= len(large)


def provenance(findings: Iterable[Finding]) -> str:
    """The provenance of these findings; several are joined by ``+``."""
    return "+".join(sorted({str(found.provenance) for found in findings})) or "no findings"


def grades(findings: Iterable[Finding]) -> str:
    """The grades of these findings, the strongest evidence first; ``-`` if none of them ran.

    >>> from staleproof.lab import Key
    >>> from staleproof.lab import bad, finding, not_run
    >>> from staleproof.grades import real
    >>> key = Key("an_incident", "empty row", "theirs")
    >>> ran = finding(key, bad("nan"), evidence=real("torch"))
    >>> grades([ran, finding(key, not_run("needs SM100"))])
    'real'
    """
    found = {found.grade or "not graded" for found in findings if found.ran}
    known = [grade for grade in Grade if grade in found]
    return "+".join([*known, *sorted(found - set(known))]) or NOT_ASKED


def counts(findings: Iterable[Finding]) -> str:
    """How many verdicts are as expected, how many are not, and how many were not run."""
    checked = [*findings]
    good = sum(found.ok for found in checked)
    bad = sum(found.failed for found in checked)
    absent = sum(not found.ran for found in checked)
    return f"{good} as expected, {bad} not as expected, {absent} not run"


def text(findings: Sequence[Finding]) -> str:
    """The matrices as plain ASCII.

    The provenance is in the first line only, and there are no timings. So a notebook cell that
    prints this stores the same text on every machine with the same verdicts.
    """
    lines = [provenance(findings)]
    for matrix in build(findings):
        head = [matrix.incident, EVIDENCE, *matrix.questions]
        rows = [
            [v, grades(matrix.row(v)), *(_cell(matrix, v, q) for q in matrix.questions)]
            for v in matrix.variants
        ]
        lines += ["", *aligned(head, rows)]
    lines += ["", *absences(findings), counts(findings)]
    return "\n".join(lines)


def absences(findings: Iterable[Finding]) -> list[str]:
    """One line for each variant and reason: what was not run, and why."""
    questions: dict[tuple[str, str, str], list[str]] = {}
    for f in findings:
        if not f.ran:
            key = f.incident, f.variant, f.note or "no reason given"
            questions.setdefault(key, []).append(f.question)
    return [
        f"{NOT_RUN}: {incident}, {variant}: {why} ({'; '.join(names)})"
        for (incident, variant, why), names in questions.items()
    ]


# What a table takes beside the text of its columns: a border and two blanks each, and the last border.
_BESIDE = 3


def tables(findings: Sequence[Finding], width: int = 80) -> list[Table]:
    """The matrices for a terminal. One that is too wide is drawn as several; no word is cut.

    Args:
        findings: of one run.
        width: of the terminal, in columns.
    """
    from rich.table import Table
    from rich.text import Text

    drawn = []
    for matrix in build(findings):
        columns = {
            "variant": [Text(variant) for variant in matrix.variants],
            EVIDENCE: [Text(grades(matrix.row(variant))) for variant in matrix.variants],
        }
        left = [*columns]
        for question in matrix.questions:
            columns[question] = [
                Text(_cell(matrix, v, question), _style(matrix, v, question)) for v in matrix.variants
            ]
        sizes = {name: max(map(len, [name, *map(str, cells)])) + _BESIDE for name, cells in columns.items()}
        parts: list[list[str]] = []
        for question in matrix.questions:
            if not parts or 1 + sum(sizes[name] for name in [*parts[-1], question]) > width:
                parts.append([*left])
            parts[-1].append(question)
        for part in parts:
            table = Table(title=f"{matrix.incident}, {provenance(matrix.cells.values())}")
            for name in part:
                table.add_column(Text(name))
            for row in zip(*(columns[name] for name in part), strict=True):
                table.add_row(*row)
            drawn.append(table)
    return drawn


def _cell(matrix: Matrix, variant: str, question: str) -> str:
    found = matrix.cells.get((variant, question))
    if found is None:
        return NOT_ASKED
    return f"{found.verdict} (expected {found.expected})" if found.failed else found.verdict


def _style(matrix: Matrix, variant: str, question: str) -> str:
    found = matrix.cells.get((variant, question))
    if found is None or not found.ran:
        return "dim"
    return "bold red" if found.failed else "green"
