# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""New KV blocks are zeroed in every layer, and nothing else is written."""

from types import SimpleNamespace

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import KVBlockZeroer

DEVICE = torch.device(current_platform.device_type or "cpu")


def _zeroer(num_blocks: int, *caches: torch.Tensor) -> KVBlockZeroer:
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16
    )
    layers = {
        f"layer{i}": SimpleNamespace(kv_cache=cache) for i, cache in enumerate(caches)
    }
    group = SimpleNamespace(
        kv_cache_spec=spec,
        kv_cache_group_id=0,
        layer_names=[*layers],
        kernel_block_stride=0,
    )
    return KVBlockZeroer(DEVICE, [group], [16], layers, num_blocks)


def _stale(*shape: int) -> torch.Tensor:
    return torch.full(shape, 255, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("page_bytes", [16, 4, 36, 4096, 5000])
def test_new_blocks_are_zeroed_in_pages_of_any_size(page_bytes):
    # Behind each page lie bytes of another layer.
    caches = [_stale(9, page_bytes + 12)[:, :page_bytes], _stale(9, 64)]
    _zeroer(9, *caches).zero_block_ids([8, 1, 4])
    for cache in caches:
        zeroed = [not row.any().item() for row in cache]
        assert zeroed == [row in (1, 4, 8) for row in range(9)]
    assert (caches[0]._base[:, page_bytes:] == 255).all()


def test_virtual_block_splitting():
    cache = _stale(12, 64)
    _zeroer(4, cache).zero_block_ids([2])
    assert [not row.any().item() for row in cache] == [6 <= i < 9 for i in range(12)]


def test_ids_that_name_no_block_write_nothing():
    memory = _stale(12, 64)
    _zeroer(8, memory[2:10]).zero_block_ids([-1, 0, 8, 9])
    assert (memory == 255).all()
