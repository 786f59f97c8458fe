"""Zeroing of KV blocks in plain PyTorch: one fill per layer and block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def per_cache(value: int | Sequence[int], caches: int) -> list[int]:
    """One value per cache, given one for all or one each."""
    return [value] * caches if isinstance(value, int) else [*value]


def zero_blocks(
    kv_caches: Sequence[torch.Tensor],
    block_ids: Iterable[int],
    *,
    block_dim: int | Sequence[int] = 0,
    block_size_ratio: int | Sequence[int] = 1,
) -> None:
    """Zero the blocks in every cache, in place.

    Block b of the manager covers the blocks ``b * ratio`` to ``b * ratio + ratio - 1`` of a cache.

    Args:
        kv_caches: tensors of any layout, one or more a layer.
        block_ids: ids of the manager.
        block_dim: the axis of the blocks, for all caches or one each.
        block_size_ratio: blocks of a cache per block of the manager, for all caches or one each.

    >>> cache = torch.ones(3, 2)
    >>> zero_blocks([cache], [1])
    >>> cache.tolist()
    [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    """
    dims = per_cache(block_dim, len(kv_caches))
    ratios = per_cache(block_size_ratio, len(kv_caches))
    for block in block_ids:
        for cache, dim, ratio in zip(kv_caches, dims, ratios, strict=True):
            cache.narrow(dim, block * ratio, ratio).zero_()
