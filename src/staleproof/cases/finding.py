"""Findings: one answer to one question, with its outcome, machine and provenance.

>>> key = Key("an_incident", "empty row", "ours")
>>> found = finding(key, "rows", "clean", expected="clean", bad_rows=0)
>>> found.ok, found.failed, found.outcome.value, found.numbers
(True, False, 'good', {'bad_rows': 0})
>>> absent = not_run(key, "rows", "needs an SM100 GPU")
>>> absent.ok, absent.failed
(False, False)

"Fixed" is bad, good, bad, and a result that was compared with a reference and is right. A finding cannot be
made that says anything else:

>>> three = Three("rows", off="leaked", on="clean", again="leaked", right=None)
>>> finding(key, "fix", "fixed", three=three)
Traceback (most recent call last):
    ...
ValueError: verdict: expected wrong, which is what off/on/off gave (leaked, clean, leaked, not compared), \
got fixed
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from staleproof import device
from staleproof.cases import words as families
from staleproof.cases.digest import MACHINERY, source_digest
from staleproof.cases.words import FIX, FIXED, NOT_FIXED, NOT_REPRODUCED, NOT_RUN, WRONG, Outcome
from staleproof.check import fail, require
from staleproof.device import Provenance

SCHEMA = 3
OFF_ON_OFF = "off/on/off"


class RunFileError(RuntimeError):
    """A run file is truncated, of a newer schema, or cannot be read or written."""


class Grade(StrEnum):
    """What a question was put to, from the strongest evidence to the weakest.

    >>> Grade("replica") < Grade.REAL, [grade.value for grade in Grade]
    (False, ['real', 'source', 'replica', 'arithmetic'])
    """

    REAL = "real"
    """Third-party code ran: vLLM's, FlashInfer's, torch's."""
    SOURCE = "source"
    """What shipped source or a shipped binary says, by file and line; nothing ran."""
    REPLICA = "replica"
    """Our code ran, which follows a cited source."""
    ARITHMETIC = "arithmetic"
    """Computed from sizes or from bits; no server or kernel took part."""


@dataclass(frozen=True)
class Evidence:
    """The grade of an answer, and whose code it was put to.

    Attributes:
        grade: see :class:`Grade`.
        of: for :attr:`Grade.REAL` the package and version that ran, e.g. ``"vLLM 0.20.2"``.
    """

    grade: Grade
    of: str = ""

    def __post_init__(self) -> None:
        named = bool(self.of) or self.grade is not Grade.REAL
        require(named, "of", "the package and version whose code ran", repr(self.of))


REPLICA, ARITHMETIC = Evidence(Grade.REPLICA), Evidence(Grade.ARITHMETIC)
# Distribution -> how its project spells itself.
_SPELLING = {"flashinfer-python": "FlashInfer", "vllm": "vLLM"}


def real(distribution: str, what: str = "") -> Evidence:
    """Third-party code, named with its installed version.

    Args:
        distribution: name on the package index.
        what: which part of it, or in which way it was changed.

    >>> real("torch", "SDPA").of == f"torch {device.version_of('torch')} SDPA"
    True
    """
    name = _SPELLING.get(distribution, distribution)
    return Evidence(Grade.REAL, " ".join(filter(None, (name, device.version_of(distribution), what))))


def real_file(distribution: str, file: Path) -> Evidence:
    """Third-party code in a file, which need not be of the installed release.

    Args:
        distribution: name on the package index, and of the folder that the file is in.
        file: e.g. a compiled library. Its release is that of the distribution beside its folder.

    >>> real_file("vllm", Path("somewhere/_C.abi3.so")).of
    'vLLM, unknown release, _C'
    """
    file = file.resolve()
    name, what = _SPELLING.get(distribution, distribution), file.name.partition(".")[0]
    for folder in file.parents:
        if folder.name == distribution:
            for found in importlib.metadata.distributions(name=distribution, path=[str(folder.parent)]):
                return Evidence(Grade.REAL, f"{name} {found.version} {what}")
    return Evidence(Grade.REAL, f"{name}, unknown release, {what}")


class Key(NamedTuple):
    """Names a finding: the same on all machines.

    Attributes:
        incident: folder name, e.g. ``mla_padding``.
        question: a short name, e.g. ``empty row``.
        variant: which kernel or remedy the question is about.
        release: of the package that was asked, where one run asks several releases.
    """

    incident: str
    question: str
    variant: str
    release: str = ""

    @property
    def text(self) -> str:
        """One line: the parts that are there, with commas."""
        return ", ".join(filter(None, self))


