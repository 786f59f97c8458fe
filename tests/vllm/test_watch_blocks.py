"""Blocks that are read before they are written: against the tenancy log, and as vLLM's scheduler says."""

import random
from types import SimpleNamespace as Space

import pytest

from staleproof.evidence.tenancy import STALE, TenancyLog
from staleproof.vllm import watch_blocks
from staleproof.vllm.watch_blocks import ATTENTION, STATE, Blocks
from staleproof.vllm.watch_owners import text

SIZE = 4


FIRST, PAIR = ([[1, 2]], 0, 8, []), (ATTENTION, ATTENTION)
# The one behind the first is a hit of the prefix cache.
HIT = [FIRST, ([[1, 3]], SIZE, 2, []), ([[1, 2]], SIZE, 2, [])]


@pytest.mark.parametrize(
    ("kinds", "steps", "stale"),
    [
        # A block that is filled in one step, or that no token reaches, is not stale.
        *(([ATTENTION], [FIRST, ([[2, 1]], 0, tokens, [])], {}) for tokens in (4, 8)),
        *(([ATTENTION], [FIRST, ([[2, 1]], 0, tokens, [])], {PAIR: 1}) for tokens in (3, 5, 7)),
        # Nor are a zeroed block and the null block, nor if a group of states names it too.
        ([ATTENTION], [([[0, 1]], 0, 8, []), ([[0, 1]], 0, 5, [1])], {}),
        ([STATE, ATTENTION], [([[0], [0]], 0, 3, [])], {}),
        # The block behind a hit is the first request's, and the last writes a part of it.
        ([ATTENTION], HIT[:2], {}),
        ([ATTENTION], HIT, {PAIR: 1}),
        # The hit ends within a block, of which the step writes the rest alone.
        ([ATTENTION], [*HIT, ([[1, 2]], SIZE + 1, SIZE - 1, [])], {PAIR: 2}),
    ],
)
def test_a_block_that_is_read_before_it_is_written_is_stale(kinds, steps, stale):
    """Each step has a new request: its blocks, tokens computed and of the step, and what is zeroed for it."""
    blocks = Blocks(kinds, [SIZE] * len(kinds))
    for number, (*given, zeroed) in enumerate(steps):
        blocks.step(new=[(number, *given)], ended=[number - 1] * (number > 0), zeroed=zeroed)
    assert blocks.stale == stale


def test_a_state_that_is_read_as_attention_says_so():
    blocks = Blocks([ATTENTION, STATE], [SIZE, SIZE])
    blocks.step(new=[("a", [[1], [2]], 0, 3)])
    blocks.step(new=[("b", [[2], [1]], 0, 3)], ended=["a"])
    assert blocks.stale == {(STATE, ATTENTION): 1}
    assert blocks.pairs == [(ATTENTION, ATTENTION), (STATE, ATTENTION)]
    assert Blocks([STATE], [SIZE]).pairs == [], "nobody reads there"


def test_a_prompt_that_comes_in_parts_fills_its_blocks():
    blocks = Blocks([ATTENTION], [SIZE])
    blocks.step(new=[("a", [[1, 2, 3]], 0, 3 * SIZE)])
    blocks.step(new=[("b", [[1]], 0, SIZE)], ended=["a"])
    for part in (1, 2):
        blocks.step(more=[("b", [[1 + part]], part * SIZE, SIZE)])
    assert not blocks.stale
    # A server runs for months: what has ended leaves nothing.
    blocks.step(ended=["b"])
    assert not blocks._held


