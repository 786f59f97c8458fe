"""Each question gives its verdict, each fix is fixed, and goes red when it is switched off."""

from __future__ import annotations

import itertools

import pytest
import torch

from staleproof.harness.findings import CLEAN, FIXED, NOT_FIXED, OFF_ON_OFF
from staleproof.incidents.kv_reuse import questions as experiment
from staleproof.incidents.kv_reuse import scene
from staleproof.incidents.kv_reuse.hybrid import STATE, Zeroing, serve
from staleproof.incidents.kv_reuse.questions import (
    INGREDIENTS,
    POLICIES,
    STATE_TYPES,
    ablation,
    bits_of_a_state,
    cured_late,
    decays,
    geometry,
    host_memory,
    layouts,
    leak,
    policies,
    race,
    which_blocks,
)
from staleproof.incidents.kv_reuse.scene import (
    NAN,
    WRONG,
    Scene,
    ZeroNewBlocks,
    brief,
    clean_run,
    history,
    judge,
    tenancies,
    trace_of,
)
from staleproof.incidents.kv_reuse.scheduler import ATTENTION, NewBlocks

QUESTIONS = (bits_of_a_state, cured_late, layouts, ablation, which_blocks, race, leak, policies)


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_verdict_is_the_expected_one(asked, question):
    found = asked(question)
    assert found
    assert [f for f in found if not f.ok] == []
    assert all(f.expected is not None for f in found)


def test_the_share_of_corrupted_requests_grows_with_uptime(asked):
    for question in ("served with prefix caching", "served without prefix caching"):
        found = {f.variant: f.numbers for f in asked(policies) if f.question == question}
        off = [tuple(map(int, w.split("/"))) for w in found["no_zeroing"]["by_window"].split()]
        assert sum(bad for bad, _ in off[:2]) == 0
        assert sum(bad for bad, _ in off[3:]) / sum(of for _, of in off[3:]) > 0.25
        assert found["BlockZeroer"]["corrupted"] == 0
        assert found["BlockZeroer"]["finished"] > 30
    with_, without = (
        next(
            f.numbers["corrupted"]
            for f in asked(policies)
            if (f.question, f.variant) == (f"served {how} prefix caching", "no_zeroing")
        )
        for how in ("with", "without")
    )
    assert with_ > without


def test_off_on_off(asked):
    claims = [f for f in asked(policies) if f.question == OFF_ON_OFF]
    ours = [f for f in claims if f.variant.startswith("BlockZeroer")]
    assert [f.verdict for f in ours] == [FIXED, FIXED]
    assert all(f.numbers["off"] == f.numbers["off_again"] == NAN for f in ours)
    first_design = {f.variant: f.verdict for f in claims if f.variant.startswith("zero_on_free")}
    assert first_design == {
        "zero_on_free, with prefix caching": "not fixed",
        "zero_on_free, without prefix caching": FIXED,
    }


def test_a_zeroer_that_does_nothing_is_not_called_fixed(device, monkeypatch):
    monkeypatch.setattr(scene.BlockZeroer, "zero", lambda self, block_ids: None)
    found = list(itertools.islice(layouts(device), 2))
    assert [f.verdict for f in found] == [NOT_FIXED, NOT_FIXED]
    assert all(f.failed for f in found)


def test_a_fix_that_zeroes_hits_is_seen(device, monkeypatch):
    submit = ZeroNewBlocks.submit
    monkeypatch.setattr(
        ZeroNewBlocks,
        "submit",
        lambda self, step: list(
            dict.fromkeys([*submit(self, step), *(block for _, blocks in step.hits for block in blocks)])
        ),
    )
    assert judge(Scene(device, steps=120), ZeroNewBlocks).verdict == WRONG


def test_clean_memory_gives_numbers_everywhere_and_the_pool_does_too_at_first(device):
    scene_ = Scene(device, steps=40)
    clean = clean_run(scene_)
    assert bool(clean.outputs.isfinite().all())
    seen = judge(scene_)
    # No block has changed hands yet.
    assert (seen.verdict, seen.corrupted) == (CLEAN, frozenset())


@pytest.mark.parametrize("name", ["sdpa_flash_cpu", "masked_loads"])
def test_the_kernel_decides(device, name):
    for found in decays(name, device):
        assert found.ok or not found.ran, found


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["sdpa_efficient", "sdpa_cudnn", "flex_attention", "flashinfer_fa2", "flashinfer_fa3"]
)
def test_the_gpus_kernels_decide(device, name):
    for found in decays(name, device):
        assert found.ok or not found.ran, found


def test_both_threads_are_right_about_their_own_state_type(asked):
    found = {(f.variant, f.question): f.verdict for f in asked(which_blocks)}
    assert len(found) == 16
    assert found["Mamba, written whole first", "zeroed: none"] == CLEAN
    for kind in ("Mamba, read first", "Mamba, partly written"):
        # No search for NaN would find these.
        assert found[kind, "zeroed: attention"] == WRONG
        assert found[kind, "zeroed: Mamba"] == CLEAN
    assert found["keys and values", "zeroed: Mamba"] == NAN
    assert all(found[kind, "zeroed: both"] == CLEAN for kind in STATE_TYPES)


