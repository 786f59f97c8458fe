"""Which KV blocks a step gives to requests, and how they are filled in every layer of attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from staleproof.vllm.sources import PatchError
from staleproof.vllm.watch_blocks import NULL

if TYPE_CHECKING:
    import torch

# Formats of a cache in which a byte 0xFF is NaN, or a part of one, whatever the width of a number.
WITH_NAN = (
    *("auto", "half", "float16", "bfloat16", "float", "float32"),
    *("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"),
)
# By a part of its name: groups of the cache whose blocks are not tokens of the request.
NOT_TOKENS = "Mamba", "CrossAttention", "EncoderOnly"


class Given(NamedTuple):
    """Block ids of each group that a plan gives to requests.

    Attributes:
        held: they hold a hit of the prefix cache, what a connector loads, or a copy: up to a request's
            computed tokens.
        fresh: they hold nothing of the request yet.
    """

    held: list[list[int]]
    fresh: list[list[int]]


def given(plan: Any, sizes: Sequence[int]) -> Given:
    """The block ids that a step gives to requests; the null block is none of them.

    Args:
        plan: vLLM's ``SchedulerOutput``.
        sizes: tokens of a block of each group.

    >>> from types import SimpleNamespace as Space
    >>> new = Space(block_ids=([3, 4, 5],), num_computed_tokens=17)
    >>> cached = Space(req_ids=["b"], new_block_ids=[([8],)], num_computed_tokens=[99], resumed_req_ids=set())
    >>> given(Space(scheduled_new_reqs=[new], scheduled_cached_reqs=cached), [16])
    Given(held=[[3, 4]], fresh=[[5, 8]])
    """
    found = Given([[] for _ in sizes], [[] for _ in sizes])

    def add(groups: Sequence[Sequence[int]], computed: int) -> None:
        for group, (ids, size) in enumerate(zip(groups, sizes, strict=False)):
            for at, block in enumerate(ids):
                if block != NULL:
                    (found.held if at * size < computed else found.fresh)[group].append(block)

    for one in plan.scheduled_new_reqs:
        add(one.block_ids, one.num_computed_tokens)
    cached = plan.scheduled_cached_reqs
    for at, groups in enumerate(cached.new_block_ids):
        if groups is not None:
            # One that resumes gets all its blocks again, and may hit those that it left in the prefix cache.
            resumed = cached.req_ids[at] in cached.resumed_req_ids
            add(groups, cached.num_computed_tokens[at] if resumed else 0)
    return found


def kinds(scheduler: Any) -> Sequence[Any]:
    """The managers of a scheduler's blocks, one a group."""
    found: Sequence[Any] = scheduler.kv_cache_manager.coordinator.single_type_managers
    return found


def has_tokens(spec: object) -> bool:
    """Whether the blocks of a group hold keys and values of a request's tokens, one after the other."""
    return not any(word in type(spec).__name__ for word in NOT_TOKENS)


def caches(runner: Any, keys: bool) -> Iterator[tuple[int, torch.Tensor]]:
    """Group and cache of each layer of attention, each memory once; the first axis counts blocks.

    Args:
        runner: vLLM's model runner, the first or the second.
        keys: only the half of a block that holds keys.

    Raises:
        PatchError: a cache is of a shape that is not known.
    """
    known: set[Any] = set()
    layers = runner.vllm_config.compilation_config.static_forward_context
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        if not has_tokens(group.kv_cache_spec):
            continue
        for name in group.layer_names:
            cache: Any = getattr(layers.get(name), "kv_cache", None)
            if hasattr(cache, "data_ptr") and (number, cache.data_ptr()) not in known:
                known.add((number, cache.data_ptr()))
                yield number, _by_block(cache, runner.kv_cache_config.num_blocks, keys)


def unknown_layout(runner: Any, keys: bool = False) -> str | None:
    """Why blocks of a runner's cache cannot be filled; ``None`` if they can."""
    try:
        list(caches(runner, keys))
    except PatchError as error:
        return str(error)
    return None


def _by_block(cache: torch.Tensor, blocks: int, keys: bool) -> torch.Tensor:
    """View a cache with its blocks first; a block may be several rows, if the kernel's blocks are smaller."""
    shape = tuple(cache.shape)
    axis = next((axis for axis in (0, 1) if shape[axis] and shape[axis] % blocks == 0), None)
    if axis is None or (keys and shape[1 - axis] != 2 and len(shape) != 4):
        raise PatchError(f"a KV cache of shape {shape} and {blocks} blocks is of no known layout")
    if not keys:
        return cache.movedim(axis, 0)
    if len(shape) == 5:
        return cache.select(1 - axis, 0)
    # vLLM's CPU kernel: (blocks, heads, tokens, 2 x size), where all keys of a head come before its values.
    return cache.view(shape[0], shape[1], 2 * shape[2], -1)[:, :, : shape[2]]


def fill(runner: Any, blocks: Sequence[Sequence[int]], value: float, keys: bool = False) -> None:
    """Fill blocks in each layer of their group, on the current stream.

    Args:
        runner: vLLM's model runner.
        blocks: ids of each group.
        value: NaN, or what each number of the block becomes, in the cache's format.
        keys: see :func:`caches`.
    """
    import torch

    rows: dict[int, torch.Tensor] = {}
    for group, cache in caches(runner, keys) if any(blocks) else ():
        if blocks[group]:
            if group not in rows:
                # A block of the manager is a whole number of the kernel's.
                ratio = len(cache) // runner.kv_cache_config.num_blocks
                ids = [block * ratio + part for block in blocks[group] for part in range(ratio)]
                # From pinned memory the host need not wait until the device has come so far.
                numbers = torch.tensor(ids, pin_memory=cache.is_cuda)
                rows[group] = numbers.to(cache.device, non_blocking=True)
            # By their bits, because index_fill_ takes no FP8.
            whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[cache.element_size()]
            bits = _bits(value, cache.dtype, runner.vllm_config.cache_config.cache_dtype)
            cache.view(whole).index_fill_(0, rows[group], bits)


def _bits(value: float, dtype: torch.dtype, cache_dtype: str) -> int:
    """The bits of a number in a cache, as the integer of its width; all ones are a NaN.

    >>> import torch
    >>> _bits(math.nan, torch.uint8, "fp8"), _bits(1.0, torch.uint8, "fp8")
    (255, 56)
    """
    import torch

    if math.isnan(value):
        return 255 if dtype.itemsize == 1 else -1
    if dtype == torch.uint8:
        dtype = torch.float8_e5m2 if cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return int(torch.tensor(value).to(dtype).view(whole).item())
