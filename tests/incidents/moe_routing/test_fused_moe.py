"""The real fused MoE: how cases are run and survived; on a Hopper GPU, the table itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from staleproof.harness import environment
from staleproof.incidents.moe_routing import consumer, fused_moe, moe_module
from staleproof.incidents.moe_routing.fused_moe import (
    DIED,
    ILLEGAL_ACCESS,
    RIGHT,
    SILENT,
    TIMED_OUT,
    Case,
    Row,
    Sanitized,
)

MEMCHECK = """========= COMPUTE-SANITIZER
row {{"outcome": "illegal memory access"}}
========= Invalid __global__ read of size 4 bytes
=========     at void a::b::finalizeMoeRoutingKernel<x, (a::ScaleMode)1>(const T2 *, int)+0x3d0
=========     by thread (0,0,0) in block (1,0,0)
=========     Access to 0x7f0000 is out of bounds
=========     and is 2,190,366 bytes after the nearest allocation at 0x7e0000 of size 2 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
========= ERROR SUMMARY: {errors} error{s}
"""
Work = Callable[..., tuple[str, str, int | None]]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[Case, str]], list[list[Case]]]:
    """Replaces the processes: each case says its line, dies, or hangs as it is told.

    ``wrong_rows`` counts the cases that were run.

    Returns what each process was asked for.
    """

    def install(answers: dict[Case, str]) -> list[list[Case]]:
        asked: list[list[Case]] = []
        ran: list[Case] = []

        def work(module: Path, cases: Sequence[Case], timeout_s: float) -> tuple[str, str, int | None]:
            asked.append([*cases])
            said = "some library greets\n"
            for case in cases:
                assert module.name == str(case.check)
                if answers[case] in ("dies", "hangs"):
                    return said, "first\nlast words\n\n", None if answers[case] == "hangs" else -6
                ran.append(case)
                row = {"outcome": answers[case], "wrong_rows": len(ran)}
                said += "row " + json.dumps(row) + "\n"
                if answers[case] == ILLEGAL_ACCESS:
                    return said, "", 3
            return said, "", 0

        monkeypatch.setattr(fused_moe, "_work", work)
        monkeypatch.setattr(moe_module, "built", lambda *, check: Path(str(check)))
        return asked

    return install


def test_a_process_that_ends_is_followed_by_another(
    worker: Callable[[dict[Case, str]], list[list[Case]]],
) -> None:
    cases = [Case(tokens, 8, "distinct") for tokens in range(1, 8)]
    answers = [RIGHT, ILLEGAL_ACCESS, SILENT, "dies", "hangs", ILLEGAL_ACCESS, RIGHT]
    asked = worker(dict(zip(cases, answers, strict=True)))
    rows = fused_moe.run_cases(cases, processes=1)
    assert [row.case for row in rows] == cases
    assert [row.outcome for row in rows] == [
        RIGHT,
        ILLEGAL_ACCESS,
        SILENT,
        DIED,
        TIMED_OUT,
        ILLEGAL_ACCESS,
        RIGHT,
    ]
    assert rows[0] == Row(cases[0], RIGHT, wrong_rows=1)
    assert rows[3] == Row(cases[3], DIED, error="last words")
    assert asked == [cases, cases[2:], cases[4:], cases[5:], cases[6:]]


def test_rows_come_in_the_order_of_the_cases_and_a_process_has_one_module(
    worker: Callable[[dict[Case, str]], list[list[Case]]],
) -> None:
    cases = [Case(tokens, 8, "distinct", check=tokens % 3 == 0) for tokens in range(1, 10)]
    asked = worker(dict.fromkeys(cases, RIGHT))
    rows = fused_moe.run_cases(cases, processes=4)
    assert [row.case for row in rows] == cases
    assert len(asked) == 3
    for lane in asked:
        assert len({case.check for case in lane}) == 1


def test_a_case_that_is_asked_twice_is_run_twice(
    worker: Callable[[dict[Case, str]], list[list[Case]]],
) -> None:
    off, on = Case(512, 8, "all equal"), Case(512, 8, "distinct")
    worker({off: ILLEGAL_ACCESS, on: RIGHT})
    rows = fused_moe.run_cases([off, on, off], processes=1)
    assert [row.wrong_rows for row in rows] == [1, 2, 3]
    assert fused_moe.run_cases([]) == []


def test_names_and_cases_are_distinct() -> None:
    cases = [case for case, _ in fused_moe.TABLE]
    assert len({case.name for case in cases}) == len(set(cases)) == len(cases)
    assert Case(4, 10, "distinct", all_to_all=True).name.endswith("0x7f bytes, all-to-all")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            MEMCHECK.format(errors=9, s="s"),
            Sanitized(
                9,
                "Invalid __global__ read of size 4 bytes, 2,190,366 bytes after the nearest "
                "allocation at 0x7e0000 of size 2 bytes",
                "finalizeMoeRoutingKernel",
            ),
        ),
        ("row {}\n========= ERROR SUMMARY: 0 errors\n", Sanitized(0, "", "")),
    ],
)
def test_what_memcheck_says(monkeypatch: pytest.MonkeyPatch, said: str, expected: Sanitized) -> None:
    monkeypatch.setattr(environment, "tool", lambda name: Path("/tools") / name)
    monkeypatch.setattr(moe_module, "built", lambda *, check: Path("module.so"))
    prefixes = []

    def work(*arguments: object) -> tuple[str, str, int]:
        prefixes.append(arguments[-1])
        return said, "", 0

    monkeypatch.setattr(fused_moe, "_work", work)
    assert fused_moe.sanitize(Case(512, 8, "all equal")) == expected
    assert prefixes == [["/tools/compute-sanitizer", "--tool", "memcheck"]]


def test_where_it_cannot_run_it_says_why(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(moe_module.FOLDER_VARIABLE, str(tmp_path))
    why = fused_moe.why_not()
    if device == "cpu":
        assert why == "needs a CUDA device"
    else:
        assert why is not None
        assert "\n" not in why
    monkeypatch.setattr(environment, "tool", lambda name: None)
    with pytest.raises(moe_module.ModuleError, match="compute-sanitizer is not installed"):
        fused_moe.sanitize(Case(512, 8, "all equal"))


@pytest.mark.gpu
def test_the_table() -> None:
    why = fused_moe.why_not() or fused_moe.why_not(check=False)
    if why:
        pytest.skip(why)
    rows = fused_moe.run_cases([case for case, _ in fused_moe.TABLE])
    wrong = [
        (row.case.name, row.outcome, row.error)
        for row, (_, expected) in zip(rows, fused_moe.TABLE, strict=True)
        if expected is not None and row.outcome != expected
    ]
    assert wrong == []
    # Only tokens with a duplicate are hurt.
    assert {row.wrong_clean_rows for row in rows} == {0}
    # As many as our own map and finalise step say, from the same ids over the same memory.
    held = {fused_moe.BYTES: "canary", fused_moe.ZEROS: "zeros", fused_moe.PREVIOUS: "previous map"}
    compared = 0
    for row in rows:
        case = row.case
        if row.outcome == SILENT and case.tail in held:
            ours = consumer.observe(
                case.tokens,
                case.top_k,
                case.experts,
                case.ids,
                held=held[case.tail],
                guard=case.check,
                in_torch=True,
            )
            assert (ours.outcome, ours.wrong_rows) == (consumer.SILENT, row.wrong_rows), case.name
            compared += 1
    assert compared >= 5


@pytest.mark.gpu
def test_memcheck_names_the_finalise_kernel() -> None:
    why = fused_moe.why_not(check=False) or fused_moe.sanitizer_missing()
    if why:
        pytest.skip(why)
    seen = fused_moe.sanitize(Case(512, 8, "all equal", check=False))
    assert seen.errors > 0
    assert seen.kernel == "finalizeMoeRoutingKernel"
