"""The colour of a verdict, which follows from its outcome: the class of a table's cell.

>>> [meaning("rows", word) for word in ("leaked", "clean", "not run")], meaning("fix", "fixed")
(['harm', 'clean', 'absent'], 'cured')
"""

from __future__ import annotations

from staleproof.cases import words
from staleproof.cases.words import Outcome

HARM, CLEAN, CURED, OPEN, ABSENT = "harm", "clean", "cured", "open", "absent"
_CLASS = {Outcome.GOOD: CLEAN, Outcome.BAD: HARM, Outcome.OPEN: OPEN, Outcome.NOT_RUN: ABSENT}
# Families whose good words say that something was put right, not that nothing was wrong.
_CURES = {"fix", "cure"}


def meaning(family: str, verdict: str) -> str:
    """The class of a verdict: ``harm``, ``clean``, ``cured``, ``absent`` or ``open``.

    Args:
        family: of :data:`staleproof.cases.words.FAMILIES`.
        verdict: a word of it.
    """
    outcome = words.outcome(family, verdict)
    return CURED if outcome is Outcome.GOOD and family in _CURES else _CLASS[outcome]
