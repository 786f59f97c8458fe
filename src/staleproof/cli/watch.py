"""``staleproof watch``: what the watch of a live vLLM counts."""

from __future__ import annotations

import http.client
from typing import Annotated

import typer

from staleproof.cli.common import BadInputError, server


def watch(
    url: Annotated[str, typer.Argument(help="A watch's port, e.g. localhost:9464.")],
    once: Annotated[bool, typer.Option("--once", help="Print the table once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: JSON instead of a table.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two readings.")] = 2.0,
) -> None:
    """Show what the watch of a live vLLM counts (STALEPROOF_WATCH=1 in the server's environment)."""
    from rich.console import Console
    from rich.live import Live

    from staleproof.vllm import watch_client

    if as_json and not once:
        raise BadInputError("watch: --json needs --once")
    # ``/metrics/`` is no page of the port.
    address = server("url", url)
    try:
        samples = watch_client.fetch(address)
        if not any(sample.name == "watch_up" for sample in samples):
            raise watch_client.WatchError("a server answers, but no watch runs in it")
        if as_json:
            typer.echo(watch_client.as_json(samples))
        elif once:
            Console().print(watch_client.table(samples))
        else:
            with Live() as live:
                watch_client.follow(address, every, live.update)
    except (watch_client.WatchError, http.client.HTTPException) as error:
        expected = "expected HOST:PORT of a server with STALEPROOF_WATCH=1"
        raise BadInputError(f"url: {expected}, got {url!r}: {error}") from error
