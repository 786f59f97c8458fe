"""The report: one HTML file that loads nothing else."""

from __future__ import annotations

import datetime
import html as markup
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbconvert import HTMLExporter
from pygments.formatters import HtmlFormatter

from staleproof.audit.contract import Row
from staleproof.harness.findings import Finding
from staleproof.harness.predictions import CONFIRMED, OPEN, REFUTED, Outcome
from staleproof.harness.recorded import Run, compare
from staleproof.report import matrix, plots
from staleproof.report.audit import heat_map
from staleproof.report.notebooks import Execution

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #f3f5f7; --line: #c9d1d9;
  --good: #0b6b3a; --bad: #b3261e; --dim: #59636e; --link: #0550ae; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --paper: #14181d; --soft: #1f252c;
  --line: #3c4650; --good: #63d297; --bad: #ff8a80; --dim: #9aa5b1; --link: #79b8ff; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 62rem; color: var(--ink);
  background: var(--paper); font: 16px/1.55 system-ui, sans-serif; }
a { color: var(--link); } a.anchor-link { display: none; }
h1, h2, h3 { line-height: 1.25; } section { margin-top: 3rem; border-top: 1px solid var(--line); }
pre, code { font: 13px/1.45 ui-monospace, monospace; }
pre { margin: 0; padding: .6rem .8rem; background: var(--soft); overflow-x: auto; }
.wide, .output_html, .output_svg { overflow-x: auto; }
table { border-collapse: collapse; margin: .8rem 0; font-size: 14px; }
caption { text-align: left; padding-bottom: .3rem; }
th, td { border: 1px solid var(--line); padding: .25rem .6rem; text-align: left; }
thead th { background: var(--soft); } .num { text-align: right; }
.ok { color: var(--good); } .bad { color: var(--bad); font-weight: 700; }
.absent { color: var(--dim); } .provenance { letter-spacing: .04em; }
.cell { margin: .8rem 0; } .prompt { display: none; } .output_area pre { border-left: 3px solid
  var(--line); } img, svg { max-width: 100%; height: auto; }
