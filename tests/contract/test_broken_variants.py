"""Each faulty kernel of the incidents breaks its clause, and no other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from staleproof.contract import runner
from staleproof.contract.contract import Verdict

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


CONTRACT = HERE.parents[1] / "workbook/contract.md"


def test_the_document_lists_what_each_variant_breaks():
    from broken_variants import EXPECTED

    table = CONTRACT.read_text().partition("## What the incidents' faults break")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.*?) \|", table, re.MULTILINE)
    assert {name: set(clauses.replace("none", "").split()) for name, clauses in rows} == EXPECTED


# One test for the table: the kernels are audited together, once.
@pytest.mark.slow
def test_each_variant_breaks_its_clause_and_no_other(device: str) -> None:
    from broken_variants import EXPECTED

    found = {
        rows[0].subject: {row.clause: row for row in rows}
        for rows in runner.audit([str(HERE / "broken_variants.py")], device)
    }
    broken = {
        name: {clause for clause, row in rows.items() if row.verdict is Verdict.BREAKS}
        for name, rows in found.items()
    }
    assert broken == EXPECTED, {
        (name, clause): row.note for name, rows in found.items() for clause, row in rows.items() if row.note
    }
    unasked = {c for c, row in found["zero_by_zero_written"].items() if row.verdict is Verdict.NOT_RUN}
    assert unasked == {"U"}
