"""FlashInfer's FP4 kernels: the reason if they cannot be built, and on a GPU what they answer."""

from __future__ import annotations

import math
import signal

import pytest

from staleproof.incidents.scale_padding import flashinfer_fp4


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
