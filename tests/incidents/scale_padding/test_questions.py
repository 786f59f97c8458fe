"""Each variant of incident 5 gets its verdict, each fix is fixed, and absent hardware says so."""

from __future__ import annotations

import signal
from functools import cache

import pytest

from staleproof.cases import children
from staleproof.cases.children import ChildError
from staleproof.cases.finding import FIXED, NOT_FIXED, NOT_RUN, OFF_ON_OFF
from staleproof.incidents.scale_padding import broken, flashinfer_fp4, null_block, questions
from staleproof.incidents.scale_padding.questions import QUESTIONS, WRONG
from staleproof.ops import nvfp4 as kernels

# Each is put once for all tests here. The matrix is asked by parts, in test_matrix.py.
ask = cache(QUESTIONS.ask)
ROWS = sorted({row.name for row in QUESTIONS.rows} - {"matrix", "public"})


@pytest.mark.parametrize("name", ROWS)
def test_every_verdict_is_the_expected_one(name):
    found = ask(name)
    assert [f for f in found if f.failed] == []
    assert any(f.ok for f in found)
    assert all(f.expected is not None for f in found if f.ran)


@pytest.mark.parametrize("path", broken.PATHS)
def test_only_nan_in_the_padding_of_scales_reaches_a_live_row(path):
    for found in ask(f"padding, {path}"):
        # Other contents are multiplied by values of 0, and only NaN survives that.
        assert found.numbers["changed_by"] == ("nan" if found.verdict == "leaked" else "")


def test_padding_left_unwritten_is_found(monkeypatch):
    launch = kernels._quantize
    monkeypatch.setattr(
        kernels, "_quantize", lambda *args, pad, **options: launch(*args, pad=False, **options)
    )
    found = [QUESTIONS.ask(f"padding, {path}", "quantize_nvfp4")[0] for path in ("128x4", "linear")]
    assert [one.failed for one in found] == [True, False]


def test_random_bytes():
    (tile,) = ask("NaN in a tile")
    assert tile.numbers["counted"] == pytest.approx(1 - (254 / 256) ** 512, abs=0.004)
    own, other = ask("random padding")
    assert own.numbers["wrong_finite"] == 0
    assert other.numbers["wrong_finite"] + other.numbers["nan"] == pytest.approx(1)
    for one in (own, other):
        assert one.numbers["nan"] == pytest.approx(one.numbers["nan_computed"], abs=0.06)


def test_id_width_makes_wrong_numbers_or_an_error_and_never_nan():
    found = {f.variant: f for f in ask("id width")}
    assert {f.verdict for f in found.values()} == {"clean", WRONG, "refused"}
    assert found["int64_read_as_int32"].numbers["first_ids"].split()[1::2] == ["0"] * 4


def test_a_simulator_that_repeats_experts_is_not_called_distinct(device):
    found = questions.duplicates(128, 8, (broken.simulate_with_replacement, 0.0), device)
    assert found.verdict == "another rate"


def test_pad_invariance_sees_what_no_nan_check_does():
    assert {f.verdict for f in ask("cross row, NaN check")} == {"clean"}
    mixed, apart = ask("cross row, padding content")
    assert (mixed.verdict, apart.verdict) == (WRONG, "clean")
    assert "nan" not in mixed.numbers["changed_by"].split()


def test_off_on_off():
    found = {one.variant: one.verdict for one in ask(OFF_ON_OFF)}
    assert found.pop("zeros_swizzled_only, 8x4") == NOT_FIXED
    assert found == dict.fromkeys(
        ["quantize_nvfp4", "zeros_swizzled_only", "int32_ids", "simulate_routing", "row_alone"], FIXED
    )


def test_the_ranks_give_the_answer_and_the_proof_of_the_fix_in_one_run(monkeypatch):
    runs = []
    reproduce = null_block.reproduce
    monkeypatch.setattr(
        null_block, "reproduce", lambda *args, **options: runs.append(args) or reproduce(*args, **options)
    )
    answer, claim = QUESTIONS.ask("null block", "slot_0, gloo")
    assert len(runs) == 1
    assert (answer.verdict, answer.numbers["busy_rank_bad"]) == ("leaked", False)
    assert (claim.question, claim.variant, claim.verdict) == (OFF_ON_OFF, "slot_minus_one, gloo", FIXED)


def test_ranks_that_fail_are_a_failure(monkeypatch):
    def fails(*args, **options):
        raise ChildError("rank 1 ended with 1")

    monkeypatch.setattr(null_block, "unavailable_reason", lambda backend: None)
    monkeypatch.setattr(null_block, "reproduce", fails)
    (found,) = QUESTIONS.ask("null block", "slot_0, nccl")
    assert found.failed
    assert found.note == "rank 1 ended with 1"


def test_absent_hardware_says_so_and_does_not_pass(monkeypatch):
    monkeypatch.setattr(null_block, "unavailable_reason", lambda backend: "needs a CUDA device")
    found = QUESTIONS.ask("null block", "slot_0, nccl")
    assert [(f.question, f.variant) for f in found] == [
        ("null block", "slot_0, nccl"),
        (OFF_ON_OFF, "slot_minus_one, nccl"),
    ]
    for one in found:
        assert (one.verdict, one.note, one.ok, one.failed) == (NOT_RUN, "needs a CUDA device", False, False)


def test_a_build_is_ended_with_the_caller_that_stops_listening(monkeypatch):
    monkeypatch.setattr(flashinfer_fp4, "unavailable_reason", lambda subject, device: None)
    monkeypatch.setattr(flashinfer_fp4, "_build_fp4", signal.pause)
    findings = QUESTIONS.run("cpu")
    next(findings)
    (child,) = children._running
    assert child._process.poll() is None
    findings.close()
    assert child._process.poll() is not None
    assert not children._running
