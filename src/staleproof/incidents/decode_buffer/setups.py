"""The variants of incident 2: a decode buffer in a server, and how such a server is started."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from staleproof import child
from staleproof import device as devices
from staleproof.evidence.ledger import AllocationLedger
from staleproof.incidents.decode_buffer import broken
from staleproof.incidents.decode_buffer.allocator import CudaMemory, Memory, SimulatedMemory
from staleproof.incidents.decode_buffer.model import Attention, Experts, Part, ServerConfig
from staleproof.incidents.decode_buffer.scene import Outcome, Server
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.decode_workspace import DecodeWorkspace

SERVERS_TIMEOUT_S = 300

REPORT = ServerConfig()
# All sizes divided by 32. Blocks are then rounded differently and leave fewer fragments, so this engine keeps
# a little less than the report's tenth outside its plan.
SMALL = replace(REPORT.scaled(32), utilisation=0.92)
# The report's command limits a decode step to this; 256 MiB a layer needs its capture size, 2048.
MAX_NUM_SEQS = 1024


class KeyedWorkspace(Attention):
    """Our :class:`DecodeWorkspace`; the largest batch is requested before the profile run."""

    def __init__(self, config: ServerConfig, device: str, workspace: DecodeWorkspace) -> None:
        super().__init__(config, device)
        self.workspace = workspace
        shape = (config.batch, config.heads, config.rank)
        workspace.get(shape, config.dtype, device, micro_batch=0)

    def output(self, q: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """Memory (batch, heads, rank) from the workspace."""
        return self.workspace.get(q.shape, q.dtype, q.device, micro_batch=micro_batch)


class ClearedRows(Attention):
    """No buffer at all: new memory, and :func:`clear_empty_rows` after the kernel."""

    def decode(self, q: torch.Tensor, seq_lens: torch.Tensor, micro_batch: int = 0) -> torch.Tensor:
        """The output (batch, heads, rank) of one decode launch, empty rows 0."""
        out = super().decode(q, seq_lens, micro_batch)
        # No kernel can run on a meta tensor. Skipping this one is right, because it allocates nothing.
        if not out.is_meta:
            clear_empty_rows(out, seq_lens)
        return out


@dataclass(frozen=True)
class Wiring:
    """The parts of one server process; ``ready`` is called between warm-up and capture."""

    attention: Part = Attention
    experts: Part = Experts
    ready: Callable[[], object] = lambda: None


def _keyed() -> Wiring:
    workspace = DecodeWorkspace()
    return Wiring(partial(KeyedWorkspace, workspace=workspace), ready=workspace.lock)


@contextlib.contextmanager
def process(variant: str) -> Iterator[Wiring]:
    """The parts of a new process, whose module-level memory is dropped at its end.

    Args:
        variant: a key of :data:`SETUPS`.
    """
    try:
        yield SETUPS[variant]()
    finally:
        broken.forget_singleton()


# Variant -> makes the parts of a new process.
SETUPS: dict[str, Callable[[], Wiring]] = {
    "no_buffer": Wiring,
    "zeros_per_layer": partial(Wiring, broken.ZerosPerLayer),
    "zeros_before_profile": partial(Wiring, broken.ZerosBeforeProfile),
    "module_singleton": partial(Wiring, broken.ModuleSingleton),
    "decode_workspace": _keyed,
    "clear_empty_rows": partial(Wiring, ClearedRows),
    "lazy_moe_workspace": partial(Wiring, Attention, broken.LazyMoeWorkspace),
}
OFF = "zeros_per_layer"
# The variants that change the attention. For the other only the whole server can be judged.
ATTENTION = [name for name in SETUPS if name != "lazy_moe_workspace"]


@dataclass(frozen=True)
class ServerCase:
    """One server to start.

    Attributes:
        variant: a key of :data:`SETUPS`.
        config: its sizes; ``None`` for the report's, on the whole device.
        changes: fields of the sizes to change.
        watched: whether an :class:`AllocationLedger` watches the start.
    """

    variant: str
    config: ServerConfig | None = SMALL
    changes: Mapping[str, Any] = field(default_factory=dict)
    watched: bool = False


def true_size_config(total_bytes: int) -> ServerConfig:
    """The report's server on a device of another size, with the same bytes outside its plan.

    Raises:
        ValueError: the device is too small for it.
    """
    outside = REPORT.total_bytes - int(REPORT.utilisation * REPORT.total_bytes)
    share = 1 - outside / total_bytes
    weights = int(share * total_bytes) // 2
    return replace(REPORT, total_bytes=total_bytes, utilisation=share, weight_bytes=weights)


def run_server(case: ServerCase, device: str) -> Outcome:
    """Start one server in this process and let it serve: on real memory on CUDA, else simulated."""
    memory: Memory
    if device == "cuda":
        memory = CudaMemory(None if case.config is None else case.config.total_bytes)
        config = case.config or true_size_config(memory.total_bytes)
    else:
        config = case.config or REPORT
        memory = SimulatedMemory(config.total_bytes)
    with process(case.variant) as wiring:
        server = Server(
            replace(config, **case.changes), memory, wiring.attention, wiring.experts, wiring.ready
        )
        ledger = None
        if case.watched:
            ledger = AllocationLedger(server.model, budget_bytes=memory.total_bytes, usage=memory.usage)
        return server.start(ledger)


def _run_on_cuda(cases: Sequence[ServerCase]) -> list[Outcome]:
    devices.select("cuda")
    outcomes = []
    for case in cases:
        outcomes.append(run_server(case, "cuda"))
        gc.collect()
        torch.cuda.empty_cache()
    return outcomes


def run_servers(cases: Sequence[ServerCase], device: str) -> list[Outcome]:
    """Start one server after another: on CUDA in a process of their own, elsewhere simulated here.

    Raises:
        ChildError: the process ended without an answer.
    """
    if device != "cuda":
        return [run_server(case, device) for case in cases]
    return child.call(_run_on_cuda, cases, timeout_s=SERVERS_TIMEOUT_S).answer()
