"""The glossary's words, and whether a notebook links each where its prose first uses it.

An entry is a paragraph that begins ``**name, other name** - `` under an anchor ``<a id="name"></a>``.
Code, links, headings and comments are not prose. A word that the glossary explains in one of several
senses, or that is plain English besides, is linked by hand and not looked for here (:data:`PLAIN`).
"""

from __future__ import annotations

import re
from pathlib import Path

from nbformat import NotebookNode

GLOSSARY = Path(__file__).resolve().parents[2] / "workbook" / "glossary.md"
TARGET = "../workbook/glossary.md#"
ENTRY = re.compile(r'^<a id="([^"]+)"></a>\n\*\*([^*]+)\*\* - ', re.MULTILINE)
# Names that a machine cannot tell from plain English or from another sense.
PLAIN = {
    *("page", "block", "hit", "capture", "full / piecewise graph", "lane", "finding", "reported", "grade"),
    *("clean", "fixed", "not fixed", "not reproduced", "wrong", "zero", "finite", "nan", "variant"),
    *("unwritten", "partly written", "not run", "measured", "interpreted", "recorded", "leaked"),
    *("per-tensor / per-token scale", "dp", "ep"),
}
CODE = re.compile(r"```.*?```|`[^`\n]*`|<!--.*?-->|^#+ [^\n]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")


def anchors(text: str) -> dict[str, str]:
    """Each name of the glossary in lower case, and the anchor of its entry."""
    found = {}
    for anchor, names in ENTRY.findall(text):
        for name in names.split(", "):
            found.setdefault(name.lower(), anchor)
    return found


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def first_uses_without_link(nb: NotebookNode, words: dict[str, str]) -> list[str]:
    """A line for each name whose first use in the notebook's prose is not a link to its entry."""
    prose = "\n\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    text = CODE.sub(_blank, prose)
    linked: dict[str, int] = {}
    for match in LINK.finditer(text):
        if match.group(2).startswith(TARGET):
            linked.setdefault(match.group(2).removeprefix(TARGET), match.start())
    plain = LINK.sub(_blank, text)
    problems = []
    for name, anchor in words.items():
        if name in PLAIN:
            continue
        phrase = r"\s+".join(map(re.escape, name.split()))
        used = re.search(rf"(?<![\w`-]){phrase}(?:s|es)?(?![\w`])", plain, re.IGNORECASE)
        if used and linked.get(anchor, len(text)) > used.start():
            line = prose[max(0, used.start() - 30) : used.end() + 20].replace("\n", " ")
            problems.append(f"{name}: not linked to {TARGET}{anchor} where it is first used: ...{line}...")
    return problems


def links_without_entry(nb: NotebookNode, text: str) -> list[str]:
    """Links to an anchor that the glossary, whose text is given, does not have."""
    prose = "\n".join(cell.source for cell in nb.cells if cell.cell_type == "markdown")
    known = {anchor for anchor, _ in ENTRY.findall(text)}
    targets = {target.removeprefix(TARGET) for _, target in LINK.findall(prose) if target.startswith(TARGET)}
    return sorted(f"no entry {anchor}" for anchor in targets - known)
