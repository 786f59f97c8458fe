"""Two real ranks: what the idle one writes into the null block, and who reads it."""

from __future__ import annotations

import pytest
import torch

from staleproof.incidents.scale_padding import null_block


def test_the_idle_ranks_next_request_is_lost_with_slot_0_and_safe_with_slot_minus_1(device):
    why = null_block.why_not("gloo")
    if why:
        pytest.skip(why)
    steps = null_block.reproduce("gloo", device=device)
    seen = {(s.rank, number % 3): s for number, s in enumerate(steps)}
    assert [s.slot for s in steps] == [*null_block.SLOTS] * 2
    for number, bad in enumerate((True, False, True)):
        assert (seen[1, number].null_block_bad, seen[1, number].row_bad) == (bad, bad)
        assert (seen[0, number].null_block_bad, seen[0, number].row_bad) == (False, False)


def test_a_negative_slot_is_skipped():
    cache = torch.zeros(2, 4, 3)
    null_block.write_kv(cache, torch.ones(2, 3), torch.tensor([-1, 5]))
    assert cache.sum() == 3
    assert cache[1, 1].tolist() == [1, 1, 1]


def test_ranks_that_do_not_come_back_are_ended(monkeypatch):
    if null_block.why_not("gloo"):
        pytest.skip("no gloo")
    with pytest.raises(null_block.RanksFailed, match="did not come back in 0 s"):
        null_block.reproduce("gloo", timeout_s=0.05)


def test_a_rank_that_dies_says_why():
    if null_block.why_not("gloo"):
        pytest.skip("no gloo")
    with pytest.raises(null_block.RanksFailed, match=r"rank 0 ended with 1: .*no_such_backend"):
        null_block.reproduce("no_such_backend")


def test_nccl_wants_two_gpus():
    why = null_block.why_not("nccl")
    assert (why is None) == (torch.cuda.device_count() >= 2)
