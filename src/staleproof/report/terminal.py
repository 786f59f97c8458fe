"""What the commands print. Needs rich, and nothing of the extra ``workbook``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from staleproof import device
from staleproof.harness import environment, predictions, recorded
from staleproof.harness.findings import Finding
from staleproof.harness.recorded import Run
from staleproof.report import matrix

Say = Callable[[str], None]


@contextmanager
def progress() -> Iterator[Say]:
    """A status line in a terminal, nothing elsewhere."""
    with Console().status("") as status:
        yield lambda line: status.update(Text(line))


def print_machine(more: Sequence[environment.Capability]) -> None:
    """The machine, the packages, and each capability with its version or why it is missing.

    Args:
        more: capabilities to print after those of :func:`environment.capabilities`.
    """
    machine = device.machine()
    rows = {
        "machine": machine.name,
        "device": machine.kind,
        "provenance": device.provenance(),
        "python": machine.python,
        **environment.packages(),
    }
    for name, value in rows.items():
        typer.echo(f"{name:<20}{value or 'not installed'}")
    typer.echo("")
    for found in (*environment.capabilities(), *more):
        typer.echo(f"{'yes ' if found.available else 'skip'}  {found.name:<20}{found.detail}")
    for warning in environment.warnings():
        typer.echo(f"\nwarning: {warning}")


def finding_text(found: Finding) -> str:
    """One finding as one line.

    >>> from staleproof.harness.findings import not_run
    >>> finding_text(not_run("an_incident", "empty row", "theirs", "needs SM100")).split("  ")[1]
    'an_incident, empty row, theirs: not run: needs SM100'
    """
    asked = f"{found.grade}, {found.of}" if found.of else found.grade
    key = f"{found.provenance}  {found.incident}, {found.question}, {found.variant}: "
    if not found.ran:
        return f"{key}{found.verdict}: {found.note}"
    beside = f" (expected {found.expected})" if found.failed else ""
    numbers = ", ".join(f"{name} {_number(value)}" for name, value in found.numbers.items())
    return f"{key}{found.verdict}{beside}  ({asked})" + (f"  [{numbers}]" if numbers else "")


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def row_text(row: Mapping[str, Any]) -> str:
    """One measurement as one line."""
    return (
        f"{row['kernel']}, {row['provider']}, {row['mode']}, {row['x_name']} {row['x_value']}: "
        f"{row['p50']:.4g} {row['unit']} (p20 {row['p20']:.4g}, p80 {row['p80']:.4g})"
    )


def print_verdicts(findings: Sequence[Finding], runs: Sequence[Run]) -> None:
    """Print the verdict matrix, and for each recorded run how many verdicts it shares."""
    console = Console()
    typer.echo("")
    if console.is_terminal:
        for table in matrix.tables(findings):
            console.print(table)
        for line in (*matrix.absences(findings), matrix.counts(findings)):
            typer.echo(line)
    else:
        typer.echo(matrix.text(findings))
    incidents = {found.incident for found in findings}
    for run in runs:
        beside = recorded.compare(findings, (f for f in run.findings if f.incident in incidents))
        typer.echo(f"RECORDED  {run.title}\n          {beside.summary}")


def print_comparison(first: Run, second: Run) -> bool:
    """Print where two runs differ, verdicts before timings. Returns whether all verdicts match."""
    typer.echo(f"first   {first.title}\nsecond  {second.title}\n")
    verdicts = recorded.compare(first.findings, second.findings)
    for key, (a, b) in verdicts.mismatch.items():
        typer.echo(f"mismatch        {', '.join(key)}: {a} / {b}")
    for where, keys in (
        ("only in first", verdicts.only_first),
        ("only in second", verdicts.only_second),
        ("in neither", verdicts.neither),
    ):
        for key in keys:
            typer.echo(f"{where:<14}  {', '.join(key)}")
    typer.echo(verdicts.summary)
    timings = recorded.compare_timings(first, second)
    if timings:
        typer.echo("\ntimings, first -> second (second / first)")
    for row, ratio in timings:
        typer.echo(f"{row_text(row)} -> {row['p50_second']:.4g} ({ratio:.2f})")
    return not verdicts.mismatch


def print_predicted(run: Run) -> bool:
    """Print what became of each prediction, the refuted first. Returns whether none is refuted."""
    found = predictions.of_run(predictions.read(), run)
    typer.echo(f"{run.title}\n")
    for outcome in found:
        typer.echo(outcome.text)
    states = [outcome.state for outcome in found]
    typer.echo(", ".join(f"{states.count(state)} {state}" for state in predictions.STATES))
    return predictions.REFUTED not in states
