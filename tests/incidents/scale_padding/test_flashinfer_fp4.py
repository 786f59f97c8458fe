"""FlashInfer's FP4 kernels: the reason if they cannot be built, and on a GPU what they answer."""

from __future__ import annotations

import math
import signal

import pytest

from staleproof.cases.words import NOT_RUN
from staleproof.incidents.scale_padding import flashinfer_fp4
from staleproof.incidents.scale_padding.cases import TABLE


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


def test_without_a_gpu_each_kernel_says_so(device):
    found = TABLE.ask("public")
    assert [f.variant for f in found] == [*flashinfer_fp4.KERNELS]
    if flashinfer_fp4.unavailable_reason(None, device):
        assert {f.verdict for f in found} == {NOT_RUN}
        assert all(f.note for f in found)
    else:
        assert not any(f.failed for f in found)
