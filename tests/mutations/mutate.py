"""Small edits of the source, each of which must turn a named test or verdict red.

A test that cannot fail protects nothing. The ``.toml`` files beside this one list edits: what each
breaks, the text it replaces, and what must notice. An edit is made in a copy of the tree, and only what
it names is run there, in a process of its own, on the CPU.

``make mutations`` makes all of them and writes ``workbook/mutations.md``;
``python tests/mutations/mutate.py ops fp8`` makes those whose list, file or test contains a word.
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from multiprocessing import forkserver
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
PAGE = CHECKOUT / "workbook" / "mutations.md"
TIMEOUT_S = 600
SAID = "said.txt"
# Forked from a process that has imported torch, which takes longer than most of the tests.
FORKS = multiprocessing.get_context("forkserver")

# What became of an edit. Only the first is good.
RED, SURVIVED, GONE = "red", "survived", "old text is gone"
# Errors that say that the edited file does not run, which shows nothing about the test.
NO_PROGRAM = re.compile(r"\b(Syntax|Indentation|Name|Import|ModuleNotFound|UnboundLocal|Interpreter)Error\b")


@dataclass(frozen=True)
class Edit:
    """One edit.

    Attributes:
        room: the list it is in, e.g. ``ops``.
        file: below ``src/staleproof``.
        breaks: what is wrong then, in one sentence.
        old, new: the text to replace, which is there once, and the text in its place.
        red: what must notice: a test below ``tests`` (``ops/test_fp8.py::test_strided_rows``), or a
            verdict (``run INCIDENT | question | variant | verdict``) that is not the expected one.
        sample: whether ``make test`` makes it too.
    """

    room: str
    file: str
    breaks: str
    old: str
    new: str
    red: str
    sample: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of an edit: :data:`RED`, :data:`SURVIVED`, :data:`GONE`, or why it shows nothing."""

    edit: Edit
    state: str
    says: str
    seconds: float


def edits() -> list[Edit]:
    """Every edit of the lists."""
    return [
        Edit(path.stem, **row)
        for path in sorted(HERE.glob("*.toml"))
        for row in tomllib.loads(path.read_text())["edit"]
    ]


def applied(edit: Edit, text: str) -> str | None:
    """The text of its file with the edit, or ``None`` if the old text is not there exactly once."""
    return text.replace(edit.old, edit.new) if text.count(edit.old) == 1 else None


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the checkout: ``src`` and ``tests`` are copied, other folders are links to ours."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        root = Path(folder)
        for path in CHECKOUT.iterdir():
            if path.name in ("src", "tests"):
                # Compiled files are copied with their time, so that only the edited file is compiled.
                shutil.copytree(path, root / path.name, ignore=shutil.ignore_patterns("*.egg-info"))
            elif path.is_dir() and path.name[0] != ".":
                (root / path.name).symlink_to(path)
            elif path.is_file():
                shutil.copy2(path, root)
        yield root


def _child(root: str, names: Sequence[str], stop: bool) -> NoReturn:
    """In a process of its own: import the copy, and run tests, or ask one verdict."""
    os.chdir(root)
    os.environ["PYTHONPATH"] = f"{root}/src"
    sys.path.insert(0, f"{root}/src")
    with open(SAID, "wb") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    if names[0].startswith("run "):
        sys.exit(_ask(names[0]))
    import pytest

    options = ["-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", *(["-x"] if stop else [])]
    sys.exit(int(pytest.main([*options, *(f"tests/{name}" for name in names)])))


def _ask(red: str) -> int:
    """The exit code of ``staleproof run`` with one variant of one question."""
    incident, question, variant, _ = red.removeprefix("run ").split(" | ")
    from staleproof import cli, device

    device.select("cpu")
    from staleproof.harness.questions import Question

    table = importlib.import_module(f"staleproof.incidents.{incident}.questions").QUESTIONS
    rows = [row for row in table.rows if row.name == question and variant in row.subjects]
    assert rows, f"{incident} does not ask {question!r} about {variant!r}"
    table.rows = [
        replace(row, variants={variant: row.subjects[variant]}) if isinstance(row, Question) else row
        for row in rows
    ]
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
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "COLUMNS": "250",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
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


