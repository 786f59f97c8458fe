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

SOURCE = re.compile(r"the source of vLLM (\S+) is neither")
FILE = Path(__file__).with_name("readings.json")
READINGS = json.loads(FILE.read_text())
TABLES = {name: registry.questions_of(name) for name in registry.INCIDENTS}


def groups() -> Iterator[tuple[str, list[lab.Case]]]:
    """Cases that share a scene together, so that it happens once; every other case alone."""
    for table in TABLES.values():
        shared: dict[object, list[lab.Case]] = {}
        for case in table.cases:
            shared.setdefault(case.scene or case.key, []).append(case)
        for cases in shared.values():
            yield "/".join(filter(None, cases[0].key)), cases


GROUPS = dict(groups())


def told(found: Finding) -> list[Any]:
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


def asked(cases: list[lab.Case], device: str) -> list[Finding]:
    """Run these cases, and again after each release that they read was fetched; or skip the test."""
    while True:
        found = [*lab.run(cases, device)]
        missing = next(filter(None, (SOURCE.match(one.note) for one in found)), None)
        if missing is None:
            return found
        environment.sources(missing[1])


@pytest.mark.parametrize("name", GROUPS)
def test_each_case_gives_the_verdict_that_is_expected(device, name, monkeypatch):
    # `make test` executes the notebooks afterwards, which ask the same.
    if folder := os.environ.get("STALEPROOF_TEST_FINDINGS"):
        monkeypatch.setenv(SHARED, folder)
    for case, found in zip(GROUPS[name], asked(GROUPS[name], device), strict=True):
        assert not found.failed, found
        if not found.ran:
            assert found.note
            assert case.missing(device) == found.note or found.note.startswith("failed: "), found
        elif found.three is not None:
            assert found.three.outcomes[::2] == (Outcome.BAD, Outcome.BAD), found
            assert (found.three.right is True) is (found.verdict == FIXED), found
        assert device != "cpu" or case.key.text in READINGS, f"{FILE} lacks it: run python {__file__}"
        if device == "cpu" and READINGS[case.key.text]:
            assert found.ran or re.search("is not installed|fetches|^failed", found.note), found
            assert not found.ran or close(READINGS[case.key.text], told(found)), found


def test_no_case_is_lost_or_has_another_name():
    assert {case.key.text for table in TABLES.values() for case in table.cases} == READINGS.keys()


@pytest.mark.parametrize("name", TABLES)
def test_what_a_table_expects_can_go_wrong(name):
    """Some cases of a table are bad, others good: neither a blind detector nor a deaf one passes."""
    keys = [case.key for case in TABLES[name].cases if case.key.question != lab.OFF_ON_OFF]
    assert {"good", "bad"} <= {READINGS[key.text][1] for key in keys if READINGS[key.text]}


if __name__ == "__main__":
    # Once more with another instruction set drops the numbers that rounding decides:
    # ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE python -m tests.incidents.test_tables again
    asked = [name for name in sys.argv[1:] if name != "again"] or [*TABLES]
    if unknown := {*asked} - TABLES.keys():
        sys.exit(f"expected some of {', '.join(TABLES)}, got {', '.join(unknown)}")
    rows: dict[str, list[Any]] = {}
    for name, table in TABLES.items():
        kept = {case.key.text: READINGS.get(case.key.text, []) for case in table.cases}
        if name in asked:
            print(name, flush=True)
            kept = {found.key.text: told(found) if found.ran else [] for found in table.run("cpu")}
        rows |= kept
    for name, row in rows.items() if "again" in sys.argv else ():
        row[4:] = row and [{what: n for what, n in row[-1].items() if close(READINGS[name][-1].get(what), n)}]
    lines = [f"{json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in rows.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
