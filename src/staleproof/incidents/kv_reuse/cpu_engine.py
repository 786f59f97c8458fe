"""Incident 4 in a whole vLLM on a CPU: blocks that were recurrent state, read behind a request's end.

A hybrid model (Qwen3-Next's shape, random weights) keeps recurrent state of fp32 and keys and values of bf16
in blocks of one pool. Read as bf16, old state holds NaN. The CPU kernel gives keys behind a request's end the
weight 0, and 0 times a NaN value is NaN: each element of the output. vLLM therefore zeroes new blocks, except
on a CPU in 0.19.0 to 0.24.0 (#46347), where the body of ``_zero_block_ids`` is ``pass``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from staleproof.child import tell
from staleproof.whole.load import Arrival
from staleproof.whole.place import MODEL
from staleproof.whole.shapes import QWEN3_NEXT
from staleproof.whole.spy import before, contents

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "num_gpu_blocks_override": 24,
    "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 1024, "enable_prefix_caching": False,
}  # fmt: skip
RELEASED = "released"


def ask(states: Sequence[str], requests: int) -> None:
    """In the child: serve the same requests in each state, and tell whose answer has a NaN, or is wrong.

    Args:
        states: ``off``: new blocks are not zeroed; ``on``: they are, as 0.25.0 to 0.33.0 do;
            ``released``: whatever this release does.
        requests: how many.
    """
    import torch
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from staleproof.whole.engine import Engine

    engine = Engine(QWEN3_NEXT, **OPTIONS)
    engine.draw_weights()
    draw = torch.Generator().manual_seed(1)
    load = [
        Arrival(f"r{i}", torch.randint(2, 2047, (20 + i * 37 % 300,), generator=draw).tolist(), 4 + i % 13)
        for i in range(requests)
    ]
    right: dict[str, Any] = {}
    for one in load:
        engine.empty(fill=0.0)
        right |= engine.serve([one], ends=False)
    caches = attention(engine.runner)
    told: dict[str, Any] = {"blocks": OPTIONS["num_gpu_blocks_override"], "nan alone": _nan(right)}
    for number, state in enumerate(states):
        found: list[Any] = []

        def look(
            runner: Any, blocks: Sequence[int], found: list[Any] = found, on: bool = state == "on"
        ) -> None:
            given = [cache[block] for block in blocks for cache in caches]
            found += map(contents, given)
            for block in given if on else ():
                block.zero_()

        engine.empty(fill=0.0)
        runs = state == RELEASED
        with before(CPUModelRunner, "_zero_block_ids", look, runs=runs):
            served = engine.serve(load, ends=False)
        told[f"{number} {state}"] = {
            "nan": _nan(served),
            "other": [name for name, one in served.items() if one.tokens != right[name].tokens],
            "blocks given": len(found),
            "stale": sum(one.nonzero > 0 for one in found),
            "with NaN": sum(one.nan > 0 for one in found),
        }
        tell(told)


def undrained(states: Sequence[str], requests: int) -> None:
    """In the child: serve a dense model, and tell how many block ids wait to be zeroed after each request.

    Args:
        states: ``off``, ``on``: the patch ``undrained_ids`` is out of service, or in service.
        requests: how many in each state; each fills two blocks of 16 tokens.
    """
    from staleproof.whole.engine import Engine, states_of, switch

    engine = Engine(Path(sys.prefix, MODEL), dtype="bfloat16", max_model_len=64, block_size=16)
    manager = engine.scheduler.kv_cache_manager
    told: dict[str, Any] = {}
    for number, state in enumerate(states):
        switch(off=("undrained_ids",) if state == "off" else ())
        waiting = []
        for at in range(requests):
            # No two prompts share a block, so each request allocates its own.
            engine.serve([Arrival("one", [100 + at + requests * number] * 24, 4)])
            kinds = manager.coordinator.single_type_managers
            waiting.append(sum(len(kind.new_block_ids) for kind in kinds))
        told[f"{number} {state}"] = {"waiting": waiting, "patch": states_of("undrained_ids")}
        tell(told)


def attention(runner: Any) -> list[Any]:
    """The caches of attention layers, each once; the first axis counts blocks."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    layers = runner.compilation_config.static_forward_context
    names = [
        name
        for group in runner.kv_cache_config.kv_cache_groups
        if isinstance(group.kv_cache_spec, FullAttentionSpec)
        for name in group.layer_names
    ]
    caches = {layers[name].kv_cache.data_ptr(): layers[name].kv_cache for name in names}
    return [*caches.values()]


def _nan(answers: Any) -> list[str]:
    return [name for name, one in answers.items() if one.nan]
