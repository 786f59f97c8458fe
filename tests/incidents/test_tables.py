"""Every case of every incident gives the verdict that its table expects, through the one runner."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from staleproof.cases.case import Case
from staleproof.cases.run import SHARED, run
from staleproof.cases.words import FIXED, Outcome, outcome
from staleproof.incidents import registry

# What an ask says where a process failed, or where the source of a release is absent.
UNASKED = ("failed: ", "the source of vLLM ")
TABLES = {name: registry.table_of(name) for name in registry.INCIDENTS}


def groups() -> Iterator[tuple[str, list[Case]]]:
    """Cases that share a scene together, so that it happens once; every other case alone."""
    for table in TABLES.values():
        shared: dict[object, list[Case]] = {}
        for case in table.cases:
            shared.setdefault(case.scene or case.key, []).append(case)
        for cases in shared.values():
            yield "/".join(filter(None, cases[0].key)), cases


GROUPS = dict(groups())


@pytest.mark.parametrize("name", GROUPS)
def test_each_case_gives_the_verdict_that_is_expected(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `make test` executes the notebooks afterwards, which ask the same.
    if folder := os.environ.get("STALEPROOF_TEST_FINDINGS"):
        monkeypatch.setenv(SHARED, folder)
    for case, found in zip(GROUPS[name], run(GROUPS[name], device, shared=True), strict=True):
        assert not found.failed, found
        if not found.ran:
            assert found.note
            assert case.needs(case.subject, device) == found.note or found.note.startswith(UNASKED), found
        elif found.three is not None:
            runs = [outcome(found.three.words, said) for said in (found.three.off, found.three.again)]
            assert runs == [Outcome.BAD] * 2, found
            assert (found.three.right is True) is (found.verdict == FIXED), found


@pytest.mark.parametrize("name", TABLES)
def test_what_a_table_expects_can_go_wrong(name: str) -> None:
    """Some cases of a table are bad, others good: neither a blind detector nor a deaf one passes."""
    expected = {(case.words, case.expected("cpu")) for case in TABLES[name].cases if not hasattr(case, "off")}
    said = {outcome(words, verdict) for words, verdict in expected if verdict is not None}
    assert {Outcome.GOOD, Outcome.BAD} <= said
