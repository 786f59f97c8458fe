"""The pictures of the notebooks: transparent, in mid-grey, readable without colours.

Each state has a colour of Okabe and Ito's and a hatch of its own. NaN is drawn, never left blank.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from staleproof import device
from staleproof.check import require
from staleproof.lab import Outcome

# Before what it speaks of is imported.
device.need_workbook("pandas", "matplotlib", "seaborn")

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerPatch
from matplotlib.patches import Rectangle

if TYPE_CHECKING:
    from IPython.display import SVG

    from staleproof.incidents.mla_padding.pictures import StagePicture

# The grey with a contrast of 4.5 on white and on black.
INK = "#767676"
FONT = 9
# matplotlib's settings for every picture: no ground, words and axes in the grey.
STYLE: Any = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize"), FONT),
    **dict.fromkeys(("legend.fontsize", "figure.titlesize"), FONT),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.titlesize": FONT + 1,
}
# The same for cells, which have neither ticks nor a frame.
CELLS: Any = STYLE | {
    **dict.fromkeys(("axes.spines.left", "axes.spines.bottom"), False),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
}
_BLUE, _ORANGE, _VERMILION, _PURPLE, _GREEN = "#56B4E9", "#E69F00", "#D55E00", "#CC79A7", "#009E73"
_YELLOW = "#F0E442"

# State -> its colour, the opacity of the cell's background, and its hatch.
STATES: Mapping[str, tuple[str, float, str]] = {
    "finite": (_BLUE, 0.25, ""),
    "NaN in a padding row": (_ORANGE, 0.2, "///"),
    "NaN in a live row": (_VERMILION, 0.45, "xxx"),
    "wrong, finite": (_PURPLE, 0.3, "\\\\\\"),
    "clean": (_BLUE, 0.25, ""),
    "pad_only": (_ORANGE, 0.2, "///"),
    "leaked": (_VERMILION, 0.45, "xxx"),
    "live_born": (_PURPLE, 0.3, "\\\\\\"),
    "this step": (_BLUE, 0.25, ""),
    "an earlier step": (_GREEN, 0.3, "---"),
    "nobody": (_ORANGE, 0.2, "///"),
    "NaN of an earlier step": (_ORANGE, 0.35, "///"),
    "zero": (_YELLOW, 0.35, "||"),
    "cured": (_BLUE, 0.25, ""),
    "helped": (_GREEN, 0.3, "---"),
    "not cured": (_ORANGE, 0.2, "///"),
    "made worse": (_VERMILION, 0.45, "xxx"),
    "written": (_BLUE, 0.25, ""),
    "never written": (_VERMILION, 0.45, "xxx"),
}
_STAGE_STATES = ("finite", "NaN in a padding row", "NaN in a live row")


@mpl.rc_context(CELLS)
def grid(
    cells: Sequence[Sequence[str]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    live: int | None = None,
    cell: tuple[float, float] = (0.55, 0.24),
) -> Figure:
    """A grid of states with a legend.

    Args:
        cells: a state of :data:`STATES` for each row and column.
        rows: labels of the rows; they may be empty.
        columns: labels of the columns.
        live: draws a line below this many rows.
        cell: width and height of a cell, in inches.

    Returns:
        A figure that pyplot does not keep.

    Raises:
        ValueError: cells that do not fit the labels, or an unknown state.
    """
    require(len(cells) == len(rows), "cells", f"{len(rows)} rows", len(cells))
    for line in cells:
        require(len(line) == len(columns), "cells", f"{len(columns)} columns", len(line))
        require(set(line) <= set(STATES), "cells", f"states of {list(STATES)}", sorted(set(line)))
    # In inches: the space for the labels grows with their length.
    left = 0.25 + 0.084 * max(map(len, rows))
    flat = 0.079 * max(map(len, columns)) < cell[0]
    top = 0.3 if flat else 0.15 + 0.062 * max(map(len, columns))
    bottom, right = 0.4, 0.6
    width, height = len(columns) * cell[0], len(rows) * cell[1]
    size = (max(left + width + right, 4.6), bottom + height + top)
    fig = Figure(figsize=size)
    ax = fig.add_axes((left / size[0], bottom / size[1], width / size[0], height / size[1]))
    order = [*STATES]
    sns.heatmap(
        [[order.index(state) for state in line] for line in cells],
        cmap=ListedColormap([to_rgba(colour, strength) for colour, strength, _ in STATES.values()]),
        vmin=-0.5,
        vmax=len(order) - 0.5,
        cbar=False,
        ax=ax,
        xticklabels=list(columns),
        yticklabels=list(rows),
    )
    for y, line in enumerate(cells):
        for x, state in enumerate(line):
            ax.add_patch(patch(state, (x, y), facecolor="none"))
    if live is not None:
        ax.plot([-0.15, len(columns) + 0.15], [live, live], color=INK, linewidth=2, clip_on=False)
    ax.xaxis.tick_top()
    ax.tick_params(rotation=0)
    if not flat:
        for label in ax.get_xticklabels():
            label.set(rotation=35, ha="left")
    shown = [s for s in STATES if any(s in line for line in cells)]
    legend(fig, [patch(state, label=state) for state in shown], "lower left")
    return fig


@cache
def two_layers(kind: type) -> Any:
    """A kind of matplotlib patch that draws its face first and its hatch over it.

    In an SVG both would be one pattern at one opacity, and a hatch in the face's colour is invisible.
    """

    class TwoLayers(kind):
        def draw(self, renderer: Any) -> None:
            hatch, face, width = self.get_hatch(), self.get_facecolor(), self.get_linewidth()
            self.set_hatch(None)
            super().draw(renderer)
            if hatch:
                self.set(hatch=hatch, facecolor="none", linewidth=0)
                super().draw(renderer)
                self.set(facecolor=face, linewidth=width)

    return TwoLayers


def patch(
    state: str, corner: tuple[float, float] = (0, 0), size: tuple[float, float] = (1, 1), **changes: Any
) -> Any:
    """A rectangle in the colour and hatch of one of :data:`STATES`.

    Args:
        state: its name.
        corner: x and y.
        size: width and height.
        changes: other properties of the rectangle.
    """
    return two_layers(Rectangle)(corner, *size, **(look(state) | changes))


def look(state: str) -> dict[str, Any]:
    """The properties of a patch in the colour and hatch of one of :data:`STATES`."""
    colour, strength, hatch = STATES[state]
    return {"facecolor": to_rgba(colour, strength), "edgecolor": colour, "hatch": hatch, "linewidth": 0.6}


def word(ax: Axes, x: float, y: float, text: str, ground: Sequence[float], **more: Any) -> None:
    """A word around a point, black or white, so that it can be read on its ground."""
    dark = sum(ground[:3]) < 1.5
    ax.text(x, y, text, ha="center", va="center", color="white" if dark else "black", **more)


def legend(fig: Figure, handles: Sequence[Any], loc: Any) -> None:
    """A legend of patches in one line, drawn like the patches themselves."""

    def drawn(**place: Any) -> Any:
        corner = (-place["xdescent"], -place["ydescent"])
        return two_layers(Rectangle)(corner, place["width"], place["height"])

    fig.legend(
        handles=list(handles),
        handler_map={Rectangle: HandlerPatch(patch_func=drawn)},
        loc=loc,
        ncols=len(handles),
        handlelength=2.2,
        handleheight=1.4,
    )


def stages(picture: StagePicture) -> Figure:
    """The rows of one replay after each stage; live rows are above the line."""
    count = len(picture.cells)
    labels = [f"row {row}" if row < picture.live else f"padding {row}" for row in range(count)]
    return grid(
        [[_STAGE_STATES[cell] for cell in line] for line in picture.cells],
        rows=labels,
        columns=picture.stages,
        live=picture.live,
    )


def turned(good: str, verdict: str, fig: Figure) -> None:
    """What the controls of a notebook show: a verdict as a badge, and a picture of the state.

    Args:
        good: the verdict that is good.
        verdict: of the state.
        fig: the picture.
    """
    from IPython.display import display

    from staleproof.report.show import Badge

    badge = Badge(verdict, Outcome.GOOD if verdict == good else Outcome.BAD)
    display(badge)
    display(svg(fig, badge.text))


def turned_step(picture: StagePicture) -> None:
    """One step by stage, with the verdict on its rows; see :func:`turned`."""
    turned("clean", str(picture.verdict), stages(picture))


@mpl.rc_context(STYLE)
def uptime(curves: Mapping[str, Sequence[float]], *, steps: int) -> Figure:
    """Share of corrupted requests over the life of a server, a line for each variant.

    Args:
        curves: shares from 0 to 1 for each variant, one for each window of equal length.
        steps: length of the whole run.

    Raises:
        ValueError: no curve, an empty one, or a share outside 0 to 1.
    """
    require(bool(curves), "curves", "at least one", 0)
    for name, shares in curves.items():
        require(len(shares) > 0, f"curves[{name!r}]", "at least one window", 0)
        ok = all(0 <= share <= 1 for share in shares)
        require(ok, f"curves[{name!r}]", "shares from 0 to 1", list(shares))
    fig = Figure(figsize=(7, 2.9), layout="constrained")
    ax = fig.subplots()
    colours = sns.color_palette("colorblind", len(curves))
    # Curves that are the same are one line with their names; where others meet, a later one is thinner.
    alike: dict[tuple[float, ...], list[str]] = {}
    for name, shares in curves.items():
        alike.setdefault(tuple(shares), []).append(name)
    for n, (shares, names) in enumerate(alike.items()):
        ends = [steps * (window + 1) / len(shares) for window in range(len(shares))]
        ax.plot(
            *(ends, shares),
            color=colours[n],
            marker="osD^vPX*"[n % 8],
            label="\n".join(names),
            linewidth=max(1.0, 5 - n),
            markersize=max(4.0, 9 - n),
        )
    ax.set(xlabel="steps served", ylabel="requests corrupted", xlim=(0, None), ylim=(-0.04, 1.04))
    ax.yaxis.set_major_formatter("{x:.0%}")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return fig


def svg(fig: Figure, alt: str = "", caption: str = "") -> SVG:
    """The figure as a notebook cell shows it; the same figure always gives the same bytes.

    Args:
        fig: the figure.
        alt: a description for readers who cannot see the picture. It is the ``<title>`` of the SVG; alt text
            and caption are also in the output's metadata, where the report reads them.
        caption: what one mark means, where the values come from, and their unit.
    """
    from IPython.display import SVG

    text = io.StringIO()
    # Text stays text: small and searchable. The layout is for DejaVu Sans, which is wider than other
    # sans-serif fonts, so the text of a reader's font fits too.
    style: Any = {"svg.hashsalt": "staleproof", "svg.fonttype": "none", "hatch.linewidth": 0.8}
    with mpl.rc_context(style):
        title = {"Title": alt} if alt else {}
        # As wide as its words: a legend may be wider than the cells above it.
        fig.savefig(
            text, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None, **title}
        )
    words = {name: given for name, given in (("alt", alt), ("caption", caption)) if given}
    picture = text.getvalue().replace("<svg ", '<svg role="img" ', 1)
    return SVG(picture, metadata=words or None)


def picture(fig: Figure, alt: str, caption: str) -> None:
    """Show a figure in a notebook, and its caption as a line of text below it.

    Args:
        fig: the figure.
        alt: one or two sentences that say what the picture shows.
        caption: what one mark stands for, and the unit. The line begins with where the values come from,
            unless the caption says so itself, as one of a recorded run does.

    Raises:
        ValueError: no alt text or no caption.
    """
    from IPython.display import display

    for name, words in (("alt", alt), ("caption", caption)):
        require(bool(words.strip()), name, "a sentence", repr(words))
    if not caption.startswith("RECORDED"):
        caption = f"{device.provenance()}: {caption}"
    display(svg(fig, alt, caption))
    print(f"Picture, {caption}")
