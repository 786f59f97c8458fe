"""The commands about recorded runs and timings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from staleproof.cli.common import Device, findings_path, naming, obtain
from staleproof.incidents.registry import INCIDENTS


def record(
    out: Annotated[Path | None, typer.Option(help="Folder of runs; the run goes to OUT/<machine>/.")] = None,
    device: Device = "auto",
) -> None:
    """Record all findings and timings of this machine.

    All or nothing: a run with an unexpected verdict is not recorded, and an earlier recording stays.
    Timings are taken on a GPU only.

    \b
    Examples:
      staleproof record                  to workbook/runs/<machine>/
      staleproof record --out my-runs

    Exit code 1: a verdict is not as expected, or a kernel of ours gave a wrong result.
    """
    from staleproof import device as devices
    from staleproof import runs as store
    from staleproof.report import terminal

    on_gpu = devices.select(device) == "cuda"
    kept = findings_path()
    store.check_writable(kept)
    folder = (out or store.runs_folder()) / devices.machine().slug
    with naming("--out"):
        store.open_for_writing(folder).rmdir()
    findings = obtain([*INCIDENTS], device, kept, lambda found: terminal.print_verdicts(found, [], None))
    if any(found.failed for found in findings):
        typer.echo(f"staleproof: not recorded, a verdict is not as expected: {kept}", err=True)
        raise typer.Exit(1)
    rows = []
    for path in store.benchmarks().values() if on_gpu else ():
        for row in _measure(path):
            terminal.say(terminal.row_text(row))
            rows.append(row)
    store.write(folder, findings, rows)
    terminal.say(f"recorded: {folder} ({len(findings)} findings, {len(rows)} measurements)")


def compare(
    first: Annotated[str, typer.Argument(help="A run folder, or a recorded machine's name.")],
    second: Annotated[str, typer.Argument(help="The one to compare with it.")],
) -> None:
    """Compare two recorded runs.

    The first line says whether they agree; then come verdicts that differ, then timings.

    \b
    Examples:
      staleproof compare nvidia-h200 my-runs/nvidia-b200

    Exit code 1: a verdict differs.
    """
    from staleproof import runs as store
    from staleproof.report import terminal

    with naming("first"):
        run = store.find(first)
    with naming("second"):
        other = store.find(second)
    if not terminal.print_comparison(run, other):
        raise typer.Exit(1)


def _measure(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one benchmark; exit with 1 if a kernel of ours gave a wrong result."""
    from staleproof.measure import WrongResult, benchmark_rows
    from staleproof.report import terminal

    with terminal.progress() as progress:
        progress(f"bench {path.stem}")
        try:
            yield from benchmark_rows(path)
        except WrongResult as error:
            typer.echo(f"staleproof: {path.stem}: no speed for a wrong result: {error}", err=True)
            raise typer.Exit(1) from error
