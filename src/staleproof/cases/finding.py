"""Findings: one answer to one question, with its machine and provenance.

>>> found = finding("an_incident", "empty row", "ours", "clean", expected="clean", bad_rows=0)
>>> found.ok, found.failed, found.numbers
(True, False, {'bad_rows': 0})
>>> absent = not_run("an_incident", "empty row", "theirs", "needs an SM100 GPU")
>>> absent.ok, absent.failed
(False, False)
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from staleproof import device
from staleproof.cases.digest import source_digest
from staleproof.check import require
from staleproof.device import Provenance

SCHEMA = 2


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
    version = device.version_of(distribution) or ""
    return Evidence(Grade.REAL, " ".join(filter(None, (name, version, what))))


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


@dataclass(frozen=True)
class Finding:
    """One answer.

    Attributes:
        incident: folder name, e.g. ``mla_padding``.
        question: a short name, e.g. ``empty_row``.
        variant: which kernel or remedy the question is about.
        verdict: the answer in a word or two.
        numbers: the values that the verdict rests on; JSON values.
        expected: the verdict that this variant must give; ``None``: any verdict is recorded.
        provenance: MEASURED, INTERPRETED or RECORDED.
        machine: :class:`staleproof.device.Machine` as a dict.
        source_digest: :func:`~staleproof.cases.digest.source_digest` of the incident at the time.
        date: UTC day, ISO.
        note: one line, e.g. why a question was not run.
        grade: a :class:`Grade`: what the question was put to; empty in runs recorded before there
            were grades.
        of: whose code that was, e.g. ``"vLLM 0.20.2"``.
        schema: version of this format.
    """

    incident: str
    question: str
    variant: str
    verdict: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    expected: str | None = None
    provenance: Provenance = Provenance.INTERPRETED
    machine: Mapping[str, Any] = field(default_factory=dict)
    source_digest: str = ""
    date: str = ""
    note: str = ""
    grade: str = ""
    of: str = ""
    schema: int = SCHEMA

    @property
    def key(self) -> tuple[str, str, str]:
        """Incident, question and variant: the same for one finding on all machines."""
        return self.incident, self.question, self.variant

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
        """Whether the source of the incident, or anything it imports, has changed since."""
        return self.source_digest != source_digest(self.incident)

    def recorded(self) -> Finding:
        """The same finding, marked RECORDED."""
        return replace(self, provenance=Provenance.RECORDED)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)


NOT_RUN = "not run"


def finding(
    incident: str,
    question: str,
    variant: str,
    verdict: str,
    *,
    expected: str | None = None,
    note: str = "",
    evidence: Evidence = REPLICA,
    **numbers: Any,
) -> Finding:
    """A finding obtained in this process just now."""
    return Finding(
        incident=incident,
        question=question,
        variant=variant,
        verdict=verdict,
        numbers=numbers,
        expected=expected,
        provenance=device.provenance(),
        machine=device.machine().as_dict(),
        source_digest=source_digest(incident),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        note=note,
        grade=evidence.grade,
        of=evidence.of,
    )


def not_run(incident: str, question: str, variant: str, why: str) -> Finding:
    """A finding that says in one line why its question was not asked on this machine.

    It has no grade: nothing was put to anything.
    """
    return replace(finding(incident, question, variant, NOT_RUN, note=why), grade="")


OFF_ON_OFF = "off/on/off"
FIXED, NOT_FIXED, NOT_REPRODUCED, WRONG = "fixed", "not fixed", "not reproduced", "wrong"
CLEAN, LIVES = "clean", "lives"
# Verdicts without a fault: no NaN where none belongs, the server survives. They do not say that the
# result is right.
_SOUND = (CLEAN, LIVES)


def off_on_off(
    incident: str,
    variant: str,
    *,
    off: str,
    on: str,
    off_again: str,
    wrong: str | None,
    expected: str = FIXED,
    evidence: Evidence = REPLICA,
    **numbers: Any,
) -> Finding:
    """Judge one fix by three runs: without it, with it, without it again.

    Args:
        incident: folder name.
        variant: the fix.
        off: verdict without the fix.
        on: verdict of the same detector on the same inputs with the fix.
        off_again: verdict without the fix once more.
        wrong: what is wrong with the result of the run with the fix, or ``None`` if it was compared
            with a reference and is right. The detector sees the fault only: without this check an
            operation that returns zeros would be a fix.
        expected: :data:`FIXED`, or :data:`NOT_FIXED` for a remedy that is known to fail.
        evidence: what the three runs were put to.
        numbers: other values that the verdict rests on.

    Returns:
        A finding of question :data:`OFF_ON_OFF`: "fixed" if only the run with the fix is without a
        fault and its result is right, "wrong" if it is not right, "not fixed" if the run with the
        fix has a fault too, "not reproduced" if a run without it has none. The three verdicts are
        among its numbers.

    >>> three = {"off": "leaked", "on": "clean", "off_again": "leaked"}
    >>> off_on_off("an_incident", "ours", **three, wrong=None).verdict
    'fixed'
    >>> off_on_off("an_incident", "ours", **three, wrong="live rows are 3 times too large").verdict
    'wrong'
    >>> off_on_off("an_incident", "ours", off="clean", on="clean", off_again="leaked", wrong=None).verdict
    'not reproduced'
    """
    verdict = _off_on_off_verdict(off, on, off_again, right=wrong is None)
    numbers |= {"off": off, "on": on, "off_again": off_again, "right": wrong is None}
    note = wrong or ""
    return finding(
        incident, OFF_ON_OFF, variant, verdict, expected=expected, note=note, evidence=evidence, **numbers
    )


def _off_on_off_verdict(off: object, on: object, off_again: object, *, right: bool) -> str:
    if any(seen in (*_SOUND, NOT_RUN, None) for seen in (off, off_again)):
        return NOT_REPRODUCED
    if on not in _SOUND:
        return NOT_FIXED
    return FIXED if right else WRONG


def proved(claim: Finding) -> Finding:
    """``claim``, unless it says "fixed" and its numbers do not show that.

    Then the verdict is replaced by the one that they do show: "not reproduced", "not fixed", or
    "wrong" where no comparison with a reference is among them.
    """
    if claim.verdict != FIXED:
        return claim
    seen = [claim.numbers.get(name) for name in ("off", "on", "off_again")]
    right = claim.numbers.get("right") is True
    verdict = _off_on_off_verdict(*seen, right=right)
    if verdict == FIXED:
        return claim
    note = f"said fixed, but off/on/off gave {', '.join(map(str, seen))}"
    note += "" if right else ", and nothing shows that the result is right"
    return replace(claim, verdict=verdict, expected=claim.expected or FIXED, note=note)


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    """Write findings as JSON lines, completely or not at all.

    Raises:
        RunFileError: the file cannot be written; an earlier file is unchanged.
    """
    write_lines(path, [f.to_json() for f in findings])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write to a file beside ``path``, then rename it: a failure leaves the earlier file as it was."""
    text = "".join(line + "\n" for line in lines)
    draft = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        draft.replace(path)
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
            raise RunFileError(f"{path}:{number}: truncated or not JSON: {error.msg}") from error
        if not isinstance(row, dict):
            raise RunFileError(f"{path}:{number}: expected an object, got {type(row).__name__}")
        if row.get("schema", SCHEMA) > SCHEMA:
            raise RunFileError(
                f"{path}:{number}: schema {row['schema']} is newer than {SCHEMA}, "
                "which this staleproof reads; update staleproof"
            )
        rows.append(row)
    if text and not text.endswith("\n"):
        raise RunFileError(f"{path}: truncated: the last line has no end")
    return rows


def read_findings(path: Path) -> list[Finding]:
    """The findings of a recorded run, each marked RECORDED.

    Raises:
        RunFileError: as :func:`read_lines`, or a field is missing or unknown.
    """
    found = []
    for number, row in enumerate(read_lines(path), 1):
        try:
            found.append(Finding(**row).recorded())
        except TypeError as error:
            raise RunFileError(f"{path}:{number}: not a finding: {error}") from error
    return found
