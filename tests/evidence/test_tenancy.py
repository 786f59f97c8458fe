"""The log answers which block, whose bits, how long ago; and suspects nobody without a reason."""

from __future__ import annotations

import pytest

from staleproof.evidence import TenancyLog


def log_of(story: str, **options: int) -> TenancyLog:
    """A log of these events: who takes, writes, fills (writes whole) or hits which blocks, as what."""
    log = TenancyLog(**options)
    for event in story.split("; "):
        match event.replace(",", " ").split():
            case ["step"]:
                log.advance()
            case ["zero", *blocks]:
                log.zeroed([*map(int, blocks)])
            case [owner, "ends"]:
                log.ended(owner)
            case [owner, "hits", *blocks]:
                log.hit([*map(int, blocks)], owner)
            case [owner, "takes", *blocks, kind]:
                log.allocated([*map(int, blocks)], owner, kind)
            case [owner, "writes" | "fills" as how, *blocks, kind]:
                log.wrote([*map(int, blocks)], owner, kind, whole=how == "fills")
    return log


def _told(log: TenancyLog, owner: str) -> list[str]:
    return [str(suspect) for suspect in log.explain(owner)]


def stale(
    request: str, block: int, whose: str, age: str, at: int, via: str = "", kinds: str = "fp32 e4m3"
) -> str:
    wrote, read = kinds.split()
    by = via[-1] if via else request
    text = f"block {block}: {wrote} bits of request {whose}, {age} old, not zeroed, read as {read}"
    text += f" by request {by} from step {at} on"
    return text + (f"; request {request} used cached blocks of request {via}" if via else "")


A, B = "A takes 7 fp32; A writes 7 fp32", "B takes 7 e4m3"
OF_A = [stale("B", 7, "A", "1 step", 1)]
STATE, NOT_YET = "A writes 7 e4m3; B takes 7 fp32", [stale("B", 7, "A", "0 steps", 0, kinds="e4m3 fp32")]
LIVE, WIPED = (
    "A takes 3 e4m3; A writes 3 e4m3",
    "block 3: wiped in step 1, 1 step after request A wrote e4m3 there",
)
AGAIN = f"{LIVE}; zero 3; A writes 3 e4m3"
BOTH = "A takes 1 e4m3; B takes 2 e4m3; A writes 1 e4m3; B writes 2 e4m3"
FIRST = "A takes 1, 2 e4m3; A writes 1, 2 e4m3"
THIRD, FOURTH = (f"B takes {block} e4m3; B writes {block} e4m3" for block in (3, 4))
# What happens, and what is told of some owners.
STORIES = {
    "a block that changes hands unzeroed names its last writer": (
        "A takes 7 fp32; A fills 7 fp32; step; step; step; A ends; B takes 7 e4m3; B writes 7 e4m3",
        {"A": [], "B": [stale("B", 7, "A", "3 steps", 3)]},
    ),
    "zeroed before the first write": (f"{A}; {B}; zero 7; B writes 7 e4m3", {"B": []}),
    "zeroed before it changes hands": (f"{A}; A ends; zero 7; {B}", {"B": []}),
    "a state that nobody has written yet": (STATE, {"B": NOT_YET}),
    "a state that is written in part": (f"{STATE}; B writes 7 fp32", {"B": NOT_YET}),
    "a state that is written whole": (f"{STATE}; B writes 7 fp32; B fills 7 fp32", {"B": []}),
    "a late write of the last owner clears nothing": (f"{A}; step; {B}; A writes 7 fp32", {"B": OF_A}),
    "nor one of the whole block": (f"{A}; step; {B}; A fills 7 fp32", {"B": OF_A}),
    "nor is it a write that zeroing could wipe": (f"{A}; step; {B}; A writes 7 fp32; zero 7", {"B": []}),
    "nor is one of the whole block": (f"{A}; step; {B}; A fills 7 fp32; zero 7", {"B": []}),
    "wiped and written again": (
        AGAIN,
        {"A": ["block 3: wiped in step 0, 0 steps after request A wrote e4m3 there"]},
    ),
    "wiped and written whole again": (f"{AGAIN}; A fills 3 e4m3", {"A": []}),
    "zeroed once more after that": (f"{AGAIN}; A fills 3 e4m3; step; zero 3", {"A": [WIPED]}),
    "a live block that is zeroed was wiped": (f"{LIVE}; step; zero 3", {"A": [WIPED]}),
    "zeroed again for its next owner": (f"{LIVE}; step; zero 3; step; A ends; zero 3", {"A": [WIPED]}),
    "zeroed after its owner has ended": (f"{LIVE}; step; A ends; zero 3", {"A": []}),
    "hit after that": (
        f"{LIVE}; step; A ends; zero 3; step; B hits 3",
        {"B": [f"{WIPED}; request B used cached blocks of request A"]},
    ),
    "a prefix hit leads to the writer and to whom it had it from": (
        f"old writes 1 fp32; {FIRST}; step; B hits 2; B takes 5 e4m3; B writes 5 e4m3; step; C hits 5",
        {"C": [stale("C", 1, "old", "0 steps", 0, via="B, which used those of request A")]},
    ),
    "what reached the writer after it filled the block is not in the block": (
        "old writes 9 fp32; A takes 1 e4m3; A writes 1 e4m3; step; A takes 9 e4m3; A writes 9 e4m3; B hits 1",
        {"A": [stale("A", 9, "old", "1 step", 1)], "B": []},
    ),
    "nor is what was wiped after it": (
        "A takes 1, 9 e4m3; A writes 1, 9 e4m3; step; zero 9; B hits 1",
        {"A": ["block 9: wiped in step 1, 1 step after request A wrote e4m3 there"], "B": []},
    ),
    "owners that hit each other end": (f"{BOTH}; A hits 2; B hits 1", {"A": []}),
    "a hit on a block that its owner never wrote reads what the owner found there": (
        "A writes 1, 2 fp32; step; B takes 1, 2 e4m3; zero 2; C hits 1, 2",
        {"C": [stale("C", 1, "A", "1 step", 1, via="B")]},
    ),
    "in the order of steps, own blocks first": (
        f"A writes 1, 2, 3, 4 fp32; step; {THIRD}; step; {FOURTH}; step; C hits 3; C takes 2, 1 e4m3",
        {
            "B": [stale("B", 3, "A", "1 step", 1), stale("B", 4, "A", "2 steps", 2)],
            "C": [
                *(stale("C", n, "A", "3 steps", 3) for n in (1, 2)),
                stale("C", 3, "A", "1 step", 1, via="B"),
            ],
        },
    ),
}


