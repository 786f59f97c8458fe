"""Whether the ledger accounts for memory that torch's allocator did not allocate."""

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

SYMMETRIC, ASLEEP = "NCCL symmetric memory", "CuMem, asleep"
_BYTES = 256 * MIB


def not_here(kind: str, device: str) -> str | None:
    """Why a kind of memory cannot be allocated on this device, or ``None``."""
    on_cuda = device == "cuda" and kind == ASLEEP
    return "needs a torch memory pool on vLLM's cumem_allocator" if on_cuda else None


def outside(kind: str, device: str) -> Reading:
    """How the ledger's headroom changes if memory is allocated without torch, or is returned for a while.

    ``ncclMemAlloc`` takes device memory from the driver after the profile run. CuMem's sleep mode unmaps the
    memory of tensors: torch still counts it, but it is free for the driver until the wake-up needs it again.
    On a CPU both are simulated. On CUDA ``cuMemAlloc`` represents the first.
    """
    on_cuda, memory = device == "cuda", SimulatedMemory(SMALL.total_bytes)
    with contextlib.nullcontext() if on_cuda else memory:
        small = replace(SMALL, layers=2, weight_bytes=2 * _BYTES)
        model = Model(small, "cuda" if on_cuda else memory.device, Attention, Experts)
    ledger = AllocationLedger(
        model,
        budget_bytes=torch.cuda.mem_get_info()[1] if on_cuda else memory.total_bytes,
        usage=cuda_usage if on_cuda else memory.usage,
    )
    with ledger.phase("profile"):
        pass
    before = ledger.read().headroom
    nbytes = -_BYTES if kind == ASLEEP else _BYTES
    try:
        with ledger.phase("later"), driver_memory(nbytes) if on_cuda else _simulated(memory, nbytes):
            report = ledger.read()
    except DriverError as error:
        return absent(str(error))
    assert before is not None
    assert report.headroom is not None
    change = report.headroom - before
    unnamed = "counted as free" if change > 0 else "counted, not named" if change else "missed"
    verdict = "named" if report.surprises else unnamed
    numbers = {"headroom_change_bytes": change, "taken_bytes": _BYTES}
    return Reading(verdict, numbers, provenance=None if on_cuda else Provenance.INTERPRETED)


@contextlib.contextmanager
def _simulated(memory: SimulatedMemory, nbytes: int) -> Iterator[None]:
    memory.allocator.outside += nbytes
    try:
        yield
    finally:
        memory.allocator.outside -= nbytes
