"""The memory of a serving engine: how it is budgeted, and how it runs out.

An engine measures one profile run (eager, and without attention metadata, so that attention returns
early), gives the KV cache what is left of ``utilisation * total``, captures its graphs, and serves
(vLLM 0.18.1: ``v1/worker/gpu_worker.py:350``, ``gpu_model_runner.py:5053``, ``:5111``,
``mla_attention.py:575``; through 0.19.1 graph memory was not in the sum by default).
:class:`Server` takes those steps with a model reduced to what it allocates: on CUDA with real
memory, elsewhere with meta tensors against :class:`CachingAllocator`, which counts as torch's does.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from staleproof import check
from staleproof.evidence.ledger import AllocationLedger, Report, Usage, cuda_usage, owned_tensors, size_text

MIB, GIB = 2**20, 2**30

# c10/cuda/CUDACachingAllocator: smallest block, what counts as small, and the sizes of segments.
_ROUND = 512
_SMALL, _SMALL_SEGMENT = MIB, 2 * MIB
_MEDIUM, _MEDIUM_SEGMENT = 10 * MIB, 20 * MIB
_LARGE_ROUND = 2 * MIB

DIES, LIVES = "dies", "lives"


def decode_out_bytes(batch: int, heads: int, *, rank: int = 512, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of one layer's MLA decode output (batch, heads, rank)."""
    return batch * heads * rank * dtype.itemsize


def kv_cache_bytes(total: int, utilisation: float, weights: int, peak: int, other: int) -> int:
    """What the KV cache gets: ``utilisation * total - weights - peak - other``, in bytes.

    Args:
        total: device memory.
        utilisation: share of it that the engine may plan with, in (0, 1].
        weights: held before the profile run.
        peak: what the profile run allocated on top, at most.
        other: taken by others than torch, such as the driver's context and communicators.

    Raises:
        ValueError: a utilisation outside (0, 1], or nothing is left.
    """
    check.require(0 < utilisation <= 1, "utilisation", "a number in (0, 1]", utilisation)
    left = int(utilisation * total) - weights - peak - other
    check.require(
        left > 0,
        "total",
        f"utilisation x total of more than weights {size_text(weights)} + peak {size_text(peak)}"
        f" + other {size_text(other)}",
        f"{utilisation} x {size_text(total)}",
    )
    return left


