"""What ``staleproof audit`` shows: its table, the comparison of two audits, and the heat map."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from staleproof.triage.text import aligned

if TYPE_CHECKING:
    from staleproof.cases.finding import Finding

# How a verdict is shown in a cell; a picture has the same signs, so that colour is not needed.
SIGNS = {"holds": "+", "breaks": "X", "undefined": "u", "not run": "."}
MEANING = "  ".join(f"{sign} {verdict}" for verdict, sign in SIGNS.items())
COLOURS = {"holds": "#bfd3e6", "breaks": "#b2182b", "undefined": "#f4a582", "not run": "#f0f0f0"}


def _lines(rows: Sequence[Finding]) -> dict[tuple[str, str], dict[str, Finding]]:
    """(package and version, kernel) -> clause -> answer, in their order."""
    found: dict[tuple[str, str], dict[str, Finding]] = {}
    for row in sorted(rows, key=lambda row: row.release):
        found.setdefault((row.release, row.variant), {})[row.question] = row
    return found


def _clauses(rows: Sequence[Finding]) -> list[str]:
    from staleproof.contract.contract import CLAUSES

    asked = {row.question for row in rows}
    return [clause for clause in CLAUSES if clause in asked]


def cells(rows: Sequence[Finding]) -> tuple[list[str], list[list[str]]]:
    """Column names, and a line a subject with a sign a clause, for a notebook's table."""
    clauses = _clauses(rows)
    lines = [
        [subject, *(_sign(found.get(clause)) for clause in clauses)]
        for (_, subject), found in _lines(rows).items()
    ]
    return ["", *clauses], lines


def recorded_audits() -> list[Finding]:
    """The rows of the recorded audits (``workbook/audits``); none outside a checkout."""
    from staleproof.cases import store
    from staleproof.cases.finding import read_findings

    try:
        folder = store.checkout() / "workbook/audits"
    except store.CheckoutError:
        return []
    return [row for path in sorted(folder.glob("*.jsonl")) for row in read_findings(path, recorded=False)]


def by_machine(rows: Sequence[Finding]) -> list[Finding]:
    """Keep one machine's rows for each subject and release.

    Args:
        rows: of recorded audits.

    Returns:
        The rows, in their order: a GPU's if the subject ran on one, else those that Triton's interpreter ran,
        else one machine's rows that did not run.
    """

    def rank(row: Finding) -> tuple[bool, bool]:
        return not row.ran, row.provenance != "MEASURED"

    ran: dict[tuple[str, str], str] = {}
    for row in sorted(rows, key=rank):
        # All clauses of a kernel come from one machine.
        ran.setdefault((row.release, row.variant), row.machine["name"])
    return [row for row in rows if ran[row.release, row.variant] == row.machine["name"]]


def print_table(rows: Sequence[Finding]) -> None:
    """Print subject x clause, what each sign means, and a line for each broken clause.

    Each reason why clauses were not run is a line. So are subjects that did not run, and modules that have no
    kernel to ask.
    """
    from staleproof.contract.contract import CLAUSES, is_unasked

    unasked = [row for row in rows if is_unasked(row)]
    rows = [row for row in rows if not is_unasked(row)]
    clauses, lines = _clauses(rows), _lines(rows)
    ran = {name: found for name, found in lines.items() if any(row.ran for row in found.values())}
    if ran:
        signs = [[*name, *(_sign(found.get(clause)) for clause in clauses)] for name, found in ran.items()]
        typer.echo("\n".join(aligned(["package", "subject", *clauses], signs)))
        typer.echo(MEANING)
        typer.echo("\n".join(f"{clause}: {CLAUSES[clause]}" for clause in clauses))
    for row in rows:
        if row.verdict in ("breaks", "undefined"):
            typer.echo(f"{row.verdict}  {row.question}  {row.release} {row.variant}: {row.note}")
    # Reason -> clauses -> subjects.
    reasons: dict[str, dict[str, list[str]]] = {}
    for (_, variant), found in ran.items():
        notes = dict.fromkeys(row.note for row in found.values() if not row.ran)
        for note in notes:
            missed = " ".join(clause for clause, row in found.items() if not row.ran and row.note == note)
            reasons.setdefault(note, {}).setdefault(missed, []).append(variant)
    for reason, subjects in reasons.items():
        # The names of all subjects say nothing.
        groups = [
            missed if len(names) == len(ran) else f"{missed} ({', '.join(dict.fromkeys(names))})"
            for missed, names in subjects.items()
        ]
        typer.echo(f"not run  {', '.join(groups)}: {reason}")
    at_fault = {(row.release, row.variant) for row in unasked}
    for name, found in lines.items():
        if name not in ran and name not in at_fault:
            typer.echo(f"not run  {' '.join(name)}: {next(iter(found.values())).note}")
    for row in unasked:
        clause = f"{row.question}  " if row.question != "0" else ""
        typer.echo(f"not tested  {clause}{row.variant}: {row.note}")
    for first in [*rows, *unasked][:1]:
        count = f"{len(ran)} of {len(lines)} subjects ran"
        typer.echo(f"{first.provenance} on {first.machine['name']}: {count}")


