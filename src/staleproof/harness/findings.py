"""Findings: one answer to one question, with the machine and the provenance it came from."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from staleproof import device
from staleproof.device import Provenance

SCHEMA = 1
PACKAGE = Path(__file__).resolve().parents[1]


class RunFileError(RuntimeError):
    """A run file is truncated, of a newer schema, or cannot be read or written."""


@cache
def source_digest(incident: str) -> str:
    """First 12 hex digits of the SHA-256 over the Python sources of one incident's folder.

    Without ``patch.py``: no finding runs it.
    """
    digest = hashlib.sha256()
    for path in sorted({*(PACKAGE / incident).glob("*.py")} - {PACKAGE / incident / "patch.py"}):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Finding:
    """One answer.

    Attributes:
        incident: folder name, e.g. ``mla_padding``.
        question: what was asked, a short key, e.g. ``empty_row``.
        variant: which kernel or remedy was asked.
        verdict: the answer in one word.
        numbers: what the answer rests on; JSON scalars only.
        expected: the verdict that this variant must give, or ``None`` where any is a result.
        provenance: MEASURED, INTERPRETED or RECORDED.
        machine: :class:`staleproof.device.Machine` as a dict.
        source_digest: :func:`source_digest` of the incident when it was obtained.
        date: UTC day, ISO.
        note: one line, e.g. why a question was not run.
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
        """What identifies the same finding on two machines."""
        return self.incident, self.question, self.variant

    @property
    def ran(self) -> bool:
        """False where the hardware or the package the question needs is absent."""
        return self.verdict != NOT_RUN

    @property
    def ok(self) -> bool:
        """Whether the verdict is the expected one. ``not run`` is never ok and never a failure."""
        return self.ran and (self.expected is None or self.verdict == self.expected)

    @property
    def failed(self) -> bool:
        """Whether the question was put and the verdict is not the expected one."""
        return self.ran and not self.ok

    @property
    def stale(self) -> bool:
        """Whether the incident's source has changed since a recorded finding was obtained."""
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
    """A finding that says in one line why its question could not be put here."""
    return finding(incident, question, variant, NOT_RUN, note=why)


OFF_ON_OFF = "off/on/off"
FIXED, NOT_FIXED, NOT_REPRODUCED = "fixed", "not fixed", "not reproduced"
CLEAN, LIVES = "clean", "lives"
# What nothing is wrong with: rows that are right, a server that survives.
_SOUND = (CLEAN, LIVES)


def off_on_off(
    incident: str, variant: str, *, off: str, on: str, off_again: str, expected: str = FIXED, **numbers: Any
) -> Finding:
    """The verification of one fix: broken fails, fixed passes, broken fails again.

    Args:
        incident: folder name.
        variant: the fix under test.
        off: verdict without the fix: a row verdict, or whether the server dies or lives.
        on: verdict of the same detector on the same inputs with the fix.
        off_again: verdict without the fix once more.
        expected: :data:`FIXED`, or :data:`NOT_FIXED` for a remedy that is known not to hold.
        numbers: what else the answer rests on.

    Returns:
        A finding of question :data:`OFF_ON_OFF`, with the three verdicts among its numbers.
    """
    verdict = _off_on_off_verdict(off, on, off_again)
    numbers |= {"off": off, "on": on, "off_again": off_again}
    return finding(incident, OFF_ON_OFF, variant, verdict, expected=expected, **numbers)


def _off_on_off_verdict(off: object, on: object, off_again: object) -> str:
    if any(seen in (*_SOUND, NOT_RUN, None) for seen in (off, off_again)):
        return NOT_REPRODUCED
    return FIXED if on in _SOUND else NOT_FIXED


def proved(claim: Finding) -> Finding:
    """``claim`` itself, unless it says "fixed" without the three row verdicts that show it.

    A fix of something that did not fail is no fix, so such a claim comes back with the verdict that
    its numbers do show.
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
    """Write findings as JSON lines, whole or not at all.

    Raises:
        RunFileError: the file cannot be written; a file that was there before is untouched.
    """
    write_lines(path, [f.to_json() for f in findings])


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Replace ``path`` by these lines through a neighbour file, so that a failure loses nothing."""
    text = "".join(line + "\n" for line in lines)
    draft = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text)
        draft.replace(path)
    except OSError as error:
        raise RunFileError(f"{path}: cannot be written: {error.strerror}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file of a run.

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
    """Findings of a recorded run, each marked RECORDED.

    Raises:
        RunFileError: see :func:`read_lines`, or a field is missing or unknown.
    """
    found = []
    for number, row in enumerate(read_lines(path), 1):
        try:
            found.append(Finding(**row).recorded())
        except TypeError as error:
            raise RunFileError(f"{path}:{number}: not a finding: {error}") from error
    return found
