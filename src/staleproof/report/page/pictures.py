"""SVG pictures as parts of the page: small, with an alternative text, readable in both themes.

>>> print(figure('<svg><path d="M 1.23456 2"/></svg>', alt="one line", caption="INTERPRETED"))
<figure><svg role="img" aria-label="one line" preserveAspectRatio="xMinYMin"><path d="M 1.23 2"/></svg>
<figcaption>INTERPRETED</figcaption></figure>
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter

from markupsafe import Markup, escape

# The grey that pictures are drawn in can be read on white and on black, but on neither with a contrast of
# 4.5. The page lays each picture on its own light ground, so it can have a darker one.
GREY, DARKER = "#808080", "#4a525b"
# A picture that is made smaller stays at the left edge of its place.
LEFT = 'preserveAspectRatio="xMinYMin"'


def tidy(svg: str, prefix: str) -> str:
    """The SVG without what a page does not need, and with ids that no other picture has.

    Args:
        svg: as matplotlib writes it.
        prefix: put before each id and each class.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<title>.*?</title>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\s+role=\"img\"| aria-label=\"[^\"]*\"", "", svg).replace(GREY, DARKER)
    svg = re.sub(r"\s+", " ", svg).replace("> <", "><").replace(" z ", "z")
    # Hundredths of a point are enough for a screen. A scale is a factor, not a place.
    svg = re.sub(r"scale\([^)]*\)|-?\d+\.\d{3,}", _rounded, svg)
    used = set(re.findall(r"(?:href=\"#|url\(#)([^\")]+)", svg)) | {"figure_1"}
    svg = re.sub(r" id=\"([^\"]+)\"", lambda f: f' id="{prefix}{f[1]}"' if f[1] in used else "", svg)
    svg = re.sub(r"(href=\"#|url\(#)", rf"\g<1>{prefix}", svg)
    # A style that is repeated becomes a class: a grid has hundreds of the same cell.
    styles = Counter(re.findall(r" style=\"([^\"]+)\"", svg))
    rules = ""
    for number, (style, count) in enumerate(styles.items()):
        if count > 2:
            svg = svg.replace(f' style="{style}"', f' class="{prefix}{number}"')
            rules += f".{prefix}{number}{{{style}}}"
    return (
        re.sub(r"(<svg[^>]*>)", rf"\1<style>{rules}</style>", svg, count=1).strip() if rules else svg.strip()
    )


def _rounded(match: re.Match[str]) -> str:
    if match[0].startswith("scale"):
        return match[0]
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")


def figure(svg: str, *, alt: str, caption: object) -> Markup:
    """One picture.

    Args:
        svg: as matplotlib writes it.
        alt: what a reader who does not see it has to know.
        caption: below it: provenance, units, what is shown.
    """
    # The same picture may stand in two places, with another caption.
    number = hashlib.sha256(f"{svg}{alt}{caption}".encode()).hexdigest()[:8]
    drawn = tidy(svg, f"p{number}-")
    labelled = drawn.replace("<svg", f'<svg role="img" aria-label="{escape(alt)}" {LEFT}', 1)
    return Markup("<figure>{}\n<figcaption>{}</figcaption></figure>").format(Markup(labelled), caption)


def image(kind: str, data: str, *, alt: str, caption: object) -> Markup:
    """A picture in pixels, held in the page.

    Args:
        kind: ``image/png`` or ``image/jpeg``.
        data: base64.
        alt: as in :func:`figure`.
        caption: as in :func:`figure`.
    """
    return Markup(
        '<figure><img alt="{}" src="data:{};base64,{}">\n<figcaption>{}</figcaption></figure>'
    ).format(alt, kind, "".join(data.split()), caption)


def again(drawn: Markup) -> Markup:
    """The same picture in a second place, without its bytes; it is drawn from the first.

    Args:
        drawn: a :func:`figure`.
    """
    found = re.match(r"<figure>(<svg[^>]*>)", drawn)
    name = re.search(r' id="([^"]+-figure_1)"', drawn)
    if not found or not name:
        return drawn
    use = Markup('<use href="#{}"/></svg>').format(name[1])
    return Markup("<figure>") + Markup(found[1]) + use + Markup(drawn[drawn.index("\n<figcaption>") :])
