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
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from staleproof import device
from staleproof.device import Provenance
from staleproof.harness.digest import source_digest

SCHEMA = 1


class RunFileError(RuntimeError):
    """A run file is truncated, of a newer schema, or cannot be read or written."""


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
        source_digest: :func:`~staleproof.harness.digest.source_digest` of the incident at the time.
        date: UTC day, ISO.
        note: one line, e.g. why a question was not run.
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
    )


def not_run(incident: str, question: str, variant: str, why: str) -> Finding:
    """A finding that says in one line why its question was not asked on this machine."""
    return finding(incident, question, variant, NOT_RUN, note=why)


OFF_ON_OFF = "off/on/off"
FIXED, NOT_FIXED, NOT_REPRODUCED = "fixed", "not fixed", "not reproduced"
CLEAN, LIVES = "clean", "lives"
# Verdicts without a fault: the rows are right, the server survives.
_SOUND = (CLEAN, LIVES)


def off_on_off(
    incident: str, variant: str, *, off: str, on: str, off_again: str, expected: str = FIXED, **numbers: Any
) -> Finding:
    """Judge one fix by three runs: without it, with it, without it again.

    Args:
        incident: folder name.
        variant: the fix.
        off: verdict without the fix.
        on: verdict of the same detector on the same inputs with the fix.
        off_again: verdict without the fix once more.
        expected: :data:`FIXED`, or :data:`NOT_FIXED` for a remedy that is known to fail.
        numbers: other values that the verdict rests on.

    Returns:
        A finding of question :data:`OFF_ON_OFF`: "fixed" if only the run with the fix is without a
        fault, "not fixed" if that one has a fault too, "not reproduced" if a run without the fix
        has none. The three verdicts are among its numbers.

    >>> off_on_off("an_incident", "ours", off="leaked", on="clean", off_again="leaked").verdict
    'fixed'
    >>> off_on_off("an_incident", "ours", off="clean", on="clean", off_again="leaked").verdict
    'not reproduced'
    """
    verdict = _off_on_off_verdict(off, on, off_again)
    numbers |= {"off": off, "on": on, "off_again": off_again}
    return finding(incident, OFF_ON_OFF, variant, verdict, expected=expected, **numbers)


def _off_on_off_verdict(off: object, on: object, off_again: object) -> str:
    if any(seen in (*_SOUND, NOT_RUN, None) for seen in (off, off_again)):
        return NOT_REPRODUCED
    return FIXED if on in _SOUND else NOT_FIXED


def proved(claim: Finding) -> Finding:
    """``claim``, unless it says "fixed" and its three verdicts do not show that.

    Then the verdict is replaced by the one that they do show, usually "not reproduced".
    """
    if claim.verdict != FIXED:
        return claim
    seen = [claim.numbers.get(name) for name in ("off", "on", "off_again")]
    verdict = _off_on_off_verdict(*seen)
    if verdict == FIXED:
        return claim
    note = f"said fixed, but off/on/off gave {', '.join(map(str, seen))}"
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
        raise RunFileError(f"{path}: cannot be read: {error}") from error
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
