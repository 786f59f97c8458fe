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
    with terminal.progress() as progress:
        findings = engines.ask(
            questions or (), device, progress, lambda found: typer.echo(terminal.finding_text(found)), json
        )
    terminal.print_verdicts(findings, [])
    _finish(findings, [])
