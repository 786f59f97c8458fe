"""HTML tables whose cells are escaped and coloured by meaning.

>>> print(table(("variant", "verdict"), [("ours", cell("clean", "clean"))], row_heads=True))
<div class="wide"><table><thead><tr><th scope="col">variant</th><th scope="col">verdict</th></tr></thead>
<tbody><tr><th scope="row">ours</th><td class="clean">clean</td></tr></tbody></table></div>
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from staleproof.cases.finding import Finding
from staleproof.report.page.meaning import meaning


def cell(text: object, kind: str = "", title: str = "") -> Markup:
    """One ``<td>``.

    Args:
        text: what it says; a number is rounded to six digits and aligned to the right.
        kind: its class, see :mod:`~staleproof.report.page.meaning`; none by default.
        title: more, shown when the pointer rests on it.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        return Markup('<td class="num">{}</td>').format(f"{text:.6g}")
    shown = Markup(' class="{}"').format(kind) if kind not in ("", "open") else ""
    more = Markup(' title="{}"').format(title) if title else ""
    return Markup("<td{}{}>{}</td>").format(shown, more, text)


def verdict(found: Finding | None) -> Markup:
    """The cell of one finding: coloured by meaning, and with a mark if it was not expected."""
    if found is None:
        return Markup('<td class="absent">-</td>')
    if found.failed:
        return Markup('<td class="{} unexpected">{} <b>unexpected</b>, expected {}</td>').format(
            meaning(found.words, found.verdict), found.verdict, found.expected
        )
    return cell(found.verdict, meaning(found.words, found.verdict), found.note)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = "", row_heads: bool = False
) -> Markup:
    """A table in a box.

    Args:
        columns: headings.
        rows: values, or cells made by :func:`cell` and :func:`verdict`.
        caption: what it shows, from where and in which units.
        row_heads: whether the first value of each row names the row.
    """
    head = Markup("").join(Markup('<th scope="col">{}</th>').format(name) for name in columns)
    body = []
    for row in rows:
        cells = []
        for at, value in enumerate(row):
            if row_heads and at == 0:
                value = Markup('<th scope="row">{}</th>').format(value)
            elif not (isinstance(value, Markup) and value.startswith("<t")):
                value = cell(value, "")
            cells.append(value)
        body.append(Markup("<tr>{}</tr>").format(Markup("").join(cells)))
    titled = Markup("<caption>{}</caption>").format(caption) if caption else ""
    return Markup(
        '<div class="wide"><table>{}<thead><tr>{}</tr></thead>\n<tbody>{}</tbody></table></div>'
    ).format(titled, head, Markup("\n").join(body))


def fold(summary: object, body: object, *, kind: str = "", name: str = "") -> Markup:
    """A fold: ``summary`` is seen, ``body`` once it is opened, and always on paper.

    >>> print(fold("3 rows", Markup("<p>...</p>"), name="rows"))
    <details id="rows"><summary>3 rows</summary><p>...</p></details>
    """
    marks = Markup("").join(
        Markup(' {}="{}"').format(key, value) for key, value in (("id", name), ("class", kind)) if value
    )
    return Markup("<details{}><summary>{}</summary>{}</details>").format(marks, escape(summary), body)
