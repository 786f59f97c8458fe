"""A call of the Hopper kernels that divide requests: its launches, and how they are repeated."""

from __future__ import annotations

from typing import Any

import torch

from staleproof import device
from staleproof.ops.cuda_runtime import processor_count
from staleproof.ops.launching import MOST_CALLS, empty, launched
from staleproof.ops.mla.e4m3 import WORDS, mla_decode_e4m3_kernel
from staleproof.ops.mla.hopper import SHARED, mla_decode_few_kernel, mla_decode_pairs_kernel
from staleproof.ops.mla.merge import merge_parts_kernel
from staleproof.ops.mla.plan import (
    E4M3_ROWS,
    FEW_HEADS,
    Cut,
    aligned_parts,
    cdiv,
    merge_tiles,
    whole_programs,
)
from staleproof.ops.mla.queries import float16_queries_kernel

device.load_triton()

import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

RANK, TOKEN = 512, 576
# The most requests over which a kernel sums lengths; there is one compiled kernel for each number. One for at
# most 16 requests was no faster.
BATCHES = (128, 1024)


class _Address:
    """What a descriptor needs of a tensor, without keeping the tensor alive."""

    def __init__(self, x: torch.Tensor) -> None:
        self.dtype, self._address = x.dtype, x.data_ptr()

    def data_ptr(self) -> int:
        return self._address


