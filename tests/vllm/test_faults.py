"""A hook of any patch that raises: vLLM's own result comes through, and one line says what stepped back."""

import json

import pytest

from tools import plugin_faults as faults

TARGETS = {faults.name_of(patch, target): (patch, target) for patch, target in faults.targets()}
CASES = [
    pytest.param(row, name, marks=[pytest.mark.gpu] if fault.on == "cuda" else [], id=f"{row}-{name}")
    for name, fault in faults.FAULTS.items()
    for row, (_, target) in TARGETS.items()
    if target.around is not None or not fault.leaving
]


@pytest.mark.parametrize(("row", "name"), CASES)
def test_a_fault_changes_no_result(row, name):
    (patch, target), fault = TARGETS[row], faults.FAULTS[name]
    answer = faults.ask(patch, target, fault)
    assert answer.returned == faults.OWN
    (line,) = answer.lines
    assert line.startswith(f"staleproof: {patch.name}: ")
    assert ("vLLM's own code is in the graph" if fault.traced else "vLLM's own code runs: ") in line
    assert line.endswith(f"; out of service: {patch.name}; in service: nothing")
    assert answer.out_of_service == [patch.name]
    kind = "OutOfMemoryError" if "memory" in name else "RuntimeError"
    assert kind in line
    if fault.on == "cpu":
        assert faults.cell(answer, fault) == json.loads(faults.FILE.read_text())[row][name]


def test_a_cell_says_how_many_lines_came_and_all_that_stepped_back():
    answer = faults.Answer("5 for 4", ["one", "two"], ["a", "b"])
    assert faults.cell(answer, faults.FAULTS["at the first call"]) == "5 for 4; 2 line; out of service: a, b"


def test_the_table_is_whole():
    found = json.loads(faults.FILE.read_text())
    assert {row: [*cells] for row, cells in found.items()} == {row: [*faults.FAULTS] for row in TARGETS}
    assert faults.FILE.with_suffix(".md").read_text() == faults.as_markdown(found)
