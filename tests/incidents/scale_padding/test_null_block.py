"""What the idle rank of two real ones writes into the null block, and who reads it."""

from __future__ import annotations

import pytest
import torch

from staleproof.cases.children import ChildError
from staleproof.incidents.scale_padding import null_block

needs_gloo = pytest.mark.skipif(
    null_block.unavailable_reason("gloo") is not None, reason="this torch has no gloo"
)


@needs_gloo
def test_the_idle_ranks_next_request_is_lost_with_slot_0_and_safe_with_slot_minus_1(device):
    busy, idle = null_block.reproduce("gloo", device=device)
    assert [s.slot for s in busy] == [s.slot for s in idle] == [*null_block.SLOTS]
    # Finite contents are multiplied by a weight of 0, so only NaN and Inf reach the request.
    reached = (True, ("nan", "inf"))
    assert [(s.null_block_bad, s.row_wrong) for s in idle] == [reached, (False, ()), reached]
    assert not any(s.null_block_bad or s.row_wrong for s in busy)


def test_a_negative_slot_is_skipped():
    cache = torch.zeros(2, 4, 3)
    null_block.write_kv(cache, torch.ones(2, 3), torch.tensor([-1, 5]))
    assert cache.sum() == 3
    assert cache[1, 1].tolist() == [1, 1, 1]


@needs_gloo
def test_ranks_that_do_not_come_back_are_ended():
    with pytest.raises(ChildError, match="the ranks gave no answer within 0 s"):
        null_block.reproduce("gloo", timeout_s=0.05)


@needs_gloo
def test_a_rank_that_dies_says_why():
    with pytest.raises(ChildError, match=r"rank \d ended with 1 and said: .*no_such_backend"):
        null_block.reproduce("no_such_backend")


def test_nccl_wants_two_gpus():
    why = null_block.unavailable_reason("nccl")
    assert (why is None) == (torch.cuda.device_count() >= 2)
