"""Questions about broken and mended code, the answers that must come out, and how an answer is kept.

An incident is a list of questions. A question is a function; its variants and the verdict expected of each
stand beside it. The function returns an :class:`Answer`, which is good or bad for the requests that were
served, or open:

>>> incident = Incident("an_example")
>>> KERNELS = {"writes every row": 0.0, "leaves empty rows": float("nan")}
>>> @incident.question(
...     "empty row", KERNELS, expect={"writes every row": "zero", "leaves empty rows": "unwritten"}
... )
... def empty_row(content, device):
...     '''Memory starts as NaN. What does the row of an empty request hold after the step?'''
...     if content == 0:
...         return good("zero")
...     return bad("unwritten", rows=1)
>>> [(found.variant, found.verdict, found.outcome.value, found.ok) for found in incident.ask("empty row")]
[('writes every row', 'zero', 'good', True), ('leaves empty rows', 'unwritten', 'bad', True)]

Variants are a mapping from name to subject, or a list of names that are their own subjects; :func:`product`
makes those of a grid. ``expect`` is one verdict for all variants, or a dict with each of them; ``None``
records any answer. What several variants share, such as a server that starts slowly, is a :class:`Scene`; its
result is the third argument.

If this machine cannot answer, a question returns ``not_run(reason)``, or ``needs`` gives the reason. That is
neither as expected nor wrong.

A remedy is *fixed* only if the same question gives bad without it, good with it, bad without it again, and
``compare`` finds the result right:

>>> def compare(content, device):
...     return None if content == 0 else "an empty row is not zero"
>>> incident.fixes(empty_row, {"zero them": Fix(off=float("nan"), on=0.0)}, compare=compare)
>>> (found,) = incident.ask("off/on/off")
>>> found.verdict, found.three.text
('fixed', 'unwritten, zero, unwritten, right')
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import itertools
import json
import os
import pickle
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from staleproof import child, machine
from staleproof import device as devices
from staleproof.check import fail, require
from staleproof.device import Provenance
from staleproof.grades import REPLICA, Evidence

SCHEMA = 4
OFF_ON_OFF = "off/on/off"
NOT_RUN = "not run"
FIXED, NOT_FIXED, NOT_REPRODUCED, WRONG = "fixed", "not fixed", "not reproduced", "wrong"
LIMIT_S = 900.0
# Names a folder, if the processes of one command ask each question once, whoever needs the answer first:
# incidents and notebooks ask the same. The folder lasts as long as the command.
SHARED = "STALEPROOF_SHARED_FINDINGS"


class Outcome(StrEnum):
    """What an answer means for the requests that were served."""

    GOOD = "good"
    BAD = "bad"
    OPEN = "open"
    NOT_RUN = NOT_RUN


class MissingError(RuntimeError):
    """Raised by a question: something that it needs is not there. The text says what, in one line."""


@dataclass(frozen=True)
class Answer:
    """What a question returns. It does not know the expected verdict.

    Attributes:
        outcome: good, bad or open for the requests that were served, or not run.
        verdict: a few words.
        numbers: the values that the verdict rests on; JSON values.
        note: one line of explanation.
        evidence: whose code ran, if it differs from the question's.
        provenance: if it differs from the process's, for example for ranks on a CPU beside a GPU.
    """

    outcome: Outcome
    verdict: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    evidence: Evidence | None = None
    provenance: Provenance | None = None


def _answer(outcome: Outcome, verdict: str, details: dict[str, Any]) -> Answer:
    own = {name: details.pop(name) for name in ("note", "evidence", "provenance") if name in details}
    return Answer(outcome, str(verdict), details, **own)


def good(verdict: str, /, **details: Any) -> Answer:
    """Nothing is wrong for the requests that were served.

    Args:
        verdict: a few words.
        details: numbers that the verdict rests on; ``note``, ``evidence``, ``provenance`` of :class:`Answer`.

    >>> good("clean", note="row 3", rows=8).numbers
    {'rows': 8}
    """
    return _answer(Outcome.GOOD, verdict, details)


def bad(verdict: str, /, **details: Any) -> Answer:
    """Something is wrong for the requests that were served; arguments as :func:`good`."""
    return _answer(Outcome.BAD, verdict, details)


def open_(verdict: str, /, **details: Any) -> Answer:
    """An answer that is neither good nor bad, such as a measured time; arguments as :func:`good`."""
    return _answer(Outcome.OPEN, verdict, details)


def good_if(ok: bool, verdict: str, /, **details: Any) -> Answer:
    """:func:`good` or :func:`bad` with the same verdict and numbers.

    >>> good_if(False, "leaked", moved_rows=3).outcome.value
    'bad'
    """
    return (good if ok else bad)(verdict, **details)


def not_run(reason: str) -> Answer:
    """The question was not run here, for this reason, which becomes one line.

    >>> not_run("needs an SM100 GPU").verdict
    'not run'
    """
    require(bool(reason.strip()), "reason", "why the question was not run", repr(reason))
    return Answer(Outcome.NOT_RUN, NOT_RUN, note=" ".join(reason.split()))


def failed(error: Exception) -> Answer:
    """Not run, because somebody else's kernel failed; so the other variants still run.

    >>> failed(RuntimeError("no kernel image\\n  at launch")).note
    'failed: RuntimeError: no kernel image at launch'
    """
    return not_run(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")


class Key(NamedTuple):
    """Names a finding: the same on all machines.

    Attributes:
        incident: folder name, e.g. ``mla_padding``.
        question: a short name, e.g. ``empty row``.
        variant: which kernel or remedy the question is about.
        release: of the package, where one run asks several releases.
    """

    incident: str
    question: str
    variant: str
    release: str = ""

    @property
    def text(self) -> str:
        """One line: the parts that are there, with commas."""
        return ", ".join(filter(None, self))


_OF_FIX = {FIXED: Outcome.GOOD, NOT_FIXED: Outcome.BAD, WRONG: Outcome.BAD, NOT_REPRODUCED: Outcome.OPEN}


@dataclass(frozen=True)
class Three:
    """The answers without a remedy, with it, and without it again.

    Attributes:
        off, on, again: the three verdicts.
        outcomes: their outcomes.
        right: whether the result of the run with the remedy was compared with a reference and is right;
            ``None`` if it was not compared.
        wrong: what the comparison found, in one line.

    Raises:
        ValueError: an unknown outcome, or two outcomes of one verdict.
    """

    off: str
    on: str
    again: str
    outcomes: Sequence[str]
    right: bool | None = None
    wrong: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "outcomes", tuple(map(Outcome, self.outcomes)))
        pairs = {*zip((self.off, self.on, self.again), self.outcomes, strict=True)}
        once = len(pairs) == len({verdict for verdict, _ in pairs})
        require(once, "outcomes", "one outcome of each verdict", sorted(pairs))

    @property
    def verdict(self) -> str:
        """What they show: fixed only if bad, good, bad, and a result that was compared and is right.

        >>> runs, outcomes = ("leaked", "clean", "leaked"), ("bad", "good", "bad")
        >>> Three(*runs, outcomes, right=True).verdict, Three(*runs, outcomes).verdict
        ('fixed', 'wrong')
        >>> Three("clean", "clean", "leaked", ("good", "good", "bad"), right=True).verdict
        'not reproduced'
        """
        off, on, again = self.outcomes
        if (off, again) != (Outcome.BAD, Outcome.BAD):
            return NOT_REPRODUCED
        if on != Outcome.GOOD:
            return NOT_FIXED
        return FIXED if self.right is True else WRONG

    @property
    def outcome(self) -> Outcome:
        """The outcome of that verdict."""
        return _OF_FIX[self.verdict]

    @property
    def text(self) -> str:
        """The three verdicts and the result of the comparison, in one line."""
        compared = {True: "right", False: self.wrong or "wrong", None: "not compared"}[self.right]
        return ", ".join((self.off, self.on, self.again, compared))


@dataclass(frozen=True)
class Finding:
    """One answer, with what it was about, and when and where it was given.

    Attributes:
        incident, question, variant, release: see :class:`Key`.
        verdict: a few words.
        outcome: good, bad or open for the requests that were served, or not run.
        numbers: the values that the verdict rests on; JSON values.
        expected: the verdict that this variant must give; ``None``: any verdict is recorded.
        three: of a remedy: what off / on / off gave.
        provenance: MEASURED, INTERPRETED or RECORDED.
        machine: :class:`staleproof.device.Machine` as a dict.
        commit: of staleproof's checkout; empty if it is not known.
        date: UTC day, ISO.
        note: one line, e.g. why a question was not run.
        grade: a :class:`Grade`: what the question was put to; empty where nothing ran.
        of: whose code that was, e.g. ``"vLLM 0.20.2"``.
        schema: version of this format.

    Raises:
        ValueError: an unknown outcome, a remedy without its three runs, or one whose verdict is not what they
            gave.

    >>> three = Three("leaked", "clean", "leaked", ("bad", "good", "bad"))
    >>> Finding("an_example", "off/on/off", "ours", "fixed", "good", three=three)
    Traceback (most recent call last):
    ValueError: verdict: expected wrong, which is what off/on/off gave (leaked, clean, leaked, not \
compared), got fixed
    """

    incident: str
    question: str
    variant: str
    verdict: str
    outcome: Outcome
    release: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    expected: str | None = None
    three: Three | None = None
    provenance: Provenance = Provenance.INTERPRETED
    machine: Mapping[str, Any] = field(default_factory=dict)
    commit: str = ""
    date: str = ""
    note: str = ""
    grade: str = ""
    of: str = ""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        object.__setattr__(self, "outcome", Outcome(self.outcome))
        is_run = self.verdict != NOT_RUN
        require(is_run == self.ran, "outcome", "not run, exactly with the verdict not run", self.outcome)
        if not self.ran:
            return
        three, is_fix = self.three, self.question == OFF_ON_OFF or self.verdict == FIXED
        require(is_fix == bool(three), "three", f"the runs of a remedy, exactly for {OFF_ON_OFF}", three)
        if three is not None and (self.verdict, self.outcome) != (three.verdict, three.outcome):
            fail("verdict", f"{three.verdict}, which is what off/on/off gave ({three.text})", self.verdict)

    @property
    def key(self) -> Key:
        """Names this finding."""
        return Key(self.incident, self.question, self.variant, self.release)

    @property
    def ran(self) -> bool:
        """Whether the question was answered: False if this machine lacks something that it needs."""
        return self.outcome is not Outcome.NOT_RUN

    @property
    def ok(self) -> bool:
        """Whether the verdict is as expected. ``not run`` is neither ok nor failed."""
        return self.ran and self.expected in (None, self.verdict)

    @property
    def failed(self) -> bool:
        """Whether the question was answered, and the verdict is not as expected."""
        return self.ran and not self.ok

    @property
    def origin(self) -> str:
        """Commit and day, e.g. ``b8cd03a0, 2026-11-27``."""
        return ", ".join(filter(None, (self.commit, self.date)))

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Finding:
        """The finding of a line of JSON. A verdict that its three runs do not show becomes what they show.

        Raises:
            ValueError: a schema, field or outcome that this version does not know.
        """
        row = dict(row)
        schema = row.get("schema")
        require(schema == SCHEMA, "schema", f"{SCHEMA}, which this staleproof reads", schema)
        unknown = sorted(row.keys() - cls.__dataclass_fields__.keys())
        require(not unknown, "finding", "the fields of a finding", f"also {unknown}")
        if row.get("three") is not None:
            row["three"] = three = Three(**row["three"])
            claimed = row.get("verdict")
            if claimed not in (NOT_RUN, three.verdict):
                row["verdict"], row["outcome"] = three.verdict, three.outcome
                row["expected"] = row.get("expected") or claimed
                row["note"] = f"recorded as {claimed}, but off/on/off gave {three.text}"
        row["provenance"] = Provenance(row.get("provenance", cls.provenance))
        return cls(**row)


def finding(
    key: Key,
    answer: Answer,
    *,
    expected: str | None = None,
    three: Three | None = None,
    evidence: Evidence = REPLICA,
) -> Finding:
    """The finding of an answer that was given in this process just now.

    >>> found = finding(Key("an_example", "empty row", "ours"), good("zero", rows=1), expected="zero")
    >>> found.ok, found.grade, found.numbers
    (True, 'replica', {'rows': 1})
    """
    ran = answer.outcome is not Outcome.NOT_RUN
    whose = answer.evidence or evidence
    return Finding(
        **key._asdict(),
        **{name: getattr(answer, name) for name in ("verdict", "outcome", "numbers", "note")},
        expected=expected if ran else None,
        three=three if ran else None,
        provenance=answer.provenance or devices.provenance(),
        machine=devices.machine().as_dict(),
        commit=machine.commit(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        grade=str(whose.grade) if ran else "",
        of=whose.of if ran else "",
    )


@dataclass(frozen=True)
class Scene:
    """What several variants share and what must happen once for all of them.

    Attributes:
        name: for the error if it fails.
        begin: ``begin(device)`` does the work; its result is the third argument of each question.
        limit_s: seconds that its child processes may take together.
    """

    name: str
    begin: Callable[[str], Any]
    limit_s: float = LIMIT_S


@dataclass(frozen=True)
class Fix:
    """The subjects of off / on / off.

    Attributes:
        off: without the remedy; it is asked first, and last.
        on: with it.
        again: without it, asked last, if that is not ``off``: a third process, for example.
    """

    off: Any
    on: Any
    again: Any = None


Ask = Callable[..., Answer]
Needs = Callable[[Any, str], str | None]
Compare = Callable[..., str | None]
Variants = Mapping[str, Any] | Sequence[str]
Expect = str | None | Mapping[str, str | None]
Progress = Callable[[str], None]
Function = TypeVar("Function", bound=Ask)


def needs_cuda(subject: Any, device: str) -> str | None:
    """Why a question that needs a CUDA device cannot be answered here."""
    return None if device == "cuda" else "needs a CUDA device"


def product(*axes: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The variants of a grid: each combination of names.

    >>> product(("one", "two"), {"NaN": 0})
    {'one, NaN': ('one', 'NaN'), 'two, NaN': ('two', 'NaN')}
    """
    return {", ".join(names): names for names in itertools.product(*axes)}


