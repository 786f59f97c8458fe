"""Runs the counterexamples of an audit alone, and says which show their break.

Each is run in an environment that holds what its first lines install, and nothing else: staleproof is not
importable there. (The audit itself runs a script beside the packages that it asked.)

    python tests/contract/alone.py workbook/audits/cpu.jsonl

Exit code 1: a script did not show its break.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from staleproof.cases.finding import Finding, read_findings

# What a script ends with while the kernel breaks its clause. A bfloat16 tensor prints over several lines.
EXPECTED = re.compile(r"^AssertionError: expected [\s\S]*, got ", re.MULTILINE)
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
    """A fresh virtual environment with what these commands install; its Python.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    home = folder / hashlib.sha256("\n".join(installs).encode()).hexdigest()[:12]
    python = home / "bin/python"
    if not (home / "done").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        for command in installs:
            subprocess.run([python, "-m", "pip", "-q", *command.split()], check=True, capture_output=True)
        (home / "done").touch()
    return python


def ending(text: str, python: Path | str, paths: Sequence[Path] = ()) -> str:
    """How a script ends: the line of its exception, the signal, or ``""`` if it ends quietly.

    Args:
        text: of the script.
        python: that runs it.
        paths: folders that are importable beside what that Python has.
    """
    kept = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTHONPATH")
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counterexample.py"
        path.write_text(text)
        try:
            done = subprocess.run(
                [str(python), "-P", "-c", ALONE, str(path)],
                capture_output=True,
                text=True,
                errors="replace",
                env=kept | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
                cwd=folder,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no end within {LIMIT_S} s"
    if done.returncode < 0:
        return f"signal {-done.returncode}"
    if not done.returncode:
        return ""
    if found := EXPECTED.search(done.stderr):
        return " ".join(found[0].split()) + " ..."
    last = EXCEPTION.findall(done.stderr) or done.stderr.split("\n")
    return next((line for line in reversed(last) if line.strip()), "?")


def shows(row: Finding, end: str) -> bool:
    """Whether a script shows what its row says: the assertion fails, or the process ends as it did there."""
    if EXPECTED.match(end):
        return True
    # Memory that an id out of range addresses is anybody's: one run ends there, another returns a wrong row.
    if row.question == "X" and OUTSIDE.search(end):
        return True
    return ("ended its process" in row.note and end.startswith("signal")) or (
        "CUDA error" in row.note and "CUDA error" in end
    )


def main() -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="rows whose package, version or subject holds this")
    parser.add_argument("--folder", type=Path, help="where the environments go; a temporary one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    asked = [
        row
        for row in read_findings(given.file)
        if row.script and given.only in f"{row.release} {row.variant}"
    ]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(given.jobs) as pool:
        folder = given.folder or Path(temporary)
        needed = sorted({"\n".join(commands(row.script)) for row in asked})
        pythons = {installs: environment(installs.split("\n"), folder) for installs in needed}

        def ask(row: Finding) -> str:
            return ending(row.script, pythons["\n".join(commands(row.script))])

        ends = [*pool.map(ask, asked)]
    wrong = 0
    for row, end in zip(asked, ends, strict=True):
        right = shows(row, end)
        wrong += not right
        name = f"{row.release} {row.variant} {row.question}"
        print(f"{'shows it' if right else 'DOES NOT'}  {name}: {end or 'ends quietly'}")
    print(f"{len(asked) - wrong} of {len(asked)} scripts show their break alone")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
