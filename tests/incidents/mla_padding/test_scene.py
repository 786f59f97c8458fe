"""The miniature engine: padding as a model runner writes it, and rows that do not meet."""

import pytest
import torch

from staleproof.evidence import Verdict, plant, same_bits
from staleproof.incidents.mla_padding import broken
from staleproof.incidents.mla_padding.scene import Batch, Engine, EngineConfig, Variant
from staleproof.ops.mla.decode import mla_decode


def make(device, kernel=mla_decode, quantise=None, counters=None, **changes):
    config = EngineConfig.for_device(device, batch=8, **changes)
    return Engine(Variant("test", broken.NoRemedy(kernel), quantise), config, counters)


def test_a_live_row_says_the_same_whatever_batch_it_is_in(device):
    engine = make(device)
    engine.set_batch(Batch(1))
    alone = engine.replay().clone()
    engine.set_batch(Batch(8))
    full = engine.replay()
    assert same_bits(alone[:1], full[:1]).all()
    assert not torch.equal(full[0], full[1])


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


def test_an_engine_writes_into_no_memory_of_another(device):
    one, other = make(device), make(device)
    one.set_batch(Batch(2, poisoned_row=1))
    one.poison(plant)
    assert other.kv_cache[0].isfinite().all()
