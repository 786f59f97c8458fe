"""Every notebook keeps every rule of the contract, and every rule sees a notebook that breaks it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode, v4

sys.path.insert(0, str(Path(__file__).parent))

from tools.canonical import ANSWER, canonical

import contract
from contract import EVIDENCE, NOTEBOOKS, RULES, SECTIONS
from staleproof.incidents.registry import INCIDENTS

WALKED = {about.notebook for about in INCIDENTS.values()}


def test_there_are_notebooks():
    names = [p.stem for p in NOTEBOOKS]
    assert names, "no notebooks"
    assert [n[:3] for n in names] == [f"{i:02d}_" for i in range(len(names))]
    assert [n for n in names if f"{n}.ipynb" in WALKED] == [
        about.notebook[:-6] for about in INCIDENTS.values()
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_keeps_the_contract(path):
    # Not nbformat.read: it repairs what it reads, and the committed file is what counts.
    text = path.read_text("utf-8")
    nb = v4.reads(text)
    # 00 and the audit have an order of their own.
    rules = (rule for rule in RULES if path.name in WALKED or rule not in contract.WALKTHROUGH)
    assert {rule.__name__: wrong for rule in rules if (wrong := rule(nb))} == {}
    assert text == canonical(nb)


# Spoils a notebook.
Spoil = Callable[[NotebookNode], object]
TOLD = {"alt": "Row 127 is unwritten.", "caption": "one square is one row"}


def _good() -> NotebookNode:
    """A notebook that keeps every rule."""
    parameters = v4.new_code_cell('DEVICE = "cpu"', execution_count=1)
    parameters.metadata.tags = ["parameters"]
    evidence = v4.new_code_cell(
        'found = ask("empty_row")\nshow.verdict("empty_row: pad_only", found)', execution_count=2
    )
    evidence.metadata.tags = [EVIDENCE]
    text = "row  state\n127  unwritten\nINTERPRETED empty_row: pad_only, 127 of 128 rows\n"
    picture = {"image/svg+xml": "<svg xmlns='http://www.w3.org/2000/svg'/>", "text/plain": "fig"}
    evidence.outputs = [
        v4.new_output("stream", name="stdout", text=text),
        v4.new_output("display_data", data=picture, metadata={"image/svg+xml": dict(TOLD)}),
    ]
    reader = v4.new_code_cell("answer = ...\ncheck(1, answer)", execution_count=3)
    reader.outputs = [v4.new_output("stream", name="stdout", text="exercise 1: no answer yet; put ...\n")]
    answer = v4.new_code_cell("check(1, 7)", execution_count=4)
    answer.metadata.tags = [ANSWER]
    answer.outputs = [v4.new_output("stream", name="stdout", text="exercise 1: right\n")]
    control = v4.new_code_cell("show.turn(draw, table, rows=range(3))", execution_count=5)
    control.outputs = [
        v4.new_output("display_data", data={"text/html": "<table></table>", "text/plain": "row"})
    ]
    prose = "# Incident\n" + "\n".join(f"## The {word} here\n### Detail" for word in SECTIONS)
    prose += "\nSource: https://github.com/vllm-project/vllm/pull/37442, 168 us reported."
    nb = v4.new_notebook(cells=[v4.new_markdown_cell(prose), parameters, evidence, reader, answer, control])
    return nbformat.reads(canonical(nb), as_version=4)


def _set(index: int, key: str, value: object) -> Spoil:
    return lambda nb: nb.cells[index].update({key: value})


def _source(index: int, text: str) -> Spoil:
    return _set(index, "source", text)


def _tags(index: int, *tags: str) -> Spoil:
    return lambda nb: nb.cells[index].metadata.update(tags=[*tags])


def _text(text: str) -> Spoil:
    return lambda nb: nb.cells[2].outputs[0].update(text=text)


def _output(*args: str, **kwargs: object) -> Spoil:
    return lambda nb: nb.cells[2].outputs.append(v4.new_output(*args, **kwargs))


def _prose(old: str, new: str) -> Spoil:
    assert old in _good().cells[0].source
    return lambda nb: nb.cells[0].update(source=nb.cells[0].source.replace(old, new))


def _one_cell_too_many(nb: NotebookNode) -> None:
    nb.cells += nb.cells[:1] * (contract.MAX_CELLS + 1 - len(nb.cells))


def _no_ids(nb: NotebookNode) -> None:
    for cell in nb.cells:
        del cell["id"]


VERDICT = "INTERPRETED empty_row: pad_only"
BROKEN = {
    contract.is_read_in_one_sitting: [_source(0, "word " * 2501)],
    contract.is_valid_4_5: [lambda nb: nb.update(nbformat_minor=4), _no_ids, _set(1, "surplus", 1)],
    contract.is_canonical: [
        lambda nb: nb.metadata.language_info.update(version="3.11.9"),
        _set(1, "id", "deadbeef"),
        _tags(2, EVIDENCE, "a"),
    ],
    contract.is_executed_in_order: [_set(2, "execution_count", count) for count in (None, 7, 1)],
    contract.shows_no_error: [
        _output("error", ename="E", evalue="", traceback=[]),
        _text("Traceback (most recent call last):\n"),
    ],
    contract.has_short_cells: [_source(1, "\n".join(["x = 1"] * 16))],
    contract.defines_nothing: [
        _source(1, text)
        for text in (
            *(
                "def f():\n    return 1",
                "async def f():\n    return 1",
                "if True:\n    class A:\n        pass",
            ),
            *("f = lambda: 1", "f: object = lambda: 1", "print(f := lambda: 1)"),
            *("@triton.jit\ndef k(): ...", "k = triton.jit(other)", "x = tl.load(p)"),
        )
    ],
    contract.hides_nothing_in_cell_magics: [_source(1, "%%writefile k.py\ndef f(): ...")],
    contract.starts_with_parameters: [_tags(1), _tags(1, "other")],
    contract.has_evidence: [_tags(2)],
    contract.evidence_rests_on_findings: [
        _source(2, text)
        for text in ('show("empty_row")', 'assert found\nshow.verdict("empty_row: pad_only")')
    ],
    contract.evidence_prints_one_verdict: [
        _set(2, "outputs", []),
        *(_text("pad_only\n"), _text(f"{VERDICT}\n{VERDICT}\n"), _text("RECORDED empty_row: pad_only\n")),
    ],
    contract.evidence_prints_no_timing: [
        _text(f"{VERDICT}, {timing}\n") for timing in ("1.8 us", "12ms", "12 µs", "3.1 s", "4.1 TB/s")
    ],
    contract.names_no_path_and_no_host: [
        _source(1, 'x = open("/home/me/x")'),
        *(_text("/usr/lib/libcuda.so\n"), _text("C:\\Users\\me\n")),
        _text("lib/python3.11/site-packages/torch\n"),
        *(_text("me@gpu-a6-7:~$\n"), _text("listening on 10.0.0.7\n")),
        _prose("github.com", "gitlab.internal"),
        _output("display_data", data={"text/plain": "/tmp/a"}),
    ],
    contract.walks_in_order: [
        _prose("## The symptom", "### The symptom"),
        _prose("## The symptom", "## A stray one\n## The symptom"),
        _prose("## The claim", "## The symptom"),
        _prose("## The fix", "## In a real engine"),
    ],
    contract.pictures_are_told: [
        _output("display_data", data={"image/svg+xml": "<svg/>"}),
        lambda nb: nb.cells[2].outputs[1].metadata["image/svg+xml"].pop("caption"),
        lambda nb: nb.cells[2].outputs.append(nb.cells[2].outputs[1]),
    ],
    contract.exercises_are_answered: [
        *(_tags(4), _source(4, "check(2, 7)"), _source(4, "print()")),
        *(_set(4, "outputs", []), _set(3, "outputs", [])),
    ],
    contract.has_few_cells: [_one_cell_too_many],
    contract.has_one_control: [
        *(_source(5, ""), _source(4, "show.turn(draw, table)"), _set(5, "outputs", [])),
        _set(5, "outputs", [v4.new_output("stream", text="row\n")]),
    ],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_each_rule_sees_what_breaks_it_and_no_fault_of_a_good_notebook(rule):
    assert rule(_good()) == []
    for number, spoil in enumerate(BROKEN[rule]):
        nb = _good()
        spoil(nb)
        assert rule(nb) != [], number


def test_a_walkthrough_may_end_in_a_real_engine():
    nb = _good()
    nb.cells[0].source += "\n## In a real engine"
    assert contract.walks_in_order(nb) == []


def test_words_in_a_fold_are_not_counted():
    nb = _good()
    nb.cells[0].source += f"\n\n<details><summary>More</summary>\n\n{'word ' * 2501}\n\n</details>"
    assert contract.is_read_in_one_sitting(nb) == []


def test_this_machine_is_never_named(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "gpu-a6-7")
    nb = _good()
    assert contract.names_no_path_and_no_host(nb) == []
    nb.cells[2].outputs[0].text = "run on gpu-a6-7\n"
    assert contract.names_no_path_and_no_host(nb) == ["cell-03: 'gpu-a6-7'"]