def test_a_cure_leaves_what_the_prefix_cache_holds(asked):
    with_, without = (f.numbers for f in asked(cured_late))
    assert 0 < with_["corrupted"] == with_["through_cached_blocks_alone"] < with_["began"]
    assert without["corrupted"] == 0 < without["began"]


def test_each_ingredient_is_necessary(asked):
    found = {f.variant: f.verdict for f in asked(ablation)}
    assert found.pop("all four") == NAN
    assert found == dict.fromkeys(list(INGREDIENTS)[1:], CLEAN)


def test_the_race_wipes_live_blocks_and_keeps_stale_ones(asked):
    found = {f.variant: f.numbers for f in asked(race)}
    assert found["one_pinned_buffer"]["live_blocks_wiped"] > 0
    assert found["one_pinned_buffer"]["stale_blocks_kept"] > 0
    for right in ("one_pinned_buffer, in step", "fresh_pinned_buffer", "BlockZeroer"):
        assert found[right]["live_blocks_wiped"] == found[right]["stale_blocks_kept"] == 0


def test_the_list_costs_a_reference_a_block():
    blocks = 160_000
    from staleproof.incidents.kv_reuse.broken import NeverTaken

    kept = host_memory(NeverTaken(), blocks, frozen=True)
    assert kept.kept == blocks
    assert 8 <= kept.list_bytes / blocks < 10
    assert abs(kept.traced_bytes / kept.list_bytes - 1) < 0.05
    assert not kept.gc_sees
    taken = host_memory(NewBlocks(), blocks, frozen=True)
    assert (taken.kept, taken.list_bytes < 200, taken.traced_bytes < 10_000) == (0, True, True)


def test_the_log_suspects_every_corrupted_request_and_none_once_all_is_zeroed(device):
    scene_ = Scene(device)
    seen = judge(scene_)
    log = tenancies(scene_, seen.served)
    assert seen.corrupted
    for request in seen.corrupted:
        suspects = log.explain(request)
        assert suspects, request
        assert suspects[0].kind == "stale"
    direct = [s for r in seen.corrupted for s in log.explain(r) if not s.via]
    assert {"fp32"} <= {s.written_as for s in direct}
    assert {s.read_as for s in direct} == {"e4m3"}
    zeroed = tenancies(scene_, judge(scene_, ZeroNewBlocks).served)
    assert all(zeroed.explain(request) == [] for request in trace_of(scene_).finished)
    wiped = judge(scene_, POLICIES["zero_on_free"].remedy)
    log = tenancies(scene_, wiped.served)
    for request in wiped.corrupted:
        assert {s.kind for s in log.explain(request)} == {"wiped"}


def test_the_first_attention_layer_heals_and_what_was_written_back_does_not(device):
    seen = history(Scene(device, prefix_caching=False))
    assert seen.stages == ["0.mamba", "0.attention", "1.mamba", "1.attention"]
    assert seen.first_bad is not None
    assert seen.first_bad[1] == "0.attention"
    assert all(row[0] for row in seen.finite)
    assert seen.finite[-1] == [True, True, False, False]
    with pytest.raises(ValueError, match="scene: expected one in which a corrupted request"):
        history(Scene(device, "masked_loads", prefix_caching=False, steps=120))


def test_the_hosts_lead_is_a_queue_on_the_cpu():
    scene_ = brief("cpu")
    order = []

    class Watched(Zeroing):
        def submit(self, step):
            order.append("submit")
            return None

        def run(self, ticket):
            order.append("run")
            return ()

    serve(trace_of(scene_), scene_.model(), scene_.buffers(), Watched(), ahead=2)
    assert order[:5] == ["submit", "submit", "submit", "run", "submit"]
    assert order[-2:] == ["run", "run"]
    with pytest.raises(ValueError, match="ahead: expected at least 0 steps, got -1"):
        serve(trace_of(scene_), scene_.model(), scene_.buffers(), ahead=-1)


def test_the_scenes_page_holds_a_state_and_splits_into_kernel_blocks():
    page = Scene("cpu").page
    assert (page.block_size, page.page_bytes, page.mamba_bytes) == (32, 4096, STATE.state_bytes)
    buffers = Scene("cpu").buffers()
    assert buffers.ratio == 2
    assert Scene("cpu", dtype=torch.bfloat16).buffers().ratio == 1


def test_the_geometry_is_of_every_rank_count():
    rows = {(tp, dtype): page.block_size for tp, dtype, page in geometry()}
    assert rows == {
        (1, "e4m3"): 4176,
        (1, "bf16"): 2096,
        (2, "e4m3"): 4176,
        (2, "bf16"): 2096,
        (4, "e4m3"): 2096,
        (4, "bf16"): 1056,
        (8, "e4m3"): 1056,
        (8, "bf16"): 528,
    }


def test_the_new_ids_of_a_step_are_both_groups(device):
    scene_ = brief(device)
    remedy = ZeroNewBlocks(scene_.buffers())
    step = trace_of(scene_).steps[0]
    assert sorted(remedy.submit(step)) == sorted([*step.new[ATTENTION], *step.new["mamba"]])
    assert len(remedy.submit(step)) == 16


def test_what_cannot_run_says_so(device):
    for name in experiment.kernels():
        for found in experiment.past_seq_len(name, device):
            assert found.ran or found.note
