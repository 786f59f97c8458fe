"""Tables that the book makes while it is built, as directives: symptoms, releases, incidents, verdicts.

itables draws them (DataTables, inlined: no page asks another machine), in the process of Sphinx.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import itables
import itables.options
import pandas as pd
from docutils import nodes
from docutils.parsers.rst import Directive
from itables.javascript import generate_init_offline_itables_html
from markdown_it import MarkdownIt
from sphinx.application import Sphinx

from staleproof.triage import judge, table
from staleproof.triage.facts import Facts

MARKDOWN = MarkdownIt("commonmark")
# For DataTables a word that begins with an exclamation mark must not occur. Here people search for "!!!!".
LITERAL = """function () {
  const table = this.api(), box = table.table().container();
  if (box.dataset.literal) return;
  box.dataset.literal = true;
  const search = (event) => {
    if (!event.target.matches(".dt-search input")) return;
    event.stopPropagation();
    table.search(event.target.value.replace(/(^| )(![^ ]*)/g, '$1"$2"')).draw();
  };
  for (const name of ["input", "keyup", "paste", "cut", "search"]) box.addEventListener(name, search, true);
}"""
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
        drawCallback=itables.JavascriptFunction(LITERAL),
        **options,
    )


def chapter(row: table.Row, root: str = "") -> str:
    """A link to what to do in production, in the row's chapter; ``root`` is the way to the first page."""
    page = row.notebook.removesuffix(".ipynb")
    return f'<a href="{root}notebooks/{page}.html#in-production">{row.notebook[:2]}</a>'


# What people type; `staleproof diagnose` knows which rows a model or a GPU rules out.
TYPED = {
    "model": "mla moe hybrid dense deepseek-r1 deepseek-v3 kimi-k2 kimi-linear glm-5 qwen3-next qwen3.5-27b "
    "qwen3-30b-a3b jamba nemotron-h gpt-oss-120b llama-3.3-70b mixtral-8x7b minimax-m2",
    "gpu": "a100 l40s h100 h200 gh200 b200 gb200 b300 hopper blackwell mi300x rocm cpu",
}


@cache
def not_ruled_out() -> Mapping[str, set[str]]:
    """Model or GPU -> keys of the rows that it does not rule out."""
    found = {}
    for fact, words in TYPED.items():
        for word in words.split():
            facts = Facts()
            facts.learn(fact, word, "typed")
            found[word] = {one.row.key for one in judge.judge_all(facts) if one.status != judge.AGAINST}
    return found


def searched(row: table.Row) -> dict[str, str]:
    """What a search looks at and nobody sees: each release with the defect, and words for the row."""
    says = [f"{symptom} {table.symptoms()[symptom]['says']}" for symptom in row.symptoms]
    names = [name for name, keys in not_ruled_out().items() if row.key in keys]
    releases = " ".join(f"v{name}" for name in row.releases)
    return {"releases": releases, "words": " ".join([row.key, row.incident, *says, *names])}


def asked() -> dict[str, str]:
    """The words of the search field."""
    known = [*table.probes()]
    return {
        "search": "Release, model, GPU or symptom:",
        "searchPlaceholder": "0.18.1 oom",
        "info": "_TOTAL_ rows",
        "infoEmpty": "0 rows",
        "infoFiltered": "of _MAX_",
        "zeroRecords": f"None of these rows. Releases that were read: {known[0]} to {known[-1]}.",
    }


def symptoms() -> str:
    """A row a symptom. The search looks at symptoms and at a hidden column with every release that has it."""
    rows = [
        {
            "What you see": f"{inline(row.see)}<details><summary>not this, and how to confirm</summary>"
            f"Rules it out: {inline(row.not_when)}. Confirm: {inline(row.confirm)} "
            f"Control: {inline(row.control)}</details>",
            "Do now": inline(row.do),
            "vLLM": row.affected,
            "Chapter, evidence": f"{chapter(row)}, {row.grade}",
            **searched(row),
        }
        for row in table.rows()
    ]
    shown = drawn(
        pd.DataFrame(rows),
        "symptoms",
        autoWidth=False,
        paging=False,
        ordering=False,
        layout=SEARCH_ONLY,
        language=asked(),
        columnDefs=[{"targets": [1, 2, 3], "searchable": False}, {"targets": [4, 5], "visible": False}],
    )
    return f"{shown}<p>{inline(table.CAPTION)}</p>"


def releases() -> str:
    """A row a symptom, a column a release: a dot where the release has the defect."""
    known = [*table.probes()]
    rows = [
        {"What you see": f"{inline(row.see)} ({chapter(row, '../')})"}
        | {name: "&#9679;" if name in row.releases else "" for name in known}
        | searched(row)
        for row in table.rows()
    ]
    hidden = [len(known) + 1, len(known) + 2]
    return drawn(
        pd.DataFrame(rows),
        "releases",
        autoWidth=False,
        paging=False,
        ordering=False,
        layout=SEARCH_ONLY,
        language=asked(),
        columnDefs=[{"targets": hidden, "visible": False}],
    )


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
        grade = {"whose code": next((finding.grade for finding in ran), "-")}
        rows.append(
            {name: html.escape(text) for name, text in names.items()}
            | {"state": state}
            | {machine: cell(row.get(machine)) for machine in columns}
            | grade
        )
    rows.sort(key=lambda row: STATES.index(row["state"]))
    count = Counter(row["state"] for row in rows)
    first = (
        f"<p><b>{len(rows)} questions. Not as expected: {count['unexpected']}. "
        f"Other answers on other machines: {count['differs']}.</b></p>"
    )
    return first + drawn(
        pd.DataFrame(rows),
        "verdicts",
        pageLength=25,
        columnControl=["order", ["searchList"]],
        ordering={"indicators": False, "handlers": False},
    )
