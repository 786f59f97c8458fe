"""Fixes in the table of questions: off / on / off, and a comparison with a reference."""

from __future__ import annotations

import pytest

from staleproof.cases.answers import Answer, answer, no_answer
from staleproof.cases.case import Fix, Question, Questions, Several
from staleproof.cases.finding import ARITHMETIC, FIXED, NOT_FIXED, NOT_REPRODUCED, real


def run(*rows, **options) -> list:
    return [*Questions("fake", *rows).run("cpu", **options)]


@pytest.mark.parametrize(
    ("answers", "expected", "verdict", "ok"),
    [
        (["leaked", "clean", "leaked"], FIXED, FIXED, True),
        (["leaked", "leaked", "leaked"], FIXED, NOT_FIXED, False),
        (["leaked", "leaked", "leaked"], NOT_FIXED, NOT_FIXED, True),
        (["clean", "clean", "leaked"], FIXED, NOT_REPRODUCED, False),
        (["leaked", "clean", "clean"], FIXED, NOT_REPRODUCED, False),
    ],
)
def test_a_fix_is_asked_off_on_off_in_this_order(answers, expected, verdict, ok):
    asked, told = [], iter(answers)

    def ask(subject, device):
        asked.append((subject, device))
        return answer(next(told), step=len(asked))

    (found,) = run(Fix("ours", off="broken", on="fixed", ask=ask, wrong=right, expected=expected))
    assert asked == [("broken", "cpu"), ("fixed", "cpu"), ("broken", "cpu")]
    assert (found.key, found.verdict, found.ok) == (("fake", "off/on/off", "ours"), verdict, ok)
    of_runs = dict(zip(("off", "on", "off_again"), answers, strict=True))
    assert found.numbers == {"step_off": 1, "step_on": 2, "right": True} | of_runs


def right(subject, device):
    return None


def test_a_fix_is_compared_with_a_reference():
    told, compared = iter(["leaked", "clean", "leaked"]), []

    def wrong(subject, device):
        compared.append((subject, device))
        return "rows are 3 times too large"

    (found,) = run(Fix("ours", "broken", "fixed", lambda *_: next(told), wrong))
    assert compared == [("fixed", "cpu")]
    assert (found.verdict, found.failed, found.note) == ("wrong", True, "rows are 3 times too large")
    with pytest.raises(ValueError, match="wrong: expected a comparison of ours with a reference"):
        Fix("ours", "broken", "fixed", lambda *_: "leaked")


def test_a_row_says_whose_code_it_asks():
    whose = real("torch", "topk")

    def said(subject, device):
        yield answer("leaked")
        yield Answer("clean", question="another", expected=None, evidence=ARITHMETIC)

    rows = (
        Question("q", ["a"], said, "leaked", also=("another",), evidence=lambda subject: whose),
        Fix("ours", "broken", "fixed", lambda *_: "leaked", right, evidence=whose),
        Several("s", lambda device: [Answer("x", question="s", variant="v")], evidence=whose),
        Question("plain", ["a"], lambda *_: "leaked"),
    )
    found = [(f.question, f.grade, f.of) for f in run(*rows)]
    assert found == [
        ("q", "real", whose.of),
        ("another", "arithmetic", ""),
        ("off/on/off", "real", whose.of),
        ("s", "real", whose.of),
        ("plain", "replica", ""),
    ]


@pytest.mark.parametrize("absent", ["broken", "fixed"])
def test_a_fix_that_cannot_be_asked_is_not_run(absent):
    def unavailable(subject, device):
        return "needs SM100" if subject == absent else None

    def ask(subject, device):
        pytest.fail("asked")

    (found,) = run(Fix("ours", "broken", "fixed", ask, right, unavailable=unavailable))
    assert (found.verdict, found.note) == ("not run", "needs SM100")


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_fix_one_of_whose_runs_has_no_answer_is_not_run(number):
    calls = []

    def ask(subject, device):
        calls.append(subject)
        return no_answer("out of memory") if len(calls) == number else "leaked"

    (found,) = run(Fix("ours", "broken", "fixed", ask, right))
    assert (found.verdict, found.note, len(calls)) == ("not run", "out of memory", number)
