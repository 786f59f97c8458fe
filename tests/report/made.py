"""Findings and notebooks that the tests of the report show."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from nbformat import v4
from tests.made import finding, not_run, off_on_off

from staleproof.lab import Finding

INCIDENT = "mla_padding"
# An event of the timeline.
EVENT = {"date": "2026-03-18", "source": "vLLM #1", "url": "https://example.org/1", "incident": 1}
EVENT |= {"label": "opened", "event": "It began.", "checked": False, "reported": ["7 us", "8 us"]}
EVENT |= {"grade": None, "where": []}


def found(
    question: str,
    variant: str,
    verdict: str,
    expected: str | None = None,
    incident: str = INCIDENT,
    **more: Any,
) -> Finding:
    return finding(incident, question, variant, verdict, expected=expected, **more)


def fix(variant: str, on: str = "clean", wrong: str | None = None, incident: str = INCIDENT) -> Finding:
    """Off / on / off of a remedy that behaves so; its verdict is the expected one."""
    expected = "not fixed" if on != "clean" else "fixed" if wrong is None else "wrong"
    return off_on_off(incident, variant, off="leaked", on=on, again="leaked", wrong=wrong, expected=expected)


absent = partial(not_run, INCIDENT)


def write(path: Path, *cells: nbformat.NotebookNode) -> Path:
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path


def drawing(printed: str = "", **about: str) -> nbformat.NotebookNode:
    """A cell that shows a picture, and prints."""
    outputs = [v4.new_output("stream", text=printed)] if printed else []
    data = {"image/png": "AAAA", "image/svg+xml": "<svg><path d='M 0 0'/></svg>"}
    shown = v4.new_output("display_data", data)
    shown.metadata = {"image/svg+xml": about} if about else {}
    return v4.new_code_cell("draw()", outputs=[*outputs, shown])


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
