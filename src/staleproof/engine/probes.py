"""Probes: what is put to a started engine, in its own process. Each returns picklable numbers."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from staleproof.engine.spies import ATTENTION, EXPERTS_INPUT, Rows
from staleproof.vllm import process, standing
from staleproof.vllm.plugin import patches

VOCABULARY = 7999


@dataclass(frozen=True)
class Engine:
    """A started engine.

    Attributes:
        llm: the ``vllm.LLM``.
        watch: what its spies keep.
        started_s: seconds from the first import of vLLM until it was ready.
        requests: how many requests were added by hand, for their names.
    """

    llm: Any
    watch: Rows
    started_s: float
    requests: list[int] = field(default_factory=lambda: [0])

    @property
    def scheduler(self) -> Any:
        """The scheduler of the engine core in this process."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def runner(self) -> Any:
        """The model runner of the worker in this process."""
        executor = self.llm.llm_engine.engine_core.engine_core.model_executor
        return executor.driver_worker.worker.model_runner


def prompts(lengths: Sequence[int], seed: int = 1) -> list[dict[str, list[int]]]:
    """Prompts of random tokens; the same for the same arguments.

    >>> [len(prompt["prompt_token_ids"]) for prompt in prompts([3, 5])]
    [3, 5]
    """
    import torch

    draw = torch.Generator().manual_seed(seed)
    return [
        {"prompt_token_ids": torch.randint(2, VOCABULARY, (n,), generator=draw).tolist()} for n in lengths
    ]


def generate(engine: Engine, asked: list[dict[str, list[int]]], max_tokens: Sequence[int]) -> list[Any]:
    """Serve these prompts to the end, greedily, and return vLLM's outputs."""
    from vllm import SamplingParams

    parameters = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0)
        for n in max_tokens
    ]
    return engine.llm.generate(asked, parameters, use_tqdm=False)


def start(engine: Engine) -> dict[str, Any]:
    """How the engine started: seconds, and what it chose."""
    config = engine.llm.llm_engine.vllm_config
    return {
        "seconds": round(engine.started_s, 1),
        "runner": f"{type(engine.runner).__module__}.{type(engine.runner).__name__}",
        "graphs": str(config.compilation_config.cudagraph_mode),
        "sizes": list(config.compilation_config.cudagraph_capture_sizes or ()),
        "block_size": config.cache_config.block_size,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "patches": {name: process.state(name)[0] for name in standing_patches()},
    }


def standing_patches() -> list[str]:
    """The patches that have put a hook in place in this process, or wait to."""
    return sorted(name for name in patches() if standing.targets(name))


def rows(engine: Engine, live: Sequence[int], tokens: int = 24) -> list[dict[str, Any]]:
    """Serve ``live[0]`` requests, then ``live[1]``, ..., and say what the last decode step of each wrote.

    Args:
        live: number of requests of each round; they start together and end together.
        tokens: that each request generates.

    Returns:
        For each round: ``live``, ``size`` (rows of the step), ``stages`` (stage -> live rows and padding
        rows with a NaN), ``largest`` (stage -> largest magnitude that experts get, in live rows and in
        padding rows), ``tokens`` and ``sums`` (checksums of the live rows' logits, a step), ``nan`` (tokens
        whose logprob is NaN), ``twice`` (live and padding rows of routers with an expert twice).
    """
    import torch

    rounds = []
    for count in live:
        engine.watch.clear()
        # Long enough that no prompt is a step that the spies keep.
        asked = prompts([67 + 7 * i % 90 for i in range(count)])
        outputs = generate(engine, asked, [tokens] * count)
        torch.cuda.synchronize()
        seen = dict(engine.watch.seen())
        chosen = [lp for o in outputs for step in o.outputs[0].logprobs or () for lp in step.values()]
        rounds.append(
            {
                "live": count,
                "size": max((len(flags) for stage, flags in seen.items() if ATTENTION in stage), default=0),
                "stages": {stage: [sum(flags[:count]), sum(flags[count:])] for stage, flags in seen.items()},
                "largest": _largest(engine.watch, count, seen),
                "tokens": [list(o.outputs[0].token_ids) for o in outputs],
                "sums": [kept[:count].tolist() for kept in engine.watch.sums],
                "nan": sum(lp.logprob != lp.logprob for lp in chosen),
                "twice": list(engine.watch.duplicates(count)),
            }
        )
    return rounds


def _largest(watch: Rows, live: int, seen: dict[str, list[int]]) -> dict[str, list[float]]:
    """Stage -> largest magnitude of live rows and of padding rows in the last decode step."""
    found = {}
    for stage, flags in seen.items():
        if stage.endswith(EXPERTS_INPUT):
            rows = watch.largest[stage, len(flags)].tolist()
            found[stage] = [max(rows[:live]), max(rows[live:], default=0.0)]
    return found


def control(engine: Engine, tokens: int = 8) -> list[int]:
    """Do the logits notice one other token at the start of a prompt? If not, equal bits say nothing.

    Returns:
        Steps whose checksum differs, and steps compared.
    """
    (asked,) = prompts([67])
    other = {"prompt_token_ids": [asked["prompt_token_ids"][0] ^ 1, *asked["prompt_token_ids"][1:]]}
    sums = []
    for prompt in (asked, other):
        engine.watch.clear()
        generate(engine, [prompt], [tokens])
        sums.append([int(kept[0]) for kept in engine.watch.sums])
    return [sum(a != b for a, b in zip(*sums, strict=False)), tokens]


def spoilt_blocks(engine: Engine) -> list[list[int]]:
    """For each KV cache of MLA the first blocks that hold a NaN; block 0 belongs to no request."""
    import torch

    caches = [cache for cache in engine.runner.kv_caches if cache.ndim == 3]
    found = []
    for cache in caches:
        bad = torch.cat([torch.isnan(part.float()).flatten(1).any(1) for part in cache.split(4096)])
        found.append(bad.nonzero().flatten()[:5].tolist())
    return found


def undrained(engine: Engine, requests: int = 1000, parts: int = 4) -> dict[str, Any]:
    """Serve many short requests; count the recorded block ids that nothing drained, and host memory.

    Returns:
        ``requests``, ``ids`` and ``rss`` (bytes of resident host memory) after each part, ``tokens`` (a
        checksum of all that was generated) and ``seconds``.
    """
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    counted: dict[str, Any] = {"requests": [0], "ids": [_pending(managers)], "rss": [resident()]}
    begun = time.perf_counter()
    each, tokens = requests // parts, 0
    for part in range(parts):
        asked = prompts([16 + i % 48 for i in range(each)], seed=part)
        outputs = generate(engine, asked, [8] * each)
        tokens = zlib.crc32(repr([list(o.outputs[0].token_ids) for o in outputs]).encode(), tokens)
        counted["requests"].append((part + 1) * each)
        counted["ids"].append(_pending(managers))
        counted["rss"].append(resident())
    return {**counted, "tokens": tokens, "seconds": round(time.perf_counter() - begun, 2)}


def _pending(managers: Sequence[Any]) -> int:
    return sum(len(manager.new_block_ids) for manager in managers)


def resident() -> int:
    """Bytes of memory of this process that are resident.

    >>> resident() > 10**6
    True
    """
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
