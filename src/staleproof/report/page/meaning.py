"""What a verdict means to a reader, for its colour: harm, clean, cured, or none of these.

The colour says what happened to the requests. Whether the verdict was expected is another thing, and
has a mark of its own: a faulty variant that leaks is expected to leak, and it is still harm.

>>> [meaning(word) for word in ("leaked", "clean", "fixed", "pad_only", "not run")]
['harm', 'clean', 'cured', 'open', 'absent']
"""

from __future__ import annotations

from staleproof.cases.finding import NOT_RUN

HARM, CLEAN, CURED, OPEN, ABSENT = "harm", "clean", "cured", "open", "absent"

_HARM = frozenset(
    {
        *("leaked", "live_born", "NaN", "nan", "wrong", "wrong, finite", "wrong, silent", "wrong shape"),
        *("illegal access", "illegal memory access", "invalid read", "dies", "will not fit", "grows"),
        *("duplicates", "an expert twice", "two buffers", "mixed", "decides", "NaN or right", "NaN or wrong"),
        *("not fixed", "writes past its end", "writes freed memory", "overwrites a tenant"),
        *("breaks", "takes the last expert", "another layer's", "stale", "unwritten", "refuted", "hangs"),
    }
)
_CLEAN = frozenset(
    {
        *("clean", "zero", "right", "right shape", "lives", "fits", "distinct", "ignored", "separate"),
        *("no padding NaN", "stays inside", "safe", "refused", "its own", "cleared", "flat", "no error"),
        *("one buffer", "the same", "same bytes", "same values", "passes over", "skipped", "holds"),
        *("nothing kept", "seen", "confirmed", "the same kernels"),
    }
)
_CURED = frozenset({"fixed", "cured"})
# Verdicts with a number or a list behind these words.
_HARM_BEGINS = ("dies from", "worse in", "made worse")


def meaning(verdict: str) -> str:
    """The meaning of a verdict: ``harm``, ``clean``, ``cured``, ``absent`` or ``open``.

    A word that is not listed is ``open`` and gets no colour: better none than a wrong one.

    Args:
        verdict: as a finding has it.
    """
    if verdict == NOT_RUN:
        return ABSENT
    if verdict in _HARM or verdict.startswith(_HARM_BEGINS):
        return HARM
    if verdict in _CURED:
        return CURED
    return CLEAN if verdict in _CLEAN else OPEN
