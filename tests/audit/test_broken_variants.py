"""Each faulty kernel of the incidents breaks its clause, and no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from staleproof.audit import runner
from staleproof.audit.contract import Row, Verdict

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from broken_variants import EXPECTED


@pytest.fixture(scope="module", name="rows")
def rows_fixture() -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for rows in runner.audit([str(HERE / "broken_variants.py")]):
        found[rows[0].subject] = {row.clause: row for row in rows}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_variant_breaks_its_clause_and_no_other(rows, name):
    broken = {clause for clause, row in rows[name].items() if row.verdict is Verdict.BREAKS}
    assert broken == EXPECTED[name], {clause: row.note for clause, row in rows[name].items()}


@pytest.mark.slow
def test_every_clause_of_attention_but_the_unasked_was_put_to_them(rows):
    unasked = {
        clause for clause, row in rows["zero_by_zero_written"].items() if row.verdict is Verdict.NOT_RUN
    }
    assert unasked == {"U"}
