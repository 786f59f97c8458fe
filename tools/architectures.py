"""Compile every Triton kernel for GPUs that are not here, and read what the compiler says.

Triton compiles for any NVIDIA architecture on a machine without a GPU, because its wheel brings
ptxas. The public functions are called with tensors that have no data and say that they are on such
a GPU. They choose their tiles as on that GPU, and each launch is replaced by a compilation. So this
covers every specialisation that the functions launch at these shapes, and no value is computed.

``make architectures`` compiles for all architectures of :data:`KNOWN`, prints a table and writes
``workbook/architectures.json``. A process that is given a capability compiles for that one only:
``python -m tools.architectures 100``.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from staleproof import check, device
from staleproof.cases import children, store

NAME = "architectures.json"
NUMBERS = ("warps", "registers", "spilled", "shared", "limit")
# Seconds for all architectures together.
TIMEOUT_S = 1800
CACHE = Path.home() / ".cache" / "staleproof" / "architectures"


@dataclass(frozen=True)
class Architecture:
    """The properties of a GPU that a launcher reads.

    Attributes:
        gpu: a product of this architecture.
        processors: its streaming multiprocessors.
        shared_kib: the most shared memory of a block, by opt-in: the CUDA programming guide's table
            of technical specifications per compute capability.
    """

    gpu: str
    processors: int
    shared_kib: int


# By compute capability, times ten.
KNOWN = {
    80: Architecture("A100", 108, 163),
    86: Architecture("A40", 84, 99),
    89: Architecture("L40S", 142, 99),
    90: Architecture("H200", 132, 227),
    100: Architecture("B200", 148, 227),
    103: Architecture("B300", 148, 227),
    120: Architecture("RTX PRO 6000", 188, 99),
}


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled for one architecture.

    Attributes:
        capability: compute capability times ten, e.g. 100 for SM100.
        kernel: its name.
        case: the first call that launches it, of those in ``architecture_cases.py``.
        warps, registers: of a program, of a thread.
        spilled: bytes of registers that a thread stores to memory; 0 unless they do not suffice.
        stack: bytes of local memory of a thread, for calls and for what is addressed by a number.
        shared, limit: bytes of shared memory of a program, and the most that the GPU allows.
        warnings: of ptxas.
        error: in one line, if it does not compile; then the numbers are 0.
    """

    capability: int
    kernel: str
    case: str
    warps: int = 0
    registers: int = 0
    spilled: int = 0
    stack: int = 0
    shared: int = 0
    limit: int = 0
    warnings: tuple[str, ...] = ()
    error: str | None = None

    @property
    def accepted(self) -> str | None:
        """Why this kernel may spill registers; ``None`` where it may not.

        >>> Compiled(90, "mla_decode_kernel", "a call").accepted
        'the fastest tile measured on an H200'
        """
        if self.kernel == "mla_decode_kernel" and "float32" in self.case:
            return "float32 has no tensor core path and is for tests"
        if self.capability == 90 and self.kernel.startswith(("mla_decode", "merge_splits")):
            return "the fastest tile measured on an H200"
        return None

    @property
    def problems(self) -> list[str]:
        """What would stop the kernel, or slow it down without need; empty if all is well.

        >>> Compiled(120, "k", "a call", shared=218_112, limit=101_376, spilled=8).problems
        ['218112 bytes of shared memory, limit 101376', '8 bytes of registers spilled']
        """
        found = [self.error] if self.error else []
        if self.shared > self.limit:
            found.append(f"{self.shared} bytes of shared memory, limit {self.limit}")
        if self.spilled and not self.accepted:
            found.append(f"{self.spilled} bytes of registers spilled")
        return [*found, *self.warnings]


def has_compiler() -> bool:
    """Whether the installed Triton can compile for NVIDIA GPUs."""
    return device.has_triton() and importlib.util.find_spec("triton.backends.nvidia") is not None


