"""What the commands print."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from tests.made import finding, not_run

from staleproof.cases import store
from staleproof.cases.machine import Capability
from staleproof.device import Provenance
from staleproof.report import terminal

ROW = {"kernel": "clear", "provider": "ours", "mode": "graph", "x_name": "live", "x_value": 1, "unit": "us"}
ROW |= {"p50": 2.0, "p20": 1.9, "p80": 2.2}


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (finding("a", "q", "v", "clean"), "a, q, v: clean  (replica)"),
        (finding("a", "q", "v", "clean", expected="clean", rows=3), "a, q, v: clean  (replica)  [rows 3]"),
        (finding("a", "q", "v", "leaked", expected="clean"), "a, q, v: leaked (expected clean)  (replica)"),
        (
            finding("a", "q", "v", "leaked", amax=1 / 3, on="clean"),
            "a, q, v: leaked  (replica)  [amax 0.333333, on clean]",
        ),
        (not_run("a", "q", "v", "needs SM100"), "a, q, v: not run: needs SM100"),
    ],
)
def test_a_finding_is_one_line(found, line):
    assert terminal.finding_text(replace(found, provenance=Provenance.MEASURED)) == f"MEASURED  {line}"


def test_a_measurement_is_one_line():
    assert terminal.row_text(ROW) == "clear, ours, graph, live 1: 2 us (p20 1.9, p80 2.2)"


def test_a_machine_is_printed_with_what_it_lacks(capsys):
    terminal.print_machine([Capability("a module", False, "no nvcc"), Capability("another", True, "1.2")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("machine  ")
    assert "skip  a module            no nvcc" in lines
    assert "yes   another             1.2" in lines


def test_recorded_runs_are_compared_on_the_incidents_that_ran(tmp_path, capsys):
    store.write(tmp_path / "r", [finding("a", "q", "v", "clean"), finding("b", "q", "v", "clean")], [])
    terminal.print_verdicts([finding("a", "q", "v", "leaked")], store.read_all(tmp_path))
    out = capsys.readouterr().out
    assert "0 match, 1 mismatch, 0 only in the first, 0 only in the second" in out


def test_a_comparison_says_whether_all_verdicts_match(tmp_path, capsys):
    for name, verdict in (("one", "clean"), ("two", "leaked")):
        store.write(tmp_path / name, [finding("a", "q", "v", verdict)], [ROW])
    one, two = store.read_all(tmp_path)
    assert terminal.print_comparison(one, one)
    assert "mismatch  " not in capsys.readouterr().out
    assert not terminal.print_comparison(one, two)
    out = capsys.readouterr().out
    assert "mismatch        a, q, v: clean / leaked" in out
    assert "clear, ours, graph, live 1: 2 us (p20 1.9, p80 2.2) -> 2 (1.00)" in out


def test_the_output_needs_none_of_the_extra():
    code = "import sys; from staleproof.report import terminal; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"pandas", "matplotlib", "seaborn", "nbformat", "nbconvert", "IPython", "ipywidgets"}
