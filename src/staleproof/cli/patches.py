"""``staleproof patches``: which defects a vLLM has, and which patch helps."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

from staleproof.cli.common import BadInputError, server


def patches(
    version: Annotated[
        str | None, typer.Option(help="0.18.1, v0.18.1 or 0.18; the installed vLLM by default.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option(help="One patch by name: mechanism, versions, threads, cost.")
    ] = None,
    live: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="What stands in a server that runs.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="By what evidence.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Say which defects a vLLM has, and which patch helps.

    Without --version the installed vLLM is probed, without importing it. With it, the recorded probes
    of that release are read; 0.18 stands for the last release of that series. With --live a server says
    what stands in all its processes: its port is STALEPROOF_PORT, or that of its watch.

    Two more are off unless their variable asks for them; --explain describes them too. poison
    (STALEPROOF_POISON=kv) makes a rare stale read certain: on one replica, for an hour, then read the
    counters. contain (STALEPROOF_CONTAIN=1) ends a request whose logits are NaN or Inf, alone.

    \b
    Examples:
      staleproof patches --version 0.18.1
      staleproof patches --explain mla_padding
      staleproof patches --explain poison
      staleproof patches --live localhost:9464
      staleproof patches --json

    Exit code 3: something that this vLLM needs, or may need, is refused; in a server that runs also what
    is in place in part, and what STALEPROOF_REQUIRE names and is off.
    """
    from staleproof.report import patches as shown
    from staleproof.report.terminal import say, width
    from staleproof.vllm import status
    from staleproof.vllm.sources import PatchError

    if live is not None and (explain is not None or version is not None):
        beside = "--explain" if explain is not None else "--version"
        raise BadInputError(f"--live: asks a server that runs; expected no {beside} beside it")
    if explain is not None and (as_json or version is not None):
        beside = "--json" if as_json else "--version"
        raise BadInputError(f"--explain: prints a text about a patch; expected no {beside} beside it")
    if live is not None:
        answer = health(live)
        if as_json:
            typer.echo(json.dumps(answer, indent=1))
        else:
            say(_as_text(answer))
        if not answer["ok"]:
            raise typer.Exit(3)
        return
    try:
        if explain is not None:
            say(shown.explanation(explain, width()))
            return
        found = status.answer(version)
    except PatchError as error:
        about = "--explain: " if explain is not None else "--version: " if version is not None else ""
        hint = "" if about else "; name a release: staleproof patches --version 0.18.1"
        why = str(error).removesuffix("; nothing is patched")
        # One that names a variable is about no argument.
        raise BadInputError(why if why.startswith("STALEPROOF_") else f"{about}{why}{hint}") from error
    if as_json:
        typer.echo(shown.as_json(found))
    else:
        say(shown.as_text(found, width(), verbose=verbose))
    if status.must_worry(found.decided):
        raise typer.Exit(3)


def health(given: str) -> dict[str, Any]:
    """Ask a server what stands in its processes; see ``staleproof.vllm.live.health``."""
    address = f"{server('--live', given)}/health"
    try:
        try:
            with urllib.request.urlopen(address, timeout=5.0) as answer:
                health = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            # 503: it answers, and not all is as it should be.
            health = json.loads(error.read())
        return {key: health[key] for key in ("ok", "staleproof", "vllm", "patches", "processes")}
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
        hint = "is STALEPROOF_PORT or STALEPROOF_WATCH=1 set there?"
        raise BadInputError(f"--live: {address} says nothing of staleproof ({error}); {hint}") from error


def _as_text(health: dict[str, Any]) -> str:
    count = len(health["processes"])
    lines = [
        f"vLLM {health['vllm']}, staleproof {health['staleproof']}, {count} process{'es' * (count != 1)}",
        "",
    ]
    states = sorted((state, name, why) for name, (state, why) in health["patches"].items())
    lines += [f"{state:<15}  {name:<18} {why}".rstrip() for state, name, why in states]
    lines += [
        "",
        f"{'nothing' if health['ok'] else 'something'} is refused, partly in place, or required and off",
    ]
    return "\n".join(lines)
