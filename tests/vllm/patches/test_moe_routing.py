"""The hooks of incident 3's patches on plain tensors; tests/vllm has them in the real vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from staleproof.vllm.patches import moe_routing as patch


def _draws(distribution: str, tokens: int, experts: int, top_k: int, **params) -> torch.Tensor:
    torch.manual_seed(0)
    router = SimpleNamespace(distribution=distribution, distribution_params=params)
    device = torch.device("cpu")
    return patch._sample((router, tokens, experts, top_k, device, torch.int32), {})


@pytest.mark.parametrize("params", [{"mean": 0.0, "std": 1.0}, {"mean": 1.0, "std": 0.5}])
def test_the_first_draw_has_the_strategys_distribution(params):
    experts = 8
    ids = _draws("normal", 40000, experts, 1, **params)
    seen = torch.bincount(ids[:, 0].long(), minlength=experts) / len(ids)
    # vLLM maps a normal sample to floor(sigmoid(sample) * experts).
    samples = torch.normal(params["mean"], params["std"], (40000,))
    theirs = torch.bincount((samples.sigmoid() * experts).long(), minlength=experts) / 40000
    torch.testing.assert_close(seen, theirs, rtol=0, atol=0.015)


def test_draws_are_distinct_even_where_experts_are_improbable():
    # Nearly all of it falls to one expert; some have probability 0 in float64.
    for ids in (_draws("normal", 200, 16, 8, mean=30.0, std=0.1), _draws("uniform", 200, 16, 16)):
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        assert ids.dtype == torch.int32
        assert 0 <= int(ids.min()) <= int(ids.max()) < 16


def test_what_the_simulator_cannot_draw_is_left_to_vllm():
    assert _draws("zipf", 2, 8, 2) is NotImplemented
    assert _draws("uniform", 2, 4, 8) is NotImplemented


def test_cleaned_inputs_keep_infinities_and_everything_finite():
    bias = torch.tensor([torch.nan, 1.5, torch.inf, -torch.inf])
    args, _ = patch._clean_bias((0, 0, 0, 0, False, bias), {})
    assert args[5].tolist() == [0.0, 1.5, torch.inf, -torch.inf]
    assert bias.isnan().any()
    assert patch._clean_bias((0, 0, 0, 0), {}) is None
    _, kwargs = patch._clean_bias((0, 0, 0, 0), {"e_score_correction_bias": bias})
    assert kwargs["e_score_correction_bias"][0] == 0
    # A row that softmax makes NaN has a NaN or +inf; -inf masks an expert and stays.
    logits = torch.tensor([[1.0, -torch.inf], [torch.inf, 0.0], [torch.nan, 0.0]])
    args, _ = patch._clean_logits((0, 0, 0, logits), {})
    assert args[3].tolist() == [[1.0, -torch.inf], [0.0, 0.0], [0.0, 0.0]]
    assert args[3].softmax(-1).isfinite().all()
    args, _ = patch._clean_sigmoid_logits((0, 0, 0, logits), {})
    assert args[3][2].sigmoid().tolist() == [0.0, 0.5]
    assert args[3][1].tolist() == [torch.inf, 0.0]
