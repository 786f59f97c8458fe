"""What a remedy does to a cause, over several contents of memory.

Four steps are served. A cell counts the outputs of healthy requests that differ from those of a
model without the fault, once for each :data:`HISTORIES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from staleproof.incidents.scale_padding.remedies import (
    CAUSES,
    IN_TORCH,
    KERNELS,
    LIVE,
    SICK_STEP,
    History,
    Operations,
    Server,
)
from staleproof.lab import NOT_REPRODUCED, Answer, bad, good, open_

# The largest number that float32 and bfloat16 both have. In bfloat16 its two bytes are NaN if read as e4m3.
LARGEST = torch.finfo(torch.bfloat16).max
NAN = (torch.nan,) * 4
# The contents of memory that are tried. The first seven differ in these contents. In the last two memory
# contains NaN: once without sick requests, once with the previous step's map in the map's memory.
HISTORIES: dict[str, History] = {
    "NaN": History(NAN),
    "infinity": History((torch.inf,) * 4),
    "largest finite": History((LARGEST,) * 4),
    "300": History((300.0,) * 4),
    "NaN, once 300": History((torch.nan, torch.nan, 300.0, torch.nan)),
    "N(0, 1)": History(None),
    "zeros": History((0.0,) * 4),
    "NaN, nobody sick": History(NAN, sick=False),
    "NaN, over an earlier map": History(NAN, earlier_map=True),
}

# This cause reads no fresh memory, so one history is enough.
READS_NO_MEMORY = "cross-row reduction"

CURED, HELPED, NOT_CURED, WORSE = "cured", "helped", "not cured", "made worse"


@cache
def _right(cause: str, device: str) -> tuple[torch.Tensor, ...]:
    server = Server(cause, None, device, History((0.0,) * 4, sick=False), faulty=False)
    return tuple(server.step(number).meant for number in range(len(LIVE)))


def serve(
    cause: str, remedy: str | None, device: str, history: History, operations: Operations = KERNELS
) -> int:
    """Serve the four steps; return how many outputs of healthy requests were wrong or missing."""
    server = Server(cause, remedy, device, history, operations)
    wrong, survived = 0, True
    for number, live in enumerate(LIVE):
        if survived:
            step = server.step(number)
            # An illegal access ends the process, and with it all later steps.
            survived = step.survived
        if number == SICK_STEP:
            continue
        wanted = step.meant if cause == "duplicate ids" else _right(cause, device)[number]
        for row in range(live):
            near = torch.allclose(step.rows[row], wanted[row], rtol=1e-3, atol=1e-4)
            wrong += not (survived and near)
    return wrong


class Counts(NamedTuple):
    """Wrong outputs over one history: without the remedy, with it, and without it again."""

    off: int
    on: int
    off_again: int


@dataclass(frozen=True)
class Cell:
    """One remedy on one cause.

    Attributes:
        cause, remedy: their names.
        counts: one for each of :data:`HISTORIES`, in their order.
    """

    cause: str
    remedy: str
    counts: Sequence[Counts]

    def _effects(self) -> dict[str, int]:
        """The number of histories in which the remedy made it worse, helped, or cured it."""
        shown = [count for count in self.counts if count.off]
        return {
            "worse_in": sum(count.on > count.off for count in self.counts),
            "helped_in": sum(0 < count.on < count.off for count in shown),
            "cured_in": sum(count.on == 0 for count in shown),
        }

    @property
    def verdict(self) -> str:
        """What the remedy does.

        ``not reproduced`` if the cause appears in no history, or differs between the two runs without the
        remedy. Otherwise ``cured`` if nothing is wrong in any history; ``made worse`` if more is wrong in
        one; ``helped`` if less is wrong in one; ``not cured`` if the remedy changes no count.
        """
        effects = self._effects()
        if not any(count.off for count in self.counts) or any(c.off != c.off_again for c in self.counts):
            return NOT_REPRODUCED
        if not any(count.on for count in self.counts):
            return CURED
        if effects["worse_in"]:
            return WORSE
        return HELPED if effects["helped_in"] or effects["cured_in"] else NOT_CURED

    @property
    def numbers(self) -> dict[str, str | int]:
        """For a finding: the counts, the remedy's effect, and the number of histories with the fault."""
        columns = zip(*self.counts, strict=True)
        counts = {
            f"wrong_{name}": " ".join(map(str, column))
            for name, column in zip(Counts._fields, columns, strict=True)
        }
        shown = sum(count.off > 0 for count in self.counts)
        return {**counts, **self._effects(), "shown": shown, "of": len(self.counts)}

    @property
    def answer(self) -> Answer:
        """The verdict with the numbers; good only if the remedy cures."""
        outcomes = {CURED: good, HELPED: open_, NOT_REPRODUCED: open_}
        return outcomes.get(self.verdict, bad)(self.verdict, **self.numbers)


def row_of(cause: str, device: str, remedies: Sequence[str]) -> dict[str, Cell]:
    """These remedies on one cause; the cause without a remedy is served before and after.

    On a CPU, where Triton's interpreter is slow, the kernels run only for the cause's own remedy and the
    first history. The other cells use the PyTorch references; tests check that both have the same bits.
    """
    histories = [*HISTORIES.values()][: 1 if cause == READS_NO_MEMORY else None]

    def over_all(remedy: str | None) -> list[int]:
        compiled, own = device == "cuda", remedy == CAUSES[cause]
        return [
            serve(cause, remedy, device, history, KERNELS if compiled or (own and not number) else IN_TORCH)
            for number, history in enumerate(histories)
        ]

    off, on = over_all(None), [over_all(remedy) for remedy in remedies]
    again = over_all(None)
    return {
        remedy: Cell(cause, remedy, [Counts(*counts) for counts in zip(off, column, again, strict=True)])
        for remedy, column in zip(remedies, on, strict=True)
    }
