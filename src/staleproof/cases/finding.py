"""The findings of tables that are not moved yet; see :mod:`staleproof.lab`. Goes with the last of them."""

from __future__ import annotations

from typing import Any

from staleproof import lab
from staleproof.cases import words as families
from staleproof.cases.words import FIX as FIX
from staleproof.device import Provenance
from staleproof.grades import ARITHMETIC as ARITHMETIC
from staleproof.grades import REPLICA as REPLICA
from staleproof.grades import Evidence as Evidence
from staleproof.grades import Grade as Grade
from staleproof.grades import real as real
from staleproof.grades import real_file as real_file
from staleproof.lab import NOT_RUN as NOT_RUN
from staleproof.lab import OFF_ON_OFF as OFF_ON_OFF
from staleproof.lab import SCHEMA as SCHEMA
from staleproof.lab import Finding as Finding
from staleproof.lab import Key as Key
from staleproof.lab import Three as Three
from staleproof.runs import RunFileError as RunFileError
from staleproof.runs import read_findings as read_findings
from staleproof.runs import read_lines as read_lines
from staleproof.runs import write_findings as write_findings
from staleproof.runs import write_lines as write_lines
from staleproof.runs import writing as writing


def three_of(words: str, off: str, on: str, again: str, right: bool | None = None, wrong: str = "") -> Three:
    """The three runs of a remedy, whose verdicts are of one family."""
    outcomes = [families.outcome(words, verdict) for verdict in (off, on, again)]
    return Three(off, on, again, outcomes, right, wrong)


def finding(
    key: Key,
    words: str,
    verdict: str,
    *,
    expected: str | None = None,
    note: str = "",
    script: str = "",
    three: Three | None = None,
    evidence: Evidence = REPLICA,
    provenance: Provenance | None = None,
    **numbers: Any,
) -> Finding:
    """A finding obtained in this process just now, whose verdict is a word of a family."""
    outcome = families.outcome(words, verdict)
    answer = lab.Answer(outcome, str(verdict), numbers, note, script, evidence, provenance)
    return lab.finding(key, answer, expected=expected, three=three)


def not_run(key: Key, words: str, why: str) -> Finding:
    """A finding that says in one line why its question was not asked on this machine."""
    return lab.finding(key, lab.not_run(why))
