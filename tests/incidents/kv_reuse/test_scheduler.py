"""Each new block is reported once and then forgotten; hits are not new; no page has two users."""

from __future__ import annotations

import itertools

import pytest

from staleproof.incidents.kv_reuse.block_pool import NULL_BLOCK, BlockPool, OutOfBlocks
from staleproof.incidents.kv_reuse.scheduler import ATTENTION, MAMBA, Request, Scheduler, requests, trace

SIZE = 8


def _scheduler(*, prefix_caching=True, blocks=60, **load):
    given = {"prefix": 16, "shortest": 18, "longest": 40} | load
    return Scheduler(BlockPool(blocks), SIZE, requests(**given), batch=6, prefix_caching=prefix_caching)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_step_reports_exactly_the_blocks_that_the_pool_handed_out(prefix_caching):
    scheduler = _scheduler(prefix_caching=prefix_caching)
    handed = []
    allocate = scheduler.pool.allocate
    scheduler.pool.allocate = lambda count: handed.append(allocate(count)) or handed[-1]
    for _ in range(150):
        handed.clear()
        step = scheduler.schedule()
        reported = [*step.new[ATTENTION], *step.new[MAMBA]]
        assert sorted(reported) == sorted(itertools.chain(*handed))
        # Nothing stays behind, whatever the model.
        assert scheduler.new.ids == {ATTENTION: [], MAMBA: []}


def test_a_hit_is_not_a_new_block():
    scheduler = _scheduler()
    hits = 0
    for _ in range(150):
        step = scheduler.schedule()
        new = {*step.new[ATTENTION], *step.new[MAMBA]}
        for _, blocks in step.hits:
            hits += 1
            assert not new & {*blocks}
    assert hits > 10


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
    (row,) = steps[2 * SIZE].rows
    assert (row.request, row.position, row.token) == (1, SIZE, tokens[SIZE])
    (row,) = steps[-1].rows
    assert (row.request, row.position, row.last) == (1, 2 * SIZE - 1, True)


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
    for blocks in (9, 8):
        source = iter([Request(n, tuple(range(n, n + 12))) for n in range(2)])
        scheduler = Scheduler(BlockPool(blocks), SIZE, source, batch=2)
        for _ in range(SIZE):
            scheduler.schedule()
        if blocks == 8:
            with pytest.raises(OutOfBlocks):
                scheduler.schedule()
            continue
        step = scheduler.schedule()
        new = {*step.new[ATTENTION], *step.new[MAMBA]}
        assert len(new) == 4
        assert not new & {row.state_in for row in step.rows}
        assert {*scheduler.schedule().freed} == {row.state_in for row in step.rows}


def test_a_pool_that_is_too_small_says_so():
    with pytest.raises(OutOfBlocks, match="of 8 free"):
        trace(_scheduler(blocks=8), 10)


def test_on_clean_memory_every_tenancy_has_a_page_of_its_own(device):
    taken = trace(_scheduler(), 150, device)
    starts = sum(len(s.new[ATTENTION]) + len(s.new[MAMBA]) for s in taken.steps)
    assert taken.clean_pages == starts + 1
    assert int(taken.pooled.blocks.max()) < 60 < int(taken.clean.blocks.max())
    owner_of: dict[int, int] = {}
    for step in range(150):
        for row in range(6):
            page = int(taken.clean.state_out[step, row])
            assert owner_of.setdefault(page, int(taken.owners[step, row])) == int(taken.owners[step, row])
    assert taken.finished
    assert max(taken.finished.values()) < 150
