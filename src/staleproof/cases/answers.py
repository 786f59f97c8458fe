"""Answers: what a function that is asked a question returns.

>>> from staleproof.cases.finding import REPLICA
>>> said = answer("leaked", note="row 3", bad_rows=1)
>>> said.finding("an_incident", "empty row", "theirs", None, REPLICA).grade
<Grade.REPLICA: 'replica'>
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from staleproof.cases.finding import NOT_RUN, Evidence, Finding, finding, not_run

# The default of Answer.expected: the row's. ``None`` already means "no expected verdict".
UNSET: Any = object()


@dataclass(frozen=True)
class Answer:
    """One answer to a question.

    Attributes:
        verdict: the answer in a word or two.
        numbers: the values that the verdict rests on; JSON values.
        note: one line beside it.
        question, variant, expected: only if they differ from those of the row.
        evidence: what the question was put to, if that differs from the row's.
        changes: other fields of the :class:`Finding` to set, e.g. its provenance.
    """

    verdict: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    question: str | None = None
    variant: str | None = None
    expected: str | None = UNSET
    evidence: Evidence | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    def finding(
        self, incident: str, question: str, variant: str, expected: str | None, evidence: Evidence
    ) -> Finding:
        """This answer as a finding; the arguments hold for whatever it does not say itself."""
        where = incident, self.question or question, self.variant or variant
        if self.verdict == NOT_RUN:
            found = not_run(*where, self.note)
        else:
            expected = expected if self.expected is UNSET else self.expected
            evidence = self.evidence or evidence
            found = finding(*where, self.verdict, expected=expected, note=self.note, evidence=evidence)
        return replace(found, **{"numbers": self.numbers, **self.changes})


def answer(verdict: str, /, *, note: str = "", **numbers: Any) -> Answer:
    """An :class:`Answer` whose numbers are given by keyword.

    >>> answer("leaked", note="row 3", bad_rows=1).numbers
    {'bad_rows': 1}
    """
    return Answer(str(verdict), numbers, note)


def no_answer(why: str, *, question: str | None = None, variant: str | None = None) -> Answer:
    """An :class:`Answer` that says in one line why the question was not run.

    >>> no_answer("needs an SM100 GPU").verdict
    'not run'
    """
    return Answer(NOT_RUN, note=why, question=question, variant=variant)


def failed(error: Exception) -> Answer:
    """An :class:`Answer` that says in one line how somebody's kernel failed, so that the others are asked.

    >>> failed(RuntimeError("no kernel image\\n  at launch")).note
    'failed: RuntimeError: no kernel image at launch'
    """
    return no_answer(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")


Said = str | Answer | Iterable[Answer]


def answers_of(said: Said) -> Iterable[Answer]:
    """What an ``ask`` returned or yields, as answers."""
    if isinstance(said, str):
        return (Answer(str(said)),)
    return (said,) if isinstance(said, Answer) else said
