"""Each new block is reported once and then forgotten; hits are not new; no page has two users."""

import itertools

import pytest

from staleproof.incidents.kv_reuse.block_pool import NULL_BLOCK, BlockPool, OutOfBlocks
from staleproof.incidents.kv_reuse.scheduler import ATTENTION, MAMBA, Request, Scheduler, requests

SIZE = 8


def _scheduler(*, prefix_caching=True, blocks=60, **load):
    given = {"prefix": 16, "shortest": 18, "longest": 40} | load
    return Scheduler(BlockPool(blocks), SIZE, requests(**given), batch=6, prefix_caching=prefix_caching)


def test_a_block_that_is_read_is_used_by_nobody_else():
    for prefix_caching in (True, False):
        scheduler = _scheduler(prefix_caching=prefix_caching)
        for _ in range(150):
            step = scheduler.schedule()
            new = {*step.new[ATTENTION], *step.new[MAMBA]}
            written = [row.state_out for row in step.rows]
            written += [row.blocks[row.position // SIZE] for row in step.rows]
            assert len(set(written)) == len(written)
            for row in step.rows:
                assert row.first == (row.state_in == NULL_BLOCK)
                # What is zeroed before this step is nothing that this step still reads.
                assert row.state_in not in new
                assert not new & {*row.blocks[:-1]}
            assert not {*step.freed} & {*written}


def test_a_request_that_is_cached_to_its_last_token_computes_its_last_block():
    tokens = tuple(range(2 * SIZE))
    scheduler = Scheduler(BlockPool(20), SIZE, (Request(n, tokens) for n in range(9)), batch=1)
    steps = [scheduler.schedule() for _ in range(3 * SIZE)]
    (before,), (row,) = steps[2 * SIZE - 1].rows, steps[2 * SIZE].rows
    assert (row.request, row.position, row.token) == (1, SIZE, tokens[SIZE])
    # The beginning of the prefix is freed last, and so evicted last.
    assert steps[2 * SIZE].freed[-2:] == before.blocks[::-1]
    (row,) = steps[-1].rows
    assert (row.request, row.position, row.last) == (1, 2 * SIZE - 1, True)


def test_a_hit_ends_at_the_last_block_whose_state_is_cached():
    tokens = tuple(range(2 * SIZE + 1))
    scheduler = Scheduler(BlockPool(20), SIZE, (Request(n, tokens) for n in range(2)), batch=1)
    cached = scheduler.pool.cached
    scheduler.pool.cached = lambda key: None if key == (MAMBA, tokens[:-1]) else cached(key)
    step = [scheduler.schedule() for _ in range(len(tokens) + 1)][-1]
    assert [(row.request, row.position) for row in step.rows] == [(1, SIZE)]


def test_a_request_goes_on_where_its_prefix_ended():
    scheduler = _scheduler()
    seen, begun = {}, {}
    for _ in range(150):
        step = scheduler.schedule()
        for row in step.rows:
            begun.setdefault(row.request, row)
            seen.setdefault(row.request, []).append(row.token)
    hit = [row for row in begun.values() if row.position]
    assert hit
    stream = {r.number: r.tokens for r in itertools.islice(requests(prefix=16, shortest=18, longest=40), 200)}
    for request, row in begun.items():
        assert row.position % SIZE == 0
        assert row.first == (row.position == 0)
        fed = seen[request]
        assert list(stream[request][row.position :][: len(fed)]) == fed


def test_the_state_at_the_end_of_a_block_is_kept_for_others():
    scheduler = _scheduler()
    last = {}
    for _ in range(60):
        for row in scheduler.schedule().rows:
            before = last.get(row.request)
            if before is not None:
                moved = row.position % SIZE == 0
                assert row.state_in == before.state_out
                assert (row.state_out != before.state_out) == moved
            last[row.request] = row


def test_a_state_that_a_step_reads_is_not_handed_out_in_that_step():
    # Two requests come to the end of their first block together: four new blocks.
    pairs = ([Request(n, tuple(range(n, n + 12))) for n in range(2)] for _ in range(2))
    large, small = (
        Scheduler(BlockPool(blocks), SIZE, iter(pair), batch=2)
        for blocks, pair in zip((9, 8), pairs, strict=True)
    )
    for scheduler in [large, small] * SIZE:
        scheduler.schedule()
    step = large.schedule()
    new = {*step.new[ATTENTION], *step.new[MAMBA]}
    assert len(new) == 4
    assert not new & {row.state_in for row in step.rows}
    assert {*large.schedule().freed} == {row.state_in for row in step.rows}
    with pytest.raises(OutOfBlocks, match="of 8 free"):
        small.schedule()
