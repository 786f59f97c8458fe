"""The questions of an incident as a table, and the one runner that puts them.

A row of the table is a :class:`Question`, a :class:`Fix`, an :class:`Ablation` or, where answers do
not come one a variant, a :class:`Several`. The rows say what is asked, of whom, and what must come
out; the runner does the rest: progress, ``not run`` with its reason, one thread for tiny
operations, off / on / off, the order, and the end of every child process whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from staleproof import device as devices
from staleproof.harness import children
from staleproof.harness.findings import FIXED, NOT_RUN, OFF_ON_OFF, Finding, finding, not_run, off_on_off

ABLATION = "ablation"
ALL = "all four"
LIMIT_S = 900.0

Progress = Callable[[str], None]


def _silent(line: str) -> None:
    pass


def _always_available(subject: Any, device: str) -> str | None:
    return None


class _Unset:
    """Stands for "what the row says" where ``None`` already means "no expected verdict"."""


UNSET: Any = _Unset()


@dataclass(frozen=True)
class Answer:
    """One answer to a question.

    Attributes:
        verdict: the answer in a word or two.
        numbers: what it rests on; JSON values.
        note: one line beside it.
        question, variant, expected: only where they differ from those of the row and its subject.
        changes: other fields of the :class:`Finding` to set, e.g. its provenance.
    """

    verdict: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    question: str | None = None
    variant: str | None = None
    expected: str | None = UNSET
    changes: Mapping[str, Any] = field(default_factory=dict)


def answer(verdict: str, *, note: str = "", **numbers: Any) -> Answer:
    """An :class:`Answer` whose numbers are given by keyword."""
    return Answer(str(verdict), numbers, note)


def no_answer(why: str, *, question: str | None = None, variant: str | None = None) -> Answer:
    """An :class:`Answer` that says in one line why the question could not be put."""
    return Answer(NOT_RUN, note=why, question=question, variant=variant)


Said = str | Answer | Iterable[Answer]


def _answers(said: Said) -> Iterable[Answer]:
    if isinstance(said, str):
        return (Answer(str(said)),)
    return (said,) if isinstance(said, Answer) else said


def _expected(expected: Any, variant: str, subject: Any) -> str | None:
    """What a row expects of one variant: a verdict, a verdict a variant, or a rule."""
    if isinstance(expected, Mapping):
        return expected[variant]
    return expected(subject) if callable(expected) else expected


@dataclass(frozen=True)
class Question:
    """One question, put to each variant.

    Attributes:
        name: the question, e.g. ``"served, fmax"``.
        variants: name -> subject, what ``ask`` is given; or names, which are then the subjects.
        ask: ``ask(subject, device)`` -> a verdict, an :class:`Answer`, or several of them.
        expected: the verdict that must come out, or a mapping from variant or a function of the
            subject to it; ``None`` means that there is none, and any answer is recorded.
        unavailable: ``unavailable(subject, device)`` -> why it cannot be asked here, or ``None``.
        also: further questions that ``ask`` answers on the way. An answer names the one it answers.
        one_thread: run with one thread of torch: for operations of microseconds, where a second
            thread only waits.
        begin: ``begin(device)`` starts something slow before the first question of the table, e.g.
            a child process that compiles; its result is the third argument of ``ask``.
        limit_s: seconds that the child processes of one variant may take together.
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
        for said in _answers(self.ask(subject, device, *begun)):
            expected = said.expected
            if expected is UNSET:
                expected = _expected(self.expected, variant, subject)
            where = incident, said.question or self.name, said.variant or variant
            if said.verdict == NOT_RUN:
                found = not_run(*where, said.note)
            else:
                found = finding(*where, said.verdict, expected=expected, note=said.note, **said.numbers)
            yield replace(found, **said.changes)


