"""Pictures of memory that a grid of states does not show well: the expert map, a block's life, a tile.

Each draws the data that an incident's ``pictures.py`` computes. Like the other pictures they are
transparent, and what matters is hatched as well as coloured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from staleproof.check import require
from staleproof.report import plots
from staleproof.report.plots import FONT, INK

if TYPE_CHECKING:
    from staleproof.incidents.kv_reuse.pictures import BlockLife
    from staleproof.incidents.moe_routing.pictures import MapPicture
    from staleproof.incidents.scale_padding.pictures import TilePicture

# Tokens shown large, beside the whole batch.
ZOOM = 14


@mpl.rc_context(plots.CELLS)
def maps(pictures: Sequence[MapPicture]) -> Figure:
    """Each map as its entries in memory: a column a token, a row a slot; the last tokens once more, large.

    Raises:
        ValueError: no picture, or one of a batch too small to show its last tokens.
    """
    require(bool(pictures), "pictures", "at least one", 0)
    fig = Figure(figsize=(8.2, 0.5 + 1.75 * len(pictures)), layout="constrained")
    axes = fig.subplots(len(pictures), 2, squeeze=False, width_ratios=(3, 2))
    for (whole, near), picture in zip(axes, pictures, strict=True):
        tokens, slots, _ = picture.batch
        require(tokens >= ZOOM, "pictures", f"batches of {ZOOM} tokens or more", tokens)
        _holes(whole, picture, 0)
        whole.set_title(picture.title, loc="left")
        whole.set_xticks([0, tokens // 2, tokens - 1], ["token 0", str(tokens // 2), str(tokens - 1)])
        _holes(near, picture, tokens - ZOOM)
        near.vlines(range(tokens - ZOOM, tokens + 1), 0, slots, color=INK, linewidth=0.3)
        near.hlines(range(slots + 1), tokens - ZOOM, tokens, color=INK, linewidth=0.3)
        near.set_title(f"the last {ZOOM} tokens", loc="left")
        near.set_xticks([tokens - ZOOM + 0.5, tokens - 0.5], [str(tokens - ZOOM), str(tokens - 1)])
        for ax in (whole, near):
            ax.set(ylim=(slots, 0))
            ax.set_yticks([0.5, slots - 0.5], ["slot 0", f"slot {slots - 1}"])
    states = ["written"] + ["never written"] * any(p.unwritten for p in pictures)
    plots.legend(fig, [plots.patch(state, label=state) for state in states], "outside lower left")
    return fig


def _holes(ax: Axes, picture: MapPicture, first: int) -> None:
    """The entries of the tokens from ``first`` on; neighbouring holes of a token are one patch."""
    tokens, slots, _ = picture.batch
    ax.set_xlim(first, tokens)
    ax.add_patch(plots.patch("written", (first, 0), (tokens - first, slots)))
    for token in range(first, tokens):
        for hole, run in groupby(range(slots), key=picture.holes[token].__getitem__):
            begin, *more = run
            if hole:
                ax.add_patch(plots.patch("never written", (token, begin), (1, 1 + len(more))))


_LIFE = {
    "Mamba state": "an earlier step",
    "free": "nobody",
    "keys and values": "this step",
    "prefix hit": "live_born",
}


@mpl.rc_context(plots.CELLS)
def life(block: BlockLife) -> Figure:
    """A block over the steps of a run: whose it is, and how many of its positions that owner has written."""
    fig = Figure(figsize=(8.2, 3.2), layout="constrained")
    who, filled = fig.subplots(2, 1, sharex=True, height_ratios=(1, 1.3))
    begin, end = block.spans[0].begin, block.spans[-1].end
    for span in block.spans:
        width = span.end - span.begin
        who.add_patch(plots.patch(_LIFE[span.what], (span.begin, 0), (width, 1)))
        words = span.what if span.request is None else f"{span.what}\nrequest {span.request}"
        who.text(span.begin + width / 2, 1.12, words, ha="center", va="bottom", fontsize=FONT - 1)
        if span.what == "keys and values":
            own = [(step, n) for step, n in block.filled if span.begin <= step < span.end]
            # Two outlines along the same stairs, so that neither is drawn over the other.
            stairs = [(step, n) for step, n in own for step in (step, step + 1)] + [(span.end, own[-1][1])]
            for state, edge in (("this step", 0), ("never written", block.block_size)):
                outline = [(span.begin, edge), *stairs, (span.end, edge)]
                filled.add_patch(plots.two_layers(Polygon)(outline, **plots.look(state)))
    who.set(xlim=(begin, end), ylim=(0, 1.9))
    who.set_yticks([0.5], [f"block {block.block}"])
    filled.set(xlim=(begin, end), ylim=(0, block.block_size), xlabel="step of the run")
    filled.set_ylabel(f"positions, of {block.block_size}")
    labels = {
        "this step": "holds the owner's key and value",
        "never written": "still holds what was there before",
    }
    handles = [plots.patch(state, label=f"position {words}") for state, words in labels.items()]
    plots.legend(fig, handles, "outside lower left")
    return fig


@mpl.rc_context(plots.CELLS)
def tile(picture: TilePicture) -> Figure:
    """The 512 bytes of a tile of scales as 32 lines of 16, each byte coloured by the row that owns it.

    The four bytes of one row lie side by side, so they are one patch with the row's number in it.
    """
    fig = Figure(figsize=(6.6, 6.4), layout="constrained")
    ax = fig.subplots()
    colours, square = mpl.colormaps["cividis"], plots.two_layers(Rectangle)
    for first in range(0, 512, 4):
        row, (y, x) = picture.rows[first], divmod(first, 16)
        written = picture.written[first : first + 4]
        colour = colours(row / 127)
        ax.add_patch(Rectangle((x, y), 4, 1, facecolor=colour, edgecolor=INK, linewidth=0.4))
        own = sum(written)
        # The columns that the quantiser wrote are the first ones.
        if own < 4:
            left: dict[str, Any] = {"facecolor": (1, 1, 1, 0.45), "edgecolor": INK, "hatch": "//"}
            ax.add_patch(square((x + own, y), 4 - own, 1, linewidth=0.4, **left))
        weight = "bold" if all(written) else "normal"
        ground = colour if own == 4 else (1, 1, 1)
        plots.word(ax, x + 2, y + 0.5, f"row {row}", ground, fontsize=FONT - 1, fontweight=weight)
    ax.set(xlim=(0, 16), ylim=(32, 0))
    ax.set_xticks([0.5, 3.5, 4.5, 7.5, 8.5, 11.5, 12.5, 15.5], ["0", "3", "4", "7", "8", "11", "12", "15"])
    ax.set_yticks([0.5, 7.5, 15.5, 23.5, 31.5], [f"byte {16 * y}" for y in (0, 7, 15, 23, 31)])
    ax.xaxis.tick_top()
    handle = square((0, 0), 1, 1, facecolor="none", edgecolor=INK, hatch="//", label="never written")
    plots.legend(fig, [handle], "outside lower left")
    return fig
