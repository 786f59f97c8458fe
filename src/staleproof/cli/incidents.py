"""The commands about incidents: ``list`` and ``run``."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from staleproof.cli.common import BadInputError, Device, findings_path, finish, naming, obtain, recorded_runs
from staleproof.incidents.registry import INCIDENTS

if TYPE_CHECKING:
    from staleproof.lab import Finding

Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print each finding, and the matrices of all verdicts.")
]


def list_() -> None:
    """List the incidents, and what this machine can run.

    Of each incident: what an operator sees, and why. Then the recorded machines, with their dates. Then this
    machine: a line that begins with skip names what it cannot run, and why.
    """
    from staleproof.report.terminal import say
    from staleproof.triage import symptom

    for name, about in INCIDENTS.items():
        say(f"{about.number}  {name}: {about.title}")
        for field, text in (
            ("symptom", symptom(name)),
            ("cause", about.summary),
            ("notebook", about.notebook and f"notebooks/{about.notebook}"),
        ):
            if text:
                say(f"   {field:<10}{text}")
    say("Read notebooks/00_orientation.ipynb first. For kernels of yours: 06_audit_your_kernels.ipynb.")
    runs, unreadable = recorded_runs()
    for run in runs:
        say(f"recorded  {run.folder.name}: {run.title}")
    say()
    if importlib.util.find_spec("torch") is None:
        say("this machine runs no incident: torch is not installed (pip install -e .)")
    else:
        _this_machine()
    finish([], unreadable)


def _this_machine() -> None:
    from staleproof import device
    from staleproof.incidents.moe_routing import fused_moe
    from staleproof.machine import Capability
    from staleproof.report import terminal

    missing = fused_moe.unavailable_reason("distinct", device.select())
    terminal.print_machine([Capability("FlashInfer MoE", missing is None, missing or "compiled")])


def run(
    incidents: Annotated[
        list[str] | None, typer.Argument(help="Incidents by name or number; all by default.")
    ] = None,
    device: Device = "auto",
    json: Annotated[Path | None, typer.Option(help="File for the findings, as JSON lines.")] = None,
    verbose: Verbose = False,
) -> None:
    """Reproduce incidents, try their fixes, and say which hold.

    Each question of an incident goes to the faulty variants and remedies that it is about. The findings
    replace the earlier ones of the same incidents in workbook/_build/findings.jsonl; those of other
    incidents stay. If SmolLM2 is installed, what its users read comes first, without a remedy and with it.

    \b
    Examples:
      staleproof run                     all of them (minutes on a CPU)
      staleproof run mla_padding -v      one, with every finding and matrix
      staleproof run 1 3 --device cpu    two, by number

    Exit code 1: a verdict is not as expected.
    """
    from staleproof.report import terminal

    names = _chosen(incidents)
    runs, unreadable = recorded_runs()
    path = json or findings_path()

    def show(findings: Sequence[Finding]) -> None:
        terminal.print_words(findings)
        terminal.print_verdicts(findings, runs, verbose)

    with naming("--json") if json else contextlib.nullcontext():
        findings = obtain(names, device, path, show, verbose)
    terminal.print_kept(path, findings)
    finish(findings, unreadable)


def _chosen(incidents: Sequence[str] | None) -> Sequence[str]:
    """The names of incidents given by name or number, each once; all by default."""
    by_number = {str(about.number): name for name, about in INCIDENTS.items()}
    names = [by_number.get(given, given) for given in incidents or INCIDENTS]
    for name in names:
        if name not in INCIDENTS:
            close = difflib.get_close_matches(name, INCIDENTS, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise BadInputError(
                f"incidents: unknown incident {name!r}; known: "
                f"{', '.join(f'{known} ({about.number})' for known, about in INCIDENTS.items())}{meant}"
            )
    return [*dict.fromkeys(names)]
