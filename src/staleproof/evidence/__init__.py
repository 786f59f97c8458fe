"""The detectors: canaries, row verdicts, pad-invariance, counters, ledger, tenancy log."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from staleproof.evidence.canary import plant, row_states, unwritten_bitmap
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
from staleproof.evidence.tenancy import Suspect, TenancyLog

if TYPE_CHECKING:
    from staleproof.evidence.counters import Crossing, RowCounters

__all__ = [
    "CLEAN",
    "FILLS",
    "AllocationLedger",
    "Crossing",
    "Fill",
    "PadInvariance",
    "RowCounters",
    "Suspect",
    "TenancyLog",
    "Verdict",
    "bad_rows",
    "judge_rows",
    "pad_invariance",
    "plant",
    "row_states",
    "same_bits",
    "unwritten_bitmap",
]


def __getattr__(name: str) -> object:
    # Late, so that the other detectors stay importable where Triton has no wheel.
    if name not in ("Crossing", "RowCounters"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.counters"), name)
