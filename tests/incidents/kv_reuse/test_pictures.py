"""The life of a block is that of the trace: one owner after another, and positions filled one a step."""

import pytest

from staleproof.incidents.kv_reuse.pictures import FREE, HIT, KV, STATE, block_life
from staleproof.incidents.kv_reuse.scene import Scene, brief, trace_of
from staleproof.incidents.kv_reuse.scheduler import ATTENTION, MAMBA

SCENE = Scene("cpu")


def test_a_block_is_a_state_then_free_then_keys_and_values_and_then_hit():
    steps = trace_of(SCENE).steps
    life = block_life(SCENE, range(100))
    kinds = [span.what for span in life.spans]
    assert kinds[:3] == [STATE, FREE, KV]
    assert (kinds[-1], kinds.count(HIT)) == (HIT, 1)
    assert STATE not in kinds[1:]
    for before, after in zip(life.spans, life.spans[1:], strict=False):
        assert before.end == after.begin
    for span in life.spans:
        step = steps[span.begin]
        if span.what == HIT:
            assert any(life.block in blocks for request, blocks in step.hits if request == span.request)
        elif span.what == FREE:
            assert life.block in step.freed
        else:
            assert life.block in step.new[MAMBA if span.what == STATE else ATTENTION]


def test_its_positions_are_filled_one_a_step_by_its_owner():
    life = block_life(SCENE, range(100))
    for span in (span for span in life.spans if span.what == KV):
        mine = [(step, tokens) for step, tokens in life.filled if span.begin <= step < span.end]
        assert mine
        assert [tokens for _, tokens in mine] == list(range(1, len(mine) + 1))
        assert [step for step, _ in mine] == list(range(span.begin, span.begin + len(mine)))
        assert len(mine) <= life.block_size == SCENE.page.block_size


def test_without_such_a_block_it_says_so():
    with pytest.raises(ValueError, match="scene: expected a block that is a state, then keys and values"):
        block_life(brief("cpu"), range(100))