@dataclass(frozen=True)
class Case:
    """One question about one variant; :meth:`Incident.question` and :meth:`Incident.fixes` make them.

    Attributes:
        key: names it.
        ask: ``ask(subject, device)``, or with a scene ``ask(subject, device, result)``.
        subject: what the question is put to; of a remedy a :class:`Fix`.
        expected: the verdict that must come out; ``None``: any.
        needs: ``needs(subject, device)`` returns why this cannot be run here, or ``None``.
        evidence: whose code runs, or a function from the subject to that.
        scene: what it shares with other cases.
        limit_s: seconds that its child processes may take together.
        compare: of a remedy; see :meth:`Incident.fixes`.
    """

    key: Key
    ask: Ask
    subject: Any
    expected: str | None = None
    needs: Needs | None = None
    evidence: Evidence | Callable[[Any], Evidence] = REPLICA
    scene: Scene | None = None
    limit_s: float = LIMIT_S
    compare: Compare | None = None

    def missing(self, device: str) -> str | None:
        """Why this cannot be run here, or ``None``."""
        pair = isinstance(self.subject, Fix)
        subjects = (self.subject.off, self.subject.on) if pair else (self.subject,)
        reasons = (self.needs(subject, device) for subject in subjects if self.needs)
        return next(filter(None, reasons), None)

    def grade(self) -> Evidence:
        """Whose code runs; of a remedy, with it. Known only where it can run."""
        of = self.subject.on if isinstance(self.subject, Fix) else self.subject
        return self.evidence(of) if callable(self.evidence) else self.evidence


