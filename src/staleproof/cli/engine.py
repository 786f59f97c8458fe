"""The commands ``engine`` and ``watch``: about a whole vLLM."""

from __future__ import annotations

import contextlib
import http.client
from pathlib import Path
from typing import Annotated

import typer

from staleproof.cli.common import BadInputError, Device, finish, naming, server


def engine(
    questions: Annotated[
        list[str] | None, typer.Argument(help="Questions by name (mla, blocks, ...); all by default.")
    ] = None,
    device: Device = "auto",
    json: Annotated[Path | None, typer.Option(help="Where the findings go, as JSON lines.")] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Record the run, unless a verdict is not as expected.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Record the run there, in OUT/<machine>-engine/.")] = None,
    limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds; engines that have not answered by then are ended.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Engines with this in their name are not started.")
    ] = None,
) -> None:
    """Put questions to a whole vLLM with dummy weights, with and without the plugin. Needs a GPU."""
    from staleproof import device as devices
    from staleproof.cases import store
    from staleproof.engine import command as engines
    from staleproof.engine.cases import table
    from staleproof.report import terminal

    if (why := engines.unknown(questions or ())) is not None:
        raise BadInputError(why)
    device = devices.select(device)
    # An argument is named that was given.
    named = naming("--json") if json else contextlib.nullcontext()
    if json is None:
        with contextlib.suppress(store.CheckoutError):
            json = store.build_folder() / "engine.jsonl"
    if json is not None:
        with named:
            store.check_writable(json)
    folder = None
    if record or out is not None:
        folder = (out or store.runs_folder()) / engines.run_name(devices.machine())
        with naming("--out"):
            store.open_for_writing(folder).rmdir()
    with terminal.progress() as progress:
        findings = engines.ask(
            table(*(questions or ()), without=without or ()),
            device,
            progress,
            lambda found: typer.echo(terminal.finding_text(found)) if found.ran else None,
            json,
            limit,
        )
    terminal.print_verdicts(findings, [], None)
    finish(findings, [])
    if folder is not None:
        if not any(found.ran for found in findings):
            raise BadInputError(f"engine: nothing ran here ({len(findings)} not run), so nothing is recorded")
        store.write(folder, findings, [])
        typer.echo(f"recorded: {folder} ({len(findings)} findings)")


def watch(
    url: Annotated[str, typer.Argument(help="A watch's port, e.g. localhost:9464.")],
    once: Annotated[bool, typer.Option("--once", help="Print the table once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: JSON instead of a table.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 2.0,
) -> None:
    """Show what the watch of a live vLLM counts (STALEPROOF_WATCH=1 in the server's environment)."""
    from rich.console import Console
    from rich.live import Live

    from staleproof.engine import watching

    if as_json and not once:
        raise BadInputError("watch: --json needs --once")
    # ``/metrics/`` is no page of the port.
    address = server("url", url)
    try:
        samples = watching.fetch(address)
        if not any(sample.name == "watch_up" for sample in samples):
            raise watching.WatchError("a server answers, but no watch runs in it")
        if as_json:
            typer.echo(watching.as_json(samples))
        elif once:
            Console().print(watching.table(samples))
        else:
            with Live() as live:
                watching.follow(address, every, live.update)
    except (watching.WatchError, http.client.HTTPException) as error:
        expected = "expected HOST:PORT of a server with STALEPROOF_WATCH=1"
        raise BadInputError(f"url: {expected}, got {url!r}: {error}") from error
