"""Data for the figures of incident 1's notebook: one captured step by stage, one buffer over five steps."""

from __future__ import annotations

from typing import NamedTuple

from staleproof.check import require
from staleproof.evidence.canary import row_states
from staleproof.evidence.counters import Crossing, RowCounters
from staleproof.evidence.rows import bad_rows, same_bits
from staleproof.incidents.mla_padding import broken
from staleproof.incidents.mla_padding.remedies import LIVE_COUNTS, SETUPS, SICK_STEP
from staleproof.incidents.mla_padding.scene import STAGES, Batch, Engine

ROWS, LAYERS = 16, 2


class StagePicture(NamedTuple):
    """Rows x stages of one replay: 0 finite, 1 bad in a padding row, 2 bad in a live row."""

    stages: list[str]
    cells: list[list[int]]
    live: int
    first_crossing: Crossing | None

    @property
    def verdict(self) -> str:
        """Verdict of this step: ``leaked``, ``pad_only`` or ``clean``."""
        if self.first_crossing is not None:
            return "leaked"
        return "pad_only" if any(map(any, self.cells)) else "clean"


def stage_picture(name: str, device: str, live: int = 3, quantiser: str = "torch.max") -> StagePicture:
    """The rows and stages of one captured step that have NaN, and where it first reaches a live row.

    Args:
        name: a key of :data:`SETUPS`.
        device: ``"cpu"`` or ``"cuda"``.
        live: live requests of 16.
        quantiser: ``"torch.max"`` or ``"fmax"``.
    """
    stages = Engine.stage_names(LAYERS)
    counters = RowCounters(stages, device)
    engine = SETUPS[name].engine(quantiser, device, counters, batch=ROWS, layers=LAYERS)
    engine.set_batch(Batch(live))
    engine.replay()
    columns = [((1 + engine.live) * bad_rows(x)).tolist() for x in engine.outputs(STAGES[0])]
    cells = [list(row) for row in zip(*columns, strict=True)]
    return StagePicture(stages, cells, int(engine.live.sum()), counters.first_crossing)


class BufferPicture(NamedTuple):
    """The rows of the first layer's attention output after each of several steps.

    Attributes:
        steps: a label for each step: its live rows and their state.
        cells: rows x steps. Live rows are ``this step`` or ``NaN in a live row``; other rows are ``zero``,
            ``an earlier step``, ``NaN of an earlier step``, or, if the step wrote them, ``this step`` or
            ``NaN in a padding row``.
    """

    steps: list[str]
    cells: list[list[str]]


def buffer_rows(name: str, device: str, rows: int = 8) -> BufferPicture:
    """What the attention output holds, row by row, after each of the five served steps.

    Args:
        name: a key of :data:`SETUPS`.
        device: ``"cpu"`` or ``"cuda"``.
        rows: of the captured batch; the second and the fourth step fill it.

    Raises:
        ValueError: the setup's kernel writes every row. This function detects a written row by changed bits.
    """
    kernel = SETUPS[name].kernel
    ok = kernel is broken.empty_row_not_written
    require(ok, "name", "a setup whose kernel leaves empty rows unwritten", kernel.__name__)
    engine = SETUPS[name].engine("torch.max", device, batch=rows)
    labels, columns = [], []
    before = engine.taps[0]["attention"].clone()
    for step, count in enumerate(LIVE_COUNTS):
        live = count or rows
        sick = step == SICK_STEP
        engine.set_batch(Batch(live, poisoned_row=live - 1 if sick else None))
        engine.replay()
        out = engine.taps[0]["attention"].clone()
        kept, states = same_bits(out, before).tolist(), row_states(out)
        column = []
        for row, state in enumerate(states):
            bad = state not in ("finite", "zero")
            if row < live:
                column.append("NaN in a live row" if bad else "this step")
            elif state == "zero":
                column.append("zero")
            elif kept[row]:
                column.append("NaN of an earlier step" if bad else "an earlier step")
            else:
                column.append("NaN in a padding row" if bad else "this step")
        labels.append(f"{live} live, 1 sick" if sick else f"{live} live")
        columns.append(column)
        before = out
    return BufferPicture(labels, [list(row) for row in zip(*columns, strict=True)])
