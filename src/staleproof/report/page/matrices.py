"""The verdict matrices as folded HTML tables: a row for each variant, a column for each question."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from staleproof.cases.finding import Finding
from staleproof.report import matrix
from staleproof.report.page.tables import cell, fold, table, verdict


def html(findings: Sequence[Finding]) -> Markup:
    """A fold for each incident, then the counts, then what was not run and why."""
    panels: dict[str, list[Markup]] = {}
    for one in matrix.build(findings):
        rows = []
        for variant in one.variants:
            row = one.row(variant)
            whose = "; ".join(dict.fromkeys(found.of for found in row if found.of))
            cells = (verdict(one.cells.get((variant, question))) for question in one.questions)
            rows.append((variant, cell(matrix.grades(row), "grade", whose), *cells))
        columns = ("variant", matrix.ASKED_OF, *one.questions)
        caption = f"{one.incident}, {matrix.provenance(one.cells.values())}"
        panels.setdefault(one.incident, []).append(table(columns, rows, caption=caption, row_heads=True))
    parts = [
        fold(f"{incident}, matrices: {len(tables)}", Markup("\n").join(tables), kind="rows")
        for incident, tables in panels.items()
    ]
    absent = matrix.absences(findings)
    parts.append(Markup("<p>{}</p>").format(matrix.counts(findings)))
    if absent:
        lines = Markup("").join(Markup("<li>{}</li>").format(line) for line in absent)
        parts.append(
            fold(f"not run, and why: {len(absent)}", Markup("<ul>{}</ul>").format(lines), kind="rows")
        )
    return Markup("\n").join(parts)
