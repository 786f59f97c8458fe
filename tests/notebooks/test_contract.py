"""The contract every notebook keeps; it closes the holes that nbval leaves open.

nbval passes a stripped cell, never looks at an untagged one in lax mode, and does not compare
pictures. So each rule below reads the committed file, without a kernel: a function that takes a
notebook and returns what is wrong with it. Each is shown a notebook that breaks it, further down.

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
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode, v4

from staleproof.incidents.registry import INCIDENTS
from staleproof.report.canonical import canonical
from staleproof.report.timeline import LANES

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))

EVIDENCE = "nbval-check-output"
MAX_LINES = 15
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
)
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


def syntax_tree(cell: NotebookNode) -> ast.Module:
    return ast.parse(TransformerManager().transform_cell(cell.source))


def nodes(nb: NotebookNode) -> Iterator[tuple[str, ast.AST]]:
    """Each node of each code cell that parses, with the cell's id."""
    for cell in code_cells(nb):
        try:
            tree = syntax_tree(cell)
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            yield cell.id, node


def is_valid_4_5(nb: NotebookNode) -> list[str]:
    version = f"{nb.nbformat}.{nb.nbformat_minor}"
    problems = [] if version == "4.5" else [f"nbformat {version}"]
    return problems + [e.message for e in nbformat.validator.iter_validate(nb)]


def is_canonical(nb: NotebookNode) -> list[str]:
    if nbformat.writes(nb).rstrip("\n") + "\n" == canonical(nb):
        return []
    return ["not canonical: run python -m staleproof.report.canonical on it"]


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


def parses(nb: NotebookNode) -> list[str]:
    problems = []
    for cell in code_cells(nb):
        try:
            syntax_tree(cell)
        except SyntaxError as error:
            problems.append(f"{cell.id}: {error}")
    return problems


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


def evidence_is_stored(nb: NotebookNode) -> list[str]:
    return [f"{c.id}: no stored text" for c in evidence_cells(nb) if not output_text(c).strip()]


def evidence_asserts(nb: NotebookNode) -> list[str]:
    asserting = {
        cell
        for cell, node in nodes(nb)
        if isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant)
    }
    return [f"{c.id}: asserts nothing" for c in evidence_cells(nb) if c.id not in asserting]


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
    if len(headings) != len(SECTIONS):
        return [f"sections {headings}, expected one each on {SECTIONS}"]
    return [
        f"section {heading!r}, expected one on {word!r}"
        for heading, word in zip(headings, SECTIONS, strict=True)
        if word not in heading.lower()
    ]


RULES: tuple[Rule, ...] = (
    is_valid_4_5,
    is_canonical,
    is_executed_in_order,
    shows_no_error,
    has_short_cells,
    parses,
    defines_nothing,
    hides_nothing_in_cell_magics,
    starts_with_parameters,
    has_evidence,
    evidence_is_stored,
    evidence_asserts,
    evidence_prints_one_verdict,
    evidence_prints_no_timing,
    names_no_path_and_no_host,
    walks_in_order,
)


def is_walkthrough(path: Path) -> bool:
    """Whether a notebook's number is an incident's; 00 and the audit have an order of their own."""
    return path.name[:2].isdigit() and int(path.name[:2]) in LANES


def test_there_are_notebooks() -> None:
    names = [p.stem for p in NOTEBOOKS]
    assert names, "no notebooks"
    assert [n[:3] for n in names] == [f"{i:02d}_" for i in range(len(names))]
    walked = {int(p.name[:2]): p.name for p in NOTEBOOKS if is_walkthrough(p)}
    assert walked == {about.number: about.notebook for about in INCIDENTS.values()}


CASES = [
    pytest.param(path, rule, id=f"{path.stem}-{rule.__name__}")
    for path in NOTEBOOKS
    for rule in RULES
    if rule is not walks_in_order or is_walkthrough(path)
]


