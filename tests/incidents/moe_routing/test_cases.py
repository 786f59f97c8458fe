"""The judges of incident 3 notice what is wrong, and its shared scenes hand each case its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from staleproof import device as devices
from staleproof.cases.case import Reading
from staleproof.cases.children import ChildError
from staleproof.cases.finding import OFF_ON_OFF, Finding
from staleproof.cases.run import run
from staleproof.cases.words import FIXED, NOT_FIXED, NOT_REPRODUCED, WRONG
from staleproof.device import Provenance
from staleproof.evidence.rows import Verdict
from staleproof.incidents.moe_routing import broken, cases, fp8, fused_moe, ranks, scene
from staleproof.incidents.moe_routing.batch import RIGHT, SILENT
from staleproof.incidents.moe_routing.cases import TABLE
from staleproof.incidents.moe_routing.fused_moe import CUDA_ILLEGAL_ACCESS, MODULE_CASES
from staleproof.incidents.moe_routing.origin import Setting
from staleproof.incidents.moe_routing.scene import OURS, Routed, RouterInput, Selector


def failed(name: str, *variants: str, device: str) -> list[Finding]:
    return [found for found in TABLE.ask(name, *variants, device=device) if found.failed]


def test_a_choice_that_loses_the_best_is_not_called_right(device):
    def second_best(given: RouterInput, top_k: int) -> Routed:
        weights, ids = scene.select_ours(given, top_k + 1)
        return weights[:, 1:], ids[:, 1:]

    said = [cases.choose(kind, Selector(second_best), device).verdict for kind in scene.INPUTS]
    # With softmax a row with NaN has no best.
    assert said == ["distinct"] * 2 + [cases.NOT_THE_BEST] * 3


def test_a_remedy_that_spoils_good_rows_is_noticed(device, monkeypatch):
    harmful = broken.Remedy(on_load=lambda x: x.nan_to_num().flip(1))
    monkeypatch.setitem(broken.REMEDIES, "nan_to_num_before", harmful)
    assert failed("rows without NaN", "nan_to_num_before", device=device)
    assert not failed("NaN in padding", "nan_to_num_before", device=device)


@pytest.mark.parametrize(("name", "rows", "said"), [(OURS, 8, "wrong"), ("skip_padding", 5, "right")])
def test_good_rows_keep_their_weights_to_rounding(monkeypatch, name, rows, said):
    """Weights larger by 5e-6 are wrong, as are those of padding where they are not skipped."""
    given = scene.router_input(cases.REMEDY_CASES["NaN in a live row"], "cpu")

    def routed(spoilt: int) -> str:
        weights, ids = cases.reference.topk_softmax(given.logits, 8)
        weights[spoilt] *= 1 + 5e-6
        monkeypatch.setattr(scene, "routed", lambda case, device: (weights, ids))
        return cases.good_rows(name, "cpu")

    assert [routed(1), routed(2), routed(rows - 1)] == ["wrong", "right", "wrong"]
    assert routed(7) == said


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_not_called_distinct(device, monkeypatch, value):
    def spoilt(given: RouterInput, top_k: int) -> Routed:
        weights, ids = scene.topk_softmax(given.logits, top_k)
        return weights.fill_(value), ids

    monkeypatch.setattr(scene, "select_ours", spoilt)
    (found,) = failed("NaN in padding", OURS, device=device)
    assert found.verdict == "NaN weights"


def test_vllms_fp8_ops_are_called_as_its_own_wrapper_calls_them(monkeypatch):
    calls = []

    def op(values: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, *rest: None) -> None:
        calls.append((values.dtype, x.dtype, tuple(scale.shape), rest))
        replica = broken.quantise_fp8(x, per_token=bool(rest), drops_nan=True)
        values.copy_(replica[0])
        scale.copy_(replica[1].view(scale.shape))

    ops = SimpleNamespace(dynamic_scaled_fp8_quant=op, dynamic_per_token_scaled_fp8_quant=op)
    monkeypatch.setattr(scene, "vllm_ops", lambda variable: ops)
    for name in ("a scale a token, vLLM's op", "one scale, vLLM's op"):
        assert fp8.through(scene.NAN, fp8.FIREWALLS[name], "cpu").verdict == Verdict.CLEAN
    assert [shape for *_, shape, _ in calls] == [(8, 1), (1,)]
    assert {(values, x) for values, x, *_ in calls} == {(torch.float8_e4m3fn, torch.bfloat16)}
    assert [rest for *_, rest in calls] == [(None,), ()]


def fix(name: str, device: str) -> str:
    (found,) = TABLE.ask(OFF_ON_OFF, name, device=device)
    return found.verdict


def ranks_that(answer: dict[str, dict[str, int]] | str, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_ranks(settings: list[Setting], device: str) -> list[ranks.Passes]:
        if isinstance(answer, str):
            raise ChildError(answer)
        none = dict.fromkeys(ranks.COUNTS, 0)
        served = ("as served" if s.wide and not s.zeroed else "cured" for s in settings)
        return [ranks.Passes([], none | answer[name]) for name in served]

    monkeypatch.setattr(ranks, "serve_ranks", serve_ranks)


def servers(device: str) -> dict[str, Finding]:
    return {found.variant: found for found in TABLE.ask(cases.PADDING, device=device)}


def test_padding_is_judged_by_busy_passes(monkeypatch):
    counts = {"passes": 100, "padded": 50, "with_nan": 30, "idle": 20, "padding_rows": 400}
    ranks_that({"as served": counts, "cured": {"passes": 100}}, monkeypatch)
    found = servers("cpu")
    assert found["DP 2, gloo"].verdict == "nearly all"
    assert found["DP 2, gloo"].numbers["mean_padding"] == 8.0
    assert found["1 rank, output zeroed"].verdict == "none"
    assert found["1 rank, no graphs"].failed
    assert found["DP 2, NCCL"].note == "needs two CUDA devices"
    assert found["1 rank, PyTorch's allocator"].note == "needs a CUDA device"
    # Nine tenths of the busy passes are nearly all of them, less is not.
    said = {}
    for counts["with_nan"] in (27, 26, 1, 0):
        said[counts["with_nan"]] = servers("cpu")["1 rank"].verdict
    assert said == {27: "nearly all", 26: "some", 1: "some", 0: "none"}


@pytest.mark.parametrize("gpus", [1, 2])
def test_with_gpus_the_ranks_on_the_cpu_stay_interpreted(gpus, monkeypatch):
    counts = {"passes": 100, "padded": 50, "with_nan": 50}
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
    assert {name for name, one in found.items() if one.note == "ranks on the CPU"} == found.keys() - measured


def test_ranks_that_give_no_answer_say_why(monkeypatch):
    ranks_that("the ranks ran steps of different sizes: they did not agree", monkeypatch)
    found = servers("cpu")
    assert not any(one.ran for one in found.values())
    assert found["1 rank"].note.startswith("serve one rank: the ranks ran steps of different sizes")


def test_the_real_kernel_says_why_it_does_not_run(monkeypatch):
    missing = {True: "no such FlashInfer", False: "not built: staleproof moe-module build"}
    monkeypatch.setattr(fused_moe, "unavailable_reason", lambda check=True: missing[check])
    questions = ((cases.REAL, ()), (cases.SANITIZER, ()), (OFF_ON_OFF, (cases.REAL_FIX, *cases.CHAIN_FIXES)))
    for question, variants in questions:
        for found in TABLE.ask(question, *variants, device="cpu"):
            assert (found.ran, found.note) == (False, "needs a CUDA device")
        for found in TABLE.ask(question, *variants, device="cuda"):
            # Each case names what is missing of its own release.
            checked = question == cases.REAL and ", checked," in found.variant
            assert (found.ran, found.note) == (False, missing[checked])
    # Both FlashInfer are there, vLLM's op is not.
    monkeypatch.setattr(fused_moe, "unavailable_reason", lambda check=True: None)
    monkeypatch.setattr(fused_moe, "vllm_unavailable_reason", lambda: "no such vLLM")
    for found in TABLE.ask(OFF_ON_OFF, *cases.CHAIN_FIXES, device="cuda"):
        assert (found.ran, found.note) == (False, "no such vLLM")


Outcomes = Callable[[fused_moe.Case], str]
SANITIZED = [case for case in TABLE.cases if case.key.question == cases.SANITIZER]


@pytest.fixture
def real_kernel(monkeypatch):
    """Replaces FlashInfer's kernel by a function that says what becomes of a case; lists its launches."""

    def install(outcome: Outcomes) -> list[int]:
        launches = []

        def run_cases(asked: list[fused_moe.Case]) -> list[Reading]:
            launches.append(len(asked))
            return [fused_moe.outcome(outcome(case), f"said of {case.name}", wrong_rows=1) for case in asked]

        monkeypatch.setattr(fused_moe, "unavailable_reason", lambda check=True: None)
        monkeypatch.setattr(fused_moe, "run_cases", run_cases)
        # It compares on the GPU, which is not here.
        monkeypatch.setattr(cases, "wrong_choice", lambda logits, top_k: None)
        monkeypatch.setattr(fused_moe, "bad_logits", lambda case, device: None)
        return launches

    return install


