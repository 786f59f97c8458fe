"""Small edits of the source, each of which must turn a named test or verdict red.

A test that cannot fail protects nothing. The ``.toml`` files beside this one list edits: file and function,
what the edit breaks, the piece of code that it replaces, and what must notice. An edit is made in a copy of
the tree, and only what it names is run there, in a process of its own, on the CPU.

The lists hold what mutmut cannot mutate or a test cannot ask plainly: kernels of Triton, and ingredients of
the incidents, whose verdict must change. Plain Python is mutated by mutmut (``make mutmut``).

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
from pathlib import Path
from typing import NoReturn
from unittest import mock

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
TIMEOUT_S = 600
COPIED = ("src", "tests", "tools")
# The second are files that another process is just compiling to.
LEFT_OUT = shutil.ignore_patterns("*.egg-info", "*.pyc.*")
SAID = "said.txt"
# Forked from a process that has imported torch, which takes longer than most of the tests.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "triton", "pytest", "hypothesis", "rich", "typer"])
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "TRITON_INTERPRET": "1",
    "COLUMNS": "250",
    # As many processes as cores run at a time: threads of torch would only wait for each other.
    "OMP_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}

# What became of an edit. Only the first is good.
RED, SURVIVED, GONE = "red", "survived", "old text is gone"
# Errors that say that the edited file does not run, which shows nothing about the test.
NO_PROGRAM = re.compile(r"\b(Syntax|Indentation|Name|Import|ModuleNotFound|UnboundLocal|Interpreter)Error\b")


@dataclass(frozen=True)
class Edit:
    """One edit. In its list it stands below ``[["FILE"."FUNCTION"]]``.

    Attributes:
        room: the list it is in, e.g. ``ops``.
        file: below ``src/staleproof``.
        function: dotted, e.g. ``Finding.ok``.
        old, new: an expression or a statement, there once in the function, and what takes its place
            (``edit`` in the list). Line breaks, quotes and brackets of ``old`` do not matter.
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

    @property
    def is_verdict(self) -> bool:
        """Whether a verdict must notice, not a test."""
        return self.red.startswith("run ")


def edits() -> list[Edit]:
    """Every edit of the lists."""
    return [
        Edit(path.stem, file, function, *row.pop("edit"), **row)
        for path in sorted(HERE.glob("*.toml"))
        for file, functions in tomllib.loads(path.read_text()).items()
        for function, rows in functions.items()
        for row in rows
    ]


def placed(root: Path, edit: Edit) -> Path:
    """The file of an edit in a checkout."""
    return root / "src/staleproof" / edit.file


def applied(edit: Edit, text: str) -> str | None:
    """The text of its file with the edit, or ``None`` if the old code is not there exactly once.

    >>> edit = Edit("", "a.py", "f", "x <= 0", "x == 0", breaks="", red="")
    >>> applied(edit, "def f(x): return (x\\n  <= 0)")
    'def f(x): return (x == 0)'
    """
    scope: ast.AST | None = ast.parse(text)
    for name in edit.function.split("."):
        named = (n for n in ast.walk(scope) if getattr(n, "name", None) == name) if scope else ()
        scope = next(named, None)
    (old,) = ast.parse(edit.old).body
    wanted = old.value if isinstance(old, ast.Expr) else old
    alike = [node for node in ast.walk(scope) if type(node) is type(wanted)] if scope else []
    found = [node for node in alike if ast.dump(node) == ast.dump(wanted)]
    if len(found) != 1:
        return None
    (node,) = found
    lines = text.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    return (text.encode()[:begin] + edit.new.encode() + text.encode()[end:]).decode()


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the checkout: what may be edited or written is copied, other folders are links to ours."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(folder)
        for path in CHECKOUT.iterdir():
            if path.name in COPIED:
                # Compiled files are copied with their time, so that only the edited file is compiled.
                shutil.copytree(path, root / path.name, ignore=LEFT_OUT)
            elif path.is_dir() and path.name[0] != ".":
                (root / path.name).symlink_to(path)
            elif path.is_file():
                shutil.copy2(path, root)
        yield root


def _child(root: str, names: Sequence[str]) -> NoReturn:
    """In a process of its own: import the copy, and run tests, or ask one verdict."""
    os.chdir(root)
    # Also here: a Python process has one fork server, which staleproof's own children may have started.
    os.environ |= ENVIRONMENT | {"PYTHONPATH": f"{root}/src"}
    sys.path.insert(0, f"{root}/src")
    with open(SAID, "wb") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    if names[0].startswith("run "):
        sys.exit(_ask(names[0]))
    import pytest

    sys.exit(pytest.main(["-qx", "-p", "no:cacheprovider", "--tb=no", *(f"tests/{name}" for name in names)]))


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


def _run(root: Path, *names: str) -> tuple[int, str]:
    """Exit code and output of tests, or of one verdict, in a copy; -1 if it took too long."""
    process = FORKS.Process(target=_child, args=(str(root), names))
    # For the process that is forked from, which starts with the first.
    with mock.patch.dict(os.environ, ENVIRONMENT):
        process.start()
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        return -1, f"no end after {TIMEOUT_S} s"
    said = root / SAID
    return process.exitcode, said.read_text(errors="replace") if said.exists() else ""


def tried(edit: Edit) -> tuple[str, str]:
    """Make one edit in a copy, and run there what must notice it.

    Returns:
        :data:`RED`, :data:`SURVIVED`, :data:`GONE`, or why it shows nothing; and one line of what was said.
    """
    with copied() as root:
        file = placed(root, edit)
        text = applied(edit, file.read_text()) if file.is_file() else None
        if text is None:
            return GONE, ""
        file.write_text(text)
        code, out = _run(root, edit.red)
    wanted = rf": {edit.red.rpartition(' | ')[2]} \(expected " if edit.is_verdict else "^FAILED "
    said = next((line for line in out.splitlines() if re.search(wanted, line)), "")
    if code == 0:
        return SURVIVED, ""
    if code != 1 or not said:
        return f"exit {code}, not a red test", out.strip().rpartition("\n")[2]
    if not edit.is_verdict and NO_PROGRAM.search(said.partition(" - ")[2]):
        return "the edited file does not run", said
    return RED, said


def red_anyway(names: Sequence[str]) -> list[str]:
    """The first of the tests, and each verdict, that is not as expected without any edit."""
    verdicts = [[name] for name in names if name.startswith("run ")]
    tests = [name for name in names if not name.startswith("run ")]
    with copied() as root:
        ran = [_run(root, *group) for group in (tests, *verdicts) if group]
    return [out.strip().rpartition("\n")[2] for code, out in ran if code != 0]


def main(words: Sequence[str]) -> int:
    """Make the edits whose list, file or test contains one of the words; returns 1 unless all are red."""
    wanted = [e for e in edits() if not words or any(w in f"{e.room} {e.file} {e.red}" for w in words)]
    begin, good = time.monotonic(), 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        anyway = pool.submit(red_anyway, [*dict.fromkeys(edit.red for edit in wanted)])
        # Verdicts first: they take longest.
        wanted.sort(key=lambda edit: not edit.is_verdict)
        for edit, (state, says) in zip(wanted, pool.map(tried, wanted), strict=True):
            good += state == RED
            name = state if state == RED else state.upper()
            print(f"{name}  {edit.file}: {edit.breaks}  {says[:100]}", flush=True)
    for line in anyway.result():
        print(f"red without an edit: {line}")
    print(f"{good} of {len(wanted)} edits noticed, {time.monotonic() - begin:.0f} s")
    return int(good < len(wanted) or bool(anyway.result()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
