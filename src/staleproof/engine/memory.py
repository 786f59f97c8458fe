"""Incident 2 in a real engine: an allocation that no profile saw, and vLLM's account of its graphs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from staleproof.cases.case import Reading, reading
from staleproof.engine.bench import Bench, Results, cell
from staleproof.engine.memory_probes import accounts, death
from staleproof.engine.mla import FULL
from staleproof.engine.probes import start
from staleproof.engine.session import Order
from staleproof.engine.spies import lazy_buffers, ledger

DEATH, GRAPHS, ACCOUNT = "death after start", "memory of graphs", "account of the start"
V1, V2 = "DeepSeek-V2, runner V1", "Qwen3 dense, runner V2"
WITHIN = 0.01
# What torch's allocator takes from the device at once.
BLOCK = 2**21
# The engine measures its own memory here, so the cache is not fixed.
MEASURED = {"kv_cache_memory_bytes": None, "compilation_config": FULL}
ORDERS = {
    V1: Order(
        "deepseek_v2",
        {start: {}, accounts: {}, death: {}},
        {"attention_backend": "TRITON_MLA", "moe_backend": "triton", **MEASURED},
        spies=(ledger, lazy_buffers),
        env={"VLLM_USE_V2_MODEL_RUNNER": "0"},
    ),
    V2: Order(
        "qwen3", {start: {}, accounts: {}}, MEASURED, spies=(ledger,), env={"VLLM_USE_V2_MODEL_RUNNER": "1"}
    ),
}


def _death(results: Results) -> Reading:
    """Was the end of the engine predicted, before it happened and within one per cent?"""
    told = results.of(V1, "death")
    error = told["predicted"] / told["taken"] - 1
    foreseen = told["fits"] is False and abs(error) <= WITHIN
    said = "predicted" if foreseen else "not predicted"
    if not told["healthy"]:
        said = "dies without the fault"
    elif told["died"] is None:
        said = "lives"
    return reading(said, error_percent=round(error * 100, 3), **told)


def balances(phases: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether the ledger explains what the device gave in each phase: within 1 %, or one block of 2 MiB.

    >>> phase = {"device": 2**30, "owned": 2**29, "pools": 2**28, "cached": 2**27, "outside": 2**27}
    >>> balances({"profile": phase}), balances({"profile": {**phase, "owned": 0}})
    (True, False)
    """
    return all(abs(remainder(got)) <= max(BLOCK, WITHIN * abs(got["device"])) for got in phases.values())


def remainder(phase: Mapping[str, int]) -> int:
    """Bytes that the device gave in a phase and no part of the ledger explains.

    Below 0: the phase also gave back memory from before the ledger, which has no owner in it.

    >>> remainder({"device": 100, "owned": 60, "pools": 20, "cached": 10, "outside": 5, "transient": 7})
    5
    """
    return phase["device"] - sum(phase[part] for part in ("owned", "pools", "cached", "outside"))


def account(name: str, results: Results) -> Reading:
    """How much of what the device gave is in the ledger: owned, in pools, outside torch."""
    told = results.of(name, "accounts")
    left = {phase: remainder(got) for phase, got in told["phases"].items()}
    said = "balances" if balances(told["phases"]) else "does not balance"
    return reading(said, unexplained_bytes=left, **told)


def graphs(name: str, results: Results) -> Reading:
    """Whether vLLM estimates its graphs' memory before it sizes the KV cache."""
    told = results.of(name, "accounts")
    estimated, taken = told["graph_bytes_estimated"], told["graph_bytes_taken"]
    said = "not counted" if not estimated and taken else "counted"
    runner = results.of(name, "start")["runner"]
    return reading(said, estimated=estimated, taken=taken, runner=runner)


BENCH = Bench(
    "memory",
    ORDERS,
    [
        cell(DEATH, V1, "death", _death),
        *(cell(ACCOUNT, name, "account", partial(account, name)) for name in (V1, V2)),
        *(cell(GRAPHS, name, "memory of graphs", partial(graphs, name)) for name in (V1, V2)),
    ],
    # Each measures the free memory of the device.
    alone=True,
)
