"""The detectors: canaries, row verdicts, pad-invariance, in-graph counters, allocation ledger."""

from staleproof.evidence.canary import plant, row_states, unwritten_bitmap
from staleproof.evidence.counters import Crossing, RowCounters
from staleproof.evidence.ledger import AllocationLedger
from staleproof.evidence.rows import (
    CLEAN,
    FILLS,
    Fill,
    PadInvariance,
    Verdict,
    bad_rows,
    judge_rows,
    pad_invariance,
    same_bits,
)

__all__ = [
    "CLEAN",
    "FILLS",
    "AllocationLedger",
    "Crossing",
    "Fill",
    "PadInvariance",
    "RowCounters",
    "Verdict",
    "bad_rows",
    "judge_rows",
    "pad_invariance",
    "plant",
    "row_states",
    "same_bits",
    "unwritten_bitmap",
]
