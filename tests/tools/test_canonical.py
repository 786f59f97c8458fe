"""The canonical form: it drops what is chance, keeps what is shown, and changes nothing twice."""

from __future__ import annotations

import json

import nbformat
import pytest
from nbformat import v4
from tools.canonical import WIDGET_VIEW, canonical, main


def _notebook() -> nbformat.NotebookNode:
    cell = v4.new_code_cell("print(1)", execution_count=3)
    cell.metadata = {"tags": ["b", "a"], "execution": {"iopub.execute_input": "2026-01-01"}}
    cell.outputs = [
        v4.new_output("stream", name="stdout", text="one\n"),
        v4.new_output("stream", name="stdout", text="two\n"),
        v4.new_output("stream", name="stderr", text="three\n"),
        v4.new_output("display_data", data={WIDGET_VIEW: {"model_id": "f00"}, "text/plain": "w"}),
        v4.new_output("execute_result", data={"text/plain": "4"}, execution_count=3),
    ]
    nb = v4.new_notebook(cells=[v4.new_markdown_cell("# Größe"), cell])
    nb.metadata = {"widgets": {"state": {}}, "language_info": {"name": "python", "version": "3.9"}}
    return nb


def test_chance_is_dropped_and_what_is_shown_is_kept():
    before = _notebook()
    untouched = json.dumps(before)
    got = json.loads(canonical(before))
    assert json.dumps(before) == untouched
    assert (got["nbformat"], got["nbformat_minor"]) == (4, 5)
    assert got["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    prose, code = got["cells"]
    assert prose == {"cell_type": "markdown", "id": "cell-01", "metadata": {}, "source": ["# Größe"]}
    assert (code["id"], code["metadata"], code["execution_count"]) == ("cell-02", {"tags": ["a", "b"]}, 3)
    out, err, picture, result = code["outputs"]
    assert (out["name"], out["text"]) == ("stdout", ["one\n", "two\n"])
    assert (err["name"], err["text"]) == ("stderr", ["three\n"])
    assert picture["data"] == {"text/plain": ["w"]}
    assert result["data"] == {"text/plain": ["4"]}


def test_a_picture_inside_a_cell_is_kept():
    nb = _notebook()
    nb.cells[0].attachments = {"a.png": {"image/png": "AAAA"}}
    prose, code = json.loads(canonical(nb))["cells"]
    assert prose["attachments"] == {"a.png": {"image/png": "AAAA"}}
    assert "attachments" not in code


def test_the_answer_to_an_exercise_is_folded():
    nb = _notebook()
    nb.cells[1].metadata.tags = ["answer"]
    metadata = json.loads(canonical(nb))["cells"][1]["metadata"]
    assert metadata == {"jupyter": {"source_hidden": True}, "tags": ["answer"]}


def test_the_form_is_valid_ends_in_one_newline_and_is_its_own_form():
    text = canonical(_notebook())
    nb = nbformat.reads(text, as_version=4)
    nbformat.validate(nb)
    assert canonical(nb) == text
    assert text.endswith("}\n")
    assert "Größe" in text


def test_two_executions_that_differ_by_chance_get_the_same_text():
    other = _notebook()
    other.cells[1].outputs[0].text, other.cells[1].outputs[1].text = "one\ntw", "o\n"
    other.cells[1].metadata["execution"] = {"iopub.execute_input": "2026-02-02"}
    other.cells[1].id = "deadbeef"
    assert canonical(other) == canonical(_notebook())
    # Those of an older minor have no ids.
    other.nbformat_minor = 4
    for cell in other.cells:
        del cell["id"]
    assert canonical(other) == canonical(_notebook())


def test_files_are_rewritten_once(tmp_path, capsys):
    path = tmp_path / "a.ipynb"
    nbformat.write(_notebook(), path)
    assert main([str(path)]) == 0
    assert path.read_text("utf-8") == canonical(_notebook())
    assert "a.ipynb: rewritten" in capsys.readouterr().out
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "content",
    [
        b"no json",
        b'{"nbformat": 4}',
        b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": 3}',
        b"\xff\xfe",
        None,
    ],
)
def test_what_is_no_notebook_is_left_and_named(tmp_path, capsys, content):
    bad, good = tmp_path / "bad.ipynb", tmp_path / "good.ipynb"
    if content is not None:
        bad.write_bytes(content)
    nbformat.write(_notebook(), good)
    assert main([str(bad), str(good)]) == 2
    message = capsys.readouterr().err
    assert "bad.ipynb: cannot be rewritten: " in message
    assert message.count("\n") == 1
    assert content is None or bad.read_bytes() == content
    assert good.read_text("utf-8") == canonical(_notebook())
