"""The commands about recorded runs and timings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from staleproof.cli.common import BadInputError, Device, findings_path, naming, obtain
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
    from staleproof.cases import store
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
    first: Annotated[str, typer.Argument(help="A run folder, a recorded machine's name, or a .jsonl audit.")],
    second: Annotated[str | None, typer.Argument(help="The one to compare with it.")] = None,
    predictions: Annotated[
        bool, typer.Option("--predictions", help="Compare with workbook/predictions.json instead.")
    ] = False,
) -> None:
    """Compare two recorded runs, or two audits.

    The first line says whether they agree; then come verdicts that differ, then timings. With
    --predictions one run of an SM100 GPU is compared with what was predicted for it.

    \b
    Examples:
      staleproof compare nvidia-h200 my-runs/nvidia-b200
      staleproof compare before.jsonl after.jsonl
      staleproof compare my-runs/nvidia-b200 --predictions

    Exit code 1: a verdict differs, a prediction is refuted, or a clause got worse.
    """
    from staleproof.cases import store
    from staleproof.report import terminal
    from staleproof.report.audit import print_changes

    if predictions and second is not None:
        raise BadInputError("second: give a second run or --predictions, not both")
    if second is None and not predictions:
        raise BadInputError("second: give a second run, or --predictions")
    if second and first.endswith(".jsonl") != second.endswith(".jsonl"):
        raise BadInputError(f"second: expected two runs or two audits (.jsonl), got {first} and {second}")
    if second and first.endswith(".jsonl"):
        with naming("first or second"):
            raise typer.Exit(print_changes(Path(first), Path(second)))
    with naming("first"):
        run = store.find(first)
    if second is None:
        right = terminal.print_predicted(run)
    else:
        with naming("second"):
            other = store.find(second)
        right = terminal.print_comparison(run, other)
    if not right:
        raise typer.Exit(1)


def _measure(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one benchmark; exit with 1 if a kernel of ours gave a wrong result."""
    from staleproof.cases.measure import WrongResult, benchmark_rows
    from staleproof.report import terminal

    with terminal.progress() as progress:
        progress(f"bench {path.stem}")
        try:
            yield from benchmark_rows(path)
        except WrongResult as error:
            typer.echo(f"staleproof: {path.stem}: no speed for a wrong result: {error}", err=True)
            raise typer.Exit(1) from error
