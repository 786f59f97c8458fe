"""One engine process, from its start to its first requests.

An engine measures one profile run. The run is eager and has no attention metadata, so attention returns
early. The KV cache gets what remains of ``utilisation * total``; then the engine captures its graphs and
serves (vLLM 0.18.1: ``v1/worker/gpu_worker.py:350``, ``gpu_model_runner.py:5053``, ``:5111``,
``mla_attention.py:575``; through 0.19.1 graph memory was not in the sum by default).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from staleproof.evidence.ledger import AllocationLedger, Report, Usage, owned_tensors
from staleproof.incidents.decode_buffer.allocator import Memory
from staleproof.incidents.decode_buffer.model import (
    Attention,
    Experts,
    Model,
    Part,
    ServerConfig,
    kv_cache_bytes,
)

LIVES, DIES = "lives", "dies"


@dataclass(frozen=True)
class Outcome:
    """How a server's start and first requests went.

    Attributes:
        verdict: :data:`LIVES` or :data:`DIES`.
        died_in: the phase whose allocation failed.
        error: the out-of-memory message.
        kv_bytes: size of the KV cache.
        peak_bytes: peak of the profile run.
        kept_bytes: memory that attention and experts keep at the end, without weights and KV cache.
        usages: the device's usage after each phase.
        probed: the ledger's report after one layer had decoded.
        ready: the ledger's report when the server was ready to serve, or when it died before that.
    """

    verdict: str
    died_in: str | None
    error: str | None
    kv_bytes: int
    peak_bytes: int
    kept_bytes: int
    usages: dict[str, Usage]
    probed: Report | None = None
    ready: Report | None = None

    def taken_bytes(self) -> int:
        """Device memory that eager decoding took and did not give back, fragments of segments included.

        Raises:
            KeyError: the server died before it had decoded.
        """
        before, after = self.usages["kv_cache"], self.usages["warm_up"]
        return (after.used - after.releasable) - (before.used - before.releasable)


class Server:
    """One engine process: weights, profile run, KV cache, graphs, requests.

    :meth:`start` goes through the steps, each a method, in the ``with`` block of the memory.

    Args:
        config: sizes.
        memory: a real or a simulated device of ``config.total_bytes``.
        attention: makes one layer's attention from ``config`` and a device.
        experts: makes one layer's experts.
        ready: called between warm-up and capture, e.g. to lock a workspace.

    Raises:
        torch.OutOfMemoryError: the weights do not fit.
    """

    def __init__(
        self,
        config: ServerConfig,
        memory: Memory,
        attention: Part = Attention,
        experts: Part = Experts,
        ready: Callable[[], object] = lambda: None,
    ) -> None:
        self.config, self.memory, self._ready = config, memory, ready
        with memory:
            self.model = Model(config, memory.device, attention, experts)
            self.x = torch.zeros(config.batch, dtype=config.dtype, device=memory.device)
            self.prompt = torch.zeros(config.tokens, dtype=config.dtype, device=memory.device)
            self.seq_lens = torch.ones(config.batch, dtype=torch.int32, device=memory.device)
        self.kv_bytes = self.peak_bytes = 0

    def profile(self) -> None:
        """Run the profile, and compute the size of the KV cache from it.

        Raises:
            ValueError: nothing is left for a KV cache.
        """
        before = self.memory.usage()
        self.peak_bytes = self.memory.peak_of(lambda: self.model(self.prompt, None))
        usage = self.memory.usage()
        self.kv_bytes = kv_cache_bytes(
            self.memory.total_bytes,
            self.config.utilisation,
            before.allocated,
            self.peak_bytes,
            usage.used - usage.reserved,
        )

    def probe(self) -> None:
        """Let one layer decode the largest batch, from which the ledger predicts all layers."""
        self.model.layers[0](self.x, self.seq_lens)

    def allocate_kv_cache(self) -> None:
        """Allocate the KV cache in the size that :meth:`profile` computed."""
        cache = torch.empty(self.kv_bytes, dtype=torch.uint8, device=self.memory.device)
        self.model.kv_cache.append(cache)

    def warm_up(self) -> None:
        """One eager decode step of the largest batch, so that lazy allocations happen."""
        self.model(self.x, self.seq_lens)
        self._ready()

    def capture(self) -> None:
        """Capture the decode step."""
        self._graph = self.memory.capture(lambda: self.model(self.x, self.seq_lens))

    def serve(self) -> None:
        """One decode step from the graph, then the largest prefill, as in the profile run."""
        self._graph.replay()
        self.model(self.prompt, None)

    def start(self, ledger: AllocationLedger | None = None) -> Outcome:
        """Run all steps, or stop at an out-of-memory error.

        Args:
            ledger: over :attr:`model`; one layer then decodes alone before all do (:meth:`probe`).
        """
        steps: dict[str, Callable[[], None]] = {
            "profile": self.profile,
            "kv_cache": self.allocate_kv_cache,
            "probe": self.probe,
            "warm_up": self.warm_up,
            "capture": self.capture,
            "serve": self.serve,
        }
        if ledger is None:
            del steps["probe"]
        error = died_in = probed = None
        usages: dict[str, Usage] = {}
        for name, step in steps.items():
            try:
                with ledger.phase(name, planned=name == "kv_cache") if ledger else nullcontext(), self.memory:
                    step()
            except torch.OutOfMemoryError as oom:
                error, died_in = str(oom), name
            usages[name] = self.memory.usage()
            if ledger is not None and name != "serve":
                ready = ledger.read()
                probed = ready if name == "probe" else probed
            if error is not None:
                break
        return Outcome(
            verdict=LIVES if error is None else DIES,
            died_in=died_in,
            error=error,
            kv_bytes=self.kv_bytes,
            peak_bytes=self.peak_bytes,
            kept_bytes=self._kept_bytes(),
            usages=usages,
            probed=probed,
            ready=None if ledger is None else ready,
        )

    def _kept_bytes(self) -> int:
        known = {id(x.untyped_storage()) for x in (*self.model.parameters(), *self.model.kv_cache)}
        storages = {id(s): s for s in (x.untyped_storage() for _, _, x in owned_tensors(self.model))}
        return sum(s.nbytes() for key, s in storages.items() if key not in known)
