"""The scene: what the choices get to see, and what of it reaches the consumer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from staleproof.incidents.moe_routing import consumer, fp8, questions, scene
from staleproof.incidents.moe_routing.batch import Batch
from staleproof.incidents.moe_routing.scene import LIVE, OURS, RoutingCase


def test_vllms_operators_are_loaded_from_the_library_that_is_named(monkeypatch):
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    for variable, library in ((scene.VLLM_VARIABLE, "_moe_C"), (scene.VLLM_FP8_VARIABLE, "_C")):
        monkeypatch.setenv(variable, f"{library}.so")
        assert scene.vllm_ops.__wrapped__(variable) is getattr(torch.ops, library)
    assert loaded == ["_moe_C.so", "_C.so"]


def test_why_vllms_operators_cannot_run(monkeypatch):
    for variable, library in ((scene.VLLM_VARIABLE, "_moe_C"), (scene.VLLM_FP8_VARIABLE, "_C")):
        assert scene.vllm_unavailable_reason("cpu", variable) == "needs a CUDA device"
        monkeypatch.delenv(variable, raising=False)
        said = scene.vllm_unavailable_reason("cuda", variable)
        assert said == f"{variable} names no {library} library"
        monkeypatch.setenv(variable, "a.so")
        assert scene.vllm_unavailable_reason("cuda", variable) is None


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("bias", [None, torch.tensor([0.0, 3.0, 0.0, 0.0, 1.0])])
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


@pytest.mark.parametrize("choice", [OURS, "grouped_topk"])
def test_the_consumer_gets_what_the_choice_gave(device, choice):
    case = RoutingCase(softmax=choice == OURS)
    routed = scene.routed(case, device)[1]
    holes = consumer.holes(consumer.build_map(routed, case.batch.experts), routed)
    ids = routed.tolist()
    assert ids[5:] == [[0] * 10] * 3
    assert [len(set(row)) for row in ids[:5]] == [10] * 5
    assert holes.tolist() == [[False] * 10] * 5 + [[False] + [True] * 9] * 3


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


BIAS = ["NaN" if part else "finite" for part in scene.nan_bias(torch.zeros(1, 64)).bias.isnan()]


@pytest.mark.parametrize(
    ("bad", "live", "padding", "bias"),
    [
        ("nowhere", {}, [], None),
        ("padding", {}, ["all NaN"], None),
        ("odd padding", {}, ["one NaN", "one Inf", "all -Inf"], None),
        ("live row", {2: "all NaN"}, [], None),
        ("infinity", {2: "one Inf"}, [], None),
        ("bias", {}, [], ["NaN"] * 64),
        ("part of the bias", {}, [], BIAS),
    ],
)
@pytest.mark.parametrize("spread", [False, True])
def test_each_bad_value_is_where_its_name_says(device, bad, live, padding, bias, spread):
    def kind(row: torch.Tensor) -> str:
        for name, found in (("NaN", row.isnan()), ("Inf", row == torch.inf), ("-Inf", row == -torch.inf)):
            if found.any():
                return {1: f"one {name}", 64: f"all {name}"}[int(found.sum())]
        return "finite"

    case = RoutingCase(bad=bad, batch=Batch(11, 10, 64), spread=spread)
    given, behind = scene.router_input(case, device), scene.is_padding(case, device)
    assert behind.tolist() == [row % 2 == 0 if spread else row >= LIVE for row in range(11)]
    kinds, expected = [kind(row) for row in given.logits], dict.fromkeys(range(11), "finite") | live
    for turn, row in enumerate(behind.nonzero().flatten().tolist() if padding else ()):
        expected[row] = padding[turn % len(padding)]
    assert kinds == [expected[row] for row in range(11)]
    found = None if given.bias is None else ["NaN" if x else "finite" for x in given.bias.isnan()]
    assert found == bias


@pytest.mark.parametrize(("factor", "said"), [(1.0, "clean"), (1.03, "wrong, finite")])
def test_a_quantiser_that_moves_live_rows_further_than_it_rounds_is_no_firewall(device, factor, said):
    def quantise(x: torch.Tensor) -> scene.Routed:
        values, scale = scene.broken.quantise_fp8(x, per_token=True, drops_nan=True)
        return values, scale * factor

    assert fp8.through(scene.NAN, quantise, device).verdict == said
