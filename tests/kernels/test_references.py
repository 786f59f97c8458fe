"""What a kernel is compared with is right itself: small rows whose result can be told by hand."""

import torch

from staleproof.kernels import references


def test_the_probability_that_reaches_nine_tenths_is_kept_and_those_after_it_are_not():
    kept = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).double()
    found = references.top_p_renorm(kept.log())
    assert torch.allclose(found, torch.tensor([[0.15, 0.5, 0.0, 0.3]]).double() / 0.95)


def test_norms_keep_numbers_that_are_small_beside_their_epsilon():
    """Row (3, 4) / 1000: mean square 12.5e-6, squares 25e-6, variance 0.25e-6; all with 1e-6 added."""
    x = torch.tensor([[3e-3, 4e-3]]).double()
    assert torch.allclose(references.rms_norm(x), x / 13.5e-6**0.5)
    assert torch.allclose(references.l2_norm(x), x / 26e-6**0.5)
    assert torch.allclose(references.layer_norm(x), (x - 3.5e-3) / 1.25e-6**0.5)
    normed, total = references.add_rms_norm(x)
    assert torch.equal(total, 2 * x)
    assert torch.allclose(normed, 2 * x / 51e-6**0.5)


def test_each_sequence_has_a_matrix_of_its_own_of_numbers_that_a_kernel_can_have():
    x, starts = torch.eye(4).double(), torch.tensor([0, 1, 3])
    for product, shape in (
        (references.grouped_product, (2, 4, 32)),
        (references.masked_product, (2, 128, 4)),
    ):
        torch.manual_seed(0)
        drawn = torch.randn(shape).bfloat16().double()
        first, second = drawn if shape[1] == 4 else drawn.mT
        assert torch.equal(product(x, starts)[:3], torch.cat([first[:1], second[1:3]]))


def test_the_four_largest_probabilities_are_kept():
    x = torch.tensor([[0.1, 0.3, 0.05, 0.25, 0.24, 0.06]]).double()
    found = references.top_k_renorm(x.log())
    assert torch.allclose(found, torch.tensor([[0.1, 0.3, 0.0, 0.25, 0.24, 0.0]]).double() / 0.89)