@pytest.mark.parametrize(("path", "rule"), CASES)
def test_notebook_keeps_the_contract(path: Path, rule: Rule) -> None:
    # nbformat.read would mend what it reads; the committed bytes are what counts.
    text = path.read_text("utf-8")
    nb = v4.reads(text)
    assert rule(nb) == []
    assert rule is not is_canonical or text == canonical(nb)


def _good() -> NotebookNode:
    """A notebook that keeps every rule."""
    parameters = v4.new_code_cell('DEVICE = "cpu"', execution_count=1)
    parameters.metadata.tags = ["parameters"]
    evidence = v4.new_code_cell(
        'verdict = show("empty_row")\nassert verdict == "pad_only"', execution_count=2
    )
    evidence.metadata.tags = [EVIDENCE]
    text = "row  state\n127  unwritten\nINTERPRETED empty_row: pad_only, 127 of 128 rows\n"
    picture = {"image/svg+xml": "<svg xmlns='http://www.w3.org/2000/svg'/>", "text/plain": "fig"}
    evidence.outputs = [
        v4.new_output("stream", name="stdout", text=text),
        v4.new_output("display_data", data=picture),
    ]
    prose = "# Incident\n" + "\n".join(f"## The {word} here\n### Detail" for word in SECTIONS)
    prose += "\nSource: https://github.com/vllm-project/vllm/pull/37442, 168 us reported."
    nb = v4.new_notebook(cells=[v4.new_markdown_cell(prose), parameters, evidence])
    return nbformat.reads(canonical(nb), as_version=4)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_good_notebook_passes(rule: Rule) -> None:
    assert rule(_good()) == []


def _source(index: int, text: str) -> Callable[[NotebookNode], None]:
    def write(nb: NotebookNode) -> None:
        nb.cells[index].source = text

    return write


def _text(text: str) -> Callable[[NotebookNode], None]:
    def write(nb: NotebookNode) -> None:
        nb.cells[2].outputs[0].text = text

    return write


def _output(*args: str, **kwargs: object) -> Callable[[NotebookNode], None]:
    def write(nb: NotebookNode) -> None:
        nb.cells[2].outputs.append(v4.new_output(*args, **kwargs))

    return write


def _tags(index: int, *tags: str) -> Callable[[NotebookNode], None]:
    def write(nb: NotebookNode) -> None:
        nb.cells[index].metadata.tags = list(tags)

    return write


def _set(index: int, key: str, value: object) -> Callable[[NotebookNode], None]:
    def write(nb: NotebookNode) -> None:
        nb.cells[index][key] = value

    return write


def _minor(minor: int) -> Callable[[NotebookNode], None]:
    def write(nb: NotebookNode) -> None:
        nb.nbformat_minor = minor

    return write


def _prose(old: str, new: str) -> Callable[[NotebookNode], None]:
    def write(nb: NotebookNode) -> None:
        assert old in nb.cells[0].source
        nb.cells[0].source = nb.cells[0].source.replace(old, new)

    return write


def _kernel(nb: NotebookNode) -> None:
    nb.metadata.language_info["version"] = "3.11.9"


def _no_ids(nb: NotebookNode) -> None:
    for cell in nb.cells:
        del cell["id"]


