"""PublishedBlocks: what a plan does not write, and who reads it."""

import pytest

from staleproof.evidence import PublishedBlocks, UnwrittenHit


def withdrawn(**plan):
    watch = PublishedBlocks()
    for block in (7, 8):
        watch.publish(block, f"hash {block}", "victim", 16 * (block - 6))
    return watch, watch.plan({"victim": 16}, **plan)


def test_what_a_step_writes_is_no_concern():
    watch, bare = withdrawn()
    assert (bare, watch.published, bool(watch)) == ([8], 1, True)
    assert watch.read("other", [(7, "hash 7")]) == []


@pytest.mark.parametrize("reader", ["victim", "stranger"])
def test_a_hit_names_both_requests(reader):
    watch, _ = withdrawn()
    found = watch.read(reader, [(7, "hash 7"), (8, "hash 8")])
    assert found == [UnwrittenHit(reader, "victim", (8,))]
    whose = "itself" if reader == "victim" else "victim"
    assert str(found[0]) == f"{reader} reads block 8, published by {whose} and written by nobody"
    assert watch.hits == 1


@pytest.mark.parametrize("now", [None, "another"])
def test_a_hash_that_was_taken_back_or_replaced_cannot_be_hit(now):
    watch, bare = withdrawn(key_of={7: "hash 7", 8: now}.get)
    assert (bare, watch.published, bool(watch)) == ([], 0, False)


def test_a_block_that_was_used_again_is_judged_anew():
    watch, _ = withdrawn()
    # It ends with the last token that is computed, so it is written.
    watch.publish(8, "hash 8", "other", 16, computed=16)
    assert not watch
    assert watch.plan({"victim": 16}) == []
    assert watch.read("stranger", [(8, "hash 8")]) == []
    watch, _ = withdrawn()
    # Evicted, and nobody said so: another hash is another block.
    assert watch.read("stranger", [(8, "another")]) == []


def test_each_block_of_a_publisher_is_a_hit():
    watch = PublishedBlocks()
    for block in (1, 2):
        watch.publish(block, "hash", "victim", tokens=16 * block)
    assert watch.plan({}) == [1, 2]
    assert watch.read("other", [(1, "hash"), (2, "hash")]) == [UnwrittenHit("other", "victim", (1, 2))]
    assert (watch.published, watch.hits) == (2, 2)


def test_a_block_without_a_token_is_refused():
    with pytest.raises(ValueError, match="tokens: expected at least one token up to the block's end, got 0"):
        PublishedBlocks().publish(1, "hash", "request", 0)


def test_a_block_of_one_token_is_followed_and_counts_add_up_over_steps_and_readers():
    """Of a request that is gone, which has computed nothing."""
    watch = PublishedBlocks()
    for block in (1, 2):
        watch.publish(block, f"hash {block}", f"victim {block}", tokens=1)
        assert watch.owners == {f"victim {block}"}
        assert (watch.plan({}), watch.plan({}), watch.owners) == ([block], [], set())
    assert watch.published == 2
    for reader in "ab":
        expected = [UnwrittenHit(reader, "victim 2", (2,)), UnwrittenHit(reader, "victim 1", (1,))]
        assert watch.read(reader, [(2, "hash 2"), (1, "hash 1")]) == expected
    assert watch.hits == 4
    assert str(UnwrittenHit("a", "b", (1, 2))) == "a reads block 1, 2, published by b and written by nobody"
