"""``staleproof audit``: kernels put through the padding contract."""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from staleproof.cli.common import BadInputError, Device, naming


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
    """Put kernels through the padding contract: which clause holds, which breaks, and on what input.

    With --onto the rows of both audits are written to --json, which may be the same file.

    Exit code 1: a kernel of yours or of ours breaks a clause, or a module does not import. Exit code 2: bad
    input, for example no subject that --only names.
    """
    from itertools import groupby

    from staleproof import device as devices
    from staleproof.cases import store
    from staleproof.cases.finding import Finding, read_findings, write_findings
    from staleproof.contract import cases
    from staleproof.contract.contract import BREAKS, UNDEFINED, WRONG_SETTING, is_unasked
    from staleproof.device import need_workbook
    from staleproof.report import audit as shown
    from staleproof.report import terminal

    for name in modules or ():
        if not _is_there(name):
            raise BadInputError(f"modules: {name}: expected a Python file or a module, and none is there")
    device = devices.select(device)
    if again and onto is None:
        raise BadInputError("again: needs --onto, the audit whose broken clauses are asked again")
    if picture is not None and picture.suffix != ".svg":
        raise BadInputError(f"--picture: expected a file that ends in .svg, got {picture}")
    if scripts is not None and scripts.is_file():
        raise BadInputError(f"--scripts: expected a folder, got the file {scripts}")
    if json is not None and picture is not None and json.resolve() == picture.resolve():
        raise BadInputError(f"--picture: expected another file than --json, got {picture}")
    if picture is not None:
        need_workbook("pandas", "matplotlib", "seaborn")
    # Before kernels run for minutes. Of --scripts, any file in it.
    written = {"--json": json, "--scripts": scripts and scripts / "script.py", "--picture": picture}
    for option, path in written.items():
        if path is not None:
            with naming(option):
                store.check_writable(path)
    with naming("--onto"):
        answers: list[Finding] = read_findings(onto, recorded=False) if onto is not None else []
    # A module that had no kernel to ask is asked again.
    answers = [one for one in answers if not (is_unasked(one) and one.variant in (modules or ()))]
    with terminal.progress() as progress:
        found = cases.audit(
            modules or cases.SUBJECTS,
            device,
            only=only,
            limit_s=limit,
            known=answers,
            again=(BREAKS, UNDEFINED) if again else (),
            progress=progress,
        )
        for _, new in groupby(found, key=lambda one: (one.release, one.variant)):
            answers = cases.merged(answers, [*new])
            if json is not None:
                # At once: an audit that is ended from outside keeps what it had.
                write_findings(json, answers)
    if not any(only in f"{one.release} {one.variant}" for one in answers):
        # A misspelt name would otherwise look like an audit that found nothing wrong.
        expected = f"expected a part of a package, a version or a subject, got {only!r}"
        raise typer.BadParameter(expected, param_hint="only")
    shown.print_table(answers)
    if scripts is not None:
        typer.echo(f"counterexamples: {shown.write_scripts(answers, scripts)} in {scripts}")
        for one in shown.without_script(answers):
            typer.echo(f"no counterexample  {one.question}  {one.release} {one.variant}")
    if picture is not None:
        shown.draw(answers, picture)
        typer.echo(f"heat map: {picture}")
    if failed := [one for one in answers if one.failed]:
        broken = [one for one in failed if not is_unasked(one)]
        of_kernels = sum(one.note.startswith(WRONG_SETTING) for one in failed)
        if scripts is None and broken:
            has_script = any(one.script for one in broken)
            shows = "add --scripts FOLDER for the counterexamples; then " if has_script else ""
            # What is wrong on clean input cannot be documented.
            left = next((one.question for one in broken if one.question != "0"), "")
            says_so = f', or say documented={{"{left}": "..."}}' if left else ""
            typer.echo(f"next: {shows}mend the kernel{says_so}")
        says = []
        if broken:
            says.append("1 clause is broken" if len(broken) == 1 else f"{len(broken)} clauses are broken")
        for kind, count in (("kernel", of_kernels), ("module", len(failed) - len(broken) - of_kernels)):
            if count:
                says.append(
                    f"{count} {kind} was not tested" if count == 1 else f"{count} {kind}s were not tested"
                )
        typer.echo(f"staleproof: {'; '.join(says)}", err=True)
        raise typer.Exit(1)


def _is_there(module: str) -> bool:
    """Whether a file or a module is there, without importing it; a child also looks in the current folder."""
    if module.endswith(".py"):
        return Path(module).is_file()
    top, *rest = module.split(".")
    if not all(map(str.isidentifier, (top, *rest))):
        return False
    spec = find_spec(top) or PathFinder.find_spec(top, [str(Path.cwd())])
    for part in rest:
        folders = spec and spec.submodule_search_locations
        spec = PathFinder.find_spec(part, [*folders]) if folders else None
    return spec is not None
