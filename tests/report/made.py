"""What the tests of pictures look for."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def texts(words: Iterable[Text]) -> list[str]:
    return [word.get_text() for word in words]


def ticks(axis: Axis) -> list[tuple[float, str]]:
    return [*zip(axis.get_ticklocs(), texts(axis.get_ticklabels()), strict=True)]


def drawn_words(figure: Figure) -> list[Text]:
    """Every word that is seen of a picture, which is now drawn; none is cut off."""
    figure.draw(FigureCanvasAgg(figure).get_renderer())
    found = [word for word in figure.findobj(Text) if word.get_text().strip() and word.get_visible()]
    for word in found:
        box = word.get_window_extent()
        assert -0.5 <= box.x0 <= box.x1 <= figure.bbox.x1 + 0.5, word
        assert -0.5 <= box.y0 <= box.y1 <= figure.bbox.y1 + 0.5, word
    return found
