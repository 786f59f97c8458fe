"""The judges of incident 3 notice what is wrong, and its shared scenes hand each case its own part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from staleproof import device as devices
from staleproof.child import ChildError
from staleproof.device import Provenance
from staleproof.evidence.rows import Verdict
from staleproof.incidents.moe_routing import broken, fp8, questions, ranks, scene
from staleproof.incidents.moe_routing.origin import Setting
from staleproof.incidents.moe_routing.scene import OURS, Routed, RouterInput, Selector
from staleproof.lab import Finding


def failed(name: str, *variants: str, device: str) -> list[Finding]:
    return [found for found in questions.incident.ask(name, *variants, device=device) if found.failed]


def test_a_choice_that_loses_the_best_is_not_called_right(device):
    def second_best(given: RouterInput, top_k: int) -> Routed:
        weights, ids = scene.select_ours(given, top_k + 1)
        return weights[:, 1:], ids[:, 1:]

    said = [questions.choose(kind, Selector(second_best), device).verdict for kind in scene.INPUTS]
    # With softmax a row with NaN has no best.
    assert said == ["distinct"] * 2 + [questions.NOT_THE_BEST] * 3


def test_a_remedy_that_spoils_good_rows_is_noticed(device, monkeypatch):
    harmful = broken.Remedy(on_load=lambda x: x.nan_to_num().flip(1))
    monkeypatch.setitem(broken.REMEDIES, "nan_to_num_before", harmful)
    assert failed("rows without NaN", "nan_to_num_before", device=device)
    assert not failed("NaN in padding", "nan_to_num_before", device=device)


@pytest.mark.parametrize(("name", "rows", "said"), [(OURS, 8, "wrong"), ("skip_padding", 5, "right")])
def test_good_rows_keep_their_weights_to_rounding(monkeypatch, name, rows, said):
    """Weights larger by 5e-6 are wrong, as are those of padding where they are not skipped."""
    given = scene.router_input(questions.REMEDY_CASES["NaN in a live row"], "cpu")

    def routed(spoilt: int) -> str:
        weights, ids = questions.reference.topk_softmax(given.logits, 8)
        weights[spoilt] *= 1 + 5e-6
        monkeypatch.setattr(scene, "routed", lambda case, device: (weights, ids))
        return questions.good_rows(name, "cpu").verdict

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


def ranks_that(answer: dict[str, dict[str, int]] | str, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_ranks(settings: list[Setting], device: str) -> list[ranks.Passes]:
        if isinstance(answer, str):
            raise ChildError(answer)
        none = dict.fromkeys(ranks.COUNTS, 0)
        served = ("as served" if s.wide and not s.zeroed else "cured" for s in settings)
        return [ranks.Passes([], none | answer[name]) for name in served]

    monkeypatch.setattr(ranks, "serve_ranks", serve_ranks)


def servers(device: str) -> dict[str, Finding]:
    return {found.variant: found for found in questions.incident.ask(questions.PADDING, device=device)}


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


@pytest.mark.parametrize(("changed", "verdict"), [([], "the same"), ([3, 5], "differ")])
def test_a_replay_is_compared_row_by_row(device, monkeypatch, changed, verdict):
    def theirs(given: RouterInput, top_k: int) -> Routed:
        remedy = broken.REMEDIES["clamp_after_scoring"]
        weights, ids = scene.select_broken(scene.WARP, given, top_k, remedy=remedy)
        ids[changed, 0] += 1
        return weights, ids

    monkeypatch.setitem(scene.SELECTORS, scene.VLLM, Selector(theirs))
    found = questions.replay(scene.WARP, device)
    assert (found.verdict, found.numbers) == (verdict, {"rows": 256, "same_rows": 256 - len(changed)})
