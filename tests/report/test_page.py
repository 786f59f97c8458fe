"""The parts of the HTML report: colours by meaning, tables, pictures, texts, chapters, cards, reference."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from nbformat import v4
from tests.made import finding, not_run, off_on_off

import staleproof
from staleproof.cases.finding import real
from staleproof.cases.store import Run, checkout
from staleproof.incidents.registry import INCIDENTS
from staleproof.report.notebooks import Execution
from staleproof.report.page import beside, cards, chapters, matrices, pictures, reference, tables, texts
from staleproof.report.page.meaning import meaning

STYLE = (Path(tables.__file__).parent / "templates/style.css").read_text()


@pytest.mark.parametrize("verdict", ["leaked", "illegal memory access", "illegal access", "NaN", "dies"])
def test_harm_is_harm_also_where_it_is_expected(verdict):
    shown = tables.verdict(finding("a", "q", "faulty", verdict, expected=verdict))
    assert shown == f'<td class="harm">{verdict}</td>'


def test_clean_and_cured_have_colours_of_their_own_and_the_unexpected_a_mark():
    assert tables.verdict(finding("a", "q", "v", "clean")).startswith('<td class="clean">')
    assert tables.verdict(finding("a", "q", "v", "cured")).startswith('<td class="cured">')
    bad = tables.verdict(finding("a", "q", "v", "leaked", expected="clean"))
    assert bad == '<td class="harm unexpected">leaked <b>unexpected</b>, expected clean</td>'
    good = tables.verdict(finding("a", "q", "v", "clean", expected="leaked"))
    assert good.startswith('<td class="clean unexpected">')
    assert 'class="absent"' in tables.verdict(not_run("a", "q", "v", "needs <SM100>"))
    assert 'title="needs &lt;SM100&gt;"' in tables.verdict(not_run("a", "q", "v", "needs <SM100>"))


def test_a_word_nobody_listed_has_no_colour():
    assert meaning("a new word") == "open"
    assert tables.cell("a new word") == "<td>a new word</td>"


def _luminance(colour: str) -> float:
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, two: str) -> float:
    low, high = sorted((_luminance(one), _luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_a_contrast_of_four_and_a_half(theme):
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")[:2]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", light if theme == "light" else dark.split("} }")[0]))
    pairs = [
        *((ink, ground) for ink in ("ink", "dim", "link", "mark") for ground in ("paper", "soft")),
        *((name, f"{name}-ground") for name in ("harm", "clean", "cured")),
        *(("mark", f"{name}-ground") for name in ("harm", "clean", "cured")),
        *((name, "soft") for name in ("keyword", "string", "number", "name")),
        ("harm", "paper"),
    ]
    low = {pair: _contrast(colours[pair[0]], colours[pair[1]]) for pair in pairs}
    assert {pair: round(value, 2) for pair, value in low.items() if value < 4.5} == {}
    assert _contrast(pictures.DARKER, colours["picture"]) >= 4.5


def test_a_picture_is_small_and_its_ids_are_its_own():
    path = '<path id="m" d="M 0.123456 10.987654" style="fill: #808080"/>'
    svg = f'<?xml?><svg id="x"><!-- note --><defs>{path * 3}</defs><use xlink:href="#m"/></svg>'
    one, two = (str(pictures.figure(svg, alt=alt, caption="RECORDED <b>")) for alt in ("a < b", "other"))
    assert "0.12 10.99" in one
    assert "note" not in one
    assert pictures.DARKER in one
    assert one.count("fill:") == 1
    assert 'aria-label="a &lt; b"' in one
    assert "RECORDED &lt;b&gt;" in one
    (first,), (second,) = ({*re.findall(r'id="([^"]+)"', text)} for text in (one, two))
    assert first != second
    assert f'href="#{first}"' in one
    assert 'id="x"' not in one


def test_numbers_of_an_issue_at_the_start_of_a_line_are_no_headings():
    assert "<h" not in texts.render("see\n#57036). In Python -1 is the last expert\n\n#45357, #50696")
    assert texts.render("# One", 1) == "<h2>One</h2>\n"


def test_no_heading_of_the_committed_chapters_is_an_issue_number():
    for path in sorted((checkout() / "notebooks").glob("*.ipynb")):
        page = chapters.read(Execution(path, None)).html()
        assert not re.search(r"<h\d[^>]*>\s*#?\d{4,}", page), path.name


def test_links_lead_into_the_page_or_to_the_web_or_are_text():
    known = texts.terms("**live row, row** - A *row* of a request.")
    page = (
        "<a href='https://a.test/x'>web</a> <a href=\"../workbook/glossary.md#live-row\">row</a> "
        '<a href="01_x.ipynb#The-fix">fix</a> <a href="01_x.ipynb#gone">x</a> <a href="../src/a.py">a.py</a>'
    )
    settled = texts.settle_links(
        page, {"01_x", "01_x-the-fix", "term-live-row"}, {"01_x.ipynb": "01_x"}, known
    )
    assert settled == (
        "<a href='https://a.test/x'>web</a> "
        '<a class="term" href="#term-live-row" title="A row of a request.">row</a> '
        '<a href="#01_x-the-fix">fix</a> <a href="#01_x">x</a> a.py'
    )


def chapter(tmp_path: Path, *cells: nbformat.NotebookNode) -> chapters.Chapter:
    path = tmp_path / "01_mla_padding.ipynb"
    nbformat.write(v4.new_notebook(cells=[v4.new_markdown_cell("# 01 · A title"), *cells]), path)
    return chapters.read(Execution(path, None))


def drawing(source: str, printed: str = "", **about: str) -> nbformat.NotebookNode:
    outputs = [v4.new_output("stream", text=printed)] if printed else []
    shown = v4.new_output("display_data", {"image/svg+xml": "<svg><path d='M 0 0'/></svg>"})
    shown.metadata = {"image/svg+xml": about} if about else {}
    return v4.new_code_cell(source, outputs=[*outputs, shown])


def test_sections_and_code_are_folded(tmp_path):
    answer = v4.new_code_cell("check(3, 4)", metadata={"tags": ["answer"]})
    made = chapter(tmp_path, v4.new_markdown_cell("## The `fix`\n\nwords"), v4.new_code_cell("x = 1"), answer)
    page = made.html()
    assert made.title == "01 · A title"
    assert '<details id="01_mla_padding-the-fix" class="section"><summary><h3>The fix</h3>' in page
    assert page.count("<summary>code</summary>") == 1
    assert page.count("<summary>answer</summary>") == 1
    assert "open" not in re.findall(r"<details[^>]*>", page)[0]


def test_a_picture_takes_its_words_from_the_notebook(tmp_path):
    banner = v4.new_code_cell(
        "b", outputs=[v4.new_output("stream", text="machine: CPU · torch · INTERPRETED\n")]
    )
    made = chapter(
        tmp_path,
        banner,
        v4.new_markdown_cell("## First bad stage\n\nbefore"),
        drawing("one", alt="what it shows", caption="RECORDED, us"),
        drawing("two"),
        v4.new_markdown_cell("*After.* Rows are bad.\n\nmore"),
        drawing("three", printed="RECORDED a machine, 2026-11-21, same source\nrow"),
    )
    told = [
        re.findall(r'aria-label="([^"]+)"|<figcaption>(.*?)</figcaption>', one)
        for one in made.sections[1].figures
    ]
    flat = [[first or second for first, second in found] for found in told]
    assert flat == [
        ["what it shows", "RECORDED, us"],
        ["First bad stage: After. Rows are bad.", "INTERPRETED, CPU"],
        ["First bad stage: more", "RECORDED a machine, 2026-11-21, same source"],
    ]


def test_a_caption_that_the_cell_prints_too_stands_once(tmp_path):
    made = chapter(
        tmp_path, drawing("one", printed="RECORDED, us\n", alt="what it shows", caption="RECORDED, us")
    )
    assert made.html().count("RECORDED, us") == 1


def run(*found) -> Run:
    about = {"machine": {"name": "NVIDIA H200"}, "date": "2026-11-21"}
    return Run(Path("nvidia-h200"), about, [one.recorded() for one in found], [])


def test_differences_come_first_and_the_rest_is_folded():
    here = [
        finding("a", "q", "same", "clean"),
        finding("a", "q", "differs", "leaked"),
        finding("a", "q", "unexpected", "leaked", expected="clean"),
        not_run("a", "q", "there", "needs a GPU"),
        finding("a", "q", "here", "clean"),
        not_run("a", "q", "nowhere", "needs SM100"),
    ]
    there = [
        finding("a", "q", "same", "clean"),
        finding("a", "q", "differs", "clean"),
        finding("a", "q", "unexpected", "leaked"),
        finding("a", "q", "there", "clean", evidence=real("torch")),
    ]
    page = beside.html(here, [run(*there)])
    order = ["differs", "unexpected", "there", "here", "same", "nowhere"]
    places = [page.index(f"<td>{variant}</td>") for variant in order]
    assert places == sorted(places)
    assert page.index("<details") > places[1]
    assert page.count("<details") == 4
    assert "<h3>Different verdicts: 1</h3>" in page
    assert '<td class="harm">leaked</td><td class="clean">clean</td>' in page
    assert "<td>real</td>" in page


def test_an_unexpected_verdict_is_not_hidden_by_a_later_one():
    bad = finding("a", "q", "v", "leaked", expected="clean")
    page = beside.html([bad, replace(bad, verdict="clean")], [])
    assert "<h3>Not as expected: 1</h3>" in page


def test_matrices_are_folded_and_escape_what_they_show():
    found = [
        finding("a", "q", "v", "leaked", evidence=real("torch", "<empty>")),
        not_run("a", "q", "w", "needs <SM100>"),
        finding("a", "off/on/off", "v", "fixed", off="clean", on="clean", again="leaked"),
    ]
    page = matrices.html(found)
    assert page.startswith('<details class="rows"><summary>a, matrices: 1<')
    assert "&lt;empty&gt;" in page
    assert "needs &lt;SM100&gt;" in page
    # A claim that its numbers do not show is changed here as well.
    assert "not reproduced <b>unexpected</b>, expected fixed" in page


def test_a_card_says_what_was_seen_off_on_off(tmp_path):
    made = chapter(tmp_path, v4.new_markdown_cell("## First bad stage"), drawing("one", alt="x", caption="y"))
    three = {"off": "leaked", "on": "clean", "off_again": "leaked"}
    proofs = [off_on_off("mla_padding", name, **three, wrong=None) for name in ("one", "two")]
    proofs.append(off_on_off("mla_padding", "bad", **three | {"on": "leaked"}, wrong=None))
    built = cards.build(proofs, [made], {"mla_padding": ["<do>"]}, texts.terms("**CUDA graph** - A record."))
    assert [card.name for card in built] == [*INCIDENTS]
    card = built[0]
    assert 'its <a href="glossary.md#cuda-graph">CUDA graph</a> gives' in card.sentences
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", card.proof)
    assert [name for name, _ in rows] == ["one, two", "bad"]
    assert rows[0][1].startswith(
        '<td class="harm">leaked</td><td class="clean">clean</td><td class="harm">leaked</td>'
    )
    assert '<td class="cured">fixed</td>' in rows[0][1]
    assert '<td class="harm unexpected">not fixed' in rows[1][1]
    assert card.picture.startswith("<figure>")
    assert card.patch == "STALEPROOF_PATCHES=mla_padding vllm serve ..."
    assert card.grade == "replica"
    # Three sentences each.
    for about in cards.SENTENCES.values():
        assert len(re.findall(r"\.(?: |$)", about)) == 3
    assert cards.SENTENCES.keys() == INCIDENTS.keys()


def test_the_picture_of_a_card_is_drawn_again_in_its_chapter(tmp_path):
    made = chapter(tmp_path, v4.new_markdown_cell("## First bad stage"), drawing("one", alt="x", caption="y"))
    made.sections[1].figures[0] = made.sections[1].parts[-1] = pictures.figure(
        '<svg width="9"><g id="figure_1"/></svg>', alt="x", caption="y"
    )
    taken = made.sections[1].take_figure()
    name = re.search(r'id="(p\w+-figure_1)"', taken)
    assert name
    assert f'<use href="#{name[1]}"/></svg>' in made.html()
    assert made.html().count("<figcaption>y") == 1


def test_every_public_name_is_in_the_reference():
    page = reference.html()
    for name in staleproof.__all__:
        assert f'id="api-staleproof-{name}"' in page
    assert "<dt><code>q</code></dt>" in page
    assert ":func:" not in page
    assert " object at 0x" not in page
