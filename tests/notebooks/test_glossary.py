"""Each walkthrough links each word of the glossary where it first uses it, and the checker sees if not."""

import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

sys.path.insert(0, str(Path(__file__).parent))

from glossary import ENTRY, GLOSSARY, PLAIN, anchors, first_uses_without_link, links_without_entry

from contract import NOTEBOOKS
from staleproof.incidents.registry import INCIDENTS

TEXT = GLOSSARY.read_text("utf-8")
WORDS = anchors(TEXT)
WALKED = {about.notebook for about in INCIDENTS.values()}
LINKED = "A [padding row](../workbook/glossary.md#padding-row)"


def notebook(*prose):
    return v4.new_notebook(cells=[v4.new_markdown_cell(text) for text in prose])


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if p.name in WALKED], ids=lambda path: path.stem)
def test_each_word_is_linked_where_it_is_first_used(path):
    nb = nbformat.read(path, as_version=4)
    assert first_uses_without_link(nb, WORDS) == []
    assert links_without_entry(nb, TEXT) == []


def test_every_entry_has_an_anchor_and_every_exception_is_a_name():
    entries = [line for line in TEXT.splitlines() if line.startswith("**")]
    assert len(entries) == len({anchor for anchor, _ in ENTRY.findall(TEXT)}) > 70
    assert set(WORDS) >= PLAIN


@pytest.mark.parametrize(
    "prose",
    [
        ("A padding row.",),
        ("Two padding rows, then", LINKED),
        ("**Padding\nrow**".replace("\n", " "), LINKED),
        ("| padding row | x |", LINKED),
        ("[Padding row](https://github.com) and a padding row", LINKED),
    ],
)
def test_a_first_use_without_a_link_is_seen(prose):
    (problem,) = first_uses_without_link(notebook(*prose), {"padding row": "padding-row"})
    assert problem.startswith("padding row: not linked")


@pytest.mark.parametrize(
    "prose",
    [
        (LINKED, "and padding rows"),
        ("# Padding row\n`padding row`\n```\npadding row\n```",),
        ("padding rower, unpadding row",),
    ],
)
def test_headings_and_code_are_no_use_of_a_word(prose):
    assert first_uses_without_link(notebook(*prose), {"padding row": "padding-row"}) == []


def test_a_link_to_no_entry_is_seen():
    assert links_without_entry(notebook(LINKED), "") == ["no entry padding-row"]