def tried(edit: Edit) -> Outcome:
    """Make one edit and look whether it is noticed."""
    begin = time.monotonic()
    with copied() as root:
        file = root / "src/staleproof" / edit.file
        text = applied(edit, file.read_text()) if file.is_file() else None
        if text is None:
            return Outcome(edit, GONE, "", time.monotonic() - begin)
        file.write_text(text)
        return Outcome(edit, *noticed(edit, root), time.monotonic() - begin)


def red_anyway(names: Sequence[str]) -> list[str]:
    """Those of the named tests and verdicts that are red without any edit."""
    with copied() as root:
        verdicts = [name for name in names if name.startswith("run ")]
        found = [name for name in verdicts if _run(root, name)[0] != 0]
        tests = [name for name in names if name not in verdicts]
        code, out = _run(root, *tests) if tests else (0, "")
        if code != 0:
            bad = re.findall(r"^(?:FAILED|ERROR) tests/(.*?)(?: - .*)?$", out, re.MULTILINE)
            # A file, or a test without its parameters, stands for all in it.
            ours = [name for name in tests if any(one.startswith(name) for one in bad)]
            found += ours or [f"exit {code}: {out.splitlines()[-1]}"]
        return found


def chosen(words: Sequence[str]) -> list[Edit]:
    """The edits whose list, file or test contains one of the words; all without words."""
    return [e for e in edits() if not words or any(w in f"{e.room} {e.file} {e.red}" for w in words)]


def page(outcomes: Iterable[Outcome]) -> str:
    """``workbook/mutations.md``: every edit, and what turned red."""
    rows = [
        f"| `{done.edit.file}` | {done.edit.breaks} | {_shown(done.edit.red)} |".replace("\n", " ")
        for done in outcomes
    ]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "triton"))
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return "\n".join(
        [
            "# Mutations",
            "",
            f"{len(rows)} small edits of the source. Each was made in a copy of the tree, and the test or",
            "verdict beside it turned red there; without an edit all of them are green. Written by",
            f"`make mutations`, {day}, on a CPU, Python {platform.python_version()}, {versions}.",
            "",
            "| file | the edit | turned red |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def _shown(red: str) -> str:
    if red.startswith("run "):
        incident, question, variant, verdict = red.removeprefix("run ").split(" | ")
        return f"`staleproof run {incident}`, exit 1: {question}, {variant}: **{verdict}**"
    return "`" + red.replace("|", "\\|") + "`"


def main(words: Sequence[str]) -> int:
    """Make the edits, print a table, write the page if all were made; returns 1 unless all are red."""
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
            f"{done:>3}/{len(wanted)} {state} {outcome.seconds:5.1f} s  {edit.file}: {edit.breaks}",
            flush=True,
        )
        return outcome

    with ThreadPoolExecutor(workers) as pool:
        outcomes = [*pool.map(told, wanted)]
        names = [*dict.fromkeys(edit.red for edit in wanted)]
        print(f"the {len(names)} tests and verdicts without an edit")
        anyway = {name for part in pool.map(red_anyway, _parts(names, workers)) for name in part}
    table = Table("file", "the edit", "result", "what the test said")
    for outcome in outcomes:
        state = "red without it" if outcome.edit.red in anyway else outcome.state
        style = None if state == RED else "bold red"
        table.add_row(outcome.edit.file, outcome.edit.breaks, state, outcome.says[:100], style=style)
    Console(width=180).print(table)
    good = sum(o.state == RED and o.edit.red not in anyway for o in outcomes)
    for name in sorted(anyway):
        print(f"red without an edit: {name}")
    print(f"{good} of {len(outcomes)} edits noticed, {time.monotonic() - begin:.0f} s, {workers} at a time")
    if good < len(outcomes) or anyway:
        return 1
    if not words:
        PAGE.write_text(page(outcomes))
        print(f"written: {PAGE.relative_to(CHECKOUT)}")
    return 0


def _parts(names: Sequence[str], count: int) -> list[Sequence[str]]:
    return [part for part in (names[first::count] for first in range(count)) if part]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
