"""Right answers pass, wrong ones are told what is wrong, and no message holds the right answer.

That the file's answers are right is shown by the notebooks, whose answer cells compute them.
"""

from __future__ import annotations

from typing import Any

import pytest

from staleproof.report.exercises import ALL, Exercise, exercises


def wrong_answers(right: Any) -> list[Any]:
    """Answers of the right form that are wrong, near ones among them."""
    if isinstance(right, set):
        other: Any = "nobody" if isinstance(next(iter(right)), str) else -1
        return [set(), right | {other}, set(list(right)[1:]), {other}]
    if isinstance(right, list) and isinstance(right[0], bool):
        return [[not right[0], *right[1:]], [not one for one in right]]
    if isinstance(right, list):
        return [["nothing", *right[1:]], right[::-1]]
    return [right + "s", ""] if isinstance(right, str) else [right - 1, right + 1, 0, -right]


@pytest.mark.parametrize("name", ALL)
def test_right_answers_pass_and_wrong_ones_get_a_reason(name, capsys):
    check = exercises(name)
    for number in map(int, ALL[name]):
        passes_or_says_why_not(check, number, capsys)


def passes_or_says_why_not(check, number, capsys):
    exercise = check.by_number[number]
    assert check(number, exercise.right)
    assert capsys.readouterr().out == f"exercise {number}: right\n"
    for answer in wrong_answers(exercise.right):
        assert not check(number, answer), answer
        said = capsys.readouterr().out
        assert said.startswith(f"exercise {number}: not yet: ")
        told = said.strip().removesuffix(exercise.look).replace(",", " ").split()
        # A count of what is missing may be a digit that a right set holds as well.
        assert isinstance(exercise.right, set | list) or str(exercise.right) not in told
    for answer in (None, object, {"a": 1}, [True, 2, "3", None], True):
        assert not check(number, answer)
        assert f"expected {exercise.form}, got" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("right", "answer", "fault"),
    [
        (3, True, "expected a whole number, got True"),
        (2.0, 2.125, None),
        (2.0, 2.2, "too large"),
        (2.0, 2, None),
        ("a", 1, "expected a text, got 1"),
        ({1, 2}, [2, 1], None),
        ({1, 2}, {1: 2, 2: 1}, "expected a set of whole numbers, got {1: 2, 2: 1}"),
        ({1, 2}, {1, 3, 4}, "2 of yours do not belong, 1 missing"),
        ([True, False], (True, False), None),
        ([True, False], [True], "expected a list of 2 of True and False, got [True]"),
        (["a", "b"], ["b", "a"], "0 of 2 are right"),
        ("a", ["x" * 56], "expected a text, got ['" + "x" * 55 + "..."),
    ],
)
def test_fault_of_an_answer_is_named(right, answer, fault):
    assert Exercise(right, "Look.", 0.125).fault(answer) == fault


def test_dots_are_no_answer_yet(capsys):
    assert not exercises("01")(1, ...)
    assert (
        capsys.readouterr().out
        == "exercise 1: no answer yet; put a list of 3 of True and False in place of the dots\n"
    )


def test_unknown_exercise_is_refused():
    with pytest.raises(ValueError, match="notebook: expected one of"):
        exercises("99")
    with pytest.raises(ValueError, match=r"number: expected one of \[1\], got 9"):
        exercises("01")(9, 1)
