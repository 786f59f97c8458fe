"""``staleproof audit``: kernels put through the padding contract."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from staleproof.cli.common import BadInputError, Device, naming


def audit(
    modules: Annotated[list[str], typer.Argument(help="Modules or files that register kernels.")],
    device: Device = "auto",
    scripts: Annotated[
        Path | None, typer.Option(help="Folder for reproducers: a script each, and a file of its inputs.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(help="Where the answers go, as JSON lines; missing folders are made.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Where the heat map goes, as SVG.")] = None,
    limit: Annotated[float, typer.Option(min=1.0, help="Seconds that one clause may take.")] = 60.0,
) -> None:
    """Put kernels through the padding contract: which clause holds, which breaks, and on what input.

    \b
    Example:
      staleproof audit my_kernels.py --scripts reproducers

    workbook/contract.md says how to register a kernel, and what each clause is.
    Exit code 1: a kernel breaks a clause, or a kernel or a module could not be tested.
    """
    from staleproof import device as devices
    from staleproof import runs
    from staleproof.contract import runner
    from staleproof.contract.contract import BREAKS, NOT_TESTED, Answer
    from staleproof.device import need_workbook
    from staleproof.report import audit as shown
    from staleproof.report import terminal

    try:
        runner.check_modules(modules)
    except ValueError as error:
        raise BadInputError(str(error)) from error
    device = devices.select(device)
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
                runs.check_writable(path)
    answers: list[Answer] = []
    with terminal.progress() as progress:
        found = runner.audit(modules, device, limit_s=limit, scripts=scripts, progress=progress)
        try:
            for answer in found:
                answers.append(answer)
                if json is not None:
                    # At once: an audit that is ended from outside keeps what it had.
                    shown.write_json(answers, json)
        except ValueError as error:
            raise BadInputError(str(error)) from error
    shown.print_table(answers)
    if scripts is not None:
        typer.echo(f"reproducers: {sum(bool(one.script) for one in answers)} in {scripts}")
        for one in shown.without_script(answers):
            typer.echo(f"no reproducer  {one.clause}  {one.kernel}")
    if picture is not None:
        shown.draw(answers, picture)
        typer.echo(f"heat map: {picture}")
    broken, unasked = ([one for one in answers if one.verdict == what] for what in (BREAKS, NOT_TESTED))
    if not broken and not unasked:
        return
    of_kernels = sum(one.kernel not in modules for one in unasked)
    if scripts is None and broken:
        # What is wrong on clean input cannot be documented.
        left = next((one.clause for one in broken if one.clause != "0"), "")
        says_so = f', or say documented={{"{left}": "..."}}' if left else ""
        typer.echo(f"next: add --scripts FOLDER for the reproducers; then mend the kernel{says_so}")
    problems = []
    if broken:
        problems.append("1 clause is broken" if len(broken) == 1 else f"{len(broken)} clauses are broken")
    for kind, count in (("kernel", of_kernels), ("module", len(unasked) - of_kernels)):
        if count:
            problems.append(f"{count} {kind}{'s were' if count > 1 else ' was'} not tested")
    typer.echo(f"staleproof: {'; '.join(problems)}", err=True)
    raise typer.Exit(1)