def test_the_real_kernels_outcomes_are_judged(real_kernel):
    launches = real_kernel(lambda case: RIGHT)
    found = TABLE.ask(cases.REAL, device="cuda")
    assert launches == [len(MODULE_CASES)]
    assert [f.expected for f in found] == [*MODULE_CASES.values()]
    assert [f.failed for f in found] == [want not in (None, RIGHT) for want in MODULE_CASES.values()]
    assert {(f.note == f"said of {f.variant}", f.numbers["wrong_rows"]) for f in found} == {(True, 1)}
    assert fix(cases.REAL_FIX, "cuda") == NOT_REPRODUCED
    real_kernel(lambda case: CUDA_ILLEGAL_ACCESS)
    assert fix(cases.REAL_FIX, "cuda") == NOT_FIXED
    cured = {fused_moe.VIA_WARP_ARGMAX: CUDA_ILLEGAL_ACCESS, fused_moe.VIA_TOPK_SOFTMAX: RIGHT}
    real_kernel(lambda case: cured[case.ids])
    assert fix(cases.REAL_FIX, "cuda") == FIXED


def test_each_patch_is_judged_by_the_chain_without_it_with_it_and_without_again(monkeypatch):
    monkeypatch.setattr(fused_moe, "vllm_unavailable_reason", lambda: None)
    monkeypatch.setattr(fused_moe, "unavailable_reason", lambda check=True: None)
    moved, pairs = dict.fromkeys(cases.PATCHES, 0), len(fused_moe.CHAINS)

    def verdicts(outcome: Outcomes) -> list[str]:
        asked: list[fused_moe.Case] = []

        def run_apart(some: Sequence[fused_moe.Case]) -> list[Reading]:
            asked.extend(some)
            padding = {"rows_that_padding_changes": moved}
            return [
                Reading(outcome(case), {name: by.get(case.patch, 0) for name, by in padding.items()})
                for case in some
            ]

        monkeypatch.setattr(fused_moe, "run_apart", run_apart)
        found = TABLE.ask(OFF_ON_OFF, *cases.CHAIN_FIXES, device="cuda")
        # Off and off again are run once for both patches, in this order.
        names = [(case.patch, case.again) for case in asked]
        on = [(patch, False) for patch in cases.PATCHES]
        assert names == [("", False)] * pairs + on * pairs + [("", True)] * pairs
        assert {f.expected for f in found} == {FIXED}
        return [f.verdict for f in found]

    crash, cure = CUDA_ILLEGAL_ACCESS, {"topk_nan": RIGHT, "duplicate_experts": SILENT}
    assert verdicts(lambda case: cure.get(case.patch, crash)) == [FIXED, NOT_FIXED] * pairs
    assert verdicts(lambda case: RIGHT) == [NOT_REPRODUCED] * 2 * pairs
    assert FIXED not in verdicts(lambda case: crash if not (case.patch or case.again) else RIGHT)
    # Live rows that change with what padding rows hold are no fix.
    moved["duplicate_experts"] = 1
    assert verdicts(lambda case: RIGHT if case.patch else crash) == [FIXED, WRONG] * pairs


