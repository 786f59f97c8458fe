"""The report: what the page says, colours, marks and folds."""

from __future__ import annotations

import base64
import datetime
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from nbformat import v4
from tests.made import not_run

from made import EVENT, absent, drawing, fix, found, write
from staleproof import runs as store
from staleproof.cli import app as cli
from staleproof.grades import real
from staleproof.incidents.mla_padding.pictures import stage_picture
from staleproof.incidents.registry import INCIDENTS
from staleproof.report import html, plots, timeline
from staleproof.report.notebooks import Execution

STYLE = (html.TEMPLATES / "style.css").read_text()


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout of its own: its pages, runs and notebooks are those that a test writes."""
    for name in ("notebooks", "workbook/runs"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(store, "checkout", lambda: tmp_path)
    return tmp_path


def page(*findings, runs=(), notebooks=()) -> str:
    return html.page(findings, runs, [Execution(path) for path in notebooks])


def recorded(root: Path, *findings, name: str = "h200", rows=()):
    store.write(root / "workbook/runs" / name, findings, rows)
    return store.read_all(root / "workbook/runs")


def test_the_page_loads_nothing_and_every_link_is_alive(root):
    (root / "workbook/glossary.md").write_text('# Words\n\n<a id="live-row"></a>\n**live row** - A *row*.\n')
    text = (
        "# First\n\n[next](01_next.ipynb), [up](https://a.test), "
        "[row](../workbook/glossary.md#live-row), [fix](00_first.ipynb#The-fix), [book](../workbook/index.md)"
    )
    (root / "workbook/index.md").write_text("# The index\n")
    shown = v4.new_output("display_data", {"application/javascript": "alert(1)", "text/plain": "said"})
    one = write(
        root / "notebooks/00_first.ipynb",
        v4.new_markdown_cell(text),
        v4.new_code_cell("x = 1", outputs=[shown]),
        drawing(alt="what it shows", caption="RECORDED"),
        v4.new_markdown_cell("## The `fix`"),
    )
    made = page(notebooks=[one])
    assert "default-src 'none'" in made
    assert not re.search(r"<script[^>]*src|<link|<iframe|@import", made, re.IGNORECASE)
    assert not re.search(r"\bsrc\s*=\s*[\"'](?!data:)", made, re.IGNORECASE)
    assert (made.count("<script"), "alert(1)" in made, ">said</pre>" in made) == (1, False, True)
    anchors = re.findall(r"\bid=[\"']([^\"']+)", made)
    assert [to for to in re.findall(r'href="#([^"]+)"', made) if anchors.count(to) != 1] == []
    assert 'href="https://a.test"' in made
    assert '<a href="#00_first-the-fix">fix</a>' in made
    # The page is the index of the book.
    assert ('<a href="#incidents">book</a>' in made, "The index" in made) == (True, False)
    # A file that the page does not hold is named, a word of the glossary says what it means.
    assert "<p>next, <a" in made
    assert '<a class="term" href="#live-row" title="A row.">row</a>' in made


def test_a_verdict_has_the_colour_of_its_outcome_and_a_mark_if_it_was_not_expected(root):
    made = page(
        found("a", "faulty", "leaked", "leaked"),
        found("b", "ours", "clean", "leaked"),
        found("c", "ours", "leaked", "clean"),
        absent("d", "theirs", "needs <SM100>"),
        fix("three times too large", wrong="live rows differ"),
        fix("ours"),
    )
    assert '<td class="bad">leaked</td>' in made
    assert '<td class="good unexpected">clean <b>unexpected</b>, expected leaked</td>' in made
    assert '<td class="bad unexpected">leaked <b>unexpected</b>, expected clean</td>' in made
    assert '<td class="absent" title="needs &lt;SM100&gt;">not run</td>' in made
    assert "<li>not run: mla_padding, theirs: needs &lt;SM100&gt; (d)</li>" in made
    # Wrong is no cure.
    assert re.search(r'<td class="bad"[^>]*>wrong</td>', made)
    assert '<td class="good">fixed</td>' in made


def test_differences_come_first_and_an_unexpected_verdict_is_not_hidden_by_a_good_one(root):
    # What was not asked here differs from no answer.
    there = found("q", "same", "clean"), found("q", "differs", "clean"), found("d", "t", "clean")
    runs = recorded(root, *there)
    bad, good = (found("q", "bad", verdict, "clean") for verdict in ("leaked", "clean"))
    late = [replace(one, variant="late") for one in (good, bad)]
    same, differs = found("q", "same", "clean"), found("q", "differs", "leaked")
    made = page(same, differs, bad, good, *late, absent("d", "t", "no GPU"), runs=runs)
    section = made[made.index('<section id="verdicts">') :]
    # Three sentences, then folds.
    paragraph = " ".join(re.sub(r"<[^>]+>", "", section[: section.index("<details")]).split())
    assert "This machine answered 6 questions, 2 of them not as expected, and could not ask 1." in paragraph
    assert re.search(r"RECORDED [^:]+: 1 answers are the same, 1 differ\.", paragraph)
    assert paragraph.endswith("3 verdicts differ, or are not as expected.")
    assert section.index("<details") < section.index("<table")
    differ, _, others = section.partition("others, the same on every machine that was asked")
    names = ("differs", "bad", "late", "same")
    assert [f"<td>{name}</td>" in differ for name in names] == [True, True, True, False]
    assert "<td>same</td>" in others
    assert "1 match, 1 mismatch, 2 only in the first, 1 only in the second" in section


def test_an_answer_that_came_later_is_shown_in_place_of_none(root):
    told = html._answers([absent("q", "v", "no GPU"), found("q", "v", "clean", "clean")], [])
    assert [one.verdict for row in told["same"].values() for one in row.values()] == ["clean"]


def test_a_card_shows_its_proof_what_to_do_and_the_grade(root):
    one = write(
        root / "notebooks/01_mla_padding.ipynb",
        v4.new_markdown_cell("# 01\n## First bad stage\nbefore"),
        drawing("Picture, RECORDED, us\nrow\n", alt="what it shows", caption="RECORDED, us"),
    )
    fixes = fix("one"), fix("two"), fix("bad", on="leaked"), fix("large", wrong="rows are too large")
    # Alike but for its grade, which has a row of its own.
    made = page(*fixes, replace(fix("run"), grade="real", of="torch"), notebooks=[one])
    card = made[made.index('id="mla_padding"') : made.index('id="decode_buffer"')]
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", card)
    assert [name for name, _ in rows] == ["one, two", "bad", "large", "run"]
    assert '<a href="#01_mla_padding-first-bad-stage">First bad stage</a>' in card
    assert "zeroing the buffer once does not." in card
    assert rows[0][1].startswith(
        '<td class="bad">leaked</td><td class="good">clean</td><td class="bad">leaked</td>'
    )
    assert '<span class="grade replica">replica</span>' in rows[0][1]
    assert "STALEPROOF_PATCHES=mla_padding,fp8_scale vllm serve ..." in card
    assert 'alt="what it shows"><figcaption>RECORDED, us</figcaption>' in card
    # The caption stands below the picture and is not printed again.
    chapter = made[made.index('id="01_mla_padding"') :]
    assert (chapter.count("RECORDED, us"), "row\n" in chapter or ">row<" in chapter) == (1, True)
    for name in INCIDENTS:
        assert f'<article id="{name}"' in made


def test_a_card_without_a_proof_of_this_machine_shows_a_recorded_one(root):
    runs = recorded(root, fix("theirs"), fix("theirs", incident="decode_buffer"))
    made = page(fix("own"), not_run("decode_buffer", "off/on/off", "own", "no device"), runs=runs)
    cards = made.partition('id="verdicts"')[0]
    assert re.findall(r'<th scope="row">(own|theirs)</th>', cards) == ["own", "theirs"]


def test_without_findings_of_its_own_the_page_shows_the_recorded_ones_a_column_a_run(root):
    recorded(root, found("q", "v", "leaked"), name="a")
    runs = recorded(root, found("q", "v", "clean"), name="b")
    made = page(runs=runs)
    assert "<summary>mla_padding, matrices</summary>" in made
    for run in runs:
        assert f'<th scope="col">{run.machine}, {run.folder.name}</th>' in made


def test_matrices_escape_what_they_show(root):
    made = page(found("q", "v", "leaked", evidence=real("torch", "<empty>")))
    assert "&lt;empty&gt;" in made
    assert "<empty>" not in made


def test_sections_are_folded_and_a_notebook_that_stopped_says_so(root):
    answer = v4.new_code_cell("check(3, 4)", metadata={"tags": ["answer"]})
    one = write(
        root / "notebooks/00_first.ipynb",
        v4.new_markdown_cell("# A title\n\n#57036 is a number\n## The `fix`\n\nwords\n#57037 too"),
        v4.new_code_cell("x = 1"),
        answer,
    )
    made = html.page([], [], [Execution(one, "code cell 2 raised")])
    assert "<summary><h3>A title</h3></summary>" in made
    assert '<details id="00_first-the-fix" class="section"><summary><h4>The fix</h4></summary>' in made
    assert (made.count("<summary>code</summary>"), made.count("<summary>answer</summary>")) == (1, 1)
    assert "This notebook stopped: code cell 2 raised" in made
    assert not re.search(r"<h\d[^>]*>\s*#?5703", made)


@pytest.mark.parametrize(("remedy", "at"), [("empty_row_not_written", 0), ("clear_empty_rows", 1)])
def test_the_guided_figure_shows_what_a_captured_step_shows(remedy, at, device):
    """Stage by stage, of the first layer and the logits: the miniature of incident 1 with 3 requests."""
    drawn = stage_picture(remedy, device, live=3)
    guided = html.guided()[1:]
    words = {0: "finite", 1: "nan", 2: "leaked"}
    for stage in guided:
        name = stage["name"] if stage["name"] == "logits" else f"0.{stage['name']}"
        column = [words[row[drawn.stages.index(name)]] for row in drawn.cells]
        assert ({*column[:3]}, {*column[3:]}) == ({stage["live"][at]}, {stage["padding"][at]}), name
    first_layer = [name[2:] for name in drawn.stages if name.startswith("0.")]
    assert [stage["name"] for stage in guided] == [*first_layer, "logits"]


def test_when_and_where_the_page_was_made(root):
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    assert f" Made {today}.</p>" in page()
    assert "<p>kv_reuse: an &lt;older&gt; source</p>" in html.page(
        [], [], [], ["kv_reuse: an <older> source"]
    )
    here, there = (
        replace(found("q", "v", "clean"), machine={"name": n}, date=n[:4]) for n in ("2026 b", "2025 a")
    )
    told = [here, there, replace(there, machine={}), here]
    said = f"Made {today} on 2025 a, 2026 b, unknown machine; verdicts of 2025, 2026."
    assert html._about(told) == said


def test_the_timeline_is_a_picture_of_the_page_if_the_book_has_one(root, monkeypatch):
    monkeypatch.setattr(timeline, "checkout", lambda: root)
    assert "Dates of the incidents" not in page()
    (root / "workbook/timeline.md").write_text("# Timeline\n")
    data = json.dumps({"events": [EVENT | {"incident": [1, 4]}], "claims": []})
    (root / "workbook/timeline.json").write_text(data)
    uri, alt = re.search(r'<img src="([^"]+)" alt="(Dates of the incidents[^"]+)"', page()).groups()
    assert "; 4 kv_reuse, KV blocks that were Mamba state" in alt
    drawn = base64.b64decode(uri.removeprefix("data:image/svg+xml;base64,")).decode()
    assert ">opened<" in drawn
    # On its light ground, in the darker grey; numbers in hundredths of a point, and a repeated style once.
    assert (html.DARKER in drawn, plots.INK in drawn) == (True, False)
    assert not re.search(r"(?<!scale\()\b\d+\.\d{3}", re.sub(r"scale\([^)]*\)|<style.*?</style>", "", drawn))
    assert Counter(re.findall(r' style="([^"]+)"', drawn)).most_common(1)[0][1] <= 2


def test_markdown_and_code_of_the_page():
    assert html.render("# a\n\n##### b\n\n###### c", 2) == "<h3>a</h3>\n<h6>b</h6>\n<h6>c</h6>\n"
    table = html.render("| a | |\n|---|---|\n| b | c |")
    assert table.startswith('<div class="wide"><table>')
    assert table.endswith("</table></div>\n")
    assert (table.count('<th scope="col">a</th>'), table.count("<th></th>"), table.count("<td></td>")) == (
        1,
        0,
        1,
    )
    marked = html.code("def f(x):  # why\n    return 'a<b'")
    assert marked.startswith('<div class="highlight"><pre tabindex="0">')
    assert '<span class="k">def</span> <span class="nf">f</span>(x):' in marked
    assert "&lt;b" in marked
    assert html.plain("a  `b`\n&amp; *c*") == "a b & c"


def test_a_notebook_is_read_into_sections(tmp_path):
    both = v4.new_output("display_data", {"text/markdown": "**m**", "text/plain": "p", "text/html": "<b>"})
    failed = v4.new_output("error", traceback=["\x1b[0;31mone\x1b[0m", "two"])
    path = write(
        tmp_path / "07_x.ipynb",
        v4.new_code_cell(""),
        v4.new_markdown_cell("# The *title*\nlead\n## 1 · First `part`\nbody\n### deep\n## Second"),
        v4.new_code_cell("x", outputs=[both, failed, v4.new_output("stream", text=" \n")]),
        drawing("Picture, here\n\x1b[1msaid\x1b[0m\n\n"),
    )
    made = html.chapter(Execution(path, "stopped"))
    assert (made.stem, made.title, made.error) == ("07_x", "The title", "stopped")
    first, second = made.sections[1:]
    assert [(one.title, one.anchor) for one in made.sections] == [
        ("", "07_x"),
        ("1 · First part", "07_x-first-part"),
        ("Second", "07_x-second"),
    ]
    assert made.sections[0].parts == [("markdown", ""), ("markdown", "lead\n")]
    assert first.parts == [("markdown", "body\n### deep\n")]
    *parts, (kind, picture) = second.parts
    assert parts == [
        *(
            ("markdown", ""),
            ("code", "x"),
            ("markdown", "**m**"),
            ("printed", "one\ntwo"),
            ("code", "draw()"),
        ),
        ("printed", "said\n"),
    ]
    # Without an alt text it is that of its section, or of the notebook.
    assert (kind, picture.alt, picture.caption) == ("picture", "Second", "")
    assert picture.uri.startswith("data:image/svg+xml")
    lead = html.chapter(Execution(write(tmp_path / "08_y.ipynb", drawing()))).sections[0]
    assert lead.parts[1][1].alt == "08_y"
    assert (made.section("first"), made.section("title")) == (first, None)


def test_a_link_leads_into_the_page_or_becomes_its_text():
    page = '<p id="triage"></p><p id="doc-glossary"></p><p id="01_a-the-fix"></p><p id="word"></p>'
    places = {"01_a.ipynb": "01_a", "README.md": "triage", "glossary.md": "doc-glossary"}
    for link, settled in (
        ('<a href="https://x.test/01_a.ipynb">t</a>',) * 2,
        ('<a href="mailto:a@b">t</a>',) * 2,
        ('<a href="../README.md">t</a>', '<a href="#triage">t</a>'),
        ("<a class='k' href='README.md#x' id='y'>t</a>", "<a class='k' href=\"#triage\" id='y'>t</a>"),
        ('<a href="01_a.ipynb#The-fix">t</a>', '<a href="#01_a-the-fix">t</a>'),
        ('<a href="01_a.ipynb">t</a>', "t"),
        ('<a href="#word">t</a>', '<a href="#word">t</a>'),
        ('<a href="#nowhere">t</a>', "t"),
        ('<a href="b/glossary.md#word">t</a>', '<a class="term" href="#word" title="a &lt;b&gt;">t</a>'),
        ('<a href="glossary.md#no">t</a>', '<a href="#doc-glossary">t</a>'),
        ('<a href="01_a.ipynb#word">t</a>', "t"),
        ('<a href="setup.py#word">t</a>', "t"),
    ):
        assert html.settle_links(page + link, places, {"word": "a <b>"}) == page + settled


def _luminance(colour: str) -> float:
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_a_contrast_of_four_and_a_half(theme):
    light, dark = STYLE.split("@media (prefers-color-scheme: dark)")[:2]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", light if theme == "light" else dark.split("} }")[0]))
    pairs = [
        *((ink, ground) for ink in ("ink", "dim", "link", "mark") for ground in ("paper", "soft")),
        *((name, f"{name}-ground") for name in ("bad", "good")),
        *(("mark", f"{name}-ground") for name in ("bad", "good")),
        *((name, "soft") for name in ("keyword", "string", "number", "name")),
    ]
    pairs = [(colours[one], colours[two]) for one, two in pairs] + [(html.DARKER, colours["picture"])]
    for one, two in pairs:
        low, high = sorted((_luminance(one), _luminance(two)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (one, two)


def test_report_writes_the_page_of_what_is_there(root, capsys):
    source = write(root / "notebooks/00_first.ipynb", v4.new_markdown_cell("# As committed"))
    answers = {"0.18.1": {"ids <pending>": ["600", "0"], "rows": ["none", "none"]}, "0.33.0": {}}
    (root / "workbook/patches.json").write_text(json.dumps(answers))
    before = source.read_bytes()
    assert cli.main(["report"]) == 0
    made = root / "workbook/_build/index.html"
    assert capsys.readouterr().out == f"report: {made}\n"
    text = made.read_text()
    assert "As committed" in text
    row = text[text.index("ids &lt;pending&gt;") :]
    assert row.startswith('ids &lt;pending&gt;</th><td class="good">600 → 0</td><td class="absent">-</td>')
    assert source.read_bytes() == before
    # A copy that was executed is shown in its place.
    (root / "workbook/_build/notebooks").mkdir()
    write(root / "workbook/_build/notebooks/00_first.ipynb", v4.new_markdown_cell("# As executed"))
    assert cli.main(["report"]) == 0
    assert ("As executed" in made.read_text(), "As committed" in made.read_text()) == (True, False)


def test_report_execute_exits_1_where_a_notebook_stops_and_still_writes(root, capsys, monkeypatch):
    write(root / "notebooks/00_good.ipynb", v4.new_code_cell("print('went', 'well')"))
    write(root / "notebooks/01_bad.ipynb", v4.new_code_cell("assert 0, 'no verdict'"))
    answer = found("q", "v", "clean", "clean")
    (run,) = recorded(root, answer)
    monkeypatch.setattr("staleproof.cli.common.ask_all", lambda *_: (one for one in (answer,)))
    assert cli.main(["report", "--execute"]) == 1
    captured = capsys.readouterr()
    # A line an incident; the findings are on the page.
    for name in INCIDENTS:
        assert f"{name}: 1 as expected, 0 not as expected, 0 not run\n" in captured.out
    assert "mla_padding, q, v" not in captured.out
    assert f"RECORDED  {run.machine}, " in captured.out
    assert "01_bad.ipynb: code cell 1 raised AssertionError: no verdict" in captured.err
    text = (root / "workbook/_build/index.html").read_text()
    assert text.index("went well") < text.index("This notebook stopped")
