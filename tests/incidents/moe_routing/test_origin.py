"""Padding rows contain what their memory's last tenant left there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from staleproof.incidents.moe_routing import origin
from staleproof.incidents.moe_routing.origin import Pool, Request, Scheduler, Setting


def steps(requests: list[Request]) -> list[int]:
    return [*iter(Scheduler(requests).step, 0)]


# No deadline: a busy machine is no fault.
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 20)), min_size=1, max_size=60))
def test_every_token_is_computed_once(lengths):
    found = steps([Request(*pair) for pair in lengths])
    # The step that ends a prompt gives the first token of the answer.
    assert sum(found) == sum(prompt + answer - 1 for prompt, answer in lengths)
    assert max(found) <= origin.MAX_NUM_BATCHED_TOKENS


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 7)), min_size=1, max_size=30))
def test_the_pool_gives_each_byte_to_one_tensor(plan):
    pool, held = Pool("cpu", size=2**18), []
    for number, (size, frees) in enumerate(plan):
        x = pool.empty(size, dtype=torch.uint8).fill_(number % 251)
        held.append((x, number % 251))
        for _ in range(min(frees, len(held)) // 2):
            pool.free(held.pop(0)[0])
        assert all(bool((y == value).all()) for y, value in held)
    for y, _ in held:
        pool.free(y)
    assert pool.free_blocks == {0: 2**18}


def test_the_pool_takes_the_smallest_block_that_fits_and_leaves_its_bytes():
    pool = Pool("cpu")
    large, between, small, _last = (pool.empty(n) for n in (4096, 256, 1024, 256))
    small.fill_(3.0)
    pool.free(large)
    pool.free(small)
    again = pool.empty(512)
    assert again.data_ptr() == small.data_ptr()
    assert again.tolist() == [3.0] * 512
    assert between.data_ptr() != again.data_ptr()


@pytest.mark.parametrize("shares_experts", [False, True])
def test_each_rank_has_its_slice_of_each_expert_or_its_share_of_the_experts(shares_experts):
    *_, up, down = origin.Model(Setting(), "cpu", 0).layers[1]
    ranks = [origin.Model(Setting(ranks=2, expert_parallel=shares_experts), "cpu", rank) for rank in (0, 1)]
    ups, downs = ([model.layers[1][at] for model in ranks] for at in (3, 4))
    assert torch.equal(torch.cat(ups, 0 if shares_experts else 2), up)
    assert torch.equal(torch.cat(downs, 0 if shares_experts else 1), down)
    assert ups[0].shape == ups[1].shape
    own = [model.experts.tolist() for model in ranks]
    every = [*range(origin.EXPERTS)]
    half = origin.EXPERTS // 2
    assert own == ([every[:half], every[half:]] if shares_experts else [every, every])


class Poisoned(Pool):
    """Memory whose last tenant left NaN everywhere: all ones, in any float format."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        x = super().empty(*shape, dtype=dtype)
        x.view(torch.uint8).fill_(255)
        return x


def test_a_dummy_step_fills_its_output_and_a_step_with_requests_does_not(device):
    model = origin.Model(Setting(), device, 0)
    model.memory = Poisoned(device)
    for live, rows in ((0, 0), (3, 5)):
        nan, inf, live_nan = model.forward(origin.Step(8, 8, True), live).tolist()
        assert nan == origin.LAYERS * rows * origin.ATTENTION
        assert (inf, live_nan) == (0, 0)
