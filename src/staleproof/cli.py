"""The ``staleproof`` command.

Exit codes: 0 all well; 1 a verdict is not as expected, or a kernel of ours gave a wrong result in a
benchmark; 2 bad input or an unreadable recorded run, in one line; 3 a patch that this vLLM needs, or
may need, is refused (``patches``); 130 interrupted by Ctrl-C. Each command imports what it needs, so
that ``--help`` answers at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from staleproof.incidents.registry import INCIDENTS, put_questions
from staleproof.report.audit import audit, print_changes

if TYPE_CHECKING:
    from staleproof.harness.findings import Finding, RunFileError
    from staleproof.harness.recorded import Run

app = typer.Typer(
    rich_markup_mode=None, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False
)
app.command("audit")(audit)

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: the best this machine has.")]


class BadInputError(RuntimeError):
    """A command cannot do what was asked of it; the user sees the text as one line."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    from staleproof import cli_diagnose, cli_engine, cli_modules  # noqa: F401  (they register their commands)

    try:
        app(args=arguments, prog_name="staleproof")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def in_one_line(function: Callable[..., None]) -> Callable[..., None]:
    """Turn bad input into one line on stderr and exit code 2."""

    @functools.wraps(function)
    def run_command(*args: Any, **kwargs: Any) -> None:
        from staleproof.device import DeviceError, MissingExtraError
        from staleproof.harness.findings import RunFileError

        try:
            function(*args, **kwargs)
        except (BadInputError, DeviceError, MissingExtraError, RunFileError) as error:
            typer.echo(f"staleproof: {error}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as error:
            typer.echo("staleproof: interrupted", err=True)
            raise typer.Exit(130) from error

    return run_command


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command whose bad input is one line on stderr and exit code 2."""
    return app.command(function.__name__.rstrip("_"))(in_one_line(function))


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
    """Root causes of stale-memory incidents of LLM serving, shown on this machine."""


@command
def doctor() -> None:
    """Say what this machine can run, and what is skipped and why."""
    from staleproof import device
    from staleproof.harness.environment import Capability
    from staleproof.incidents.moe_routing import fused_moe
    from staleproof.report import terminal

    device.select()
    missing = fused_moe.unavailable_reason() or fused_moe.unavailable_reason(check=False)
    terminal.print_machine([Capability("FlashInfer MoE", missing is None, missing or "reduced")])


@command
def list_() -> None:
    """List the incidents and the recorded machines."""
    for name, about in INCIDENTS.items():
        typer.echo(f"{about.number}  {name}: {about.title}")
        typer.echo(f"   {about.summary}; notebooks/{about.notebook}")
    runs, spoilt = _recorded_runs()
    for run in runs:
        typer.echo(f"recorded  {run.folder.name}: {run.title}")
    _finish([], spoilt)


@command
def run(
    incidents: Annotated[
        list[str] | None, typer.Argument(help="Incidents by name or number; all by default.")
    ] = None,
    device: Device = "auto",
    json: Annotated[Path | None, typer.Option(help="Where the findings go, as JSON lines.")] = None,
) -> None:
    """Ask every question about every variant, and print the verdict matrix."""
    from staleproof.report import terminal

    names = _chosen(incidents)
    runs, spoilt = _recorded_runs()
    findings = _obtain(names, device, json or _findings_path())
    terminal.print_verdicts(findings, runs)
    _finish(findings, spoilt)


@command
def report(
    execute: Annotated[
        bool, typer.Option("--execute", help="Run every incident and every notebook first.")
    ] = False,
    device: Device = "auto",
) -> None:
    """Write workbook/_build/index.html and print its path."""
    from staleproof.device import need_workbook
    from staleproof.harness import recorded
    from staleproof.harness.findings import read_findings, write_lines
    from staleproof.report import terminal

    build = recorded.build_folder()
    need_workbook()
    from staleproof.report import html
    from staleproof.report.notebooks import Execution, execute_all
    from staleproof.report.page.kept import kept_in_the_workbook

    page = build / "index.html"
    recorded.check_writable(page)
    runs, spoilt = _recorded_runs()
    kept = build / "findings.jsonl"
    sources = sorted((recorded.checkout() / "notebooks").glob("*.ipynb"))
    if execute:
        findings = _obtain([*INCIDENTS], device, kept)
        executions = execute_all(sources, build / "notebooks")
    else:
        findings = read_findings(kept) if kept.exists() else []
        copies = (build / "notebooks" / path.name for path in sources)
        executions = [
            Execution(copy if copy.exists() else path, None)
            for copy, path in zip(copies, sources, strict=True)
        ]
    made = html.page(findings, runs, executions, kept_in_the_workbook(runs))
    write_lines(page, made.splitlines())
    if execute:
        terminal.print_verdicts(findings, runs)
    typer.echo(f"report: {page}")
    stopped = [f"{done.path.name}: {done.error}" for done in executions if done.error]
    _finish(findings if execute else [], spoilt, stopped)


@command
def lab() -> None:
    """Open JupyterLab on the notebooks, with the Python of this environment."""
    from staleproof.device import need_workbook
    from staleproof.harness import recorded

    notebooks = recorded.checkout() / "notebooks"
    need_workbook("jupyterlab", "ipykernel")
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", str(notebooks)])


@command
def bench(
    kernel: Annotated[
        str | None, typer.Argument(help="One file of benchmarks/, without .py; all by default.")
    ] = None,
) -> None:
    """Time each kernel, its peers and what the hardware allows in one run. Needs a GPU."""
    from staleproof import device as devices
    from staleproof.harness import recorded

    files = recorded.benchmarks()
    if kernel is not None and kernel not in files:
        raise BadInputError(f"unknown kernel {kernel!r}; known: {', '.join(files) or 'none'}")
    if devices.select() != "cuda":
        raise BadInputError("bench: timings need a CUDA GPU, and this machine has none; nothing was run")
    from staleproof.harness.measure import print_rows

    for path in files.values() if kernel is None else [files[kernel]]:
        print_rows([*_measure(path)], baseline="staleproof")


@command
def record(
    out: Annotated[Path | None, typer.Option(help="Folder of runs; the run goes to OUT/<machine>/.")] = None,
    device: Device = "auto",
) -> None:
    """Record every finding and timing that this machine can give, all or nothing."""
    from staleproof import device as devices
    from staleproof.harness import recorded
    from staleproof.report import terminal

    on_gpu = devices.select(device) == "cuda"
    kept = _findings_path()
    recorded.check_writable(kept)
    folder = (out or recorded.runs_folder()) / devices.machine().slug
    recorded.open_for_writing(folder).rmdir()
    findings = _obtain([*INCIDENTS], device, kept)
    terminal.print_verdicts(findings, [])
    if any(found.failed for found in findings):
        typer.echo(f"staleproof: not recorded, a verdict is not as expected: {kept}", err=True)
        raise typer.Exit(1)
    rows = []
    for path in recorded.benchmarks().values() if on_gpu else ():
        for row in _measure(path):
            typer.echo(terminal.row_text(row))
            rows.append(row)
    recorded.write(folder, findings, rows)
    typer.echo(f"recorded: {folder} ({len(findings)} findings, {len(rows)} measurements)")


@command
def compare(
    first: Annotated[str, typer.Argument(help="A run folder, or a recorded machine's name.")],
    second: Annotated[str | None, typer.Argument(help="The one to compare with it.")] = None,
    predictions: Annotated[
        bool, typer.Option("--predictions", help="Compare with workbook/predictions.json instead.")
    ] = False,
) -> None:
    """Compare two recorded runs, or two audits (.jsonl), or one run with the predictions for SM100."""
    from staleproof.harness import recorded
    from staleproof.report import terminal

    if predictions == (second is not None):
        raise BadInputError("compare: give a second run or --predictions")
    if second and first.endswith(".jsonl"):
        raise typer.Exit(print_changes(Path(first), Path(second)))
    run = recorded.find(first)
    right = terminal.print_comparison(run, recorded.find(second)) if second else terminal.print_predicted(run)
    if not right:
        raise typer.Exit(1)


@command
def patches(
    version: Annotated[
        str | None, typer.Option(help="A release from the table; the installed vLLM by default.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option(help="One patch by name: mechanism, versions, threads, cost.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Say which incidents a vLLM is affected by, how that is known, and what the plugin does.

    Exit code 3: something that it needs, or may need, is refused.
    """
    from staleproof.vllm import status
    from staleproof.vllm.sources import PatchError

    try:
        if explain is not None:
            typer.echo(status.explanation(explain))
            return
        found = status.answer(version)
    except PatchError as error:
        raise BadInputError(str(error)) from error
    typer.echo(status.as_json(found) if as_json else status.as_text(found))
    if status.must_worry(found.decided):
        raise typer.Exit(3)


def _chosen(incidents: Sequence[str] | None) -> Sequence[str]:
    """The names of incidents given by name or number, each once; all by default."""
    by_number = {str(about.number): name for name, about in INCIDENTS.items()}
    names = [by_number.get(given, given) for given in incidents or INCIDENTS]
    for name in names:
        if name not in INCIDENTS:
            raise BadInputError(f"unknown incident {name!r}; known: {', '.join(INCIDENTS)}")
    return [*dict.fromkeys(names)]


def _findings_path() -> Path:
    """Where findings are kept: in the checkout, or without one in the current folder."""
    from staleproof.harness import recorded

    try:
        return recorded.build_folder() / "findings.jsonl"
    except recorded.CheckoutError:
        return Path("staleproof-findings.jsonl")


def _recorded_runs() -> tuple[Sequence[Run], Sequence[RunFileError]]:
    """The recorded runs of the checkout, if there is one, and the errors of those that are spoilt."""
    from staleproof.harness import recorded

    runs: list[Run] = []
    spoilt: list[RunFileError] = []
    with contextlib.suppress(recorded.CheckoutError):
        runs = recorded.read_all(spoilt=spoilt.append)
    return runs, spoilt


def _finish(findings: Sequence[Finding], spoilt: Sequence[RunFileError], stopped: Sequence[str] = ()) -> None:
    """Exit with 1 for an unexpected verdict or a stopped notebook, 2 for a run that cannot be read."""
    failed = sum(found.failed for found in findings)
    unexpected = [f"{failed} verdicts are not as expected"] if failed else []
    for line in (*stopped, *unexpected, *spoilt):
        typer.echo(f"staleproof: {line}", err=True)
    if stopped or failed or spoilt:
        raise typer.Exit(1 if stopped or failed else 2)


def _obtain(incidents: Sequence[str], device: str, path: Path) -> Sequence[Finding]:
    """Ask every question, print each finding, and keep those there are however this ends."""
    from staleproof import device as devices
    from staleproof.harness import recorded
    from staleproof.harness.findings import write_findings
    from staleproof.report import terminal

    device = devices.select(device)
    recorded.check_writable(path)
    findings: list[Finding] = []
    try:
        with terminal.progress() as progress:
            for name in incidents:
                # Closed at once on Ctrl-C: that ends the child processes.
                with contextlib.closing(put_questions(name, device, progress)) as answers:
                    for found in answers:
                        findings.append(found)
                        typer.echo(terminal.finding_text(found))
    except KeyboardInterrupt as error:
        kept = f"{len(findings)} findings kept: {path}" if findings else "no finding yet"
        typer.echo(f"staleproof: interrupted; {kept}", err=True)
        raise typer.Exit(130) from error
    finally:
        if findings:
            write_findings(path, findings)
    return findings


def _measure(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of one benchmark; exit with 1 if a kernel of ours gave a wrong result."""
    from staleproof.harness.measure import WrongResult, benchmark_rows
    from staleproof.report import terminal

    with terminal.progress() as progress:
        progress(f"bench {path.stem}")
        try:
            yield from benchmark_rows(path)
        except WrongResult as error:
            typer.echo(f"staleproof: {path.stem}: no speed for a wrong result: {error}", err=True)
            raise typer.Exit(1) from error
