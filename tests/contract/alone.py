"""Runs the counterexamples of an audit alone, and says which show their break.

Each is run in an environment that holds what its first lines install, and nothing else: staleproof is not
importable there. (The audit itself runs a script beside the packages that it asked.)

    python tests/contract/alone.py workbook/audits/cpu.jsonl

Exit code 1: a script did not show its break.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from staleproof.cases.children import Ended
from staleproof.cases.finding import Finding, read_findings
from staleproof.contract import scripts

# The line of an exception. Below that of a CUDA error torch prints advice on several more.
EXCEPTION = re.compile(r"^[\w.]+(?:Error|Exception): .*", re.MULTILINE)
# What an id out of range does to a kernel that indexes with it.
OUTSIDE = re.compile(r"CUDA error: (?:device-side assert|an illegal memory access)")
LIMIT_S = 300
# Runs a script as the main program, and lets nobody import this package.
ALONE = """
import runpy, sys
class Unimportable:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "staleproof":
            raise ImportError("a counterexample must not import staleproof")
sys.meta_path.insert(0, Unimportable())
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def commands(script: str) -> list[str]:
    """The pip commands in the first lines of a script, without their remarks."""
    found = re.findall(r"^# pip (install .+)$", script, re.MULTILINE)
    return [command.partition("#")[0].strip() for command in found]


def environment(installs: Sequence[str], folder: Path) -> Path:
    """A new virtual environment in the folder with what these commands install; its Python.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    home = Path(tempfile.mkdtemp(dir=folder))
    python = home / "bin/python"
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    for command in installs:
        subprocess.run([python, "-m", "pip", "-q", *command.split()], check=True, capture_output=True)
    return python


def ending(text: str, python: Path | str) -> Ended:
    """How a script ends, run by this Python in a folder of its own."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counterexample.py"
        path.write_text(text)
        command = [str(python), "-P", "-c", ALONE, str(path)]
        given: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "check": False}
        try:
            done = subprocess.run(command, env=kept, cwd=folder, timeout=LIMIT_S, **given)
        except subprocess.TimeoutExpired:
            return Ended([], None, "", "", LIMIT_S)
    return Ended([], done.returncode, done.stdout, done.stderr, LIMIT_S)


def told(ended: Ended) -> str:
    """The end of a script in one line."""
    if ended.code is None:
        return f"no end within {LIMIT_S} s"
    if not ended.code:
        return "ends quietly"
    found = EXCEPTION.findall(ended.stderr)
    return f"signal {-ended.code}" if ended.code < 0 else (found or [ended.last_line])[-1]


def shows(row: Finding, ended: Ended) -> bool:
    """Whether a script shows what its finding says: the assertion fails, or it ends as it did there."""
    if scripts.shows(row.note, ended):
        return True
    # Memory that an id out of range addresses is anybody's: one run ends there, another returns a wrong row.
    if row.question == "X" and OUTSIDE.search(ended.stderr):
        return True
    return "CUDA error" in row.note and "CUDA error" in ended.stderr


def main() -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="rows whose package, version or subject holds this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    asked = [
        row
        for row in read_findings(given.file)
        if row.script and given.only in f"{row.release} {row.variant}"
    ]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        needed = sorted({"\n".join(commands(row.script)) for row in asked})
        pythons = {installs: environment(installs.split("\n"), Path(folder)) for installs in needed}

        def ask(row: Finding) -> Ended:
            return ending(row.script, pythons["\n".join(commands(row.script))])

        ends = [*pool.map(ask, asked)]
    wrong = 0
    for row, end in zip(asked, ends, strict=True):
        right = shows(row, end)
        wrong += not right
        name = f"{row.release} {row.variant} {row.question}"
        print(f"{'shows it' if right else 'DOES NOT'}  {name}: {told(end)}")
    print(f"{len(asked) - wrong} of {len(asked)} scripts show their break alone")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
