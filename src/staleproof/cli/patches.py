"""``staleproof patches``: which defects a vLLM has, and which patch helps."""

from __future__ import annotations

from typing import Annotated

import typer

from staleproof.cli.common import BadInputError


def patches(
    version: Annotated[
        str | None, typer.Option(help="0.18.1, v0.18.1 or 0.18; the installed vLLM by default.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option(help="One patch by name: mechanism, versions, threads, cost.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Say which defects a vLLM has, and which patch helps.

    Without --version the installed vLLM is probed, without importing it. With it, the recorded probes
    of that release are read; 0.18 stands for the last release of that series.

    \b
    Examples:
      staleproof patches --version 0.18.1
      staleproof patches --explain mla_padding
      staleproof patches --json

    Exit code 3: something that this vLLM needs, or may need, is refused.
    """
    from staleproof.report.terminal import say, width
    from staleproof.vllm import status
    from staleproof.vllm.sources import PatchError

    try:
        if explain is not None:
            say(status.explanation(explain))
            return
        found = status.answer(version)
    except PatchError as error:
        about = "--explain: " if explain is not None else "--version: " if version is not None else ""
        hint = "" if about else "; name a release: staleproof patches --version 0.18.1"
        raise BadInputError(f"{about}{error}{hint}") from error
    if as_json:
        typer.echo(status.as_json(found))
    else:
        say(status.as_text(found, width()))
    if status.must_worry(found.decided):
        raise typer.Exit(3)
