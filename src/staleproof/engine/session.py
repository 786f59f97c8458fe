"""What runs in an engine's own process: it starts a real ``vllm.LLM`` and answers probes."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from staleproof.cases import children
from staleproof.cases.children import Child, tell
from staleproof.engine.models import write_config

if TYPE_CHECKING:
    from staleproof.engine.probes import Engine
    from staleproof.engine.spies import Rows

# Device memory of an engine's KV cache, in bytes.
KV_BYTES = 2**31
# After the first rank's last answer, how long the others may take, in seconds.
OTHERS_S = 20.0
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "max_model_len": 2048,
    "max_num_seqs": 256,
    # The prompts of a round fit into one step, so that all its requests decode together.
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.1,
    # A fixed cache: engines that start side by side must not measure each other's memory.
    "kv_cache_memory_bytes": KV_BYTES,
    "enable_prefix_caching": False,
    "seed": 0,
}
Probe = Callable[..., Any]
# vLLM's name for the variable with the number of a data-parallel rank.
RANK = "VLLM_DP_RANK"


@dataclass(frozen=True)
class Order:
    """One engine and the probes it answers, in this order.

    Attributes:
        model: a key of :data:`staleproof.engine.models.MODELS`.
        probes: functions of the started engine, importable by name, and their arguments.
        options: keywords of ``vllm.LLM`` beside :data:`OPTIONS`.
        config: fields of ``config.json`` that differ from the table's.
        patches: ``STALEPROOF_PATCHES``.
        spies: functions that install something before the engine starts; each gets the engine's
            :class:`~staleproof.engine.spies.Rows`.
        env: further variables.
        packages: names a variable with folders to import from. A package that one question needs would
            change which kernels vLLM picks for the others, if it were installed for all.
        kernels: engines of one such name start one after another and share what torch.compile keeps on disk,
            so that all run the kernels that the first has compiled; ``None``: an engine compiles its own.
        ranks: data-parallel ranks, each a process with a GPU of its own that answers the probes. The answers
            of those after the first are its answers ``rank 1``, ...
    """

    model: str
    probes: Mapping[Probe, Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    patches: str = "none"
    spies: Sequence[Callable[[Rows], object]] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    packages: str | None = None
    kernels: str | None = None
    ranks: int = 1

    @property
    def compiles(self) -> bool:
        """Whether torch.compile makes kernels for its model."""
        return self.options.get("compilation_config", {}).get("mode") == 3


def serve(order: Order) -> None:
    """Start an engine, put every probe of the order to it, tell each answer at once, and exit.

    Runs in a process of its own (:func:`staleproof.engine.orders.run`).
    """
    try:
        others = _other_ranks(order)
        with tempfile.TemporaryDirectory(prefix=order.model) as folder:
            write_config(Path(folder), order.model, order.config)
            engine = start(order, folder)
            for probe, arguments in order.probes.items():
                try:
                    tell((probe.__name__, probe(engine, **arguments)))
                except Exception as error:
                    # The probes after this one may still answer.
                    _tell_error(error)
        for rank, child in enumerate(others, 1):
            tell((f"rank {rank}", dict(child.wait(OTHERS_S).told)))
    except Exception as error:
        _tell_error(error)
    sys.stdout.flush()
    sys.stderr.flush()
    # The answers are written. vLLM's own teardown takes seconds and can fail.
    os._exit(0)


def _other_ranks(order: Order) -> list[Child]:
    """Start the other data-parallel ranks of an order, and make this process the first."""
    if order.ranks == 1:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # All run on this machine. NVLink multicast needs rights that a shared machine may not give.
    env = {"VLLM_DP_SIZE": str(order.ranks), "VLLM_DP_MASTER_PORT": str(port), "NCCL_NVLS_ENABLE": "0"}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    alone, numbers = replace(order, ranks=1), range(1, order.ranks)
    others = [children.start(serve, alone, env={**env, RANK: str(number)}) for number in numbers]
    os.environ.update(env, **{RANK: "0"})
    return others


def _tell_error(error: Exception) -> None:
    import traceback

    traceback.print_exc()
    tell(("error", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))


def start(order: Order, folder: str) -> Engine:
    """Start the engine of an order with its spies; ``folder`` holds its ``config.json``."""
    if order.packages is not None:
        sys.path += filter(None, os.environ.get(order.packages, "").split(os.pathsep))
    import vllm.plugins

    from staleproof.engine.probes import Engine
    from staleproof.engine.spies import Rows, scaled_weights

    begun = time.perf_counter()
    # First the plugin, so that spies see what it makes of a kernel's result.
    vllm.plugins.load_general_plugins()
    scaled_weights()
    watch = Rows()
    for spy in order.spies:
        spy(watch)
    from vllm import LLM

    options: dict[str, Any] = {**OPTIONS, **order.options}
    llm = LLM(model=folder, **options)
    return Engine(llm, watch, time.perf_counter() - begun)
