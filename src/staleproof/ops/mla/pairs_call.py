"""The two launches of an MLA decode of equal parts: memory, descriptor, grids.

The first is that of ``few.py`` or ``pairs.py``, the second that of ``merge_parts.py``.
"""

from __future__ import annotations

from typing import Any

import torch

from staleproof import device
from staleproof.ops.cuda_runtime import processor_count
from staleproof.ops.launching import Ready, empty, launched
from staleproof.ops.mla.plan import FEW_HEADS, aligned_parts, cdiv, merge_tiles

device.load_triton()

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from staleproof.ops.mla.few import mla_decode_few_kernel
from staleproof.ops.mla.merge_parts import merge_parts_kernel
from staleproof.ops.mla.pairs import mla_decode_pairs_kernel

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
        # Rows of a program, and what a part of them takes; a program with few heads has one query token.
        few = heads <= FEW_HEADS
        kernel, own, room = (mla_decode_few_kernel, heads, 16) if few else (mla_decode_pairs_kernel, 64, 64)
        groups = cdiv(rows, own)
        parts = max(1, processor_count(q.device.index) // groups)
        # Of each program two parts, and their lse.
        self._slots = 2 * groups * parts * room
        memory = self._memory(out)
        numbers, part_lse = memory[: self._slots * RANK], memory[self._slots * RANK :]
        # The copy engine takes a cache as it is; an E4M3 cache is read as words of four numbers.
        self._converts = kv_cache.dtype != q.dtype
        columns = kv_cache.view(torch.int32) if self._converts else self._descriptor(kv_cache)
        tensors = (q, columns, block_table, seq_lens, out, lse, numbers, part_lse)
        row_words = kv_cache.stride(1) // 4 if self._converts else 0
        strides = (q.stride(0), q.stride(1) if q.ndim == 4 else 0, q.stride(-2), page_rows, row_words)
        capacity = block_table.shape[1] * page_size
        most, aligned = next(n for n in BATCHES if batch <= n), aligned_parts(parts, batch)
        shape = capacity, q_len, heads, batch, aligned
        sizes = (*strides, block_table.stride(0), softmax_scale, k_scale, *shape)
        grid = groups, parts, 1
        decode = launched(kernel, grid, tensors, (*sizes, page_size, most, self._converts), num_warps=4)
        block, some, step = merge_tiles(batch, parts)
        programs = groups * (RANK // block), cdiv(own, some), batch
        tiles = RANK, room, block, some, step, most
        of_merge = (rows, own, heads, capacity, q_len, batch, parts, aligned, *tiles)
        pointers = numbers, part_lse, seq_lens, out, lse
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
        memory = self._memory(out)
        parts = memory.data_ptr(), memory.data_ptr() + self._slots * RANK * 4
        lengths, results = seq_lens.data_ptr(), (out.data_ptr(), lse.data_ptr())
        columns = kv_cache.data_ptr() if self._converts else self._descriptor(kv_cache)
        decode(q.data_ptr(), columns, block_table.data_ptr(), lengths, *results, *parts)
        merge(*parts, lengths, *results)

    def _memory(self, out: torch.Tensor) -> torch.Tensor:
        """For each row of a part its numbers; behind them, for each its lse."""
        return empty((self._slots * (RANK + 1),), torch.float32, out)

    def _descriptor(self, kv_cache: torch.Tensor) -> Any:
        return TensorDescriptor(_Address(kv_cache), self._shape, self._strides, [64, 64], SHARED)