@dataclass(frozen=True)
class ServerConfig:
    """Sizes of a server. The defaults are the reported command's (vLLM #37777, 4 x GB200).

    Attributes:
        total_bytes: device memory.
        utilisation: share that the engine plans with.
        layers: attention layers.
        batch: rows of the largest captured decode step.
        tokens: tokens of the largest prefill, which is also the profile run.
        heads: query heads a rank.
        rank: ``kv_lora_rank``.
        weight_bytes: a stand-in; the thread does not say.
        workspace_per_token: bytes of the transient workspace a token; 8192 tokens make the 3.94 GiB
            whose allocation failed. Whose it was the thread does not say; here it is the experts'.
        dtype: of the decode output; bf16, since the KV cache of the report is fp8.
    """

    total_bytes: int = 184 * GIB
    utilisation: float = 0.9
    layers: int = 61
    batch: int = 2048
    tokens: int = 8192
    heads: int = 128
    rank: int = 512
    weight_bytes: int = 80 * GIB
    workspace_per_token: int = 504 * 2**10
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("total_bytes", "layers", "batch", "tokens", "heads", "rank"):
            check.require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("weight_bytes", "workspace_per_token"):
            check.require(getattr(self, name) >= 0, name, "at least 0", getattr(self, name))
        check.require(self.batch <= self.tokens, "batch", f"at most {self.tokens} tokens", self.batch)
        # Raises for a utilisation outside (0, 1] and for weights beyond the budget.
        kv_cache_bytes(self.total_bytes, self.utilisation, self.weight_bytes, 0, 0)

    @property
    def decode_out_bytes(self) -> int:
        """Bytes of one layer's decode output at the largest captured batch."""
        return decode_out_bytes(self.batch, self.heads, rank=self.rank, dtype=self.dtype)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace of the largest prefill."""
        return self.tokens * self.workspace_per_token

    def scaled(self, by: int) -> ServerConfig:
        """The same server, everything but layers and heads divided by ``by``."""
        return replace(
            self,
            total_bytes=self.total_bytes // by,
            batch=self.batch // by,
            tokens=self.tokens // by,
            weight_bytes=self.weight_bytes // by,
        )

    def headroom_bytes(self, after_profile: int) -> int:
        """Device memory left once ``after_profile`` bytes nobody profiled are taken.

        The profile's peak (here the workspace) was set aside, so that much must be left to serve.
        """
        outside = self.total_bytes - int(self.utilisation * self.total_bytes)
        return outside + self.workspace_bytes - after_profile


@dataclass(eq=False)
class _Block:
    segment: _Segment
    offset: int
    size: int
    free: bool = True


@dataclass(eq=False)
class _Segment:
    size: int
    kind: tuple[bool, int]
    blocks: list[_Block]

    @property
    def empty(self) -> bool:
        return len(self.blocks) == 1 and self.blocks[0].free


class CachingAllocator:
    """torch's CUDA caching allocator, in arithmetic: one device, one stream, no tensor behind it.

    Requests are rounded to 512 bytes. Up to 1 MiB they share segments of 2 MiB, below 10 MiB
    segments of 20 MiB; a larger one gets a segment rounded to 2 MiB. Freed blocks join their free
    neighbours and are reused best fit; segments go back when a request would fail without.

    Args:
        capacity: bytes of the device.
        outside: bytes that others take from it.
    """

    def __init__(self, capacity: int, outside: int = 0) -> None:
        check.require(capacity > outside >= 0, "capacity", f"more than {outside} bytes", capacity)
        self.capacity, self.outside = capacity, outside
        self.allocated = self.peak = self.reserved = 0
        self._segments: list[_Segment] = []

    def malloc(self, nbytes: int, pool: int = 0) -> _Block:
        """Take a block.

        Args:
            nbytes: at least 1.
            pool: 0, or the number of a graph's private pool.

        Raises:
            torch.OutOfMemoryError: it fits neither in a cached segment nor on the device.
        """
        check.require(nbytes >= 1, "nbytes", "at least 1", nbytes)
        size = -(-nbytes // _ROUND) * _ROUND
        kind = size <= _SMALL, pool
        fitting = [
            block
            for segment in self._segments
            if segment.kind == kind
            for block in segment.blocks
            if block.free and block.size >= size
        ]
        block = min(fitting, key=lambda b: b.size) if fitting else self._grow(size, kind)
        rest = block.size - size
        if rest >= _ROUND if kind[0] else rest > _SMALL:
            blocks = block.segment.blocks
            blocks.insert(blocks.index(block) + 1, _Block(block.segment, block.offset + size, rest))
            block.size = size
        block.free = False
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        return block

    def _grow(self, size: int, kind: tuple[bool, int]) -> _Block:
        if kind[0]:
            wanted = _SMALL_SEGMENT
        elif size < _MEDIUM:
            wanted = _MEDIUM_SEGMENT
        else:
            wanted = -(-size // _LARGE_ROUND) * _LARGE_ROUND
        if wanted > self.free_bytes:
            self.empty_cache()
        if wanted > self.free_bytes:
            raise torch.OutOfMemoryError(self._message(wanted))
        segment = _Segment(wanted, kind, [])
        segment.blocks.append(_Block(segment, 0, wanted))
        self._segments.append(segment)
        self.reserved += wanted
        return segment.blocks[0]

    def _message(self, wanted: int) -> str:
        cached = self.reserved - self.allocated
        return (
            f"CUDA out of memory. Tried to allocate {size_text(wanted)}. GPU 0 has a total "
            f"capacity of {size_text(self.capacity)} of which {size_text(self.free_bytes)} is "
            f"free. Including non-PyTorch memory, this process has "
            f"{size_text(self.reserved + self.outside)} memory in use. Of the allocated memory "
            f"{size_text(self.allocated)} is allocated by PyTorch, and {size_text(cached)} is "
            "reserved by PyTorch but unallocated."
        )

    def free(self, block: _Block) -> None:
        """Give a block back; its segment stays."""
        self.allocated -= block.size
        block.free = True
        blocks = block.segment.blocks
        at = blocks.index(block)
        for left, right in ((at, at + 1), (at - 1, at)):
            if left >= 0 and right < len(blocks) and blocks[left].free and blocks[right].free:
                blocks[left].size += blocks[right].size
                del blocks[right]

    def empty_cache(self) -> None:
        """Give segments without a live block back to the device; private pools stay."""
        for segment in [s for s in self._segments if s.empty and s.kind[1] == 0]:
            self._segments.remove(segment)
            self.reserved -= segment.size

    @property
    def free_bytes(self) -> int:
        """Bytes of the device that nobody took."""
        return self.capacity - self.outside - self.reserved

    def usage(self) -> Usage:
        """As :func:`staleproof.evidence.ledger.cuda_usage` reads it from a real device."""
        releasable = sum(s.size for s in self._segments if s.empty and s.kind[1] == 0)
        return Usage(self.outside + self.reserved, self.reserved, self.allocated, releasable)


_FIELDS = {
    "tried": r"Tried to allocate ([\d.]+ \w+)",
    "total": r"total capacity of ([\d.]+ \w+)",
    "free": r"of which ([\d.]+ \w+) is free",
    "in_use": r"this process has ([\d.]+ \w+) memory in use",
    "allocated": r"allocated memory ([\d.]+ \w+) is allocated by PyTorch",
    "unallocated": r"and ([\d.]+ \w+) is reserved by PyTorch but unallocated",
}


def oom_fields(message: str) -> dict[str, str]:
    """The figures in an out-of-memory message, real or simulated, by name."""
    found = {name: re.search(pattern, message) for name, pattern in _FIELDS.items()}
    return {name: match.group(1) for name, match in found.items() if match}


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Run it again."""