@dataclass(frozen=True)
class Three:
    """What off / on / off of a remedy gave.

    Attributes:
        words: family of the three verdicts.
        off, on, again: the verdict without the remedy, with it, and without it again.
        right: whether the result of the run with the remedy was compared with a reference and is right;
            ``None`` if it was not compared.
        wrong: what the comparison found, in one line.
    """

    words: str
    off: str
    on: str
    again: str
    right: bool | None = None
    wrong: str = ""

    @property
    def verdict(self) -> str:
        """A word of the family ``fix``.

        >>> Three("rows", "leaked", "clean", "leaked", right=True).verdict
        'fixed'
        >>> Three("rows", "leaked", "clean", "leaked", right=False, wrong="3 times too large").verdict
        'wrong'
        >>> Three("rows", "clean", "clean", "leaked", right=True).verdict
        'not reproduced'
        """
        outcomes = [families.outcome(self.words, verdict) for verdict in (self.off, self.on, self.again)]
        if Outcome.NOT_RUN in outcomes:
            return NOT_RUN
        off, on, again = outcomes
        if off is not Outcome.BAD or again is not Outcome.BAD:
            return NOT_REPRODUCED
        if on is not Outcome.GOOD:
            return NOT_FIXED
        return FIXED if self.right is True else WRONG

    @property
    def text(self) -> str:
        """The three verdicts and what the comparison said, in one line."""
        compared = {True: "right", False: self.wrong or "wrong", None: "not compared"}[self.right]
        return ", ".join((self.off, self.on, self.again, compared))


@dataclass(frozen=True)
class Finding:
    """One answer.

    Attributes:
        incident, question, variant, release: see :class:`Key`.
        words: the family of the verdict (:data:`staleproof.cases.words.FAMILIES`).
        verdict: a word of that family.
        numbers: the values that the verdict rests on; JSON values.
        expected: the verdict that this variant must give; ``None``: any verdict is recorded.
        three: of a remedy: what off / on / off gave.
        provenance: MEASURED, INTERPRETED or RECORDED.
        machine: :class:`staleproof.device.Machine` as a dict.
        source_digest: :func:`~staleproof.cases.digest.source_digest` of the incident at the time.
        machinery: :data:`~staleproof.cases.digest.MACHINERY` at the time.
        date: UTC day, ISO.
        note: one line, e.g. why a question was not run.
        script: text of a program that shows this finding alone.
        grade: a :class:`Grade`: what the question was put to; empty where nothing ran.
        of: whose code that was, e.g. ``"vLLM 0.20.2"``.
        schema: version of this format.

    Raises:
        ValueError: an unknown word (:class:`~staleproof.cases.words.UnknownWordError`), a finding of the
            family ``fix`` without ``three``, or one whose verdict is not what its three runs gave.
    """

    incident: str
    question: str
    variant: str
    words: str
    verdict: str
    release: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    expected: str | None = None
    three: Three | None = None
    provenance: Provenance = Provenance.INTERPRETED
    machine: Mapping[str, Any] = field(default_factory=dict)
    source_digest: str = ""
    machinery: int = MACHINERY
    date: str = ""
    note: str = ""
    script: str = ""
    grade: str = ""
    of: str = ""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        families.word(self.words, self.verdict)
        if self.expected is not None:
            families.word(self.words, self.expected)
        if self.verdict == NOT_RUN:
            return
        require(
            (self.words == FIX) == (self.three is not None),
            "three",
            f"what off/on/off gave, exactly in findings of the family {FIX}",
            f"{self.words}, {self.three}",
        )
        if self.three is not None and self.three.verdict != self.verdict:
            gave = f"{self.three.verdict}, which is what off/on/off gave ({self.three.text})"
            fail("verdict", gave, self.verdict)

    @property
    def key(self) -> Key:
        """Names this finding."""
        return Key(self.incident, self.question, self.variant, self.release)

    @property
    def outcome(self) -> Outcome:
        """Good, bad or open for the requests that were served, or not run."""
        return families.outcome(self.words, self.verdict)

    @property
    def ran(self) -> bool:
        """Whether the question was asked: False if this machine lacks something that it needs."""
        return self.verdict != NOT_RUN

    @property
    def ok(self) -> bool:
        """Whether the verdict is as expected. ``not run`` is neither ok nor failed."""
        return self.ran and (self.expected is None or self.verdict == self.expected)

    @property
    def failed(self) -> bool:
        """Whether the question was asked and the verdict is not as expected."""
        return self.ran and not self.ok

    @property
    def stale(self) -> bool:
        """Whether what the answer depends on has changed since."""
        return self.source_digest != source_digest(self.incident) or self.machinery != MACHINERY

    def recorded(self) -> Finding:
        """The same finding, marked RECORDED."""
        return replace(self, provenance=Provenance.RECORDED)

    def to_json(self) -> str:
        """One line of JSON; it holds the outcome too, for other programs."""
        return json.dumps(asdict(self) | {"outcome": self.outcome}, sort_keys=True)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Finding:
        """The finding of a line of JSON. A verdict that its three runs do not show becomes what they show.

        Raises:
            ValueError: a schema, field or word that this version does not know.
        """
        row = dict(row)
        schema = row.get("schema")
        require(schema == SCHEMA, "schema", f"{SCHEMA}, which this staleproof reads", schema)
        said = row.pop("outcome", None)
        unknown = sorted(row.keys() - cls.__dataclass_fields__.keys())
        require(not unknown, "finding", "the fields of a finding", f"also {unknown}")
        if row.get("three") is not None:
            row["three"] = three = Three(**row["three"])
            claimed = row.get("verdict")
            if claimed not in (NOT_RUN, three.verdict):
                row["verdict"], row["expected"] = three.verdict, row.get("expected") or claimed
                row["note"] = f"said {claimed}, but off/on/off gave {three.text}"
                said = None
        found = cls(**row)
        require(said in (None, found.outcome), "outcome", f"{found.outcome} for {found.verdict}", said)
        return found


