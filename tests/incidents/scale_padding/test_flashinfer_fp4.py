"""FlashInfer's FP4 kernels: the reason if they cannot be built, and on a GPU what they answer."""

import math
import signal
from types import SimpleNamespace

import pytest
import torch

from staleproof.incidents.scale_padding import cases, flashinfer_fp4, scene
from staleproof.ops.reference import nvfp4 as reference


@pytest.mark.parametrize(
    ("build", "seconds", "why"),
    [
        # Called without its argument.
        (math.sqrt, 60, "FlashInfer's FP4 module did not compile here"),
        (signal.pause, 0.1, "FlashInfer's FP4 module did not compile in 0.1 s"),
    ],
)
def test_a_build_that_fails_is_not_run_with_the_reason(monkeypatch, build, seconds, why):
    monkeypatch.setattr(flashinfer_fp4, "unavailable_reason", lambda subject, device: None)
    monkeypatch.setattr(flashinfer_fp4, "_build_fp4", build)
    monkeypatch.setattr(flashinfer_fp4, "BUILD_SECONDS", seconds)
    wait = flashinfer_fp4.start_build("cuda")
    assert [wait(), wait()] == [why, why]


@pytest.mark.parametrize(
    ("name", "theirs", "said"),
    [
        ("block_scale_interleave", "right", "same bytes"),
        ("block_scale_interleave", "wrong", "differ"),
        ("e2m1_and_ufp8sf_scale_to_float", "right", "same values"),
        ("e2m1_and_ufp8sf_scale_to_float", "wrong", "differ"),
        ("fp4_quantize", "right", "same bytes"),
        ("fp4_quantize", "wrong", "differ"),
        ("block_scale_interleave", "raises", "failed: ValueError: theirs"),
        ("block_scale_interleave", "not built", "no compiler"),
    ],
)
def test_what_flashinfer_gives_is_compared_with_ours(monkeypatch, name, theirs, said):
    a = scene.product_on("cpu", m=37)
    packed, scales = reference.quantize_nvfp4(a.x, a.factor)
    values = reference.dequantize_nvfp4(packed, scales, a.factor)

    def answer(right):
        if theirs == "raises":
            raise ValueError("theirs")
        if theirs == "right":
            return right
        return [part + 1 for part in right] if isinstance(right, list) else 2 * right

    kernels = SimpleNamespace(
        block_scale_interleave=lambda linear: answer(scales.view(torch.uint8)),
        e2m1_and_ufp8sf_scale_to_float=lambda *given: answer(values),
        fp4_quantize=lambda x, factor: answer([packed, scales.view(torch.uint8)]),
    )
    monkeypatch.setattr(flashinfer_fp4, "_fp4", lambda: kernels)
    monkeypatch.setattr(flashinfer_fp4, "quantize_nvfp4", reference.quantize_nvfp4)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cases, "product_on", lambda device, m: a)
    build = lambda: "no compiler" if theirs == "not built" else None  # noqa: E731
    found = cases.public_kernel(flashinfer_fp4.KERNELS[name], "cuda", build)
    assert (found if isinstance(found, str) else found.note) == said
