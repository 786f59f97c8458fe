"""Each faulty kernel breaks its clauses, and no other; without a reference clause 0 is not checked.

Small ones with a fault that a probe could overlook, and the kernels of the incidents. They are asked in this
process; ``test_runner.py`` asks kernels in processes of their own.
"""

import re
import sys
from pathlib import Path

import pytest

from staleproof.audit import subjects_of
from staleproof.contract import ours, runner
from staleproof.contract.contract import BREAKS, HOLDS, NO_REFERENCE

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import broken_variants
import faulty_kernels

SUBJECTS = {
    subject.name: (subject, module.EXPECTED[subject.name])
    for module in (faulty_kernels, broken_variants)
    for subject in subjects_of(module)
}


def _asked(subject, device):
    found = {}
    probes = runner.probes_of(subject)
    for clause in (clause for clause in subject.clauses if clause not in subject.skip):
        found[clause], _ = runner.ask_one(probes[clause], device)
        if clause == "0" and found[clause].verdict == BREAKS:
            break
    return found


def test_no_kernel_is_left_out():
    assert SUBJECTS.keys() == faulty_kernels.EXPECTED.keys() | broken_variants.EXPECTED.keys()


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_faulty_kernel_breaks_its_clause_and_no_other(device, name):
    subject, expected = SUBJECTS[name]
    found = _asked(subject, device)
    broken = {clause: said.note for clause, said in found.items() if said.verdict == BREAKS}
    more = faulty_kernels.MAY_BREAK.get(name, set()) if device == "cuda" else set()
    assert expected <= set(broken) <= expected | more, broken
    note = faulty_kernels.NOTES.get(name, "")
    assert not note or any(said.startswith(note) for said in broken.values()), broken
    unchecked = found["0"].note.startswith(NO_REFERENCE)
    assert unchecked == (name in faulty_kernels.NOT_CHECKED), found["0"].note
    if "0" not in broken:
        assert (found["0"].verdict == HOLDS) is not unchecked
        # Also where 0 has no reference the other clauses are asked, but for what a kernel does not take.
        assert {found[clause].verdict for clause in found.keys() - {*broken, *"0UQP"}} <= {HOLDS}


def test_the_document_lists_what_each_variant_of_an_incident_breaks():
    text = (HERE.parents[1] / "workbook/contract.md").read_text()
    table = text.partition("## What the incidents' faults break")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| (.*?) \|", table, re.MULTILINE)
    assert {n: set(c.replace("none", "").split()) for n, c in rows} == broken_variants.EXPECTED


def test_the_examples_break_what_their_docstrings_say(device):
    # In processes of their own: on a GPU one of them ends its process.
    broken = {}
    for one in runner.audit(["staleproof.contract.examples"], device):
        broken.setdefault(one.kernel, []).extend([one.clause] * (one.verdict == BREAKS))
    by_weight = broken.pop("masked by a weight of 0")
    # On a GPU fresh memory may hold what another clause left there.
    assert by_weight in (["E", "T", "B"], *([["E", "T", "B", "N"]] if device == "cuda" else []))
    assert broken == {
        "masked by selection": [],
        "fp8, one scale for the tensor": ["R"],
        "fp8, a scale for each row": [],
    }


@pytest.mark.parametrize("subject", subjects_of(ours), ids=lambda subject: subject.name)
def test_kernels_of_this_package_keep_every_clause(device, subject):
    # The whole contract takes minutes in the interpreter for MLA decode; tests/ops has its faults.
    asked = "0E" if subject.kind == "attention" and device == "cpu" else subject.clauses
    probes = runner.probes_of(subject)
    answers = {c: runner.ask_one(probes[c], device)[0] for c in asked if c not in subject.skip}
    assert {c: one for c, one in answers.items() if one.verdict != HOLDS} == {}
