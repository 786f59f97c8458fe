"""Tables that the book makes while it is built, as directives: symptoms, releases, incidents, verdicts.

itables draws them (DataTables, inlined: no page asks another machine), in the process of Sphinx.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from typing import Any

import itables
import itables.options
import pandas as pd
from docutils import nodes
from docutils.parsers.rst import Directive
from itables.javascript import generate_init_offline_itables_html
from markdown_it import MarkdownIt
from sphinx.application import Sphinx

from staleproof.triage import table

MARKDOWN = MarkdownIt("commonmark")
SEARCH_ONLY = {"topStart": "search", "topEnd": None, "bottomStart": "info", "bottomEnd": None}


def inline(text: str) -> str:
    """Markdown of one line as HTML."""
    return MARKDOWN.renderInline(text)


def drawn(frame: pd.DataFrame, classes: str, **options: Any) -> str:
    """A table with a search field, as HTML that needs nothing from elsewhere."""
    itables.options.warn_on_undocumented_option = False
    # DataTables itself, in each page with a table: no page loads anything from another machine.
    library = generate_init_offline_itables_html(itables.options.dt_bundle)
    return library + itables.to_html_datatable(
        frame,
        classes=f"display compact {classes}",
        style="width:100%;table-layout:auto",
        allow_html=True,
        showIndex=False,
        connected=False,
        maxBytes=0,
        **options,
    )


def symptoms() -> str:
    """A row a symptom. The search looks at symptoms and at a hidden column with every release that has it."""
    known = [*table.probes()]
    rows = [
        {
            "What you see": f"{inline(row.see)}<details><summary>not this, and how to confirm</summary>"
            f"Rules it out: {inline(row.not_when)}. Confirm: {inline(row.confirm)} "
            f"Control: {inline(row.control)}</details>",
            "Do now": inline(row.do),
            "vLLM": row.affected,
            "Chapter": f'<a href="notebooks/{row.notebook.removesuffix(".ipynb")}.html#in-production">'
            f"{row.notebook[:2]}</a>, {row.grade}",
            "releases": " ".join(f"v{name}" for name in row.releases),
            "words": f"{row.key} {row.incident} {' '.join(row.symptoms)}",
        }
        for row in table.rows()
    ]
    return drawn(
        pd.DataFrame(rows),
        "symptoms",
        autoWidth=False,
        paging=False,
        ordering=False,
        layout=SEARCH_ONLY,
        language={
            "search": "Release, model, GPU or symptom:",
            "searchPlaceholder": "0.18.1 oom",
            "info": "_TOTAL_ rows",
            "infoEmpty": "",
            "infoFiltered": "of _MAX_",
            "zeroRecords": f"None of these rows. Releases that were read: {known[0]} to {known[-1]}.",
        },
        columnDefs=[{"targets": [1, 2, 3], "searchable": False}, {"targets": [4, 5], "visible": False}],
    )


def releases() -> str:
    """A row a symptom, a column a release: a dot where the release has the defect."""
    known = [*table.probes()]
    rows = [
        {"What you see": f"{inline(row.see)} ({row.notebook[:2]})"}
        | {name.removeprefix("0."): "&#9679;" if name in row.releases else "" for name in known}
        for row in table.rows()
    ]
    return drawn(pd.DataFrame(rows), "releases", paging=False, ordering=False, layout=SEARCH_ONLY)


def _directive(make: Callable[[], str]) -> type[Directive]:
    class Made(Directive):
        def run(self) -> list[nodes.Node]:
            self.state.document.settings.env.note_reread()
            return [nodes.raw("", make(), format="html")]

    return Made


def setup(app: Sphinx) -> Mapping[str, bool]:
    """Called by Sphinx."""
    for make in (symptoms, releases, verdicts):
        app.add_directive(f"staleproof-{make.__name__}", _directive(make))
    return {"parallel_read_safe": False}


STATES = ("unexpected", "differs", "same")


def verdicts() -> str:
    """Every question with its answers, a column a machine; what is unexpected or differs comes first."""
    from staleproof import runs
    from staleproof.report.show import STYLES

    columns: dict[str, Any] = {}
    here = runs.build_folder() / "findings.jsonl"
    if here.exists():
        columns["here"] = runs.read_kept(here)
    columns |= {run.folder.name.removeprefix("nvidia-"): run.findings for run in runs.read_all()}
    answers: dict[Any, dict[str, Any]] = {}
    for machine, findings in columns.items():
        for finding in findings:
            answers.setdefault(finding.key, {})[machine] = finding

    def cell(finding: Any) -> str:
        if finding is None:
            return ""
        text = finding.verdict + (f" (expected {finding.expected})" if finding.failed else "")
        look, note = STYLES.get(finding.outcome, ""), html.escape(finding.note or "", quote=True)
        return f'<span style="{look}" title="{note}">{html.escape(text)}</span>'

    rows = []
    for key, row in answers.items():
        ran = [finding for finding in row.values() if finding.ran]
        if any(finding.failed for finding in ran):
            state = "unexpected"
        else:
            state = "differs" if len({finding.verdict for finding in ran}) > 1 else "same"
        names = {"incident": key.incident, "question": key.question, "variant": key.variant}
        grades = {"whose code": next((finding.grade for finding in ran), "-"), "state": state}
        rows.append(
            {name: html.escape(text) for name, text in names.items()}
            | {machine: cell(row.get(machine)) for machine in columns}
            | grades
        )
    rows.sort(key=lambda row: STATES.index(row["state"]))
    return drawn(
        pd.DataFrame(rows),
        "verdicts",
        pageLength=25,
        columnControl=["order", ["searchList"]],
        ordering={"indicators": False, "handlers": False},
    )
