"""Findings that tests make up; what a watch counted."""

from __future__ import annotations

from typing import Any

import torch

from staleproof import lab
from staleproof.grades import REPLICA, Evidence
from staleproof.lab import FIXED, OFF_ON_OFF, Finding, Key, Three
from staleproof.vllm.watch import Reading, Watch

# Verdicts of made-up findings that are good; others are bad.
GOOD = {"clean", "zero", "right", "distinct", "some", "lives", "cured", "safe", "holds"}


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
    answer = lab.good_if(verdict in GOOD, verdict, note=note, **numbers)
    return lab.finding(Key(incident, question, variant), answer, expected=expected, evidence=evidence)


def not_run(incident: str, question: str, variant: str, reason: str) -> Finding:
    """A finding that was not run."""
    return lab.finding(Key(incident, question, variant), lab.not_run(reason))


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
    outcomes = ["good" if verdict in GOOD else "bad" for verdict in (off, on, again)]
    three = Three(off, on, again, outcomes, right=wrong is None, wrong=wrong or "")
    answer = lab.Answer(three.outcome, three.verdict, numbers, wrong or "")
    key = Key(incident, OFF_ON_OFF, variant)
    return lab.finding(key, answer, expected=expected, three=three, evidence=evidence)


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
