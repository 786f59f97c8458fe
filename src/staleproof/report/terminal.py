"""What the commands print. Needs rich, and nothing of the extra ``workbook``.

All of it goes through one console: a line printed past the one that draws the status line would be
written into that line.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from staleproof import device, machine
from staleproof import runs as store
from staleproof.report import conclusion, matrix, words
from staleproof.triage.text import wrapped

if TYPE_CHECKING:
    from staleproof.lab import Finding
    from staleproof.runs import Run

Say = Callable[[str], None]


@cache
def console() -> Console:
    """The one console of this process."""
    return Console(highlight=False)


def width() -> int | None:
    """Columns of the terminal; ``None`` if the output goes elsewhere."""
    return console().width if console().is_terminal else None


def say(text: str = "") -> None:
    """Print lines: in a terminal wrapped between words, elsewhere as they are."""
    lines = text.split("\n")
    if console().is_terminal:
        lines = [part for line in lines for part in _wrapped(line)]
    console().print(Text("\n".join(lines)), soft_wrap=True)


def _wrapped(line: str) -> list[str]:
    """A line in pieces that fit the terminal. What continues it is indented; a path is not cut."""
    width = console().width
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return wrapped(line, width, "", indent) if len(line) > width else [line]


@contextmanager
def progress() -> Iterator[Say]:
    """A status line with the elapsed time in a terminal, nothing elsewhere."""
    what = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
    columns = SpinnerColumn(), what, TimeElapsedColumn()
    # Elsewhere than in a terminal rich would write an empty line when it ends.
    shown = Progress(*columns, console=console(), transient=True, expand=True, refresh_per_second=4)
    with shown if console().is_terminal else nullcontext():
        task = shown.add_task("", total=None)
        yield lambda line: shown.update(task, description=line)


def print_machine(more: Sequence[machine.Capability]) -> None:
    """The machine, the packages, and each capability with its version or why it is missing.

    Args:
        more: capabilities to print after those of :func:`machine.capabilities`.
    """
    this = device.machine()
    rows = {
        "machine": this.name,
        "device": this.kind,
        "provenance": device.provenance(),
        "python": this.python,
        **machine.packages(),
    }
    for name, value in rows.items():
        say(f"{name:<20}{value or 'not installed'}")
    say()
    for found in (*machine.capabilities(), *more):
        say(f"{'yes ' if found.available else 'skip'}  {found.name:<20}{found.detail}")


def finding_text(found: Finding) -> str:
    """One finding as one line.

    >>> from staleproof.lab import Key
    >>> from staleproof.lab import finding, not_run
    >>> key = Key("an_incident", "empty row", "theirs")
    >>> finding_text(finding(key, not_run("needs SM100"))).split("  ")[1]
    'an_incident, empty row, theirs: not run: needs SM100'
    """
    evidence = f"{found.grade}, {found.of}" if found.of else found.grade
    key = f"{found.provenance}  {found.key.text}: "
    if not found.ran:
        return f"{key}{found.verdict}: {found.note}"
    beside = f" (expected {found.expected})" if found.failed else ""
    numbers = ", ".join(f"{name} {_number(value)}" for name, value in found.numbers.items())
    three = f"  {found.three.text}" if found.three else ""
    return f"{key}{found.verdict}{beside}{three}  ({evidence})" + (f"  [{numbers}]" if numbers else "")


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def row_text(row: Mapping[str, Any]) -> str:
    """One measurement as one line."""
    return (
        f"{row['kernel']}, {row['provider']}, {row['mode']}, {row['x_name']} {row['x_value']}: "
        f"{row['p50']:.4g} {row['unit']} (p20 {row['p20']:.4g}, p80 {row['p80']:.4g})"
    )


def print_verdicts(findings: Sequence[Finding], runs: Sequence[Run], verbose: bool | None = False) -> None:
    """Print the conclusion about each incident, then for each recorded run how many verdicts it shares.

    Args:
        findings: of one run.
        runs: recorded runs to compare with.
        verbose: print the verdict matrices after it, and each question that was not run. ``None``: as
            false, for a command without ``-v``.
    """
    say()
    wide = console().width if console().is_terminal else 100
    say(conclusion.text(findings, wide, hint=verbose is not None))
    incidents = {found.incident for found in findings}
    for run in runs:
        own = [f for f in run.findings if f.incident in incidents]
        beside = store.compare(findings, own)
        if beside.match or beside.mismatch:
            say(f"RECORDED  {run.only(own).title}\n          {beside.summary} (first: here)")
            for key, (here, there) in beside.mismatch.items():
                say(f"          {key.text}: here {here}, recorded {there}")
    if not verbose:
        return
    say()
    if console().is_terminal:
        for table in matrix.tables(findings, wide):
            console().print(table)
        say("\n".join(matrix.absences(findings)))
    else:
        say(matrix.text(findings))


def print_words(findings: Sequence[Finding]) -> None:
    """Print what users read without a remedy and with it, side by side, where a real model answers.

    Args:
        findings: of one run.
    """
    wide = console().width if console().is_terminal else 100
    column = (wide - 5) // 2
    for found in findings:
        for number, (prompt, *pair) in enumerate(words.read_by_users(found)):
            if number == 0:
                say(f"\n{found.key.text}: what users read without it, and with it")
            say(f"  {prompt}")
            cells = [textwrap.wrap(text, column) or [""] for text in pair]
            for left, right in itertools.zip_longest(*cells, fillvalue=""):
                say(f"    {left:<{column}} {right}".rstrip())


def print_kept(path: Path, findings: Sequence[Finding]) -> None:
    """Print where the findings of a run are, and of which source those beside them in the file are."""
    here = Path.cwd()
    say(f"findings  {path.relative_to(here) if path.is_relative_to(here) else path}")
    new = {found.key for found in findings}
    for line in store.origins(found for found in store.read_kept(path) if found.key not in new):
        say(f"kept      {line}")


def print_comparison(first: Run, second: Run) -> bool:
    """Print whether two runs say the same, and where not: verdicts before timings.

    Returns:
        Whether all verdicts that both have are the same.
    """
    verdicts = store.compare(first.findings, second.findings)
    timings = store.compare_timings(first, second)
    same = "the same verdicts" if verdicts.match else "no case ran in both"
    if verdicts.mismatch:
        same = "DIFFERENT VERDICTS"
    say(f"{same}: {verdicts.summary}")
    if timings:
        ratios = [ratio for _, ratio in timings]
        low, high = min(ratios), max(ratios)
        say(f"{len(ratios)} timings, second / first: {low:.2f} to {high:.2f}, median {median(ratios):.2f}")
    say(f"first   {first.title}\nsecond  {second.title}\n")
    for key, (a, b) in verdicts.mismatch.items():
        say(f"mismatch        {key.text}: {a} / {b}")
    for where, keys in (
        ("only in first", verdicts.only_first),
        ("only in second", verdicts.only_second),
        ("in neither", verdicts.neither),
    ):
        for key in keys:
            say(f"{where:<14}  {key.text}")
    if timings:
        say("\ntimings, first -> second (second / first)")
    for row, ratio in timings:
        say(f"{row_text(row)} -> {row['p50_second']:.4g} ({ratio:.2f})")
    return not verdicts.mismatch
