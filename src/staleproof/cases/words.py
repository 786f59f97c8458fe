"""Every verdict word, once: the family of questions it answers, what it means for a request, one sentence.

A *family* belongs to one kind of question. The outcome of a word says what happened to the requests, and
gives the word its colour. Whether a verdict was expected is another thing: a faulty variant that leaks is
expected to leak, and it is still bad.

>>> outcome("rows", "leaked").value, outcome("buffer", "refused").value
('bad', 'good')
>>> outcome("rows", "leeked")
Traceback (most recent call last):
    ...
staleproof.cases.words.UnknownWordError: verdict: expected a word of the family rows (clean; pad_only; \
leaked; live_born; hidden; wrong, finite; not run), got 'leeked'
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class Outcome(StrEnum):
    """What a verdict means for the requests that were served."""

    GOOD = "good"
    BAD = "bad"
    OPEN = "open"
    NOT_RUN = "not run"


class Word(NamedTuple):
    """One verdict of a family.

    Attributes:
        outcome: its colour follows from it.
        says: one sentence for a reader.
    """

    outcome: Outcome
    says: str


class UnknownWordError(ValueError):
    """A verdict, or a family, that nobody defined."""


NOT_RUN = "not run"
FIX = "fix"
FIXED, NOT_FIXED, NOT_REPRODUCED, WRONG = "fixed", "not fixed", "not reproduced", "wrong"

GOOD, BAD, OPEN = Outcome.GOOD, Outcome.BAD, Outcome.OPEN
_ABSENT = Word(Outcome.NOT_RUN, "This machine lacks something that the question needs; the note says what.")


def _family(
    good: Mapping[str, str] | None = None,
    bad: Mapping[str, str] | None = None,
    open_: Mapping[str, str] | None = None,
) -> Mapping[str, Word]:
    said = ((GOOD, good), (BAD, bad), (OPEN, open_))
    return {word: Word(meaning, says) for meaning, words in said for word, says in (words or {}).items()}


_NAN = "A live row holds NaN."
_FINITE = "A live row holds a wrong number that no check for NaN sees."
_ILLEGAL = "The kernel reads or writes outside its memory, and the process ends."

FAMILIES: Mapping[str, Mapping[str, Word]] = {
    FIX: _family(
        {FIXED: "Broken fails, fixed passes, broken fails again, and the result equals a reference."},
        {
            NOT_FIXED: "The fault is there with the remedy, too.",
            WRONG: "The fault is gone, and the result is not right.",
        },
        {NOT_REPRODUCED: "A run without the remedy shows no fault, so nothing is shown about the remedy."},
    ),
    # What a kernel does about a clause of the padding contract.
    "contract": _family(
        {"holds": "The kernel keeps the clause on all inputs of the probe."},
        {"breaks": "The kernel breaks the clause; the note says what came."},
        {"undefined": "It breaks the clause, and its documentation says that the case is the caller's."},
    ),
    "rows": _family(
        {"clean": "No row holds a NaN."},
        {
            "pad_only": "Padding rows hold NaN and no live row does.",
            "leaked": "A live row is bad, and the same input with clean padding is good.",
            "live_born": "A live row is bad by itself.",
            "hidden": "A request that is sick by itself gets an answer that looks sound.",
            "wrong, finite": _FINITE,
        },
    ),
    "empty row": _family(
        {"zero": "The row of an empty request is written as zeros."},
        {
            "unwritten": "The row keeps whatever the memory held.",
            "partly written": "Part of the row keeps whatever the memory held.",
            "nan": "The kernel computes a NaN for the row.",
            "finite": "The row holds numbers that are not zero.",
            "live rows wrong": "Live rows differ from the reference, so nothing is said of empty ones.",
        },
    ),
    "padding NaN": _family(
        {"no padding NaN": "Padding rows hold no NaN."}, {"padding NaN": "Padding rows hold NaN."}
    ),
    "padding content": _family(
        {"ignored": "Live rows have the same bits whatever padding holds."},
        {"decides": "Live rows change with what padding holds."},
    ),
    "buffer": _family(
        {
            "clean": "Nothing is written outside the buffer.",
            "safe": "A captured graph writes into memory that is still its own.",
            "stays inside": "All writes stay inside the buffer.",
            "refused": "The request to grow is refused with an error.",
        },
        {
            "writes freed memory": "A captured graph writes into memory that was freed.",
            "writes past its end": "Rows are written behind the end of the buffer.",
            "refused too late": "The request is refused after rows were written.",
            "overwrites a tenant": "A captured graph writes into memory that belongs to someone else now.",
        },
    ),
    "server": _family(
        {"lives": "The server survives its first requests."}, {"dies": "The server runs out of memory."}
    ),
    "ledger": _family(
        {"fits": "Memory kept after the profile fits what the profile left."},
        {"will not fit": "More is kept after the profile than it left."},
    ),
    "profile": _family(
        {
            "nothing kept": "No memory is kept that the profile would have to see.",
            "seen": "The profile sees the buffers.",
        },
        {"unseen": "The profile sees none of the buffers."},
    ),
    "layers": _family(
        {"separate": "No layer's rows reach another's."}, {"mixed": "Rows of one layer reach another's."}
    ),
    "shape": _family(
        {"right shape": "The buffer fits the second model."},
        {"wrong shape": "The buffer has the first model's shape."},
    ),
    "shared buffer": _family(
        {"one buffer": "Two threads get one buffer."}, {"two buffers": "Two threads make a buffer each."}
    ),
    "empty rows": _family(
        {"cleared": "Rows of empty requests are zeros."},
        {
            "stale": "They hold what their memory held before the step.",
            "its own": "They hold the layer's own rows of an earlier step.",
            "another layer's": "They hold another layer's rows.",
            "nobody's": "They hold rows that no layer of this step wrote.",
        },
    ),
    "captured kernels": _family(
        {"the same kernels": "The graph launches what it launched without the remedy."},
        open_={
            "one kernel more": "The graph launches one kernel more than without the remedy.",
            "other kernels": "The graph launches other kernels than without the remedy.",
        },
    ),
    "outside torch": _family(
        {
            "named": "The ledger counts the bytes and says whose they are.",
            "counted, not named": "The ledger counts the bytes and cannot say whose they are.",
        },
        {
            "counted as free": "The ledger takes the bytes for free memory.",
            "missed": "The ledger does not notice the bytes.",
        },
    ),
    "utilisation": _family(
        {"lives": "The server lives at every utilisation that was tried."},
        {
            "dies from one on": "The server lives below one utilisation and dies from it on.",
            "dies at some": "The server dies at some utilisations and lives at a higher one.",
        },
    ),
    # What a cell of a notebook saw by itself: equal to what its sentence claims, or not.
    "observation": _family({"as said": "The cell saw it."}, {"otherwise": "The cell saw something else."}),
    "prediction": _family(
        {"confirmed": "A machine that had been absent gave the predicted verdict."},
        {"refuted": "It gave another verdict."},
        {"open": "No such machine has answered."},
    ),
    "measurement": _family(open_={"measured": "The numbers are in the finding; no bound was set for them."}),
    # Bytes behind an operand: which are read, what they may hold, and what they make of a result.
    "scales": _family(
        {
            "right": "The result equals the reference, whatever lies behind the scales.",
            "inside": "The kernel reads no byte behind the scales.",
            "never 0xff": "Memory of this kind holds no byte 0xff.",
        },
        {
            "NaN": _NAN,
            "wrong, finite": _FINITE,
            "past the end": "The kernel reads bytes behind the scales.",
            "always 0xff": "Memory of this kind always holds a byte 0xff.",
            "illegal memory access": _ILLEGAL,
        },
        {"0xff now and then": "Memory of this kind sometimes holds a byte 0xff."},
    ),
    "arithmetic": _family(
        {
            "within 1 %": "The prediction is within one per cent of what came out.",
            "agrees": "The stated, the computed and the counted figure agree.",
        },
        {"off": "The prediction is further off than that."},
    ),
    "bits": _family(
        open_={
            "some": "Some numbers, read in the other format, are NaN.",
            "none": "No number, read in the other format, is NaN.",
            "nearly all": "Nearly all padding rows hold NaN.",
        }
    ),
    "answers": _family(
        {"clean": "All answers are those of a cache that was zeroed."},
        {"NaN": _NAN, "wrong, finite": _FINITE},
    ),
    "host memory": _family(
        {"flat": "The host's lists stay as long as they were."},
        {"grows": "The host's lists grow with each request."},
    ),
    "block list": _family(
        {"seen": "This way of looking shows the list that grows."},
        {"hidden": "This way of looking does not show the list that grows."},
    ),
    "experts": _family(
        {
            "distinct": "No token names an expert twice, and the choice is the best.",
            "skipped": "Padding rows get the id that stands for no expert.",
            "refused": "The call is refused with an error.",
        },
        {
            "duplicates": "A token names an expert twice.",
            "distinct, not the best": "No expert is named twice, but a better one is left out.",
            "NaN weights": "No expert is named twice, and a weight is NaN.",
            "always chosen": "One expert is chosen whatever the scores are.",
            "first experts": "Every row gets the experts 0, 1, 2, ..., whatever its scores are.",
            "nan": "A token's log-probability is NaN.",
        },
    ),
    "padding id": _family(
        {"passes over": "The kernel passes over the id -1."},
        {"takes the last expert": "The id -1 counts as the last expert."},
    ),
    "access": _family(
        {
            "right": "The result equals the reference.",
            "refused": "The call is refused with an error before it reads.",
            "no error": "The sanitizer reports nothing.",
        },
        {
            "illegal access": _ILLEGAL,
            "illegal memory access": _ILLEGAL,
            "invalid read": "The sanitizer reports a read outside of any allocation.",
            "wrong, silent": "The result is wrong and nothing says so.",
            "NaN": _NAN,
            "timed out": "The call does not end in time.",
            "died": "The process ends without an error message.",
        },
    ),
    "padding rows": _family(
        {"none": "No step with padding has a NaN in a padding row."},
        {
            "some": "Some steps with padding have a NaN in a padding row.",
            "nearly all": "Nine of ten steps with padding, or more, have a NaN in a padding row.",
        },
    ),
    "result": _family(
        {"right": "The result equals the reference."}, {"wrong": "The result is another than the reference."}
    ),
    "hits": _family(
        {"written": "Every slot below a hit of the prefix cache holds the keys and values of its prefix."},
        {
            "a stranger's": "A request reads keys and values of another request as its own prefix.",
            "unwritten": "A request reads slots that nobody wrote for its prefix.",
        },
    ),
    "answers to a hit": _family(
        {"its own": "No answer shows a slot that nobody wrote for it."},
        {
            "NaN": "An answer comes from slots that nobody wrote since they were filled with NaN.",
            "another tenant's": "An answer is what only another tenant had sent.",
        },
    ),
    "same": _family(
        {
            "the same": "Both give the same.",
            "same bits": "Both give the same bits.",
            "same bytes": "Both write the same bytes.",
            "same values": "Both give the same values.",
        },
        {
            "differ": "They differ.",
            "other bits": "The bits differ.",
            "writes nothing": "The call leaves its outputs as it found them.",
        },
    ),
    "cure": _family(
        {"cured": "With this remedy the cause does no harm."},
        {
            "not cured": "With this remedy the cause does the same harm.",
            "made worse": "With this remedy the cause does more harm over at least one content of memory.",
        },
        {
            "helped": "With this remedy the cause does less harm, not none.",
            "not reproduced": "Without the remedy the cause does no harm, or not twice the same.",
        },
    ),
    "random padding": _family(
        bad={
            "NaN or right": "Each draw of the padding gives a NaN or the right result.",
            "NaN or wrong": "Each draw of the padding gives a NaN or a wrong result.",
        }
    ),
    "id width": _family(
        {
            "clean": "The result is right with ids of this width.",
            "refused": "Ids of this width are refused with an error.",
        },
        {"wrong, finite": _FINITE, "NaN": _NAN},
    ),
    "draws": _family(
        {"distinct": "No token gets an expert twice."},
        {"an expert twice": "Some tokens get an expert twice."},
        {"another rate": "Tokens get an expert twice, at another rate than the computed one."},
    ),
}
# Of the engine's questions.
FAMILIES = {
    **FAMILIES,
    "live logits": _family(
        {"same bits": "Logits of live rows have the same bits."},
        {
            "other bits": "Logits of live rows differ in some bits.",
            "padding reaches live rows": "Logits of live rows change with what padding rows hold.",
            "nan": "Logits of live rows hold NaN.",
            "differ with the plugin": "Equal engines agree, and one with the plugin gives other bits.",
        },
        {
            "differ without it too": "Two engines without the plugin differ as well.",
            "other bits of three again": "The same three requests give other bits when asked again.",
            "nan with zeroing too": "Logits hold NaN with zeroing as well.",
            "differ with it too": "Logits differ with zeroing as well.",
            "no stale block": "No block held anything of its last tenant, so nothing was asked.",
            "differ within an engine": "One engine gives two answers to one request.",
            "differ between equal engines": "Two equal engines give other bits.",
        },
    ),
    "zeroing": _family(
        {"all zeroed": "Every new block was zeroed before it was read."},
        {"blocks not zeroed": "Blocks were read that nobody had zeroed."},
    ),
    "account": _family(
        {"balances": "The phases of the start add up to what the device reports."},
        {"does not balance": "Memory is used that no phase of the start accounts for."},
    ),
    "death": _family(
        {"predicted": "The step that runs out of memory is the predicted one."},
        {
            "not predicted": "The ledger did not foresee the end, or was off by more than one per cent.",
            "dies without the fault": "The engine ends without the fault as well.",
        },
        {"lives": "The engine lives with the fault."},
    ),
    "memory of graphs": _family(
        {"counted": "The engine counts the memory of its graphs."},
        {"not counted": "The engine leaves the memory of its graphs out."},
    ),
    "counts": _family(
        {"exact": "The watch counts what the spies beside it count."},
        {"not exact": "The watch counts something else than the spies beside it."},
    ),
    "cost": _family(
        {"under 1 %": "The interval lies below one per cent.", "under 3 %": "It lies below three per cent."},
        {"over 1 %": "The interval lies above one per cent.", "over 3 %": "It lies above three per cent."},
        {
            "around 1 %": "One per cent is inside the interval.",
            "around 3 %": "Three per cent is inside the interval.",
        },
    ),
}


def word(family: str, verdict: str) -> Word:
    """The word of a verdict.

    Args:
        family: a key of :data:`FAMILIES`.
        verdict: a word of it, or ``not run``, which every family has.

    Raises:
        UnknownWordError: naming the family and its words.
    """
    if family not in FAMILIES:
        raise UnknownWordError(f"words: expected a family of {', '.join(FAMILIES)}; got {family!r}")
    if verdict == NOT_RUN:
        return _ABSENT
    if verdict not in FAMILIES[family]:
        known = "; ".join((*FAMILIES[family], NOT_RUN))
        raise UnknownWordError(f"verdict: expected a word of the family {family} ({known}), got {verdict!r}")
    return FAMILIES[family][verdict]


def outcome(family: str, verdict: str) -> Outcome:
    """Good, bad, open or not run; see :func:`word`.

    >>> outcome("fix", "not run").value
    'not run'
    """
    return word(family, verdict).outcome
