"""``staleproof engine``: put the questions, print each answer, keep them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from staleproof.cases.finding import Finding, write_findings
from staleproof.cases.run import Table
from staleproof.device import Machine
from staleproof.engine.cases import BENCHES
from staleproof.engine.orders import OLDEST, at_most


def ask(
    table: Table,
    device: str,
    progress: Callable[[str], None],
    say: Callable[[Finding], None],
    path: Path | None,
    limit_s: float | None = None,
) -> list[Finding]:
    """Run these cases. Each finding is reported as it comes, and all are written, even after an error.

    Args:
        table: of some benches, or of all.
        device: ``"cpu"`` or ``"cuda"``.
        progress: takes one line about the step that begins.
        say: takes each finding.
        path: where the findings go, as JSON lines; ``None`` for nowhere.
        limit_s: engines that have not answered by then are ended; ``None`` for no limit.
    """
    found: list[Finding] = []
    try:
        with at_most(limit_s), contextlib.closing(table.run(device, progress)) as answers:
            for one in answers:
                found.append(one)
                say(one)
    finally:
        if found and path is not None:
            write_findings(path, found)
    return found


def run_name(machine: Machine) -> str:
    """Folder of the recorded run of a machine; that of a release other than the first names the release.

    >>> from dataclasses import replace
    >>> from staleproof import device
    >>> here = replace(device.machine(), name="NVIDIA H200", vllm="0.22.1")
    >>> run_name(here), run_name(replace(here, vllm="0.26.0"))
    ('nvidia-h200-engine', 'nvidia-h200-engine-0.26.0')
    """
    name = f"{machine.slug}-engine"
    return name if machine.vllm in (None, "none", OLDEST) else f"{name}-{machine.vllm}"


def unknown(names: Sequence[str]) -> str | None:
    """What is wrong with these names of questions, in one line.

    >>> unknown(["mla"]) is None, unknown(["no"])
    (True, "unknown question 'no'; known: mla, starts, blocks, hybrid, router, ranks, watch, memory")
    """
    wrong = [name for name in names if name not in BENCHES]
    return f"unknown question {wrong[0]!r}; known: {', '.join(BENCHES)}" if wrong else None
