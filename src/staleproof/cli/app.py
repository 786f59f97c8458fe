"""The ``staleproof`` command.

Each command imports what it needs, so that ``--help`` answers at once. What they print goes through
``report.terminal``; errors are one line on stderr that names the argument.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from staleproof.incidents.registry import INCIDENTS, put_questions, steps
from staleproof.report.audit import audit

if TYPE_CHECKING:
    from staleproof.cases.finding import Finding, RunFileError
    from staleproof.cases.store import Run

app = typer.Typer(
    rich_markup_mode=None, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
)
app.command("audit", short_help="Put kernels through the padding contract.")(audit)

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: the best this machine has.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print each finding, and the matrices of all verdicts.")
]


DURATIONS = "durations.json"


class BadInputError(RuntimeError):
    """A command cannot do what was asked of it; the user sees the text as one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    # They register their commands.
    from staleproof.cli import diagnose, engine, modules, patches, recorded  # noqa: F401

    try:
        code = app(args=arguments, prog_name="staleproof", standalone_mode=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except Exception as error:
        # What typer says of unknown commands and options, in one line instead of three.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        name = context.command_path if context else "staleproof"
        said = error.format_message()
        is_help = type(error).__name__ == "NoArgsIsHelpError"
        typer.echo(said if is_help else f"{name}: {said.rstrip('.')} (see {name} --help)", err=True)
        return int(getattr(error, "exit_code", 2))
    return code if isinstance(code, int) else 0


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


def command(function: Callable[..., None], **settings: Any) -> Callable[..., None]:
    """Register a command whose bad input is one line on stderr and exit code 2."""
    return app.command(function.__name__.rstrip("_"), **settings)(in_one_line(function))


@contextlib.contextmanager
def naming(argument: str) -> Iterator[None]:
    """Put an argument's name before the error about the file that it names."""
    from staleproof.cases.finding import RunFileError

    try:
        yield
    except RunFileError as error:
        raise BadInputError(f"{argument}: {error}") from error


def _print_version(wanted: bool) -> None:
    from staleproof.device import version_of

    if wanted:
        typer.echo(f"staleproof {version_of('staleproof') or '(not installed)'}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Five incidents in which LLM serving read memory that nobody had written.

    Each can be reproduced on this machine, with the kernels and patches that fix it.

    \b
    Examples:
      staleproof list                      what an operator sees in each incident
      staleproof patches --version 0.18.1  which of them that release of vLLM has
      staleproof run mla_padding           reproduce one of them, and try its fixes

    \b
    Exit codes:
      0    all is well
      1    a verdict is not as expected, a notebook stopped, two runs differ,
           or a kernel of ours gave a wrong result
      2    bad input, or a file that cannot be read or written: one line says which
      3    patches: something that this vLLM needs, or may need, is refused
      130  interrupted by Ctrl-C; what was found until then is kept
    """


@command
def doctor() -> None:
    """Say what this machine can run, and what is skipped and why.

    Runs nothing. A line that begins with skip says what is missing.
    """
    from staleproof import device
    from staleproof.cases.machine import Capability
    from staleproof.incidents.moe_routing import fused_moe
    from staleproof.report import terminal

    device.select()
    missing = fused_moe.unavailable_reason() or fused_moe.unavailable_reason(check=False)
    terminal.print_machine([Capability("FlashInfer MoE", missing is None, missing or "reduced")])


@command
def list_() -> None:
    """List the incidents: what an operator sees, and why.

    The machines that were recorded come last, with their date and whether the source has changed since.
    """
    from staleproof.report.conclusion import symptom_of
    from staleproof.report.terminal import say

    for name, about in INCIDENTS.items():
        say(f"{about.number}  {name}: {about.title}")
        for field, said in (
            ("symptom", symptom_of(name)),
            ("cause", about.summary),
            ("notebook", f"notebooks/{about.notebook}"),
        ):
            say(f"   {field:<10}{said}")
    say("Read notebooks/00_orientation.ipynb first. For kernels of yours: 06_audit_your_kernels.ipynb.")
    runs, spoilt = _recorded_runs()
    for run in runs:
        say(f"recorded  {run.folder.name}: {run.title}")
    _finish([], spoilt)


@command
def run(
    incidents: Annotated[
        list[str] | None, typer.Argument(help="Incidents by name or number; all by default.")
    ] = None,
    device: Device = "auto",
    json: Annotated[Path | None, typer.Option(help="File for the findings, as JSON lines.")] = None,
    verbose: Verbose = False,
) -> None:
    """Reproduce incidents, try their fixes, and say which hold.

    All questions of an incident are put to every faulty variant and every remedy. The findings replace
    the earlier ones of the same incidents in workbook/_build/findings.jsonl; those of other incidents stay.

    \b
    Examples:
      staleproof run                     all five (minutes on a CPU)
      staleproof run mla_padding -v      one, with every finding and matrix
      staleproof run 1 3 --device cpu    two, by number

    Exit code 1: a verdict is not as expected.
    """
    from staleproof.report import terminal

    names = _chosen(incidents)
    runs, spoilt = _recorded_runs()
    path = json or _findings_path()
    with naming("--json") if json else contextlib.nullcontext():
        findings = _obtain(names, device, path, verbose)
    terminal.print_verdicts(findings, runs, verbose)
    terminal.print_kept(path, findings)
    _finish(findings, spoilt)


@command
def report(
    execute: Annotated[
        bool, typer.Option("--execute", help="Run every incident and every notebook first.")
    ] = False,
    device: Device = "auto",
) -> None:
    """Write the report, one HTML file, and print its path.

    Without --execute it shows the findings of the last runs and the notebooks as they are stored.

    \b
    Examples:
      staleproof report              from what is there (seconds)
      staleproof report --execute    run everything first (minutes)

    Exit code 1: a verdict is not as expected, or a notebook stopped.
    """
    from staleproof.cases import store
    from staleproof.cases.finding import read_findings, write_lines
    from staleproof.cases.store import origins
    from staleproof.device import need_workbook
    from staleproof.report import terminal

    build = store.build_folder()
    need_workbook()
    from staleproof.report import html
    from staleproof.report.notebooks import Beside, Execution, lanes
    from staleproof.report.page.kept import kept_in_the_workbook

    page = build / "index.html"
    store.check_writable(page)
    runs, spoilt = _recorded_runs()
    kept = build / "findings.jsonl"
    sources = sorted((store.checkout() / "notebooks").glob("*.ipynb"))
    if execute:
        with Beside(sources, build / "notebooks", lanes(device)) as notebooks:
            findings = _obtain([*INCIDENTS], device, kept)
            executions = notebooks.finish()
    else:
        findings = read_findings(kept) if kept.exists() else []
        copies = (build / "notebooks" / path.name for path in sources)
        executions = [
            Execution(copy if copy.exists() else path, None)
            for copy, path in zip(copies, sources, strict=True)
        ]
    made = html.page(findings, runs, executions, kept_in_the_workbook(runs, origins(findings)))
    write_lines(page, made.splitlines())
    if execute:
        terminal.print_verdicts(findings, runs)
    terminal.say(f"report: {page}")
    stopped = [f"{done.path.name}: {done.error}" for done in executions if done.error]
    _finish(findings if execute else [], spoilt, stopped)


def lab(context: typer.Context) -> None:
    """Open JupyterLab on the notebooks and the book.

    The glossary, the timeline and the recorded runs are in its file browser, under workbook/.
    What follows -- goes to JupyterLab. It refuses to run as root: in a container say --allow-root,
    and whoever reaches its port with the token is root there; elsewhere use another user.

    \b
    Examples:
      staleproof lab
      staleproof lab -- --port 8889 --no-browser
      staleproof lab -- --allow-root --ip 0.0.0.0
    """
    from staleproof.cases import store
    from staleproof.device import need_workbook

    root = store.checkout()
    need_workbook("jupyterlab", "ipykernel")
    given = context.args
    if os.geteuid() == 0 and not any("allow-root" in one or "allow_root" in one for one in given):
        raise BadInputError(
            "lab: JupyterLab refuses to run as root; in a container type "
            f"{' '.join(['staleproof lab -- --allow-root', *given])}, elsewhere run it as another user"
        )
    ours = {
        "root_dir": f"--ServerApp.root_dir={root}",
        "default_url": "--LabApp.default_url=/lab/tree/notebooks/00_orientation.ipynb",
    }
    # JupyterLab takes each option once: one that is given replaces ours.
    ours = {name: option for name, option in ours.items() if not any(name in one for one in given)}
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *ours.values(), *given])


command(lab, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})


def _chosen(incidents: Sequence[str] | None) -> Sequence[str]:
    """The names of incidents given by name or number, each once; all by default."""
    by_number = {str(about.number): name for name, about in INCIDENTS.items()}
    names = [by_number.get(given, given) for given in incidents or INCIDENTS]
    for name in names:
        if name not in INCIDENTS:
            close = difflib.get_close_matches(name, INCIDENTS, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise BadInputError(
                f"incidents: unknown incident {name!r}; known: {', '.join(INCIDENTS)}, "
                f"or 1 to {len(INCIDENTS)}{meant}"
            )
    return [*dict.fromkeys(names)]


def _findings_path() -> Path:
    """Where findings are kept: in the checkout, or without one in the current folder."""
    from staleproof.cases import store

    try:
        return store.build_folder() / "findings.jsonl"
    except store.CheckoutError:
        return Path("staleproof-findings.jsonl")


def _recorded_runs() -> tuple[Sequence[Run], Sequence[RunFileError]]:
    """The recorded runs of the checkout, if there is one, and the errors of those that are spoilt."""
    from staleproof.cases import store

    runs: list[Run] = []
    spoilt: list[RunFileError] = []
    with contextlib.suppress(store.CheckoutError):
        runs = store.read_all(spoilt=spoilt.append)
    return runs, spoilt


def _finish(findings: Sequence[Finding], spoilt: Sequence[RunFileError], stopped: Sequence[str] = ()) -> None:
    """Exit with 1 for an unexpected verdict or a stopped notebook, 2 for a run that cannot be read."""
    failed = sum(found.failed for found in findings)
    unexpected = [f"{failed} verdicts are not as expected"] if failed else []
    for line in (*stopped, *unexpected, *spoilt):
        typer.echo(f"staleproof: {line}", err=True)
    if stopped or failed or spoilt:
        raise typer.Exit(1 if stopped or failed else 2)


def _obtain(incidents: Sequence[str], device: str, path: Path, verbose: bool = False) -> Sequence[Finding]:
    """Ask every question, and keep the findings there are however this ends.

    Printed are each finding if ``verbose``, and unexpected verdicts and a line an incident at any rate.
    """
    from staleproof import device as devices
    from staleproof.cases import store
    from staleproof.cases.finding import write_findings
    from staleproof.report import matrix, terminal
    from staleproof.report.progress import Clock, keep_durations, read_durations

    device = devices.select(device)
    store.check_writable(path)
    earlier = store.read_kept(path)
    last: dict[str, float] = {}
    with contextlib.suppress(store.CheckoutError):
        for folder in (store.checkout() / "workbook", store.build_folder()):
            last |= read_durations(folder / DURATIONS, device)
    clock = Clock([step for name in incidents for step in steps(name)], last)
    findings: list[Finding] = []
    complete: list[str] = []
    try:
        with terminal.progress(clock) as progress:
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
        with contextlib.suppress(store.CheckoutError):
            keep_durations(store.build_folder() / DURATIONS, device, clock.took)
        if findings:
            write_findings(path, store.merged(earlier, findings, complete, [*INCIDENTS]))
    return findings
