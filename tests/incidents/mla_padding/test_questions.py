"""Each faulty variant is flagged, each remedy gets its verdict, each fix is fixed off / on / off."""

from __future__ import annotations

import pytest

from staleproof.cases.finding import FIXED, NOT_FIXED, OFF_ON_OFF
from staleproof.evidence import Verdict
from staleproof.incidents.mla_padding import broken, questions, setups
from staleproof.incidents.mla_padding.questions import ALONE, CONTRACT, GROWTH, QUESTIONS, REPRODUCER
from staleproof.incidents.mla_padding.setups import SETUPS
from staleproof.kernels.adapter import Peer

FIXES = [name for name, setup in SETUPS.items() if setup.fix]
STAND_INS = [name for name in CONTRACT if name in (*broken.KERNELS, "mla_decode")]


@pytest.mark.parametrize("kernel", STAND_INS)
@pytest.mark.parametrize("question", ALONE)
def test_a_kernel_alone(device, question, kernel):
    (found,) = QUESTIONS.ask(question, kernel, device=device)
    assert found.expected is not None
    assert found.verdict == found.expected, found


def test_every_faulty_kernel_breaks_something():
    assert set(broken.KERNELS) < set(CONTRACT)
    assert all(CONTRACT[name] != CONTRACT["mla_decode"] for name in broken.KERNELS)


@pytest.mark.parametrize("question", ALONE)
def test_the_peers_that_run_give_what_is_known_of_them(device, question):
    peers = [name for name, kernel in questions.KERNELS.items() if isinstance(kernel, questions.PeerKernel)]
    found = QUESTIONS.ask(question, *peers, device=device)
    assert [f.variant for f in found] == peers
    assert [f for f in found if f.failed] == []
    # Gathered keys and a boolean mask run everywhere.
    assert [f.variant for f in found if f.ran][-1] == "torch_sdpa"


def test_a_peer_that_is_absent_is_not_asked(device):
    absent = questions.PeerKernel(Peer("theirs", "needs an SM100 GPU", prepare=pytest.fail))
    assert questions._unavailable(absent, device) == "needs an SM100 GPU"
    assert questions._not_served(setups.Setup(absent), "cuda") == "needs an SM100 GPU"
    assert questions._unavailable(broken.empty_row_not_written, device) is None


@pytest.mark.parametrize("name", SETUPS)
def test_served(device, name):
    found = QUESTIONS.ask("served, torch.max", name, device=device)
    if SETUPS[name].quantise is None:
        found += QUESTIONS.ask("served, fmax", name, device=device)
    for one in found:
        assert one.verdict == one.expected, one
    # A request that is sick by itself must never be blamed on padding.
    sick = {one.numbers["sick_step"] for one in found if "sick_step" in one.numbers}
    assert Verdict.LIVE_BORN in sick
    assert Verdict.LEAKED not in sick


@pytest.mark.parametrize("name", FIXES)
def test_off_on_off(device, name):
    (found,) = QUESTIONS.ask(OFF_ON_OFF, name, device=device)
    assert found.verdict == FIXED, found


def test_a_fix_that_does_nothing_is_not_called_fixed(device, monkeypatch):
    monkeypatch.setattr(setups, "clear_empty_rows", lambda out, seq_lens: None)
    (found,) = QUESTIONS.ask(OFF_ON_OFF, "clear_empty_rows", device=device)
    assert found.verdict == NOT_FIXED
    assert found.failed


def test_the_reproducers_table(device):
    for question in REPRODUCER:
        off, on = QUESTIONS.ask(question, device=device)
        assert (off.verdict, on.verdict) == ("padding NaN", "no padding NaN"), question
        # torch.max keeps NaN, so the amax is a number only if the padding holds none.
        assert off.numbers["amax"] != off.numbers["amax"]
        assert on.numbers["amax"] > 0


@pytest.mark.parametrize("name", GROWTH)
def test_growth_after_capture(device, name):
    (found,) = QUESTIONS.ask("growth after capture", name, device=device)
    assert found.verdict == GROWTH[name]


def test_each_ingredient_is_necessary(device):
    found = {f.variant: f for f in QUESTIONS.ask("ablation", device=device)}
    assert [f for f in found.values() if not f.ok] == []
    assert found.pop("all four").verdict == Verdict.LEAKED
    assert len(found) == 4
    assert Verdict.LEAKED not in {f.verdict for f in found.values()}