class Memory(Protocol):
    """Where a server's tensors live; entered as a context around whatever allocates."""

    device: str
    total_bytes: int

    def __enter__(self) -> Any: ...
    def __exit__(self, *args: Any) -> Any: ...
    def usage(self) -> Usage:
        """The device now."""

    def peak_of(self, fn: Callable[[], object]) -> int:
        """Most bytes that ``fn`` allocated on top of what was; caches are emptied afterwards."""

    def capture(self, fn: Callable[[], object]) -> Graph:
        """Capture ``fn`` in a private pool."""


class SimulatedMemory(TorchDispatchMode):
    """A device of meta tensors: operations give shapes, and :class:`CachingAllocator` counts.

    Args:
        total_bytes: bytes of the device.
    """

    device = "meta"

    def __init__(self, total_bytes: int) -> None:
        super().__init__()
        self.total_bytes = total_bytes
        self.allocator = CachingAllocator(total_bytes)
        self._held: dict[int, tuple[_Block, object]] = {}
        self._pool = self._pools = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._held and storage.nbytes():
            block = self.allocator.malloc(storage.nbytes(), self._pool)
            self._held[key] = block, weakref.ref(storage, lambda _: self._release(key))

    def _release(self, key: int) -> None:
        block, _ = self._held.pop(key)
        self.allocator.free(block)

    def usage(self) -> Usage:
        """The device now."""
        return self.allocator.usage()

    def peak_of(self, fn: Callable[[], object]) -> int:
        """Most bytes that ``fn`` allocated on top of what was; caches are emptied afterwards."""
        before = self.allocator.peak = self.allocator.allocated
        fn()
        self.allocator.empty_cache()
        return self.allocator.peak - before

    def capture(self, fn: Callable[[], object]) -> Graph:
        """``fn`` once, in a private pool that stays; a replay allocates nothing."""
        self._pools += 1
        self._pool = self._pools
        try:
            fn()
        finally:
            self._pool = 0
        return _Replayed()


