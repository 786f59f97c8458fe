"""``STALEPROOF_POISON``: a canary replica fills each KV block with NaN before its owner writes it.

A block holds its last owner's numbers until they are overwritten. Who reads them gets a plausible answer; who
reads NaN gets NaN logits. So a rare fault becomes a certain one, on one replica, for an hour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from staleproof.vllm import kv_memory
from staleproof.vllm.arguments import Arguments, Keywords, argument
from staleproof.vllm.hooks import Target, out_of_service, warn_once
from staleproof.vllm.patch import Patch
from staleproof.vllm.patches.kv_reuse import MANAGER
from staleproof.vllm.patches.published_unwritten import SCHEDULER
from staleproof.vllm.patches.uniform_decode import RUNNER
from staleproof.vllm.patches.uniform_decode import SECOND_RUNNER as RUNNER_V2
from staleproof.vllm.sources import Evidence, PatchError, Sources, file_of
from staleproof.vllm.standing import registry

NAME, VARIABLE, VALUE = "poison", "STALEPROOF_POISON", "STALEPROOF_POISON_VALUE"
KV, KEYS, OVER_ZEROING = "kv", "keys", "over-zeroing"
PLAN = "self", "scheduler_output"
# The functions of the two model runners that take in a step's blocks and zero what vLLM zeroes.
UPDATE, UPDATE_V2 = "GPUModelRunner._update_states", "GPUModelRunner.update_requests"
INIT, ALLOCATED = "GPUModelRunner.initialize_kv_cache", ("self", "kv_cache_config")
ALLOCATE = "SingleTypeKVCacheManager.allocate_new_blocks"
# Kept on the pool while a step is planned, group -> ids of new blocks; then on the plan, ids of each group.
NEW = "_staleproof_new"


@dataclass
class Settings:
    """What is filled, and with what.

    Attributes:
        keys: keys alone. For a kernel that multiplies values behind a request's end by 0, which leaves a NaN.
        over_zeroing: also the blocks that vLLM zeroes in the same step.
        value: NaN, or another number.
        blocks: how many were filled.
    """

    keys: bool = False
    over_zeroing: bool = False
    value: float = math.nan
    blocks: int = 0


settings = Settings()


def enabled(environment: Mapping[str, str]) -> bool:
    """Read the settings; whether blocks are to be filled.

    Raises:
        PatchError: a value that is not known.

    >>> enabled({}), enabled({"STALEPROOF_POISON": "kv,over-zeroing"}), settings.over_zeroing
    (False, True, True)
    """
    words = {word.strip() for word in environment.get(VARIABLE, "").split(",") if word.strip()}
    if not words:
        return False
    if not words <= {KV, KEYS, OVER_ZEROING} or len(words - {OVER_ZEROING}) != 1:
        got = environment[VARIABLE]
        raise PatchError(f"{VARIABLE}: expected {KV} or {KEYS}, and perhaps ,{OVER_ZEROING}, got {got!r}")
    try:
        value = float(environment.get(VALUE, "nan"))
    except ValueError:
        raise PatchError(f"{VALUE}: expected a number or nan, got {environment[VALUE]!r}") from None
    settings.keys, settings.over_zeroing, settings.value = KEYS in words, OVER_ZEROING in words, value
    registry.of(NAME).counters["poisoned_blocks"] = lambda: settings.blocks
    return True


# --- In the scheduler.


def _clear(args: Arguments, kwargs: Keywords) -> None:
    """Before ``schedule``: what an earlier one recorded while the patch went out of service is history."""
    args[0].kv_cache_manager.block_pool.__dict__.pop(NEW, None)


def _record(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """After blocks were allocated that are no hit, and that no connector fills.

    Here, and not from the plan alone: a request that is taken out of it leaves blocks that nobody writes, and
    that the prefix cache may offer (incident 7).
    """
    manager = args[0]
    if result and kv_memory.has_tokens(manager.kv_cache_spec):
        new = manager.block_pool.__dict__.setdefault(NEW, {})
        new.setdefault(manager.kv_cache_group_id, set()).update(block.block_id for block in result)
    return result


def _plan(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """After ``schedule``: the blocks to fill travel with the plan."""
    scheduler = args[0]
    new = scheduler.kv_cache_manager.block_pool.__dict__.pop(NEW, None)
    if new:
        given = kv_memory.given(result, [kind.block_size for kind in kv_memory.kinds(scheduler)])
        found = []
        for group, (held, fresh) in enumerate(zip(*given, strict=True)):
            ids = new.get(group, set()).difference(held)
            # A block that its request left at once may be given to another, for a load, in the same plan.
            found.append(sorted(ids if scheduler.connector is None else ids.intersection(fresh)))
        setattr(result, NEW, found)
    return result


# --- In the worker.


def _begin(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """After the cache was allocated: say what is filled, or why nothing is."""
    runner = args[0]
    dtype, device = runner.vllm_config.cache_config.cache_dtype, runner.device.type
    settings.keys |= device == "cpu"
    refused = kv_memory.unknown_layout(runner, settings.keys)
    if dtype not in kv_memory.WITH_NAN or (_has_fnuz() and dtype.startswith("fp8")):
        refused = f"a KV cache of {dtype} has no NaN that we know of"
    elif dtype == "fp8_ds_mla" and not math.isnan(settings.value):
        refused = f"{VALUE}={settings.value}: a KV cache of {dtype} mixes formats; only nan fits all"
    if refused is not None:
        out_of_service(registry.step_back(NAME, refused))
        return result
    what = "keys of new KV blocks" if settings.keys else "new KV blocks"
    why = " (the CPU kernel multiplies values behind a request's end by 0)" if device == "cpu" else ""
    warn_once(f"THIS IS A CANARY: {what}{why} are filled with {settings.value}; do not leave it on")
    return result


def _has_fnuz() -> bool:
    import torch

    return torch.version.hip is not None


def _fill(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """After a step's blocks were taken in, and those zeroed that vLLM zeroes; before anything is written."""
    runner, plan = args[0], argument(args, kwargs, 1, PLAN[1])
    if blocks := getattr(plan, NEW, None):
        zeroed = {*(getattr(plan, "new_block_ids_to_zero", None) or ())}
        if zeroed and not settings.over_zeroing:
            blocks = [[block for block in ids if block not in zeroed] for ids in blocks]
        kv_memory.fill(runner, blocks, settings.value, settings.keys)
        settings.blocks += sum(map(len, blocks))
    return result