@dataclass(frozen=True)
class Fix:
    """Off / on / off of one fix: broken fails, fixed passes, broken fails again.

    Attributes:
        variant: the fix.
        off: the subject without it.
        on: the subject with it.
        ask: ``ask(subject, device)`` -> a verdict or an :class:`Answer`; the same for all three.
        expected: :data:`FIXED`, or :data:`NOT_FIXED` for a remedy that is known not to hold.
        unavailable, one_thread, limit_s: as in :class:`Question`.
    """

    variant: str
    off: Any
    on: Any
    ask: Callable[[Any, str], str | Answer]
    expected: str = FIXED
    unavailable: Callable[[Any, str], str | None] = _always_available
    one_thread: bool = False
    limit_s: float = LIMIT_S

    name = OFF_ON_OFF
    begin = None

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
        # In this order: a fix that leaves something behind must not help the last run.
        off, on, again = (
            next(iter(_answers(self.ask(subject, device)))) for subject in (self.off, self.on, self.off)
        )
        yield off_on_off(
            incident,
            variant,
            off=off.verdict,
            on=on.verdict,
            off_again=again.verdict,
            expected=self.expected,
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
        without: what is left out -> the fields of ``base`` to change for that.
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
    """Answers that do not come one a variant, such as servers that are started in one go.

    Attributes:
        name: what is asked, for the progress line and for :meth:`Questions.ask`.
        ask: ``ask(device)`` -> answers, each with its question and variant.
        one_thread, limit_s: as in :class:`Question`.
    """

    name: str
    ask: Callable[[str], Iterable[Answer]]
    one_thread: bool = False
    limit_s: float = LIMIT_S

    begin = None
    subjects: Mapping[str, Any] = field(default_factory=lambda: {"": None}, init=False)

    def findings(self, incident: str, variant: str, device: str) -> Iterator[Finding]:
        """Ask all of it."""
        for said in self.ask(device):
            assert said.question is not None, f"{self.name}: an answer names its question"
            assert said.variant is not None, f"{self.name}: an answer names its variant"
            expected = None if said.expected is UNSET else said.expected
            where = incident, said.question, said.variant
            if said.verdict == NOT_RUN:
                found = not_run(*where, said.note)
            else:
                found = finding(*where, said.verdict, expected=expected, note=said.note, **said.numbers)
            yield replace(found, **said.changes)


Row = Question | Fix | Several


@contextmanager
def _threads(one: bool) -> Iterator[None]:
    """One thread of torch for the length of a ``with``, if ``one``."""
    if not one:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Questions:
    """The table of one incident.

    Args:
        incident: folder name.
        rows: the table, in the order in which it is asked.
    """

    def __init__(self, incident: str, *rows: Row) -> None:
        self.incident = incident
        self.rows = rows

    def run(self, device: str, progress: Progress = _silent) -> Iterator[Finding]:
        """Put every question, yielding each finding as it is obtained.

        Args:
            device: ``"cpu"`` or ``"cuda"``.
            progress: takes one line about the step that begins.
        """
        steps = [(row, variant) for row in self.rows for variant in row.subjects]
        try:
            begun = {id(row): (row.begin(device),) for row in self.rows if row.begin is not None}
            for number, (row, variant) in enumerate(steps, 1):
                what = ", ".join(filter(None, (row.name, variant)))
                progress(f"{self.incident} {number}/{len(steps)}: {what}")
                yield from self._put(row, variant, device, *begun.get(id(row), ()))
        finally:
            # Also when the caller stops listening, or the user presses Ctrl-C.
            children.end_all()

    def ask(self, name: str, *variants: str, device: str | None = None) -> list[Finding]:
        """Put one question of the table; for notebooks and tests.

        Args:
            name: of the row; rows of one name are asked one after another.
            variants: which of its variants; all by default.
            device: ``"cpu"``, ``"cuda"``, or ``None`` for this process's.

        Raises:
            ValueError: no such row, or no such variant.
        """
        device = devices.select() if device is None else device
        rows = [row for row in self.rows if row.name == name]
        known = [variant for row in rows for variant in row.subjects]
        if not rows:
            raise ValueError(f"name: expected one of {sorted({r.name for r in self.rows})}, got {name!r}")
        if unknown := [variant for variant in variants if variant not in known]:
            raise ValueError(f"variants: expected some of {known}, got {unknown}")
        found: list[Finding] = []
        try:
            for row in rows:
                begun = () if row.begin is None else (row.begin(device),)
                for variant in row.subjects:
                    if not variants or variant in variants:
                        found += self._put(row, variant, device, *begun)
        finally:
            children.end_all()
        return found

    def _put(self, row: Row, variant: str, device: str, *begun: Any) -> list[Finding]:
        # As a list, so that the thread count is back before the caller goes on.
        with _threads(row.one_thread), children.within(row.limit_s):
            return [*row.findings(self.incident, variant, device, *begun)]
