"""Runs a notebook's code cells twice while every finding says something else than it did.

    echo notebook.ipynb | python guard.py

First every finding is ``not run``, without its numbers; then each has a verdict that nobody expects.
For each line of its input prints one of JSON: what the cells print in each mode, or the error. Cells that
raise are skipped, and so is what no stored verdict line comes from. Always on the CPU, so that a
machine with a GPU need not wait for it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import multiprocessing
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partialmethod, wraps
from pathlib import Path
from typing import Any

# For tools, which the contract reads.
sys.path.insert(0, str(Path(__file__).parents[2]))

from contract import VERDICT_LINE, output_text

NOT_RUN, FLIPPED = "not run", "flipped"
MODES = (NOT_RUN, FLIPPED)


def force(mode: str) -> None:
    """Make every finding of this process say ``mode``, however it comes to be; ask no questions."""
    from staleproof import lab
    from staleproof.cases import run
    from staleproof.incidents.kv_reuse import scene
    from staleproof.report import plots

    build = getattr(lab.Finding.__init__, "__wrapped__", lab.Finding.__init__)

    @wraps(build)
    def forced(self: Any, *args: Any, **fields: Any) -> None:
        build(self, *args, **fields)
        # Every number is there: a cell that only stumbles over a missing one would prove nothing.
        changes = {"verdict": mode, "outcome": lab.Outcome.OPEN, "numbers": defaultdict(int)}
        # A verdict line is looked for by its grade.
        changes["grade"] = self.grade or "replica"
        if mode == NOT_RUN:
            changes |= {"outcome": lab.Outcome.NOT_RUN, "grade": "", "of": "", "numbers": {}}
            changes["note"] = "forced by the guard"
        for name, value in changes.items():
            object.__setattr__(self, name, value)

    def answer(case: Any, device: str, scenes: Any) -> lab.Finding:
        # The expected verdict is kept, so that a comparison with it must fail.
        expected = case.expected if isinstance(case, lab.Case) else case.expected(device)
        return lab.Finding(*case.key[:3], NOT_RUN, lab.Outcome.NOT_RUN, expected=expected)

    lab.Finding.__init__ = forced  # type: ignore[method-assign]
    run._put = lab._run = answer
    # Only findings say what came out: no pictures, and shorter runs, each once. Half of the time.
    plots.picture = lambda *args: None
    scene.Scene.__init__ = partialmethod(scene.Scene.__init__, steps=150)  # type: ignore[method-assign]
    scene.judge = cache(scene.judge)
    run._Scenes._begin = lambda self, scene: None  # type: ignore[method-assign,assignment]


def sources(cells: list[Any]) -> Iterator[str]:
    """The code of each cell that has a verdict line stored, or binds or may change what such a one reads.

    Of other cells only the imports: what they draw and compute takes longer than all the rest, and no verdict
    comes from it. The cell that says the machine is kept too.
    """
    trees = [(ast.parse(cell.source), cell) for cell in cells if cell.cell_type == "code"]
    imports = [one for tree, _ in trees for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom)]
    imported = {alias.asname or alias.name for one in imports for alias in one.names}
    needed: set[str] = set()
    kept = []
    for tree, cell in reversed(trees):
        changed, read = set(), set()
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name):
                    (read if isinstance(node.ctx, ast.Load) else changed).add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    changed.add(name)
                case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()):
                    changed.add(name)
                case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
                    changed.add(name)
        said = output_text(cell)
        if VERDICT_LINE.search(said) or said.startswith("machine: ") or changed & needed:
            kept.append(cell.source)
            needed |= read - imported
        else:
            kept.append(ast.unparse([one for one in tree.body if one in imports]))
    yield from reversed(kept)


def printed(path: Path) -> dict[str, list[str]]:
    """What the code cells of a notebook print in each mode. Changes this process for good.

    The modes share what a notebook computes besides its findings: no cache of ours keeps one.
    """
    import nbformat
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance(colors="nocolor", history_length=0)
    shell.history_manager.enabled = False
    os.chdir(path.parent)
    lines: dict[str, list[str]] = {mode: [] for mode in MODES}
    for mode in MODES:
        force(mode)
        shell.reset()
        for source in sources(nbformat.read(path, as_version=4).cells):
            said = io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
                shell.run_cell(source, silent=True)
            lines[mode] += said.getvalue().splitlines()
    return lines


def answer_lines() -> None:
    """Run the notebook that each line of the input names, both ways, in a process of its own."""
    # What else writes to the standard output, a library or a process that a cell starts, is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        path = Path(line.strip()).resolve()
        try:
            with multiprocessing.get_context("fork").Pool(1) as pool:
                said: dict[str, Any] = pool.apply(printed, (path,))
        except Exception:
            said = {"error": traceback.format_exc()}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    # One thread: the operations are small, and a second thread only slows them down.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    # As in tests/conftest.py: nbformat does without it, and with it takes a second more to import.
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
    # What takes seconds to import is imported once, for all notebooks; each run changes a process of its own.
    import IPython  # noqa: F401
    import matplotlib.backends.backend_svg  # noqa: F401
    import nbformat  # noqa: F401
    import seaborn  # noqa: F401
    import torch._dynamo  # noqa: F401

    from staleproof.incidents.kv_reuse import scene  # noqa: F401
    from staleproof.report import plots, show  # noqa: F401

    answer_lines()
