"""What counts as a counterexample that shows its break when it is run alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from staleproof.cases.children import Ended
from staleproof.cases.finding import Finding
from staleproof.contract.contract import BREAKS, CONTRACT

sys.path.insert(0, str(Path(__file__).parent))

import alone

WRAPPED = """x = "tensor([0., 1.],\\n       dtype=torch.bfloat16)"
assert False, f"expected {x}, got {x}"
"""
ASSERTED = """class AcceleratorError(RuntimeError): pass
AcceleratorError.__module__ = "torch"
raise AcceleratorError("CUDA error: device-side assert triggered\\nCompile with `TORCH_USE_CUDA_DSA` ...\\n")
"""


def _row(clause: str, note: str) -> Finding:
    return Finding(CONTRACT, clause, "experts", BREAKS, "bad", "kernels 1.0", note=note)


def test_an_assertion_whose_tensor_prints_over_several_lines_shows_its_break():
    end = alone.ending(WRAPPED, sys.executable)
    assert alone.shows(_row("T", "NaN in V of the last page's tail gives NaN"), end)


def test_the_line_of_an_exception_is_told_and_not_the_advice_below_it():
    end = alone.ending(ASSERTED, sys.executable)
    assert alone.told(end) == "torch.AcceleratorError: CUDA error: device-side assert triggered"
    assert alone.shows(_row("X", "raises AcceleratorError: CUDA error: device-side assert triggered"), end)


@pytest.mark.parametrize(
    ("clause", "note", "code", "said", "shown"),
    [
        ("X", "id -1: row 1 is wrong", 1, "AcceleratorError: CUDA error: an illegal memory access", True),
        ("X", "id -1: row 1 is wrong", 1, "AcceleratorError: CUDA error: no kernel image", False),
        ("E", "row 1 is nan", 1, "AcceleratorError: CUDA error: an illegal memory access", False),
        ("E", "row 1 is nan", 1, "RuntimeError: failed to dispatch data type", False),
        ("X", "ended its process with signal 6", -6, "", True),
        ("E", "row 1 is nan", 0, "", False),
    ],
)
def test_an_error_shows_a_break_only_if_an_id_out_of_range_or_the_row_explains_it(
    clause, note, code, said, shown
):
    assert alone.shows(_row(clause, note), Ended([], code, "", said, 9.0)) is shown


@pytest.mark.parametrize(("text", "end"), [("", "ends quietly"), ("raise SystemExit('no GPU')", "no GPU")])
def test_other_ends_are_told_as_they_are(text, end):
    assert alone.told(alone.ending(text, sys.executable)) == end
