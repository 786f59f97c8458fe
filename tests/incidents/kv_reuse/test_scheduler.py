"""Each new block is reported once and then forgotten; hits are not new; no page has two users."""

from staleproof.incidents.kv_reuse.block_pool import NULL_BLOCK, BlockPool
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
