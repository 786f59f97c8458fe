"""The ``staleproof`` command.

Exit codes: 0 all well; 1 a fix fails or a reproduction does not reproduce; 2 bad input, in one
line; 130 interrupted. Everything heavy is imported inside the commands, so that ``--help`` answers
at once.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from staleproof.incidents.registry import INCIDENTS, put_questions

if TYPE_CHECKING:
    from staleproof.harness.findings import Finding
    from staleproof.harness.recorded import Run
    from staleproof.report.notebooks import Execution

Say = Callable[[str], None]

app = typer.Typer(
    name="staleproof",
    help="Root causes of stale-memory incidents of LLM serving, shown on this machine.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

moe_module = typer.Typer(
    help="FlashInfer's fused MoE, reduced to what incident 3 needs and compiled from its sources."
)
app.add_typer(moe_module, name="moe-module", no_args_is_help=True)

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: the best this machine has.")]


class BadInputError(RuntimeError):
    """A command cannot do what it was asked; its text is the one line the user sees."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
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


@command
def doctor() -> None:
    """Say what this machine can run, and what it will skip and why."""
    from staleproof import device
    from staleproof.harness import environment
    from staleproof.incidents.moe_routing import fused_moe

    device.select()
    machine = device.machine()
    typer.echo(f"machine             {machine.name}")
    typer.echo(f"device              {machine.kind}")
    typer.echo(f"provenance          {device.provenance()}")
    typer.echo(f"python              {machine.python}")
    for name, version in environment.packages().items():
        typer.echo(f"{name:<20}{version or 'not installed'}")
    typer.echo("")
    missing = fused_moe.why_not() or fused_moe.why_not(check=False)
    module = environment.Capability("FlashInfer MoE", missing is None, missing or "reduced")
    for found in (*environment.capabilities(), module):
        typer.echo(f"{'yes ' if found.available else 'skip'}  {found.name:<20}{found.detail}")
    for warning in environment.warnings():
        typer.echo(f"\nwarning: {warning}")


@command
def list_() -> None:
    """List the incidents, and the machines that were recorded."""
    from staleproof.harness import recorded

    for name, about in INCIDENTS.items():
        typer.echo(f"{about.number}  {name}: {about.title}")
        typer.echo(f"   {about.summary}; notebooks/{about.notebook}")
    for run in recorded.read_all():
        typer.echo(f"recorded  {run.folder.name}: {run.title}")


@command
def run(
    incidents: Annotated[
        list[str] | None, typer.Argument(help="Incidents by name or number; all by default.")
    ] = None,
    device: Device = "auto",
    json: Annotated[Path | None, typer.Option(help="Where the findings go, as JSON lines.")] = None,
) -> None:
    """Put the questions to every variant, and print the verdict matrix."""
    names = _chosen(incidents)
    runs = _recorded_runs()
    findings = _obtain(names, device, json or _findings_path())
    _print_verdicts(findings, runs)
    _judge(findings)


@command
def report(
    execute: Annotated[
        bool, typer.Option("--execute", help="Run every incident and every notebook first.")
    ] = False,
    device: Device = "auto",
) -> None:
    """Write workbook/_build/index.html and print its path."""
    from staleproof.device import need_workbook

    need_workbook()
    from staleproof.harness import recorded
    from staleproof.harness.findings import read_findings, write_lines
    from staleproof.report import html
    from staleproof.report.notebooks import Execution

    build = recorded.build_folder()
    page = build / "index.html"
    recorded.check_writable(page)
    runs = recorded.read_all()
    kept = build / "findings.jsonl"
    sources = sorted((recorded.checkout() / "notebooks").glob("*.ipynb"))
    if execute:
        findings = _obtain([*INCIDENTS], device, kept)
        executions = _execute(sources, build / "notebooks")
    else:
        findings = read_findings(kept) if kept.exists() else []
        copies = (build / "notebooks" / path.name for path in sources)
        executions = [
            Execution(copy if copy.exists() else path, None)
            for copy, path in zip(copies, sources, strict=True)
        ]
    patched = html.read_patched(recorded.checkout() / "workbook/patches.json")
    write_lines(page, html.page(findings, runs, executions, patched).splitlines())
    if execute:
        _print_verdicts(findings, runs)
    typer.echo(f"report: {page}")
    stopped = [execution for execution in executions if execution.error]
    for execution in stopped:
        typer.echo(f"staleproof: {execution.path.name}: {execution.error}", err=True)
    if stopped:
        raise typer.Exit(1)
    if execute:
        _judge(findings)


@command
def lab() -> None:
    """Open JupyterLab on the notebooks, with this environment's Python."""
    from staleproof.device import need_workbook
    from staleproof.harness import recorded

    need_workbook("jupyterlab", "ipykernel")
    notebooks = recorded.checkout() / "notebooks"
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", str(notebooks)])