class _Replayed:
    def replay(self) -> None:
        """Meta tensors hold no values, and a replay takes no memory."""


class CudaMemory(contextlib.nullcontext):
    """The current CUDA device.

    Args:
        limit_bytes: what torch's allocator may take; ``None`` for the whole device. A limit does
            not count what others take, so :meth:`usage` does not either.

    Raises:
        ValueError: a limit beyond the device.
    """

    device = "cuda"

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        whole = torch.cuda.mem_get_info()[1]
        self.total_bytes = whole if limit_bytes is None else limit_bytes
        self._limited = limit_bytes is not None
        check.require(self.total_bytes <= whole, "limit_bytes", f"at most {whole}", self.total_bytes)
        torch.cuda.set_per_process_memory_fraction(self.total_bytes / whole)

    def usage(self) -> Usage:
        """The device now."""
        usage = cuda_usage()
        return usage._replace(used=usage.reserved) if self._limited else usage

    def peak_of(self, fn: Callable[[], object]) -> int:
        """Most bytes that ``fn`` allocated on top of what was; caches are emptied afterwards."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.max_memory_allocated() - before

    def capture(self, fn: Callable[[], object]) -> Graph:
        """A CUDA graph of ``fn``."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        return graph


def decode_live_rows(q: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor) -> None:
    """Stand-in for a decode kernel: copies live rows of ``q`` to ``out``, leaves the others alone.

    Args:
        q: (batch, heads, rank).
        seq_lens: (batch,) int32.
        out: like q, in place; allocates nothing of its size.
    """
    torch.where((seq_lens > 0)[:, None, None], q, out, out=out)


