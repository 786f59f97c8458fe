"""The contract of the notebooks: rules that nbval does not hold.

nbval passes a cell without outputs, ignores untagged cells in lax mode, and compares no pictures. So
each rule reads the committed file, without a kernel: a function that takes a notebook and returns a
line for each thing that is wrong with it.

An evidence cell is one tagged ``nbval-check-output``. Its verdict line is the one line of its text
that begins with the provenance word, MEASURED or INTERPRETED.
"""

from __future__ import annotations

import ast
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode
from tools.canonical import ANSWER, canonical

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
EVIDENCE = "nbval-check-output"
MAX_LINES = 15
MAX_WORDS = 2500
MAX_CELLS = 60
# The sections of a walkthrough, in order; each is one level-2 heading that holds the word.
SECTIONS = (
    "claim",
    "symptom",
    "hypotheses",
    "experiment",
    "ingredient",
    "first bad stage",
    "fix",
    "verification",
    "exercises",
    "not covered",
    "what we know now",
    "in production",
)
# The last section of a walkthrough whose fault was also produced in a whole engine.
ENGINE = "in a real engine"
VERDICT_LINE = re.compile(r"^(?:MEASURED|INTERPRETED)\b", re.MULTILINE)
TIMING = re.compile(r"\d\s?(?:[nµμum]?s|sec|seconds?)\b|/s\b")
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.:/])/(?:home|root|tmp|usr|opt|var|etc|mnt|srv|work|workspace|data|content|Users)\b"
    r"|\b[A-Za-z]:\\|file://|site-packages"
)
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\blocalhost\b|\w@[\w-]+:")
URL = re.compile(r"https?://([^/\s)\"'>]+)")
PUBLIC = {"github.com"}

Rule = Callable[[NotebookNode], list[str]]


def code_cells(nb: NotebookNode) -> list[NotebookNode]:
    return [c for c in nb.cells if c.cell_type == "code"]


def evidence_cells(nb: NotebookNode) -> list[NotebookNode]:
    return [c for c in code_cells(nb) if EVIDENCE in c.metadata.get("tags", [])]


def output_text(cell: NotebookNode) -> str:
    """All text a cell shows, pictures aside."""
    parts = []
    for output in cell.get("outputs", []):
        parts.append(output.get("text", ""))
        data = output.get("data", {})
        parts += [str(v) for k, v in data.items() if not k.startswith("image/")]
    return "\n".join(parts)


def nodes(nb: NotebookNode) -> Iterator[tuple[str, ast.AST]]:
    """Each node of each code cell, with the cell's id."""
    for cell in code_cells(nb):
        for node in ast.walk(ast.parse(TransformerManager().transform_cell(cell.source))):
            yield cell.id, node


def is_valid_4_5(nb: NotebookNode) -> list[str]:
    version = f"{nb.nbformat}.{nb.nbformat_minor}"
    problems = [] if version == "4.5" else [f"nbformat {version}"]
    return problems + [e.message for e in nbformat.validator.iter_validate(nb)]


def is_canonical(nb: NotebookNode) -> list[str]:
    if nbformat.writes(nb).rstrip("\n") + "\n" == canonical(nb):
        return []
    return ["not canonical: run python -m tools.canonical on it"]


def is_executed_in_order(nb: NotebookNode) -> list[str]:
    counts = [c.execution_count for c in code_cells(nb)]
    return [] if counts == list(range(1, len(counts) + 1)) else [f"execution counts {counts}"]


def shows_no_error(nb: NotebookNode) -> list[str]:
    return [
        f"{c.id}: an error output, or a traceback in its text"
        for c in code_cells(nb)
        if any(o.output_type == "error" for o in c.outputs)
        or "Traceback (most recent call last)" in output_text(c)
    ]


def has_short_cells(nb: NotebookNode) -> list[str]:
    lines = {c.id: len(c.source.splitlines()) for c in code_cells(nb)}
    return [f"{i}: {n} lines, at most {MAX_LINES}" for i, n in lines.items() if n > MAX_LINES]


def defines_nothing(nb: NotebookNode) -> list[str]:
    problems = []
    for cell, node in nodes(nb):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            problems.append(f"{cell}: defines {node.name}")
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            if isinstance(node.value, ast.Lambda):
                problems.append(f"{cell}: gives a lambda a name")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "tl":
                problems.append(f"{cell}: kernel code, tl.{node.attr}")
            if (node.value.id, node.attr) == ("triton", "jit"):
                problems.append(f"{cell}: @triton.jit")
    return problems


def hides_nothing_in_cell_magics(nb: NotebookNode) -> list[str]:
    return [f"{c.id}: a cell magic" for c in code_cells(nb) if c.source.lstrip().startswith("%%")]


def starts_with_parameters(nb: NotebookNode) -> list[str]:
    first = code_cells(nb)[:1]
    tagged = bool(first) and "parameters" in first[0].metadata.get("tags", [])
    return [] if tagged else ["the first code cell is not tagged parameters"]


def has_evidence(nb: NotebookNode) -> list[str]:
    return [] if evidence_cells(nb) else [f"no cell is tagged {EVIDENCE}"]


