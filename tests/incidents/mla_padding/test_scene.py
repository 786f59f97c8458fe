"""The miniature engine: padding as a model runner writes it, and rows that do not meet."""

import pytest
import torch

from staleproof.evidence import CLEAN, FILLS, RowCounters, Verdict, plant, same_bits
from staleproof.evidence.counters import StageCount
from staleproof.incidents.mla_padding import broken
from staleproof.incidents.mla_padding.scene import Batch, Engine, EngineConfig, Variant, make_call
from staleproof.ops.mla.decode import mla_decode


def make(device, kernel=mla_decode, quantise=None, counters=None, **changes):
    config = EngineConfig.for_device(device, batch=8, **changes)
    return Engine(Variant("test", broken.NoRemedy(kernel), quantise), config, counters)


def test_padding_rows_have_no_tokens_and_no_pages(device):
    engine = make(device, q_len=2)
    engine.set_batch(Batch(3))
    assert engine.seq_lens.tolist() == [engine.config.context] * 3 + [0] * 5
    assert (engine.block_table[3:] == -1).all()
    assert (engine.block_table[:3] > 0).all()
    assert engine.live.tolist() == [True] * 6 + [False] * 10


def test_counts_begin_after_the_captured_step(device):
    counters = RowCounters(Engine.stage_names(1), device)

    def nan(*args, **kwargs):
        mla_decode(*args, **kwargs)
        kwargs["out"].fill_(torch.nan)

    engine = make(device, nan, counters=counters, layers=1)
    assert set(counters.read().values()) == {StageCount(0, 0)}
    engine.set_batch(Batch(3))
    engine.replay()
    assert counters.read()["0.attention"] == StageCount(5, 3)
    engine.run(CLEAN)
    assert counters.read()["0.attention"] == StageCount(5, 3)


def test_a_live_row_says_the_same_whatever_batch_it_is_in(device):
    engine = make(device)
    engine.set_batch(Batch(1))
    alone = engine.replay().clone()
    engine.set_batch(Batch(8))
    full = engine.replay()
    assert same_bits(alone[:1], full[:1]).all()
    assert not torch.equal(full[0], full[1])


def test_run_restores_the_memory_it_filled(device):
    engine = make(device, broken.empty_row_not_written)
    engine.poison(plant)
    engine.set_batch(Batch(2))
    engine.replay()
    memory = engine.taps[0]["attention"]
    before = memory.clone()
    engine.run(FILLS[2])
    assert same_bits(memory, before).all()


def test_a_sick_request_is_live_born_and_healed_by_the_next_batch(device):
    engine = make(device)
    for spread in (False, True):
        engine.set_batch(Batch(4, poisoned_row=2, spread=spread))
        assert engine.verdict() == Verdict.LIVE_BORN
    engine.set_batch(Batch(4))
    assert engine.verdict() == Verdict.CLEAN


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch(0), "batch.live: expected 1 to 8, got 0"),
        (Batch(9), "batch.live: expected 1 to 8, got 9"),
        (Batch(2, seq_len=17), "batch.seq_len: expected 2 to 16, got 17"),
        (Batch(2, seq_len=1), "batch.seq_len: expected 2 to 16, got 1"),
        (Batch(2, poisoned_row=2), "batch.poisoned_row: expected a live row, 0 to 1, got 2"),
    ],
)
def test_bad_batches_change_nothing(device, batch, message):
    engine = make(device, q_len=2, context=16)
    engine.set_batch(Batch(3))
    before = engine.seq_lens.clone(), engine.block_table.clone()
    with pytest.raises(ValueError, match=message):
        engine.set_batch(batch)
    assert torch.equal(engine.seq_lens, before[0])
    assert torch.equal(engine.block_table, before[1])


def test_a_call_names_a_spare_page_in_each_unused_entry(device):
    call = make_call(device, rows=4, live=2, tokens=64, q_len=2)
    assert call.q.shape[:2] == (4, 2)
    assert call.seq_lens.tolist() == [64, 64, 0, 0]
    assert call.block_table.tolist() == [[1, 2], [3, 4], [0, 0], [0, 0]]
    assert len(call.kv_cache) == 5


def test_an_engine_writes_into_no_memory_of_another(device):
    one, other = make(device), make(device)
    one.set_batch(Batch(2, poisoned_row=1))
    one.poison(plant)
    assert other.kv_cache[0].isfinite().all()
