"""What counts as a counterexample that shows its break when it is run alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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
    return Finding(CONTRACT, clause, "experts", CONTRACT, BREAKS, "kernels 1.0", note=note)


def test_an_assertion_whose_tensor_prints_over_several_lines_shows_its_break():
    end = alone.ending(WRAPPED, sys.executable)
    assert end == "AssertionError: expected tensor([0., 1.], dtype=torch.bfloat16), got ..."
    assert alone.shows(_row("T", "NaN in V of the last page's tail gives NaN"), end)


def test_the_line_of_an_exception_is_told_and_not_the_advice_below_it():
    end = alone.ending(ASSERTED, sys.executable)
    assert end == "torch.AcceleratorError: CUDA error: device-side assert triggered"
    assert alone.shows(_row("X", "raises AcceleratorError: CUDA error: device-side assert triggered"), end)


@pytest.mark.parametrize(
    ("clause", "note", "end", "shown"),
    [
        ("X", "id -1: row 1 is wrong", "AcceleratorError: CUDA error: an illegal memory access", True),
        ("X", "id -1: row 1 is wrong", "AcceleratorError: CUDA error: no kernel image is available", False),
        ("E", "row 1 is nan", "AcceleratorError: CUDA error: an illegal memory access", False),
        ("E", "row 1 is nan", "RuntimeError: failed to dispatch data type", False),
        ("X", "ended its process: signal 6", "signal 6", True),
        ("E", "row 1 is nan", "", False),
    ],
)
def test_an_error_shows_a_break_only_if_an_id_out_of_range_or_the_row_explains_it(clause, note, end, shown):
    assert alone.shows(_row(clause, note), end) is shown


@pytest.mark.parametrize(("text", "end"), [("", ""), ("raise SystemExit('no GPU')", "no GPU")])
def test_other_ends_are_told_as_they_are(text, end):
    assert alone.ending(text, sys.executable) == end
