"""The commands ``engine`` and ``watch``: about a whole vLLM. Importing it registers them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from staleproof.cli import BadInputError, Device, _finish, command


@command
def engine(
    questions: Annotated[
        list[str] | None, typer.Argument(help="Questions by name (mla, blocks, ...); all by default.")
    ] = None,
    device: Device = "auto",
    json: Annotated[Path | None, typer.Option(help="Where the findings go, as JSON lines.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Record the run, unless a verdict is not as expected.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of runs; the run goes to OUT/<machine>-engine/.")
    ] = None,
) -> None:
    """Put questions to a whole vLLM with dummy weights, with and without the plugin. Needs a GPU."""
    from staleproof import device as devices
    from staleproof.engine import command as engines
    from staleproof.harness import recorded
    from staleproof.report import terminal

    if (why := engines.unknown(questions or ())) is not None:
        raise BadInputError(why)
    device = devices.select(device)
    if json is None:
        with contextlib.suppress(recorded.CheckoutError):
            json = recorded.build_folder() / "engine.jsonl"
    if json is not None:
        recorded.check_writable(json)
    folder = None
    if record or out is not None:
        folder = (out or recorded.runs_folder()) / f"{devices.machine().slug}-engine"
        recorded.open_for_writing(folder).rmdir()
    with terminal.progress() as progress:
        findings = engines.ask(
            questions or (), device, progress, lambda found: typer.echo(terminal.finding_text(found)), json
        )
    terminal.print_verdicts(findings, [])
    _finish(findings, [])
    if folder is not None:
        recorded.write(folder, findings, [])
        typer.echo(f"recorded: {folder} ({len(findings)} findings)")