def test_on_sm100_any_outcome_of_the_real_kernel_is_recorded(real_kernel, monkeypatch):
    real_kernel(lambda case: SILENT)
    machine = devices.machine()
    monkeypatch.setattr(devices, "machine", lambda: replace(machine, capability="sm_100"))
    assert {f.expected for f in TABLE.ask(cases.REAL, device="cuda")} == {None}


def test_the_sanitizers_report_is_judged(real_kernel, monkeypatch):
    real_kernel(lambda case: RIGHT)
    monkeypatch.setattr(fused_moe, "sanitizer_missing", lambda: None)
    for said, as_expected in (("invalid read", [True, False]), ("no error", [False, True])):
        table = [replace(c, ask=lambda case, device, said=said: said) for c in SANITIZED]
        assert [f.failed for f in run(table, "cuda")] == as_expected


@pytest.mark.parametrize(("changed", "verdict"), [([], "the same"), ([3, 5], "differ")])
def test_a_replay_is_compared_row_by_row(device, monkeypatch, changed, verdict):
    def theirs(given: RouterInput, top_k: int) -> Routed:
        remedy = broken.REMEDIES["clamp_after_scoring"]
        weights, ids = scene.select_broken(scene.WARP, given, top_k, remedy=remedy)
        ids[changed, 0] += 1
        return weights, ids

    monkeypatch.setitem(scene.SELECTORS, scene.VLLM, Selector(theirs))
    found = cases.replay(scene.WARP, device)
    assert (found.verdict, found.numbers) == (verdict, {"rows": 256, "same_rows": 256 - len(changed)})


def test_the_evidence_names_whose_kernels_ran():
    case = fused_moe.Case(512, 8, "all equal", check=False)
    without = f"FlashInfer {fused_moe.moe_module.WITHOUT_CHECK}"
    assert cases._module_evidence(case).of == without
    assert cases._module_evidence(replace(case, ids=fused_moe.VIA_VLLM)).of == f"vLLM 0.19.1, {without}"
    assert cases._module_evidence(replace(case, check=True)).of.startswith("FlashInfer")
    assert cases._module_evidence(replace(case, check=True)).of != without
