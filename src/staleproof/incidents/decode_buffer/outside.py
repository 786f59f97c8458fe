"""What the ledger sees of memory that torch's allocator does not give."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from staleproof.cases.case import Reading, absent
from staleproof.device import Provenance
from staleproof.evidence.ledger import AllocationLedger, cuda_usage
from staleproof.incidents.decode_buffer.allocator import MIB, SimulatedMemory
from staleproof.incidents.decode_buffer.driver import DriverError, driver_memory
from staleproof.incidents.decode_buffer.model import Attention, Experts, Model
from staleproof.incidents.decode_buffer.setups import SMALL

COUNTED, NAMED, MISSED, AS_FREE = "counted, not named", "named", "missed", "counted as free"
SYMMETRIC, ASLEEP = "NCCL symmetric memory", "CuMem, asleep"
_BYTES = 256 * MIB


def outside(kind: str, device: str) -> Reading:
    """How the ledger's headroom changes when somebody takes memory past torch, or gives it back for a while.

    ``ncclMemAlloc`` takes device memory from the driver after the profile run. CuMem's sleep mode unmaps
    the memory of tensors: torch still counts it, the driver has it back, and the wake-up needs it again.
    On a CPU both are simulated. On CUDA ``cuMemCreate`` stands for the first, and the second is not asked.
    """
    if device == "cuda" and kind == ASLEEP:
        return absent("needs a torch memory pool on vLLM's cumem_allocator")
    memory = SimulatedMemory(SMALL.total_bytes)
    at = "cuda" if device == "cuda" else memory.device
    with contextlib.nullcontext() if device == "cuda" else memory:
        model = Model(replace(SMALL, layers=2, weight_bytes=2 * _BYTES), at, Attention, Experts)
    usage = cuda_usage if device == "cuda" else memory.usage
    budget = torch.cuda.mem_get_info()[1] if device == "cuda" else memory.total_bytes
    ledger = AllocationLedger(model, budget_bytes=budget, usage=usage)
    with ledger.phase("profile"):
        pass
    before = ledger.read().headroom
    try:
        with ledger.phase("later"), _taken(memory, -_BYTES if kind == ASLEEP else _BYTES, device):
            report = ledger.read()
            after = report.headroom
    except DriverError as error:
        return absent(str(error))
    assert before is not None
    assert after is not None
    change = after - before
    verdict = NAMED if report.surprises else AS_FREE if change > 0 else COUNTED if change < 0 else MISSED
    numbers = {"headroom_change_bytes": change, "taken_bytes": _BYTES}
    return Reading(verdict, numbers, provenance=None if device == "cuda" else Provenance.INTERPRETED)


@contextlib.contextmanager
def _taken(memory: SimulatedMemory, nbytes: int, device: str) -> Iterator[None]:
    if device == "cuda":
        with driver_memory(nbytes):
            yield
        return
    memory.allocator.outside += nbytes
    try:
        yield
    finally:
        memory.allocator.outside -= nbytes