class Incident:
    """The questions of one incident, in the order in which they are asked.

    Args:
        name: its folder.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.cases: list[Case] = []

    def question(
        self,
        name: str,
        variants: Variants,
        *,
        expect: Expect,
        needs: Needs | None = None,
        evidence: Evidence | Callable[[Any], Evidence] = REPLICA,
        scene: Scene | Callable[[Any], Scene] | None = None,
        limit_s: float = LIMIT_S,
    ) -> Callable[[Function], Function]:
        """A decorator that asks a function about each variant; it returns the function as it is.

        Args:
            name: of the question, e.g. ``"empty row"``. Several functions may answer it, for other variants.
            variants: name -> subject, or names that are their own subjects.
            expect: the verdict of all variants, or of each. ``None``: any answer is recorded.
            needs: ``needs(subject, device)`` returns why this machine cannot answer, or ``None``.
            evidence: whose code runs, or a function from the subject to that.
            scene: what variants share, or a function from the subject to that. It runs once.
            limit_s: seconds that the child processes of one variant may take together.

        Raises:
            ValueError: a variant that is there already, or ``expect`` with other variants.
        """
        more = {"needs": needs, "evidence": evidence, "scene": scene, "limit_s": limit_s}

        def register(ask: Function) -> Function:
            self._add(name, ask, variants, expect, more)
            return ask

        return register

    def fixes(
        self, ask: Ask, remedies: Mapping[str, Fix], *, compare: Compare, expect: Expect = FIXED, **more: Any
    ) -> None:
        """Ask a question off / on / off of each remedy.

        Args:
            ask: the question; it need not be one of the incident's.
            remedies: name -> the subjects without and with it.
            compare: ``compare(subject, device)`` compares the result with the remedy to a reference, within a
                stated error, and returns what is wrong in one line, or ``None``. With a scene it gets the
                scene's result too. It runs whenever the run with the remedy is good, whatever is expected.
            expect: ``"fixed"``, or the verdict of each remedy.
            more: ``needs``, ``evidence``, ``scene`` and ``limit_s`` of :meth:`question`.

        Raises:
            ValueError: as :meth:`question`.
        """
        self._add(OFF_ON_OFF, ask, remedies, expect, {**more, "compare": compare})

    def _add(
        self, question: str, ask: Ask, variants: Variants, expect: Expect, more: Mapping[str, Any]
    ) -> None:
        subjects = variants if isinstance(variants, Mapping) else dict(zip(variants, variants, strict=True))
        expected = expect if isinstance(expect, Mapping) else dict.fromkeys(subjects, expect)
        known = {case.key.variant for case in self.cases if case.key.question == question}
        twice, others = sorted(known & subjects.keys()), sorted(expected.keys() ^ subjects.keys())
        require(bool(subjects) and not twice, f"variants of {question}", "at least one, each once", twice)
        require(not others, f"expect of {question}", "a verdict of each variant", f"more or fewer: {others}")
        for variant, subject in subjects.items():
            one, scene = dict(more), more.get("scene")
            if callable(scene):
                one["scene"] = scene(subject.on if isinstance(subject, Fix) else subject)
            self.cases.append(Case(Key(self.name, question, variant), ask, subject, expected[variant], **one))

    def run(self, device: str, progress: Progress = lambda line: None) -> Generator[Finding]:
        """Ask every question; see :func:`run`."""
        return run(self.cases, device, progress)

    def ask(self, question: str, *variants: str, device: str | None = None) -> list[Finding]:
        """Ask one question; for notebooks and tests.

        Args:
            question: its name.
            variants: some of its variants; all by default.
            device: ``"cpu"``, ``"cuda"``, or ``None`` for the device of this process.

        Raises:
            ValueError: no such question, or no such variant.
        """
        known = [*dict.fromkeys(case.key.question for case in self.cases)]
        require(question in known, "question", f"one of {known}", repr(question))
        names = {case.key.variant: case for case in self.cases if case.key.question == question}
        require({*variants} <= names.keys(), "variants", f"some of {[*names]}", list(variants))
        chosen = [case for name, case in names.items() if name in (variants or names)]
        return [*run(chosen, devices.select() if device is None else device)]


def run(cases: Sequence[Case], device: str, progress: Progress = lambda line: None) -> Generator[Finding]:
    """Run cases, and yield each finding as soon as it is there, in the order of the cases.

    However this ends (the last answer, an error, Ctrl-C, a caller that stops listening), no child process
    is left.

    Args:
        cases: of one incident.
        device: ``"cpu"`` or ``"cuda"``.
        progress: takes one line about the step that begins.
    """
    scenes = _Scenes()
    try:
        for number, case in enumerate(cases, 1):
            step = case.key._replace(incident="").text
            progress(f"{case.key.incident} {number}/{len(cases)}: {step}")
            # The caller runs between two findings, and must find its own number of threads then.
            with devices.one_thread(), child.within(case.limit_s):
                found = _run_once(case, device, scenes)
            yield found
    finally:
        child.end_all()


class _Scenes(dict[Scene, Any]):
    """The results of the scenes that were used so far, or the error of one that failed."""

    def arguments(self, case: Case, device: str) -> tuple[Any, ...]:
        """The arguments of a question after subject and device.

        Raises:
            ChildError: the scene failed; the text says how.
        """
        if (scene := case.scene) is None:
            return ()
        if scene not in self:
            with child.within(scene.limit_s):
                try:
                    self[scene] = scene.begin(device)
                except child.ChildError as error:
                    self[scene] = error
        if isinstance(result := self[scene], child.ChildError):
            raise child.ChildError(f"{scene.name}: {result}") from result
        return (result,)


def _run_once(case: Case, device: str, scenes: _Scenes) -> Finding:
    """Run a case, or take the finding of another process of this command; ``not run`` is never shared."""
    folder, file = os.environ.get(SHARED), None
    if folder:
        name = hashlib.sha256(repr((tuple(case.key), device)).encode()).hexdigest()
        file = Path(folder, name)
        if file.exists():
            return pickle.loads(file.read_bytes())
    found = _run(case, device, scenes)
    if file is not None and found.ran:
        # Renamed when it is whole, since another process may be looking.
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(found))
        part.replace(file)
    return found


def _run(case: Case, device: str, scenes: _Scenes) -> Finding:
    three = None
    try:
        if reason := case.missing(device):
            answer = not_run(reason)
        elif case.compare is None:
            answer = _asked(case, case.subject, device, *scenes.arguments(case, device))
        else:
            answer, three = _run_fix(case, device, *scenes.arguments(case, device))
    except (MissingError, child.ChildError) as error:
        answer = not_run(str(error))
    except ModuleNotFoundError as error:
        # A release may import a package that is not installed. A missing module of an installed one is a bug.
        package = (error.name or "").partition(".")[0]
        if not package or package == "staleproof" or importlib.util.find_spec(package) is not None:
            raise
        answer = not_run(f"{package} is not installed")
    evidence = REPLICA if answer.outcome is Outcome.NOT_RUN else case.grade()
    return finding(case.key, answer, expected=case.expected, three=three, evidence=evidence)


def _asked(case: Case, subject: Any, device: str, *shared: Any) -> Answer:
    answer = case.ask(subject, device, *shared)
    expected = "good(...), bad(...), open_(...) or not_run(...)"
    require(isinstance(answer, Answer), f"answer of {case.key.text}", expected, answer)
    return answer


def _run_fix(case: Case, device: str, *shared: Any) -> tuple[Answer, Three | None]:
    """Ask without the remedy, with it, and without it again."""
    pair, compare = case.subject, case.compare
    assert compare is not None
    answers: list[Answer] = []
    # The last run shows that the remedy made the difference, and not something that it left behind.
    for subject in (pair.off, pair.on, pair.off if pair.again is None else pair.again):
        answers.append(_asked(case, subject, device, *shared))
        if answers[-1].outcome is Outcome.NOT_RUN:
            return answers[-1], None
    (off, on, again), wrong, right = answers, None, None
    if on.outcome is Outcome.GOOD:
        wrong = compare(pair.on, device, *shared)
        is_text = isinstance(wrong, str) and bool(wrong)
        require(
            wrong is None or is_text,
            f"compare of {case.key.text}",
            "None, or a text: what is wrong",
            repr(wrong),
        )
        right = wrong is None
    outcomes = [answer.outcome for answer in answers]
    three = Three(off.verdict, on.verdict, again.verdict, outcomes, right, wrong or "")
    numbers = {
        f"{name}_{state}": value
        for state, one in zip(("off", "on", "again"), answers, strict=True)
        for name, value in one.numbers.items()
    }
    note = wrong or on.note
    return replace(on, outcome=three.outcome, verdict=three.verdict, numbers=numbers, note=note), three
