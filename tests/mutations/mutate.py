"""Small edits of the source, each of which must turn a named test or verdict red.

A test that cannot fail protects nothing. The ``.toml`` files beside this one list edits: file and function,
what the edit breaks, the piece of code that it replaces, and what must notice. An edit is made in a copy of
the tree, and only what it names is run there, in a process of its own, on the CPU.

An edit is found by the shape of its code: line breaks, quotes and brackets do not matter, and if the code is
not there, code that differs from it in names alone is taken.

The lists hold what needs a choice: kernels of Triton, ingredients of the incidents, probes, documents. Plain
Python is mutated by mutmut (``make mutmut``), which needs no list.

``make mutations`` makes all of them;
``python tests/mutations/mutate.py ops fp8`` makes those whose list, file or test contains a word.
"""

from __future__ import annotations

import ast
import importlib
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
TIMEOUT_S = 600
# Not copied. The second are files that another process is just compiling to.
LEFT_OUT = shutil.ignore_patterns("*.egg-info", "*.pyc.*")
SAID, TOOK = "said.txt", "took.txt"
# Forked from a process that has imported torch, which takes longer than most of the tests.
FORKS = multiprocessing.get_context("forkserver")

# What became of an edit. Only the first is good.
RED, SURVIVED, GONE = "red", "survived", "old text is gone"
# Errors that say that the edited file does not run, which shows nothing about the test.
NO_PROGRAM = re.compile(r"\b(Syntax|Indentation|Name|Import|ModuleNotFound|UnboundLocal|Interpreter)Error\b")