def _keeps_bytes(sources: Sources) -> Evidence:
    update = sources.function(file_of(RUNNER), UPDATE)
    if "poison" in update.text:
        return Evidence(False, f"{update.at('poison')} fills new blocks itself")
    return Evidence(True, f"{update.place} leaves in a new block what its last owner wrote")


PATCH = Patch(
    name=NAME,
    incident="canary",
    on_host=True,
    summary=f"fills new KV blocks with NaN before they are written ({VARIABLE}=kv)",
    versions=(("0.20.0", "0.33.0"),),
    targets=(
        Target(MANAGER, ALLOCATE, ("self",), after=_record, vital=True),
        Target(SCHEDULER, "Scheduler.schedule", ("self",), before=_clear, after=_plan, vital=True),
        Target(RUNNER, INIT, ALLOCATED, after=_begin, vital=True),
        Target(RUNNER, UPDATE, PLAN, after=_fill, vital=True),
        Target(RUNNER_V2, INIT, ALLOCATED, after=_begin, vital=True),
        Target(RUNNER_V2, UPDATE_V2, PLAN, after=_fill, vital=True),
    ),
    probe=_keeps_bytes,
    mechanism=(
        "For one canary replica. Blocks that a step gives to a request without a hit are filled with NaN, on "
        "the step's stream, before the step writes them; not those of a hit, of a request that runs, or "
        "of a load by a connector, nor those that vLLM zeroes, unless over-zeroing is named. A request "
        "that reads what nobody wrote has NaN logits from then on. STALEPROOF_POISON=keys fills keys alone, "
        "for a kernel that multiplies values behind a request's end by 0, as on a CPU."
    ),
    threads=("vLLM #57716",),
    cost=(
        "one launch a layer in a step that allocates blocks; on an H200 0.07 to 0.3 ms of a step of 6 ms (64 "
        "requests), and 0.3 to 1.6 ms of 11 to 13 ms (256 requests), where the step waits for the host"
    ),
)