def compile_all(
    capabilities: Sequence[int] = tuple(KNOWN), *, cases: Sequence[str] | None = None
) -> list[Compiled]:
    """Compile the kernels of all cases for each architecture, in child processes without a GPU.

    Args:
        capabilities: compute capabilities times ten.
        cases: beginnings of names of ``architecture_cases.CASES``; all by default.

    Returns:
        By architecture, one for each kernel and specialisation.

    Raises:
        ValueError: an unknown architecture, or a Triton without a compiler for NVIDIA GPUs.
        ChildError: a process ended without an answer.
    """
    for capability in capabilities:
        known = capability in KNOWN
        check.require(known, "capability", f"one of {', '.join(map(str, KNOWN))}", capability)
    check.require(has_compiler(), "triton", "one that compiles for NVIDIA GPUs", "none")
    env = {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(CACHE),
        "TRITON_DUMP_PTXAS_LOG": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    workers = min(len(capabilities), len(os.sched_getaffinity(0)))
    deadline = time.monotonic() + TIMEOUT_S
    started = [
        children.start(compile_here, capabilities[first::workers], cases, env=env) for first in range(workers)
    ]
    try:
        found = [one for child in started for one in child.wait(deadline - time.monotonic()).answer()]
    finally:
        for child in started:
            child.end()
    return sorted(found, key=lambda one: (one.capability, one.kernel))


def compile_here(capabilities: Sequence[int], cases: Sequence[str] | None) -> list[Compiled]:
    """Do it in this process, which is of no other use afterwards: its device is a pretence."""
    from tools import no_gpu

    gpu = no_gpu.install()
    # Kernel modules must be imported behind that.
    from tools.architecture_cases import CASES

    found: dict[tuple[int, str], Compiled] = {}
    for capability in capabilities:
        known = KNOWN[capability]
        gpu.capability, gpu.processors, gpu.shared = capability, known.processors, known.shared_kib * 1024
        for name, case in CASES.items():
            if cases is not None and not name.startswith(tuple(cases)):
                continue
            gpu.launched.clear()
            try:
                with gpu:
                    case()
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                found[capability, name] = Compiled(capability, "(none)", name, error=reason)
            for kernel, log in gpu.launched:
                found.setdefault((capability, kernel.hash), _read(name, kernel.metadata, log, gpu))
    return [*found.values()]


def _read(case: str, made: Any, log: str, gpu: Any) -> Compiled:
    """What Triton and ptxas say of a kernel."""
    return Compiled(
        gpu.capability,
        made.name.strip("_"),
        case,
        warps=made.num_warps,
        registers=_sum(r"Used (\d+) registers", log),
        spilled=_sum(r"(\d+) bytes spill stores", log),
        stack=max(map(int, re.findall(r"(\d+) bytes (?:cumulative stack size|stack frame)", log)), default=0),
        shared=made.shared,
        limit=gpu.shared,
        warnings=tuple(line.strip() for line in log.splitlines() if "warning" in line.lower()),
        # An earlier process was ended between the compilation and the log.
        error=None if "Used" in log else f"its compiler's log was lost; delete {CACHE} and try again",
    )


def _sum(pattern: str, text: str) -> int:
    return sum(map(int, re.findall(pattern, text)))


def summary(found: Sequence[Compiled]) -> list[dict[str, Any]]:
    """One row for each kernel on each architecture: the worst of its specialisations.

    >>> rows = summary([Compiled(100, "k", "one", shared=8, limit=9), Compiled(100, "k", "two", limit=9)])
    >>> [(row["specialisations"], row["shared"], row["problems"]) for row in rows]
    [(2, 8, [])]
    """
    groups: dict[tuple[int, str], list[Compiled]] = {}
    for one in found:
        groups.setdefault((one.capability, one.kernel), []).append(one)
    return [
        {
            "capability": capability,
            "kernel": kernel,
            "specialisations": len(group),
            **{name: max(getattr(one, name) for one in group) for name in NUMBERS},
            "accepted": sorted({one.accepted for one in group if one.spilled and one.accepted}),
            "problems": [f"{one.case}: {problem}" for one in group for problem in one.problems],
        }
        for (capability, kernel), group in groups.items()
    ]


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """The summary as a table; bytes of registers spilled, and of shared memory with its limit."""
    table = Table("GPU", "kernel", "compiled", *NUMBERS, "problems", "accepted")
    for row in rows:
        texts = [str(row[name]) for name in ("specialisations", *NUMBERS)]
        notes = ["; ".join(row[name]) for name in ("problems", "accepted")]
        table.add_row(f"sm_{row['capability']}", row["kernel"], *texts, *notes)
    Console(width=150).print(table)


def main(arguments: Sequence[str]) -> int:
    """Compile, print, write; returns 1 if there are problems, 2 for bad input."""
    try:
        capabilities = [int(text) for text in arguments] or [*KNOWN]
        found = compile_all(capabilities)
    except (ValueError, children.ChildError) as error:
        print(f"staleproof: {error}", file=sys.stderr)
        return 2
    rows = summary(found)
    print_table(rows)
    if not arguments:
        versions = {name: device.version_of(name) for name in ("triton", "torch")}
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        path = store.checkout() / "workbook" / NAME
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        path.write_text(f'{{"date": "{date}", "versions": {json.dumps(versions)}, "rows": [\n{lines}\n]}}\n')
        print(f"written: {path}")
    problems = sum(bool(one.problems) for one in found)
    print(f"{len(found)} kernels compiled, {problems} with problems")
    return 1 if problems else 0


if __name__ == "__main__":
    # The children import compile_here by its module's name, which is not __main__.
    from tools import architectures

    sys.exit(architectures.main(sys.argv[1:]))
