"""What new blocks hold is counted before a step writes to them, and the control reads what it should not."""

from __future__ import annotations

import sys
from types import SimpleNamespace as Space

import pytest
import torch
from tests.engine.made_engine import NAN, stand_in

from staleproof.engine import hybrid_probes, tenants
from staleproof.engine.probes import prompts
from staleproof.engine.spies import Rows
from staleproof.engine.tenants import Tenants


@pytest.fixture(name="runner")
def runner_fixture(monkeypatch):
    """Group 0 is linear attention, group 1 attention: 4 blocks of 8 tokens, keys and values."""
    cache = torch.zeros(4, 2, 8, 1, 2)
    monkeypatch.setattr(tenants, "attention_caches", lambda runner: {1: (cache, 4, 8)})
    return Space(cache=cache)


def output(new=(), cached=(), zero=()) -> Space:
    """A step: (request, blocks by group, tokens of the prompt) of new ones, (request, blocks) of others."""
    return Space(
        scheduled_new_reqs=[
            Space(req_id=r, block_ids=blocks, prompt_token_ids=[0] * n) for r, blocks, n in new
        ],
        scheduled_cached_reqs=Space(
            req_ids=[r for r, _ in cached], new_block_ids=[blocks for _, blocks in cached]
        ),
        new_block_ids_to_zero=zero,
    )


@pytest.mark.parametrize(
    ("zeroing", "zero", "stale"),
    [
        (False, [2], 1),
        (True, [2], 0),
        # vLLM leaves it out, as its release does with blocks of MLA; or it has nothing to zero.
        (True, [1, 3], 1),
        (True, None, 1),
    ],
)
def test_a_block_that_was_state_is_stale_unless_it_is_zeroed(runner, zeroing, zero, stale):
    log = Tenants()
    log.zeroing = zeroing
    for number in range(5):
        runner.cache.zero_()
        # Block 2 is state of request a, then keys and values of request b.
        log.step(runner, output(new=[(f"a{number}", ([2], [1]), 3)], zero=[1]))
        # What the request left there; vLLM's zeroing runs before a block is counted.
        runner.cache[2, 1, 6, 0] = NAN if stale else 0.0
        log.step(runner, output(new=[(f"b{number}", ([3], [2]), 3)], zero=zero))
    # Block 1 was never state.
    of_each = {"given": 2, "nonzero": stale, "nan_in_tail": stale, "from_state": stale}
    assert log.by_fifth() == {name: [count] * 5 for name, count in of_each.items()}
    suspects = [suspect for request in log.requests for suspect in log.log.explain(request)]
    found = [one for one in suspects if (one.written_as, one.read_as) == (tenants.STATE, tenants.KEYS)]
    assert [one.steps_ago for one in found] == [1] * 5 * stale


def test_a_nan_before_the_end_of_the_prompt_is_not_in_the_tail(runner):
    log = Tenants()
    runner.cache[1, 0, 2] = NAN
    log.step(runner, output(new=[(str(i), ([0], [1]), 3) for i in range(5)]))
    assert log.by_fifth() == {
        "given": [1] * 5,
        "nonzero": [1] * 5,
        "nan_in_tail": [0] * 5,
        # Nobody had block 1 in the log before.
        "from_state": [0] * 5,
    }


def test_blocks_that_a_running_request_gets_are_counted_too(runner):
    log = Tenants()
    log.step(runner, output(new=[("a", ([0], [1]), 8)]))
    # Its first token is written in this step; what lies behind that is the tail.
    runner.cache[2, 1, 0] = runner.cache[3, 0, 1] = NAN
    log.step(runner, output(cached=[("a", ([], [2, 3])), ("b", None)]))
    counted = [("a", [0, 0]), ("a", [2, 0]), ("a", [2, 2])]
    assert [(request, found.tolist()) for request, found in log.counted] == counted
    assert log.requests == {"a": 0}


def lengths(query_start_loc: list[int], seq_lens: list[int], block_table: list[list[int]]) -> Space:
    """Metadata of a step."""
    given = {"query_start_loc": query_start_loc, "seq_lens": seq_lens, "block_table": block_table}
    return Space(**{name: torch.tensor(value) for name, value in given.items()})