class Attention(nn.Module):
    """One layer's MLA decode, with fresh output memory for every call: no buffer at all.

    Variants override :meth:`output`.

    Args:
        config: sizes.
        device: where the weights go.
    """

    def __init__(self, config: ServerConfig, device: str) -> None:
        super().__init__()
        weight = torch.ones(config.heads, config.rank, dtype=config.dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def output(self, q: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """Memory for the decode output of ``q`` (batch, heads, rank), which nobody has written."""
        return torch.empty_like(q)

    def decode(self, q: torch.Tensor, seq_lens: torch.Tensor, micro_batch: int = 0) -> torch.Tensor:
        """The output (batch, heads, rank) of one decode launch."""
        out = self.output(q, micro_batch)
        decode_live_rows(q, seq_lens, out)
        return out

    def forward(self, x: torch.Tensor, seq_lens: torch.Tensor | None) -> torch.Tensor:
        """x (tokens,) -> (tokens,). ``seq_lens`` None: no metadata, or nothing to decode."""
        q = x[:, None, None] * self.weight
        if seq_lens is None:
            return torch.zeros_like(x)
        return self.decode(q, seq_lens).mean((1, 2))


class Experts(nn.Module):
    """One layer's experts: a workspace in proportion to the tokens, freed after the call.

    Variants override :meth:`workspace`.
    """

    def __init__(self, config: ServerConfig, device: str) -> None:
        super().__init__()
        self.per_token = config.workspace_per_token
        weight = torch.ones(1, dtype=config.dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    def workspace(self, x: torch.Tensor, decoding: bool) -> torch.Tensor:
        """(tokens * bytes a token,) uint8, which nobody has written."""
        return torch.empty(len(x) * self.per_token, dtype=torch.uint8, device=x.device)

    def forward(self, x: torch.Tensor, decoding: bool) -> torch.Tensor:
        """x (tokens,) -> (tokens,)."""
        staged = self.workspace(x, decoding)[: x.numel() * x.element_size()].view(x.dtype)
        staged.copy_(x)
        return staged * self.weight


class Layer(nn.Module):
    """Attention and experts, each with a residual."""

    def __init__(self, attn: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.attn, self.experts = attn, experts

    def forward(self, x: torch.Tensor, seq_lens: torch.Tensor | None) -> torch.Tensor:
        """x (tokens,) -> (tokens,)."""
        x = x + self.attn(x, seq_lens)
        return x + self.experts(x, seq_lens is not None)


Part = Callable[[ServerConfig, str], nn.Module]


class Model(nn.Module):
    """A decoder whose hidden size is 1: it allocates as a large one does and computes little.

    Attributes:
        kv_cache: filled by the server.
    """

    def __init__(self, config: ServerConfig, device: str, attention: Part, experts: Part) -> None:
        super().__init__()
        lump = torch.empty(config.weight_bytes, dtype=torch.uint8, device=device)
        self.weights = nn.Parameter(lump, requires_grad=False)
        self.layers = nn.ModuleList(
            Layer(attention(config, device), experts(config, device)) for _ in range(config.layers)
        )
        self.kv_cache: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, seq_lens: torch.Tensor | None) -> torch.Tensor:
        """x (tokens,) -> (tokens,); ``seq_lens`` (tokens,) int32 for a decode step, else None."""
        for layer in self.layers:
            x = layer(x, seq_lens)
        return x


@dataclass(frozen=True)
class Outcome:
    """How a server's start and first requests went.

    Attributes:
        verdict: :data:`DIES` or :data:`LIVES`.
        died_in: the phase whose allocation failed.
        error: the out-of-memory message.
        kv_bytes: size of the KV cache.
        peak_bytes: peak of the profile run.
        kept_bytes: what the parts hold at the end beside weights and KV cache.
        usages: the device after each phase.
        probed: the ledger's report when one layer had decoded.
        ready: its report when the server was ready to serve, or as far as it came.
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
        """Device memory that eager decoding took and kept, fragments of segments included.

        Raises:
            KeyError: the server died before it had decoded.
        """
        before, after = self.usages["kv_cache"], self.usages["warm_up"]
        return (after.used - after.releasable) - (before.used - before.releasable)


class Server:
    """One engine process: weights, profile run, KV cache, graphs, requests.

    Args:
        config: sizes.
        memory: a real or a simulated device of ``config.total_bytes``.
        attention: makes one layer's attention from ``config`` and a device.
        experts: likewise its experts.
        ready: called after the warm-up, before capture; e.g. locks a workspace.

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
        """The profile run, and the size of the KV cache from it.

        Raises:
            ValueError: nothing is left for a KV cache.
        """
        before = self.memory.usage()
        with self.memory:
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
        """Let one layer decode the largest batch, for the ledger to multiply."""
        with self.memory:
            self.model.layers[0](self.x, self.seq_lens)

    def allocate_kv_cache(self) -> None:
        """Take what :meth:`profile` left."""
        with self.memory:
            cache = torch.empty(self.kv_bytes, dtype=torch.uint8, device=self.memory.device)
            self.model.kv_cache.append(cache)

    def warm_up(self) -> None:
        """One eager decode step of the largest batch: lazily allocated buffers come to life."""
        with self.memory:
            self.model(self.x, self.seq_lens)
        self._ready()

    def capture(self) -> None:
        """Capture the decode step."""
        with self.memory:
            self._graph = self.memory.capture(lambda: self.model(self.x, self.seq_lens))

    def serve(self) -> None:
        """One decode step from the graph, then the largest prefill, eager, as it was profiled."""
        self._graph.replay()
        with self.memory:
            self.model(self.prompt, None)

    def start(self, ledger: AllocationLedger | None = None) -> Outcome:
        """Go through all steps; an out-of-memory ends them and is the outcome.

        Args:
            ledger: over :attr:`model`; one layer then decodes alone before all do, for the ledger
                to multiply.
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
                with _phase(ledger, name):
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


@contextlib.contextmanager
def _phase(ledger: AllocationLedger | None, name: str) -> Iterator[None]:
    if ledger is None:
        yield
    else:
        with ledger.phase(name, planned=name == "kv_cache"):
            yield
