"""Checks the answers to a notebook's exercises, without giving them away.

A notebook calls ``check = exercises("01")`` once and then ``check(1, answer)``. What is right is in
``exercises.toml``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staleproof.check import require
from staleproof.report.show import Printed

ALL: Mapping[str, Mapping[str, Mapping[str, Any]]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text("utf-8")
)
_ONE = {int: "a whole number", float: "a number", str: "a text"}
_SOME = {int: "whole numbers", str: "texts", bool: "of True and False"}


@dataclass(frozen=True)
class Exercise:
    """One exercise: the right answer, ``value`` or a ``set`` or ``list``, and where to look.

    Attributes:
        right: the answer.
        look: where to look, said with every wrong answer.
        within: how far a number may be from the right one.
    """

    right: Any
    look: str
    within: float = 0.0

    @property
    def form(self) -> str:
        """What an answer must be, in words."""
        if not isinstance(self.right, set | list):
            return _ONE[type(self.right)]
        some = _SOME[type(next(iter(self.right)))]
        return f"a set of {some}" if isinstance(self.right, set) else f"a list of {len(self.right)} {some}"

    def _fits(self, answer: Any) -> bool:
        right = self.right
        if isinstance(right, float):
            return isinstance(answer, int | float) and not isinstance(answer, bool)
        if not isinstance(right, set | list):
            return type(answer) is type(right)
        taken = Collection if isinstance(right, set) else list | tuple
        if not isinstance(answer, taken) or isinstance(answer, str | bytes | Mapping):
            return False
        kind = type(next(iter(right)))
        return (isinstance(right, set) or len(answer) == len(right)) and all(type(x) is kind for x in answer)

    def fault(self, answer: Any) -> str | None:
        """What is wrong with an answer, in words that do not hold the right one; ``None`` if it is right.

        >>> Exercise({"a", "b"}, "Look.").fault({"a", "c", "d"})
        '2 of yours do not belong, 1 missing'
        >>> Exercise(["a", "b"], "Look.").fault(["a", "c"]), Exercise(2.0, "Look.", 0.1).fault(1.8)
        ('1 of 2 are right', 'too small')
        """
        right = self.right
        if not self._fits(answer):
            given = repr(answer)
            return f"expected {self.form}, got {given if len(given) < 60 else given[:57] + '...'}"
        if isinstance(right, set):
            extra, missing = len(set(answer) - right), len(right - set(answer))
            parts = [f"{extra} of yours do not belong"] * bool(extra) + [f"{missing} missing"] * bool(missing)
            return ", ".join(parts) or None
        if isinstance(right, list):
            good = sum(a == b for a, b in zip(answer, right, strict=True))
            return None if good == len(right) else f"{good} of {len(right)} are right"
        if isinstance(right, str):
            return None if answer == right else "not that one"
        return None if abs(answer - right) <= self.within else "too small" if answer < right else "too large"


@dataclass(frozen=True)
class Exercises:
    """The exercises of one notebook; call it with a number and an answer."""

    by_number: Mapping[int, Exercise]

    def __call__(self, number: int, answer: Any) -> Printed:
        """Print whether an answer is right, and if not what is wrong with it.

        Returns:
            Whether it is right. ``...`` is no answer yet.

        Raises:
            ValueError: an exercise that the notebook does not have.
        """
        require(number in self.by_number, "number", f"one of {sorted(self.by_number)}", number)
        exercise = self.by_number[number]
        if answer is ...:
            print(f"exercise {number}: no answer yet; put {exercise.form} in place of the dots")
            return Printed(False)
        fault = exercise.fault(answer)
        result = "right" if fault is None else f"not yet: {fault}. {exercise.look}"
        print(f"exercise {number}: {result}")
        return Printed(fault is None)


def exercises(notebook: str) -> Exercises:
    """The exercises of a notebook, by its two digits.

    Raises:
        ValueError: a notebook without exercises that can be checked.

    >>> _ = exercises("05")(1, 1.5)
    exercise 1: not yet: expected a whole number, got 1.5. Lines of 16 bytes: see the picture of a tile.
    """
    require(notebook in ALL, "notebook", f"one of {sorted(ALL)}", repr(notebook))
    return Exercises({int(number): _exercise(**entry) for number, entry in ALL[notebook].items()})


def _exercise(**entry: Any) -> Exercise:
    look, within = entry.pop("look"), entry.pop("within", 0.0)
    ((kind, right),) = entry.items()
    return Exercise(set(right) if kind == "set" else right, look, within)
