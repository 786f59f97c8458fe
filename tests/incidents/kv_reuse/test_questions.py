"""Each question gives its verdict, each fix is fixed, and goes red when it is switched off."""

from __future__ import annotations

from functools import cache

import pytest

from staleproof.cases.finding import CLEAN, FIXED, NOT_FIXED, OFF_ON_OFF
from staleproof.incidents.kv_reuse import questions, scene
from staleproof.incidents.kv_reuse.questions import INGREDIENTS, QUESTIONS, STATE_TYPES, ZEROED
from staleproof.incidents.kv_reuse.scene import NAN, WRONG

# Each is put once for all tests here.
ask = cache(QUESTIONS.ask)
ROWS = sorted({row.name for row in QUESTIONS.rows} - {f"NaN in {side} past seq_len" for side in "KV"})


@pytest.mark.parametrize("name", ROWS)
def test_every_verdict_is_the_expected_one(name):
    found = ask(name)
    assert [f for f in found if f.failed] == []
    assert any(f.ok for f in found)
    assert all(f.expected is not None for f in found if f.ran)


def test_the_share_of_corrupted_requests_grows_with_uptime():
    for question in ("served with prefix caching", "served without prefix caching"):
        found = {f.variant: f.numbers for f in ask("what is zeroed when") if f.question == question}
        off = [tuple(map(int, w.split("/"))) for w in found["no_zeroing"]["by_window"].split()]
        assert sum(bad for bad, _ in off[:2]) == 0
        assert sum(bad for bad, _ in off[3:]) / sum(of for _, of in off[3:]) > 0.25
        assert found["BlockZeroer"]["corrupted"] == 0
        assert found["BlockZeroer"]["finished"] > 30
    with_, without = (
        next(
            f.numbers["corrupted"]
            for f in ask("what is zeroed when")
            if (f.question, f.variant) == (f"served {how} prefix caching", "no_zeroing")
        )
        for how in ("with", "without")
    )
    assert with_ > without


def test_off_on_off():
    claims = [f for f in ask("what is zeroed when") if f.question == OFF_ON_OFF]
    ours = [f for f in claims if f.variant.startswith("BlockZeroer")]
    assert [f.verdict for f in ours] == [FIXED, FIXED]
    assert all(f.numbers["off"] == f.numbers["off_again"] == NAN for f in ours)
    first_design = {f.variant: f.verdict for f in claims if f.variant.startswith("zero_on_free")}
    assert first_design == {
        "zero_on_free, with prefix caching": "not fixed",
        "zero_on_free, without prefix caching": FIXED,
    }


def test_a_zeroer_that_does_nothing_is_not_called_fixed(monkeypatch):
    monkeypatch.setattr(scene.BlockZeroer, "zero", lambda self, block_ids: None)
    variants = [f"BlockZeroer, e4m3, {layout} outermost" for layout in ("blocks", "K/V")]
    found = QUESTIONS.ask(OFF_ON_OFF, *variants)
    assert [f.verdict for f in found] == [NOT_FIXED, NOT_FIXED]
    assert all(f.failed for f in found)


def test_both_threads_are_right_about_their_own_state_type():
    found = {(f.variant, f.question): f.verdict for z in ZEROED for f in ask(f"zeroed: {z}")}
    assert len(found) == 16
    assert found["Mamba, written whole first", "zeroed: none"] == CLEAN
    for kind in ("Mamba, read first", "Mamba, partly written"):
        # No search for NaN would find these.
        assert found[kind, "zeroed: attention"] == WRONG
        assert found[kind, "zeroed: Mamba"] == CLEAN
    assert found["keys and values", "zeroed: Mamba"] == NAN
    assert all(found[kind, "zeroed: both"] == CLEAN for kind in STATE_TYPES)


def test_a_cure_leaves_what_the_prefix_cache_holds():
    with_, without = (f.numbers for f in ask("requests after the cure"))
    assert 0 < with_["corrupted"] == with_["through_cached_blocks_alone"] < with_["began"]
    assert without["corrupted"] == 0 < without["began"]


def test_each_ingredient_is_necessary():
    found = {f.variant: f.verdict for f in ask("ablation")}
    assert found.pop("all four") == NAN
    assert found == dict.fromkeys(INGREDIENTS, CLEAN)


def test_the_race_wipes_live_blocks_and_keeps_stale_ones():
    found = {f.variant: f.numbers for f in ask("host one step ahead")}
    assert found["one_pinned_buffer"]["live_blocks_wiped"] > 0
    assert found["one_pinned_buffer"]["stale_blocks_kept"] > 0
    for right in ("one_pinned_buffer, in step", "fresh_pinned_buffer", "BlockZeroer"):
        assert found[right]["live_blocks_wiped"] == found[right]["stale_blocks_kept"] == 0


def test_each_way_to_zero_is_served_once_and_the_scene_without_once_more(monkeypatch, device):
    runs = []

    def judge(scene_, remedy=scene.no_zeroing):
        runs.append((scene_.prefix_caching, remedy))
        return scene.Outcome(NAN if remedy is scene.no_zeroing else CLEAN, frozenset(), (), None)

    monkeypatch.setattr(questions, "judge", judge)
    claims = [a for a in questions.policies(device) if a.question == OFF_ON_OFF]
    assert len(claims) == 4
    assert len(runs) == 2 * (len(questions.POLICIES) + 1)
    assert runs.count((True, scene.no_zeroing)) == 2