@pytest.mark.parametrize("block", [256, 64])
def test_the_control_is_attention_of_each_requests_own_blocks(block):
    draw = torch.Generator().manual_seed(0)
    kv = torch.randn(6, 2, block, 2, 16, generator=draw)
    query = torch.randn(4, 4, 16, generator=draw)
    # With blocks of 64 tokens 130 keys are in three, whose end is before that of the second tile.
    kv[0] = NAN
    # The second request has no token in this step; heads lie side by side in the output of this backend.
    tables = [[2, 0, 0, 0], [0, 0, 0, 0], [1, 3, 4, 0], [5, 0, 0, 0]]
    metadata = lengths([0, 1, 1, 3, 4], [5, 0, 130, 3], tables)
    out = torch.zeros(4, 64)
    # What is made with no device would not be where the cache is.
    with torch.device("meta"):
        tenants._attend(query, kv, metadata, 0.5, out)
    for row, (table, keys) in enumerate([(0, 5), (2, 129), (2, 130), (3, 3)]):
        k, v = (kv[tables[table], side].flatten(0, 1)[:keys].repeat_interleave(2, dim=1) for side in (0, 1))
        weights = torch.einsum("hd,khd->hk", query[row], k).mul(0.5).softmax(-1)
        torch.testing.assert_close(out[row].view(4, 16), torch.einsum("hk,khd->hd", weights, v))


def test_the_control_reads_the_whole_tile_and_nothing_behind_it():
    kv, query, out = torch.ones(2, 2, 256, 2, 16), torch.ones(2, 4, 16), torch.zeros(2, 4, 16)
    metadata = lengths([0, 1, 2], [5, 130], [[0], [1]])
    for places, bad in (
        ([(0, 100), (1, 255)], [True, True]),
        # Behind the tile of the first request.
        ([(0, slice(128, None))], [False, False]),
    ):
        kv.fill_(1.0)
        for block, token in places:
            kv[block, 1, token] = NAN
        tenants._attend(query, kv, metadata, 0.5, out)
        assert out.isnan().any((1, 2)).tolist() == bad


def test_only_the_zeroing_goes_without_the_runners_wait():
    calls = []
    event = Space(synchronize=lambda: calls.append("wait"), record=lambda: calls.append("record"))
    guard = tenants.DeferredEvent(event)
    guard.synchronize()
    guard.record()
    assert calls == ["record"]
    guard.event.synchronize()
    assert calls == ["record", "wait"]


