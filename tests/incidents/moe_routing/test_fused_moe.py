"""The real fused MoE: how cases are run and survived; on a Hopper GPU, the table itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from staleproof.cases import children, machine
from staleproof.cases.children import Ended
from staleproof.incidents.moe_routing import fused_moe, moe_module
from staleproof.incidents.moe_routing import fused_moe_cases as cases
from staleproof.incidents.moe_routing.batch import RIGHT, SILENT
from staleproof.incidents.moe_routing.fused_moe import (
    CUDA_ILLEGAL_ACCESS,
    DIED,
    TIMED_OUT,
    Case,
    CaseResult,
    Memcheck,
)
from staleproof.incidents.moe_routing.observation import observe

MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at void a::b::finalizeMoeRoutingKernel<x, (a::ScaleMode)1>(const T2 *, int)+0x3d0
=========     by thread (0,0,0) in block (1,0,0)
=========     Access to 0x7f0000 is out of bounds
=========     and is 2,190,366 bytes after the nearest allocation at 0x7e0000 of size 2 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========
========= ERROR SUMMARY: {errors} error{s}
"""
# Stands for the function that runs in a child: what a case does stands in its ``ids``.
CHILD = """
import os, sys, time
from staleproof.cases import children
from staleproof.incidents.moe_routing.fused_moe import CaseResult

def run_in_child(module, cases):
    print("some library greets")
    for case in cases:
        assert module == str(case.check) and os.environ["TRITON_INTERPRET"] == "0"
        if case.ids == "dies":
            print("first\\nlast words\\n\\n", file=sys.stderr, flush=True)
            os.abort()
        if case.ids == "hangs":
            time.sleep(60)
        children.tell(CaseResult(case, case.ids, wrong_rows=case.tokens))
        if case.ids == "illegal memory access":
            os._exit(3)
"""
# As compute-sanitizer: it runs the program behind its own options, and reports on standard output.
SANITIZER = """#!/bin/sh
[ "$1 $2" = "--tool memcheck" ] || exit 1
shift 2
"$@"
[ $? = 3 ] && cat "$(dirname "$0")/report"
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes that run :data:`CHILD` in place of the function that needs a GPU."""
    (tmp_path / "child_of_a_test.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    import child_of_a_test  # type: ignore[import-not-found]

    monkeypatch.setattr(fused_moe, "run_in_child", child_of_a_test.run_in_child)
    monkeypatch.setattr(moe_module, "built", lambda *, check: Path(str(check)))


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[Case, str]], list[list[Case]]]:
    """Replaces the processes: each case gets its outcome, dies, or hangs as it is told.

    ``wrong_rows`` counts the cases that were run. Returns what each process was given.
    """

    def install(answers: dict[Case, str]) -> list[list[Case]]:
        given: list[list[Case]] = []
        ran: list[Case] = []

        class Fake:
            def __init__(self, cases: Sequence[Case]) -> None:
                self.cases = cases

            def wait(self, timeout_s: float) -> Ended:
                assert 0 < timeout_s <= 120
                told = []
                for case in self.cases:
                    if answers[case] in ("dies", "hangs"):
                        code = None if answers[case] == "hangs" else -6
                        return Ended(told, code, "", "first\nlast words\n\n", timeout_s)
                    ran.append(case)
                    told.append(CaseResult(case, answers[case], wrong_rows=len(ran)))
                    if answers[case] == CUDA_ILLEGAL_ACCESS:
                        return Ended(told, 3, "", "", timeout_s)
                return Ended(told, 0, "", "", timeout_s)

        def start(function: object, module: str, cases: Sequence[Case], *, env: dict[str, str]) -> Fake:
            assert function is fused_moe.run_in_child
            assert {str(case.check) for case in cases} == {module}
            assert env["TRITON_INTERPRET"] == "0"
            given.append([*cases])
            return Fake(cases)

        monkeypatch.setattr(children, "start", start)
        monkeypatch.setattr(moe_module, "built", lambda *, check: Path(str(check)))
        return given

    return install


def test_a_process_that_ends_is_followed_by_another(
    worker: Callable[[dict[Case, str]], list[list[Case]]],
) -> None:
    cases = [Case(tokens, 8, "distinct") for tokens in range(1, 8)]
    answers = [RIGHT, CUDA_ILLEGAL_ACCESS, SILENT, "dies", "hangs", CUDA_ILLEGAL_ACCESS, RIGHT]
    given = worker(dict(zip(cases, answers, strict=True)))
    results = fused_moe.run_cases(cases, processes=1)
    assert [result.case for result in results] == cases
    outcomes = [RIGHT, CUDA_ILLEGAL_ACCESS, SILENT, DIED, TIMED_OUT, CUDA_ILLEGAL_ACCESS, RIGHT]
    assert [result.outcome for result in results] == outcomes
    assert results[0] == CaseResult(cases[0], RIGHT, wrong_rows=1)
    assert results[3] == CaseResult(cases[3], DIED, error="last words")
    assert given == [cases, cases[2:], cases[4:], cases[5:], cases[6:]]