class HopperCall:
    """A call with these layouts. The constructor launches it; then it can be repeated on other tensors.

    Args:
        call: a ``decode.Call``, the checked arguments.
        cut: the kernel, and how it cuts the keys.
    """

    def __init__(self, call: Any, cut: Cut) -> None:
        q, kv_cache, block_table, seq_lens, softmax_scale, k_scale, out, lse = call
        batch, heads, q_len = q.shape[0], q.shape[-2], call.q_len
        pages, page_size = kv_cache.shape[:2]
        page_rows = kv_cache.stride(0) // kv_cache.stride(1)
        rows = q_len * heads
        is_e4m3 = kv_cache.dtype != q.dtype
        # ``own`` is the rows of a program; below, ``room`` is the rows for which a part has memory.
        is_cut = cut.parts > 0 or cut.splits > 1
        is_packed, own = cut.kernel == "packed", cut.height(q_len, heads, is_e4m3)
        groups = cdiv(rows, own)
        programs = cut.parts or batch * cut.splits
        if not is_cut:
            programs = whole_programs(batch, groups, processor_count(q.device.index))
        kind: tuple[Any, ...] = (is_e4m3, is_packed)
        kernel, room = mla_decode_pairs_kernel, 64
        # An E4M3 cache is read as words of four numbers: by address where the loading group converts it.
        self._is_words = self._reads = is_e4m3
        if is_e4m3 and own <= E4M3_ROWS:
            room = 16 if own <= 16 else E4M3_ROWS
            kernel, kind, self._reads = mla_decode_e4m3_kernel, (room, is_packed), False
        elif heads <= FEW_HEADS and not is_packed:
            kernel, room, kind = mla_decode_few_kernel, 16, ()
        # Memory in 4-byte words: each program has two parts. A row of a part has an lse and RANK 2-byte
        # numbers. Then one word for each program: the request that it cut.
        slots = 2 * groups * programs * room
        sizes_of_parts = slots, slots * RANK // 2, groups * programs
        self._words, self._numbers_at = sum(sizes_of_parts), 4 * slots
        self._cuts_at = self._numbers_at + 2 * slots * RANK
        numbers, part_lse, cuts = out, lse, lse
        if is_cut:
            part_lse, numbers, cuts = self._memory(out).split(sizes_of_parts)
            numbers, cuts = numbers.view(out.dtype), cuts.view(torch.int32)
        # The cache as rows of one token. There may be gaps between pages, e.g. the pages of other layers.
        width = TOKEN // 4 if is_e4m3 else TOKEN
        row_width = kv_cache.stride(1) // 4 if is_e4m3 else kv_cache.stride(1)
        self._shape, self._strides = [(pages - 1) * page_rows + page_size, width], [row_width, 1]
        columns = kv_cache.view(torch.int32) if self._reads else self._descriptor(kv_cache)
        # The kernel's arguments for each cache, by its address; shape and strides are the same in all.
        self._maps: dict[int, tuple[Any, ...]] = {}
        strides = q.stride(0), q.stride(1) if q.ndim == 4 else 0, q.stride(-2)
        scales, self._prepare = lse, None
        if is_e4m3:
            queries = self._query_memory(q)
            scales = queries[q.numel() // 2 :]
            self._prepare = launched(
                float16_queries_kernel,
                (cdiv(batch * rows, 4),),
                (q, queries.view(torch.float16), scales),
                (*strides, batch * rows, q_len, heads, RANK, TOKEN - RANK, 4, not self._reads, False),
                num_warps=4,
            )
            q, strides = queries.view(torch.float16), (rows * TOKEN, heads * TOKEN, TOKEN)
        most = next(n for n in BATCHES if batch <= n) if cut.parts else int(programs < batch)
        aligned = aligned_parts(cut.parts, batch) if cut.parts else cut.splits
        shape = call.capacity, q_len, heads, batch, aligned
        words = (row_width,) if kernel is mla_decode_pairs_kernel else ()
        self._scaled = kernel is not mla_decode_few_kernel
        sizes = (*strides, page_rows, *words, block_table.stride(0), softmax_scale, k_scale, *shape)
        tensors = q, columns, block_table, seq_lens, out, lse, numbers, part_lse, cuts
        self._decode = launched(
            kernel,
            (groups, programs, 1),
            (*tensors, scales) if self._scaled else tensors,
            (*sizes, page_size, most, *kind),
            num_warps=4,
            launch_pdl=is_e4m3,
        )
        self._merge = None
        if is_cut:
            block, some, step, warps = merge_tiles(batch, programs)
            known = triton.next_power_of_2(programs) if cut.parts else 0
            of_rows = (k_scale, rows, own, heads, call.capacity, q_len, programs, aligned)
            self._merge = launched(
                merge_parts_kernel,
                (groups * (RANK // block), cdiv(own, some), min(batch, programs)),
                (numbers, part_lse, cuts, seq_lens, out, lse),
                (*of_rows, RANK, room, block, some, step, known, False),
                num_warps=warps,
                launch_pdl=True,
            )

    @property
    def is_ready(self) -> bool:
        """Whether it can be repeated."""
        return self._decode is not None

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
        assert self._decode is not None
        lengths, results = seq_lens.data_ptr(), (out.data_ptr(), lse.data_ptr())
        parts: tuple[int, ...] = (*results, results[1])
        if self._merge is not None:
            memory = self._memory(out)
            at = memory.data_ptr()
            parts = at + self._numbers_at, at, at + self._cuts_at
        address = kv_cache.data_ptr()
        columns = (address,) if self._reads else self._maps.get(address) or self._mapped(kv_cache)
        queries, scales = q.data_ptr(), results[1]
        if self._prepare is not None:
            prepared = self._query_memory(q)
            queries, scales = prepared.data_ptr(), prepared.data_ptr() + 2 * q.numel()
            self._prepare(q.data_ptr(), queries, scales)
        pointers = queries, *columns, block_table.data_ptr(), lengths, *results, *parts
        self._decode(*pointers, *((scales,) if self._scaled else ()))
        if self._merge is not None:
            self._merge(*parts, lengths, *results)

    def _mapped(self, kv_cache: torch.Tensor) -> tuple[Any, ...]:
        """The kernel's arguments for a cache that is new to this call; a server has one cache a layer."""
        assert self._decode is not None
        if len(self._maps) >= MOST_CALLS:
            self._maps.clear()
        columns = self._decode.described(self._descriptor(kv_cache))
        self._maps[kv_cache.data_ptr()] = columns
        return columns

    def _memory(self, out: torch.Tensor) -> torch.Tensor:
        """Memory for the parts of a call; ``__init__`` computes its sizes."""
        return empty((self._words,), torch.float32, out)

    def _query_memory(self, q: torch.Tensor) -> torch.Tensor:
        """Memory for queries with an E4M3 cache: their float16 numbers, then a scale for each row."""
        return empty((q.numel() // 2 + q.numel() // TOKEN,), torch.float32, q)

    def _descriptor(self, kv_cache: torch.Tensor) -> Any:
        box, layout = ([64, 16], WORDS.value) if self._is_words else ([64, 64], SHARED.value)
        cache = kv_cache.view(torch.int32) if self._is_words else kv_cache
        return TensorDescriptor(_Address(cache), self._shape, self._strides, box, layout)
