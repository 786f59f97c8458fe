"""An audit that goes on from an earlier one of the same machine: only what that left open is asked.

Packages come one at a time to a machine without a network, and a part of an audit may end early. The rows
of both become one file: ``staleproof audit --onto h200.jsonl --json h200.jsonl``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from staleproof.cases.finding import RunFileError
from staleproof.contract.contract import TIMED_OUT, Row, Verdict
from staleproof.kernels.subject import Subject


def check_machine(known: Sequence[Row], machine: str) -> None:
    """Refuse an audit of another machine.

    Raises:
        RunFileError: a row of it came from elsewhere.
    """
    if others := sorted({row.machine for row in known} - {machine}):
        raise RunFileError(f"onto: expected an audit of {machine}, got one of {', '.join(others)}")


def open_clauses(
    subject: Subject, version: str, known: Sequence[Row], again: Collection[Verdict] = ()
) -> tuple[str, ...]:
    """The clauses that a subject is still to be asked.

    Args:
        subject: the kernel.
        version: of its package; ``""`` if no release is here.
        known: the rows of an earlier audit.
        again: verdicts that count as open, for example to renew the scripts of broken clauses.

    Returns:
        All clauses of its kind, if it did not run; ``0``, those with a verdict of ``again`` and those that
        the earlier audit did not know; or none.

    >>> subject = Subject("decode", "merge", print, package="kernels")
    >>> known = [Row("decode", "kernels", "1.0", c, Verdict.HOLDS, "", "CPU", "INTERPRETED") for c in "0ERO"]
    >>> open_clauses(subject, "1.0", known), open_clauses(subject, "2.0", known)
    ((), ('0', 'E', 'R', 'O'))
    """
    mine = [
        row
        for row in known
        if (row.subject, row.package) == (subject.name, subject.package or "yours")
        and row.version in ((version,) if version else (row.version,))
    ]
    answered = {row.clause: row.verdict for row in mine if row.verdict is not Verdict.NOT_RUN}
    if not answered:
        return subject.clauses
    wanted = {clause for clause, verdict in answered.items() if verdict in again}
    wanted |= set(subject.clauses) - {row.clause for row in mine}
    return tuple(clause for clause in subject.clauses if clause in wanted | {"0"}) if wanted else ()


def merged(known: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """The rows of two audits of one machine, each subject, release and clause once.

    A new answer takes the place of the old one. A new ``not run`` takes the place of an old ``not run`` only,
    and so does an answer that did not come in time: limits and loads differ between audits. The row of a
    package that was not there goes when another audit has a release of it.

    Args:
        known, new: rows, in their order.

    >>> old = Row("decode", "kernels", "1.0", "E", Verdict.NOT_RUN, "no GPU", "CPU", "INTERPRETED")
    >>> row = Row("decode", "kernels", "1.0", "E", Verdict.HOLDS, "", "CPU", "INTERPRETED")
    >>> merged([old], [row]) == merged([row], [old]) == [row]
    True
    """
    found: dict[tuple[str, str, str, str], Row] = {}
    for row in [*known, *new]:
        key = (row.package, row.subject, row.version, row.clause)
        gap = row.verdict is Verdict.NOT_RUN or row.note.startswith(TIMED_OUT)
        if key not in found or not gap or found[key].verdict is Verdict.NOT_RUN:
            found[key] = row
    here = {(row.package, row.subject) for row in found.values() if row.version}
    return [row for row in found.values() if row.version or (row.package, row.subject) not in here]
