# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Zeroes KV cache blocks in all segments of memory, in one launch."""

import torch

from vllm.triton_utils import tl, triton

# Bytes that one program zeroes of each of its pages.
CHUNK = 4096
WARPS = 2
# The most programs along the second and third axis of a CUDA grid.
MOST = 65535


@triton.jit
def _zero_page(
    table, row, block, there, num_blocks, chunk, word, byte,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Zero the CHUNK bytes number ``chunk`` of each page (table row, block)."""
    row = table + row.to(tl.int64) * 4
    start = tl.load(row, mask=there, other=0) + block * tl.load(row + 1, mask=there, other=0)
    length = tl.load(row + 2, mask=there, other=0)
    length = tl.where((block > 0) & (block < num_blocks), length, 0)

    # Bytes [skip, end) are zeroed, counted from the last multiple of 16 at or before ``start``.
    base = start // 16 * 16
    skip = 0 if ALIGNED else start - base
    end = skip + length
    words = (base + chunk * CHUNK).to(tl.pointer_type(tl.int32))
    if PAGES == 1:
        words = tl.multiple_of(words, 16)
    # Computed as multiples of 4 words, so that the compiler knows that the mask splits no 16-byte store.
    left = end // 16 * 4 - chunk * (CHUNK // 4)
    mask = word < tl.where(left < CHUNK // 4, left, CHUNK // 4).to(tl.int32)
    if not ALIGNED:
        mask &= word >= tl.where((chunk == 0) & (skip > 0), 4, 0)
    # Streaming stores, because nobody reads the zeros soon.
    tl.store(words + word, 0, mask=mask, cache_modifier=".cs")
    if not ALIGNED:
        stop = tl.where((skip > 0) & (chunk == 0), end, 0)
        head = base.to(tl.pointer_type(tl.int8)) + byte
        tl.store(head, 0, mask=(byte >= skip) & (byte < stop))
        at = end // 16 * 16
        stop = tl.where(((at > 0) | (skip == 0)) & (chunk == at // CHUNK), end - at, 0)
        tail = (base + at).to(tl.pointer_type(tl.int8)) + byte
        tl.store(tail, 0, mask=byte < stop)


# No specialisation on the numbers: one compiled kernel serves every list of ids.
@triton.jit(do_not_specialize=["count", "rows", "num_blocks"], do_not_specialize_on_alignment=["ids"])
def _zero_kernel(
    table, ids, count, rows, num_blocks,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """Each program zeroes CHUNK bytes of PAGES (table row, block) pairs.

    Programs start along axis 0, then 1, then 2, so that the addresses written ascend.
    """
    chunk = tl.program_id(0).to(tl.int64)
    word, byte = tl.arange(0, CHUNK // 4), tl.arange(0, 16)
    if PAGES == 1:
        i, row = tl.program_id(1), tl.program_id(2)
    else:
        page = tl.program_id(1) * PAGES + tl.arange(0, PAGES)[:, None]
        row = page // count
        i = page - row * count
        word, byte = word[None, :], byte[None, :]
    there = row < rows
    block = tl.load(ids + i, mask=there, other=0).to(tl.int64)
    _zero_page(table, row, block, there, num_blocks, chunk, word, byte, ALIGNED, CHUNK, PAGES)


def zero_kv_blocks(
    segments: torch.Tensor, block_ids: torch.Tensor, num_blocks: int, longest: int, aligned: bool
) -> None:
    """Zeroes the bytes of these blocks. Ids that name no block, or the null block 0, are skipped.

    Args:
        segments: [num_segments, 4] int64: address of block 0, bytes from a block to the next, bytes of a
            block, 0. A row of 32 bytes is read in one access.
        block_ids: [n] int32 or int64.
        num_blocks: ids from here on name no block.
        longest: the most bytes of a block in a segment.
        aligned: whether all numbers of ``segments`` are multiples of 16.
    """
    rows, chunks = len(segments), triton.cdiv(longest + (0 if aligned else 15), CHUNK)
    for ids in block_ids.split(MOST):
        _zero_kernel[(chunks, len(ids), rows)](
            segments, ids, len(ids), rows, num_blocks, aligned, CHUNK, 1, num_warps=WARPS
        )