def test_results_come_in_the_order_of_the_cases_and_a_process_has_one_module(
    worker: Callable[[dict[Case, str]], list[list[Case]]],
) -> None:
    cases = [Case(tokens, 8, "distinct", check=tokens % 3 == 0) for tokens in range(1, 10)]
    given = worker(dict.fromkeys(cases, RIGHT))
    results = fused_moe.run_cases(cases, processes=4)
    assert [result.case for result in results] == cases
    assert [len(lane) for lane in given] == [3, 3, 3]


def test_a_case_that_is_given_twice_is_run_twice(
    worker: Callable[[dict[Case, str]], list[list[Case]]],
) -> None:
    off, on = Case(512, 8, "all equal"), Case(512, 8, "distinct")
    worker({off: CUDA_ILLEGAL_ACCESS, on: RIGHT})
    results = fused_moe.run_cases([off, on, off], processes=1)
    assert [result.wrong_rows for result in results] == [1, 2, 3]
    assert fused_moe.run_cases([]) == []


def test_a_child_that_dies_keeps_what_it_told_before(child: None) -> None:
    cases = [Case(n, 8, what) for n, what in enumerate((RIGHT, "dies", CUDA_ILLEGAL_ACCESS), 1)]
    results = fused_moe.run_cases(cases, processes=1)
    assert results == [
        CaseResult(cases[0], RIGHT, wrong_rows=1),
        CaseResult(cases[1], DIED, error="last words"),
        CaseResult(cases[2], CUDA_ILLEGAL_ACCESS, wrong_rows=3),
    ]


def test_a_child_that_hangs_is_ended(child: None) -> None:
    case = Case(1, 8, "hangs")
    (result,) = fused_moe.run_cases([case], timeout_s=0.2)
    assert result.outcome == TIMED_OUT


def test_names_and_cases_are_distinct() -> None:
    assert len({case.name for case in cases.MODULE_CASES}) == len(cases.MODULE_CASES) == 29
    assert Case(4, 10, "distinct", all_to_all=True).name.endswith("0x7f bytes, all-to-all")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            MEMCHECK.format(errors=9, s="s"),
            Memcheck(
                9,
                "Invalid __global__ read of size 4 bytes, 2,190,366 bytes after the nearest "
                "allocation at 0x7e0000 of size 2 bytes",
                "finalizeMoeRoutingKernel",
            ),
        ),
        ("========= ERROR SUMMARY: 0 errors\n", Memcheck(0, "", "")),
    ],
)
def test_what_memcheck_says(
    child: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, expected: Memcheck
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(SANITIZER)
    tool.chmod(0o755)
    (tmp_path / "report").write_text(said)
    monkeypatch.setattr(machine, "tool", lambda name: tool)
    assert fused_moe.sanitize(Case(512, 8, CUDA_ILLEGAL_ACCESS)) == expected


def test_a_sanitizer_without_a_summary_is_named(
    child: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mute").write_text("#!/bin/sh\necho first\necho not supported here\n")
    (tmp_path / "mute").chmod(0o755)
    monkeypatch.setattr(machine, "tool", lambda name: tmp_path / "mute")
    with pytest.raises(moe_module.ModuleError, match="gave no summary: not supported here"):
        fused_moe.sanitize(Case(512, 8, RIGHT))


def test_where_it_cannot_run_it_says_why(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(moe_module.FOLDER_VARIABLE, str(tmp_path))
    why = fused_moe.unavailable_reason()
    if device == "cpu":
        assert why == "needs a CUDA device"
    else:
        assert why is not None
        assert "\n" not in why
    monkeypatch.setattr(machine, "tool", lambda name: None)
    with pytest.raises(moe_module.ModuleError, match="compute-sanitizer is not installed"):
        fused_moe.sanitize(Case(512, 8, "all equal"))


@pytest.mark.gpu
def test_the_table() -> None:
    why = fused_moe.unavailable_reason() or fused_moe.unavailable_reason(check=False)
    if why:
        pytest.skip(why)
    rows = fused_moe.run_cases([*cases.MODULE_CASES])
    wrong = [
        (row.case.name, row.outcome, row.error)
        for row, expected in zip(rows, cases.MODULE_CASES.values(), strict=True)
        if expected is not None and row.outcome != expected
    ]
    assert wrong == []
    # Only tokens with a duplicate are hurt.
    assert {row.wrong_clean_rows for row in rows} == {0}
    # As many as our own map and finalise step say, from the same ids over the same memory.
    before = {cases.BYTES: "canary", cases.ZEROS: "zeros", cases.PREVIOUS: "previous map"}
    compared = 0
    for row in rows:
        case = row.case
        if row.outcome == SILENT and case.tail in before:
            ours = observe(case.batch, case.ids, before=before[case.tail], guard=case.check)
            assert (ours.outcome, ours.wrong_rows) == (SILENT, row.wrong_rows), case.name
            compared += 1
    assert compared >= 5


@pytest.mark.gpu
def test_memcheck_names_the_finalise_kernel() -> None:
    why = fused_moe.unavailable_reason(check=False) or fused_moe.sanitizer_missing()
    if why:
        pytest.skip(why)
    seen = fused_moe.sanitize(Case(512, 8, "all equal", check=False))
    assert seen.errors > 0
    assert seen.kernel == "finalizeMoeRoutingKernel"