@command
def bench(
    kernel: Annotated[
        str | None, typer.Argument(help="One file of benchmarks/, without .py; all by default.")
    ] = None,
) -> None:
    """Time each kernel, its peers and the physical limit in one run. Needs a GPU."""
    from staleproof import device as devices

    files = _benchmarks(kernel)
    if devices.select() != "cuda":
        raise BadInputError("bench: timings need a CUDA GPU, and none is here; nothing was run")
    from staleproof.harness.measure import print_rows

    for path in files:
        print_rows([*_measure([path])], baseline="staleproof")


@command
def record(
    out: Annotated[Path | None, typer.Option(help="Folder of runs; the run goes to OUT/<machine>/.")] = None,
    device: Device = "auto",
) -> None:
    """Record everything this machine can measure, whole or not at all."""
    from staleproof import device as devices
    from staleproof.harness import recorded

    on_gpu = devices.select(device) == "cuda"
    kept = _findings_path()
    recorded.check_writable(kept)
    folder = (out or recorded.runs_folder()) / devices.machine().slug
    recorded.open_for_writing(folder).rmdir()
    findings = _obtain([*INCIDENTS], device, kept)
    _print_verdicts(findings, [])
    if any(found.failed for found in findings):
        typer.echo(f"staleproof: not recorded, a verdict is not as expected: {kept}", err=True)
        raise typer.Exit(1)
    rows = []
    for row in _measure(_benchmarks(None)) if on_gpu else ():
        typer.echo(_row_text(row))
        rows.append(row)
    recorded.write(folder, findings, rows)
    typer.echo(f"recorded: {folder} ({len(findings)} findings, {len(rows)} measurements)")


@command
def compare(
    first: Annotated[str, typer.Argument(help="A run folder, or a recorded machine's name.")],
    second: Annotated[str, typer.Argument(help="The one to compare with it.")],
) -> None:
    """Compare two recorded runs: verdicts first, timings second."""
    from staleproof.harness import recorded

    one, two = recorded.find(first), recorded.find(second)
    typer.echo(f"first   {one.title}\nsecond  {two.title}\n")
    verdicts = recorded.compare(one.findings, two.findings)
    for key, (a, b) in verdicts.mismatch.items():
        typer.echo(f"mismatch        {', '.join(key)}: {a} / {b}")
    for where, keys in (
        ("only in first", verdicts.only_first),
        ("only in second", verdicts.only_second),
        ("in neither", verdicts.neither),
    ):
        for key in keys:
            typer.echo(f"{where:<14}  {', '.join(key)}")
    typer.echo(verdicts.summary)
    timings = recorded.compare_timings(one, two)
    if timings:
        typer.echo("\ntimings, first -> second (second / first)")
    for row, ratio in timings:
        typer.echo(f"{_row_text(row)} -> {row['p50_second']:.4g} ({ratio:.2f})")
    if verdicts.mismatch:
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
    """Say which incidents a vLLM has, by what evidence, and what the plugin does about them."""
    from staleproof.vllm import plugin as vllm_plugin
    from staleproof.vllm.hooks import PatchError

    try:
        if explain is not None:
            typer.echo(vllm_plugin.explanation(explain))
            return
        release, sources = (version, None) if version else vllm_plugin.installed()
        found = vllm_plugin.decisions(release, sources)
    except PatchError as error:
        raise BadInputError(str(error)) from error
    if as_json:
        typer.echo(vllm_plugin.as_json(release, sources is not None, found))
    else:
        typer.echo(vllm_plugin.as_text(release, sources is not None, found))


@moe_module.command("build")
@in_one_line
def build_moe_module(
    package_root: Annotated[
        Path | None, typer.Option(help="Folder with an unpacked flashinfer; the installed one by default.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Where the modules go; $STALEPROOF_MOE_MODULES or the user's cache.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Compilations at a time; one a core by default.")
    ] = None,
) -> None:
    """Compile the modules with and without the bounds check. Needs nvcc, and minutes."""
    from staleproof.incidents.moe_routing.moe_module import ModuleError, build

    try:
        build(package_root, cache=cache, jobs=jobs, say=typer.echo)
    except ModuleError as error:
        raise BadInputError(str(error)) from error


def _chosen(incidents: Sequence[str] | None) -> Sequence[str]:
    """Names of the incidents a user asked for by name or number."""
    by_number = {str(about.number): name for name, about in INCIDENTS.items()}
    names = [by_number.get(asked, asked) for asked in incidents or INCIDENTS]
    for name in names:
        if name not in INCIDENTS:
            raise BadInputError(f"unknown incident {name!r}; known: {', '.join(INCIDENTS)}")
    # Naming one twice asks once.
    return [*dict.fromkeys(names)]


