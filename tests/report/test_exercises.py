"""Right answers pass, wrong ones are told what is wrong, and no message holds the right answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from staleproof.report import exercises as module
from staleproof.report.exercises import ALL, Exercise, exercises

CASES = [(name, number) for name, tasks in ALL.items() for number in tasks]
# Slow: a truth that serves a model.
SLOW = {("01", 2), ("01", 3), ("01", 4), ("02", 2), ("04", 1), ("04", 2), ("05", 4)}


def wrong_answers(right: Any) -> list[Any]:
    """Answers of the right form that are wrong, near ones among them."""
    if isinstance(right, set):
        other: Any = "nobody" if isinstance(next(iter(right)), str) else -1
        return [set(), right | {other}, set(list(right)[1:]), {other}]
    if isinstance(right, list) and isinstance(right[0], bool):
        return [[not right[0], *right[1:]], [not one for one in right]]
    if isinstance(right, list):
        return [["nothing", *right[1:]], right[::-1]]
    if isinstance(right, str):
        return [right + "s", ""]
    return [right - 1, right + 1, 0, -right]


def said(capsys: pytest.CaptureFixture[str], name: str, number: int, answer: Any) -> tuple[bool, str]:
    good = exercises(name)(number, answer)
    (line,) = capsys.readouterr().out.splitlines()
    return bool(good), line


@pytest.mark.parametrize(
    ("name", "number"),
    [pytest.param(*case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES],
)
def test_right_answers_pass_and_wrong_ones_are_told(
    name: str, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    right = ALL[name][number].truth()
    assert said(capsys, name, number, right) == (True, f"exercise {number}: right")
    for answer in wrong_answers(right):
        good, line = said(capsys, name, number, answer)
        assert not good, answer
        told = line.removesuffix(ALL[name][number].look)
        assert told.startswith(f"exercise {number}: not yet: ")
        words = {str(one) for one in right} if isinstance(right, set | list) else {str(right)}
        # A count of what is missing may be a digit that a right set holds as well.
        assert isinstance(right, set | list) or not words & set(told.replace(",", " ").split()), told


@pytest.mark.parametrize(("name", "number"), CASES)
def test_an_answer_of_another_form_is_told_the_form(
    name: str, number: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for answer in (None, object, {"a": 1}, [True, 2, "3", None], True):
        good, line = said(capsys, name, number, answer)
        assert not good
        assert f"expected {ALL[name][number].form[0]}, got" in line


def test_the_dots_are_no_answer_yet(capsys: pytest.CaptureFixture[str]) -> None:
    good, line = said(capsys, "01", 1, ...)
    assert not good
    assert line == "exercise 1: no answer yet; put a whole number in place of the dots"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: exercises("99"), "notebook: expected one of"),
        (lambda: exercises("01")(9, 1), r"number: expected one of \[1, 2, 3, 4\], got 9"),
    ],
)
def test_what_there_is_not_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_hints_count_and_do_not_name() -> None:
    sets = Exercise(module.TEXTS, lambda: {"a", "b"}, "Look.")
    assert sets.fault({"a", "c", "d"}) == "2 of yours do not belong, 1 missing"
    lists = Exercise(module._TWO_TEXTS, lambda: ["a", "b"], "Look.")
    assert lists.fault(["a", "c"]) == "1 of 2 are right"
    numbers = Exercise(module.NUMBER, lambda: 2.0, "Look.", within=0.1)
    assert [numbers.fault(x) for x in (1.8, 1.95, 2.2)] == ["too small", None, "too large"]