VERDICT = "INTERPRETED empty_row: pad_only"
BROKEN: tuple[tuple[Rule, Callable[[NotebookNode], None]], ...] = (
    (is_valid_4_5, _minor(4)),
    (is_valid_4_5, _no_ids),
    (is_valid_4_5, _set(1, "surplus", 1)),
    (is_canonical, _kernel),
    (is_canonical, _set(1, "id", "deadbeef")),
    (is_canonical, _tags(2, EVIDENCE, "a")),
    (is_executed_in_order, _set(2, "execution_count", None)),
    (is_executed_in_order, _set(2, "execution_count", 7)),
    (is_executed_in_order, _set(2, "execution_count", 1)),
    (shows_no_error, _output("error", ename="E", evalue="", traceback=[])),
    (shows_no_error, _text("Traceback (most recent call last):\n")),
    (has_short_cells, _source(1, "\n".join(["x = 1"] * 16))),
    (parses, _source(1, "x = (")),
    (defines_nothing, _source(1, "def f():\n    return 1")),
    (defines_nothing, _source(1, "async def f():\n    return 1")),
    (defines_nothing, _source(1, "if True:\n    class A:\n        pass")),
    (defines_nothing, _source(1, "f = lambda: 1")),
    (defines_nothing, _source(1, "f: object = lambda: 1")),
    (defines_nothing, _source(1, "print(f := lambda: 1)")),
    (defines_nothing, _source(1, "@triton.jit\ndef k(): ...")),
    (defines_nothing, _source(1, "k = triton.jit(other)")),
    (defines_nothing, _source(1, "x = tl.load(p)")),
    (hides_nothing_in_cell_magics, _source(1, "%%writefile k.py\ndef f(): ...")),
    (starts_with_parameters, _tags(1)),
    (starts_with_parameters, _tags(1, "other")),
    (has_evidence, _tags(2)),
    (evidence_is_stored, _set(2, "outputs", [])),
    (evidence_is_stored, _set(2, "outputs", [v4.new_output("stream", text="\n")])),
    (evidence_asserts, _source(2, 'show("empty_row")')),
    (evidence_asserts, _source(2, "# assert verdict\nassert True")),
    (evidence_prints_one_verdict, _text("pad_only\n")),
    (evidence_prints_one_verdict, _text(f"{VERDICT}\n{VERDICT}\n")),
    (evidence_prints_one_verdict, _text("RECORDED empty_row: pad_only\n")),
    (evidence_prints_no_timing, _text(f"{VERDICT}, 1.8 us\n")),
    (evidence_prints_no_timing, _text(f"{VERDICT}, 12ms\n")),
    (evidence_prints_no_timing, _text(f"{VERDICT}, 12 µs\n")),
    (evidence_prints_no_timing, _text(f"{VERDICT}, 3.1 s\n")),
    (evidence_prints_no_timing, _text(f"{VERDICT}, 4.1 TB/s\n")),
    (names_no_path_and_no_host, _source(1, 'x = open("/home/me/x")')),
    (names_no_path_and_no_host, _text("/usr/lib/libcuda.so\n")),
    (names_no_path_and_no_host, _text("C:\\Users\\me\n")),
    (names_no_path_and_no_host, _text("lib/python3.11/site-packages/torch\n")),
    (names_no_path_and_no_host, _text("me@gpu-a6-7:~$\n")),
    (names_no_path_and_no_host, _text("listening on 10.0.0.7\n")),
    (names_no_path_and_no_host, _prose("github.com", "gitlab.internal")),
    (names_no_path_and_no_host, _output("display_data", data={"text/plain": "/tmp/a"})),
    (walks_in_order, _prose("## The symptom", "### The symptom")),
    (walks_in_order, _prose("## The symptom", "## A stray one\n## The symptom")),
    (walks_in_order, _prose("## The claim", "## The symptom")),
)


@pytest.mark.parametrize(("rule", "spoil"), BROKEN, ids=lambda x: getattr(x, "__name__", None))
def test_each_rule_sees_what_breaks_it(rule: Rule, spoil: Callable[[NotebookNode], None]) -> None:
    nb = _good()
    spoil(nb)
    assert rule(nb) != []


def test_every_rule_is_shown_a_notebook_that_breaks_it() -> None:
    assert {rule for rule, _ in BROKEN} == set(RULES)


def test_this_machine_is_never_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "gpu-a6-7")
    nb = _good()
    assert names_no_path_and_no_host(nb) == []
    nb.cells[2].outputs[0].text = "run on gpu-a6-7\n"
    assert names_no_path_and_no_host(nb) == ["cell-03: 'gpu-a6-7'"]
