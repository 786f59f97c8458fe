"""The padding contract: its clauses, and what an audit of one release or machine changes in another.

``workbook/contract.md`` says for each clause why it is there and how it is probed. An answer is a finding
of the family ``contract``: its question is the clause, its variant the kernel, its release package and
version.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from staleproof.cases.case import Reading
from staleproof.cases.finding import Finding
from staleproof.kernels.subject import KINDS as KINDS

# The words of an answer. ``undefined``: broken, and the kernel's documentation leaves the case to the caller.
HOLDS, BREAKS, UNDEFINED = "holds", "breaks", "undefined"
CONTRACT = "contract"
# The release of a module of the user's.
YOURS = "yours"

# Key of a clause -> what a kernel that keeps it does. In the order of the tables. Each is asked by a function
# whose docstring begins with its key: PROBES of attention_probes and, for the other kinds, of row_probes.
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
# How the note begins of a module that has no kernel to ask, and of a kernel whose decorator is at fault.
NO_IMPORT, NO_KERNEL, WRONG_SETTING = UNASKED = ("does not import", "registers no kernel", "wrong setting")
# How the note of a clause begins that was not answered in time.
TIMED_OUT = "no answer within"


def is_unasked(row: Finding) -> bool:
    """Whether the row is of a module without a kernel to ask, or of a kernel whose decorator is at fault."""
    return row.verdict == BREAKS and row.note.startswith(UNASKED)


class SettingError(Exception):
    """What a decorator was given does not work, e.g. its reference raises; the text says how."""


def holds(note: str = "") -> Reading:
    """The clause holds."""
    return Reading(HOLDS, note=note)


def breaks(note: str, *case: str) -> Reading:
    """The clause is broken; ``case`` names an input that shows it, for a script."""
    return Reading(BREAKS, {"case": [*case]} if case else {}, note)


class Change(NamedTuple):
    """A clause that two audits answer differently; ``before`` is ``None`` for a new kernel."""

    before: Finding | None
    after: Finding


def between_releases(found: Sequence[Finding]) -> list[Change]:
    """What changed from one release of a package to the next, in one audit that has several of them.

    Each answer is compared with the previous release's on the same machine. An answer that was not run counts
    as absent.

    >>> old = Finding(CONTRACT, "E", "decode", BREAKS, "bad", "kernels 1.9")
    >>> new = Finding(CONTRACT, "E", "decode", HOLDS, "good", "kernels 1.10")
    >>> [(change.before.release, change.after.release) for change in between_releases([new, old])]
    [('kernels 1.9', 'kernels 1.10')]
    """
    together: dict[tuple[str, ...], list[Finding]] = {}
    for one in found:
        if one.ran:
            together.setdefault((*_place(one), one.machine.get("name", "")), []).append(one)
    return [
        Change(old, new)
        for group in together.values()
        for old, new in pairwise(sorted(group, key=_by_version))
        if old.verdict != new.verdict
    ]


def compare(before: Sequence[Finding], after: Sequence[Finding]) -> list[Change]:
    """What changed between two audits.

    An answer is compared with that of the same release, or else of the newest release in ``before``. Packages
    have kernels of the same name, so that the package counts.

    Args:
        before, after: the answers of each.

    Returns:
        The answers of ``after`` whose verdict is another, in their order.

    >>> old = Finding(CONTRACT, "E", "decode", BREAKS, "bad", "kernels 1.9")
    >>> new = Finding(CONTRACT, "E", "decode", HOLDS, "good", "kernels 1.10")
    >>> [(change.before.release, change.after.release) for change in compare([old], [new])]
    [('kernels 1.9', 'kernels 1.10')]
    """
    known: dict[tuple[str, ...], list[Finding]] = {}
    for old in before:
        known.setdefault(_place(old), []).append(old)
    changes = []
    for new in after:
        theirs = known.get(_place(new), [])
        same = [old for old in theirs if old.release == new.release]
        was = max(same or theirs, key=_by_version, default=None)
        if was is None or was.verdict != new.verdict:
            changes.append(Change(was, new))
    return changes


def package_of(found: Finding) -> str:
    """The package of a release, e.g. ``vllm`` of ``vllm 0.33.0``."""
    return found.release.partition(" ")[0]


def _place(found: Finding) -> tuple[str, ...]:
    return package_of(found), found.variant, found.question


def _by_version(found: Finding) -> tuple[list[int], int, str]:
    """A pre-release comes before its release; a build (``+cu129``) or a post-release of it, after."""
    version = found.release.partition(" ")[2]
    rest = re.sub(r"^\d+(\.\d+)*", "", version)
    numbers = [int(part) for part in re.findall(r"\d+", version.removesuffix(rest))]
    return numbers, 2 if rest.startswith(("+", ".post")) else 0 if rest else 1, rest
