"""The findings of this machine, kept from run to run in one file.

A run of one incident replaces that incident's answers and leaves those of the others. Each answer carries
the digest of the source it was given for, so an answer that is older than the code is told from a new one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from staleproof.cases.digest import source_digest
from staleproof.cases.finding import Finding, RunFileError, read_findings, read_lines
from staleproof.device import Provenance


def read_kept(path: Path) -> list[Finding]:
    """The findings of earlier runs, with the provenance they were given; none if there is no file.

    Raises:
        RunFileError: the file cannot be read, so a run could not keep what is in it.

    >>> read_kept(Path("no-such-file.jsonl"))
    []
    """
    if not path.exists():
        return []
    try:
        words = [Provenance(row.get("provenance", "")) for row in read_lines(path)]
        return [replace(f, provenance=word) for f, word in zip(read_findings(path), words, strict=True)]
    except (RunFileError, ValueError) as error:
        raise RunFileError(f"{error}; its findings would be lost: move the file, or name another") from error


def merged(
    earlier: Iterable[Finding], answers: Sequence[Finding], complete: Collection[str], order: Sequence[str]
) -> list[Finding]:
    """Earlier findings and those of a run, which win.

    Args:
        earlier: of the file.
        answers: of the run.
        complete: incidents whose every question was asked. Their earlier findings are dropped, so that a
            question that no longer exists leaves with them. Of an incident that was interrupted, the
            earlier answers to what was not asked again stay.
        order: incidents in the order in which they are listed; others come last.

    >>> from staleproof.cases.finding import finding
    >>> old = [finding("b", "q", "v", "clean"), finding("a", "gone", "v", "clean")]
    >>> [found.key for found in merged(old, [finding("a", "q", "v", "leaked")], ["a"], ["a", "b"])]
    [('a', 'q', 'v'), ('b', 'q', 'v')]
    """
    again = {found.key for found in answers}
    left = [f for f in earlier if f.incident not in complete and f.key not in again]
    place = {incident: number for number, incident in enumerate(order)}
    return sorted([*answers, *left], key=lambda found: place.get(found.incident, len(place)))


def origins(findings: Iterable[Finding]) -> list[str]:
    """One line for each incident and source that its findings are of: how many, where, when, how old.

    >>> from staleproof.cases.finding import finding
    >>> (line,) = origins([finding("mla_padding", "q", "v", "clean")])
    >>> line.startswith("mla_padding: 1 finding, "), line.endswith(", the source as it is now")
    (True, True)
    """
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for found in findings:
        where = f"{found.provenance} on {found.machine.get('name', 'an unknown machine')}, {found.date}"
        groups.setdefault((found.incident, where, found.source_digest), []).append(found)
    lines = []
    for (incident, where, digest), group in groups.items():
        count = f"{len(group)} finding{'s' * (len(group) != 1)}"
        source = "the source as it is now"
        if group[0].stale:
            source = f"source {digest or 'unknown'}, which is {source_digest(incident)} now: run it again"
        lines.append(f"{incident}: {count}, {where}, {source}")
    return lines
