"""A choice of experts that is distinct and not right is called wrong."""

from __future__ import annotations

import pytest
import torch

from staleproof.incidents.moe_routing import correct, scene
from staleproof.incidents.moe_routing.questions import FIXES
from staleproof.incidents.moe_routing.scene import LIVE, RoutingCase

Routed = scene.Routed
BY_KERNEL = {
    "topk_softmax": RoutingCase(choice=scene.OURS),
    "topk_sigmoid": RoutingCase(choice=scene.OURS, softmax=False),
    "grouped_topk": RoutingCase(choice="grouped_topk", softmax=False),
}


def _other_padding(weights: torch.Tensor, ids: torch.Tensor) -> Routed:
    # Distinct and finite, and not what the contract gives a row of NaN.
    ids[LIVE:] = ids[LIVE:].flip(1)
    return weights, ids


def _one_bit(weights: torch.Tensor, ids: torch.Tensor) -> Routed:
    weights[0, 0] *= 1 + 2**-23
    return weights, ids


@pytest.mark.parametrize(
    ("kernel", "spoil"),
    [("topk_softmax", _one_bit), ("topk_sigmoid", _other_padding), ("grouped_topk", _one_bit)],
)
def test_a_kernel_that_chooses_or_weighs_otherwise_is_wrong(device, monkeypatch, kernel, spoil):
    right = getattr(scene, kernel)
    monkeypatch.setattr(scene, kernel, lambda *args, **options: spoil(*right(*args, **options)))
    assert correct.wrong(BY_KERNEL[kernel], device) is not None


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ("torch_topk", "weights that are not finite"),
        ("whole_nan_rows_only", "an expert twice"),
        ("takes_the_worst", "ids:"),
        ("skips_from_the_first_padding_row", "ids:"),
    ],
)
def test_a_wrong_remedy_is_found_by_what_it_does(device, choice, why):
    assert (correct.wrong(RoutingCase(choice=choice), device) or "").startswith(why)


def test_a_choice_that_depends_on_padding_is_wrong(device, monkeypatch):
    def mixes(given: scene.RouterInput, top_k: int, padding: torch.Tensor) -> Routed:
        weights, ids = scene.select_torch(scene.RouterInput(given.logits.nan_to_num(), given.softmax), top_k)
        # Within the error budget, and only where padding is finite.
        return (weights if bool(given.logits.isnan().any()) else weights * (1 + 2**-22)), ids

    monkeypatch.setitem(scene.ROUTES, "torch_topk", mixes)
    found = correct.wrong(RoutingCase(choice="torch_topk"), device)
    assert found is not None
    assert "over clean padding" in found


@pytest.mark.parametrize("expert", [RoutingCase().batch.experts, -1])
def test_an_id_of_padding_that_names_no_expert_is_wrong(device, monkeypatch, expert):
    """The id of padding stands in all places of a row or in none."""
    right = correct.routed

    def far(case: RoutingCase, device: str) -> Routed:
        weights, ids = right(case, device)
        padding = scene.is_padding(case, device)
        weights[padding], ids[padding, 0] = 0.0, expert
        return weights, ids

    monkeypatch.setattr(correct, "routed", far)
    assert correct.wrong(RoutingCase(choice="nan_to_num_before"), device) == "ids out of range"


def _other_where_padding(case: RoutingCase, weights: torch.Tensor, ids: torch.Tensor) -> Routed:
    padding = scene.is_padding(case, str(ids.device))[:, None]
    return weights, torch.where(padding, ids.flip(1), ids)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda case, weights, ids: (weights, ids.long()), "weights are torch.float32, ids torch.int64"),
        (lambda case, weights, ids: (weights * (1 + (case.batch == correct.MORE)), ids), "weights:"),
        (
            lambda case, weights, ids: (weights, ids.flip(1) if case.bad == "nowhere" else ids),
            "ids, live rows, over clean padding",
        ),
        (_other_where_padding, "ids:"),
    ],
)
def test_every_part_of_a_choice_is_compared(device, monkeypatch, spoil, why):
    right = correct.routed
    monkeypatch.setattr(correct, "routed", lambda case, device: spoil(case, *right(case, device)))
    assert (correct.wrong(RoutingCase(choice=scene.OURS), device) or "").startswith(why)


def test_a_skipped_row_has_no_weight(device, monkeypatch):
    right = correct.routed

    def heavy(case: RoutingCase, device: str) -> Routed:
        weights, ids = right(case, device)
        return weights.masked_fill(ids == -1, 0.5), ids

    monkeypatch.setattr(correct, "routed", heavy)
    assert correct.wrong(RoutingCase(choice="skip_padding"), device) == "weights of a skipped row"


def test_a_bias_of_which_a_part_is_nan_is_compared_too(device, monkeypatch):
    pair = FIXES["topk_sigmoid, NaN bias"]
    right = scene.topk_sigmoid

    def whole_only(x: torch.Tensor, top_k: int, *, bias: torch.Tensor) -> Routed:
        return right(x, top_k, bias=None if bool(bias.isnan().all()) else bias.nan_to_num(1.0))

    monkeypatch.setattr(scene, "topk_sigmoid", whole_only)
    assert correct.wrong(pair.on, device) is not None


@pytest.mark.parametrize(("factor", "wrong"), [(1.0, False), (1 + 2**-21, False), (1 + 2**-18, True)])
def test_a_remedy_over_torchs_scores_may_round_in_float32_and_no_more(device, monkeypatch, factor, wrong):
    """The sum of 64 experts and three steps more: 67 * 2**-24, a quarter of it common to a row's weights."""
    right = correct.routed
    monkeypatch.setattr(correct, "routed", lambda *case: (right(*case)[0] * factor, right(*case)[1]))
    said = correct.wrong(RoutingCase(choice="nan_to_num_before"), device) or ""
    assert said.startswith("weights, live rows") is wrong
