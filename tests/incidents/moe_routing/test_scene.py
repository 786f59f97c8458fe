"""The scene: what the choices get to see, and what of it reaches the consumer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from staleproof.incidents.moe_routing import fp8, questions, scene


@pytest.mark.parametrize(
    ("softmax", "bias"), [(True, None), (False, torch.tensor([0.0, 3.0, 0.0, 0.0, 1.0]))]
)
def test_vllms_operators_are_called_with_vllms_arguments(monkeypatch, softmax, bias):
    def operator(of_softmax: bool):
        def route(weights, ids, token_expert_indices, logits, renormalize, bias):
            assert (token_expert_indices.shape, token_expert_indices.dtype) == (ids.shape, torch.int32)
            assert renormalize is False
            given = scene.RouterInput(logits, of_softmax, bias)
            for out, right in zip((weights, ids), scene.select_torch(given, ids.shape[1]), strict=True):
                assert out.dtype == right.dtype
                out.copy_(right)

        return route

    library = SimpleNamespace(topk_softmax=operator(True), topk_sigmoid=operator(False))
    monkeypatch.setattr(scene, "vllm_ops", lambda: library)
    given = scene.RouterInput(torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), softmax, bias)
    found, right = scene.select_vllm(given, 3), scene.select_torch(given, 3)
    assert all(map(torch.equal, found, right))


def test_evidence_names_the_release_of_the_library_that_is_loaded(tmp_path, monkeypatch):
    for variable, library in ((scene.VLLM_FP8_VARIABLE, "_C"), (scene.VLLM_VARIABLE, "_moe_C")):
        monkeypatch.setenv(variable, str(tmp_path / f"vllm/{library}.abi3.so"))
    info = tmp_path / "vllm-0.22.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.22.1\n")
    asked = {name: fp8.evidence(wall).of for name, wall in fp8.FIREWALLS.items()}
    assert asked["one scale, vLLM's op"] == asked["a scale a token, vLLM's op"] == "vLLM 0.22.1 _C"
    assert {of for name, of in asked.items() if "vLLM" not in name} == {""}
    assert questions.evidence(questions.SELECTORS[scene.VLLM]).of == "vLLM 0.22.1 _moe_C"


@pytest.mark.parametrize(("factor", "said"), [(1.0, "clean"), (1.03, "wrong, finite")])
def test_a_quantiser_that_moves_live_rows_further_than_it_rounds_is_no_firewall(device, factor, said):
    def quantise(x: torch.Tensor) -> scene.Routed:
        values, scale = scene.broken.quantise_fp8(x, per_token=True, drops_nan=True)
        return values, scale * factor

    assert fp8.through(scene.NAN, quantise, device).verdict == said
