"""Each question gets the verdict it must get, and a fix that is taken away is missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from staleproof import device as devices
from staleproof.cases.case import ALL
from staleproof.cases.children import ChildError
from staleproof.cases.finding import FIXED, NOT_FIXED, NOT_REPRODUCED, OFF_ON_OFF, Finding
from staleproof.device import Provenance
from staleproof.evidence.rows import Verdict
from staleproof.incidents.moe_routing import broken, fp8, fused_moe, padding, questions, ranks, scene
from staleproof.incidents.moe_routing.batch import ILLEGAL_ACCESS, MISREAD, NAN_ROWS, RIGHT, SILENT
from staleproof.incidents.moe_routing.fused_moe import CUDA_ILLEGAL_ACCESS, Case, CaseResult
from staleproof.incidents.moe_routing.origin import Setting
from staleproof.incidents.moe_routing.questions import DUPLICATES, QUESTIONS
from staleproof.incidents.moe_routing.ranks import Counts
from staleproof.incidents.moe_routing.scene import OURS, Routed, RouterInput, Selector

# These need processes of their own, or have a test further down.
LONG = (questions.PADDING, questions.REAL, questions.SANITIZER, OFF_ON_OFF)
ROWS = [(row.name, variant) for row in QUESTIONS.rows if row.name not in LONG for variant in row.subjects]


@pytest.mark.parametrize(("name", "variant"), ROWS)
def test_every_question_has_its_expected_verdict(device: str, name: str, variant: str) -> None:
    (found,) = QUESTIONS.ask(name, variant, device=device)
    assert (found.question, found.variant) == (name, variant)
    if found.ran:
        assert found.expected is None or found.verdict == found.expected, found
    else:
        assert found.note
        assert "vLLM" in variant or name == "ids of vLLM's kernel"


def failed(name: str, *variants: str, device: str) -> list[Finding]:
    return [found for found in QUESTIONS.ask(name, *variants, device=device) if found.failed]


def test_every_faulty_choice_repeats_an_expert_and_ours_never_does() -> None:
    for name in broken.CHOICES:
        assert DUPLICATES in questions.CHOICE_EXPECTED[name]
    assert set(questions.CHOICE_EXPECTED[OURS]) == {questions.DISTINCT}
    assert set(questions.REMEDY_EXPECTED) == {*broken.REMEDIES, OURS}


def test_a_blind_detector_is_noticed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    monkeypatch.setattr(questions, "rows_with_duplicates", blind)
    assert failed("all NaN, softmax", "warp_keeps_its_first_column", device=device)
    assert failed("NaN in padding", "none", device=device)


def test_a_choice_that_loses_the_best_is_not_called_right(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second_best(given: RouterInput, top_k: int) -> Routed:
        weights, ids = scene.select_ours(given, top_k + 1)
        return weights[:, 1:], ids[:, 1:]

    monkeypatch.setitem(scene.SELECTORS, OURS, Selector(second_best))
    worse = [found for kind in scene.INPUTS for found in failed(kind, OURS, device=device)]
    assert [found.verdict for found in worse] == [questions.NOT_THE_BEST] * 3


def test_a_remedy_that_spoils_good_rows_is_noticed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harmful = broken.Remedy(on_load=lambda x: x.nan_to_num().flip(1))
    monkeypatch.setitem(broken.REMEDIES, "nan_to_num_before", harmful)
    assert failed("rows without NaN", "nan_to_num_before", device=device)
    assert not failed("NaN in padding", "nan_to_num_before", device=device)


def test_nan_weights_are_not_called_distinct(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(given: RouterInput, top_k: int) -> Routed:
        weights, ids = scene.topk_softmax(given.logits, top_k)
        return weights.fill_(float("nan")), ids

    monkeypatch.setattr(scene, "select_ours", spoilt)
    (found,) = failed("NaN in padding", OURS, device=device)
    assert found.verdict == questions.NAN_WEIGHTS


def test_the_padding_id_reaches_the_last_expert_of_a_consumer_that_indexes(device: str) -> None:
    found = QUESTIONS.ask("padding id -1", device=device)
    assert [f.numbers["rows"] for f in found] == [3, 0]


def test_what_the_memory_contained_decides_how_it_ends(device: str) -> None:
    found = QUESTIONS.ask("memory held", device=device)
    assert {f.verdict for f in found} == {ILLEGAL_ACCESS, SILENT, NAN_ROWS}
    # The damage stays in the rows that repeat an expert.
    assert all(f.numbers["wrong_clean_rows"] == 0 < f.numbers["wrong_rows"] for f in found)


def test_misread_ids_are_duplicates_in_every_row(device: str) -> None:
    """What the revert blames: read as int32, distinct int64 ids lead to all that duplicates lead to."""
    found = {f.variant: f for f in QUESTIONS.ask(f"{MISREAD}, memory held", device=device)}
    assert {f.verdict for f in found.values()} == {ILLEGAL_ACCESS, SILENT, NAN_ROWS}
    for one in found.values():
        assert one.numbers["duplicate_rows"] == one.numbers["wrong_rows"] == 257
        assert (one.numbers["nan_rows"] > 0) is ("NaN rows" in one.variant)
    # The bounds check passes over entries outside, and an earlier map's are inside.
    assert found["previous map, NaN rows, bounds check"].numbers["nan_rows"] > 128


def test_fmax_lets_no_nan_through_and_an_infinity_ruins_all_rows() -> None:
    for name, wall in fp8.FIREWALLS.items():
        # Of vLLM's own ops any answer is recorded.
        assert wall.nan is None if "vLLM" in name else (wall.nan == Verdict.CLEAN) is ("fmax" in name)
    assert fp8.FIREWALLS["one scale, fmax"][1:] == (Verdict.CLEAN, Verdict.LEAKED)


def test_vllms_fp8_ops_are_called_as_its_own_wrapper_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def op(values: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, *rest: None) -> None:
        calls.append((values.dtype, x.dtype, tuple(scale.shape), rest))
        replica = broken.quantise_fp8(x, per_token=bool(rest), drops_nan=True)
        values.copy_(replica[0])
        scale.copy_(replica[1].view(scale.shape))

    ops = SimpleNamespace(dynamic_scaled_fp8_quant=op, dynamic_per_token_scaled_fp8_quant=op)
    monkeypatch.setattr(scene, "vllm_ops", lambda variable: ops)
    asked = ("a scale a token, vLLM's op", "one scale, vLLM's op")
    assert [f.verdict for f in QUESTIONS.ask("NaN into fp8", *asked, device="cpu")] == ["not run"] * 2
    for name in asked:
        assert fp8.through(scene.NAN, fp8.FIREWALLS[name], "cpu").verdict == Verdict.CLEAN
    assert [shape for *_, shape, _ in calls] == [(8, 1), (1,)]
    assert {(values, x) for values, x, *_ in calls} == {(torch.float8_e4m3fn, torch.bfloat16)}
    assert [rest for *_, rest in calls] == [(None,), ()]


def test_the_crash_needs_all_four(device: str) -> None:
    verdicts = {found.variant: found.verdict for found in QUESTIONS.ask("ablation", device=device)}
    assert len(verdicts) == 5
    assert [name for name, verdict in verdicts.items() if verdict == ILLEGAL_ACCESS] == [ALL]


def test_a_fix_leaves_nothing_unwritten_and_nothing_wrong(device: str) -> None:
    found = QUESTIONS.ask(OFF_ON_OFF, *questions.FIXES, device=device)
    assert [f.verdict for f in found].count(FIXED) == 8
    for one in found:
        assert one.verdict == one.expected, one
        assert one.numbers["unwritten_off"] > 0, one
        if one.verdict == FIXED:
            assert one.numbers["unwritten_on"] == one.numbers["wrong_on"] == 0, one


def fix(name: str, device: str) -> str:
    (found,) = QUESTIONS.ask(OFF_ON_OFF, name, device=device)
    return found.verdict


def test_a_kernel_without_sanitising_is_not_called_fixed(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raw(x: torch.Tensor, top_k: int, **_: Any) -> Routed:
        return broken.route(broken.warp_keeps_its_first_column, x, top_k)

    monkeypatch.setattr(scene, "topk_softmax", raw)
    assert fix("topk_softmax", device) == NOT_FIXED


def test_what_does_not_fail_first_is_not_called_fixed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = broken.Remedy(on_load=torch.nan_to_num)
    monkeypatch.setitem(broken.REMEDIES, "none", harmless)
    assert fix("topk_softmax", device) == NOT_REPRODUCED


def test_an_unguarded_bias_is_not_called_fixed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unguarded(x: torch.Tensor, top_k: int, *, bias: torch.Tensor) -> Routed:
        clamp = broken.REMEDIES["clamp_after_scoring"]
        choose = broken.warp_keeps_its_first_column
        return broken.route(choose, x, top_k, softmax=False, bias=bias, remedy=clamp)

    monkeypatch.setattr(scene, "topk_sigmoid", unguarded)
    assert fix("topk_sigmoid, NaN bias", device) == NOT_FIXED


def ranks_that(answer: dict[str, Counts] | str, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_ranks(settings: list[Setting], device: str) -> list[Counts]:
        if isinstance(answer, str):
            raise ChildError(answer)
        return [answer["as served" if s.wide and not s.zeroed else "cured"] for s in settings]

    monkeypatch.setattr(ranks, "serve_ranks", serve_ranks)


def servers(device: str) -> dict[str, Finding]:
    return {found.variant: found for found in QUESTIONS.ask(questions.PADDING, device=device)}


def test_padding_is_judged_by_busy_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(passes=100, padded=50, with_nan=30, idle=20, padding_rows=400)
    ranks_that({"as served": counts, "cured": Counts(passes=100)}, monkeypatch)
    found = servers("cpu")
    assert found["DP 2, gloo"].verdict == padding.NEARLY_ALL
    assert found["DP 2, gloo"].numbers["mean_padding"] == 8.0
    assert found["1 rank, output zeroed"].verdict == padding.NONE
    assert found["1 rank, no graphs"].failed
    assert not found["DP 2, NCCL"].ran
    assert found["DP 2, NCCL"].note == "needs two CUDA devices"
    assert found["1 rank, PyTorch's allocator"].note == "needs a CUDA device"
    # A third of the busy passes is not nearly all of them.
    counts.with_nan = 10
    assert servers("cpu")["1 rank"].failed


@pytest.mark.parametrize("gpus", [1, 2])
def test_with_gpus_the_ranks_on_the_cpu_stay_interpreted(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(passes=100, padded=50, with_nan=50)
    ranks_that({"as served": counts, "cured": counts}, monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    machine = devices.machine()
    monkeypatch.setattr(devices, "machine", lambda: machine)
    monkeypatch.setattr(devices, "provenance", lambda: Provenance.MEASURED)
    found = servers("cuda")
    assert found["1 rank, PyTorch's allocator"].ran
    assert found["1 rank, PyTorch's allocator"].expected is None
    assert found["DEP 2, NCCL"].ran is (gpus == 2)
    measured = {name for name, one in found.items() if one.provenance == Provenance.MEASURED}
    assert found.keys() - measured == {"DP 2, gloo", "DEP 2, gloo"}


def test_ranks_that_give_no_answer_are_a_failure_and_not_an_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_that("the ranks ran steps of different sizes: they did not agree", monkeypatch)
    ran = {name: found for name, found in servers("cuda").items() if found.ran}
    assert {"1 rank", "1 rank, PyTorch's allocator", "DEP 2, gloo"} <= ran.keys()
    for found in ran.values():
        assert found.failed
        assert "did not agree" in found.note


def test_the_real_kernel_says_why_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def real(device: str) -> list[Finding]:
        found = [*QUESTIONS.ask(questions.REAL, device=device)]
        found += QUESTIONS.ask(questions.SANITIZER, device=device)
        return found + QUESTIONS.ask(OFF_ON_OFF, questions.REAL_FIX, device=device)

    found = real("cpu")
    assert len(found) == len(fused_moe.TABLE) + 3
    assert {(f.ran, f.note) for f in found} == {(False, "needs a CUDA device")}
    missing = {True: None, False: "not built: staleproof moe-module build"}
    monkeypatch.setattr(fused_moe, "unavailable_reason", lambda check=True: missing[check])
    assert {f.note for f in real("cuda")} == {"not built: staleproof moe-module build"}


@pytest.fixture
def real_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Case], str]], None]:
    """Replaces FlashInfer's kernel by a function that says what becomes of a case."""

    def install(outcome: Callable[[Case], str]) -> None:
        def run_cases(cases: list[Case]) -> list[CaseResult]:
            return [CaseResult(case, outcome(case), 1, 0, "said so") for case in cases]

        monkeypatch.setattr(fused_moe, "unavailable_reason", lambda check=True: None)
        monkeypatch.setattr(fused_moe, "run_cases", run_cases)
        # It compares on the GPU, which is not here.
        monkeypatch.setattr(questions, "wrong", lambda case, device: None)

    return install


