"""What new blocks hold is counted before a step writes to them, and the control reads what it should not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from staleproof.engine import hybrid_probes, tenants
from staleproof.engine.tenants import Tenants

NAN = float("nan")


@pytest.fixture(name="runner")
def runner_fixture(monkeypatch) -> SimpleNamespace:
    """Group 0 is linear attention, group 1 attention: 4 blocks of 8 tokens, keys and values."""
    cache = torch.zeros(4, 2, 8, 1, 2)
    monkeypatch.setattr(tenants, "attention_caches", lambda runner: {1: (cache, 4, 8)})
    return SimpleNamespace(cache=cache)


def output(new=(), cached=(), zero=()) -> SimpleNamespace:
    """A step: (request, blocks by group, tokens of the prompt) of new ones, (request, blocks) of others."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=r, block_ids=blocks, prompt_token_ids=[0] * n) for r, blocks, n in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r for r, _ in cached], new_block_ids=[blocks for _, blocks in cached]
        ),
        new_block_ids_to_zero=list(zero),
    )


def test_a_block_that_was_state_is_stale_unless_it_is_zeroed(runner):
    for zeroing in (False, True):
        log = Tenants()
        log.zeroing = zeroing
        for number in range(5):
            runner.cache.zero_()
            # Block 2 is state of request a, then keys and values of request b.
            log.step(runner, output(new=[(f"a{number}", ([2], [1]), 3)], zero=[1]))
            # The state that the request left there; vLLM's zeroing runs before a block is counted.
            runner.cache[2, 1, 6] = 0.0 if zeroing else NAN
            log.step(runner, output(new=[(f"b{number}", ([3], [2]), 3)], zero=[2]))
        counted = log.by_fifth()
        stale = [0 if zeroing else 1] * 5
        assert counted["given"] == [2] * 5
        assert counted["nonzero"] == counted["nan_in_tail"] == stale
        # Block 1 was never state.
        assert counted["from_state"] == stale


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
    log.step(runner, output(cached=[("a", ([], [2])), ("b", None)]))
    assert len(log.counted) == 2


def test_the_control_is_attention_and_reads_the_whole_tile():
    draw = torch.Generator().manual_seed(0)
    kv = torch.randn(3, 2, 256, 2, 16, generator=draw)
    query = torch.randn(3, 4, 16, generator=draw)
    metadata = SimpleNamespace(
        query_start_loc=torch.tensor([0, 1, 3]),
        seq_lens=torch.tensor([5, 130]),
        block_table=torch.tensor([[2, 0], [1, 0]]),
    )
    out = torch.zeros(3, 4, 16)
    tenants._attend(query, kv, metadata, 0.25, out)
    for row, (block, keys) in enumerate([(2, 5), (1, 129), (1, 130)]):
        k, v = (kv[block, side, :keys].repeat_interleave(2, dim=1) for side in (0, 1))
        weights = torch.einsum("hd,khd->hk", query[row], k).mul(0.25).softmax(-1)
        torch.testing.assert_close(out[row], torch.einsum("hk,khd->hd", weights, v))
    kv[2, 1, 100] = NAN
    kv[1, 1, 255] = NAN
    tenants._attend(query, kv, metadata, 0.25, out)
    assert out.isnan().any((1, 2)).tolist() == [True, True, True]
    kv[2, 1, 100], kv[1, 1, 255] = 0.0, 0.0
    # Behind the tile of the first request.
    kv[2, 1, 128:] = NAN
    tenants._attend(query, kv, metadata, 0.25, out)
    assert not out.isnan().any()


def test_only_the_zeroing_goes_without_the_runners_wait():
    calls = []
    event = SimpleNamespace(synchronize=lambda: calls.append("wait"), record=lambda: calls.append("record"))
    guard = tenants.DeferredEvent(event)
    guard.synchronize()
    guard.record()
    assert calls == ["record"]
    guard.event.synchronize()
    assert calls == ["record", "wait"]


def test_every_state_of_the_probe_sets_its_switches_and_the_last_undoes_them(monkeypatch):
    seen, event = [], SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    log = Tenants()
    cache = torch.zeros(2, 3)
    runner = SimpleNamespace(kv_caches=[[cache]], prepare_inputs_event=event)
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=528, num_gpu_blocks=24))
    engine = SimpleNamespace(
        runner=runner,
        watch=SimpleNamespace(tenants=log),
        llm=SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config)),
    )

    def generate(engine, asked, lengths):
        waits = runner.prepare_inputs_event is event
        assert waits is (log.guard is None)
        seen.append((log.zeroing, bool(cache.isnan().all()), log.delay, waits))
        log.requests = {str(number): number for number in range(5)}
        step = {7: SimpleNamespace(logprob=-0.5)}
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7], logprobs=[step])]) for _ in asked]

    monkeypatch.setattr(hybrid_probes, "generate", generate)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    told = {}
    monkeypatch.setattr(hybrid_probes, "tell", lambda answer: told.update([answer]))
    states = ["zeroing", "no zeroing", "no zeroing, cache of NaN", "late copies", "late copies, no wait"]
    monkeypatch.setattr(Tenants, "by_fifth", lambda self: {"given": [0] * 5})
    assert [*hybrid_probes.hybrid(engine, states, requests=3)] == states
    assert seen == [
        (True, False, False, True),
        (False, False, False, True),
        (False, True, False, True),
        (True, True, True, True),
        (True, True, True, False),
    ]
    assert (runner.prepare_inputs_event, log.guard) == (event, None)
    assert told["zeroing"]["nan"] == [False] * 3
    assert told["cache"] == {"block_size": 528, "blocks": 24, "waits": True}
