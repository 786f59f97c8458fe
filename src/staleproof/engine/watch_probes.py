"""Probes of the watch in a started engine: what it counted, and what its port says."""

from __future__ import annotations

from typing import Any

from staleproof.engine import watching
from staleproof.engine.probes import Engine
from staleproof.vllm import watch_hooks


def watched(engine: Engine, port: int) -> dict[str, Any]:
    """What the watch counted since the engine was ready, and what its port says.

    Returns:
        ``bad``: "stage, layer" -> padding and live rows; ``repeats``: the same of experts named twice;
        ``steps`` and ``counted`` of them; ``stale_blocks``: "written as, read as" -> blocks;
        ``unprofiled``: owner -> bytes; ``scraped``: rows of :func:`staleproof.engine.watching.rows`.
    """
    import torch

    on = watch_hooks.installed[0]
    watch = on.watch
    assert watch is not None, "the watch is off"
    torch.cuda.synchronize()
    watch.reading()
    watch.copy()
    torch.cuda.synchronize()
    reading = watch.reading()
    return {
        "bad": {", ".join(key): list(counts) for key, counts in reading.bad.items()},
        "repeats": {layer: list(counts) for layer, counts in reading.repeats.items()},
        "steps": reading.steps,
        "counted": reading.counted,
        "stale_blocks": {", ".join(k): n for k, n in on.blocks.stale.items()} if on.blocks else None,
        "unprofiled": on.memory.unprofiled() if on.memory else None,
        "scraped": [list(row) for row in watching.rows(watching.fetch(f"localhost:{port}"))],
    }