def without_script(rows: Sequence[Finding]) -> list[Finding]:
    """The broken clauses that no counterexample shows."""
    from staleproof.contract.contract import is_unasked

    return [
        row for row in rows if row.verdict in ("breaks", "undefined") and not (row.script or is_unasked(row))
    ]


def _sign(found: Finding | None) -> str:
    return SIGNS[found.verdict] if found else ""


def write_scripts(rows: Sequence[Finding], folder: Path) -> int:
    """Write one file for each counterexample, and return how many."""
    import re

    from staleproof.cases.finding import write_lines

    shown = [row for row in rows if row.script]
    for row in shown:
        name = re.sub(r"[^A-Za-z0-9.]+", "_", f"{row.release}_{row.variant}_{row.question}")
        write_lines(folder / f"{name}.py", row.script.splitlines())
    return len(shown)


def draw(rows: Sequence[Finding], path: Path) -> None:
    """Write the heat map, subject x clause, with a sign in each cell."""
    figure = heat_map(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")


def heat_map(rows: Sequence[Finding]) -> Any:
    """The heat maps of audits, one a package, below each other; subjects that did not run are left out.

    A subject that ran on several machines has one line, of the GPU. Beside lines that a GPU measured, the
    others say that they were interpreted.

    Args:
        rows: of one package, or of several.

    Returns:
        A matplotlib figure; an axes a package.
    """
    import matplotlib as mpl
    import seaborn as sns
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    from staleproof.contract.contract import is_unasked
    from staleproof.report.plots import CELLS

    rows = [row for row in by_machine(rows) if not is_unasked(row)]
    mixed = len({row.provenance for row in rows if row.ran}) > 1
    order = [*COLOURS]
    packages: dict[str, list[tuple[str, dict[str, Finding]]]] = {}
    for (release, subject), found in _lines(rows).items():
        package, _, version = release.partition(" ")
        if any(row.ran for row in found.values()):
            interpreted = mixed and next(iter(found.values())).provenance == "INTERPRETED"
            name = " ".join(filter(None, (version, subject, "(CPU)" if interpreted else "")))
            packages.setdefault(package, []).append((name, found))
    heights = [len(lines) for lines in packages.values()] or [1]
    with mpl.rc_context(CELLS | dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8)):
        figure = Figure(figsize=(11, 0.24 * sum(heights) + 0.8 * len(heights)), layout="constrained")
        panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (package, lines) in zip(panels, packages.items(), strict=False):
            clauses = _clauses([row for _, found in lines for row in found.values()])
            verdicts = [
                [found[c].verdict if c in found else "not run" for c in clauses] for _, found in lines
            ]
            sns.heatmap(
                [[order.index(verdict) for verdict in line] for line in verdicts],
                annot=[[_sign(found.get(clause)) for clause in clauses] for _, found in lines],
                fmt="",
                annot_kws={"fontsize": 8},
                cbar=False,
                ax=axes,
                cmap=ListedColormap([*COLOURS.values()]),
                vmin=-0.5,
                vmax=3.5,
                linewidths=0.5,
                xticklabels=clauses,
                yticklabels=[name for name, _ in lines],
            )
            axes.set_title(f"{package}:  {MEANING}", fontsize=9, loc="left")
            axes.xaxis.tick_top()
            axes.tick_params(rotation=0)
    return figure


def picture(rows: Sequence[Finding], package: str) -> None:
    """Show the heat map of one package in a notebook."""
    from staleproof.contract.contract import package_of
    from staleproof.report import plots

    mine = [row for row in rows if package_of(row) == package]
    ran = {(row.release, row.variant) for row in mine if row.ran}
    counts = ", ".join(f"{sum(row.verdict == v for row in by_machine(mine))} {v}" for v in SIGNS)
    plots.picture(
        heat_map(mine),
        f"The padding contract of {package}, {len(ran)} subjects that ran by clause: {counts}.",
        "RECORDED: one square is one clause of one subject; its sign says the verdict, no unit",
    )


def _read(path: Path) -> list[Finding]:
    """The rows of an audit.

    Raises:
        RunFileError: it cannot be read, or has none.
    """
    from staleproof.cases.finding import RunFileError, read_findings

    rows = read_findings(path, recorded=False)
    if not rows:
        raise RunFileError(f"{path}: expected an audit, got an empty file")
    return rows


def print_changes(before: Path, after: Path) -> int:
    """Print what changed between two audits; the exit code is 1 if a clause got worse.

    One audit given twice is compared with itself: what each release in it changed since the one before.
    """
    from staleproof.contract.contract import BREAKS, between_releases, compare

    rows = _read(before)
    same = before.resolve() == after.resolve()
    changes = between_releases(rows) if same else compare(rows, _read(after))
    worse = sum(change.after.verdict == BREAKS for change in changes)
    typer.echo(f"{len(changes)} change{'s' * (len(changes) != 1)}, {worse} for the worse")
    for old, row in changes:
        version = f" ({old.release.partition(' ')[2]})" if old and " " in old.release else ""
        was = f"{old.verdict}{version}" if old else "not asked"
        name = f"{row.question}  {row.release} {row.variant}"
        typer.echo(f"{name}: {was} -> {row.verdict}" + (f": {row.note}" if row.note else ""))
    return int(worse > 0)
