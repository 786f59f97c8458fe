"""A choice of experts that is distinct and not right is called wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from staleproof.cases.finding import OFF_ON_OFF
from staleproof.cases.words import FIXED, WRONG
from staleproof.incidents.moe_routing import correct, scene
from staleproof.incidents.moe_routing.cases import FIXES, TABLE
from staleproof.incidents.moe_routing.scene import LIVE, RoutingCase

Routed = scene.Routed


def _worst(weights: torch.Tensor, ids: torch.Tensor) -> Routed:
    # Distinct, and as far from the best as can be: 64 experts, so those of the other end.
    return weights, 63 - ids


def _thrice(weights: torch.Tensor, ids: torch.Tensor) -> Routed:
    return 3 * weights, ids


def _zeros(weights: torch.Tensor, ids: torch.Tensor) -> Routed:
    return torch.zeros_like(weights), ids


def _one_bit(weights: torch.Tensor, ids: torch.Tensor) -> Routed:
    # One part in two million of one weight.
    weights[0, 0] *= 1 + 2**-21
    return weights, ids


def _other_padding(weights: torch.Tensor, ids: torch.Tensor) -> Routed:
    # Distinct and finite, and not what the contract gives a row of NaN.
    ids[LIVE:] = ids[LIVE:].flip(1)
    return weights, ids


@pytest.mark.parametrize("spoil", [_worst, _thrice, _zeros, _one_bit, _other_padding])
@pytest.mark.parametrize("kernel", ["topk_softmax", "topk_sigmoid", "grouped_topk"])
def test_a_kernel_that_chooses_or_weighs_otherwise_is_wrong(
    device: str, monkeypatch: pytest.MonkeyPatch, kernel: str, spoil: Callable[..., Routed]
) -> None:
    right = getattr(scene, kernel)
    monkeypatch.setattr(scene, kernel, lambda *args, **options: spoil(*right(*args, **options)))
    (found,) = TABLE.ask(OFF_ON_OFF, kernel, device=device)
    assert (found.verdict, found.failed) == (WRONG, True), found.note


def test_a_choice_that_depends_on_padding_is_wrong(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = scene.topk_softmax

    def mixes(x: torch.Tensor, top_k: int, **options: object) -> Routed:
        weights, ids = right(x, top_k, **options)
        # Within the error budget, and only where padding is finite.
        return (weights if bool(x.isnan().any()) else weights * (1 + 2**-23)), ids

    monkeypatch.setattr(scene, "topk_softmax", mixes)
    (found,) = TABLE.ask(OFF_ON_OFF, "topk_softmax", device=device)
    assert found.verdict == WRONG
    assert "over clean padding" in found.note


@pytest.mark.parametrize("name", [name for name, (*_, expected) in FIXES.items() if expected == FIXED])
def test_every_fix_is_right(device: str, name: str) -> None:
    off, changes, _ = FIXES[name]
    assert correct.wrong(replace(off, **changes), device) is None


def test_a_skipped_row_has_no_weight(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = RoutingCase(choice="skip_padding")
    right = correct.routed

    def heavy(case: RoutingCase, device: str) -> Routed:
        weights, ids = right(case, device)
        return weights.masked_fill(ids == -1, 0.5), ids

    monkeypatch.setattr(correct, "routed", heavy)
    assert correct.wrong(case, device) == "weights of a skipped row"
