"""The plugin in service, for the report: what faults in its hooks came to, and the curves of the soaks.

>>> kept = {"a hook": {"at the first call": "vLLM's own; 1 line", "while traced": "vLLM's own; 0 lines"}}
>>> fault_counts(kept)
{'at the first call': {"vLLM's own": 1}, 'while traced': {"vLLM's own": 1}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from staleproof.check import require
from staleproof.report.timeline import INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Curve of a soak -> its label and the factor to its unit.
CURVES = {
    "pending": ("block ids nobody took", 1),
    "rss_kib": ("resident memory, MiB more than at the start", 1 / 1024),
    "step_us": ("median step, us", 1),
    "log_lines": ("log lines", 1),
}
Faults = Mapping[str, Mapping[str, str]]
Soak = Mapping[str, Any]


def fault_counts(faults: Faults) -> dict[str, dict[str, int]]:
    """Fault -> what vLLM returned -> in how many hooked functions.

    Args:
        faults: hooked function -> fault -> outcome (``workbook/plugin-faults.json``).
    """
    counts: dict[str, dict[str, int]] = {}
    for outcomes in faults.values():
        for fault, outcome in outcomes.items():
            said = outcome.partition(";")[0]
            of_fault = counts.setdefault(fault, {})
            of_fault[said] = of_fault.get(said, 0) + 1
    return counts


def soak_figure(soak: Soak) -> Figure:
    """The curves of one soak with the plugin off and on, over the requests that have left.

    Args:
        soak: ``off`` and ``on``, each with ``curves`` (``workbook/soak-cpu.json``, ``soak-engine.json``).

    Raises:
        ValueError: one of the two is missing.
    """
    from matplotlib.figure import Figure

    require({"off", "on"} <= set(soak), "soak", "the runs off and on", sorted(soak))
    fig = Figure(figsize=(9, 2.4), facecolor="none", layout="constrained")
    for ax, (name, (label, factor)) in zip(fig.subplots(1, len(CURVES)), CURVES.items(), strict=True):
        for state, colour, dash in (("off", "#D55E00", "--"), ("on", "#0072B2", "-")):
            curves = soak[state]["curves"]
            start = curves[name][0] if name == "rss_kib" else 0
            values = [(value - start) * factor for value in curves[name]]
            ax.plot(curves["requests"], values, color=colour, linestyle=dash, label=f"plugin {state}")
        ax.set_title(label, color=INK, fontsize=8)
        ax.set_xlabel("requests", color=INK, fontsize=8)
        ax.set_ylim(0, None)
        ax.set_facecolor("none")
        ax.tick_params(colors=INK, labelsize=7)
        for spine in ax.spines.values():
            spine.set_color(INK)
    fig.axes[0].legend(frameon=False, fontsize=7, labelcolor=INK)
    return fig


def section(faults: Faults | None, soaks: Mapping[str, Soak]) -> str:
    """The body of the report's section.

    Args:
        faults: as in :func:`fault_counts`, or ``None``.
        soaks: title -> soak.
    """
    from markupsafe import Markup

    from staleproof.report import plots
    from staleproof.report.page import pictures
    from staleproof.report.page.tables import table

    parts = []
    if faults:
        rows = [
            (fault, ", ".join(f"{said}: {count}" for said, count in outcomes.items()))
            for fault, outcomes in fault_counts(faults).items()
        ]
        about = (
            "RECORDED. Every hook of every patch raises, and this is what vLLM's caller got, in how many of "
            "the hooked functions."
        )
        parts.append(table(("a hook raises", "the call returned"), rows, caption=about, row_heads=True))
    for title, soak in soaks.items():
        ends = "; ".join(
            f"{label}: {_last(soak, 'off', name) * factor:.4g} with the plugin off, "
            f"{_last(soak, 'on', name) * factor:.4g} with it on"
            for name, (label, factor) in CURVES.items()
        )
        parts.append(Markup("<h3>{}</h3>").format(title))
        parts.append(
            pictures.figure(
                plots.svg(soak_figure(soak)).data,
                alt=f"Four curves over the requests that have left. At the end {ends}.",
                caption=f"RECORDED. At the end {ends}.",
            )
        )
    return Markup("\n").join(parts)


def _last(soak: Soak, state: str, name: str) -> float:
    """The last value of a curve, for resident memory less the first."""
    values = soak[state]["curves"][name]
    return float(values[-1] - (values[0] if name == "rss_kib" else 0))
