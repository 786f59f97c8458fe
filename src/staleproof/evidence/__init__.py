"""Detectors for anybody's kernels and servers.

Canaries (:func:`plant`) show memory that a kernel did not write. :func:`judge_rows` and
:func:`pad_invariance` show whether padding rows change live rows. :class:`RowCounters` find the first
bad stage inside a CUDA graph. :class:`TenancyLog` names the last writer of a KV block,
:class:`PublishedBlocks` the requests that hit a block which nobody wrote, and
:class:`AllocationLedger` the owner of memory that was allocated after the memory profile.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from staleproof.evidence.canary import plant, row_states
from staleproof.evidence.ledger import AllocationLedger
from staleproof.evidence.published import PublishedBlocks, UnwrittenHit
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
    "PublishedBlocks",
    "RowCounters",
    "Suspect",
    "TenancyLog",
    "UnwrittenHit",
    "Verdict",
    "bad_rows",
    "judge_rows",
    "pad_invariance",
    "plant",
    "row_states",
    "same_bits",
]


# Loaded on first use: without Triton the other detectors still import.
_KERNELS = {"Crossing": "counters", "RowCounters": "counters"}


def __getattr__(name: str) -> object:
    if name not in _KERNELS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_KERNELS[name]}"), name)
