"""What a canary replica does, and how one bad request stays alone; runs in a child with a real vLLM."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from staleproof.child import report
from staleproof.incidents.published_unwritten import leak
from staleproof.incidents.published_unwritten.scene import Memory
from staleproof.vllm import contain, hooks, kv_memory, poison, sources, watch_blocks
from staleproof.vllm.hooks import Target
from staleproof.vllm.patches.published_unwritten import NAME as UNPUBLISH
from staleproof.vllm.patches.published_unwritten import SCHEDULER
from staleproof.whole import place
from staleproof.whole.engine import Engine, counters, states_of, switch
from staleproof.whole.load import Arrival
from staleproof.whole.spy import before


def poisoned(requests: int) -> None:
    """Incident 7's load, then a mixed one, with the poison off and on; tell whose logits were NaN."""
    options = {**leak.OPTIONS, "max_num_seqs": 16}
    engine = Engine(Path(sys.prefix, place.MODEL), scheduling_policy="priority", **options)
    told: dict[str, Any] = {}
    for state, off in {
        "released": (poison.NAME, UNPUBLISH), "poison": (UNPUBLISH,), "poison, patched": (),
    }.items():  # fmt: skip
        switch(off)
        told[state] = _visits(engine)
    load = mixed(engine, requests)
    for state, off in {"mixed": (poison.NAME,), "mixed, poison": ()}.items():
        switch(off)
        told[state] = _served(engine, load)
    report(told)


def _visits(engine: Engine) -> dict[str, Any]:
    """Incident 7's load: what Carla was told, whose logits were NaN, and who read what nobody wrote."""
    nan: set[str] = set()
    written: dict[int, str] = {}
    memory, blocks, steps = Memory(leak.BLOCK), watch_blocks.of(engine.runner.kv_cache_config), count(1)

    def follow(plan: Any, *rest: Any) -> None:
        step = next(steps)
        blocks.scheduled(plan, step)
        for name in [name for name in plan.num_scheduled_tokens if leak._user(name) == "Carla"]:
            parts = blocks.owners.read_by(name, step)
            written.update({block: leak._user(part.owner) for part in parts for block in part.blocks})

    def look(names: Sequence[str], logits: torch.Tensor) -> None:
        rows = zip(names, logits.isnan().any(-1).tolist(), strict=True)
        nan.update(leak._user(name) for name, bad in rows if bad)

    # Where a model runner samples: the first in a method of its own, the second in a sampler.
    if hasattr(engine.runner, "_sample"):
        sampled = before(
            engine.runner, "_sample", lambda logits, drafts: look(engine.runner.input_batch.req_ids, logits)
        )
    else:
        sampled = before(
            type(engine.runner.sampler), "__call__", lambda self, logits, batch: look(batch.req_ids, logits)
        )
    hooks.wrap("truth", Target(SCHEDULER, "Scheduler.schedule", ("self",), after=leak._follow(memory)))
    with sampled, before(engine.runner, "execute_model", follow):
        text = leak.visits(engine).text
    hooks.unwrap("truth")
    reads = [(leak._user(read.reader), read.block, leak._user(read.whose)) for read in memory.reads]
    return {"text": text, "nan": sorted(nan), "reads": reads, "written": [*written.items()]}


def _served(engine: Engine, load: Sequence[Arrival]) -> dict[str, Any]:
    engine.empty()
    filled, preempted = counters()["poisoned_blocks"], []
    with before(engine.scheduler, "_preempt_request", lambda one, *now, **how: preempted.append(one)):
        answers = engine.serve(load)
    return {
        "tokens": {name: one.tokens for name, one in answers.items()},
        "hits": sum(one.cached > 0 for one in answers.values()),
        "preempted": len(preempted),
        "poisoned": counters()["poisoned_blocks"] - filled,
    }