def test_every_state_of_the_probe_sets_its_switches_and_the_last_undoes_them(monkeypatch):
    seen, calls, event = [], [], Space(synchronize=lambda: None, record=lambda: None)
    log = Tenants()
    cache = torch.zeros(2, 3)
    runner = Space(kv_caches=[[cache]], prepare_inputs_event=event)
    config = Space(cache_config=Space(block_size=528, num_gpu_blocks=24))
    engine = Space(runner=runner, watch=Space(tenants=log), llm=Space(llm_engine=Space(vllm_config=config)))

    def generate(engine, asked, lengths):
        waits = runner.prepare_inputs_event is event
        assert waits is (log.guard is None)
        assert log.guard is None or log.guard.event is event
        calls.append("serve")
        assert asked == prompts([len(one["prompt_token_ids"]) for one in asked])
        sizes = [(len(one["prompt_token_ids"]), length) for one, length in zip(asked, lengths, strict=True)]
        assert [sizes[i] for i in (0, 1, 2)] == [(20, 4), (57, 5), (94, 6)]
        # Their sizes wrap around, each at another request.
        if len(asked) > 3:
            assert sizes[10:14] == [(390, 14), (27, 15), (64, 16), (101, 4)]
            assert len(sizes) == 100
        seen.append((log.zeroing, bool(cache.isnan().all()), log.delay, waits, [*log.requests]))
        log.requests = {str(number): number for number in range(5)}
        steps = [[{7: Space(logprob=value)} for value in row] for row in ((-0.5, 1.0), (NAN,))]
        return [
            Space(outputs=[Space(token_ids=(number, 7), logprobs=logprobs)])
            for number, logprobs in enumerate([*steps, None])
        ]

    monkeypatch.setattr(hybrid_probes, "generate", generate)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    clock = iter(range(100))
    monkeypatch.setattr(hybrid_probes.time, "perf_counter", lambda: 1.27 * next(clock))
    told = {}
    monkeypatch.setattr(hybrid_probes, "tell", lambda answer: told.update([answer]))
    states = ["zeroing", "no zeroing", "no zeroing, cache of NaN", "late copies", "late copies, no wait"]
    monkeypatch.setattr(Tenants, "by_fifth", lambda self: {"given": [0] * 5})
    # Bits are those of float32, whatever an engine has as its default.
    torch.set_default_dtype(torch.float64)
    try:
        seconds = hybrid_probes.hybrid(engine, states, requests=3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert seconds == dict.fromkeys(states, 1.3)
    # No step of one state is under way when the switches of the next are set.
    assert calls == ["wait", "serve", "wait"] * 5
    # Each state begins with an empty log.
    flags = (True, False, False, True), (False, False, False, True), (False, True, False, True)
    flags += (True, True, True, True), (True, True, True, False)
    assert seen == [(*of_state, []) for of_state in flags]
    assert (runner.prepare_inputs_event, log.guard) == (event, None)
    half, one, nan = (int(torch.tensor(value).view(torch.int32)) for value in (-0.5, 1.0, NAN))
    found = {
        "tokens": [[0, 7], [1, 7], [2, 7]],
        "logprobs": [[half, one], [nan], []],
        "nan": [False, True, False],
        "blocks_by_fifth": {"given": [0] * 5},
    }
    blocks = {"block_size": 528, "blocks": 24}
    assert told == {"cache": {**blocks, "waits": True}, **dict.fromkeys(states, found)}
    del runner.prepare_inputs_event
    assert hybrid_probes.hybrid(engine, [], requests=3) == {}
    assert told["cache"] == {**blocks, "waits": False}
    runner.prepare_inputs_event = event
    assert hybrid_probes.hybrid(engine, ["zeroing again"]) == {"zeroing again": 1.3}


def test_a_cache_is_poisoned_in_every_layout_and_dtype():
    plain, turned, bits = torch.zeros(2, 3), torch.zeros(3, 2).T, torch.zeros(4, dtype=torch.uint8)
    part = torch.zeros(2, 4)
    hybrid_probes.poison([plain, [turned, (bits,)], part[:, ::2]])
    assert bits.tolist() == [255] * 4
    assert all(one.isnan().all() for one in (plain, turned, part[:, ::2]))
    assert not part[:, 1::2].any(), "what lies between is another's"


def test_groups_of_attention_have_a_cache_of_blocks(monkeypatch):
    class MambaSpec(Space): ...

    stand_in(monkeypatch, "vllm.v1.kv_cache_interface", MambaSpec=MambaSpec)
    caches = {name: torch.zeros(6, number + 1) for number, name in enumerate(("state", "b", "d"))}
    layers = {**caches, "c": [torch.zeros(2)], "e": caches["d"]}
    groups = [
        Space(layer_names=names, kv_cache_spec=spec)
        for names, spec in (
            (("state",), MambaSpec(block_size=528)),
            (("b", "none"), Space(block_size=16)),
            (("c",), Space(block_size=16)),
            (("d", "e"), Space(block_size=32)),
        )
    ]
    runner = Space(
        kv_cache_config=Space(kv_cache_groups=groups, num_blocks=6),
        compilation_config=Space(
            static_forward_context={name: Space(kv_cache=one) for name, one in layers.items()}
        ),
    )
    found = tenants.attention_caches(runner)
    assert {number: of[1:] for number, of in found.items()} == {1: (6, 16), 3: (6, 32)}
    assert found[1][0] is caches["b"]
    assert found[3][0] is caches["d"]


@pytest.mark.parametrize(
    ("shape", "axis", "parts"),
    [((8, 2, 8, 3), 0, 1), ((2, 8, 8, 3), 1, 1), ((8, 8, 3), 0, 1), ((2, 32, 8, 3), 1, 4)],
)
def test_the_axes_of_blocks_and_of_tokens_are_found_also_if_they_are_equally_long(shape, axis, parts):
    cache = torch.zeros(shape)
    # Token 5 of block 3: each key and each value of it.
    cache.select(axis, 3 * parts).select(-2, 5).fill_(NAN)
    values, tokens = cache.numel() // (64 * parts), 8 * parts
    told = [tenants.contents(cache, 8, tokens, block, n).tolist() for block, n in ((3, 5), (3, 6), (2, 0))]
    assert told == [[values, values], [values, 0], [0, 0]]


def test_the_switches_stand_around_vllms_own_methods(monkeypatch):
    calls = []

    class Runner:
        def _update_states(self, scheduler_output):
            calls.append("update")
            return "updated"

    class Zeroer:
        def zero_block_ids(self, block_ids):
            calls.append(("zero", block_ids))

    stand_in(monkeypatch, "vllm.v1.worker.gpu_model_runner", GPUModelRunner=Runner)
    stand_in(monkeypatch, "vllm.v1.worker.utils", KVBlockZeroer=Zeroer)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append(("sleep", cycles)))
    watch, runner, zeroer = Rows(), Runner(), Zeroer()
    tenants.tenants(watch)
    log = watch.tenants
    monkeypatch.setattr(log, "step", lambda of, output: calls.append(("step", of is runner, output)))
    event = Space(synchronize=lambda: calls.append("wait"))

    def after(function, *args):
        calls.clear()
        result = function(*args)
        return result, [*calls]

    for guard, ids, waits in (
        (event, [], []),
        (event, [3], []),
        (tenants.DeferredEvent(event), [], ["wait"]),
        (tenants.DeferredEvent(event), None, ["wait"]),
        # Then the zeroing waits, once it has read the ids.
        (tenants.DeferredEvent(event), [3], []),
    ):
        runner.prepare_inputs_event = guard
        output = Space(new_block_ids_to_zero=ids)
        want = [*waits, "update", ("step", True, output)]
        assert after(runner._update_states, output) == ("updated", want)

    zero = zeroer.zero_block_ids
    assert after(zero, [2]) == (None, [("zero", [2])]), "as vLLM does, until a switch is set"
    log.delay = True
    assert after(zero, [2])[1] == [("sleep", tenants.DELAY_CYCLES), ("zero", [2])]
    assert after(zero, [])[1] == [("zero", [])]
    log.zeroing, log.guard = False, tenants.DeferredEvent(event)
    assert after(zero, [2])[1] == [("sleep", tenants.DELAY_CYCLES), "wait"]
    log.zeroing, log.delay = True, False
    assert after(zero, [2])[1] == [("zero", [2]), "wait"]


