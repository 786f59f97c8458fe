"""Distinct ids in front of a consumer that cannot take repeated ones."""

from __future__ import annotations

import pytest
import torch

from staleproof.ops.distinct_experts import distinct_experts


def _layer(weights: torch.Tensor, ids: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """What a fused MoE sums up: (tokens, hidden), slots with id -1 left out."""
    chosen = experts[ids.clamp(min=0).long()] * weights.double()[..., None]
    return torch.where((ids >= 0)[..., None], chosen, 0).sum(1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (3, 2), (37, 8), (9, 10)])
def test_ids_are_distinct_and_the_layer_gives_the_same(device, tokens, top_k, dtype):
    torch.manual_seed(tokens)
    # Few experts: nearly every token repeats one.
    ids = torch.randint(0, max(2, top_k // 2), (tokens, top_k), dtype=dtype, device=device)
    weights = torch.rand(tokens, top_k, device=device)
    experts = torch.randn(16, 5, dtype=torch.float64, device=device)
    before = ids.clone(), weights.clone()
    new_weights, new_ids = distinct_experts(weights, ids)
    assert (new_weights.dtype, new_ids.dtype) == (weights.dtype, dtype)
    assert torch.equal(ids, before[0])
    assert torch.equal(weights, before[1])
    for given, kept in zip(ids.tolist(), new_ids.tolist(), strict=True):
        # The first slot of an expert stays where it was, the others are skipped.
        assert kept == [e if e not in given[:slot] else -1 for slot, e in enumerate(given)]
    torch.testing.assert_close(
        _layer(new_weights, new_ids, experts), _layer(weights, ids, experts), rtol=1e-6, atol=1e-6
    )


def test_a_row_without_repeats_keeps_its_bits(device):
    ids = torch.arange(8, dtype=torch.int32, device=device).repeat(5, 1)
    weights = torch.rand(5, 8, device=device)
    weights[2] = torch.nan
    new_weights, new_ids = distinct_experts(weights, ids)
    assert torch.equal(new_ids, ids)
    # A sum of a NaN is a NaN, of whatever bits.
    assert new_weights[2].isnan().all()
    whole = [0, 1, 3, 4]
    assert torch.equal(new_weights[whole].view(torch.int32), weights[whole].view(torch.int32))


def test_half_precision_weights_and_no_token(device):
    ids = torch.tensor([[4, 4, 1]], dtype=torch.int32, device=device)
    weights = torch.tensor([[0.25, 0.5, 0.125]], dtype=torch.bfloat16, device=device)
    new_weights, new_ids = distinct_experts(weights, ids)
    assert new_ids.tolist() == [[4, -1, 1]]
    assert new_weights.tolist() == [[0.75, 0.0, 0.125]]
    assert distinct_experts(weights[:0], ids[:0])[1].shape == (0, 3)
    assert distinct_experts(weights[:, :0], ids[:, :0])[1].shape == (1, 0)


def test_bad_input(device):
    ids = torch.zeros(2, 4, dtype=torch.int32, device=device)
    for wrong, message in (
        (ids.t(), "a contiguous"),
        (ids.float(), r"torch\.int32"),
        (ids[0], "a tensor of rank 2"),
    ):
        with pytest.raises(ValueError, match=f"topk_ids: expected {message}"):
            distinct_experts(torch.zeros(wrong.shape, device=device), wrong)
