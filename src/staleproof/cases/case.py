"""Cases: one question put to one subject, with the verdict that must come out.

A table of an incident is a list of cases (:class:`staleproof.cases.run.Table`). What several cases share,
such as a server that must start first, is a :class:`Scene`. A remedy is a :class:`Fix`: it is asked without,
with and again without, and its result is compared with a reference.

>>> from staleproof.cases.run import Table
>>> def parity(number, device):
...     return reading("right" if number % 2 else "NaN", remainder=number % 2)
>>> table = Table("an_incident", each("parity", "access", {"two": 2, "three": 3}, parity, expect="right"))
>>> [(found.variant, found.verdict, found.ok) for found in table.run("cpu")]
[('two', 'NaN', False), ('three', 'right', True)]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from staleproof.cases import words as families
from staleproof.cases.finding import OFF_ON_OFF, REPLICA, Evidence, Key
from staleproof.cases.words import FIX, FIXED, NOT_RUN
from staleproof.check import fail, require
from staleproof.device import Provenance

ABLATION = "ablation"
ALL = "all four"
LIMIT_S = 900.0
# Field of a scene or case -> what it may be.
_KINDS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("name", "words", "reason"), (str,)),
    **dict.fromkeys(("tell", "ask", "needs"), (Callable,)),
    "expect": (str, Callable, type(None)),
    "limit_s": (int, float),
}
# From subject and device to the reason why a case cannot be asked here, or ``None``.
Needs = Callable[[Any, str], str | None]


@dataclass(frozen=True)
class Reading:
    """The result of :attr:`Case.ask`. It does not contain the expected verdict.

    Attributes:
        verdict: a word of the case's family, or ``not run``.
        numbers: the values that the verdict rests on; JSON values.
        note: one line of explanation.
        script: text of a program that shows this alone.
        evidence: whose code ran, if it differs from the case's.
        provenance: if it differs from the process's, for example for ranks on a CPU beside a GPU.
    """

    verdict: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    script: str = ""
    evidence: Evidence | None = None
    provenance: Provenance | None = None


def _check_kinds(one: Case | Scene, whose: str, **more: tuple[Any, ...]) -> None:
    """Refuse a field of a wrong type now, rather than when the case is asked."""
    for name, kinds in {**_KINDS, **more}.items():
        value = getattr(one, name, None)
        is_kind = isinstance(value, kinds) or not hasattr(one, name)
        require(is_kind, f"{name} of {whose}", " or ".join(kind.__name__ for kind in kinds), repr(value))


def reading(verdict: str, /, *, note: str = "", **numbers: Any) -> Reading:
    """A :class:`Reading` whose numbers are given by keyword.

    >>> reading("leaked", note="row 3", bad_rows=1).numbers
    {'bad_rows': 1}
    """
    return Reading(str(verdict), numbers, note)


def absent(why: str) -> Reading:
    """A :class:`Reading` that says in one line why the question was not run.

    >>> absent("needs an SM100 GPU").verdict
    'not run'
    """
    return Reading(NOT_RUN, note=why)


def failed(error: Exception) -> Reading:
    """A :class:`Reading` that says in one line how somebody's kernel failed, so that the others are asked.

    >>> failed(RuntimeError("no kernel image\\n  at launch")).note
    'failed: RuntimeError: no kernel image at launch'
    """
    return absent(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")


def nothing(subject: Any, device: str) -> str | None:
    """Nothing is missing: the default of :attr:`Case.needs`."""


def needs_cuda(subject: Any, device: str) -> str | None:
    """Why a case that needs a CUDA device cannot be asked here: of :attr:`Case.needs`."""
    return None if device == "cuda" else "needs a CUDA device"


def from_scene(subject: Any, device: str, told: Mapping[Any, Reading]) -> Reading:
    """A value for :attr:`Case.ask`: the scene's reading for this subject.

    >>> from_scene("one", "cpu", {"one": reading("right")}).verdict
    'right'
    """
    return told[subject]


@dataclass(frozen=True)
class Scene:
    """What several cases share and what must happen once for all of them.

    Attributes:
        name: for the line of progress, and for the error if it fails.
        tell: ``tell(device)`` does the work; its result is the third argument of each ``ask``.
        early: begin before the first case of the table, so that a slow start overlaps with other work.
            ``tell`` then starts something and returns at once.
        limit_s: seconds that its child processes may take together.
    """

    name: str
    tell: Callable[[str], Any]
    early: bool = False
    limit_s: float = LIMIT_S

    def __post_init__(self) -> None:
        _check_kinds(self, f"scene {self.name}")


@dataclass(frozen=True)
class Case:
    """One question, put to one subject.

    Attributes:
        key: incident, question, variant. A table fills in its incident.
        words: the family of its verdicts (:data:`staleproof.cases.words.FAMILIES`).
        ask: ``ask(subject, device)``, or with a scene ``ask(subject, device, told)``, returns a verdict or
            a :class:`Reading`.
        subject: what ``ask`` is put to, e.g. a kernel.
        expect: the verdict that must come out, or a function from the device to it. ``None``: any answer
            is recorded; then ``reason`` says why nothing is expected.
        reason: one sentence, where nothing is expected.
        needs: ``needs(subject, device)`` returns why the case cannot be asked here, or ``None``.
        evidence: whose code is asked (:class:`~staleproof.cases.finding.Evidence`), or a function from the
            subject to that.
        scene: what it shares with other cases.
        limit_s: seconds that its child processes may take together.
        named: variants that a mapping of expected verdicts names. The table must have them.

    Raises:
        ValueError: a field of a wrong type, an unknown family or word, or nothing expected without a reason.
    """

    key: Key
    words: str
    ask: Callable[..., Reading | str]
    subject: Any = None
    expect: str | Callable[[str], str | None] | None = None
    reason: str = ""
    needs: Needs = nothing
    evidence: Evidence | Callable[[Any], Evidence] = REPLICA
    scene: Scene | None = None
    limit_s: float = LIMIT_S
    named: frozenset[str] = field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        is_key = isinstance(self.key, Key) and all(isinstance(part, str) for part in self.key)
        require(is_key, "key", "a Key of texts: incident, question, variant", self.key)
        _check_kinds(self, self.key.text, evidence=(Evidence, Callable), scene=(Scene, type(None)))
        if self.expect is None and not self.reason:
            fail("expect", f"a verdict for {self.key.text}, or a reason why none is expected", None)
        families.word(self.words, NOT_RUN)
        if isinstance(self.expect, str):
            self.expected("cpu")

    def expected(self, device: str) -> str | None:
        """The verdict that must come out on ``device``, or ``None``.

        Raises:
            ValueError: it is no word of the family.
        """
        expect = self.expect(device) if callable(self.expect) else self.expect
        if expect is not None:
            families.word(FIX if isinstance(self, Fix) else self.words, expect, f"expect of {self.key.text}")
        return expect

    def grade(self) -> Evidence:
        """Whose code is asked."""
        return self.evidence if isinstance(self.evidence, Evidence) else self.evidence(self.subject)


@dataclass(frozen=True)
class Fix(Case):
    """Off / on / off of one remedy: broken fails, fixed passes, broken fails again.

    ``words`` is the family of the three readings; the verdict is of the family ``fix``. ``subject`` is what
    is asked with the remedy.

    Attributes:
        off: the subject without the remedy; it is asked before and after.
        again: the subject that is asked after, if it is not ``off``: a third process, for example.
        wrong: ``wrong(subject, device)`` compares the result with the remedy to a reference, within a stated
            error: live rows, padding rows as the contract defines them, and live rows again with other
            padding. It returns what is wrong in one line, or ``None``. With a scene it gets ``told`` as well.
            It runs whenever the run with the remedy shows no fault, whatever is expected.

    Raises:
        ValueError: a fix without ``wrong``.
    """

    expect: str | Callable[[str], str | None] | None = FIXED
    off: Any = None
    again: Any = None
    wrong: Callable[..., str | None] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        compares = f"a comparison of {self.key.variant} with a reference"
        require(callable(self.wrong), "wrong", compares, self.wrong)


def fix(
    variant: str,
    words: str,
    *,
    off: Any,
    on: Any,
    ask: Callable[..., Reading | str],
    wrong: Callable[..., str | None],
    **fields: Any,
) -> Fix:
    """A :class:`Fix` of the question ``off/on/off``.

    Args:
        variant: the remedy.
        words: family of the three readings.
        off, on: the subject without and with it.
        ask, wrong, fields: see :class:`Case` and :class:`Fix`.
    """
    return Fix(Key("", OFF_ON_OFF, variant), words, ask, on, off=off, wrong=wrong, **fields)


def each(
    question: str,
    words: str,
    subjects: Mapping[str, Any] | Sequence[str],
    ask: Callable[..., Reading | str],
    *,
    expect: Any = None,
    **fields: Any,
) -> list[Case]:
    """The same question to each of several subjects.

    Args:
        question, words, ask: see :class:`Case`.
        subjects: variant -> subject, or variants that are their own subjects.
        expect: one verdict for all, a mapping from variant to verdict, or a function from subject to verdict.
        fields: further fields of :class:`Case`. ``scene`` may be a function from the subject.

    Raises:
        ValueError: subjects of another kind, or as :class:`Case`.

    >>> known = {"ours": "zero"}
    >>> cases = each("empty row", "empty row", ["ours", "theirs"], print, expect=known, reason="new")
    >>> [(case.key.variant, case.expect) for case in cases]
    [('ours', 'zero'), ('theirs', None)]
    """
    is_kind = isinstance(subjects, Mapping | list | tuple) and all(isinstance(name, str) for name in subjects)
    require(is_kind, f"subjects of {question}", "variant -> subject, or variants, which are texts", subjects)
    if not isinstance(subjects, Mapping):
        subjects = {name: name for name in subjects}
    scene = fields.pop("scene", None)
    named = frozenset(expect if isinstance(expect, Mapping) else ())
    cases = []
    for variant, subject in subjects.items():
        wanted = expect.get(variant) if isinstance(expect, Mapping) else expect
        wanted = wanted(subject) if callable(wanted) else wanted
        shared = scene(subject) if callable(scene) else scene
        key = Key("", question, variant)
        cases.append(Case(key, words, ask, subject, expect=wanted, scene=shared, named=named, **fields))
    return cases


def ablation(
    base: Any,
    words: str,
    *,
    without: Mapping[str, tuple[Mapping[str, Any], str]],
    ask: Callable[..., Reading | str],
    expect: str,
    whole: str = ALL,
    **fields: Any,
) -> list[Case]:
    """The failure with each of its ingredients taken away, one at a time.

    Args:
        base: a dataclass with all ingredients.
        words, ask, fields: see :class:`Case`.
        without: maps what is left out to the fields of ``base`` that change then, and the verdict then.
        expect: the verdict for ``whole``.
        whole: the variant with all ingredients.
    """
    subjects = {whole: base} | {what: replace(base, **changes) for what, (changes, _) in without.items()}
    expected = {whole: expect} | {what: verdict for what, (_, verdict) in without.items()}
    return each(ABLATION, words, subjects, ask, expect=expected, **fields)
