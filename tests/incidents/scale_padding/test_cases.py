"""What the verdicts of incident 5 rest on; a broken subject changes them, and absent hardware is said."""

import pytest
import torch

from staleproof.cases.children import ChildError
from staleproof.cases.finding import OFF_ON_OFF
from staleproof.incidents.scale_padding import broken, ids, null_block, scene
from staleproof.incidents.scale_padding.cases import TABLE, TWICE, duplicates, nan_in_a_tile, null_block_leaks


def test_another_stated_chance_is_off():
    said = [nan_in_a_tile(stated, "cpu").verdict for stated in (0.981, 0.982, 0.983)]
    assert said == ["off", "agrees", "off"]


def test_a_chance_that_counting_does_not_bear_out_is_off(monkeypatch):
    monkeypatch.setattr(broken, "nan_chance", lambda: 0.97)
    assert nan_in_a_tile(0.97, "cpu").verdict == "off"


@pytest.mark.parametrize(("factor", "said"), [(0.0, "another rate"), (0.9, "another rate"), (1.0, TWICE)])
def test_a_simulator_repeats_experts_as_often_as_is_computed(device, factor, said):
    chance = factor * ids.duplicate_chance(128, 8)
    assert duplicates(128, 8, (broken.simulate_with_replacement, chance), device).verdict == said


@pytest.mark.parametrize("bad", range(4))
def test_what_each_rank_saw_of_the_null_block_is_told_apart(bad):
    """The idle rank's block 0, its next request, the busy rank's block 0, its request: each bad in turn."""
    seen = [
        null_block.RankStep((), bad == 2 * rank, ("nan",) if bad == 2 * rank + 1 else ()) for rank in (0, 1)
    ]
    idle, busy = ([step, null_block.RankStep((), True, ("inf",))] for step in seen)
    found = null_block_leaks("slot_0, gloo", "cpu", (busy, idle))
    assert found.verdict == ("leaked" if bad == 1 else "clean")
    told = [found.numbers[name] for name in ("null_block_bad", "changed_by", "busy_rank_bad")]
    assert told == [bad == 0, "nan" if bad == 1 else "", bad == 3]


def test_padding_of_the_quantiser_per_token_is_nan_or_what_it_is_filled_with(device, monkeypatch):
    as_it_is = lambda rows: (rows, torch.ones(len(rows), device=device))  # noqa: E731
    monkeypatch.setitem(broken.PER_TOKEN, "as it is", as_it_is)
    run = scene.per_token_step("as it is", device)
    assert run(None).isnan().all(1).tolist() == [False] * 3 + [True] * 3
    filled = run(lambda rows: rows.fill_(2.0))
    assert filled[3:].eq(2.0).all()
    assert filled[:3].equal(run(None)[:3])


RANKS = [("null block", "slot_0, gloo"), (OFF_ON_OFF, "slot_minus_one, gloo")]


def asked_of_ranks():
    rows = [case for case in TABLE.cases if case.key.variant.endswith(", gloo")]
    return [found for case in rows for found in TABLE.ask(case.key.question, case.key.variant, device="cpu")]


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_a_finite_number_that_is_off_by_a_thousandth_is_wrong(monkeypatch, factor):
    attend = null_block.attend

    def over_unused_entries(q, cache, table, seq_len):
        return attend(q, cache, table, seq_len) * (factor if len(table) == 4 else 1)

    monkeypatch.setattr(null_block, "attend", over_unused_entries)
    monkeypatch.setattr(null_block.dist, "all_reduce", lambda x: None)
    assert null_block._repetition(1, -1, 300.0, "cpu") == ((), False, factor != 1)


def test_ranks_that_fail_are_a_reason(monkeypatch):
    def fails(*args, **options):
        raise ChildError("rank 1 ended with 1")

    monkeypatch.setattr(null_block.children, "call_ranks", fails)
    found = asked_of_ranks()
    assert [(f.question, f.variant) for f in found] == RANKS
    assert {(f.verdict, f.note) for f in found} == {("not run", "two ranks, gloo: rank 1 ended with 1")}
