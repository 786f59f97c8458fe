"""The ``staleproof`` command: its groups of commands, registered here.

Each command imports what it needs, so that ``--help`` answers at once. What they print goes through
``report.terminal``; errors are one line on stderr that names the argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from staleproof.cli import audit, diagnose, incidents, patches, recorded, watch
from staleproof.cli.common import in_one_line

app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of the help: what a newcomer needs first. Each with one line that fits 80 columns.
COMMANDS: dict[Callable[..., None], str] = {
    diagnose.diagnose: "From what you see, or a log, to what to do now.",
    patches.patches: "Say which defects a vLLM has, and which patch helps.",
    incidents.list_: "List the incidents, and what this machine can run.",
    incidents.run: "Reproduce incidents, try their fixes, and say which hold.",
    audit.audit: "Put kernels through the padding contract.",
    watch.watch: "Show what the watch of a live vLLM counts.",
    recorded.record: "Record all findings and timings of this machine.",
    recorded.compare: "Compare two recorded runs.",
}
for function, short in COMMANDS.items():
    app.command(function.__name__.rstrip("_"), short_help=short)(in_one_line(function))
# A command that was removed, and what replaces it.
REMOVED = {
    "bench": "python benchmarks/NAME.py times one kernel and its peers",
    "doctor": "staleproof list ends with what this machine can run",
    "engine": "workbook/whole-vllm.md has what whole vLLM engines answered",
    "lab": "make lab opens JupyterLab on the notebooks",
    "report": "make workbook asks all incidents and builds the book",
    "moe-module": "staleproof run moe_routing asks the installed FlashInfer's own fused MoE",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    first = next(iter(sys.argv[1:] if arguments is None else arguments), "")
    if first in REMOVED:
        typer.echo(f"staleproof {first}: removed in 0.2.0: {REMOVED[first]}", err=True)
        return 2
    try:
        code = app(args=arguments, prog_name="staleproof", standalone_mode=False)
    except SystemExit as end:
        # Whoever reads what is printed has gone: as the shell says of SIGPIPE.
        if isinstance(end.__context__, BrokenPipeError):
            return 128 + 13
        return end.code if isinstance(end.code, int) else 1
    except Exception as error:
        # What typer says of unknown commands and options, in one line instead of three.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        name = context.command_path if context else "staleproof"
        message = error.format_message().rstrip(".")
        # Of a number, which typer lets pydantic read.
        for wrong in getattr(error.__cause__, "errors", list)():
            message += f", got {wrong['input']!r}"
        is_help = type(error).__name__ == "NoArgsIsHelpError"
        typer.echo(message if is_help else f"{name}: {message} (see {name} --help)", err=True)
        return int(getattr(error, "exit_code", 2))
    return code if isinstance(code, int) else 0


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
    """Incidents in which LLM serving read memory that nobody had written.

    \b
      staleproof diagnose                  from what you see to what to do
      staleproof patches --version 0.18.1  which of the defects that vLLM has
      staleproof run mla_padding           reproduce one, and try its fixes

    \b
    Exit codes: 0 all is well; 1 a verdict is not as expected, two runs differ,
    or a kernel is wrong; 2 bad input; 3 patches: something needed is refused;
    130 and 143 ended by Ctrl-C or SIGTERM, and what was found is kept;
    141 the program that reads the output has ended.
    """
