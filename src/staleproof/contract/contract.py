"""The padding contract: its clauses, and the answer of one kernel to one clause.

``workbook/contract.md`` says for each clause why it is there and how it is probed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from staleproof.audit import KINDS as KINDS

# The verdicts. ``undefined``: broken, and the kernel's documentation leaves the case to the caller.
# ``not tested``: the module has no kernel to ask, or the kernel's decorator is at fault.
HOLDS, BREAKS, UNDEFINED, NOT_RUN, NOT_TESTED = "holds", "breaks", "undefined", "not run", "not tested"

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
    "W": "Every byte of the result is written, rounded-up tiles included.",
    "O": "Bytes behind an operand never decide the result.",
}
# The note of clause 0 where nothing says what is right; the other clauses are asked all the same.
NO_REFERENCE = "not checked, no reference"
# How the note begins of a module that has no kernel to ask, and of a kernel whose decorator is at fault.
NO_IMPORT, NO_KERNEL, WRONG_SETTING = "does not import", "registers no kernel", "wrong setting"
# How the note of a clause begins that was not answered in time.
TIMED_OUT = "no answer within"


@dataclass(frozen=True)
class Answer:
    """What one kernel does with one clause.

    Attributes:
        verdict: :data:`HOLDS`, :data:`BREAKS`, :data:`UNDEFINED`, :data:`NOT_RUN` or :data:`NOT_TESTED`.
        note: one line.
        kernel: its name, or the module if that has no kernel to ask.
        clause: key of :data:`CLAUSES`.
        script: text of a reproducer that was run and showed the break; its inputs are in a file beside it.
        example: what a reproducer compares, see :mod:`staleproof.contract.reproducer`.
    """

    verdict: str
    note: str = ""
    kernel: str = ""
    clause: str = ""
    script: str = ""
    example: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def row(self) -> dict[str, Any]:
        """The answer as a JSON object, without the script."""
        return {name: asdict(self)[name] for name in ("kernel", "clause", "verdict", "note")}


def holds(note: str = "") -> Answer:
    """The clause holds."""
    return Answer(HOLDS, note)


def breaks(note: str, example: Mapping[str, Any] | None = None) -> Answer:
    """The clause is broken; ``example`` is an input that shows it."""
    return Answer(BREAKS, note, example=example)


def not_tested(note: str) -> Answer:
    """Nothing could be asked, and the user has to mend why; ``note`` says it in one line."""
    return Answer(NOT_TESTED, note)


def not_run(note: str) -> Answer:
    """The clause was not asked; ``note`` is the reason in one line."""
    return Answer(NOT_RUN, note)
