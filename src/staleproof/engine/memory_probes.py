"""Probes of incident 2: what the allocation ledger says of a running engine, against the device."""

from __future__ import annotations

from typing import Any

from staleproof.engine.probes import Engine, generate, prompts
from staleproof.engine.spies import BUFFER

# More requests than the largest captured graph has rows: their decode runs outside graphs.
UNCAPTURED = 70
# Buffers that the budget leaves room for; the model has four layers.
ROOM = 2.5


def accounts(engine: Engine) -> dict[str, Any]:
    """What the ledger recorded of the start, phase by phase, in bytes; and vLLM's own figures."""
    report = engine.watch.ledger.read()
    worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    phases = {}
    before: dict[str, int] = {}
    for phase in report.phases:
        owned = sum(phase.by_owner.values()) - sum(before.values())
        grown = phase.after.used - phase.before.used
        phases[phase.name] = {
            "device": grown,
            "owned": owned,
            "pools": phase.pools,
            "cached": phase.after.releasable - phase.before.releasable,
            "outside": phase.outside,
            "transient": phase.transient,
            "allocated": phase.after.allocated - phase.before.allocated,
        }
        before = dict(phase.by_owner)
    return {
        "phases": phases,
        "sentence": report.sentence,
        "owners": [f"{owner}, {owner.source}, first in {owner.phase}" for owner in report.owners[:8]],
        "graph_bytes_estimated": getattr(worker, "cudagraph_memory_estimate", None),
        "graph_bytes_taken": engine.watch.graph_bytes,
        "kv_bytes": getattr(worker, "available_kv_cache_memory_bytes", None),
    }


def death(engine: Engine) -> dict[str, Any]:
    """Let a buffer a layer appear after the start, and compare the ledger's prediction with what happens.

    First one layer has it, and the ledger predicts. Then all have it, and the device says how much they
    took. Then the same with room for 2.5 of them beside a step like the profile's.

    Returns:
        ``predicted`` and ``taken`` bytes; ``healthy``: whether the full step lives within the budget
        without the buffers; ``fits``: what the ledger says when one layer has its buffer; ``died``: how
        the engine ended when all have it, ``None`` if it lived.
    """
    import torch

    ledger, watch = engine.watch.ledger, engine.watch
    with ledger.phase("serve"):
        _small(engine)
        watch.lazy_layers = 1
        _small(engine)
    owner = next(o for o in ledger.read().owners if BUFFER in o.name)
    before = _used()
    watch.lazy_layers = owner.layers
    _small(engine)
    taken = _used() - before + owner.bytes_each

    watch.lazy_layers = 0
    for module in engine.runner.get_model().modules():
        if getattr(getattr(module, "impl", None), BUFFER, None) is not None:
            setattr(module.impl, BUFFER, None)
    used, reserved = _used(), torch.cuda.memory_reserved()
    room = ledger.read().required + int(ROOM * owner.bytes_each)
    ledger.budget_bytes = used + room
    torch.cuda.set_per_process_memory_fraction((reserved + room) / torch.cuda.mem_get_info()[1])
    told = {
        "predicted": owner.predicted,
        "taken": taken,
        "owner": str(owner),
        "room": room,
        "healthy": _outcome(engine, _full) is None,
    }
    watch.lazy_layers = 1
    with ledger.phase("serve"):
        _small(engine)
    report = ledger.read()
    watch.lazy_layers = owner.layers
    died = _outcome(engine, _small) or _outcome(engine, _full)
    return {**told, "fits": report.fits, "sentence": report.sentence, "died": died}


def _used() -> int:
    """Bytes of the device in use, without what the caching allocator holds for nobody."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _small(engine: Engine) -> None:
    generate(engine, prompts([67] * UNCAPTURED), [4] * UNCAPTURED)


def _full(engine: Engine) -> None:
    """A step of as many tokens as the profile run had."""
    generate(engine, prompts([2040] * 8), [4] * 8)


def _outcome(engine: Engine, serve: Any) -> str | None:
    """How it ended, in one line; ``None`` if it lived."""
    try:
        serve(engine)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return None
