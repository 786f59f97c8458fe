"""Each question gets the verdict it must get, and a fix that is taken away is missed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from staleproof.evidence.rows import Verdict
from staleproof.harness.findings import FIXED, NOT_FIXED, NOT_REPRODUCED, Finding
from staleproof.incidents.moe_routing import broken, fused_moe, origin
from staleproof.incidents.moe_routing import questions as experiment
from staleproof.incidents.moe_routing.consumer import ILLEGAL_ACCESS, RIGHT, SILENT
from staleproof.incidents.moe_routing.origin import Counts


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def as_expected(findings: Iterator[Finding]) -> dict[str, str]:
    found = list(findings)
    assert found
    for one in found:
        assert not one.failed, one
        assert one.ran or one.note
    return {one.question: one.verdict for one in found}


@pytest.mark.parametrize("name", experiment.SELECTORS)
def test_selection(device: str, name: str) -> None:
    seen = as_expected(experiment.selection(name, device))
    assert list(seen) == list(experiment.INPUTS)


def test_every_faulty_choice_repeats_an_expert_and_ours_never_does() -> None:
    for name, selector in experiment.SELECTORS.items():
        if name in broken.CHOICES:
            assert experiment.DUPLICATES in selector.expected
    assert set(experiment.SELECTORS[experiment.OURS].expected) == {experiment.DISTINCT}
    assert set(broken.CHOICES) < set(experiment.SELECTORS)


def test_a_blind_detector_is_found_out(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        experiment, "rows_with_duplicates", lambda ids: torch.zeros(len(ids), dtype=torch.bool)
    )
    assert any(f.failed for f in experiment.selection("warp_keeps_its_first_column", device))
    assert any(f.failed for f in experiment.remedy("none", device))


def test_a_choice_that_loses_the_best_is_not_called_right(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = experiment.SELECTORS[experiment.OURS].select

    def second_best(*args: Any) -> experiment.Routed:
        x, top_k, *rest = args
        weights, ids = first(x, top_k + 1, *rest)
        return weights[:, 1:], ids[:, 1:]

    worse = experiment.Selector(second_best, (experiment.DISTINCT,) * 5)
    monkeypatch.setitem(experiment.SELECTORS, "worse", worse)
    failed = [f for f in experiment.selection("worse", device) if f.failed]
    assert [f.verdict for f in failed] == [experiment.NOT_THE_BEST] * 3


@pytest.mark.parametrize("name", experiment.REMEDY_EXPECTED)
def test_remedy(device: str, name: str) -> None:
    seen = as_expected(experiment.remedy(name, device))
    assert seen["rows without NaN"] == "right"


def test_every_remedy_is_asked() -> None:
    assert set(experiment.REMEDY_EXPECTED) == {*broken.REMEDIES, experiment.OURS}


def test_a_remedy_that_spoils_good_rows_is_found_out(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harmful = broken.Remedy(on_load=lambda x: x.nan_to_num().flip(1))
    monkeypatch.setitem(broken.REMEDIES, "nan_to_num_before", harmful)
    failed = [f.question for f in experiment.remedy("nan_to_num_before", device) if f.failed]
    assert failed == ["rows without NaN"]


def test_nan_weights_are_not_called_distinct(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(*args: Any) -> experiment.Routed:
        weights, ids = experiment.topk_softmax(*args[:2])
        return weights.fill_(float("nan")), ids

    monkeypatch.setattr(experiment, "_of_ours", spoilt)
    verdicts = {f.verdict for f in experiment.remedy(experiment.OURS, device)}
    assert experiment.NAN_WEIGHTS in verdicts


def test_the_padding_id_reaches_the_last_expert_of_a_consumer_that_indexes(device: str) -> None:
    found = list(experiment.indexing_consumer(device))
    assert not any(f.failed for f in found)
    assert [f.numbers["rows"] for f in found] == [3, 0]


@pytest.mark.parametrize("batch", experiment.BATCHES, ids=str)
def test_consumer(device: str, batch: experiment.Batch) -> None:
    seen = as_expected(experiment.consume(batch, device))
    safe = batch == (256, 8, 128)
    assert (seen["ids all equal"] == RIGHT) == safe
    assert seen["ids distinct"] == RIGHT


def test_what_the_memory_held_decides_how_it_ends(device: str) -> None:
    found = list(experiment.held_before(device))
    assert not any(f.failed for f in found)
    assert {f.verdict for f in found} == {ILLEGAL_ACCESS, SILENT}
    # The damage stays in the rows that repeat an expert.
    assert all(f.numbers["wrong_clean_rows"] == 0 < f.numbers["wrong_rows"] for f in found)


@pytest.mark.parametrize("name", experiment.FIREWALLS)
def test_firewall(device: str, name: str) -> None:
    as_expected(experiment.firewall(name, device))


def test_fmax_lets_no_nan_through_and_an_infinity_ruins_all_rows() -> None:
    verdicts = experiment.FIREWALLS
    for name, (_, drops_nan, (nan, _)) in verdicts.items():
        assert (nan == Verdict.CLEAN) is drops_nan, name
    assert verdicts["one scale, fmax"][2] == (Verdict.CLEAN, Verdict.LEAKED)


@pytest.mark.parametrize("name", experiment.INGREDIENTS)
def test_ablation(device: str, name: str) -> None:
    found = experiment.ingredient(name, device)
    assert found.verdict == found.expected, found


def test_the_crash_needs_all_four() -> None:
    assert [o == ILLEGAL_ACCESS for _, o in experiment.INGREDIENTS.values()] == [True] + 4 * [False]


@pytest.mark.parametrize("name", experiment.FIXES)
def test_off_on_off(device: str, name: str) -> None:
    found = experiment.verify(name, device)
    assert found.verdict == found.expected, found
    if found.verdict == FIXED:
        assert found.numbers["unwritten_on"] == found.numbers["wrong_on"] == 0
    assert found.numbers["unwritten_off"] > 0


def test_a_kernel_without_sanitising_is_not_called_fixed(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raw(x: torch.Tensor, top_k: int, **_: Any) -> experiment.Routed:
        return broken.route(broken.warp_keeps_its_first_column, x, top_k)

    monkeypatch.setattr(experiment, "topk_softmax", raw)
    found = experiment.verify("topk_softmax", device)
    assert (found.verdict, found.failed) == (NOT_FIXED, True)


def test_what_does_not_fail_first_is_not_called_fixed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = broken.Remedy(on_load=torch.nan_to_num)
    monkeypatch.setitem(broken.REMEDIES, "none", harmless)
    assert experiment.verify("topk_softmax", device).verdict == NOT_REPRODUCED


def test_an_unguarded_bias_is_not_called_fixed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unguarded(x: torch.Tensor, top_k: int, *, bias: torch.Tensor) -> experiment.Routed:
        return broken.route(
            broken.warp_keeps_its_first_column,
            x,
            top_k,
            softmax=False,
            bias=bias,
            remedy=broken.REMEDIES["clamp_after_scoring"],
        )

    monkeypatch.setattr(experiment, "topk_sigmoid", unguarded)
    assert experiment.verify("topk_sigmoid, NaN bias", device).verdict == NOT_FIXED


def ranks_that(answer: dict[str, Counts] | str, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_ranks(settings: list[origin.Setting], device: str) -> list[Counts]:
        if isinstance(answer, str):
            raise origin.RankError(answer)
        return [answer["as served" if s.wide and not s.zeroed else "cured"] for s in settings]

    monkeypatch.setattr(origin, "serve_ranks", serve_ranks)


def test_padding_is_judged_by_busy_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Counts(passes=100, padded=50, with_nan=30, idle=20, padding_rows=400)
    ranks_that({"as served": seen, "cured": Counts(passes=100)}, monkeypatch)
    found = {f.variant: f for f in experiment.padding("cpu")}
    assert found["DP 2, gloo"].verdict == experiment.NEARLY_ALL
    assert found["DP 2, gloo"].numbers["mean_padding"] == 8.0
    assert found["1 rank, output zeroed"].verdict == experiment.NONE
    assert found["1 rank, no graphs"].failed
    assert not found["DP 2, NCCL"].ran
    assert found["DP 2, NCCL"].note == "needs two CUDA devices"
    # A third of the busy passes is not nearly all of them.
    seen.with_nan = 10
    assert {f.variant: f for f in experiment.padding("cpu")}["1 rank"].failed


def test_ranks_that_give_no_answer_are_a_failure_and_not_an_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_that("the ranks ran steps of different sizes: they did not agree", monkeypatch)
    found = [f for f in experiment.padding("cuda") if f.ran]
    assert {"1 rank", "1 rank, PyTorch's allocator", "DEP 2, gloo"} <= {f.variant for f in found}
    for one in found:
        assert one.failed
        assert "did not agree" in one.note


def test_the_real_kernel_says_why_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        *experiment.real_module("cpu"),
        *experiment.under_sanitizer("cpu"),
        experiment.verify_real("cpu"),
    ]
    assert len(found) == len(fused_moe.TABLE) + 3
    assert {(f.ran, f.note) for f in found} == {(False, "needs a CUDA device")}
    missing = {True: None, False: "not built: staleproof moe-module build"}
    monkeypatch.setattr(fused_moe, "why_not", lambda check=True: missing[check])
    (why,) = {f.note for f in experiment.real_module("cuda")}
    assert why == "not built: staleproof moe-module build"


def test_the_real_kernels_outcomes_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_moe, "why_not", lambda check=True: None)

    def rows(outcome: str) -> Any:
        return lambda cases: [
            SimpleNamespace(case=c, outcome=outcome, wrong_rows=0, wrong_clean_rows=0, error="said so")
            for c in cases
        ]

    monkeypatch.setattr(fused_moe, "run_cases", rows(fused_moe.RIGHT))
    found = list(experiment.real_module("cuda"))
    expected = [want for _, want in fused_moe.TABLE]
    assert [f.failed for f in found] == [want not in (None, fused_moe.RIGHT) for want in expected]
    assert experiment.verify_real("cuda").verdict == NOT_REPRODUCED
    monkeypatch.setattr(fused_moe, "run_cases", rows(fused_moe.ILLEGAL_ACCESS))
    assert experiment.verify_real("cuda").verdict == NOT_FIXED
    rows_of = {fused_moe.WARP: fused_moe.ILLEGAL_ACCESS, fused_moe.OURS: fused_moe.RIGHT}
    monkeypatch.setattr(fused_moe, "run_cases", lambda cases: [rows(rows_of[c.ids])([c])[0] for c in cases])
    assert experiment.verify_real("cuda").verdict == FIXED


@pytest.mark.gpu
def test_the_replays_are_vllms_kernels_to_the_id() -> None:
    for name in experiment.REPLAYED:
        found = experiment.replay(name, "cuda")
        assert not found.failed, found


def test_the_consumer_is_asked_with_what_the_choice_gave(device: str) -> None:
    ids, holes = experiment.picture(experiment.Served(), device)
    assert ids[5:] == [[0] * 10] * 3
    assert [len(set(row)) for row in ids[:5]] == [10] * 5
    assert holes == [[False] * 10] * 5 + [[False] + [True] * 9] * 3
    assert [row[1:] for row in experiment.stages(experiment.Served(), device)] == [(0, 3)] * 3
    ours = experiment.Served(choice="topk_softmax")
    assert [row[1:] for row in experiment.stages(ours, device)] == [(0, 3), (0, 0), (0, 0)]
