"""What a kernel is compared with is right itself: small rows whose result can be told by hand."""

from __future__ import annotations

import torch

from staleproof.kernels import references


def test_the_probability_that_reaches_nine_tenths_is_kept_and_those_after_it_are_not():
    kept = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).double()
    found = references.top_p_renorm(kept.log())
    assert torch.allclose(found, torch.tensor([[0.15, 0.5, 0.0, 0.3]]).double() / 0.95)


def test_the_four_largest_probabilities_are_kept():
    x = torch.tensor([[0.1, 0.3, 0.05, 0.25, 0.24, 0.06]]).double()
    found = references.top_k_renorm(x.log())
    assert torch.allclose(found, torch.tensor([[0.1, 0.3, 0.0, 0.25, 0.24, 0.0]]).double() / 0.89)
