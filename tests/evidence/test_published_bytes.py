"""BlockFingerprints: bytes at the commit and at the first read."""

import pytest
import torch

from staleproof.evidence import BlockFingerprints, OtherBytes
from staleproof.evidence.published_bytes import WORDS


def caches(layers=2, blocks=6):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(blocks, 2, 8, 3, generator=draw).to(torch.bfloat16) for _ in range(layers)]


def on(device):
    made = [cache.to(device) for cache in caches()]
    return made, BlockFingerprints(made)


def test_every_bit_of_every_layer_counts_and_no_other(device):
    made, prints = on(device)
    before = prints.of(range(6)).tolist()
    assert len(set(before)) == 6
    for layer in range(2):
        for word in (0, 47):
            bits = made[layer][3].view(-1).view(torch.int16)
            bits[word] ^= 1
            after = prints.of(range(6)).tolist()
            assert [at for at in range(6) if after[at] != before[at]] == [3]
            bits[word] ^= 1
    assert prints.of(range(6)).tolist() == before


def test_the_same_words_elsewhere_are_other_bytes(device):
    """Two words of a block swapped, two blocks of two layers swapped, and a NaN with another payload."""
    made, prints = on(device)
    before = prints.of([1, 2]).tolist()
    made[0][1], made[1][1] = made[1][1].clone(), made[0][1].clone()
    assert prints.of([1]).tolist() != before[:1]
    flat = made[0][2].view(-1).view(torch.int32)
    flat[0], flat[5] = flat[5].clone(), flat[0].clone()
    assert prints.of([2]).tolist() != before[1:]
    bits = made[0][4].view(-1).view(torch.int16)
    found = []
    for payload in (0x7FC0, 0x7FC1):
        bits[7] = payload
        found += prints.of([4]).tolist()
    assert found[0] != found[1]


def test_axes_within_a_block_may_be_in_any_order(device):
    made, _ = on(device)
    plain = BlockFingerprints(made).of([2, 5]).tolist()
    assert BlockFingerprints([cache.transpose(1, 3) for cache in made]).of([2, 5]).tolist() == plain


def test_a_first_read_is_compared_with_what_was_committed_for_the_hash(device):
    made, prints = on(device)
    prints.commit({1: "a", 2: "b"})
    # A copy of block 1, as an offload and a load make it, and one that was made too early.
    for cache in made:
        cache[3] = cache[1]
    prints.read("reader", {1: "a", 3: "a", 2: "a", 4: "never"})
    found = prints.check(wait=True)
    assert found == [OtherBytes("reader", 2, True), OtherBytes("reader", 4, False)]
    assert [str(one) for one in found] == [
        "reader reads block 2: other bytes than were committed for its hash",
        "reader reads block 4: a hash nobody committed",
    ]
    assert prints.check(wait=True) == []


def test_only_the_first_read_of_a_hash_is_compared_until_it_is_committed_anew(device):
    made, prints = on(device)
    prints.commit({1: "a"})
    prints.read("first", {1: "a"})
    for cache in made:
        cache[3] = cache[1]
    made[0][1] += 1
    prints.read("second", {1: "a"})
    assert (prints.reads, prints.check(wait=True)) == (1, [])
    # Computed again by another request, in another batch: both are right.
    prints.commit({1: "a"})
    prints.read("third", {1: "a", 3: "a"})
    assert (prints.reads, prints.check(wait=True)) == (3, [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], ": expected at least one tensor, got none"),
        ([torch.zeros(4, 3, dtype=torch.int8)], r"\[0\]: expected a multiple of 4 bytes a block, got 3"),
        ([torch.zeros(4, 3, dtype=torch.half)], r"\[0\]: expected a multiple of 4 bytes a block, got 6"),
        ([torch.zeros(2, 4, 8).transpose(0, 1)], r"\[0\]: expected blocks outermost, each in one piece"),
        # Each block begins inside the one before.
        ([torch.zeros(16).as_strided((3, 8), (4, 1))], r"\[0\]: expected blocks outermost, each in one"),
        # Every second value: what lies between would count, and the other half would not.
        ([torch.zeros(4, 8)[:, ::2]], r"\[0\]: expected blocks outermost, each in one piece"),
        ([torch.zeros(4, 4), torch.zeros(3, 4)], r"\[1\]: expected 4 blocks, got 3"),
        ([torch.zeros(4, 4), torch.zeros(5, 4)], r"\[1\]: expected 4 blocks, got 5"),
    ],
)
def test_caches_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ValueError, match=f"^kv_caches{message}"):
        BlockFingerprints(given)


@pytest.mark.parametrize("block", [-1, 6])
def test_a_block_that_is_not_there_is_refused(device, block):
    _, prints = on(device)
    with pytest.raises(ValueError, match=rf"blocks: expected ids from 0 to 5, got \[{block}\]"):
        prints.of([block])


def test_blocks_longer_than_a_program_reads_at_a_time_and_with_gaps_between(device):
    wide = torch.arange(3 * 2 * (WORDS + 2), dtype=torch.int32, device=device).view(3, -1)
    cache = wide[:, : WORDS + 2]
    prints = BlockFingerprints([cache])
    before = prints.of([0, 1, 2]).tolist()
    assert before == BlockFingerprints([cache.contiguous()]).of([0, 1, 2]).tolist()
    for at in (0, WORDS - 1, WORDS, WORDS + 1):
        cache[1, at] += 1
        expected = [True, False, True]
        assert [a == b for a, b in zip(prints.of([0, 1, 2]).tolist(), before, strict=True)] == expected
        cache[1, at] -= 1
    wide[:, WORDS + 2] = 0
    assert prints.of([0, 1, 2]).tolist() == before
    assert prints.of([]).tolist() == []


def test_equal_words_count_however_many_there_are(device):
    """A block of zeros is not one of another length, nor the same in another layer's place."""
    zeros = [torch.zeros(2, words, dtype=torch.int32, device=device) for words in (4, 5)]
    found = [BlockFingerprints(caches).of([0]).item() for caches in ([z] for z in zeros)]
    assert len({0, *found}) == 3
    moved = [torch.zeros(2, 4, dtype=torch.int32, device=device) for _ in range(2)]
    prints = BlockFingerprints(moved)
    moved[0][0, 1] = moved[1][1, 1] = 7
    one, other = prints.of([0, 1]).tolist()
    assert one != other


def test_a_check_waits_for_nothing_unless_told(device):
    """What the device has not finished is left to a later call, in order."""
    (_, prints), waits = on(device), []

    class Event:
        there = False

        def query(self):
            return self.there

        def synchronize(self):
            waits.append(self)

    events = [Event(), Event()]
    prints.commit({1: "a"})
    prints.read("reader", {2: "a"})
    if device == "cuda":
        torch.cuda.synchronize()
    prints._asked = [one._replace(ready=event) for one, event in zip(prints._asked, events, strict=True)]
    assert (prints.check(), len(prints._asked), waits) == ([], 2, [])
    events[0].there = True
    assert (prints.check(), len(prints._asked), waits) == ([], 1, [])
    assert (prints.check(wait=True), waits) == ([OtherBytes("reader", 2, True)], [events[1]])
