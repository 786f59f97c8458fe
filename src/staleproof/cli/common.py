"""What the commands share: errors in one line, options, and where findings are kept."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from staleproof.incidents.registry import INCIDENTS, put_questions

if TYPE_CHECKING:
    from staleproof.cases.finding import Finding, RunFileError
    from staleproof.cases.store import Run

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: the best this machine has.")]


class BadInputError(RuntimeError):
    """A command cannot do what was asked of it; the user sees the text as one line."""


def in_one_line(function: Callable[..., None]) -> Callable[..., None]:
    """Turn bad input into one line on stderr and exit code 2."""

    @functools.wraps(function)
    def run_command(*args: Any, **kwargs: Any) -> None:
        from staleproof.cases.finding import RunFileError
        from staleproof.device import DeviceError, MissingExtraError

        try:
            function(*args, **kwargs)
        except (BadInputError, DeviceError, MissingExtraError, RunFileError) as error:
            typer.echo(f"staleproof: {error}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            typer.echo("staleproof: interrupted", err=True)
            raise typer.Exit(130) from error

    return run_command


@contextlib.contextmanager
def naming(argument: str) -> Iterator[None]:
    """Put an argument's name before the error about the file that it names."""
    from staleproof.cases.finding import RunFileError

    try:
        yield
    except RunFileError as error:
        raise BadInputError(f"{argument}: {error}") from error


def findings_path() -> Path:
    """Where findings are kept: in the checkout, or without one in the current folder."""
    from staleproof.cases import store

    try:
        return store.build_folder() / "findings.jsonl"
    except store.CheckoutError:
        return Path("staleproof-findings.jsonl")


def recorded_runs() -> tuple[Sequence[Run], Sequence[RunFileError]]:
    """The recorded runs of the checkout, if there is one, and the errors of those that are spoilt."""
    from staleproof.cases import store

    runs: list[Run] = []
    spoilt: list[RunFileError] = []
    with contextlib.suppress(store.CheckoutError):
        runs = store.read_all(spoilt=spoilt.append)
    return runs, spoilt


def finish(findings: Sequence[Finding], spoilt: Sequence[RunFileError], stopped: Sequence[str] = ()) -> None:
    """Exit with 1 for an unexpected verdict or a stopped notebook, 2 for a run that cannot be read."""
    failed = sum(found.failed for found in findings)
    unexpected = [f"{failed} verdicts are not as expected"] if failed else []
    for line in (*stopped, *unexpected, *spoilt):
        typer.echo(f"staleproof: {line}", err=True)
    if stopped or failed or spoilt:
        raise typer.Exit(1 if stopped or failed else 2)


def obtain(incidents: Sequence[str], device: str, path: Path, verbose: bool = False) -> Sequence[Finding]:
    """Ask every question, and keep the findings there are however this ends.

    Printed are each finding if ``verbose``, and unexpected verdicts and a line an incident at any rate.
    """
    from staleproof import device as devices
    from staleproof.cases import store
    from staleproof.cases.finding import write_findings
    from staleproof.report import matrix, terminal

    device = devices.select(device)
    store.check_writable(path)
    earlier = store.read_kept(path)
    findings: list[Finding] = []
    complete: list[str] = []
    try:
        with terminal.progress() as progress:
            for name in incidents:
                first = len(findings)
                # Closed at once on Ctrl-C: that ends the child processes.
                with contextlib.closing(put_questions(name, device, progress)) as answers:
                    for found in answers:
                        findings.append(found)
                        if verbose or found.failed:
                            terminal.say(terminal.finding_text(found))
                complete.append(name)
                if len(incidents) > 1:
                    terminal.say(f"{name}: {matrix.counts(findings[first:])}")
    except KeyboardInterrupt as error:
        count = f"{len(findings)} findings kept: {path}" if findings else "no finding yet"
        typer.echo(f"staleproof: interrupted; {count}", err=True)
        raise typer.Exit(130) from error
    finally:
        if findings:
            write_findings(path, store.merged(earlier, findings, complete, [*INCIDENTS]))
    return findings
