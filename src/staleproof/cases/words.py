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

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from staleproof.lab import FIXED as FIXED
from staleproof.lab import NOT_FIXED as NOT_FIXED
from staleproof.lab import NOT_REPRODUCED as NOT_REPRODUCED
from staleproof.lab import NOT_RUN as NOT_RUN
from staleproof.lab import WRONG as WRONG
from staleproof.lab import Outcome as Outcome


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


FIX = "fix"

_ABSENT = Word(Outcome.NOT_RUN, "This machine lacks something that the question needs; the note says what.")
# Family -> word -> what it means, from ``words.toml``.
FAMILIES: Mapping[str, Mapping[str, Word]] = {
    family: {word: Word(Outcome(outcome), says) for word, (outcome, says) in words.items()}
    for family, words in tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8")).items()
}


def word(family: str, verdict: str, name: str = "verdict") -> Word:
    """The word of a verdict.

    Args:
        family: a key of :data:`FAMILIES`.
        verdict: a word of it, or ``not run``, which every family has.
        name: what the error calls it.

    Raises:
        UnknownWordError: naming the family and its words.
    """
    if family not in FAMILIES:
        raise UnknownWordError(f"words: expected a family of {', '.join(FAMILIES)}; got {family!r}")
    if verdict == NOT_RUN:
        return _ABSENT
    # A tuple also takes a value that no dict does, such as a list.
    if verdict not in (known := (*FAMILIES[family], NOT_RUN)):
        words = "; ".join(known)
        raise UnknownWordError(f"{name}: expected a word of the family {family} ({words}), got {verdict!r}")
    return FAMILIES[family][verdict]


def outcome(family: str, verdict: str) -> Outcome:
    """Good, bad, open or not run; see :func:`word`.

    >>> outcome("fix", "not run").value
    'not run'
    """
    return word(family, verdict).outcome
