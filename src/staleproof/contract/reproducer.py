"""A reproducer of a broken clause: the inputs of one call in a file, and a script that makes this call alone.

In the process that asks, :func:`keep` writes the arguments of each call to a file before the kernel is
launched, so that they are there also if the kernel ends its process. A tensor is kept with the memory around
it: pages before and after a cache, bytes behind an operand. A script is run before it is handed on, and one
that does not show its break is not.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from staleproof import child as children
from staleproof import device as devices
from staleproof.audit import Subject
from staleproof.contract.contract import CLAUSES

Example = Mapping[str, Any]
_file: Path | None = None


def keep_in(file: Path | None) -> None:
    """Let :func:`keep` write to this file from now on; ``None``: nowhere."""
    global _file
    _file = file


def keep(arguments: Mapping[str, Any]) -> None:
    """Write the arguments of a call that comes next to the file of :func:`keep_in`."""
    # A copy from the GPU would end the recording of a graph.
    if _file is not None and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        torch.save({"inputs": dict(arguments)}, _file)


def last() -> dict[str, Any] | None:
    """The arguments of the last call, as they were before it; ``None`` if calls are not kept."""
    if _file is None:
        return None
    kept: dict[str, Any] = torch.load(_file)
    return kept


def right(
    expected: torch.Tensor, *, result: int = 0, rows: torch.Tensor | None = None, tolerance: float = 0.0
) -> Example | None:
    """The last call, and what one of its results should be.

    Args:
        expected: the whole result; a kernel's is brought to its shape.
        result: which of the kernel's results.
        rows: (rows,) bool, those to compare; all by default.
        tolerance: relative and absolute.
    """
    if (kept := last()) is None:
        return None
    wanted = expected if rows is None else expected[rows]
    return kept | _part(expected, result, rows) | {"expected": wanted.clone(), "tolerance": tolerance}


def same(
    clean: Example | None, found: torch.Tensor, *, result: int = 0, rows: torch.Tensor | None = None
) -> Example | None:
    """The last call, one of whose results should be as in a call before, with clean arguments.

    Args:
        clean: of :func:`last`, after that call.
        found: the result; what is compared is brought to its shape.
        result, rows: as for :func:`right`.
    """
    if (kept := last()) is None or clean is None:
        return None
    return kept | _part(found, result, rows) | {"clean": clean["inputs"]}


def written(stale: torch.Tensor, *, result: int = 0) -> Example | None:
    """The last call, one of whose results must be written where ``stale`` is true."""
    return None if (kept := last()) is None else kept | _part(stale, result, stale)


def over(shown: Example | None, fill: float) -> Example | None:
    """The example, over new memory that holds ``fill``, as for :func:`staleproof.contract.scenes.hold`."""
    return shown and {**shown, "over": fill}


def held(found: torch.Tensor, fill: float, usual: float, *, result: int = 0) -> Example | None:
    """The last call, one of whose results is another over memory that holds ``fill`` than over ``usual``."""
    kept = last()
    return over(kept and kept | _part(found, result, None) | {"usual": usual}, fill)


def routed(row: int, result: int, experts: int) -> Example | None:
    """The last call of a router, one of whose rows must name distinct experts of so many."""
    if (kept := last()) is None:
        return None
    return kept | {"result": result, "shape": None, "rows": [row], "experts": experts}


def _part(found: torch.Tensor, result: int, rows: torch.Tensor | None) -> dict[str, Any]:
    return {"result": result, "shape": tuple(found.shape), "rows": rows}


def _import(function: Any) -> list[str]:
    """The lines that import a function of a user's module, wherever the script is run from."""
    file = Path(inspect.getfile(function)).resolve()
    name = function.__module__.removeprefix("audited_")
    if name == "__init__":
        name = file.parent.name
    root = file.parents[name.count(".") + (file.name == "__init__.py")]
    installed = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")}
    # Whoever runs it has this package, for the decorators.
    here = root in installed or name.startswith("staleproof.")
    place = [] if here else [f"sys.path.insert(0, {str(root)!r})"]
    return [*place, f"from {name} import {function.__name__}"]


