"""Poison and contain in a whole vLLM with a real model, as an operator has them.

Without .venv-whole (``make whole``) it is skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.whole import real_canary

from staleproof.incidents.published_unwritten import leak
from staleproof.vllm import contain, live, plugin, poison
from staleproof.whole import place

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def ask(folder, function, *args, **variables):
    if reason := place.unavailable_reason():
        pytest.skip(reason)
    env = {"VLLM_PLUGINS": "staleproof", "PYTHONPATH": str(ROOT), live.SWITCH: str(folder / "off")}
    return place.call(function, *args, env=env | variables, timeout_s=600).answer()


@pytest.fixture(name="poisoned", scope="module")
def poisoned_fixture(tmp_path_factory):
    asked = {plugin.VARIABLE: "unpublish", poison.VARIABLE: "kv"}
    return ask(tmp_path_factory.mktemp("poison"), real_canary.poisoned, 200, **asked)


def test_poison_turns_a_strangers_text_into_nan_and_the_patch_leaves_none(poisoned):
    released, bad, patched = (poisoned[state] for state in ("released", "poison", "poison, patched"))
    assert leak.CODE in released["text"]
    assert released["nan"] == []
    # Logits are NaN in exactly the requests that read what nobody wrote.
    assert bad["nan"] == sorted({reader for reader, *_ in bad["reads"]}) == ["Ben", "Carla"]
    assert leak.CODE not in bad["text"]
    assert (patched["nan"], patched["reads"]) == ([], [])


def test_watch_names_who_wrote_the_blocks_that_a_stranger_reads(poisoned):
    row = poisoned["released"]
    stale = {block: whose for reader, block, whose in row["reads"] if reader == "Carla"}
    written = dict(row["written"])
    assert stale
    assert {block: written[block] for block in stale} == stale
    # What lies before them Ben wrote, and what lies behind is Carla's own.
    assert {*written.values()} == {*stale.values(), "Ben", "Carla"}


def test_poison_changes_no_text_of_a_normal_load(poisoned):
    without, with_poison = poisoned["mixed"], poisoned["mixed, poison"]
    assert with_poison["tokens"] == without["tokens"]
    assert 150 < len(without["tokens"]) < 200
    assert min(without["hits"], without["preempted"], with_poison["poisoned"]) > 10
    assert without["poisoned"] == 0


@pytest.fixture(name="contained", scope="module")
def contained_fixture(tmp_path_factory):
    asked = {plugin.VARIABLE: "none", contain.VARIABLE: "1"}
    return ask(tmp_path_factory.mktemp("contain"), real_canary.contained, **asked)


@pytest.mark.parametrize("state", ["off", "again"])
def test_bad_request_without_contain_answers_token_0_and_so_does_a_stranger(contained, state):
    row = contained[state]
    assert (row["state"], row["contained"]) == ("off", 0)
    assert row["bad"]["tokens"][2:] == (0,) * 6
    assert row["stranger"] == (0,) * 6


def test_bad_request_with_contain_ends_with_an_error_alone(contained):
    row, clean = contained["on"], contained["clean"]
    newest = place.release(place.python())[1] == place.RELEASES[1]
    assert contained["scheduler"] == ("AsyncScheduler" if newest else "Scheduler")
    assert (row["state"], row["contained"]) == ("in place", 1)
    assert (row["bad"]["reason"], row["bad"]["message"]) == ("error", contain.MESSAGE)
    assert row["bad"]["tokens"] == clean.pop("bad")[:2]
    assert row["stranger"] == contained["alone"]
    assert row["others"] == clean
    assert len(clean) == 50


def test_blocks_of_a_contained_request_are_zeroed_before_others_get_them(contained):
    assert contained["on"]["later"] == contained["many"]
    assert contained["off"]["later"] != contained["many"]
