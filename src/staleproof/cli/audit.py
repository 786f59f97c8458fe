"""``staleproof audit``: kernels put through the padding contract."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from staleproof.cli.common import Device


def audit(
    modules: Annotated[
        list[str] | None,
        typer.Argument(help="Modules or files that register kernels; known packages by default."),
    ] = None,
    device: Device = "auto",
    only: Annotated[
        str, typer.Option(help="Only subjects whose package, version or name holds this text.")
    ] = "",
    json: Annotated[Path | None, typer.Option(help="Where the rows go, as JSON lines.")] = None,
    scripts: Annotated[
        Path | None, typer.Option(help="Folder for the counterexamples, one script each.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Where the heat map goes, as SVG.")] = None,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds that one clause may take.")] = 60.0,
    onto: Annotated[
        Path | None, typer.Option(help="An earlier audit of this machine: only what it left open is asked.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="With --onto: ask broken clauses again, for new scripts.")
    ] = False,
) -> None:
    """Put kernels through the padding contract: which clause holds, which breaks, and the smallest input.

    With --onto the rows of both audits are written to --json, which may be the same file.

    Exit code 1: a kernel of yours or of ours breaks a clause, or a module does not import. Exit code 2: bad
    input, for example no subject that --only names.
    """
    from staleproof import device as devices
    from staleproof.cases import store
    from staleproof.contract import earlier, runner
    from staleproof.contract.contract import Verdict, read_rows, write_rows
    from staleproof.report import audit as shown
    from staleproof.report import terminal

    device = devices.select(device)
    if json is not None:
        store.check_writable(json)
    rows = known = read_rows(onto) if onto is not None else []
    asked = (Verdict.BREAKS, Verdict.UNDEFINED) if again else ()
    found = runner.audit(
        modules or runner.SUBJECTS, device, only=only, limit_s=limit, known=known, again=asked
    )
    with terminal.progress() as progress:
        for new in found:
            rows = earlier.merged(rows, new)
            progress(f"audit {new[0].package} {new[0].version} {new[0].subject}")
            if json is not None:
                # At once: an audit that is ended from outside keeps what it had.
                write_rows(json, rows)
    if not any(only in f"{row.package} {row.version} {row.subject}" for row in rows):
        # A misspelt name would otherwise look like an audit that found nothing wrong.
        expected = f"expected a part of a package, a version or a subject, got {only!r}"
        raise typer.BadParameter(expected, param_hint="only")
    shown.print_table(rows)
    if scripts is not None:
        typer.echo(f"{shown.write_scripts(rows, scripts)} counterexamples: {scripts}")
    if picture is not None:
        shown.draw(rows, picture)
        typer.echo(f"heat map: {picture}")
    broken = [row for row in rows if row.verdict == "breaks" and row.package in ("yours", "staleproof")]
    if broken:
        says = "1 clause is broken" if len(broken) == 1 else f"{len(broken)} clauses are broken"
        typer.echo(f"staleproof: {says}", err=True)
        raise typer.Exit(1)
