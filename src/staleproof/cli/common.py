"""What the commands share: errors in one line, options, and where findings are kept."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from staleproof.incidents.registry import INCIDENTS, ask_all

if TYPE_CHECKING:
    from staleproof.lab import Finding
    from staleproof.runs import Run, RunFileError

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: the best this machine has.")]


class BadInputError(RuntimeError):
    """A command cannot do what was asked of it; the user sees the text as one line."""


class Ended(KeyboardInterrupt):
    """A signal that asks the process to end; what was found is kept, as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.code = 128 + number


def _end(number: int, frame: object) -> None:
    raise Ended(number)


# Some commands, e.g. diagnose, run where only typer and rich are installed.
REQUIRED = ("torch", "triton", "numpy", "prometheus_client")


def in_one_line(function: Callable[..., None]) -> Callable[..., None]:
    """Turn bad input into one line on stderr and exit code 2, SIGTERM into one and 143, Ctrl-C into 130."""

    @functools.wraps(function)
    def run_command(*args: Any, **kwargs: Any) -> None:
        from staleproof.device import DeviceError, MissingExtraError
        from staleproof.runs import RunFileError

        # A thread other than the first may not set it.
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, _end) if is_main else None
        try:
            function(*args, **kwargs)
        except (BadInputError, DeviceError, MissingExtraError, RunFileError) as error:
            typer.echo(f"staleproof: {' '.join(str(error).splitlines())}", err=True)
            raise typer.Exit(2) from error
        except ModuleNotFoundError as error:
            if error.name not in REQUIRED:
                raise
            typer.echo(f"staleproof: this command needs {error.name}: pip install -e .", err=True)
            raise typer.Exit(2) from error
        except (KeyboardInterrupt, typer.Abort) as error:
            # typer.Abort: at a question, also for Ctrl-D.
            typer.echo("staleproof: interrupted", err=True)
            raise typer.Exit(getattr(error, "code", 130)) from error
        finally:
            if is_main:
                signal.signal(signal.SIGTERM, before)

    return run_command


@contextlib.contextmanager
def naming(argument: str) -> Iterator[None]:
    """Put an argument's name before the error about the file that it names."""
    from staleproof.runs import RunFileError

    try:
        yield
    except RunFileError as error:
        raise BadInputError(f"{argument}: {error}") from error


def server(argument: str, given: str) -> str:
    """The address of a server, given as HOST:PORT or whole, without a slash at its end."""
    parts = urllib.parse.urlsplit(given if "//" in given else f"http://{given}")
    # A port that is none raises where it is read.
    with contextlib.suppress(ValueError):
        if parts.hostname and (parts.port or "//" in given):
            return parts.geturl().rstrip("/")
    raise BadInputError(f"{argument}: expected HOST:PORT, the port from 1 to 65535, got {given!r}")


def findings_path() -> Path:
    """Where findings are kept: in the checkout, or without one in the current folder."""
    from staleproof import runs as store

    try:
        return store.build_folder() / "findings.jsonl"
    except store.CheckoutError:
        return Path("staleproof-findings.jsonl")


def recorded_runs() -> tuple[Sequence[Run], Sequence[RunFileError]]:
    """The recorded runs of the checkout, if there is one, and the errors of those that are spoilt."""
    from staleproof import runs as store

    runs: list[Run] = []
    unreadable: list[RunFileError] = []
    with contextlib.suppress(store.CheckoutError):
        runs = store.read_all(on_error=unreadable.append)
    return runs, unreadable


def finish(findings: Sequence[Finding], errors: Sequence[RunFileError], stopped: Sequence[str] = ()) -> None:
    """Exit with 1 for an unexpected verdict or a stopped notebook, 2 for a run that cannot be read."""
    failed = sum(found.failed for found in findings)
    unexpected = [f"{failed} verdicts are not as expected"] if failed else []
    for line in (*stopped, *unexpected, *errors):
        typer.echo(f"staleproof: {line}", err=True)
    if stopped or failed or errors:
        raise typer.Exit(1 if stopped or failed else 2)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Nobody else in this checkout reads and writes the file meanwhile; where there are no locks, no lock."""
    path = path.resolve()
    with contextlib.ExitStack() as stack:
        # A full disk has no room for the lock's file either; the write says so.
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            file = stack.enter_context(path.with_name(path.name + ".lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _keep(path: Path, findings: Sequence[Finding], complete: Sequence[str]) -> str | None:
    """Put findings into the file, beside those that another run has put there meanwhile.

    Returns:
        One line that says why they are not there, or ``None``.
    """
    from staleproof import runs as store
    from staleproof.runs import RunFileError, write_findings

    try:
        with _locked(path):
            write_findings(path, store.merged(store.read_kept(path), findings, complete, [*INCIDENTS]))
    except RunFileError as error:
        return f"{len(findings)} findings are not kept: {error}"
    return None


def obtain(
    incidents: Sequence[str],
    device: str,
    path: Path,
    show: Callable[[Sequence[Finding]], None],
    verbose: bool = False,
) -> Sequence[Finding]:
    """Ask every question, then keep and show the findings, even if this ends early.

    Unexpected verdicts are always printed, other findings only if ``verbose``. With several incidents, a line
    of counts is printed for each.

    Args:
        incidents: names.
        device: ``cpu``, ``cuda`` or ``auto``.
        path: of the kept findings; those of other incidents in it stay.
        show: prints the findings: after the last answer, and also after Ctrl-C, SIGTERM, an error in a
            question, or a write that failed.
        verbose: see above.

    Raises:
        Exit: with 2 if the findings could not be kept; 130 or 143 after Ctrl-C or SIGTERM.
    """
    from staleproof import device as devices
    from staleproof import runs as store
    from staleproof.report import matrix, terminal

    device = devices.select(device)
    store.check_writable(path)
    store.read_kept(path)
    findings: list[Finding] = []
    complete: list[str] = []
    ended: KeyboardInterrupt | None = None
    try:
        with terminal.progress() as progress:
            for name in incidents:
                first = len(findings)
                # Closed at once on Ctrl-C: that ends the child processes.
                with contextlib.closing(ask_all(name, device, progress)) as answers:
                    for found in answers:
                        findings.append(found)
                        if verbose or found.failed:
                            terminal.say(terminal.finding_text(found))
                complete.append(name)
                if len(incidents) > 1:
                    terminal.say(f"{name}: {matrix.counts(findings[first:])}")
    except KeyboardInterrupt as error:
        ended = error
    finally:
        lost = _keep(path, findings, complete) if findings else None
        if findings:
            show(findings)
        if lost:
            typer.echo(f"staleproof: {lost}", err=True)
    if ended is not None:
        count = "no finding yet" if not findings else "" if lost else f"{len(findings)} findings kept: {path}"
        typer.echo("; ".join(filter(None, ("staleproof: interrupted", count))), err=True)
        raise typer.Exit(getattr(ended, "code", 130)) from ended
    if lost:
        raise typer.Exit(2)
    return findings
