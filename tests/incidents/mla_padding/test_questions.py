"""Each detector flags each faulty variant, each remedy gets its true verdict, each fix is fixed."""

from __future__ import annotations

import pytest

from staleproof.evidence import Verdict
from staleproof.harness.findings import FIXED
from staleproof.incidents.mla_padding import broken
from staleproof.incidents.mla_padding import questions as experiment

FIXES = [name for name, setup in experiment.SETUPS.items() if setup.fix]


def verdicts(findings):
    return {(f.question, f.variant): f.verdict for f in findings}


@pytest.mark.parametrize("name", experiment._FAULTS)
def test_kernel_contract(device, name):
    for found in experiment.kernel_contract(name, device):
        assert found.verdict == found.expected, found


def test_every_faulty_kernel_breaks_something():
    assert set(broken.KERNELS) < set(experiment._FAULTS)
    ours = experiment._FAULTS["mla_decode"]
    assert all(experiment._FAULTS[name] != ours for name in broken.KERNELS)


@pytest.mark.parametrize("name", experiment.SETUPS)
def test_served(device, name):
    found = list(experiment.served(name, device))
    for one in found:
        assert one.verdict == one.expected, one
    # A request that is sick by itself must never be blamed on padding.
    sick = {one.numbers["sick_step"] for one in found if "sick_step" in one.numbers}
    assert Verdict.LIVE_BORN in sick
    assert Verdict.LEAKED not in sick


@pytest.mark.parametrize("name", FIXES)
def test_off_on_off(device, name):
    found = experiment.verify(name, device)
    assert found.verdict == FIXED, found


def test_a_fix_that_does_nothing_is_not_called_fixed(device, monkeypatch):
    monkeypatch.setattr(experiment, "clear_empty_rows", lambda out, seq_lens: None)
    assert experiment.verify("clear_empty_rows", device).failed


def test_the_reproducers_table(device):
    rows = experiment.padding_table(device)
    assert [(r.padding, r.q_len, r.fixed) for r in rows] == [
        (127, 1, False),
        (127, 1, True),
        (127, 4, False),
        (127, 4, True),
        (1023, 1, False),
        (1023, 1, True),
    ]
    for row in rows:
        assert row.padding_nan is not row.fixed
        # torch.max keeps NaN, so the amax is a number only once the padding is clean.
        assert (row.amax == row.amax) is row.fixed
        if row.fixed:
            assert row.amax > 0


@pytest.mark.parametrize("name", ["zeros_once_per_layer", "clear_empty_rows"])
def test_growth_after_capture(device, name):
    found = experiment.growth_after_capture(name, device)
    assert found.verdict == found.expected


@pytest.mark.parametrize("name", experiment.INGREDIENTS)
def test_ablation(device, name):
    found = experiment.ingredient(name, device)
    assert found.verdict == found.expected


def test_the_first_bad_stage_and_the_first_crossing(device):
    picture = experiment.stage_picture("empty_row_not_written", device)
    column = {stage: [row[i] for row in picture.cells] for i, stage in enumerate(picture.stages)}
    padding = len(picture.cells) - picture.live
    assert column["0.attention"] == [0] * picture.live + [1] * padding
    assert column["0.quantise"] == [2] * picture.live + [1] * padding
    assert picture.first_crossing.stage == "0.quantise"
    fixed = experiment.stage_picture("clear_empty_rows", device)
    assert not any(map(any, fixed.cells))
    assert fixed.first_crossing is None


def test_absent_kernels_say_so_and_do_not_pass(device):
    for found in experiment.real_kernels(device):
        assert found.ran or found.note
        assert found.ran or not found.ok
