"""Markdown as HTML: CommonMark, so that a line beginning with ``#57036`` is no heading.

Links to notebooks and pages of the workbook become links within the page; a link to a file that the page
does not hold becomes the file's name. So every link is alive wherever the page is moved.

>>> print(render("#57036 is a number.").strip())
<p>#57036 is a number.</p>
"""

from __future__ import annotations

import html as markup
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

_MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
# Classes of tokens that style.css colours.
COLOURED = "k|kn|kc|kd|ow|s1|s2|sd|sa|si|se|mi|mf|mh|nf|nc|nd|nb|fm|c1|gp|go"
_LINK = re.compile(r"<a\b([^>]*?)\bhref=([\"'])(.*?)\2([^>]*)>(.*?)</a>", re.DOTALL)
_TERM = re.compile(
    r"(?:<a id=\"(?P<slug>[^\"]+)\"></a>\s*)?\*\*(?P<names>[^*]+)\*\* - (?P<text>.+?)(?=\n\s*\n|\Z)",
    re.DOTALL,
)


def render(text: str, level: int = 0) -> Markup:
    """Markdown as HTML.

    Args:
        text: CommonMark with tables; HTML in it is kept.
        level: by how much its headings are lowered, so that they fit under those of the page.
    """
    made = _MARKDOWN.render(text)
    if level:
        made = re.sub(r"(</?h)([1-6])\b", lambda found: f"{found[1]}{min(int(found[2]) + level, 6)}", made)
    made = made.replace("<th></th>", "<td></td>").replace("<th>", '<th scope="col">')
    made = made.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    return Markup(made)


def code(source: str) -> Markup:
    """Python with its tokens marked for the page's style."""
    made = highlight(source, PythonLexer(), HtmlFormatter(cssclass="highlight"))
    # Tokens that the style gives no colour need no mark: half of the bytes.
    made = re.sub(rf'<span class="(?!(?:{COLOURED})")\w*">([^<]*)</span>', r"\1", made)
    return Markup(made.replace("<pre>", '<pre tabindex="0">').replace("<span></span>", ""))


def plain(text: str) -> str:
    """The words of some HTML or markdown, on one line."""
    text = re.sub(r"<[^>]+>", "", str(_MARKDOWN.render(text)) if not text.startswith("<") else text)
    return " ".join(markup.unescape(text).split())


def slug(title: str) -> str:
    """The anchor of a heading.

    >>> slug("1 · What `stale` means: a NaN")
    'what-stale-means-a-nan'
    """
    words = re.sub(r"^\d+ · ", "", title).lower()
    return re.sub(r"[^\w]+", "-", words).strip("-")


@dataclass(frozen=True)
class Term:
    """One entry of the glossary.

    Attributes:
        slug: its anchor is ``term-<slug>``.
        names: as the entry is headed.
        text: its definition, as markdown.
    """

    slug: str
    names: str
    text: str

    @property
    def says(self) -> str:
        """The definition in plain words, for a tooltip."""
        return plain(self.text)


def terms(glossary: str) -> dict[str, Term]:
    """The entries of ``workbook/glossary.md`` by anchor.

    >>> [(one.slug, one.says) for one in terms("**live row** - A row of a *request*.").values()]
    [('live-row', 'A row of a request.')]
    """
    found = {}
    for match in _TERM.finditer(glossary):
        names = " ".join(match["names"].split())
        anchor = match["slug"] or slug(names.split(",")[0])
        found[anchor] = Term(anchor, names, match["text"].strip())
    return found


def with_terms(text: str, known: Mapping[str, Term]) -> Markup:
    """Plain text, the first use of each word of the glossary linked to its entry.

    >>> words = terms("**live row** - A row of a request.")
    >>> print(with_terms("Two live rows, one live row.", words))
    Two <a href="glossary.md#live-row">live rows</a>, one live row.
    """
    names = {name.strip().lower(): one.slug for one in known.values() for name in one.names.split(",")}
    if not names:
        return escape(text)
    longest_first = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    linked: set[str] = set()

    def link(match: re.Match[str]) -> str:
        anchor = names[match[1].lower()]
        if anchor in linked:
            return match[0]
        linked.add(anchor)
        return f'<a href="glossary.md#{anchor}">{match[0]}</a>'

    return Markup(re.sub(rf"\b({longest_first})s?\b", link, escape(text), flags=re.IGNORECASE))


def glossary_html(text: str) -> Markup:
    """The glossary, each entry with the anchor that tooltips lead to."""
    parts: list[Markup] = []
    for block in re.split(r"\n\s*\n", text):
        match = _TERM.fullmatch(block.strip())
        if match is None:
            parts.append(render(block, 1) if not block.startswith("# ") else Markup(""))
            continue
        (term,) = terms(block.strip()).values()
        said = Markup(str(render(term.text)).strip().removeprefix("<p>").removesuffix("</p>"))
        parts.append(Markup('<p id="term-{}"><b>{}</b>: {}</p>').format(term.slug, term.names, said))
    return Markup("\n").join(parts)


def settle_links(
    page: str, anchors: Collection[str], documents: Mapping[str, str], known: Mapping[str, Term]
) -> str:
    """Make each link of the finished page lead into the page or to the web.

    Args:
        page: HTML.
        anchors: every id of the page.
        documents: file name -> the anchor of its place in the page, e.g. ``glossary.md``.
        known: terms of the glossary by anchor; links to them get their definition as a tooltip.
    """

    def settle(match: re.Match[str]) -> str:
        before, _, target, after, text = match.groups()
        target = markup.unescape(target)
        if re.match(r"https?://|mailto:", target):
            return match[0]
        path, _, anchor = target.partition("#")
        name = PurePosixPath(path).name
        if name == "glossary.md" and anchor in known:
            says = markup.escape(known[anchor].says)
            return f'<a class="term" href="#term-{anchor}" title="{says}">{text}</a>'
        place = documents.get(name, "") if path else ""
        for wanted in (f"{place}-{slug(anchor)}" if place and anchor else "", place, "" if path else anchor):
            if wanted in anchors:
                return f'<a{before}href="#{wanted}"{after}>{text}</a>'
        # The page does not hold that file: what is written on the link names it.
        return text

    return _LINK.sub(settle, page)