def script(subject: Subject, clause: str, note: str, shown: Example | None) -> str:
    """The text of a script that reads the file of its name with ``.pt`` and makes the call.

    Args:
        subject: the kernel.
        clause: that it breaks.
        note: what happened, one line.
        shown: what it compares; ``None`` where the call raises or ends the process.
    """
    function = subject.function
    given = "".join(f", {name}={value!r}" for name, value in subject.given.items())
    launches = "()" if subject.shape.get("planned") or subject.shape.get("prepared") else ""

    def call(inputs: str) -> str:
        return f"{function.__name__}(**{inputs}{given}){launches}"

    interpreted = ['os.environ.setdefault("TRITON_INTERPRET", "1")'] if devices.interpreting() else []
    lines = [
        f"# {subject.name}. Clause {clause}: {CLAUSES[clause]}",
        *([f"# {note}"] if note else []),
        *(["import os"] if interpreted else []),
        "import sys",
        "from pathlib import Path",
        "",
        "import torch",
        "",
        *interpreted,
        *_import(function),
        "",
        'case = torch.load(Path(__file__).with_suffix(".pt"))',
        "# Memory of torch.empty holds NaN.",
        'torch.set_deterministic_debug_mode("warn")',
    ]
    if shown and "over" in shown:
        lines[-2:] = ["# What new memory holds.", "from staleproof.contract.scenes import dirty_memory"]
    if shown is None:
        return "\n".join([*lines, call('case["inputs"]')]) + "\n"
    several = subject.kind == "attention" and "q_len" in subject.shape
    part = '.reshape(case["shape"])' if several else ""
    part += "" if shown["rows"] is None else '[case["rows"]]'
    lines += ["", "def run(inputs):", f"    result = {call('inputs')}"]
    memory = "out" if "out" in inspect.signature(function).parameters else "x"
    if memory == "out" or subject.shape.get("in_place"):
        lines.append(f'    result = inputs["{memory}"] if result is None else result')
    on = "    " if "over" in shown else ""
    lines += [
        f"    result = result[{shown['result']}] if isinstance(result, tuple | list) else result",
        f"    return result{part}.float()",
        "",
        *([f'with dirty_memory(float("{shown["over"]:g}")):'] if on else []),
        f'{on}got = run(case["inputs"])',
    ]
    if "usual" in shown:
        again = 'run(torch.load(Path(__file__).with_suffix(".pt"))["inputs"])'
        lines += [f'with dirty_memory(float("{shown["usual"]:g}")):', f"    want = {again}"]
    if "experts" in shown:
        distinct = '{*got[0].tolist()} & {*range(case["experts"])}'
        lines.append(f'assert len({distinct}) == got.shape[1], f"experts {{got.tolist()}}"')
    elif {"clean", "expected", "usual"} & {*shown}:
        wanted = 'run(case["clean"])' if "clean" in shown else 'case["expected"].float()'
        near = f"{shown.get('tolerance', 0):.3g}"
        lines += [
            *([] if "usual" in shown else [f"want = {wanted}"]),
            # Not torch.testing.assert_close: its first call imports half of torch.
            f"off = ~torch.isclose(got, want, rtol={near}, atol={near}, equal_nan=True)",
            'assert not off.any(), f"expected {want[off][:4].tolist()}, got {got[off][:4].tolist()}"',
        ]
    else:
        lines.append('assert not got.isnan().any(), f"{got.numel()} elements depend on what the memory held"')
    return "\n".join(lines) + "\n"


def name_of(kernel: str, clause: str) -> str:
    """The name of a reproducer's files, without their suffix."""
    return re.sub(r"[^A-Za-z0-9.]+", "_", f"{kernel}_{clause}")


def run_alone(file: str, folders: list[str]) -> None:
    """In a child: run a script as the main program, in an empty folder.

    Args:
        file: of the script.
        folders: put first on ``sys.path``, before installed packages.
    """
    installed = {sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib", "platstdlib")}
    sys.path[:] = [*folders, *(p for p in sys.path if any(p.startswith(place) for place in installed))]
    os.environ.pop("TRITON_INTERPRET", None)
    text = Path(file).read_text()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        exec(compile(text, file, "exec"), {"__name__": "__main__", "__file__": file})


def shows(note: str, ended: children.Ended) -> bool:
    """Whether a script shows what the note of its answer says."""
    if ended.code is None:
        return False
    if ended.code < 0:
        return "ended its process" in note
    match = re.search(r"raises (\w+)", note)
    # torch writes advice behind an error of CUDA.
    raised = match is not None and re.search(rf"^[\w.]*\b{match[1]}: ", ended.stderr, re.MULTILINE)
    return bool(ended.code) and bool(raised or "\nAssertionError: " in ended.stderr)


def is_shown(note: str, file: Path, limit_s: float) -> bool:
    """Run a script, and say whether it shows what the note says."""
    # Whoever runs it has this package, for the decorators.
    ours = [str(Path(__file__).parents[2])]
    return shows(note, children.call(run_alone, str(file), ours, timeout_s=limit_s + 60))
