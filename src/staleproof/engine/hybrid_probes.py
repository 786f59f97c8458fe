"""Probe of incident 4: a hybrid engine whose blocks change hands, served again and again under switches."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from staleproof.cases.children import tell
from staleproof.engine.probes import Engine, generate, prompts
from staleproof.engine.tenants import DeferredEvent

# State of the engine -> switches: zeroing of new blocks, a cache filled with NaN before the first request,
# copies of block ids that start late, and the runner's wait for its last step's copies before it zeroes new
# blocks. The first state is vLLM as it is. "again" repeats a state, to see what differs between equal runs.
AS_SHIPPED = {"zeroing": True, "poison": False, "delay": False, "waits": True}
SWITCHES = {
    "zeroing": {},
    "zeroing again": {},
    "no zeroing": {"zeroing": False},
    "zeroing, cache of NaN": {"poison": True},
    "no zeroing, cache of NaN": {"zeroing": False, "poison": True},
    "late copies": {"delay": True},
    "late copies, no wait": {"delay": True, "waits": False},
    "late copies, no wait again": {"delay": True, "waits": False},
}


def hybrid(engine: Engine, states: Sequence[str], requests: int = 100) -> dict[str, float]:
    """Serve the same requests in each of these states of one engine with few blocks, and tell each at once.

    Args:
        states: keys of :data:`SWITCHES`.
        requests: how many; their lengths differ, so that blocks change hands all the time.

    Returns:
        State -> seconds it took. Also told, as ``"cache"``: ``block_size``, ``blocks``, and ``waits``
        (whether the runner has an event it waits for); and by the name of each state: ``tokens``,
        ``logprobs`` (their bits, as integers) and ``nan`` (whether one is NaN), each a request;
        ``blocks_by_fifth``, see :meth:`staleproof.engine.tenants.Tenants.by_fifth`.
    """
    import torch

    runner, tenants = engine.runner, engine.watch.tenants
    waits_for = getattr(runner, "prepare_inputs_event", None)
    cache = engine.llm.llm_engine.vllm_config.cache_config
    blocks = {"block_size": cache.block_size, "blocks": cache.num_gpu_blocks}
    tell(("cache", {**blocks, "waits": waits_for is not None}))
    asked = prompts([20 + i * 37 % 400 for i in range(requests)])
    lengths = [4 + i % 13 for i in range(requests)]
    seconds = {}
    for state in states:
        begun = time.perf_counter()
        switches = {**AS_SHIPPED, **SWITCHES[state]}
        torch.cuda.synchronize()
        if switches["poison"]:
            poison(runner.kv_caches)
        tenants.clear()
        tenants.zeroing, tenants.delay = switches["zeroing"], switches["delay"]
        tenants.guard = None if switches["waits"] else DeferredEvent(waits_for)
        runner.prepare_inputs_event = tenants.guard or waits_for
        outputs = generate(engine, asked, lengths)
        torch.cuda.synchronize()
        rows = [[lp.logprob for step in o.outputs[0].logprobs or () for lp in step.values()] for o in outputs]
        found = {
            "tokens": [list(o.outputs[0].token_ids) for o in outputs],
            "logprobs": [torch.tensor(row, dtype=torch.float32).view(torch.int32).tolist() for row in rows],
            "nan": [any(value != value for value in row) for row in rows],
            "blocks_by_fifth": tenants.by_fifth(),
        }
        # At once, so that an engine whose time ends has answered the states before.
        tell((state, found))
        seconds[state] = round(time.perf_counter() - begun, 1)
    runner.prepare_inputs_event, tenants.guard = waits_for, None
    return seconds


def poison(caches: Any) -> None:
    """Fill KV caches with NaN.

    >>> import torch
    >>> one = torch.zeros(2, 3)
    >>> poison([[one], one])
    >>> bool(one.isnan().all())
    True
    """
    import torch

    with torch.inference_mode():
        for cache in tensors(caches):
            # A cache that others see with another layout and dtype too: every byte that is contiguous.
            cache.view(torch.uint8).fill_(0xFF) if cache.is_contiguous() else cache.fill_(float("nan"))


def tensors(caches: Any) -> Iterator[Any]:
    """The tensors in the KV caches of a runner; a layer of linear attention has a list of them."""
    for cache in caches:
        if isinstance(cache, list | tuple):
            yield from tensors(cache)
        else:
            yield cache