def _findings_path() -> Path:
    """Where findings are kept: in the checkout, or without one in the current folder."""
    from staleproof.harness import recorded

    try:
        return recorded.build_folder() / "findings.jsonl"
    except recorded.CheckoutError:
        return Path("staleproof-findings.jsonl")


def _recorded_runs() -> Sequence[Run]:
    from staleproof.harness import recorded

    try:
        return recorded.read_all()
    except recorded.CheckoutError:
        return []


def _obtain(incidents: Sequence[str], device: str, path: Path) -> Sequence[Finding]:
    """Put every question, print each finding as it comes, and keep them whatever happens."""
    from staleproof import device as devices
    from staleproof.harness import recorded
    from staleproof.harness.findings import write_findings

    device = devices.select(device)
    recorded.check_writable(path)
    findings: list[Finding] = []
    interrupted = False
    try:
        with _progress() as progress:
            for name in incidents:
                for found in put_questions(name, device, progress):
                    findings.append(found)
                    typer.echo(_finding_text(found))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        if findings:
            write_findings(path, findings)
    if interrupted:
        kept = f"{len(findings)} findings kept: {path}" if findings else "no finding yet"
        typer.echo(f"staleproof: interrupted; {kept}", err=True)
        raise typer.Exit(130)
    return findings


def _execute(sources: Sequence[Path], folder: Path) -> Sequence[Execution]:
    """Execute copies of the notebooks into ``folder``, saying which cell runs."""
    from staleproof.report import notebooks

    executions = []
    for source in sources:
        typer.echo(f"notebook  {source.name}")
        with _progress() as progress:

            def on_cell(number: int, cells: int, name: str = source.name, say: Say = progress) -> None:
                say(f"{name}: code cell {number} of {cells}")

            executions.append(notebooks.execute(source, folder, on_cell))
    return executions


@contextmanager
def _progress() -> Iterator[Say]:
    """A status line in a terminal; elsewhere the lines that stay are progress enough."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        yield lambda line: None
        return
    with console.status("") as status:
        yield lambda line: status.update(Text(line))


def _finding_text(found: Finding) -> str:
    """One finding as one line."""
    key = f"{found.provenance}  {found.incident}, {found.question}, {found.variant}: "
    if not found.ran:
        return f"{key}{found.verdict}: {found.note}"
    beside = f" (expected {found.expected})" if found.failed else ""
    numbers = ", ".join(f"{name} {_number(value)}" for name, value in found.numbers.items())
    return key + found.verdict + beside + (f"  [{numbers}]" if numbers else "")


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _row_text(row: Mapping[str, Any]) -> str:
    """One measurement as one line."""
    return (
        f"{row['kernel']}, {row['provider']}, {row['mode']}, {row['x_name']} {row['x_value']}: "
        f"{row['p50']:.4g} {row['unit']} (p20 {row['p20']:.4g}, p80 {row['p80']:.4g})"
    )


def _print_verdicts(findings: Sequence[Finding], runs: Sequence[Run]) -> None:
    """The verdict matrix, and beside it whether recorded runs say the same."""
    from rich.console import Console

    from staleproof.harness.recorded import compare as compare_findings
    from staleproof.report import matrix

    console = Console()
    typer.echo("")
    if console.is_terminal:
        for table in matrix.tables(findings):
            console.print(table)
        for line in (*matrix.absences(findings), matrix.counts(findings)):
            typer.echo(line)
    else:
        typer.echo(matrix.text(findings))
    asked = {found.incident for found in findings}
    for run_ in runs:
        beside = compare_findings(findings, (f for f in run_.findings if f.incident in asked))
        typer.echo(f"RECORDED  {run_.title}\n          {beside.summary}")


def _judge(findings: Sequence[Finding]) -> None:
    failed = sum(found.failed for found in findings)
    if failed:
        typer.echo(f"staleproof: {failed} verdicts are not as expected", err=True)
        raise typer.Exit(1)


def _benchmarks(kernel: str | None) -> Sequence[Path]:
    """The benchmark file of one kernel, or all of them."""
    from staleproof.harness import recorded

    folder = recorded.checkout() / "benchmarks"
    files = {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem[0] != "_"}
    if kernel is None:
        return [*files.values()]
    if kernel not in files:
        raise BadInputError(f"unknown kernel {kernel!r}; known: {', '.join(files) or 'none'}")
    return [files[kernel]]


def _measure(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Rows of ``measurements.jsonl``, from each file's ``rows()``, as they are obtained."""
    from staleproof.harness.measure import WrongResult

    for path in files:
        with _progress() as progress:
            progress(f"bench {path.stem}")
            try:
                yield from runpy.run_path(str(path))["rows"]()
            except WrongResult as error:
                typer.echo(f"staleproof: {path.stem}: no speed for a wrong result: {error}", err=True)
                raise typer.Exit(1) from error
