"""The hooks of incident 3's patches on plain tensors; tests/vllm has them in the real vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from staleproof.vllm.patches import moe_routing as patch
from staleproof.vllm.sources import NotShippedError, Sources


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


def test_hash_selection_cleans_logits_and_both_biases():
    nan = torch.tensor([torch.nan, 1.0, torch.inf])
    args, kwargs = patch._clean_hash((0, 0, 0, nan, False, 1.0, nan, None, None), {"bias_vl": nan})
    assert torch.nn.functional.softplus(args[3]).sqrt()[0] == 0
    assert args[3].tolist()[1:] == args[6].tolist()[1:] == [1.0, torch.inf]
    assert args[6][0] == kwargs["bias_vl"][0] == 0
    # By position, as vLLM may pass them; a missing bias stays missing.
    args, kwargs = patch._clean_hash_bias((0, 0, 0, nan, False, 1.0, None, None, None, None, nan), {})
    assert args[3] is nan
    assert args[6] is None
    assert args[10][0] == 0
    assert not kwargs


CLAMPED = "val = isnan(val) ? 0 : val;\n"
BIASED = "val = val + row_bias[expert];\n"


@pytest.mark.parametrize(
    ("text", "needed", "why"),
    [
        (BIASED, True, "compares NaN scores as they are"),
        (CLAMPED + BIASED, True, "topk_softplus_sqrt_kernels.cu:2 adds the bias behind the clamp"),
        (CLAMPED + "isnan(row_bias[expert]);\n" + BIASED, False, "makes NaN scores and a NaN bias 0"),
    ],
)
def test_hash_probe(tmp_path, text, needed, why):
    (tmp_path / "_custom_ops.py").write_text("def topk_hash_softplus_sqrt(x): pass")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/topk_softplus_sqrt_kernels.cu").write_text(text)
    found = patch._hash_nan(Sources(tmp_path, tmp_path / "csrc"))
    assert found.needed is needed
    assert why in found.why
    with pytest.raises(NotShippedError):
        patch._hash_nan(Sources(tmp_path))
    (tmp_path / "_custom_ops.py").write_text("")
    assert not patch._hash_nan(Sources(tmp_path)).needed