def test_the_real_kernels_outcomes_are_judged(real_kernel: Callable[[Callable[[Case], str]], None]) -> None:
    real_kernel(lambda case: RIGHT)
    found = QUESTIONS.ask(questions.REAL, device="cuda")
    assert [f.variant for f in found] == [case.name for case, _ in fused_moe.TABLE]
    assert [f.expected for f in found] == [want for _, want in fused_moe.TABLE]
    assert [f.failed for f in found] == [want not in (None, RIGHT) for _, want in fused_moe.TABLE]
    assert {(f.note, f.numbers["wrong_rows"]) for f in found} == {("said so", 1)}
    assert fix(questions.REAL_FIX, "cuda") == NOT_REPRODUCED
    real_kernel(lambda case: CUDA_ILLEGAL_ACCESS)
    assert fix(questions.REAL_FIX, "cuda") == NOT_FIXED
    cured = {fused_moe.VIA_WARP_ARGMAX: CUDA_ILLEGAL_ACCESS, fused_moe.VIA_TOPK_SOFTMAX: RIGHT}
    real_kernel(lambda case: cured[case.ids])
    assert fix(questions.REAL_FIX, "cuda") == FIXED


def test_the_sanitizers_report_is_judged(
    real_kernel: Callable[[Callable[[Case], str]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real_kernel(lambda case: RIGHT)
    monkeypatch.setattr(fused_moe, "sanitizer_missing", lambda: None)
    report = fused_moe.Memcheck(3, "Invalid read", "finalizeMoeRoutingKernel")
    monkeypatch.setattr(fused_moe, "sanitize", lambda case: report)
    distinct, equal = QUESTIONS.ask(questions.SANITIZER, device="cuda")
    assert (distinct.failed, equal.failed) == (True, False)
    assert equal.numbers == {"kernel": "finalizeMoeRoutingKernel", "errors": 3}
    monkeypatch.setattr(fused_moe, "sanitize", lambda case: replace(report, errors=0))
    distinct, equal = QUESTIONS.ask(questions.SANITIZER, device="cuda")
    assert (distinct.failed, equal.failed) == (False, True)

    def mute(case: Case) -> fused_moe.Memcheck:
        raise fused_moe.ModuleError("compute-sanitizer gave no summary: nothing")

    monkeypatch.setattr(fused_moe, "sanitize", mute)
    for found in QUESTIONS.ask(questions.SANITIZER, device="cuda"):
        assert (found.ran, found.note) == (False, "compute-sanitizer gave no summary: nothing")
