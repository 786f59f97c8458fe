"""No notebook prints a verdict that its findings do not give.

Each notebook's cells run once with every finding forced to ``not run``, and once with every verdict
changed; cells that no stored verdict line depends on are left out. No verdict line that the notebook has
stored may come out again.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

sys.path.insert(0, str(Path(__file__).parent))

from guard import MODES, NOT_RUN

from contract import NOTEBOOKS, VERDICT_LINE, code_cells, output_text

HERE = Path(__file__).resolve().parent
WORD = re.compile(r"^(?:(?:MEASURED|INTERPRETED|RECORDED|\+)+)\s+")


def verdicts(text: str) -> set[str]:
    """The verdict lines of a text, without the word that says where the values come from."""
    return {WORD.sub("", line) for line in text.splitlines() if VERDICT_LINE.match(line)}


def stored(path: Path) -> set[str]:
    """The verdict lines in the outputs of a notebook."""
    nb = nbformat.read(path, as_version=4)
    return {line for cell in code_cells(nb) for line in verdicts(output_text(cell))}


@cache
def guard() -> subprocess.Popen[str]:
    """The process that all notebooks are run from. It ends with its input, and so with this one."""
    command = [sys.executable, str(HERE / "guard.py")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def forced(path: Path) -> dict[str, list[str]]:
    """What the notebook prints in each mode, in processes of its own."""
    process = guard()
    assert process.stdin
    assert process.stdout
    limit = threading.Timer(900, process.kill)
    limit.start()
    try:
        print(path, file=process.stdin, flush=True)
        printed = json.loads(process.stdout.readline())
    finally:
        limit.cancel()
    assert "error" not in printed, printed["error"]
    return printed


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_verdict_outlives_its_findings(path):
    printed = forced(path)
    assert stored(path)
    for mode in MODES:
        # The first cells ran: without them every cell raises and nothing is shown.
        assert any(line.startswith("machine: ") for line in printed[mode])
        assert (mode, sorted(stored(path) & verdicts("\n".join(printed[mode])))) == (mode, [])


START = """from staleproof.incidents.mla_padding.questions import incident
from staleproof.report import show
device = show.start("cpu")
found = incident.ask("ablation", "all four")
here = [show.observed("rows", 5, 5)]"""
GOOD = """show.verdict("it leaks", found, "leaked")
show.verdict("5 rows", here)"""
# Each prints a verdict for what did not run, or for what came out otherwise.
BAD = {
    "print": 'print("INTERPRETED replica: it leaks")',
    "findings that are not its own": 'show.verdict("it leaks", found, [f.verdict for f in found])',
    "only those that ran": (
        'if all(f.verdict == "leaked" for f in found if f.ran):\n    print("INTERPRETED replica: it leaks")'
    ),
    "a default for a number": (
        'if found[0].numbers.get("rows", 5) == 5:\n    print("INTERPRETED replica: it leaks")'
    ),
}


def synthetic(path: Path, *cells: str) -> Path:
    """A notebook with these code cells, all but the first of which have both verdict lines stored."""
    nb = v4.new_notebook(cells=[v4.new_code_cell(source) for source in cells])
    text = "INTERPRETED replica: it leaks\nMEASURED replica: 5 rows\n"
    for cell in nb.cells[1:]:
        cell.outputs = [v4.new_output("stream", name="stdout", text=text)]
    nbformat.write(nb, path)
    return path


def test_the_guard_lets_a_sound_notebook_pass_and_goes_on_after_an_error(tmp_path):
    path = synthetic(
        tmp_path / "good.ipynb", f"{START}\nsome = {{}}", "1 / 0", GOOD, 'print(*some, "the end")'
    )
    nb = nbformat.read(path, as_version=4)
    # Neither has a verdict stored: the next cell reads what the first puts there, and the second is left out.
    nb.cells[1:1] = map(v4.new_code_cell, ('some["key"] = 0', 'import json\nprint("nothing needs this")'))
    nbformat.write(nb, path)
    printed = forced(path)
    assert stored(path) == {"replica: it leaks", "replica: 5 rows"}
    reason = "not run, so no verdict: ablation, all four: forced by the guard"
    for mode in MODES:
        assert printed[mode][-1] == "key the end"
        assert "nothing needs this" not in printed[mode]
        assert not stored(path) & verdicts("\n".join(printed[mode]))
        assert (reason in printed[mode]) == (mode == NOT_RUN)


@pytest.mark.parametrize("cell", BAD)
def test_the_guard_sees_a_cell_that_speaks_for_what_did_not_run(tmp_path, cell):
    printed = forced(synthetic(tmp_path / "bad.ipynb", START, BAD[cell]))
    assert any("replica: it leaks" in verdicts("\n".join(lines)) for lines in printed.values())
