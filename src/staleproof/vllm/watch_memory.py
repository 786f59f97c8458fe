"""Memory that vLLM's profile run did not see, by the attribute that keeps it.

An :class:`staleproof.evidence.AllocationLedger` records the start of the worker: the profile run, the KV
cache (planned), compilation and capture. It records nothing while the server serves, because that would
cost each allocation a stack trace; then only the allocator's own sum is read, on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from staleproof.vllm.hooks import warn_once

SINCE = "(allocated since the start)"
OUTSIDE = "(outside torch's allocator)"
POOLS = "(graph pools and fragments)"
# Phases of the start after the profile: what they allocate was not profiled, but for what vLLM plans.
PROFILE, CACHE, CAPTURE = "profile", "kv cache", "capture"


class Memory:
    """Bytes by owner; an error in the ledger ends only this part of the watch.

    Args:
        ledger: records phases; ``None`` where there is nothing to record.
        allocated: bytes in tensors now, by the allocator's own count on the host.

    >>> memory = Memory(None, lambda: 512)
    >>> memory.ready()
    >>> memory.unprofiled()
    {'(allocated since the start)': 0}
    """

    def __init__(self, ledger: Any, allocated: Callable[[], int]) -> None:
        self._ledger, self._allocated = ledger, allocated
        self._at_start: int | None = None
        self._owners: dict[str, int] = {}
        # What a scrape reads; any thread may.
        self.latest: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record a phase of the start around a call of vLLM's. What that call raises goes through."""
        entered = None
        if self._ledger is not None:
            try:
                entered = self._ledger.phase(name, planned=name == CACHE)
                entered.__enter__()
            except Exception as error:
                entered = None
                self._give_up(error)
        try:
            yield
        finally:
            if entered is not None:
                try:
                    entered.__exit__(None, None, None)
                except Exception as error:
                    self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._ledger = None
        warn_once(f"watch without owners of memory: {type(error).__name__}: {error}")

    def ready(self) -> None:
        """The start is over: keep what the ledger found, and count from here."""
        if self._ledger is not None:
            try:
                report = self._ledger.read()
                for owner in report.surprises:
                    self._owners[owner.name] = self._owners.get(owner.name, 0) + owner.bytes
                later = [phase for phase in report.phases if phase.name == CAPTURE]
                self._owners[POOLS] = sum(max(0, phase.pools) for phase in later)
                self._owners[OUTSIDE] = sum(max(0, phase.outside) for phase in later)
            except Exception as error:
                self._give_up(error)
        # The ledger refers to the model and to every live block: let it go.
        self._ledger = None
        self._at_start = self._allocated()
        self.unprofiled()

    def unprofiled(self) -> dict[str, int]:
        """Owner -> bytes that the profile run did not see. Reads the allocator's count on the host only."""
        if self._at_start is not None:
            self.latest = {**self._owners, SINCE: max(0, self._allocated() - self._at_start)}
        return self.latest


def of(worker: Any) -> Memory:
    """The memory of a worker whose model is loaded."""
    import torch

    from staleproof.evidence import AllocationLedger

    device = torch.device(worker.device)
    if device.type != "cuda":
        return Memory(None, lambda: 0)

    def allocated() -> int:
        return int(torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"])

    try:
        return Memory(AllocationLedger(worker.model_runner.get_model()), allocated)
    except Exception as error:
        warn_once(f"watch without owners of memory: {type(error).__name__}: {error}")
        return Memory(None, allocated)