def traffic(draw, steps):
    """Requests that come, grow and go in a pool of few blocks; yields what the scheduler would say."""
    free, lengths, held = [*range(1, 24)], {}, {}
    for number in range(steps):
        ended = [name for name in lengths if draw.random() < 0.15]
        for name in ended:
            free += held.pop(name)
            del lengths[name]
        draw.shuffle(free)
        zeroed, new, more = [], [], []
        for name in [*lengths]:
            length = lengths[name]
            if length % SIZE == 0 and free:
                held[name].append(free.pop())
                more.append((name, [held[name][-1:]], length, 1))
            elif length % SIZE == 0:
                continue
            lengths[name] += 1
        tokens = draw.randrange(1, 11)
        need = -(-tokens // SIZE)
        if len(free) > need + 4:
            held[f"r{number}"] = [free.pop() for _ in range(need)]
            lengths[f"r{number}"] = tokens
            new.append((f"r{number}", [held[f"r{number}"]], 0, tokens))
        if draw.random() < 0.5:
            zeroed = [b for _, ids, *_ in (*new, *more) for b in ids[0] if draw.random() < 0.5]
        yield new, more, ended, zeroed


@pytest.mark.parametrize("seed", range(2))
def test_the_count_is_the_tenancy_logs(seed):
    """The log keeps every tenancy and every write; the counter must find the same stale blocks."""
    blocks, log, found = Blocks([ATTENTION], [SIZE]), TenancyLog(), 0
    for new, more, ended, zeroed in traffic(random.Random(seed), 300):
        log.advance()
        log.zeroed(zeroed)
        for name in ended:
            log.ended(name)
        for name, (ids,), computed, tokens in (*new, *more):
            log.allocated(ids, name, ATTENTION)
            first = 0 if computed == 0 else computed // SIZE
            for at, block in enumerate(ids, first):
                whole = computed <= at * SIZE and (at + 1) * SIZE <= computed + tokens
                log.wrote([block], name, ATTENTION, whole=whole)
            suspects = [s for s in log.explain(name) if s.kind == STALE and s.step == log.step]
            found += len(suspects)
        blocks.step(new, more, ended, zeroed)
    assert found > 50
    assert sum(blocks.stale.values()) == found


@pytest.mark.parametrize("seed", range(3))
def test_owners_are_the_last_writers_of_each_block(seed):
    """Against a record of each token's write: who was the last, and that its step lies in the named ones."""
    blocks, last, tables, lengths, foreign = Blocks([ATTENTION], [SIZE]), {}, {}, {}, 0
    for number, (new, more, ended, zeroed) in enumerate(traffic(random.Random(seed), 300), 1):
        for name in ended:
            del tables[name], lengths[name]
        last.update(dict.fromkeys(zeroed, ("", number)))
        grown = {name: ids for name, (ids,), *_ in more}
        for name in [name for name in lengths if name in grown or lengths[name] % SIZE]:
            tables[name] += grown.get(name, [])
            last[tables[name][lengths[name] // SIZE]] = name, number
            lengths[name] += 1
        for name, (ids,), _, tokens in new:
            tables[name], lengths[name] = [*ids], tokens
            last.update(dict.fromkeys(ids, (name, number)))
        blocks.step(new, more, ended, zeroed, number)
        for name, table in tables.items():
            parts = blocks.owners.read_by(name, number)
            assert [block for part in parts for block in part.blocks] == table
            for part in parts:
                steps = [last[block][1] for block in part.blocks]
                assert {last[block][0] for block in part.blocks} == {part.owner}
                assert part.first <= min(steps) <= max(steps) <= (part.last or number)
                foreign += part.owner != name
    assert foreign == 0, "without hits a request reads what it wrote"


def test_owners_of_a_hit_a_draft_and_an_earlier_step():
    blocks = Blocks([ATTENTION, STATE], [SIZE, SIZE])
    blocks.step(new=[("a", [[1, 2], [3]], 0, 2 * SIZE)], number=1)
    # b hits a block of a. It gets one that was a's state, and one more for drafts that do not reach it.
    blocks.step(new=[("b", [[1, 3, 4], [5]], SIZE, 2)], ended=["a"], number=4)
    owner = {
        step: [
            (part.blocks, part.owner, part.kind, part.first, part.last)
            for part in blocks.owners.read_by("b", step)
        ]
        for step in (3, 4, 5)
    }
    assert owner[3] == []
    hit, own = ((1,), "a", ATTENTION, 1, 1), ((3,), "b", ATTENTION, 4, None)
    assert owner[4] == [hit, own, ((4,), "", "", 0, 0)]
    assert owner[5] == [hit, ((3, 4), "b", ATTENTION, 4, None)]
    blocks.step(new=[("c", [[1, 2], [6]], SIZE, 1)], ended=["b"], zeroed=[2], number=9)
    assert text(blocks.owners.read_by("c", 9), "c") == "1 of a (step 1); 2 of itself (steps 9 to now)"


def test_owners_of_a_block_that_was_filled_in_several_steps():
    blocks = Blocks([ATTENTION], [SIZE])
    blocks.step(new=[("a", [[1]], 0, 2)], number=1)
    # Two decode steps fill the first block; the next one needs a second, which is never filled.
    blocks.step(more=[("a", [[2]], SIZE, 1)], number=4)
    blocks.step(new=[("b", [[1, 2]], 2 * SIZE - 1, 1)], ended=["a"], number=9)
    assert text(blocks.owners.read_by("b", 9), "b") == "1 of a (steps 1 to 3); 2 of itself (step 9)"
    assert text(blocks.owners.read_by("a", 8), "a") == "1-2 of itself (steps 1 to 8)"


def test_what_vllm_says_is_taken_in():
    """Resumed requests come with all their blocks; others with the new ones, or with none."""
    specs = [type(name, (), {"block_size": SIZE})() for name in ("MLAAttentionSpec", "MambaSpec")]
    blocks = watch_blocks.of(Space(kv_cache_groups=[Space(kv_cache_spec=spec) for spec in specs]))
    assert blocks.kinds == [ATTENTION, STATE]

    def output(new, cached, ended=(), **more):
        names = [name for name, *_ in cached]
        return Space(
            num_scheduled_tokens={name: tokens for name, *_, tokens in (*new, *cached)},
            scheduled_new_reqs=[
                Space(req_id=name, block_ids=groups, num_computed_tokens=computed)
                for name, groups, computed, _ in new
            ],
            scheduled_cached_reqs=Space(
                req_ids=names,
                resumed_req_ids={"c"} & {*names},
                new_block_ids=[groups for _, groups, *_ in cached],
                num_computed_tokens=[computed for *_, computed, _ in cached],
            ),
            finished_req_ids={*ended},
            **more,
        )

    blocks.scheduled(output([("a", ([1], [9]), 0, 4), ("b", ([2], [8]), 0, 4)], []))
    blocks.scheduled(output([], [("a", ([3], []), 4, 1), ("b", None, 4, 1)]))
    assert not blocks.stale
    blocks.scheduled(output([], [("c", ([3, 9], [7]), 0, 5)], ["a"]))
    assert blocks.stale == {(STATE, ATTENTION): 1}
    # c was preempted and comes back with a hit of its first two blocks, then a block that held a state.
    blocks.scheduled(output([], [("c", ([3, 4, 7], [6]), 2 * SIZE, 1)]))
    assert blocks.stale == {(STATE, ATTENTION): 2}
    # Block 9 was a state's; zeroed before its new owner reads it, it is nobody's.
    zeroed = output([("d", ([9], [5]), 0, 1)], [], new_block_ids_to_zero=[9])
    blocks.scheduled(output([("e", ([2], [9]), 0, 4)], []))
    blocks.scheduled(zeroed)
    assert blocks.stale == {(STATE, ATTENTION): 2}
