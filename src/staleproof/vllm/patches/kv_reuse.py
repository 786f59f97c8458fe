"""Patches for incident 4: vLLM's KV zeroing drains its list of ids, loses none, covers MLA and CPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from staleproof.vllm import single
from staleproof.vllm.arguments import Arguments, Keywords, argument, replaced
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence, PatchError, Sources, evidence, file_of

SCHEDULER = "vllm.v1.core.sched.scheduler"
MANAGER = "vllm.v1.core.single_type_kv_cache_manager"
WORKER = "vllm.v1.worker.utils"
RUNNER = "vllm.v1.worker.gpu_model_runner"
CPU_RUNNER = "vllm.v1.worker.cpu_model_runner"
META = (
    "self",
    "attn_groups_iter",
    "kernel_block_sizes",
    "cache_dtype",
    "runner_only_attn_layers",
    "static_forward_context",
)


class _Unread(list[int]):
    """A list of new block ids that nobody reads: it stays empty."""

    def append(self, block_id: int) -> None:
        """Keep nothing."""

    def extend(self, block_ids: Iterable[int]) -> None:
        """Keep nothing, and do not run the generator that vLLM passes."""


def _drain(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Empty the list of new block ids, and keep it empty. With zeroing on, ``schedule`` empties it itself."""
    scheduler = args[0]
    if not scheduler.needs_kv_cache_zeroing:
        manager = scheduler.kv_cache_manager
        # By the manager, because a scheduler may get another one.
        if getattr(manager, "_staleproof_drained", None) is not True:
            manager.take_new_block_ids()
            for of_type in manager.coordinator.single_type_managers:
                of_type.new_block_ids = _Unread()
            manager._staleproof_drained = True
    return result


def _zero_through_ring(args: Arguments, kwargs: Keywords) -> Any:
    """Zero the same bytes as vLLM's zeroer, by our kernel, which reads the ids from a ring of slots.

    ``NotImplemented`` where ours cannot: before there is a table of segments, on a CPU, for ids that
    our kernel skips, in a capture. Then vLLM's function runs, with :func:`_fresh_staging`.
    """
    zeroer = args[0]
    block_ids, meta = argument(args, kwargs, 1, "block_ids"), zeroer._meta
    if not block_ids or meta is None or zeroer.device.type != "cuda":
        return NotImplemented
    try:
        known, ours = zeroer.__dict__.get("_staleproof_segments", (None, None))
        # vLLM makes another table when it allocates the caches again.
        if known is not meta:
            from staleproof.ops.zero_segments import SegmentZeroer

            addresses, words, *_ = meta
            ours = SegmentZeroer(addresses.tolist(), words * 4, addresses.device)
            zeroer._staleproof_segments = meta, ours
        return ours.zero(block_ids)
    except ValueError:
        return NotImplemented


def _fresh_staging(args: Arguments, kwargs: Keywords) -> None:
    """Give this call a pinned buffer of its own, so that it cannot overwrite ids of an earlier step.

    torch reuses the earlier buffer only after the copies from it have finished.
    """
    import torch

    zeroer = args[0]
    pinned = zeroer._ids_pinned
    if pinned is not None:
        zeroer._ids_pinned = torch.empty_like(pinned, pin_memory=zeroer.pin_memory)


def _is_mla(spec: object) -> bool:
    # Compared by name, because importing the class would import vLLM.
    return type(spec).__name__ == "MLAAttentionSpec"


def _allow_recording(args: Arguments, kwargs: Keywords) -> None:
    """Tell the managers of a scheduler whether its ``schedule`` takes the ids that they record.

    Without a call of vLLM's ``schedule`` nothing is recorded: whoever schedules in its place might
    not take them, and the list would grow with each block. Only a manager that records gets the hooks:
    vLLM allocates once a request and step.
    """
    scheduler = args[0]
    manager, takes = scheduler.kv_cache_manager, scheduler.needs_kv_cache_zeroing
    # By the manager, because a scheduler may get another one.
    if getattr(manager, "_staleproof_takes", None) is takes:
        return
    for of_type in manager.coordinator.single_type_managers:
        of_type._staleproof_record = takes
        if _is_recorded(of_type):
            single.hook("mla_recording", of_type)
    manager._staleproof_takes = takes


def _is_recorded(manager: Any) -> bool:
    return getattr(manager, "_staleproof_record", False) and _is_mla(manager.kv_cache_spec)