nav ul { list-style: none; padding-left: 1rem; }
"""
# Kinds of output, best first. Widgets and scripts cannot run in the page: their text or picture is shown.
SHOWN = ["text/html", "image/svg+xml", "image/png", "image/jpeg", "text/markdown", "text/plain"]
ALT = "picture; the verdict printed beside it says what it shows"
COMPILED_COLUMNS = (
    *("kernel", "specialisations", "warps", "registers", "spilled", "shared", "limit"),
    *("problems", "accepted"),
)
MEASURED_COLUMNS = ("kernel", "provider", "mode", "x_name", "x_value", "p50", "p20", "p80", "unit")


# Release of vLLM -> question -> two answers: without the patches and with them.
Patched = Mapping[str, Mapping[str, Sequence[str]]]


def page(
    findings: Sequence[Finding],
    runs: Sequence[Run],
    notebooks: Sequence[Execution],
    patched: Patched | None = None,
    compiled: Mapping[str, Any] | None = None,
    predicted: Sequence[Outcome] = (),
    audited: Sequence[Row] = (),
    served: str = "",
) -> str:
    """The whole report.

    Args:
        findings: of this machine: of this process, or of an earlier one, read as RECORDED.
        runs: recorded runs to show beside them.
        notebooks: executed copies, in reading order.
        patched: what tests on real releases of vLLM found (``workbook/patches.json``).
        compiled: what the compiler says for other GPUs (``workbook/architectures.json``).
        predicted: verdicts predicted for SM100, and what the recorded runs say of them.
        audited: rows of recorded audits (``workbook/audits``).
        served: the section of :func:`staleproof.report.service.section`.
    """
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    contents = [_entry("verdicts", "Verdicts"), _entry("recorded", "Recorded runs")]
    chapters = []
    if patched:
        contents.append(_entry("patched", "vLLM, patched"))
        chapters.append(_patched(patched))
    if served:
        contents.append(_entry("service", "The plugin in service"))
        chapters.append(served)
    if compiled:
        contents.append(_entry("compiled", "Compiled for other GPUs"))
        chapters.append(_compiled(compiled))
    if predicted:
        contents.append(_entry("predicted", "Predicted for SM100"))
        chapters.append(_predicted(predicted))
    if audited:
        contents.append(_entry("audited", "The padding contract"))
        chapters.append(_audited(audited))
    for execution in notebooks:
        body, entry = _chapter(execution)
        chapters.append(body)
        contents.append(entry)
    parts = [
        "<!doctype html>",
        "<html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>staleproof</title><style>{STYLE}{_code_style()}</style></head><body>",
        f"<h1>staleproof</h1><p>{today}. MEASURED: a GPU ran it for this report. INTERPRETED: the ",
        "CPU did, Triton kernels through Triton's interpreter; it says nothing on time. RECORDED: ",
        "read from an earlier run. Green is the verdict that was expected, so a faulty variant ",
        "that leaks is green; red is any other; grey was not run.</p>",
        f"<nav aria-label='Contents'><ul>{''.join(contents)}</ul></nav>",
        f"<section id='verdicts'><h2>Verdicts</h2>{_verdicts(findings)}</section>",
        f"<section id='recorded'><h2>Recorded runs</h2>{_recorded(runs, findings)}</section>",
        *chapters,
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _entry(anchor: str, title: str, below: str = "") -> str:
    return f"<li><a href='#{markup.escape(anchor)}'>{title}</a>{below}</li>"


def _code_style() -> str:
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    return f"\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def _verdicts(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<p>None yet: <code>staleproof run</code> obtains them.</p>"
    names = sorted({str(f.machine.get("name", "unknown machine")) for f in findings})
    dates = sorted({f.date for f in findings})
    return f"<p>{markup.escape(', '.join(names + dates))}</p>" + matrix.html(findings)


def _recorded(runs: Sequence[Run], findings: Sequence[Finding]) -> str:
    if not runs:
        return "<p>None yet: <code>staleproof record</code> makes one.</p>"
    parts = []
    for run in runs:
        parts.append(f"<h3>{markup.escape(run.title)}</h3>")
        if findings:
            beside = compare(findings, run.findings).summary
            parts.append(f"<p>Verdicts above (first) against these (second): {beside}.</p>")
        parts.append(matrix.html(run.findings))
        if run.measurements:
            count = f"{len(run.measurements)} measurements"
            table = _measurements(run.measurements)
            parts.append(f"<details><summary>{count}</summary>{table}</details>")
    return "\n".join(parts)


def read_kept(path: Path) -> dict[str, Any] | None:
    """What ``make`` keeps in a JSON file of the workbook; ``None`` if it was never run."""
    return dict(json.loads(path.read_text())) if path.exists() else None


def _patched(releases: Patched) -> str:
    """A row for each question, a column for each release; both answers if the patches change it."""
    esc = markup.escape
    questions = dict.fromkeys(question for answers in releases.values() for question in answers)
    head = "".join(f"<th scope='col'>{esc(release)}</th>" for release in releases)
    body = ""
    for question in questions:
        cells = ""
        for answers in releases.values():
            off, on = answers.get(question, ("-", "-"))
            same = "absent" if off == on else "ok"
            said = off if off == on else f"{off} → {on}"
            cells += f"<td class='{same}'>{esc(said)}</td>"
        body += f"<tr><th scope='row'>{esc(question)}</th>{cells}</tr>"
    return (
        "<section id='patched'><h2>vLLM, patched</h2><p>RECORDED. Real releases on a CPU, each "
        "question without staleproof's patches → with them; grey where nothing changes. The Triton "
        "kernel is vLLM's, interpreted; stand-ins that model their faults take the place of the "
        "compiled ones.</p>"
        f"<div class='wide'><table><thead><tr><th scope='col'>question</th>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div></section>"
    )


def _compiled(kept: Mapping[str, Any]) -> str:
    """A row for each kernel on each architecture."""
    head = "".join(f"<th scope='col'>{name}</th>" for name in ("GPU", *COMPILED_COLUMNS))
    body = ""
    for row in kept["rows"]:
        cells = "".join(
            _value("; ".join(row[name]) if isinstance(row[name], list) else row[name])
            for name in COMPILED_COLUMNS
        )
        mark = "bad" if row["problems"] else "ok"
        body += f"<tr><th scope='row' class='{mark}'>sm_{row['capability']}</th>{cells}</tr>"
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    return (
        "<section id='compiled'><h2>Compiled for other GPUs</h2><p>Every Triton kernel, in each "
        "specialisation that the public functions launch at DeepSeek's and Qwen's shapes, compiled on a "
        "machine without a GPU; the worst of its specialisations. Bytes a thread spills and of shared "
        f"memory a block. {markup.escape(kept['date'])}, {markup.escape(versions)}.</p><div class='wide'>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _predicted(outcomes: Sequence[Outcome]) -> str:
    """A row for each prediction, the refuted first."""
    marks = {REFUTED: "bad", CONFIRMED: "ok", OPEN: "absent"}
    body = ""
    for one in outcomes:
        cells = (*one.prediction.key, one.prediction.predicted, one.verdict or "", one.prediction.why)
        head = f"<th scope='row' class='{marks[one.state]}'>{one.state}</th>"
        body += f"<tr>{head}{''.join(map(_value, cells))}</tr>"
    names = ("", "incident", "question", "variant", "predicted", "got", "why")
    head = "".join(f"<th scope='col'>{name}</th>" for name in names)
    return (
        "<section id='predicted'><h2>Predicted for SM100</h2><p>Registered before anybody ran these "
        "questions on such a GPU; open until a recorded run answers.</p><div class='wide'>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _audited(rows: Sequence[Row]) -> str:
    """The heat map of recorded audits."""
    picture = plots.svg(heat_map(rows)).data
    return (
        "<section id='audited'><h2>The padding contract</h2><p>RECORDED. Kernels of packages by clause; the "
        "clauses are in workbook/contract.md. Subjects that did not run are left out.</p>"
        f"<div class='wide'>{picture}</div></section>"
    )


def _measurements(rows: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th scope='col'>{name}</th>" for name in MEASURED_COLUMNS)
    body = "".join(
        "<tr>" + "".join(_value(row.get(name, "")) for name in MEASURED_COLUMNS) + "</tr>" for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='wide'>{table}</div>"


def _value(value: object) -> str:
    if isinstance(value, int | float):
        return f"<td class='num'>{value:.6g}</td>"
    return f"<td>{markup.escape(str(value))}</td>"


def _chapter(execution: Execution) -> tuple[str, str]:
    """One notebook as a section, and its entry in the table of contents."""
    stem = execution.path.stem
    notebook = nbformat.read(execution.path, as_version=4)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "data" in output:
                output.data = {kind: output.data[kind] for kind in SHOWN if kind in output.data}
    quiet = logging.Logger("nbconvert", logging.ERROR)
    exporter = HTMLExporter(template_name="basic", embed_images=True, log=quiet)
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    body, _ = exporter.from_notebook_node(
        notebook, resources={"metadata": {"path": str(execution.path.parent)}}
    )
    body = body.replace("No description has been provided for this image", ALT)
    # Two notebooks may have the same heading, so ids begin with the notebook's name; a link to a
    # notebook becomes a link to its section.
    body = re.sub(r"(<h[1-6][^>]* id=\")", rf"\g<1>{stem}-", body)
    body = re.sub(r"href=\"(?:\./)?(\d\d_\w+)\.ipynb(?:#[^\"]*)?\"", r'href="#\1"', body)
    # Notebooks are beside workbook/, the page is in workbook/_build/.
    body = body.replace('href="../workbook/', 'href="../')
    headings = re.findall(r"<h([12])[^>]* id=\"([^\"]+)\">(.*?)</h\1>", body, re.DOTALL)
    titles, below = [], ""
    for level, anchor, heading in headings:
        plain = re.sub(r"<a class.*?</a>|<[^>]+>", "", heading)
        if level == "1":
            titles.append(plain)
        else:
            below += _entry(anchor, plain)
    stopped = (
        f"<p class='bad'>This notebook stopped: {markup.escape(execution.error)}</p>"
        if execution.error
        else ""
    )
    title = titles[0] if titles else markup.escape(stem)
    entry = _entry(stem, title, f"<ul>{below}</ul>" if below else "")
    return f"<section id='{markup.escape(stem)}'>{stopped}{body}</section>", entry
