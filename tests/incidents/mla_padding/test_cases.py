"""What the table of incident 1 rests on, beside the verdict of each case."""

from __future__ import annotations

import pytest

from staleproof.cases.finding import OFF_ON_OFF
from staleproof.cases.words import NOT_FIXED
from staleproof.incidents.mla_padding import broken, cases, setups
from staleproof.incidents.mla_padding.cases import ALONE, TABLE
from staleproof.kernels.adapter import Peer


@pytest.mark.parametrize("question", ALONE)
def test_a_peer_runs_everywhere(device, question):
    # Gathered keys and a boolean mask.
    (found,) = TABLE.ask(question, "torch_sdpa", device=device)
    assert found.ran
    assert found.of.startswith("torch")


def test_a_peer_that_is_absent_is_not_asked(device):
    absent = Peer("theirs", "needs an SM100 GPU", prepare=pytest.fail)
    assert cases._unavailable(absent, device) == "needs an SM100 GPU"
    assert cases._not_served(setups.Setup(absent), "cuda") == "needs an SM100 GPU"
    assert cases._unavailable(broken.empty_row_not_written, device) is None


def test_a_fix_that_does_nothing_is_not_called_fixed(device, monkeypatch):
    monkeypatch.setattr(setups, "clear_empty_rows", lambda out, seq_lens: None)
    (found,) = TABLE.ask(OFF_ON_OFF, "clear_empty_rows", device=device)
    assert found.verdict == NOT_FIXED
    assert found.failed


@pytest.mark.parametrize(
    ("name", "says"), [("empty_row_not_written", "unwritten"), ("zero_by_zero_written", "nan")]
)
def test_a_kernel_that_returns_memory_of_its_own_is_judged_by_that(device, name, says):
    def own(*call, softmax_scale, out=None):
        return broken.KERNELS[name](*call, softmax_scale=softmax_scale)

    assert cases.empty_row(own, device).verdict == says
