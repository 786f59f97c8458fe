"""The matrix: each cause is cured by its own remedy, and a cell counts without claiming."""

from __future__ import annotations

import pytest

from staleproof.incidents.scale_padding import remedies
from staleproof.incidents.scale_padding.questions import QUESTIONS


# One cause a part of the step; the others are run by the notebook.
@pytest.mark.parametrize("cause", ["empty rows", "amax, fmax", "NaN logits", "int64 ids", "null block"])
def test_the_matrix_cures_each_cause_by_its_own_remedy_and_never_by_zeros(cause):
    cells = {one.question: one for one in QUESTIONS.ask("matrix", cause)}
    assert len(cells) == len(remedies.REMEDIES)
    assert not any(one.failed for one in cells.values())
    own = cells[f"matrix, {remedies.CAUSES[cause]}"]
    assert (own.verdict, own.expected, own.numbers["wrong_on"]) == (remedies.CURED, remedies.CURED, 0)
    assert own.numbers["wrong_off"] == own.numbers["wrong_off_again"] > 0
    assert cells["matrix, zero_init_per_layer"].verdict != remedies.CURED


def test_every_cause_has_a_remedy_of_its_own():
    assert set(remedies.CAUSES.values()) < set(remedies.REMEDIES)


def test_a_cell_counts_and_does_not_claim():
    def verdict(off, on, again):
        return remedies.Cell("c", "r", off, on, again).verdict

    assert verdict(3, 0, 3) == "cured"
    assert verdict(3, 3, 3) == "not cured"
    assert verdict(3, 1, 3) == "helped"
    assert verdict(3, 4, 3) == "made worse"
    assert verdict(0, 0, 0) == verdict(3, 0, 2) == "not reproduced"


def test_a_step_without_a_fault_is_right(device):
    for cause in ("empty rows", "null block", "amax, torch.max"):
        twin = remedies.Server(cause, None, device, faulty=False)
        for number in range(len(remedies.LIVE)):
            said = twin.step(number)
            assert said.survived
            if number != remedies.SICK_STEP:
                live = remedies.LIVE[number]
                assert bool(said.rows[:live].isfinite().all())
