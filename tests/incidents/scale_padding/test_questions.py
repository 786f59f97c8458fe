"""Each variant of incident 5 gets its verdict, each fix is fixed, each cell of the matrix ran."""

from __future__ import annotations

import pytest

from staleproof.harness.findings import FIXED, NOT_FIXED
from staleproof.incidents.scale_padding import broken, ids, matrix
from staleproof.incidents.scale_padding import questions as experiment
from staleproof.ops import nvfp4 as kernels


@pytest.mark.parametrize("allocation", experiment.ALLOCATIONS)
def test_padding(device, allocation):
    found = list(experiment.padding(allocation, device))
    assert [one.verdict for one in found] == [one.expected for one in found]
    # Numbers beside 0 change nothing; only NaN does, and only where somebody left it.
    changed = {one.verdict: one.numbers["changed_by"] for one in found}
    assert changed.get("leaked", "nan") == "nan"
    assert changed["clean"] == ""


def test_padding_left_unwritten_is_found(device, monkeypatch):
    launch = kernels._quantize
    monkeypatch.setattr(
        kernels, "_quantize", lambda *args, pad, **options: launch(*args, pad=False, **options)
    )
    assert [one.failed for one in experiment.padding("quantize_nvfp4", device)] == [True, False]


def test_random_bytes(device):
    tile = experiment.nan_in_a_tile(device)
    assert tile.ok
    assert tile.numbers["counted"] == pytest.approx(1 - (254 / 256) ** 512, abs=0.004)
    own, other = (experiment.random_padding(reader, device) for reader in experiment.READERS)
    assert own.ok
    assert other.ok
    assert own.numbers["wrong_finite"] == 0
    assert other.numbers["wrong_finite"] + other.numbers["nan"] == pytest.approx(1)
    for one in (own, other):
        assert one.numbers["nan"] == pytest.approx(one.numbers["nan_computed"], abs=0.06)


@pytest.mark.parametrize("name", experiment.ID_WIDTHS)
def test_id_width_makes_wrong_numbers_or_an_error_and_never_nan(device, name):
    found = experiment.id_width(name, device)
    assert found.ok, found


@pytest.mark.parametrize(("experts", "top_k"), experiment.SIMULATED)
def test_duplicates(device, experts, top_k):
    for found in experiment.duplicates(experts, top_k, device):
        assert found.ok, found


def test_a_simulator_with_replacement_is_found(device, monkeypatch):
    monkeypatch.setattr(ids, "simulate_routing", broken.simulate_with_replacement)
    *_, ours = experiment.duplicates(128, 8, device)
    assert ours.failed


@pytest.mark.parametrize("name", broken.PER_TOKEN)
def test_pad_invariance_sees_what_no_nan_check_does(device, name):
    by_nan, by_content = experiment.cross_row(name, device)
    assert by_nan.ok
    assert by_content.ok
    assert by_nan.verdict == "clean"
    if name != "row_alone":
        assert by_content.verdict == experiment.WRONG
        assert "nan" not in by_content.numbers["changed_by"].split()


def test_off_on_off(device):
    found = {one.variant: one for one in experiment.verify(device)}
    assert [one for one in found.values() if one.failed] == []
    fixes = ["quantize_nvfp4", "int32_ids", "simulate_routing", "row_alone", "zeros_swizzled_only"]
    assert {found[name].verdict for name in fixes} == {FIXED}
    assert found["zeros_swizzled_only, 8x4"].verdict == NOT_FIXED


def test_absent_hardware_says_so_and_does_not_pass(device):
    asked = [*experiment.null_block_ranks("nccl", device)]
    asked += experiment.public_kernels("needs a CUDA device")
    for found in asked:
        assert found.ran or found.note
        assert found.ran or not found.ok


# One cause a part of the step; the others are run by the notebook.
@pytest.mark.parametrize("cause", ["empty rows", "amax, fmax", "NaN logits", "int64 ids", "null block"])
def test_the_matrix_cures_each_cause_by_its_own_remedy_and_never_by_zeros(device, cause):
    cells = {one.question: one for one in experiment.cures(cause, device)}
    assert len(cells) == len(matrix.REMEDIES)
    assert not any(one.failed for one in cells.values())
    own = cells[f"matrix, {experiment.OWN_REMEDY[cause]}"]
    assert (own.verdict, own.numbers["wrong_on"]) == (matrix.CURED, 0)
    assert own.numbers["wrong_off"] == own.numbers["wrong_off_again"] > 0
    assert cells["matrix, zero_init_per_layer"].verdict != matrix.CURED


def test_every_cause_has_a_remedy_of_its_own():
    assert set(experiment.OWN_REMEDY) == set(matrix.CAUSES)
    assert set(experiment.OWN_REMEDY.values()) < set(matrix.REMEDIES)


def test_a_cell_counts_and_does_not_claim():
    def verdict(off, on, again):
        return matrix.Cell("c", "r", off, on, again).verdict

    assert verdict(3, 0, 3) == "cured"
    assert verdict(3, 3, 3) == "not cured"
    assert verdict(3, 1, 3) == "helped"
    assert verdict(3, 4, 3) == "made worse"
    assert verdict(0, 0, 0) == verdict(3, 0, 2) == "not reproduced"


def test_a_step_without_a_fault_is_right(device):
    for cause in ("empty rows", "null block", "amax, torch.max"):
        twin = matrix.Server(cause, None, device, faulty=False)
        for number in range(len(matrix.LIVE)):
            said = twin.step(number)
            assert said.survived
            if number != matrix.SICK_STEP:
                live = matrix.LIVE[number]
                assert bool(said.rows[:live].isfinite().all())