def evidence_rests_on_findings(nb: NotebookNode) -> list[str]:
    """The verdict line comes from ``show.verdict(text, findings)``, which refuses without findings."""
    resting = {
        cell
        for cell, node in nodes(nb)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "verdict"
        and len(node.args) + len(node.keywords) >= 2
    }
    return [f"{c.id}: no verdict from findings" for c in evidence_cells(nb) if c.id not in resting]


def evidence_prints_one_verdict(nb: NotebookNode) -> list[str]:
    counts = {c.id: len(VERDICT_LINE.findall(output_text(c))) for c in evidence_cells(nb)}
    return [f"{i}: {n} verdict lines, expected 1" for i, n in counts.items() if n != 1]


def evidence_prints_no_timing(nb: NotebookNode) -> list[str]:
    return [
        f"{c.id}: a timing, {found.group()!r}"
        for c in evidence_cells(nb)
        if (found := TIMING.search(output_text(c)))
    ]


def names_no_path_and_no_host(nb: NotebookNode) -> list[str]:
    node = platform.node()
    here = re.compile(rf"\b{re.escape(node)}\b") if len(node) > 3 else None
    problems = []
    for cell in nb.cells:
        text = cell.source + "\n" + output_text(cell)
        for pattern in filter(None, (ABSOLUTE_PATH, ADDRESS, here)):
            problems += [f"{cell.id}: {m.group()!r}" for m in pattern.finditer(text)]
        problems += [f"{cell.id}: host {host}" for host in URL.findall(text) if host not in PUBLIC]
    return problems


def walks_in_order(nb: NotebookNode) -> list[str]:
    prose = "\n".join(c.source for c in nb.cells if c.cell_type == "markdown")
    headings = re.findall(r"^## +(.+)$", prose, re.MULTILINE)
    if headings and ENGINE in headings[-1].lower():
        headings.pop()
    if len(headings) != len(SECTIONS):
        return [f"sections {headings}, expected one each on {SECTIONS}"]
    return [
        f"section {heading!r}, expected one on {word!r}"
        for heading, word in zip(headings, SECTIONS, strict=True)
        if word not in heading.lower()
    ]


def pictures_are_told(nb: NotebookNode) -> list[str]:
    """Each picture has an alt text of its own and a caption, which the report shows beside it."""
    problems, seen = [], {}
    for cell in code_cells(nb):
        for output in cell.get("outputs", []):
            if "image/svg+xml" not in output.get("data", {}):
                continue
            told = output.metadata.get("image/svg+xml", {})
            problems += [f"{cell.id}: a picture without {k}" for k in ("alt", "caption") if not told.get(k)]
            if told.get("alt") in seen:
                problems.append(f"{cell.id}: the alt text of {seen[told.alt]}")
            seen[told.get("alt")] = cell.id
    return problems


def exercises_are_answered(nb: NotebookNode) -> list[str]:
    """Each ``check(number, ...)`` of a reader's cell has an answer cell, whose output says ``right``."""
    calls = re.compile(r"^check\((\d+), ", re.MULTILINE)
    asked: list[str] = []
    answered: list[str] = []
    problems = []
    for cell in code_cells(nb):
        numbers = calls.findall(cell.source)
        is_answer = ANSWER in cell.metadata.get("tags", [])
        (answered if is_answer else asked).extend(numbers)
        said = [f"exercise {n}: {'right' if is_answer else 'no answer yet'}" for n in numbers]
        problems += [f"{cell.id}: does not print {line!r}" for line in said if line not in output_text(cell)]
    if not asked or asked != answered or asked != sorted(set(asked)):
        problems.append(f"exercises {asked}, answers to {answered}")
    return problems


def is_read_in_one_sitting(nb: NotebookNode) -> list[str]:
    """What stands outside folded asides is short; the rest is for who wants it."""
    prose = "\n".join(c.source for c in nb.cells if c.cell_type == "markdown")
    words = len(re.sub(r"<details>.*?</details>|<!--.*?-->", "", prose, flags=re.DOTALL).split())
    return [] if words <= MAX_WORDS else [f"{words} words outside folds, at most {MAX_WORDS}"]


def has_few_cells(nb: NotebookNode) -> list[str]:
    return [] if len(nb.cells) <= MAX_CELLS else [f"{len(nb.cells)} cells, at most {MAX_CELLS}"]


def has_one_control(nb: NotebookNode) -> list[str]:
    """One cell to turn, which shows a table of its states to who has no kernel."""
    turned = [c for c in code_cells(nb) if "show.turn(" in c.source]
    if len(turned) != 1:
        return [f"{len(turned)} cells call show.turn, expected 1"]
    shown = [output.get("data", {}).get("text/html", "") for output in turned[0].outputs]
    return (
        [] if any("<table>" in text for text in shown) else [f"{turned[0].id}: shows no table of its states"]
    )


# Rules of the walkthroughs only.
WALKTHROUGH = (walks_in_order, pictures_are_told, exercises_are_answered, has_few_cells, has_one_control)
RULES: tuple[Rule, ...] = (
    is_read_in_one_sitting,
    is_valid_4_5,
    is_canonical,
    is_executed_in_order,
    shows_no_error,
    has_short_cells,
    defines_nothing,
    hides_nothing_in_cell_magics,
    starts_with_parameters,
    has_evidence,
    evidence_rests_on_findings,
    evidence_prints_one_verdict,
    evidence_prints_no_timing,
    names_no_path_and_no_host,
    *WALKTHROUGH,
)