def mixed(engine: Engine, requests: int) -> list[Arrival]:
    """Requests that share beginnings, come in chunks, are preempted, and of which one in ten leaves."""
    draw, words = random.Random(1), engine.tokens(8 * leak.RULES)
    load = []
    for number in range(requests):
        # An answer to 31 or more tokens needs one block more, while the pool is full.
        length = draw.choice((*[6] * 6, 31, 32, 64, 95))
        own = length - draw.choice((0, *range(32, length, 32)))
        prompt = words[: length - own] + [draw.randrange(1000, 9000) for _ in range(own)]
        leaves = number // 4 + draw.randrange(1, 4) if draw.random() < 0.1 else 0
        load.append(Arrival(f"m{number}", prompt, 3, draw.choice((0, 5)), number // 4, leaves=leaves))
    return load


PROMPT, STRANGER, BAD_AT = "Tell me about the house rules, please.", "Where is the kitchen?", 3
OPTIONS = {
    "dtype": "float32", "block_size": leak.BLOCK, "max_model_len": 256, "max_num_seqs": 64,
    "num_gpu_blocks_override": 56, "enable_prefix_caching": True,
}  # fmt: skip


def contained(**more: Any) -> None:
    """One request's KV is poisoned by hand while 50 others run: contain off, on and off again.

    The scheduler plans a step before it knows the tokens of the last one, if the release can on a CPU.

    Args:
        more: options of ``vllm.LLM``.
    """
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    asynchronous = not more and (not on_cpu or sources.installed()[0] == place.RELEASES[1])
    if asynchronous and on_cpu:
        _allow_asynchronous()
    engine = Engine(Path(sys.prefix, place.MODEL), async_scheduling=asynchronous, **OPTIONS, **more)
    words = engine.tokens(8 * leak.RULES)
    # Two whole blocks that a stranger hits, if they are in the prefix cache.
    shared = words[: 2 * leak.BLOCK]
    bad = Arrival("bad", shared + engine.tokens(PROMPT), 8)
    stranger = Arrival("stranger", shared + engine.tokens(STRANGER), 6)
    # Each takes one block. More of them take every block that the pool has.
    many = [Arrival(f"o{i}", words[7 * i : 7 * i + 20 + i % 9], 3) for i in range(55)]
    others = many[:50]
    told: dict[str, Any] = {"scheduler": type(engine.scheduler).__name__}
    engine.empty(fill=0.0)
    told["alone"] = engine.serve([stranger], ends=False)["stranger"].tokens
    told["many"] = {name: one.tokens for name, one in engine.serve(many, ends=False).items()}
    told["clean"] = {name: one.tokens for name, one in engine.serve([*others, bad], ends=False).items()}
    for state in ("off", "on", "again"):
        switch(() if state == "on" else (contain.NAME,))
        engine.empty(fill=0.0)
        ended, steps = counters()["contained_requests"], count(1)

        def spoil(plan: Any, *rest: Any, steps: Iterator[int] = steps) -> None:
            """Before one step: NaN in the first block of the bad request, in each layer."""
            if plan.total_num_scheduled_tokens and next(steps) == BAD_AT:
                (name,) = [name for name in engine.scheduler.requests if name.startswith("bad-")]
                first = engine.scheduler.kv_cache_manager.get_block_ids(name)[0][0]
                kv_memory.fill(engine.runner, [[first]], torch.nan)

        with before(engine.runner, "execute_model", spoil):
            answers = engine.serve([*others, bad], ends=False)
        told[state] = {
            "bad": answers.pop("bad")._asdict(),
            "others": {name: one.tokens for name, one in answers.items()},
            "stranger": engine.serve([stranger], ends=False)["stranger"].tokens,
            # They get all blocks of the pool, also those that held NaN.
            "later": {name: one.tokens for name, one in engine.serve(many, ends=False).items()},
            "contained": counters()["contained_requests"] - ended,
            "state": states_of(contain.NAME)[contain.NAME],
        }
    report(told)


def _allow_asynchronous() -> None:
    """Let a CPU schedule a step before it knows the tokens of the last one, which vLLM switches off there.

    What that code needs of a GPU are streams and events, and vLLM has stubs for a CPU in its second runner.
    """
    import vllm.v1.worker.cpu.shm  # noqa: F401
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check(platform: Any, config: Any) -> None:
        original(platform, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check)
