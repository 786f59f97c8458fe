"""The questions of an incident as a table, and the one runner that puts them.

A row of the table is a :class:`Question`, a :class:`Fix`, an :func:`Ablation`, or a
:class:`Several` if one call answers several questions. A row says what is asked, about which
variants, and which verdict is expected. The runner does the rest: progress lines, ``not run`` with
its reason, one thread for tiny operations, off / on / off, time limits, and the end of every child
process, also after an error or Ctrl-C.

>>> from staleproof.cases.answers import answer
>>> def parity(number, device):
...     return answer("odd" if number % 2 else "even", remainder=number % 2)
>>> table = Questions(
...     "an_incident",
...     Question("parity", {"two": 2, "three": 3}, parity, expected={"two": "even", "three": "odd"}),
... )
>>> [(found.variant, found.verdict, found.ok) for found in table.run("cpu")]
[('two', 'even', True), ('three', 'odd', True)]
>>> [found.numbers for found in table.ask("parity", "three", device="cpu")]
[{'remainder': 1}]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from staleproof import device as devices
from staleproof.cases import children
from staleproof.cases.answers import UNSET, Answer, Said, answers_of
from staleproof.cases.finding import (
    FIXED,
    NOT_FIXED,
    NOT_RUN,
    OFF_ON_OFF,
    REPLICA,
    Evidence,
    Finding,
    not_run,
    off_on_off,
)
from staleproof.check import require

ABLATION = "ablation"
ALL = "all four"
LIMIT_S = 900.0

Progress = Callable[[str], None]
# Of a row: the same for all its variants, or a function from the subject.
Grades = Evidence | Callable[[Any], Evidence]


def _silent(line: str) -> None:
    pass


def _always_available(subject: Any, device: str) -> str | None:
    return None


def _evidence(grades: Grades, subject: Any) -> Evidence:
    return grades if isinstance(grades, Evidence) else grades(subject)


def _expected(expected: Any, variant: str, subject: Any) -> str | None:
    """The verdict that a row expects of one variant; see :class:`Question`."""
    if isinstance(expected, Mapping):
        return expected[variant]
    return expected(subject) if callable(expected) else expected


@dataclass(frozen=True)
class Question:
    """One question, asked about each variant.

    Attributes:
        name: the question, e.g. ``"served, fmax"``.
        variants: a mapping from variant to the subject that ``ask`` receives, or a list of variants
            that are their own subjects.
        ask: ``ask(subject, device)`` returns a verdict or an :class:`Answer`, or yields several.
        expected: the verdict that must come out. A mapping from variant to verdict or a function
            from subject to verdict if it differs between variants. ``None``: no expected verdict,
            any answer is recorded.
        unavailable: ``unavailable(subject, device)`` returns why the question cannot be asked on
            this machine, or ``None`` if it can.
        also: other questions that ``ask`` answers too, each in an answer with that ``question``. If
            the subject is unavailable, they are reported as not run as well.
        one_thread: run with one thread of torch: for operations of microseconds, which a second
            thread only slows down. On a CPU every row does: interpreted kernels are such operations.
        begin: ``begin(device)`` starts something slow before the first question of the table, e.g.
            a child process that compiles. Its result is the third argument of ``ask``. Rows with the
            same ``begin`` share one result.
        limit_s: seconds that the child processes of one variant may take together.
        evidence: what is asked: our replica of somebody's code, or the code itself
            (:class:`~staleproof.cases.finding.Evidence`); or a function from the subject to that.
    """

    name: str
    variants: Mapping[str, Any] | Sequence[str]
    ask: Callable[..., Said]
    expected: Any = None
    unavailable: Callable[[Any, str], str | None] = _always_available
    also: tuple[str, ...] = ()
    one_thread: bool = False
    begin: Callable[[str], Any] | None = None
    limit_s: float = LIMIT_S
    evidence: Grades = REPLICA

    @property
    def subjects(self) -> Mapping[str, Any]:
        """Variant -> subject."""
        if isinstance(self.variants, Mapping):
            return self.variants
        return {name: name for name in self.variants}

    def findings(self, incident: str, variant: str, device: str, *begun: Any) -> Iterator[Finding]:
        """Ask one variant."""
        subject = self.subjects[variant]
        if why := self.unavailable(subject, device):
            for name in (self.name, *self.also):
                yield not_run(incident, name, variant, why)
            return
        for said in answers_of(self.ask(subject, device, *begun)):
            # The row need not expect anything of a variant whose answers say it themselves.
            own = said.expected is not UNSET or said.verdict == NOT_RUN
            expected = None if own else _expected(self.expected, variant, subject)
            yield said.finding(incident, self.name, variant, expected, _evidence(self.evidence, subject))


@dataclass(frozen=True)
class Fix:
    """Off / on / off of one fix: broken fails, fixed passes, broken fails again.

    Attributes:
        variant: the fix.
        off: the subject without it.
        on: the subject with it.
        ask: ``ask(subject, device)`` returns a verdict or an :class:`Answer`; it is called three
            times.
        wrong: ``wrong(on, device)`` compares what the fix computes with a reference, within a stated
            error: live rows, what the contract says of padding rows, and live rows again over other
            padding. It returns what is wrong in one line, or ``None``. Only a remedy that is known
            to fail needs none.
        expected: :data:`FIXED`, or :data:`NOT_FIXED` for a remedy that is known to fail.
        unavailable, one_thread, limit_s, evidence: as in :class:`Question`.

    Raises:
        ValueError: a fix without ``wrong``.
    """

    variant: str
    off: Any
    on: Any
    ask: Callable[[Any, str], str | Answer]
    wrong: Callable[[Any, str], str | None] | None = None
    expected: str = FIXED
    unavailable: Callable[[Any, str], str | None] = _always_available
    one_thread: bool = False
    limit_s: float = LIMIT_S
    evidence: Grades = REPLICA

    name = OFF_ON_OFF
    begin = None

    def __post_init__(self) -> None:
        compared = self.wrong is not None or self.expected == NOT_FIXED
        require(compared, "wrong", f"a comparison of {self.variant} with a reference", None)

    @property
    def subjects(self) -> Mapping[str, Any]:
        """Variant -> subject, as a :class:`Question` has them."""
        return {self.variant: self.on}

    def findings(self, incident: str, variant: str, device: str) -> Iterator[Finding]:
        """Ask without the fix, with it, and without it again."""
        for subject in (self.off, self.on):
            if why := self.unavailable(subject, device):
                yield not_run(incident, OFF_ON_OFF, variant, why)
                return
        # In this order: the last run shows that the fix, not something it left behind, made the
        # difference.
        asked: list[Answer] = []
        for subject in (self.off, self.on, self.off):
            asked.append(next(iter(answers_of(self.ask(subject, device)))))
            if asked[-1].verdict == NOT_RUN:
                yield not_run(incident, OFF_ON_OFF, variant, asked[-1].note)
                return
        off, on, again = asked
        wrong = None if self.wrong is None else self.wrong(self.on, device)
        yield off_on_off(
            incident,
            variant,
            off=off.verdict,
            on=on.verdict,
            off_again=again.verdict,
            wrong=wrong,
            expected=self.expected,
            evidence=_evidence(self.evidence, self.on),
            **{f"{name}_off": value for name, value in off.numbers.items()},
            **{f"{name}_on": value for name, value in on.numbers.items()},
        )


def Ablation(
    base: Any,
    *,
    without: Mapping[str, Mapping[str, Any]],
    ask: Callable[[Any, str], Said],
    expected: Mapping[str, str],
    name: str = ABLATION,
    whole: str = ALL,
    **options: Any,
) -> Question:
    """The failure with each of its ingredients taken away, one at a time.

    Args:
        base: a dataclass with all ingredients.
        without: maps what is left out to the fields of ``base`` that change then.
        ask: as in :class:`Question`.
        expected: the verdict for ``whole`` and for each key of ``without``.
        name: the question's name.
        whole: the variant with all ingredients.
        options: further fields of :class:`Question`.
    """
    variants = {whole: base} | {what: replace(base, **changes) for what, changes in without.items()}
    return Question(name, variants, ask, expected, **options)


@dataclass(frozen=True)
class Several:
    """Several questions that one call answers, e.g. about servers that are started together.

    Attributes:
        name: what is asked, for the progress line and for :meth:`Questions.ask`.
        ask: ``ask(device)`` yields answers, each with its question and variant. An answer without
            ``expected`` has no expected verdict.
        one_thread, limit_s, evidence: as in :class:`Question`.
    """

    name: str
    ask: Callable[[str], Iterable[Answer]]
    one_thread: bool = False
    limit_s: float = LIMIT_S
    evidence: Evidence = REPLICA

    begin = None
    subjects: Mapping[str, Any] = field(default_factory=lambda: {"": None}, init=False)

    def findings(self, incident: str, variant: str, device: str) -> Iterator[Finding]:
        """Ask all of it."""
        for said in self.ask(device):
            assert said.question is not None, f"{self.name}: an answer without a question"
            assert said.variant is not None, f"{self.name}: an answer without a variant"
            yield said.finding(incident, said.question, said.variant, None, self.evidence)


Row = Question | Fix | Several


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch for the length of a ``with``: for operations of microseconds.

    Handing these to a second thread takes longer than doing them, ten times longer on a busy machine.

    >>> import torch
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _begin(rows: Iterable[Row], device: str) -> dict[Any, Any]:
    """Each ``begin`` of these rows with its result."""
    starts = dict.fromkeys(row.begin for row in rows)
    return {begin: begin(device) for begin in starts if begin is not None}


class Questions:
    """The table of one incident.

    Args:
        incident: folder name.
        rows: the table, in the order in which it is asked.
    """

    def __init__(self, incident: str, *rows: Row) -> None:
        self.incident = incident
        self.rows = rows

    @property
    def steps(self) -> list[str]:
        """What :meth:`run` asks, one name a line of progress."""
        return [", ".join(filter(None, (row.name, variant))) for row in self.rows for variant in row.subjects]

    def run(self, device: str, progress: Progress = _silent) -> Generator[Finding]:
        """Ask every question, yielding each finding as soon as it is there.

        However this ends (the last answer, an error, Ctrl-C, a caller that stops listening), no
        child process is left.

        Args:
            device: ``"cpu"`` or ``"cuda"``.
            progress: takes one line about the step that begins.
        """
        asked = [(row, variant) for row in self.rows for variant in row.subjects]
        try:
            begun = _begin(self.rows, device)
            for number, (step, (row, variant)) in enumerate(zip(self.steps, asked, strict=True), 1):
                progress(f"{self.incident} {number}/{len(asked)}: {step}")
                yield from self._put(row, variant, device, begun)
        finally:
            children.end_all()

    def ask(self, name: str, *variants: str, device: str | None = None) -> list[Finding]:
        """Ask one question of the table; for notebooks and tests.

        Args:
            name: of the row; if several rows have it, all of them are asked.
            variants: some of its variants; all by default.
            device: ``"cpu"``, ``"cuda"``, or ``None`` for the device of this process.

        Raises:
            ValueError: no such row, or no such variant.
        """
        device = devices.select() if device is None else device
        rows = [row for row in self.rows if row.name == name]
        names = sorted({row.name for row in self.rows})
        require(bool(rows), "name", f"one of {names}", repr(name))
        known = [variant for row in rows for variant in row.subjects]
        require(set(variants) <= set(known), "variants", f"some of {known}", list(variants))
        try:
            begun = _begin(rows, device)
            return [
                found
                for row in rows
                for variant in row.subjects
                if not variants or variant in variants
                for found in self._put(row, variant, device, begun)
            ]
        finally:
            children.end_all()

    def _put(self, row: Row, variant: str, device: str, begun: Mapping[Any, Any]) -> Iterator[Finding]:
        arguments = () if row.begin is None else (begun[row.begin],)
        answers = row.findings(self.incident, variant, device, *arguments)
        deadline = time.monotonic() + row.limit_s
        while True:
            # One block an answer, not one around all: the caller runs between two answers, and
            # must find its own number of threads and no time limit.
            with (
                one_thread() if row.one_thread or device == "cpu" else nullcontext(),
                children.within(deadline - time.monotonic()),
            ):
                found = next(answers, None)
            if found is None:
                return
            yield found
