"""What a case needs and is not here is said in one line, in the order in which it is looked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from staleproof import device as devices
from staleproof.device import Provenance
from staleproof.incidents.kv_reuse import attention
from staleproof.incidents.mla_padding import questions as decoding
from staleproof.incidents.mla_padding.remedies import Setup
from staleproof.incidents.moe_routing import fp8, fused_moe, questions, scene
from staleproof.incidents.scale_padding import null_block
from staleproof.lab import needs_cuda

GPU = "needs a CUDA device"
HERE = {"measured": True, "flashinfer": None, "sm90": None, "compiled": None, "built": None}


@pytest.fixture(name="have")
def have_fixture(monkeypatch):
    """Makes a machine that has everything but for what is given."""

    def have(**changes: object) -> None:
        found.update(HERE | changes)
        provenance = Provenance.MEASURED if found["measured"] else Provenance.INTERPRETED
        monkeypatch.setattr(devices, "provenance", lambda: provenance)
        monkeypatch.setattr(devices, "flashinfer_missing", lambda: found["flashinfer"])
        monkeypatch.setattr(devices, "needs_sm90", lambda: found["sm90"])
        monkeypatch.setattr(attention, "_not_compiled", lambda backend: found["compiled"])
        monkeypatch.setattr(fused_moe, "_not_compiled", lambda: found["built"])

    found: dict[str, object] = {}
    return have


@pytest.mark.parametrize(
    ("changes", "gpu", "fa2", "fa3", "moe"),
    [
        ({}, None, None, None, None),
        ({"measured": False, "flashinfer": "no FlashInfer"}, *[GPU] * 4),
        ({"flashinfer": "no FlashInfer", "compiled": "x"}, None, *["no FlashInfer"] * 3),
        ({"sm90": "no Hopper", "compiled": "not built"}, None, "not built", "no Hopper", None),
        ({"compiled": "not built"}, None, "not built", "not built", None),
        ({"built": "not compiled"}, *[None] * 3, "not compiled"),
    ],
)
def test_flashinfers_kernels(have, changes, gpu, fa2, fa3, moe):
    have(**changes)
    assert attention._needs_gpu() == gpu
    assert [attention._needs_flashinfer(backend) for backend in ("fa2", "fa3")] == [fa2, fa3]
    assert fused_moe.unavailable_reason("distinct", "cuda" if gpu is None else "cpu") == moe


@pytest.mark.parametrize(
    ("absent", "why"),
    [
        ("", None),
        ("is_available", "this torch has no torch.distributed"),
        ("is_gloo_available", "this torch has no gloo"),
    ],
)
def test_two_ranks_need_gloo(monkeypatch, absent, why):
    present = {name: lambda name=name: name != absent for name in ("is_available", "is_gloo_available")}
    monkeypatch.setattr(null_block, "dist", SimpleNamespace(**present))
    assert null_block.unavailable_reason() == why


@pytest.mark.parametrize(
    ("device", "gpus", "enough"), [("cpu", 2, False), ("cuda", 1, False), ("cuda", 2, True)]
)
def test_ranks_on_gpus(monkeypatch, device, gpus, enough):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert questions.needs_two_gpus(None, device) == (None if enough else "needs two CUDA devices")
    assert needs_cuda(None, device) == (None if device == "cuda" else GPU)


def test_vllms_own_operators_and_no_others_need_its_library(monkeypatch):
    monkeypatch.delenv(scene.VLLM_VARIABLE, raising=False)
    monkeypatch.delenv(scene.VLLM_FP8_VARIABLE, raising=False)
    selectors = {name: questions.needs_vllm(one, "cuda") for name, one in questions.SELECTORS.items()}
    assert {name for name, why in selectors.items() if why} == {scene.VLLM}
    assert selectors[scene.VLLM] == f"{scene.VLLM_VARIABLE} names no _moe_C library"
    assert scene.vllm_unavailable_reason("cpu") == GPU
    monkeypatch.setenv(scene.VLLM_VARIABLE, "some.so")
    assert scene.vllm_unavailable_reason("cuda") is None
    walls = {name: fp8.unavailable_reason(wall, "cuda") for name, wall in fp8.FIREWALLS.items()}
    assert {name for name, why in walls.items() if why} == {name for name in walls if "vLLM's op" in name}
    assert {*walls.values()} == {None, f"{scene.VLLM_FP8_VARIABLE} names no _C library"}


def test_the_allocators_history_is_that_of_a_gpu():
    why = "a list stands for the allocator on a CPU, and has no history"
    assert [decoding.needs_an_allocator(1, device) for device in ("cpu", "cuda")] == [why, None]


def test_attention_that_is_served_in_bf16_needs_a_gpu(monkeypatch):
    setup = Setup(decoding.KERNELS["vllm_triton"])
    for missing in (None, "not installed"):
        monkeypatch.setattr(decoding, "unavailable", lambda kernel, device, missing=missing: missing)
        assert decoding._not_served(setup, "cuda") == missing
        on_cpu = missing or "served in bf16, which needs a CUDA device"
        assert decoding._not_served(setup, "cpu") == on_cpu