def finding(
    key: Key,
    words: str,
    verdict: str,
    *,
    expected: str | None = None,
    note: str = "",
    script: str = "",
    three: Three | None = None,
    evidence: Evidence = REPLICA,
    provenance: Provenance | None = None,
    **numbers: Any,
) -> Finding:
    """A finding obtained in this process just now."""
    return Finding(
        *key[:3],
        words,
        verdict,
        release=key.release,
        numbers=numbers,
        expected=expected,
        three=three,
        provenance=provenance or device.provenance(),
        machine=device.machine().as_dict(),
        source_digest=source_digest(key.incident),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        note=note,
        script=script,
        grade=evidence.grade if verdict != NOT_RUN else "",
        of=evidence.of if verdict != NOT_RUN else "",
    )


def not_run(key: Key, words: str, why: str) -> Finding:
    """A finding that says in one line why its question was not asked on this machine.

    It has no grade: nothing was put to anything.
    """
    return finding(key, words, NOT_RUN, note=why)


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    """Write findings as JSON lines, completely or not at all.

    Raises:
        RunFileError: the file cannot be written; an earlier file is unchanged.
    """
    write_lines(path, [f.to_json() for f in findings])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write to a file beside ``path``, then rename it: a failure leaves the earlier file as it was.

    If ``path`` is a link, this writes the file that it points to.
    """
    text = "".join(line + "\n" for line in lines)
    target = path.resolve()
    draft = target.with_name(target.name + ".part")
    with writing(path):
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        draft.replace(target)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one line that a file or folder cannot be written.

    Raises:
        RunFileError: the body raised an ``OSError``.
    """
    try:
        yield
    except OSError as error:
        raise RunFileError(f"{path}: cannot be written: {error.strerror}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file of a run.

    Raises:
        RunFileError: unreadable, truncated, not JSON lines, or of a newer schema.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RunFileError(f"{path}: cannot be read: {why}") from error
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RunFileError(
                f"{path}:{number}: truncated or not JSON: {error.msg}: column {error.colno}"
            ) from error
        if not isinstance(row, dict):
            raise RunFileError(f"{path}:{number}: expected an object, got {type(row).__name__}")
        rows.append(row)
    if text and not text.endswith("\n"):
        raise RunFileError(f"{path}: truncated: the last line has no end")
    return rows


def read_findings(path: Path, *, recorded: bool = True) -> list[Finding]:
    """The findings of a file.

    Args:
        path: JSON lines.
        recorded: mark each RECORDED; else they keep the provenance that they were given.

    Raises:
        RunFileError: as :func:`read_lines`, or a line is no finding of this schema: a field is missing or
            unknown, or a word that nobody defined.
    """
    found = []
    for number, row in enumerate(read_lines(path), 1):
        try:
            one = Finding.from_json(row)
            found.append(one.recorded() if recorded else replace(one, provenance=Provenance(one.provenance)))
        except (TypeError, ValueError) as error:
            raise RunFileError(f"{path}:{number}: not a finding: {error}") from error
    return found