@dataclass(frozen=True)
class Edit:
    """One edit. In its list it stands below ``[["FILE"."FUNCTION"]]``.

    Attributes:
        room: the list it is in, e.g. ``ops``.
        file: below ``src/staleproof``, or in ``tools``.
        function: dotted, e.g. ``Finding.ok``; ``module`` for the whole file, and ``text`` for a file that is
            no Python, where ``old`` is searched as text.
        old, new: an expression or statements, there once in the function, and what takes its place
            (``edit`` in the list).
        breaks: what is wrong then, in one sentence.
        red: what must notice: a test below ``tests`` (``ops/test_fp8.py::test_every_rounding_case``), or a
            verdict (``run INCIDENT | question | variant | verdict``) that is not the expected one.
        sample: whether ``make test`` makes it too.
    """

    room: str
    file: str
    function: str
    old: str
    new: str
    breaks: str
    red: str
    sample: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of an edit: :data:`RED`, :data:`SURVIVED`, :data:`GONE`, or why it shows nothing.

    ``seconds`` passed meanwhile; ``cpu_s`` are the processor's, which do not depend on what else runs.
    """

    edit: Edit
    state: str
    says: str
    seconds: float
    cpu_s: float = 0.0


def edits() -> list[Edit]:
    """Every edit of the lists."""
    return [
        Edit(path.stem, file, function, *row.pop("edit"), **row)
        for path in sorted(HERE.glob("*.toml"))
        for file, functions in tomllib.loads(path.read_text()).items()
        for function, rows in functions.items()
        for row in rows
    ]


def applied(edit: Edit, text: str) -> str | None:
    """The text of its file with the edit, or ``None`` if the old code is not there exactly once.

    >>> edit = Edit("", "a.py", "f", "x <= 0", "x == 0", breaks="", red="")
    >>> applied(edit, "def f(tokens): return (tokens\\n  <= 0)")
    'def f(tokens): return (tokens == 0)'
    """
    if not edit.file.endswith(".py"):
        return text.replace(edit.old, edit.new) if text.count(edit.old) == 1 else None
    tree, old = ast.parse(text), ast.parse(edit.old).body
    scope = _function(tree, edit.function)
    for within, exactly in ((scope, True), (tree, True), (scope, False)):
        found = [place for place in _places(within, old, exactly) if within] if within else []
        if found:
            return _replaced(text, *found[0], edit.new) if len(found) == 1 else None
    return None


def _function(tree: ast.Module, name: str) -> ast.AST | None:
    """The function or class of a dotted name; the module for ``module``; ``None`` if it is not there."""
    found: ast.AST | None = tree
    for part in name.split(".") if name != "module" else ():
        below = (n for n in ast.walk(found) if n is not found) if found else ()
        found = next((n for n in below if getattr(n, "name", None) == part and hasattr(n, "body")), None)
    return found


Names = dict[tuple[str, str], str]


def _places(scope: ast.AST, old: list[ast.stmt], exactly: bool) -> Iterator[tuple[list[ast.AST], Names]]:
    """Where the old code is: the nodes, and what the names of the old code are called there."""
    one = old[0].value if len(old) == 1 and isinstance(old[0], ast.Expr) else None
    for node in ast.walk(scope):
        if one is not None:
            candidates = [[node]]
        else:
            bodies = (getattr(node, field, None) for field in ("body", "orelse", "finalbody"))
            candidates = [
                body[at : at + len(old)]
                for body in bodies
                if isinstance(body, list)
                for at in range(len(body) - len(old) + 1)
            ]
        for nodes in candidates:
            names: Names = {}
            if _same([one] if one is not None else old, nodes, names) and (
                not exactly or all(name == there for (_, name), there in names.items())
            ):
                yield nodes, names


def _same(a: object, b: object, names: Names) -> bool:
    """Whether two pieces of code differ in names alone, each name consistently; fills ``names``."""
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_same, a, b, [names] * len(a)))
    if not isinstance(a, ast.AST):
        return type(a) is type(b) and a == b
    if type(a) is not type(b):
        return False
    for field in a._fields:
        x, y = getattr(a, field, None), getattr(b, field, None)
        if field in ("id", "attr", "arg") and x is not None and y is not None:
            if names.setdefault((field, x), y) != y:
                return False
        elif field not in ("ctx", "kind") and not _same(x, y, names):
            return False
    return True


def _replaced(text: str, nodes: list[ast.AST], names: Names, new: str) -> str:
    """The text with the new code, in the names of its place, instead of the nodes."""
    if any(name != there for (_, name), there in names.items()):
        tree = ast.parse(new)
        for node in ast.walk(tree):
            for field in {"id", "attr", "arg"} & {*node._fields}:
                setattr(node, field, names.get((field, getattr(node, field)), getattr(node, field)))
        new = ast.unparse(tree)
    lines = text.encode().splitlines(keepends=True)
    first, last = nodes[0], nodes[-1]
    begin = sum(map(len, lines[: first.lineno - 1])) + first.col_offset
    end = sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset
    if isinstance(first, ast.stmt):
        new = new.replace("\n", "\n" + " " * first.col_offset)
    return (text.encode()[:begin] + new.encode() + text.encode()[end:]).decode()


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the checkout: ``src`` and ``tests`` are copied, other folders are links to ours."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(folder)
        for path in CHECKOUT.iterdir():
            if path.name in ("src", "tests", "tools"):
                # Compiled files are copied with their time, so that only the edited file is compiled.
                shutil.copytree(path, root / path.name, ignore=LEFT_OUT)
            elif path.is_dir() and path.name[0] != ".":
                (root / path.name).symlink_to(path)
            elif path.is_file():
                shutil.copy2(path, root)
        yield root


ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "TRITON_INTERPRET": "1",
    "COLUMNS": "250",
    # As many processes as cores run at a time: threads of torch would only wait for each other.
    "OMP_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}


def _child(root: str, names: Sequence[str], stop: bool) -> NoReturn:
    """In a process of its own: import the copy, and run tests, or ask one verdict."""
    os.chdir(root)
    # Also here: a Python process has one fork server, which staleproof's own children may have started.
    os.environ |= ENVIRONMENT | {"PYTHONPATH": f"{root}/src"}
    sys.path.insert(0, f"{root}/src")
    with open(SAID, "wb") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    try:
        sys.exit(_ask(names[0]) if names[0].startswith("run ") else _test(names, stop))
    finally:
        Path(root, TOOK).write_text(str(sum(os.times()[:4])))


def _test(names: Sequence[str], stop: bool) -> int:
    """The exit code of pytest for tests of the copy."""
    import pytest

    options = ["-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", *(["-x"] if stop else [])]
    return int(pytest.main([*options, *(f"tests/{name}" for name in names)]))


def _ask(red: str) -> int:
    """The exit code of ``staleproof run`` with one variant of one question."""
    incident, question, variant, _ = red.removeprefix("run ").split(" | ")
    from staleproof import device
    from staleproof.cli import app as cli

    device.select("cpu")
    table = importlib.import_module(f"staleproof.incidents.{incident}.cases").TABLE
    table.cases = [c for c in table.cases if (c.key.question, c.key.variant) == (question, variant)]
    assert table.cases, f"{incident} does not ask {question!r} about {variant!r}"
    return cli.main(["run", incident, "--device", "cpu", "--json", "findings.jsonl"])


def _run(root: Path, *names: str, stop: bool = False) -> tuple[int, str]:
    """Exit code and output of tests, or of one verdict, in a copy; -1 if it took too long."""
    _start_server()
    process = FORKS.Process(target=_child, args=(str(root), names, stop))
    process.start()
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        return -1, f"no end after {TIMEOUT_S} s"
    said = root / SAID
    return process.exitcode, said.read_text(errors="replace") if said.exists() else ""


@cache
def _start_server() -> None:
    """Start the process that the others are forked from: it has imported torch, and nothing of ours."""
    FORKS.set_forkserver_preload(["torch", "triton", "pytest", "hypothesis", "rich", "typer"])
    before = dict(os.environ)
    os.environ |= ENVIRONMENT
    forkserver.ensure_running()
    os.environ.clear()
    os.environ.update(before)


def noticed(edit: Edit, root: Path) -> tuple[str, str]:
    """Run in a copy what must notice its edit.

    Returns:
        The state for an :class:`Outcome`, and what the process said about it in one line.
    """
    is_verdict = edit.red.startswith("run ")
    code, out = _run(root, edit.red, stop=True)
    wanted = rf": {edit.red.rpartition(' | ')[2]} \(expected " if is_verdict else "^FAILED "
    said = next((line for line in out.splitlines() if re.search(wanted, line)), "")
    if code == 0:
        return SURVIVED, ""
    if code != 1 or not said:
        lines = [line for line in out.splitlines() if line.strip()]
        return f"exit {code}, not a red test", lines[-1] if lines else ""
    error = said.partition(" - ")[2]
    if NO_PROGRAM.search(error):
        return "the edited file does not run", error
    return RED, said if is_verdict else error


def placed(root: Path, edit: Edit) -> Path:
    """The file of an edit in a checkout."""
    return root / ("" if edit.file.startswith("tools/") else "src/staleproof") / edit.file


def tried(edit: Edit) -> Outcome:
    """Make one edit and look whether it is noticed."""
    begin = time.monotonic()
    with copied() as root:
        file = placed(root, edit)
        text = applied(edit, file.read_text()) if file.is_file() else None
        if text is None:
            return Outcome(edit, GONE, "", time.monotonic() - begin)
        file.write_text(text)
        state, says = noticed(edit, root)
        took = root / TOOK
        cpu_s = float(took.read_text()) if took.exists() else 0.0
        return Outcome(edit, state, says, time.monotonic() - begin, cpu_s)


def red_anyway(names: Sequence[str]) -> list[str]:
    """Those of the named tests that are red without any edit, or all of the named verdicts if theirs is.

    Args:
        names: tests, or verdicts of one variant of one question.
    """
    with copied() as root:
        if names[0].startswith("run "):
            return [*names] if _run(root, names[0])[0] != 0 else []
        code, out = _run(root, *names)
        if code == 0:
            return []
        bad = re.findall(r"^(?:FAILED|ERROR) tests/(.*?)(?: - .*)?$", out, re.MULTILINE)
        # A file, or a test without its parameters, stands for all in it.
        ours = [name for name in names if any(one.startswith(name) for one in bad)]
        return ours or [f"exit {code}: {out.splitlines()[-1]}"]


def unedited(names: Sequence[str], parts: int) -> list[Sequence[str]]:
    """What to run without an edit, in groups for :func:`red_anyway`: each asks a verdict once.

    >>> unedited(["run a | q | v | nan", "run a | q | v | wrong", "x.py", "y.py", "z.py"], 2)
    [['run a | q | v | nan', 'run a | q | v | wrong'], ['x.py', 'z.py'], ['y.py']]
    """
    asked: dict[str, list[str]] = {}
    for name in names:
        if name.startswith("run "):
            asked.setdefault(name.rpartition(" | ")[0], []).append(name)
    tests = [name for name in names if not name.startswith("run ")]
    return [*asked.values(), *filter(None, (tests[first::parts] for first in range(parts)))]


def chosen(words: Sequence[str]) -> list[Edit]:
    """The edits whose list, file or test contains one of the words; all without words."""
    return [e for e in edits() if not words or any(w in f"{e.room} {e.file} {e.red}" for w in words)]


def main(words: Sequence[str]) -> int:
    """Make the edits and print a table; returns 1 unless all are red."""
    # Verdicts first: they take longest.
    wanted = sorted(chosen(words), key=lambda edit: not edit.red.startswith("run "))
    workers = len(os.sched_getaffinity(0))
    begin, done = time.monotonic(), 0

    def told(edit: Edit) -> Outcome:
        nonlocal done
        outcome = tried(edit)
        done += 1
        state = f"{outcome.state:<10}" if outcome.state == RED else outcome.state.upper()
        print(
            f"{done:>3}/{len(wanted)} {state} {outcome.seconds:5.1f} s, {outcome.cpu_s:5.1f} of CPU  "
            f"{edit.file}: {edit.breaks}",
            flush=True,
        )
        return outcome

    names = [*dict.fromkeys(edit.red for edit in wanted)]
    with ThreadPoolExecutor(workers) as pool:
        # The longest first, so that no worker is left with one of them at the end.
        without = [pool.submit(red_anyway, part) for part in unedited(names, workers)]
        outcomes = [*pool.map(told, wanted)]
        anyway = {name for part in without for name in part.result()}
    table = Table("file", "the edit", "result", "what the test said")
    for outcome in outcomes:
        state = "red without it" if outcome.edit.red in anyway else outcome.state
        style = None if state == RED else "bold red"
        table.add_row(outcome.edit.file, outcome.edit.breaks, state, outcome.says[:100], style=style)
    Console(width=180).print(table)
    good = sum(o.state == RED and o.edit.red not in anyway for o in outcomes)
    for name in sorted(anyway):
        print(f"red without an edit: {name}")
    seconds, cpu_s = time.monotonic() - begin, sum(outcome.cpu_s for outcome in outcomes)
    print(f"{good} of {len(outcomes)} edits noticed, {seconds:.0f} s, {workers} at a time; CPU {cpu_s:.0f} s")
    if good < len(outcomes) or anyway:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
