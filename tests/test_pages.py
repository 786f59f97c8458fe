"""Pages and notebooks: every link is alive, and the parts written from data agree with the data."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tools import figures

from staleproof import runs

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "workbook").glob("*.md")),
    *sorted((ROOT / "src").rglob("*.md")),
    *sorted((ROOT / "notebooks").glob("*.ipynb")),
]
LINK = re.compile(r"(?<!\\)\]\(([^()\s]+)\)")


def markdown(page: Path) -> str:
    """The text of a page, or of a notebook's Markdown cells, without code blocks."""
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text())["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    else:
        text = page.read_text()
    return re.sub(r"^```.*?^```|^    .*?$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page: GitHub's of its headings, or JupyterLab's of a notebook's, and ``<a id>``."""
    text = markdown(page)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    named = {*re.findall(r"<a id=\"([^\"]+)\">", text)}
    if page.suffix == ".ipynb":
        return named | {heading.strip().replace(" ", "-") for heading in headings}
    slugs = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h)) for h in headings)
    return named | {slug.strip().lower().replace(" ", "-") for slug in slugs}


def dead_links(page: Path) -> list[str]:
    """The relative links of a page whose file or heading is not there."""
    dead = []
    for target in LINK.findall(markdown(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and file.is_file() and anchor not in anchors(file)):
            dead.append(target)
    return dead


def test_every_link_is_alive():
    assert {page.name: dead for page in PAGES if (dead := dead_links(page))} == {}


def test_written_parts_agree_with_their_source():
    for path, begin, text in figures.parts(runs.find(figures.MACHINE)):
        written = (ROOT / path).read_text().split(begin)[1].split(figures.END)[0].strip()
        assert written == text, "run: python -m tools.figures"