def _record_new(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    manager = args[0]
    if _is_recorded(manager):
        manager.new_block_ids.extend(block.block_id for block in result)
    return result


def _record_external(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Record the blocks after the prefix hits; they are new, for tokens from a KV connector."""
    manager = args[0]
    if _is_recorded(manager) and argument(args, kwargs, 4, EXTERNAL[4]) > 0:
        request = argument(args, kwargs, 1, EXTERNAL[1])
        blocks = manager.req_to_blocks[request][manager.num_cached_block[request] :]
        manager.new_block_ids.extend(block.block_id for block in blocks)
    return result


EXTERNAL = (
    "self",
    "request_id",
    "new_computed_blocks",
    "num_local_computed_tokens",
    "num_external_computed_tokens",
)


def _keep_groups(args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    """Pass the groups on as a list. vLLM passes an iterator, and ``_add_zeroer`` reads it again."""
    groups = list(argument(args, kwargs, 1, META[1]))
    args[0]._staleproof_groups = groups
    return replaced(args, kwargs, 1, META[1], groups)


def _add_zeroer(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Build our zeroer for the MLA layers, which vLLM's zeroer leaves out."""
    from staleproof.ops.zero_blocks import BlockZeroer

    _, _, sizes, _, skipped, layers = (argument(args, kwargs, i, META[i]) for i in range(6))
    caches, ratios = [], []
    for group in args[0].__dict__.pop("_staleproof_groups"):
        if not _is_mla(group.kv_cache_spec) or group.kv_cache_group_id >= len(sizes):
            continue
        ratio = group.kv_cache_spec.block_size // sizes[group.kv_cache_group_id]
        for name in group.layer_names:
            if name in skipped:
                continue
            cache = layers[name].kv_cache
            # Up to 0.18.1 it is a list with one cache a pipeline stage.
            caches.append(cache[0] if isinstance(cache, list | tuple) else cache)
            ratios.append(ratio)
    if caches:
        args[0]._staleproof_zeroer = BlockZeroer(caches, block_dim=0, block_size_ratio=ratios)
    return result


def _zero_mla(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    zeroer = getattr(args[0], "_staleproof_zeroer", None)
    block_ids = argument(args, kwargs, 1, "block_ids")
    if zeroer is not None and block_ids:
        zeroer.zero([*dict.fromkeys(block_ids)])
    return result


@contextmanager
def _dummy(runner: Any) -> Iterator[None]:
    runner._staleproof_dummy = True
    try:
        yield
    finally:
        runner._staleproof_dummy = False


def _dummy_run(args: Arguments, kwargs: Keywords) -> Any:
    return _dummy(args[0])


def _no_slots(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Set all slots of a dummy run to -1, so that the cache kernels write nothing."""
    by_group = result[0]
    if getattr(args[0], "_staleproof_dummy", False) and by_group is not None:
        for slots in by_group.values():
            # These are a slice of a buffer. A captured graph reads the padded size, so fill all of it.
            (slots if slots._base is None else slots._base).fill_(-1)
    return result


def _zero_on_cpu(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Zero the new blocks in each layer of full attention, as vLLM's CPU runner does from 0.25.0 on.

    The index of a block is the first dimension of a cache from 0.23.0 on, and the second one before.
    """
    runner, block_ids = args[0], argument(args, kwargs, 1, "block_ids")
    layers, sizes, zeroed = (
        runner.compilation_config.static_forward_context,
        runner._kernel_block_sizes,
        set(),
    )
    for group in runner._kv_cache_spec_attn_group_iterator():
        spec = group.kv_cache_spec
        # MLA's class derives from it. By name, because importing the class would import vLLM.
        full = any(base.__name__ == "FullAttentionSpec" for base in type(spec).__mro__)
        if not full or group.kv_cache_group_id >= len(sizes):
            continue
        size = sizes[group.kv_cache_group_id]
        dim = group.backend.get_kv_cache_block_dim(
            size, spec.num_kv_heads, spec.head_size, cache_dtype_str=runner.cache_config.cache_dtype
        )
        for name in group.layer_names:
            cache: Any = getattr(layers.get(name), "kv_cache", None)
            # Layers may share a cache. One that has none yet keeps a list.
            if hasattr(cache, "data_ptr") and cache.data_ptr() not in zeroed:
                zeroed.add(cache.data_ptr())
                ratio = spec.block_size // size
                for block in block_ids:
                    cache.narrow(dim, block * ratio, ratio).zero_()
    return result


def _undrained(sources: Sources) -> Evidence:
    schedule, drains = (
        sources.function(file_of(SCHEDULER), "Scheduler.schedule"),
        "if self.needs_kv_cache_zeroing",
    )
    defect = "take_new_block_ids" in schedule.text and drains in schedule.text
    return evidence(
        schedule, defect, drains, "drains the ids only where blocks are zeroed", "drains the ids always"
    )


def _no_zeroer(sources: Sources) -> Evidence | None:
    if "class KVBlockZeroer" in sources.text(file_of(WORKER)):
        return None
    return Evidence(False, f"{file_of(WORKER)} has no KVBlockZeroer")


def _race(sources: Sources) -> Evidence:
    if (none := _no_zeroer(sources)) is not None:
        return none
    zero, copied = (
        sources.function(file_of(WORKER), "KVBlockZeroer.zero_block_ids"),
        "self._ids_pinned[:n_blocks]",
    )
    defect = copied in zero.text and "non_blocking=True" in zero.text
    return evidence(
        zero, defect, copied, "copies every step from one pinned buffer", "has no pinned buffer of all steps"
    )


def _unrecorded(sources: Sources) -> Evidence:
    allocate = sources.function(file_of(MANAGER), "SingleTypeKVCacheManager.allocate_new_blocks")
    full = "FullAttentionSpec"
    defect = full in allocate.text and "MLAAttentionSpec" not in allocate.text
    return evidence(allocate, defect, full, "records no blocks of MLA groups", "records blocks of MLA groups")


def _uncovered(sources: Sources) -> Evidence:
    if (none := _no_zeroer(sources)) is not None:
        return none
    try:
        meta = sources.function(file_of(WORKER), "KVBlockZeroer.init_meta")
    except PatchError:
        meta = sources.function(file_of(WORKER), "KVBlockZeroer.__init__")
    skips = "type(spec) is not FullAttentionSpec"
    return evidence(meta, skips in meta.text, skips, "leaves MLA groups out", "covers MLA groups")


def _cpu_keeps_blocks(sources: Sources) -> Evidence:
    path, name = file_of(CPU_RUNNER), "CPUModelRunner._zero_block_ids"
    if "def _zero_block_ids" not in sources.text(path):
        return Evidence(False, f"{path} has no {name}")
    found = sources.function(path, name)
    return evidence(found, "zero_()" not in found.text, "pass", "zeroes no block", "zeroes new blocks")


def _dummy_writes(sources: Sources) -> Evidence:
    run = sources.function(file_of(RUNNER), "GPUModelRunner._dummy_run")
    bad, good = "writes to slots of an earlier step, or to block 0", "fills the slots with -1"
    return evidence(run, "fill_(-1)" not in run.text, "def ", bad, good)


PATCHES = (
    Patch(
        name="undrained_ids",
        incident="kv_reuse",
        on_host=True,
        summary="drains the list of new block ids if nothing zeroes blocks",
        models="every model without Mamba layers",
        versions=(("0.17.1", "0.25.1"),),
        targets=(Target(SCHEDULER, "Scheduler.schedule", ("self",), after=_drain, vital=True),),
        probe=_undrained,
        mechanism=(
            "The id of each allocated block goes to a list of blocks to zero. Only models with "
            "Mamba layers read the list; otherwise it grows by one int a block until the end."
        ),
        threads=("vLLM #44175", "vLLM #44490"),
        cost="no launch; on the host one attribute a step, and less work an allocation",
    ),
    Patch(
        name="staging_race",
        incident="kv_reuse",
        on_host=True,
        summary="zeroes the same blocks from ids that no later step overwrites",
        models="models with Mamba layers",
        versions=(("0.17.1", "0.25.1"),),
        targets=(
            Target(
                WORKER,
                "KVBlockZeroer.zero_block_ids",
                ("self", "block_ids"),
                instead=_zero_through_ring,
                before=_fresh_staging,
            ),
        ),
        probe=_race,
        mechanism=(
            "Block ids go to the device by an asynchronous copy from one pinned buffer. With "
            "asynchronous scheduling the next step overwrites it before the copy has run: blocks "
            "of live requests are zeroed, and the new ones keep their last tenant's bytes. With the patch "
            "staleproof's kernel zeroes the same bytes, and reads the ids from a ring of slots."
        ),
        threads=("vLLM #48085", "vLLM #48399"),
        cost="our kernel and copy in place of vLLM's in a step that zeroes blocks",
        triton=True,
    ),
    Patch(
        name="mla_recording",
        incident="kv_reuse",
        on_host=True,
        summary="records new blocks of MLA groups, so that they are zeroed",
        models="models with Mamba and MLA layers",
        versions=(("0.17.1", "0.22.1"),),
        targets=(
            Target(SCHEDULER, "Scheduler.schedule", ("self",), before=_allow_recording, vital=True),
            Target(
                MANAGER,
                "SingleTypeKVCacheManager.allocate_new_blocks",
                ("self",),
                after=_record_new,
                vital=True,
                single=True,
            ),
            Target(
                MANAGER,
                "SingleTypeKVCacheManager.allocate_new_computed_blocks",
                EXTERNAL,
                after=_record_external,
                vital=True,
                single=True,
            ),
        ),
        probe=_unrecorded,
        mechanism=(
            "In a model of Mamba and MLA layers (Kimi Linear) the blocks of both are the same "
            "memory. Only blocks of plain full attention are recorded and zeroed, so MLA reads "
            "Mamba state as keys. The mask multiplies a NaN in it by 0, which is NaN."
        ),
        threads=("vLLM #43961", "vLLM #35219"),
        cost="no launch; on the host one list an allocation in such models, nothing an allocation in others",
        requires=("undrained_ids",),
    ),
    Patch(
        name="mla_zeroing",
        incident="kv_reuse",
        on_host=True,
        summary="zeroes the new blocks of MLA groups, which vLLM's zeroer leaves out",
        models="models with Mamba and MLA layers",
        versions=(("0.17.1", "0.19.1"),),
        targets=(
            Target(
                WORKER, "KVBlockZeroer.init_meta", META, before=_keep_groups, after=_add_zeroer, vital=True
            ),
            Target(
                WORKER, "KVBlockZeroer.zero_block_ids", ("self", "block_ids"), after=_zero_mla, vital=True
            ),
        ),
        probe=_uncovered,
        mechanism=(
            "vLLM's zeroer covers layers of plain full attention only. With the patch "
            "staleproof.BlockZeroer zeroes the same blocks in the MLA layers."
        ),
        threads=("vLLM #43961", "vLLM #35219"),
        cost="one launch in a step that allocates blocks: 1.7 us for one of 28 layers on an H200",
        triton=True,
        requires=("mla_recording",),
    ),
    Patch(
        name="cpu_block_zeroing",
        incident="kv_reuse",
        on_host=True,
        summary="zeroes new blocks on a CPU, where vLLM's body is pass",
        models="models with Mamba layers, served on a CPU",
        versions=(("0.19.0", "0.24.0"),),
        targets=(
            Target(
                CPU_RUNNER,
                "CPUModelRunner._zero_block_ids",
                ("self", "block_ids"),
                after=_zero_on_cpu,
                vital=True,
            ),
        ),
        probe=_cpu_keeps_blocks,
        mechanism=(
            "vLLM zeroes new blocks in models with Mamba layers, whose blocks held recurrent state before. "
            "On a CPU the function is empty: its comment says that -inf at invalid positions hides stale "
            "data. It hides keys. The kernel multiplies a NaN among the values by 0, and each element of the "
            "output is NaN. With the patch the blocks are zeroed as vLLM does from 0.25.0 on."
        ),
        threads=("vLLM #46347",),
        cost="on the host one memset a block and layer, in a step that allocates blocks",
    ),
    Patch(
        name="dummy_slots",
        # Its garbage goes into the null block, one of the real causes of that incident.
        incident="scale_padding",
        on_host=True,
        summary="dummy runs write no KV",
        models="data-parallel serving",
        versions=(("0.17.0", "0.19.1"),),
        targets=(
            Target(
                RUNNER, "GPUModelRunner._dummy_run", ("self", "num_tokens"), around=_dummy_run, vital=True
            ),
            Target(RUNNER, "GPUModelRunner._get_slot_mappings", ("self",), after=_no_slots, vital=True),
        ),
        probe=_dummy_writes,
        mechanism=(
            "An idle data-parallel rank runs dummy batches. Their slot mapping is left over from "
            "an earlier step, or zero, so that dummy keys are written to the KV cache, mostly to "
            "block 0, which every unused entry of a block table points to."
        ),
        threads=("vLLM #39444", "vLLM #44211"),
        cost="one fill of the slot mapping a dummy run; none in a real step",
    ),
)
