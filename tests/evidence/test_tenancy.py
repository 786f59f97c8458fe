"""The log answers which block, whose bits, how long ago; and suspects nobody without a reason."""

from __future__ import annotations

import pytest

from staleproof.evidence import TenancyLog


def _told(log, owner):
    return [str(suspect) for suspect in log.explain(owner)]


def test_a_block_that_changes_hands_unzeroed_names_its_last_writer():
    log = TenancyLog()
    log.allocated([7], "A", "fp32")
    log.wrote([7], "A", "fp32", whole=True)
    for _ in range(3):
        log.advance()
    log.ended("A")
    log.allocated([7], "B", "e4m3")
    log.wrote([7], "B", "e4m3")
    (suspect,) = log.explain("B")
    assert (suspect.block, suspect.kind, suspect.whose, suspect.steps_ago) == (7, "stale", "A", 3)
    assert (suspect.written_as, suspect.read_as) == ("fp32", "e4m3")
    assert _told(log, "B") == [
        "block 7: fp32 bits of A, 3 steps old, not zeroed, read as e4m3 from step 3 on"
    ]
    assert log.explain("A") == []


def test_zeroing_before_the_first_write_clears_the_suspicion():
    log = TenancyLog()
    log.allocated([7], "A", "fp32")
    log.wrote([7], "A", "fp32")
    log.allocated([7], "B", "e4m3")
    log.zeroed([7])
    log.wrote([7], "B", "e4m3")
    assert log.explain("B") == []


def test_a_block_that_is_zeroed_before_it_changes_hands_is_above_suspicion():
    log = TenancyLog()
    log.allocated([7], "A", "fp32")
    log.wrote([7], "A", "fp32")
    log.ended("A")
    log.zeroed([7])
    log.allocated([7], "B", "e4m3")
    assert log.explain("B") == []


def test_a_state_that_is_written_whole_is_above_suspicion():
    log = TenancyLog()
    log.wrote([7], "A", "e4m3")
    log.allocated([7], "B", "fp32")
    assert len(log.explain("B")) == 1
    log.wrote([7], "B", "fp32")
    assert len(log.explain("B")) == 1
    log.wrote([7], "B", "fp32", whole=True)
    assert log.explain("B") == []


@pytest.mark.parametrize("whole", [False, True])
def test_a_late_write_of_the_last_owner_clears_nothing(whole):
    log = TenancyLog()
    log.allocated([7], "A", "fp32")
    log.wrote([7], "A", "fp32")
    log.advance()
    log.allocated([7], "B", "e4m3")
    log.wrote([7], "A", "fp32", whole=whole)
    (suspect,) = log.explain("B")
    assert (suspect.whose, suspect.steps_ago) == ("A", 1)
    # Nor is it a write of B, which zeroing could wipe.
    log.zeroed([7])
    assert log.explain("B") == []


def test_a_wiped_block_that_its_owner_writes_whole_again_lost_nothing():
    log = TenancyLog()
    log.allocated([3], "A", "e4m3")
    log.wrote([3], "A", "e4m3")
    log.zeroed([3])
    log.wrote([3], "A", "e4m3")
    assert [suspect.kind for suspect in log.explain("A")] == ["wiped"]
    log.wrote([3], "A", "e4m3", whole=True)
    assert log.explain("A") == []
    # What is zeroed after that is lost again.
    log.advance()
    log.zeroed([3])
    assert [(suspect.kind, suspect.step) for suspect in log.explain("A")] == [("wiped", 1)]


def test_a_live_block_that_is_zeroed_was_wiped():
    log = TenancyLog()
    log.allocated([3], "A", "e4m3")
    log.wrote([3], "A", "e4m3")
    log.advance()
    log.zeroed([3])
    assert _told(log, "A") == ["block 3: wiped in step 1, 1 step after A wrote e4m3 there"]


def test_a_block_that_is_zeroed_again_for_its_next_owner_was_wiped_all_the_same():
    log = TenancyLog()
    log.allocated([3], "A", "e4m3")
    log.wrote([3], "A", "e4m3")
    log.advance()
    log.zeroed([3])
    log.advance()
    log.ended("A")
    log.zeroed([3])
    assert _told(log, "A") == ["block 3: wiped in step 1, 1 step after A wrote e4m3 there"]


