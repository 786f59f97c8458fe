"""Patch for incident 7: a preempted request takes back the hashes of blocks that no step writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from staleproof.vllm.arguments import Arguments, Keywords, argument
from staleproof.vllm.hooks import Target, out_of_service
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence, Sources, file_of
from staleproof.vllm.standing import registry

SCHEDULER = "vllm.v1.core.sched.scheduler"
MANAGER = "vllm.v1.core.kv_cache_manager"
PREEMPT = "Scheduler._preempt_request"
NAME = "unpublish"


def unknown(scheduler: Any) -> str | None:
    """Why a scheduler is left alone, by the patch and by the watch, or ``None`` if it is of a kind we know.

    >>> class Theirs:
    ...     __module__ = "another.package"
    >>> unknown(Theirs())
    "the scheduler is another.package.Theirs, not vLLM's own"
    """
    kind = type(scheduler)
    if not kind.__module__.startswith("vllm.v1.core.sched."):
        return f"the scheduler is {kind.__module__}.{kind.__qualname__}, not vLLM's own"
    if len(scheduler.kv_cache_manager.block_pool.blocks) < 2:
        return "the pool has no block besides the null block"
    return None


def unknown_hash(blocks: Iterable[Any]) -> str | None:
    """Why blocks of a pool are left alone: vLLM's hashes are bytes, whatever function made them."""
    others = {type(b.block_hash).__name__ for b in blocks if not isinstance(b.block_hash, bytes | None)}
    return f"hashes of blocks are {', '.join(sorted(others))}, not bytes" if others else None


def _take_back(args: Arguments, kwargs: Keywords) -> None:
    """Before a request is preempted: take its hashes past what was computed out of the prefix cache.

    ``num_computed_tokens`` counts the steps in flight, and not the one that is being planned: vLLM adds
    that when the plan is done, for the requests that are still in it. Preemption resets it afterwards.
    """
    scheduler, request = args[0], argument(args, kwargs, 1, "request")
    why = unknown(scheduler)
    if why is None:
        # A connector may hold on to blocks by their hash; what it has been told is not ours to take back.
        with_connector = "a KV connector is configured" if scheduler.connector is not None else None
        why = with_connector or unknown_hash(_behind(scheduler.kv_cache_manager, request))
    if why is not None:
        out_of_service(registry.step_back(NAME, f"{why}, vLLM's own code runs"))
        return
    manager = scheduler.kv_cache_manager
    unwritten = _unwritten(manager, request)
    if unwritten:
        manager.evict_blocks(unwritten)


def _behind(manager: Any, request: Any) -> list[Any]:
    """Blocks of a request past the tokens that it has computed."""
    found = []
    for of_type in manager.coordinator.single_type_managers:
        blocks = of_type.req_to_blocks.get(request.request_id, ())
        found += blocks[request.num_computed_tokens // of_type.block_size :]
    return found


def _unwritten(manager: Any, request: Any) -> set[int]:
    """Blocks of a request that have a hash and that no step before this one writes to the end."""
    behind = _behind(manager, request)
    return {b.block_id for b in behind if b.block_hash is not None}


def _left_published(sources: Sources) -> Evidence:
    preempt = sources.function(file_of(SCHEDULER), PREEMPT)
    allocate = sources.function(file_of(MANAGER), "KVCacheManager.allocate_slots")
    publishes, takes = "coordinator.cache_blocks(", ("evict_blocks", "rollback", "uncache")
    if publishes not in allocate.text:
        return Evidence(False, f"{allocate.place} publishes no hash while a step is planned")
    if any(word in preempt.text for word in takes):
        return Evidence(False, f"{preempt.place} takes the hashes of unwritten blocks back")
    why = f"{allocate.at(publishes)} publishes hashes when a step is planned"
    return Evidence(True, f"{why}, and {preempt.at('free')} leaves them if the plan drops the request")


PATCHES = (
    Patch(
        name=NAME,
        incident="published_unwritten",
        on_host=True,
        summary="takes the hashes of blocks that no step writes out of the prefix cache",
        models="every model, with prefix caching and --scheduling-policy priority",
        versions=(("0.16.0", "0.33.0"),),
        targets=(Target(SCHEDULER, PREEMPT, ("self", "request"), before=_take_back, vital=True),),
        probe=_left_published,
        mechanism=(
            "Hashes of blocks are published when a step is planned. Priority preemption can take the "
            "request out of the same plan: its blocks are freed, never written, and found by their "
            "hashes. The request itself and any other with its prefix then read another request's KV. "
            "With the patch the hashes of blocks past the computed tokens are taken back first. With "
            "a KV connector it steps back."
        ),
        threads=("vLLM #43569", "vLLM #57580", "vLLM #56525"),
        cost="nothing in a step that preempts nobody; one look at its blocks a preempted request",
    ),
)
