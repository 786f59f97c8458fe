"""The answers of incident 5 change if their subject is broken, and a failed rank is a reason."""

import pytest
import torch

from staleproof.child import ChildError
from staleproof.incidents.scale_padding import broken, ids, null_block, questions, scene
from staleproof.incidents.scale_padding.questions import TWICE, Draw, duplicates, incident, nan_in_a_tile


def test_stated_chance_that_is_a_thousandth_off_does_not_agree():
    assert [nan_in_a_tile(stated, "cpu").verdict for stated in (0.981, 0.982, 0.983)] == [
        "off",
        "agrees",
        "off",
    ]


def test_computed_chance_that_counting_does_not_bear_out_is_off(monkeypatch):
    monkeypatch.setattr(broken, "nan_chance", lambda: 0.97)
    assert nan_in_a_tile(0.97, "cpu").verdict == "off"


@pytest.mark.parametrize(("factor", "verdict"), [(0.0, "another rate"), (0.9, "another rate"), (1.0, TWICE)])
def test_simulator_repeats_experts_at_the_computed_rate(device, monkeypatch, factor, verdict):
    chance = factor * ids.duplicate_chance(128, 8)
    monkeypatch.setattr(ids, "duplicate_chance", lambda experts, top_k: chance)
    answer = duplicates(Draw(broken.simulate_with_replacement, 128, 8), device)
    assert answer.verdict == verdict


@pytest.mark.parametrize("bad", range(4))
def test_null_block_leaks_only_if_the_idle_ranks_request_is_wrong(bad):
    """The idle rank's block 0, its next request, the busy rank's block 0, its request: each bad in turn."""
    first = [
        null_block.RankStep((), bad == 2 * rank, ("nan",) if bad == 2 * rank + 1 else ()) for rank in (0, 1)
    ]
    idle, busy = ([step, null_block.RankStep((), True, ("inf",))] for step in first)
    answer = questions.null_block_leaks("slot_0, gloo", "cpu", (busy, idle))
    assert answer.verdict == ("leaked" if bad == 1 else "clean")
    numbers = [answer.numbers[name] for name in ("null_block_bad", "changed_by", "busy_rank_bad")]
    assert numbers == [bad == 0, "nan" if bad == 1 else "", bad == 3]


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_finite_output_that_is_a_thousandth_off_is_wrong(monkeypatch, factor):
    attend = null_block.attend

    def over_unused_entries(q, cache, table, seq_len):
        return attend(q, cache, table, seq_len) * (factor if len(table) == 4 else 1)

    monkeypatch.setattr(null_block, "attend", over_unused_entries)
    monkeypatch.setattr(null_block.dist, "all_reduce", lambda x: None)
    assert null_block._repetition(1, -1, 300.0, "cpu") == ((), False, factor != 1)


def test_rank_that_fails_is_a_reason(monkeypatch):
    def fails(*args, **options):
        raise ChildError("rank 1 ended with 1")

    monkeypatch.setattr(null_block.child, "call_ranks", fails)
    found = incident.ask("null block", device="cpu") + incident.ask("off/on/off", "slot_minus_one, gloo")
    assert {(f.verdict, f.note) for f in found} == {("not run", "two ranks, gloo: rank 1 ended with 1")}


def test_per_token_step_leaves_padding_rows_as_they_were_filled(device, monkeypatch):
    as_it_is = lambda rows: (rows, torch.ones(len(rows), device=device))  # noqa: E731
    monkeypatch.setitem(broken.PER_TOKEN, "as it is", as_it_is)
    run = scene.per_token_step("as it is", device)
    assert run(None).isnan().all(1).tolist() == [False] * 3 + [True] * 3
    filled = run(lambda rows: rows.fill_(2.0))
    assert filled[3:].eq(2.0).all()
    assert filled[:3].equal(run(None)[:3])
