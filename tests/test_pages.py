"""README and the pages of the workbook: what is written from data agrees with it, and every link is alive."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path

import pytest

from staleproof import device
from staleproof.cases import store
from staleproof.engine.orders import NEWEST, OLDEST
from staleproof.incidents.registry import INCIDENTS
from staleproof.triage import table
from staleproof.vllm import plugin
from tools import bound, figures, support

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "workbook").glob("*.md"))]
LINK = re.compile(r"(?<!\\)\]\(([^()\s]+)\)")


def markdown(page: Path) -> str:
    """The text of a page, or of a notebook's Markdown cells."""
    if page.suffix != ".ipynb":
        return page.read_text()
    cells = json.loads(page.read_text())["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```|^    .*?$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings: GitHub's for Markdown, JupyterLab's for a notebook."""
    if page.suffix == ".ipynb":
        return {h.strip().replace(" ", "-") for h in re.findall(r"^#+ (.+)$", markdown(page), re.MULTILINE)}
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    slugs = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h)) for h in headings)
    return {slug.strip().lower().replace(" ", "-") for slug in slugs}


def dead_links(page: Path) -> list[str]:
    """The relative links of a page whose file or heading is not there."""
    dead = []
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_is_alive(page):
    assert dead_links(page) == []


def test_a_dead_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One heading\n[a](page.md#one-heading) [b](page.md#another) [c](absent.md) [d](#one-heading)"
    )
    assert dead_links(page) == ["page.md#another", "absent.md"]


def test_readme_is_short_and_holds_what_it_should():
    text = README.read_text()
    assert len(text.splitlines()) < 120
    for words in (
        "make workbook",
        "make test",
        "staleproof diagnose",
        "staleproof record",
        "SM100",
        "minutes",
    ):
        assert words in text, words
    assert text.count("![") == 1


def test_written_parts_agree_with_their_source():
    for path, begin, text in figures.parts(store.find(figures.MACHINE)):
        written = (ROOT / path).read_text().split(begin)[1].split(figures.END)[0].strip()
        assert written == text, "run: python -m tools.figures"


@pytest.mark.skipif(not device.interpreting(), reason="the picture is drawn on a CPU")
def test_the_picture_is_of_this_source():
    texts = re.compile(r"<text[^>]*>([^<]*)</text>|<!-- ([^-]+) -->")
    kept, drawn = (texts.findall(svg) for svg in ((ROOT / figures.PICTURE).read_text(), figures.picture()))
    assert kept == drawn, "run: python -m tools.figures"


def test_notebook_00_holds_the_table_of_the_source():
    cells = json.loads((ROOT / "notebooks/00_orientation.ipynb").read_text())["cells"]
    shown = [
        "".join(output["data"]["text/markdown"])
        for cell in cells
        if cell["cell_type"] == "code"
        for output in cell["outputs"]
        if "text/markdown" in output.get("data", {})
    ]
    assert shown == [table.markdown(lambda row: row.notebook)]


@pytest.fixture(scope="module")
def found():
    """Every recorded finding, by what was asked."""
    found = {}
    for one in (one for run in store.read_all() for one in run.findings):
        found.setdefault(one.key[:3], []).append(one)
    return found


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_figures_of_a_page_are_those_of_the_findings_that_they_name(found, page):
    for text, marks in bound.passages(markdown(page)):
        recorded = [mark for mark in marks if mark[0] not in bound.READ]
        sources = [bound.source_of(*mark, found, ROOT / "workbook", table.probes()) for mark in recorded]
        assert not recorded or bound.unbound(text, "\n".join(sources)) == [], (marks, text)


# Written by tools from findings and measurements, or restate a thread that each of their rows names.
WRITTEN = {
    "figures",
    "sm100-cost",
    "support",
    "timeline",
    "plugin-faults",
    "predictions",
    "sources",
    "reporters",
}


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem not in WRITTEN], ids=lambda page: page.name)
def test_a_measured_quantity_names_its_source(page):
    assert bound.unnamed(page.read_text()) == []


@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.stem)
def test_a_figure_of_a_notebook_is_in_a_cell_of_it_or_names_its_source(page):
    cells = [c for c in json.loads(page.read_text())["cells"] if c["cell_type"] == "code"]
    outputs = [{"text": "", **o, **o.get("data", {})} for c in cells for o in c["outputs"]]
    shown = json.dumps([[c["source"] for c in cells], [[o["text"], o.get("text/plain")] for o in outputs]])
    named = re.compile(f"{bound.MARK.pattern}|{bound.CITED.pattern}|[Rr]eported", re.DOTALL)
    told = [p for p in bound.paragraphs(markdown(page)) if not named.search(p)]
    assert [(figures, p) for p in told if (figures := bound.unbound(p, shown))] == []


@pytest.mark.parametrize("room", ["", "workbook", "notebooks", "src/staleproof"])
def test_a_range_of_releases_is_that_of_a_probe_or_names_its_source(room):
    ranges = {(OLDEST, NEWEST), *(span for patch in plugin.patches().values() for span in patch.versions)}
    for patch in plugin.patches():
        ranges |= {*bound.RANGE.findall(bound.source_of("releases", patch, {}, ROOT, table.probes()))}
    pages = [(ROOT / room).glob(f"{'**/' if room else ''}*.{kind}") for kind in ("md", "ipynb", "py", "toml")]
    for told in (told for page in chain(*pages) for told in bound.paragraphs(markdown(page))):
        named = bound.MARK.search(told) or bound.LINE.search(told)
        assert named or {*bound.RANGE.findall(" ".join(told.split()))} <= ranges, told


def test_a_figure_that_its_finding_does_not_hold_is_noticed():
    page = "First 3 of these.\n\n- 12 blocks, then 7. <!-- finding: a | q | v --> More: 5. <!-- file: x -->"
    told = [*bound.passages(page)]
    assert [marks for _, marks in told] == [[("finding", "a | q | v")], [("file", "x")]]
    assert [bound.unbound(text, '{"blocks": [12, 0]}') for text, _ in told] == [["7"], ["5"]]


def test_the_page_of_support_is_what_the_records_say():
    assert support.PAGE.read_text() == support.page()


def test_the_index_names_every_page():
    index = (ROOT / "workbook/index.md").read_text()
    assert [page.name for page in PAGES[2:] if f"({page.name})" not in index] == ["index.md"]


def test_onboarding_has_two_paths_and_twelve_questions_each_with_a_link_and_a_folded_answer():
    text = (ROOT / "workbook/onboarding.md").read_text()
    questions = re.split(r"^### (?=\d+\. )", text, flags=re.MULTILINE)[1:]
    assert [int(question.partition(".")[0]) for question in questions] == [*range(1, 13)]
    # One question at least of each incident's notebook, and of the orientation.
    linked = " ".join(LINK.findall(text))
    assert all(about.notebook in linked for about in INCIDENTS.values())
    paths = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| 3")]
    assert paths == ["30 minutes", "3 hours"]
    for question in questions:
        asked, _, answer = question.partition("<details><summary>Answer</summary>")
        assert asked.splitlines()[0].endswith("?")
        assert LINK.findall(asked), asked
        assert answer.count("</details>") == 1
        # An answer that takes three minutes to check is short.
        assert 20 < len(answer.split()) < 90
