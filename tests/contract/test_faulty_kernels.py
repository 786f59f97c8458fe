"""Each faulty kernel breaks its clause, and no other; without a reference clause 0 is not checked."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

from staleproof.contract import runner
from staleproof.contract.contract import Verdict

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


@cache
def _audited(device):
    rows = [row for found in runner.audit([str(HERE / "faulty_kernels.py")], device) for row in found]
    return {(row.subject, row.clause): row for row in rows}


@pytest.fixture(name="found")
def found_fixture(device):
    return _audited(device)


def _names():
    from faulty_kernels import EXPECTED

    return [*EXPECTED]


@pytest.mark.parametrize("name", _names())
def test_a_faulty_kernel_breaks_its_clause_and_no_other(found, name):
    from faulty_kernels import EXPECTED, NOT_CHECKED

    mine = {clause: row for (subject, clause), row in found.items() if subject == name}
    broken = {clause: row.note for clause, row in mine.items() if row.verdict is Verdict.BREAKS}
    assert set(broken) == EXPECTED[name], broken
    unchecked = mine["0"].note.startswith("not checked, no reference")
    assert unchecked == (name in NOT_CHECKED), mine["0"].note
    assert (mine["0"].verdict is Verdict.NOT_RUN) == unchecked
    if "0" not in broken:
        # Also where 0 has no reference the other clauses are asked.
        assert any(row.verdict is Verdict.HOLDS for row in mine.values())


def test_weights_of_an_unknown_function_are_said_not_to_be_checked(found):
    note = found["weights of another function", "0"].note
    assert note == "weights rise with their logits; their sizes are not checked, no reference"


def test_the_operand_and_the_bytes_behind_it_are_named(found):
    assert found["reads a whole tile", "O"].note == "0xff behind x changes the result"
    assert found["writes behind its operand", "O"].note == "writes behind x"
