"""What ``staleproof audit`` shows: its table, and the same as a heat map; and the archived audits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from staleproof.triage.text import aligned

if TYPE_CHECKING:
    from staleproof.contract.contract import Answer

# How a verdict is shown in a cell; a picture has the same signs, so that colour is not needed.
SIGNS = {"holds": "+", "breaks": "X", "undefined": "u", "not run": "."}
MEANING = "  ".join(f"{sign} {verdict}" for verdict, sign in SIGNS.items())
# A line of its own says why.
SIGNS |= {"not tested": SIGNS["not run"]}
COLOURS = {"holds": "#bfd3e6", "breaks": "#b2182b", "undefined": "#f4a582", "not run": "#f0f0f0"}
COLOURS |= {"not tested": COLOURS["not run"]}
ARCHIVE = "workbook/audits/2026-11-22.jsonl"


def _kernels(answers: Iterable[Answer]) -> dict[str, dict[str, Answer]]:
    """Kernel -> clause -> answer, in their order; without modules that have no kernel to ask."""
    found: dict[str, dict[str, Answer]] = {}
    for one in answers:
        found.setdefault(one.kernel, {})[one.clause] = one
    return {
        name: own for name, own in found.items() if {one.verdict for one in own.values()} != {"not tested"}
    }


def _clauses(answers: Iterable[Answer]) -> list[str]:
    from staleproof.contract.contract import CLAUSES

    present = {clause for found in _kernels(answers).values() for clause in found}
    return [clause for clause in CLAUSES if clause in present]


def cells(answers: Sequence[Answer]) -> tuple[list[str], list[list[str]]]:
    """Column names, and a line a kernel with a sign a clause."""
    clauses = _clauses(answers)
    return ["", *clauses], [
        [kernel, *(SIGNS[found[c].verdict] if c in found else "" for c in clauses)]
        for kernel, found in _kernels(answers).items()
    ]


def print_table(answers: Sequence[Answer]) -> None:
    """Print kernel x clause, what each sign means, and a line for each broken clause.

    A line each is printed for what a clause that holds was not tried with, for each reason why clauses were
    not run, and for each module that has no kernel to ask.
    """
    from staleproof import device
    from staleproof.contract.contract import CLAUSES

    kernels = _kernels(answers)
    if kernels:
        names, lines = cells(answers)
        typer.echo("\n".join(aligned(["kernel", *names[1:]], lines)))
        typer.echo(MEANING)
        typer.echo("\n".join(f"{clause}: {CLAUSES[clause]}" for clause in names[1:]))
    for one in answers:
        if one.verdict in ("breaks", "undefined"):
            typer.echo(f"{one.verdict}  {one.clause}  {one.kernel}: {one.note}")
    for verdict, word in (("holds", "holds, but"), ("not run", "not run")):
        # Note -> clauses -> kernels.
        notes: dict[str, dict[str, list[str]]] = {}
        for kernel, found in kernels.items():
            shown = {clause: one.note for clause, one in found.items() if one.verdict == verdict and one.note}
            for note in dict.fromkeys(shown.values()):
                same = " ".join(clause for clause, other in shown.items() if other == note)
                notes.setdefault(note, {}).setdefault(same, []).append(kernel)
        for note, groups in notes.items():
            # The names of all kernels say nothing.
            of = [
                clauses if len(names) == len(kernels) else f"{clauses} ({', '.join(names)})"
                for clauses, names in groups.items()
            ]
            typer.echo(f"{word}  {', '.join(of)}: {note}")
    for one in answers:
        if one.verdict == "not tested":
            typer.echo(f"not tested  {one.kernel}: {one.note}")
    idle = {"not run", "not tested"}
    ran = sum(any(one.verdict not in idle for one in found.values()) for found in kernels.values())
    where = f"{device.provenance()} on {device.machine().name}"
    typer.echo(f"{where}: {ran} of {len(kernels)} kernels ran")


def without_script(answers: Sequence[Answer]) -> list[Answer]:
    """The broken clauses that no reproducer shows."""
    return [one for one in answers if one.verdict in ("breaks", "undefined") and not one.script]


def write_json(answers: Sequence[Answer], path: Path) -> None:
    """Write an object a line: kernel, clause, verdict and note, and the machine."""
    from staleproof import device

    where = {"machine": device.machine().name, "provenance": str(device.provenance())}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(one.row() | where)}\n" for one in answers))


def draw(answers: Sequence[Answer], path: Path) -> None:
    """Write the heat map, kernel x clause, with a sign in each cell."""
    figure = heat_map(answers)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")


def heat_map(answers: Sequence[Answer]) -> Any:
    """The table as a matplotlib figure."""
    import matplotlib as mpl
    import seaborn as sns
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    from staleproof.report.plots import CELLS

    order, kernels, clauses = [*COLOURS], _kernels(answers), _clauses(answers)
    verdicts = [[f[c].verdict if c in f else "not run" for c in clauses] for f in kernels.values()]
    with mpl.rc_context(CELLS | dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8)):
        figure = Figure(figsize=(11, 0.24 * len(kernels) + 0.8), layout="constrained")
        axes = figure.subplots()
        sns.heatmap(
            [[order.index(verdict) for verdict in line] for line in verdicts],
            annot=[line[1:] for line in cells(answers)[1]],
            fmt="",
            annot_kws={"fontsize": 8},
            cbar=False,
            ax=axes,
            cmap=ListedColormap([*COLOURS.values()]),
            vmin=-0.5,
            vmax=len(order) - 0.5,
            linewidths=0.5,
            xticklabels=clauses,
            yticklabels=[*kernels],
        )
        axes.set_title(MEANING, fontsize=9, loc="left")
        axes.xaxis.tick_top()
        axes.tick_params(rotation=0)
    return figure


def archived() -> list[dict[str, Any]]:
    """The archived audits of other packages' kernels; none outside a checkout.

    Returns:
        One object a kernel, release and machine that ran it: package, version, kernel, machine, provenance;
        ``answers``, clause -> verdict; ``notes``, clause -> note of what is broken or left to the caller.
    """
    from staleproof import runs

    try:
        lines = (runs.checkout() / ARCHIVE).read_text().splitlines()
    except runs.CheckoutError:
        return []
    return [json.loads(line) for line in lines]
