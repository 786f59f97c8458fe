"""Every case of every incident gives the verdict that its table expects, through the one runner.

On a CPU it also gives the numbers in ``readings.json``. ``python -m tests.incidents.test_tables INCIDENT``
rewrites those of these incidents, or of all, for a change that is meant to change them: read what differs.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.vllm import environment

from staleproof import lab
from staleproof.incidents import registry
from staleproof.lab import FIXED, SHARED, Finding, Outcome

SOURCE = re.compile(r"(?:the source of vLLM (\S+)|SGLang \S+) is neither")
FILE = Path(__file__).with_name("readings.json")
READINGS = json.loads(FILE.read_text())
TABLES = {name: registry.questions_of(name) for name in registry.INCIDENTS}


def groups() -> Iterator[tuple[str, list[lab.Case]]]:
    """The cases of each question; those that share a scene are together, so that it happens once."""
    for table in TABLES.values():
        questions: dict[str, list[lab.Case]] = {}
        first: dict[object, str] = {}
        for case in table.cases:
            question = case.key.question
            questions.setdefault(first.setdefault(case.scene or question, question), []).append(case)
        for question, cases in questions.items():
            yield f"{cases[0].key.incident}, {question}", cases


GROUPS = dict(groups())


def answer(found: Finding) -> list[Any]:
    """What a finding says, as JSON gives it back; without what is measured by a clock or of Python itself."""
    numbers = {name: value for name, value in found.numbers.items() if not re.search("host_us|traced", name)}
    return json.loads(json.dumps([found.verdict, found.outcome, found.grade, found.provenance, numbers]))


def close(kept: Any, now: Any) -> bool:
    """Equal, but for what another processor or torch rounds otherwise. A number not kept may be any."""
    if isinstance(kept, dict):
        return all(name in now and close(kept[name], now[name]) for name in kept)
    if isinstance(kept, list):
        return len(kept) == len(now) and all(map(close, kept, now))
    return now == (pytest.approx(kept, rel=0.02, abs=1e-4, nan_ok=True) if isinstance(kept, float) else kept)


def findings(cases: list[lab.Case], device: str) -> list[Finding]:
    """Run these cases, and again after each release that they read was fetched; or skip the test."""
    while True:
        found = [*lab.run(cases, device)]
        missing = next(filter(None, (SOURCE.match(one.note) for one in found)), None)
        if missing is None:
            return found
        environment.sources(missing[1]) if missing[1] else environment.sglang()


def unexpected(case: lab.Case, found: Finding, device: str) -> str:
    """What is wrong with a finding, or ``""``."""
    if found.failed:
        return f"expected {found.expected}"
    if not found.ran and found.note != case.missing(device) and not found.note.startswith("failed: "):
        return f"not run, and the case says: {case.missing(device)}"
    if found.three is not None and found.three.outcomes[::2] != (Outcome.BAD, Outcome.BAD):
        return "good without the remedy"
    if found.three is not None and (found.three.right is True) is not (found.verdict == FIXED):
        return "fixed, and nothing right was compared"
    if device != "cpu":
        return ""
    if case.key.text not in READINGS:
        return f"{FILE} lacks it: run python {__file__}"
    if not found.ran:
        excused = re.search("is not installed|fetches|^failed", found.note)
        return "" if excused or not READINGS[case.key.text] else "was run when the readings were kept"
    kept = READINGS[case.key.text]
    return "" if not kept or close(kept, answer(found)) else f"the readings are {kept}"


@pytest.mark.parametrize("name", GROUPS)
def test_each_case_of_a_question_gives_the_verdict_that_is_expected(device, name, monkeypatch):
    # `make test` executes the notebooks afterwards, which ask the same.
    if folder := os.environ.get("STALEPROOF_TEST_FINDINGS"):
        monkeypatch.setenv(SHARED, folder)
    found = zip(GROUPS[name], findings(GROUPS[name], device), strict=True)
    wrong = {case.key.text: (what, one) for case, one in found if (what := unexpected(case, one, device))}
    assert not wrong


def test_no_case_is_lost_or_has_another_name():
    assert {case.key.text for table in TABLES.values() for case in table.cases} == READINGS.keys()


if __name__ == "__main__":
    # Once more with another instruction set drops the numbers that rounding decides:
    # ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE python -m tests.incidents.test_tables again
    named = [name for name in sys.argv[1:] if name != "again"] or [*TABLES]
    if unknown := {*named} - TABLES.keys():
        sys.exit(f"expected some of {', '.join(TABLES)}, got {', '.join(unknown)}")
    rows: dict[str, list[Any]] = {}
    for name, table in TABLES.items():
        kept = {case.key.text: READINGS.get(case.key.text, []) for case in table.cases}
        if name in named:
            print(name, flush=True)
            kept = {found.key.text: answer(found) if found.ran else [] for found in table.run("cpu")}
        rows |= kept
    for name, row in rows.items() if "again" in sys.argv else ():
        row[4:] = row and [{what: n for what, n in row[-1].items() if close(READINGS[name][-1].get(what), n)}]
    lines = [f"{json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in rows.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
