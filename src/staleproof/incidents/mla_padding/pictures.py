"""What the notebook of incident 1 draws: one captured step, stage by stage, at one live count."""

from __future__ import annotations

from dataclasses import dataclass

from staleproof.evidence.counters import Crossing, RowCounters
from staleproof.evidence.rows import Verdict, bad_rows
from staleproof.incidents.mla_padding.scene import STAGES, Batch, Engine
from staleproof.incidents.mla_padding.setups import SETUPS

ROWS, LAYERS = 16, 2


@dataclass(frozen=True)
class StagePicture:
    """Rows x stages of one replay: 0 finite, 1 bad in a padding row, 2 bad in a live row."""

    stages: list[str]
    cells: list[list[int]]
    live: int
    first_crossing: Crossing | None


def stage_picture(name: str, device: str, live: int = 3, quantiser: str = "torch.max") -> StagePicture:
    """In which rows and stages of one captured step NaN stands, and where it crosses into a live row.

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
    outputs = [*(taps[stage] for taps in engine.taps for stage in STAGES), engine.logits]
    columns = [
        [(2 if row < engine.live_rows else 1) if bad else 0 for row, bad in enumerate(bad_rows(x).tolist())]
        for x in outputs
    ]
    cells = [list(row) for row in zip(*columns, strict=True)]
    return StagePicture(stages, cells, engine.live_rows, counters.first_crossing)


def live_count_verdict(live: int, device: str) -> Verdict:
    """Verdict of one step of the faulty kernel with ``live`` requests of 16."""
    engine = SETUPS["empty_row_not_written"].engine("torch.max", device, batch=ROWS)
    engine.set_batch(Batch(live))
    return engine.verdict()
