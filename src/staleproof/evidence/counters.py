"""RowCounters: find the stage that first made a live row NaN or Inf, inside a CUDA graph.

It is a :class:`~staleproof.evidence.board.Board` with named slots. Its counts are in device memory and its
kernel is captured with the step, so nothing waits for the device until the counts are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from staleproof import check
from staleproof.evidence.board import FORMATS, ROWS, SLOTS, Board, crossing


@dataclass(frozen=True)
class Crossing:
    """The first live row with a NaN or Inf: number of the replay (from 1), name of the stage, row."""

    replay: int
    stage: str
    row: int


@dataclass(frozen=True)
class StageCount:
    """Rows of one stage that have a NaN or Inf, summed over replays."""

    pad_rows: int
    live_rows: int


class RowCounters:
    """Counts rows with a NaN or Inf per stage, separately for padding rows and live rows.

    Call :meth:`begin` at the start of the step and :meth:`observe` after each stage, while the step
    is captured. Both only launch work on the device. :meth:`read` and :attr:`first_crossing` wait for
    the device. At most 256 stages and 2**24 rows.

    Args:
        stages: names of the stages in order of execution.
        device: where the step runs.

    Raises:
        ValueError: no stage, more than 256, or a name twice.

    >>> counters = RowCounters(["attention", "quantize"], "cpu")
    >>> seq_lens = torch.tensor([3, 5, 0])  # row 2 is padding
    >>> attention, quantized = torch.ones(3, 4), torch.ones(3, 4)
    >>> attention[2] = quantized[:] = float("nan")
    >>> counters.begin()
    >>> counters.observe("attention", attention, seq_lens)
    >>> counters.observe("quantize", quantized, seq_lens)
    >>> counters.first_crossing
    Crossing(replay=1, stage='quantize', row=0)
    >>> counters.read()["attention"]
    StageCount(pad_rows=1, live_rows=0)
    """

    def __init__(self, stages: Sequence[str], device: torch.device | str) -> None:
        distinct = 0 < len(stages) <= SLOTS and len(set(stages)) == len(stages)
        check.require(distinct, "stages", f"1 to {SLOTS} distinct names", list(stages))
        self.stages = tuple(stages)
        self._board = Board(device)
        self.reset()

    def begin(self) -> None:
        """Count one more replay. Call it first in the captured step."""
        self._board.next_step()

    def observe(self, stage: str, x: torch.Tensor, live: torch.Tensor) -> None:
        """Count the rows of one stage's output that have a NaN or Inf.

        Args:
            stage: one of the names given to the constructor.
            x: (rows, ...), contiguous, on the counters' device; fp32, fp16, bf16, e4m3fn or e5m2.
            live: (n,), any integer type or bool, where n divides rows; each entry stands for
                ``rows // n`` rows. They are live if the entry is not 0, so ``seq_lens`` can be given.

        Raises:
            ValueError: unknown stage, or a tensor of wrong dtype, device, layout or length.
        """
        check.require(stage in self.stages, "stage", f"one of {list(self.stages)}", stage)
        check.tensor("x", x, dtype=tuple(FORMATS), like=self._board.numbers, contiguous=True)
        check.tensor("live", live, ndim=1, like=self._board.numbers)
        rows, given = x.shape[0] if x.ndim else 0, live.shape[0]
        fits = 0 < given <= rows < ROWS and rows % given == 0
        check.require(fits, "live", f"a length that divides the {rows} rows of x", given)
        padding = (live == 0).repeat_interleave(rows // given, output_size=rows)
        self._board.count(self.stages.index(stage), x.view(rows, -1), padding=padding)

    def reset(self) -> None:
        """Set all counts to zero. Allowed between replays of a captured step."""
        self._board.reset()
        self._board.begin(step=0, live=0, counted=True)

    def read(self) -> dict[str, StageCount]:
        """Counts per stage. Waits for the device."""
        slots = self._board.slots().tolist()
        return {name: StageCount(*slot[:2]) for name, slot in zip(self.stages, slots, strict=False)}

    @property
    def first_crossing(self) -> Crossing | None:
        """Where a live row first had a NaN or Inf, or ``None``. Waits for the device."""
        found = crossing(int(self._board.numbers[-1]))
        return found and Crossing(found[0], self.stages[found[1]], found[2])
