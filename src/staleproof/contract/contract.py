"""The padding contract: its clauses, what a probe answers, and the rows of an audit.

``workbook/contract.md`` says for each clause why it is there and how it is probed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from staleproof.cases.finding import RunFileError, write_lines
from staleproof.check import require
from staleproof.kernels.subject import KINDS as KINDS


class Verdict(StrEnum):
    """What one kernel does about one clause.

    ``undefined``: it breaks the clause, and its documentation says that the case is the caller's.
    """

    HOLDS = "holds"
    BREAKS = "breaks"
    UNDEFINED = "undefined"
    NOT_RUN = "not run"


# Key of a clause -> what a kernel that keeps it does. In the order of the tables.
CLAUSES = {
    "0": "Clean input gives the right result, in the right shape, and nothing else is written.",
    "E": "The row of an empty request is written in each launch: zeros, and lse -inf.",
    "T": "Nothing at or past seq_len is read into the result.",
    "B": "A block-table entry past the last page needed is never followed.",
    "R": "Live rows keep their bits whatever padding rows and neighbours hold.",
    "N": "The same buffers give right rows after the live count falls and rises.",
    "U": "Rows past the last cu_seqlens are left alone, or zero in memory that the kernel allocates.",
    "Q": "All this holds for several query tokens a request.",
    "L": "One launch leaves no trace in the next.",
    "A": "No address is kept beyond the call.",
    "I": "Expert ids are distinct and in range, also where logits are NaN or infinite.",
    "Ib": "Expert ids are distinct and in range, also where the bias is NaN.",
    "P": "The padding mask is honoured.",
    "D": "An expert id that comes twice for a token counts twice.",
    "X": "An expert id of -1 or out of range adds nothing, or is a clean error.",
    "S": "Slot -1 writes nothing, and reserved slots stay finite.",
    "W": "Every byte of the result is written, rounded-up tiles included.",
    "O": "Bytes behind an operand never decide the result.",
}
# The note of clause 0 where nothing says what is right; the other clauses are asked all the same.
NO_REFERENCE = "not checked, no reference"
# How the note of a clause begins that was not answered in time.
TIMED_OUT = "no answer within"


@dataclass(frozen=True)
class Outcome:
    """What a probe answers.

    Attributes:
        verdict: of the clause.
        note: one line; what came, if the clause does not hold, or why it was not run.
        case: the smallest input that shows it, as :mod:`staleproof.contract.scripts` takes it.
        script: a counterexample that was run, or ``""``.
    """

    verdict: Verdict
    note: str = ""
    case: tuple[str, ...] = ()
    script: str = ""


def holds(note: str = "") -> Outcome:
    """The clause holds."""
    return Outcome(Verdict.HOLDS, note)


def breaks(note: str, *case: str) -> Outcome:
    """The clause is broken; ``case`` names the input that shows it."""
    return Outcome(Verdict.BREAKS, note, case)


def not_run(why: str) -> Outcome:
    """The clause was not put to the test."""
    return Outcome(Verdict.NOT_RUN, why)


@dataclass(frozen=True)
class Row:
    """One line of an audit.

    Attributes:
        subject: kernel and backend.
        package: distribution that it comes from.
        version: of that distribution.
        clause: key of :data:`CLAUSES`.
        verdict: see :class:`Verdict`.
        note: one line.
        machine: name of the GPU or CPU it ran on.
        provenance: MEASURED or INTERPRETED.
        counterexample: text of a script that runs alone, or ``""``.
    """

    subject: str
    package: str
    version: str
    clause: str
    verdict: Verdict
    note: str
    machine: str
    provenance: str
    counterexample: str = ""


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write an audit as JSON lines, whole or not at all."""
    write_lines(path, [json.dumps(asdict(row), ensure_ascii=False) for row in rows])


def read_rows(path: Path) -> list[Row]:
    """Read what :func:`write_rows` wrote.

    Raises:
        RunFileError: the file cannot be read, or a line is not a row; it names file and line.
    """
    names = {field.name for field in fields(Row)}
    rows = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RunFileError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            content = json.loads(line)
            content["verdict"] = Verdict(content["verdict"])
            require(set(content) == names, "row", ", ".join(sorted(names)), ", ".join(sorted(content)))
            require(content["clause"] in CLAUSES, "clause", ", ".join(CLAUSES), content["clause"])
        except (ValueError, TypeError, KeyError) as error:
            raise RunFileError(f"{path}:{number}: not a row of an audit: {error}") from error
        rows.append(Row(**content))
    return rows


@dataclass(frozen=True)
class Change:
    """A clause that two audits answer differently; ``before`` is ``None`` for a new subject."""

    before: Row | None
    after: Row


def between_releases(rows: Sequence[Row]) -> list[Change]:
    """What the releases of a package changed, in one audit that has several of them.

    Each row is compared with that of the release before it on the same machine; what was not run counts as
    absent.

    >>> old = Row("decode", "kernels", "1.9", "E", Verdict.BREAKS, "NaN", "CPU", "INTERPRETED")
    >>> new = Row("decode", "kernels", "1.10", "E", Verdict.HOLDS, "", "CPU", "INTERPRETED")
    >>> [(change.before.version, change.after.version) for change in between_releases([new, old])]
    [('1.9', '1.10')]
    """
    together: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        if row.verdict is not Verdict.NOT_RUN:
            together.setdefault((row.package, row.subject, row.clause, row.machine), []).append(row)
    changes = []
    for group in together.values():
        group.sort(key=lambda row: _newest_first(row.version))
        changes += [Change(old, new) for old, new in pairwise(group) if old.verdict != new.verdict]
    return changes


def _newest_first(version: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in version.split("."))


def compare(before: Sequence[Row], after: Sequence[Row]) -> list[Change]:
    """What changed between two audits.

    A row is compared with that of the same version, or else with the newest version in ``before``. Packages
    have kernels of the same name, so that the package counts.

    Args:
        before, after: the rows of each.

    Returns:
        The rows of ``after`` whose verdict is another, in their order.

    >>> old = Row("decode", "kernels", "1.9", "E", Verdict.BREAKS, "NaN", "CPU", "INTERPRETED")
    >>> new = Row("decode", "kernels", "1.10", "E", Verdict.HOLDS, "", "CPU", "INTERPRETED")
    >>> [(change.before.version, change.after.version) for change in compare([old], [new])]
    [('1.9', '1.10')]
    """
    known: dict[tuple[str, str, str], list[Row]] = {}
    for row in before:
        known.setdefault((row.package, row.subject, row.clause), []).append(row)
    changes = []
    for row in after:
        theirs = known.get((row.package, row.subject, row.clause), [])
        same = [old for old in theirs if old.version == row.version]
        old = max(same or theirs, key=lambda old: _newest_first(old.version), default=None)
        if old is None or old.verdict != row.verdict:
            changes.append(Change(old, row))
    return changes