def test_what_is_told_of_an_owner():
    for name in STORIES:
        story, told = STORIES[name]
        log = log_of(story)
        assert {owner: _told(log, owner) for owner in told} == told


def test_a_suspect_has_its_block_kind_writer_age_and_types():
    (suspect,) = log_of(f"{A}; step; {B}").explain("B")
    assert (suspect.block, suspect.kind, suspect.whose, suspect.steps_ago) == (7, "stale", "A", 1)
    assert (suspect.written_as, suspect.read_as, suspect.via) == ("fp32", "e4m3", ())
    (suspect,) = log_of(f"{LIVE}; step; A ends; zero 3; B hits 3").explain("B")
    assert (suspect.kind, suspect.whose, suspect.step, suspect.via) == ("wiped", "A", 1, ("A",))


@pytest.mark.parametrize("keep", [1, 2])
def test_as_many_owners_are_remembered_as_asked_with_the_last_writes_of_the_others(keep):
    log = log_of("; ".join(f"{o} takes 1 fp32; {o} writes 1 fp32" for o in "ABC"), keep=keep)
    assert [suspect.whose for suspect in log.explain("C")] == ["B"]
    for number, owner in enumerate("ABC"):
        if number >= 3 - keep:
            log.explain(owner)
        else:
            with pytest.raises(ValueError, match=f"owner: expected an owner in the log, got {owner}"):
                log.explain(owner)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="keep: expected at least 1 owner, got 0"):
        TenancyLog(keep=0)
    with pytest.raises(ValueError, match="block_ids: expected blocks that were allocated before"):
        TenancyLog().hit([4], "A")
