"""Findings that tests make up, with the family of their words found by the word; what a watch counted."""

from __future__ import annotations

from typing import Any

import torch

from staleproof.cases import finding as cases
from staleproof.cases.finding import three_of
from staleproof.cases.words import FAMILIES
from staleproof.cases.words import FIX
from staleproof.grades import REPLICA, Evidence
from staleproof.lab import FIXED, NOT_RUN, OFF_ON_OFF, Finding, Key
from staleproof.vllm.watch import Reading, Watch


def family(*verdicts: str | None) -> str:
    """The first family, beside that of fixes, that has all these words."""
    known = {verdict for verdict in verdicts if verdict not in (None, NOT_RUN)}
    return next(name for name, words in FAMILIES.items() if name != FIX and known <= words.keys())


def finding(
    incident: str,
    question: str,
    variant: str,
    verdict: str,
    *,
    expected: str | None = None,
    note: str = "",
    evidence: Evidence = REPLICA,
    **numbers: Any,
) -> Finding:
    """A finding of this process."""
    key = Key(incident, question, variant)
    return cases.finding(
        *(key, family(verdict, expected), verdict), expected=expected, note=note, evidence=evidence, **numbers
    )


def not_run(incident: str, question: str, variant: str, why: str) -> Finding:
    """A finding that was not run."""
    return cases.not_run(Key(incident, question, variant), "rows", why)


def off_on_off(
    incident: str,
    variant: str,
    *,
    off: str,
    on: str,
    again: str,
    wrong: str | None = None,
    expected: str = FIXED,
    evidence: Evidence = REPLICA,
    **numbers: Any,
) -> Finding:
    """A finding of off / on / off, with the verdict that these three give."""
    three = three_of(family(off, on, again), off, on, again, right=wrong is None, wrong=wrong or "")
    given = {"expected": expected, "note": wrong or "", "three": three, "evidence": evidence, **numbers}
    return cases.finding(Key(incident, OFF_ON_OFF, variant), FIX, three.verdict, **given)


def measurement(provider: str = "staleproof", p50: float = 2.0, **changes: Any) -> dict[str, Any]:
    """A line of ``measurements.jsonl``."""
    times = {"p50": p50, "p20": 1.9, "p80": 2.2, "unit": "us", "bytes": 4_000_000}
    case = {"kernel": "clear", "provider": provider, "mode": "graph", "x_name": "live", "x_value": 1}
    return case | times | changes


def arrived(watch: Watch) -> Reading:
    """What a watch has counted so far, waiting for the device."""
    watch.copy()
    if watch.board.numbers.is_cuda:
        torch.cuda.synchronize()
    return watch.reading()