@pytest.mark.parametrize("by_name", [False, True])
def test_the_control_stands_in_for_the_attention_of_a_step_with_requests(monkeypatch, by_name):
    class Impl:
        scale = 0.25

        def forward(self, layer, query, key, value, kv, metadata, output, scale=None):
            output.fill_(7.0)
            return output, scale

    stand_in(monkeypatch, "vllm.v1.attention.backends.triton_attn", TritonAttentionImpl=Impl)
    asked = []
    monkeypatch.setattr(tenants, "_attend", lambda *args: asked.append(args))
    tenants.whole_tiles(Rows())
    out = torch.zeros(2)
    rest, keywords = ((), {"output": out, "scale": 3}) if by_name else ((out, 3), {})
    for metadata in (None, "metadata"):
        assert Impl().forward("layer", "q", "k", "v", "kv", metadata, *rest, **keywords) == (out, 3)
    # The profile run has none.
    assert asked == [("q", "kv", "metadata", 0.25, out)]


def test_flashinfers_moe_is_loaded_from_the_module_of_its_release(monkeypatch, tmp_path):
    core = stand_in(monkeypatch, "flashinfer.fused_moe.core")
    sys.modules["flashinfer"].__version__ = "0.6.1"
    stand_in(monkeypatch, "flashinfer.fused_moe", core=core)
    stand_in(monkeypatch, "tvm_ffi", load_module=lambda path: ("loaded", path))
    for name in ("0.6.1-0a9f", "0.6.1-9f0a", "0.6.10-0a9f", "0x6.1-0a9f", "0.6.1-0a9f.so", "0.6.1-00zz"):
        (tmp_path / f"fused_moe_sm90-{name}.so").touch()
    monkeypatch.setenv("STALEPROOF_MOE_MODULES", str(tmp_path))
    tenants.flashinfer_moe(Rows())
    made = core.gen_cutlass_fused_moe_sm90_module("any", "flags")
    assert made.build_and_load() == ("loaded", str(tmp_path / "fused_moe_sm90-0.6.1-0a9f.so"))
    for folder, named in ((str(tmp_path / "none"), tmp_path / "none"), ("", "no folder")):
        monkeypatch.setenv("STALEPROOF_MOE_MODULES", folder)
        with pytest.raises(RuntimeError, match=f"in {named}: staleproof moe-module build"):
            tenants.flashinfer_moe(Rows())