def test_what_happens_to_a_block_after_its_owner_has_ended_hurts_only_those_who_hit_it():
    log = TenancyLog()
    log.allocated([3], "A", "e4m3")
    log.wrote([3], "A", "e4m3")
    log.advance()
    log.ended("A")
    log.zeroed([3])
    assert log.explain("A") == []
    log.advance()
    log.hit([3], "B")
    (suspect,) = log.explain("B")
    assert (suspect.kind, suspect.whose, suspect.via) == ("wiped", "A", ("A",))


def test_a_prefix_hit_leads_to_the_writer_and_to_whom_it_had_it_from():
    log = TenancyLog()
    log.wrote([1], "old", "fp32")
    log.allocated([1, 2], "A", "e4m3")
    log.wrote([1, 2], "A", "e4m3")
    log.advance()
    log.hit([2], "B")
    log.allocated([5], "B", "e4m3")
    log.wrote([5], "B", "e4m3")
    log.advance()
    log.hit([5], "C")
    (said,) = _told(log, "C")
    assert said.startswith("block 1: fp32 bits of old, 0 steps old, not zeroed, read as e4m3 from")
    assert said.endswith("step 0 on, through the cached blocks of B, A")


def test_what_reached_the_writer_after_it_filled_the_block_is_not_in_the_block():
    log = TenancyLog()
    log.wrote([9], "old", "fp32")
    log.allocated([1], "A", "e4m3")
    log.wrote([1], "A", "e4m3")
    log.advance()
    log.allocated([9], "A", "e4m3")
    log.wrote([9], "A", "e4m3")
    log.hit([1], "B")
    assert len(log.explain("A")) == 1
    assert log.explain("B") == []


def test_owners_that_hit_each_other_end():
    log = TenancyLog()
    log.allocated([1], "A", "e4m3")
    log.allocated([2], "B", "e4m3")
    log.wrote([1], "A", "e4m3")
    log.wrote([2], "B", "e4m3")
    log.hit([2], "A")
    log.hit([1], "B")
    assert log.explain("A") == []


def test_a_hit_on_a_block_that_its_owner_never_wrote_reads_what_the_owner_found_there():
    log = TenancyLog()
    log.wrote([1, 2], "A", "fp32")
    log.advance()
    log.allocated([1, 2], "B", "e4m3")
    log.zeroed([2])
    log.hit([1, 2], "C")
    assert [(s.block, s.whose, s.via) for s in log.explain("C")] == [(1, "A", ("B",))]


def test_the_log_forgets_the_oldest_owner_and_keeps_its_last_writes():
    log = TenancyLog(keep=2)
    for owner, block in (("A", 1), ("B", 2), ("C", 1)):
        log.allocated([block], owner, "e4m3")
        log.wrote([block], owner, "e4m3")
    with pytest.raises(ValueError, match="owner: expected an owner in the log, got A"):
        log.explain("A")
    assert log.explain("C")[0].whose == "A"


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="keep: expected at least 1 owner, got 0"):
        TenancyLog(keep=0)
    with pytest.raises(ValueError, match="block_ids: expected blocks that were allocated before"):
        TenancyLog().hit([4], "A")


def test_explanations_are_in_the_order_of_steps_and_own_blocks_come_first():
    log = TenancyLog()
    log.wrote([1, 2, 3, 4], "A", "fp32")
    log.advance()
    for blocks in ([3], [4]):
        log.allocated(blocks, "B", "e4m3")
        log.wrote(blocks, "B", "e4m3")
        log.advance()
    log.hit([3], "C")
    log.allocated([2, 1], "C", "e4m3")
    found = [(s.block, s.step, s.steps_ago, s.via) for s in log.explain("C")]
    assert found == [(1, 3, 3, ()), (2, 3, 3, ()), (3, 1, 1, ("B",))]
    assert [s.block for s in log.explain("B")] == [3, 4]


def test_as_many_owners_are_remembered_as_asked_and_the_oldest_goes_first():
    for keep in (1, 2):
        log = TenancyLog(keep=keep)
        for owner in "ABC":
            log.allocated([1], owner, "fp32")
        assert [owner for owner in "ABC" if owner in log._owners] == [*"ABC"[3 - keep :]]
    with pytest.raises(ValueError, match="keep: expected at least 1 owner, got 0"):
        TenancyLog(keep=0)
