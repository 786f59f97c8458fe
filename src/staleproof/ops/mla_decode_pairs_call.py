"""The two launches of ``mla_decode_pairs.py`` and ``merge_parts.py``: memory, descriptor, grids."""

from __future__ import annotations

from typing import Any

import torch

from staleproof import device
from staleproof.ops.cuda_runtime import processor_count
from staleproof.ops.launching import Ready, empty, launched
from staleproof.ops.mla_decode_plan import cdiv, merge_tiles

device.load_triton()

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from staleproof.ops.merge_parts import merge_parts_kernel
from staleproof.ops.mla_decode_pairs import mla_decode_pairs_kernel

RANK, WIDTH = 512, 576
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Requests that the kernel's sum over lengths covers; there is one compiled kernel for each.
BATCHES = (128, 1024)


class _Address:
    """What a descriptor needs of a tensor, without keeping the tensor alive."""

    def __init__(self, x: torch.Tensor) -> None:
        self.dtype, self._address = x.dtype, x.data_ptr()

    def data_ptr(self) -> int:
        return self._address


class PairsCall:
    """A call with these layouts, launched for the first time when it is made; then it can be repeated.

    Args:
        q, kv_cache, block_table, seq_lens, softmax_scale, k_scale, out, lse: as in ``mla_decode``.
    """

    def __init__(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        softmax_scale: float,
        k_scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        batch, heads = q.shape[0], q.shape[-2]
        q_len = q.shape[1] if q.ndim == 4 else 1
        pages, page_size = kv_cache.shape[:2]
        page_rows = kv_cache.stride(0) // kv_cache.stride(1)
        # The cache as rows of one token. Pages may lie apart, e.g. with those of other layers between.
        self._shape = [(pages - 1) * page_rows + page_size, WIDTH]
        self._strides = [kv_cache.stride(1), 1]
        rows = q_len * heads
        groups = cdiv(rows, 64)
        parts = max(1, processor_count(q.device.index) // groups)
        # Of each program two parts of 64 rows, their lse, and of each request and group two integers.
        self._slots, self._cuts = 2 * groups * parts * 64, 2 * batch * groups
        numbers, part_lse, cuts = self._memory(out)
        tensors = (q, self._descriptor(kv_cache), block_table, seq_lens, out, lse, numbers, part_lse, cuts)
        strides = (q.stride(0), q.stride(1) if q.ndim == 4 else 0, q.stride(-2), page_rows)
        capacity = block_table.shape[1] * page_size
        sizes = (*strides, block_table.stride(0), softmax_scale, k_scale, capacity, q_len, heads, batch)
        most = next(n for n in BATCHES if batch <= n)
        grid = groups, parts, 1
        decode = launched(mla_decode_pairs_kernel, grid, tensors, (*sizes, page_size, most), num_warps=4)
        block, some, step = merge_tiles(batch)
        programs = groups * (RANK // block), 64 // some, batch
        of_merge = rows, RANK, block, some, step
        pointers = numbers, part_lse, cuts, out, lse
        merge = launched(merge_parts_kernel, programs, pointers, of_merge, num_warps=4, launch_pdl=True)
        self.launches: tuple[Ready | None, Ready | None] = decode, merge

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Launch it again on other tensors of the same layouts."""
        decode, merge = self.launches
        assert decode is not None
        assert merge is not None
        at = [x.data_ptr() for x in self._memory(out)]
        results = out.data_ptr(), lse.data_ptr()
        before = q.data_ptr(), self._descriptor(kv_cache), block_table.data_ptr(), seq_lens.data_ptr()
        decode(*before, *results, *at)
        merge(*at, *results)

    def _memory(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        numbers = self._slots * RANK
        memory = empty((numbers + self._slots + self._cuts,), torch.float32, out)
        cuts = memory[numbers + self._slots :].view(torch.int32)
        return memory[:numbers], memory[numbers : numbers + self._slots], cuts

    def _descriptor(self, kv_cache: torch.Tensor) -> Any:
        return TensorDescriptor(_Address(kv_cache), self._shape, self._strides, [64, 64], SHARED)
