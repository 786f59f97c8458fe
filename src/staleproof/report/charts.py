"""Recorded times in a notebook: one sentence, and one chart in microseconds with a label on each mark.

The rows come from recorded runs, so nothing is timed here. A provider that is recorded as a limit (a
memset of the same bytes, say) is called a reference: a kernel that keeps its result in the cache can be
faster than it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.figure import Figure

from staleproof import runs as store
from staleproof.check import require
from staleproof.report import plots
from staleproof.report.plots import INK

_OURS, _PEER, _REFERENCE = ("o", "#0072B2"), ("s", "#D55E00"), ("D", INK)


def _is_reference(name: str) -> bool:
    return name.startswith("limit: ")


def provider_name(name: str) -> str:
    """The name under which a provider's times are shown.

    >>> provider_name("limit: cudaMemsetAsync, n on the host")
    'reference: cudaMemsetAsync, n on the host'
    """
    return f"reference: {name.removeprefix('limit: ')}" if _is_reference(name) else name


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _span(values: Sequence[float], say: Callable[[float], str] = _number) -> str:
    low, high = say(min(values)), say(max(values))
    return low if low == high else f"{low} to {high}"


def conclusion(rows: Sequence[Mapping[str, Any]], sentence: str, *, ours: str, peer: str) -> str:
    """Fill a sentence with the recorded times of two providers, over the cases that both were timed in.

    Args:
        rows: lines of ``measurements.jsonl`` of one kernel, mode and machine.
        sentence: ``{ours}`` and ``{peer}`` become times, ``{times}`` how many times as long the
            peer takes, ``{more}`` by how many percent ours is longer.
        ours: provider.
        peer: provider that ours is compared with.

    Raises:
        ValueError: no case in which both were timed.

    >>> row = {"x_value": 1, "unit": "us"}
    >>> rows = [row | {"provider": "a", "p50": 2.0}, row | {"provider": "b", "p50": 5.0}]
    >>> conclusion(rows, "a takes {ours}, b {times} times as long", ours="a", peer="b")
    'a takes 2 us, b 2.5 times as long'
    """
    p50 = {(row["provider"], row["x_value"]): float(row["p50"]) for row in rows}
    cases = [x for name, x in p50 if name == ours and (peer, x) in p50]
    require(bool(cases), "rows", f"a case with {ours} and {peer}", sorted({name for name, _ in p50}))
    own, other = ([p50[name, x] for x in cases] for name in (ours, peer))
    unit = rows[0]["unit"]
    ratios = [b / a for a, b in zip(own, other, strict=True)]
    return sentence.format(
        ours=f"{_span(own)} {unit}",
        peer=f"{_span(other)} {unit}",
        times=_span(ratios),
        more=_span([1 / r - 1 for r in ratios], "{:+.1%}".format),
    )


@mpl.rc_context(plots.STYLE)
def times(rows: Sequence[Mapping[str, Any]], ours: str = "staleproof") -> Figure:
    """Recorded medians as one chart: a line for each provider and case, its time written beside the mark.

    Args:
        rows: lines of ``measurements.jsonl`` of one kernel, mode and machine.
        ours: the provider drawn first and as a filled circle.

    Raises:
        ValueError: no rows, or rows of several machines, modes or units.
    """
    require(bool(rows), "rows", "at least one", 0)
    for field in ("machine", "date", "mode", "unit", "x_name"):
        of = sorted({str(row[field]) for row in rows})
        require(len(of) == 1, "rows", f"one {field}", of)
    first = rows[0]
    lines: list[Mapping[str, Any] | None] = []
    labels: list[str] = []
    for x in sorted({row["x_value"] for row in rows}):
        own = sorted(
            (row for row in rows if row["x_value"] == x),
            key=lambda row: (row["provider"] != ours, _is_reference(row["provider"]), row["p50"]),
        )
        lines += [None, *own]
        labels += [f"{first['x_name']} {x}", *(f"{provider_name(row['provider'])}  " for row in own)]
    fig = Figure(figsize=(7.4, 1.1 + 0.21 * len(lines)), layout="constrained")
    ax = fig.subplots()
    for y, row in enumerate(lines):
        if row is None:
            continue
        reference = _is_reference(row["provider"])
        mark, colour = _OURS if row["provider"] == ours else _REFERENCE if reference else _PEER
        # What is recorded are three percentiles: their median is the mark, their extent the interval.
        sns.pointplot(
            x=[row["p20"], row["p50"], row["p80"]],
            y=[y] * 3,
            estimator="median",
            errorbar=("pi", 100),
            native_scale=True,
            orient="h",
            color=colour,
            marker=mark,
            markersize=5,
            linewidth=1.5,
            ax=ax,
            **({"markerfacecolor": "none"} if reference else {}),
        )
        text = f"{_number(row['p50'])} {row['unit']}"
        ax.annotate(text, (row["p80"], y), (7, 0), textcoords="offset points", va="center")
    ax.set(xscale="log", ylim=(len(lines) - 0.4, -0.8))
    low, high = min(row["p20"] for row in rows), max(row["p80"] for row in rows)
    ax.set_xlim(low * 0.8, high * max(1.6, (high / low) ** 0.22))
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if high / low < 5 else (1, 2, 5) if high / low < 50 else (1, 3)
    ticks = [a * 10.0**e for e in range(-2, 7) for a in steps if low * 0.8 <= a * 10.0**e <= high * 1.2]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel(f"{first['unit']} a call: median, and the line from the 20th to the 80th percentile")
    ax.set_yticks(range(len(lines)), labels)
    fig.suptitle(f"RECORDED {first['machine']}, {first['date']}\n{first['mode']}")
    for label, row in zip(ax.get_yticklabels(), lines, strict=True):
        label.set_fontweight("bold" if row is None else "normal")
    ax.tick_params(axis="y", length=0)
    return fig


def timed(kernel: str, mode: str, sentence: str, *, peer: str, ours: str = "staleproof") -> None:
    """Show the newest recorded times of one kernel: a sentence, and a chart of all providers.

    Args:
        kernel: as in ``measurements.jsonl``.
        mode: as there; the other modes are in the file.
        sentence: see :func:`conclusion`.
        peer: provider that ours is compared with in the sentence.
        ours: our provider.
    """
    runs = store.read_all(on_error=lambda error: print(f"not shown: {error}"))
    for run in sorted(runs, key=lambda run: run.date, reverse=True):
        rows = [r for r in run.measurements if r["kernel"] == kernel and r["mode"] == mode]
        if {ours, peer} <= {r["provider"] for r in rows}:
            text, shown = conclusion(rows, sentence, ours=ours, peer=peer), run.only(rows=rows)
            print(f"RECORDED {shown.title}: {text}")
            unit = rows[0]["unit"]
            caption = f"RECORDED {shown.machine}, {shown.date}: one mark a provider, {unit} a call; {mode}"
            plots.picture(times(rows, ours), f"Times of {kernel}: {text}.", caption)
            return
    print(f"no recorded timing of {kernel} ({mode}): staleproof record on a GPU machine makes one")
