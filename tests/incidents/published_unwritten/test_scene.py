"""The miniature: a step that is planned and then written, and who reads what nobody wrote."""

import pytest

from staleproof.incidents.published_unwritten import pictures, scene
from staleproof.incidents.published_unwritten.broken import REMEDIES
from staleproof.incidents.published_unwritten.scene import Memory, Miniature, Row, serve

# Step by step: who did what with which blocks.
STORY = """
1 tenant reuse 0 1, publish 0 1, write 0 1
2 tenant reuse 2 3, publish 2 3, write 2 3
3 tenant reuse 4 5, publish 4 5, write 4 5
4 victim reuse 6, evict 5, publish 6 5, write 6 5
5 victim evict 4 3, publish 4 3; chat evict 2, publish 2; victim write 4 3; chat write 2
6 victim evict 1 0, publish 1 0, withdraw 1 0; chat evict 0, write 0
7 chat write 0
8 victim reuse 0, publish 0, hit 6 5 4 3 1, write 0
9 victim evict 2, write 2
10 stranger reuse 2, hit 6 5 4 3 1 0, write 2
"""
# A row a block, a column a step.
POOL = """
*----***--
*----!!!!!
.*--*---**
.*--*-----
..*-*-----
..**------
...*------
"""


def test_miniature_publishes_withdraws_and_hits_block_by_block():
    engine = Miniature().run()
    events = []
    for line in STORY.split("\n")[1:-1]:
        step, _, rest = line.partition(" ")
        for part in rest.split("; "):
            who, _, deeds = part.partition(" ")
            for what, *blocks in map(str.split, deeds.split(", ")):
                events += [(int(step), int(block), what, who) for block in blocks]
    assert engine.events == events
    marks = {pictures.NOW: "*", pictures.EARLIER: "-", pictures.NEVER: "!", pictures.NOBODY: "."}
    assert ["".join(map(marks.get, row)) for row in pictures.pool(engine)] == POOL.split()


@pytest.mark.parametrize(("remedy", "content"), [("none", "never written"), ("zero_at_allocation", "zero")])
def test_readers_find_at_each_position_what_is_there(remedy, content):
    found = pictures.found(Miniature(remedy=REMEDIES[remedy]).run().memory)
    assert found == [["written"] * 16 + [content] * 4 + ["written"] * 4] * 2


def test_slot_of_another_prefix_is_a_strangers():
    memory = Memory(2)
    memory.step([Row("a", [1, 2, 3, 4], [0, 1], 0, 4, True)])
    # The second block alone is the same: what comes before it is not.
    memory.step([Row("b", [1, 9, 3, 4, 5], [2, 1, 3], 0, 2, True)])
    memory.step([Row("c", [1, 9, 3, 4, 5], [2, 1, 3], 4, 1, True)])
    assert [(read.position, read.block, read.whose) for read in memory.reads] == [(2, 1, "a"), (3, 1, "a")]
    assert memory.verdict == scene.FOREIGN


@pytest.mark.parametrize(("zeroed", "whose"), [(False, scene.NOBODY), (True, "zeros")])
def test_slot_that_nobody_wrote_is_unwritten_zeroed_or_not(zeroed, whose):
    memory = Memory(2)
    memory.zero([5] if zeroed else [])
    memory.step([Row("a", [1, 2, 3], [5, 6], 2, 1, True)])
    assert [read.whose for read in memory.reads] == [whose] * 2
    assert memory.verdict == scene.UNWRITTEN


def test_own_bytes_of_another_position_are_unwritten():
    memory = Memory(2)
    memory.step([Row("a", [1, 2, 3, 4, 5], [5, 6, 7], 0, 2, True)])
    memory.step([Row("a", [1, 2, 3, 4, 5], [5, 5, 7], 4, 1, True)])
    assert [(read.position, read.whose) for read in memory.reads] == [(2, "a"), (3, "a")]
    assert memory.verdict == scene.UNWRITTEN


def test_hit_that_the_same_step_writes_is_written():
    memory = Memory(2)
    rows = [Row("a", [1, 2, 3], [5, 6], 0, 3, True), Row("b", [1, 2, 4], [5, 7], 2, 1, True)]
    memory.step(rows)
    assert (memory.reads, memory.same_step, memory.verdict) == ([], 2, scene.WRITTEN)
    # Of another hit the step writes the first block only.
    memory.step([rows[0]._replace(blocks=[7, 6]), Row("c", [1, 2, 3, 4, 5], [7, 8, 9], 4, 1, True)])
    assert ([read.position for read in memory.reads], memory.same_step) == ([2, 3], 4)


@pytest.mark.parametrize("reused", [False, True])
def test_token_that_the_host_learns_later_is_written(reused):
    """Asynchronous scheduling plans a token before the host knows which it is."""
    memory, tokens = Memory(2), [1]
    memory.step([Row("a", tokens, [5], 0, 1, True)])
    memory.step([Row("a", tokens, [5], 1, 1, False)])
    if reused:
        memory.step([Row("b", [7, 8], [5], 0, 2, True)])
    tokens.append(2)
    memory.step([Row("c", [1, 2, 3], [5, 6], 2, 1, True)])
    assert [read.whose for read in memory.reads] == ["b"] * 2 * reused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blocks": 0}, "blocks: expected a pool of at least one block, got 0"),
        ({"policy": "lifo"}, "policy: expected priority or fcfs, got lifo"),
        ({"publish": "never"}, "publish: expected plan or write, got never"),
    ],
)
def test_bad_ingredient_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        Miniature(**arguments)


def test_plan_changes_with_the_first_computed_token():
    plans = []
    for start in (0, 2):
        memory = Memory(2)
        memory.step([Row("a", [1, 2, 3, 4], [5, 6], start, 2, False)])
        plans.append(memory.plan)
    assert plans[0] != plans[1]


def test_load_that_cannot_end_is_refused():
    # Six blocks of prompt never fit into five.
    with pytest.raises(ValueError, match="load: expected one that ends within 9 steps, got 3 to come"):
        serve(Miniature(5), scene.tenants(), limit=9)
