"""Figures for the notebook of incident 2: the headroom of the reported server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from staleproof.evidence.ledger import Usage, size_text
from staleproof.incidents.decode_buffer.allocator import GIB
from staleproof.incidents.decode_buffer.setups import OFF, REPORT, ServerCase, run_server

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Headroom(NamedTuple):
    """What takes the memory outside the KV cache if every layer keeps a decode buffer, in bytes.

    Attributes:
        layer: one layer's buffer.
        buffers: the buffers of all layers.
        fragments: the unused part of segments that contain a buffer.
        graph: private pool of the captured step.
        available: device memory that the KV cache leaves.
        needed: workspace of a prefill.
        verdict: whether the server dies or lives.
    """

    layer: int
    buffers: int
    fragments: int
    graph: int
    available: int
    needed: int
    verdict: str

    @property
    def left(self) -> int:
        """Bytes left to serve with."""
        return self.available - self.buffers - self.fragments - self.graph

    def __str__(self) -> str:
        return (
            f"{size_text(self.layer)} x {self.buffers // self.layer} layers = "
            f"{size_text(self.buffers)}, headroom {size_text(self.left)}, a prefill needs "
            f"{size_text(self.needed)}: the server {self.verdict}"
        )


def headroom(batch: int = 2048, heads: int = 128, layers: int = 61, utilisation: float = 0.9) -> Headroom:
    """The reported server with a buffer a layer and these sizes, always on simulated memory.

    Raises:
        ValueError: a size below 1, or a utilisation outside (0, 1] or too small for the weights.
    """
    config = replace(
        REPORT,
        batch=batch,
        heads=heads,
        layers=layers,
        utilisation=utilisation,
        tokens=max(batch, REPORT.tokens),
    )
    outcome = run_server(ServerCase(OFF, config), "cpu")
    planned, decoded = outcome.usages["kv_cache"], outcome.usages["warm_up"]
    captured = outcome.usages.get("capture", decoded)
    buffers = config.layers * config.decode_out_bytes
    return Headroom(
        layer=config.decode_out_bytes,
        buffers=buffers,
        fragments=outcome.taken_bytes() - buffers,
        graph=_in_use(captured) - _in_use(decoded),
        available=config.total_bytes - _in_use(planned),
        needed=config.workspace_bytes,
        verdict=outcome.verdict,
    )


def _in_use(usage: Usage) -> int:
    return usage.used - usage.releasable


def headroom_figure(cases: Mapping[str, Headroom]) -> Figure:
    """One bar a case: what fills the memory that the KV cache leaves.

    The headroom line shows how far a bar may reach if a prefill is to fit.
    """
    import seaborn
    from matplotlib.figure import Figure

    ink = "#808080"
    fig = Figure(figsize=(8, 1.3 + 0.4 * len(cases)), facecolor="none", layout="constrained")
    ax = fig.add_subplot(facecolor="none")
    names = list(cases)
    foot = [0.0] * len(names)
    hatches = {"buffers": "", "fragments": "///", "graph": "..."}
    colours = seaborn.color_palette("colorblind", len(hatches))
    for colour, (part, hatch) in zip(colours, hatches.items(), strict=True):
        widths = [getattr(case, part) / GIB for case in cases.values()]
        ax.barh(names, widths, left=foot, color=colour, hatch=hatch, label=part, height=0.6)
        foot = [a + b for a, b in zip(foot, widths, strict=True)]
    for y, case in enumerate(cases.values()):
        ends = (case.available - case.needed) / GIB
        ax.plot([ends, ends], [y - 0.4, y + 0.4], color=ink, linewidth=3)
    ax.plot([], [], color=ink, linewidth=3, label="headroom line")
    ax.invert_yaxis()
    ax.set_xlabel("GiB outside the KV cache", color=ink)
    ax.tick_params(colors=ink, labelsize=8)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(ink)
    fig.legend(loc="outside upper left", ncols=4, fontsize=8, frameon=False, labelcolor=ink)
    return fig
