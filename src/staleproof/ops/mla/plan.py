"""Tiles, splits and warps of an MLA decode, from shapes alone."""

from __future__ import annotations

import torch

from staleproof.ops.cuda_runtime import capability, processor_count, shared_memory

# What the tile of 32 rows and 32 keys takes on GPUs other than Hopper, for DeepSeek's shape.
WIDE_SHARED_BYTES = 102_400
# Up to as many heads, that Hopper kernel of equal parts whose time is that of reading the cache.
FEW_HEADS = 16
# The Hopper kernels of equal parts are used from this much work on, in tiles of 64 keys and up to 64 heads:
# before, what they do besides the tiles takes longer than they gain. An E4M3 cache needs less, because the
# other kernel is slower with it by more.
EQUAL_FROM_WORK, EQUAL_FROM_E4M3 = 256, 64
# In tiles of 64 keys of the batch, whatever the heads: of fewer than 8 requests, and of an E4M3 cache beside
# few heads.
EQUAL_FROM_SMALL_BATCH, EQUAL_FROM_FEW_E4M3 = 1024, 4
# Tiles of a request, at least, with up to 32 heads.
FEW_FROM_TILES = 8


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def is_measured(q: torch.Tensor) -> bool:
    """Whether the tiles are those measured on an H200. Under the interpreter any tile will do."""
    return not q.is_cuda or capability(q.device.index) == (9, 0)


def _sm90_splits(programs: int, batch: int, tiles: int, processors: int) -> int:
    """Splits of the Hopper kernel of one request a program; 0 where the Triton kernel was faster.

    Programs that occupy a third of the processors are faster than their splits and a merge, up to 16 tiles.
    A split has two tiles at least: more splits took longer to merge than they gained.

    >>> [_sm90_splits(2 * batch, batch, 4, 132) for batch in (8, 32, 128)]
    [0, 1, 1]
    >>> [_sm90_splits(2, 1, tiles, 132) for tiles in (32, 64, 512)]
    [0, 32, 66]
    """
    work = programs * tiles
    if 3 * programs >= processors and tiles <= 16:
        return 1
    if work > 2 * processors or (batch < 8 and work >= 128):
        return max(1, min(processors // programs, tiles // 2))
    return 0


def plan(q: torch.Tensor, rows: int, capacity: int, sm90: bool = False) -> tuple[int, int, int, int]:
    """(rows and keys of a program, splits, warps), from shapes alone.

    The lengths are on the device and are not read back, so every request counts as ``capacity``
    tokens. Wide tiles read the cache less often; narrow ones spread a small batch over more
    processors. Hopper's as measured on an H200; elsewhere they fit and spill no registers. With ``sm90``
    the Hopper kernel of one request a program supports the call, and 64 rows stand for it.
    """
    warps = 4 if (measured := is_measured(q)) or q.element_size() == 4 else 8
    block_m, block_n = 16, 16 if q.element_size() == 4 else 64 if measured else 32
    processors = processor_count(q.device.index) if q.is_cuda else 1
    batch, blocks = q.shape[0], cdiv(capacity, block_n)
    if sm90 and rows > 32 and (splits := _sm90_splits(batch * cdiv(rows, 64), batch, blocks, processors)):
        return 64, 64, splits, 8
    narrow = batch * cdiv(rows, block_m)
    if q.element_size() == 2 and narrow * blocks > 8 * processors:
        if measured and rows > 32:
            block_m, warps = 64, 8
        elif rows > 16 and (measured or shared_memory(q.device.index) >= WIDE_SHARED_BYTES):
            block_m = 32
    programs = batch * cdiv(rows, block_m)
    return block_m, block_n, max(1, min(processors // programs, blocks)), warps


def cache_dtypes(q: torch.Tensor) -> tuple[torch.dtype, ...]:
    """What a cache beside these queries may hold: a GPU converts E4M3 from compute capability 8.9 on."""
    converts = not q.is_cuda or capability(q.device.index) >= (8, 9)
    return (q.dtype, torch.float8_e4m3fn) if converts else (q.dtype,)


def _is_hoppers(q: torch.Tensor, kv_cache: torch.Tensor, rank: int) -> bool:
    """Whether the Hopper kernels can address these: DeepSeek's shape, 16 bits, 16-byte loads."""
    return (
        q.is_cuda
        and capability(q.device.index) == (9, 0)
        and q.element_size() == 2
        and (rank, q.shape[-1]) == (512, 576)
        and kv_cache.shape[1] % 64 == 0
        and all(x.data_ptr() % 16 == 0 for x in (q, kv_cache))
        and all(n % 16 == 0 for n in (*q.stride()[:-1], *kv_cache.stride()[:-1]))
    )


def fits_sm90(q: torch.Tensor, kv_cache: torch.Tensor, rank: int, q_len: int) -> bool:
    """Whether the Hopper kernel of one request a program supports this call."""
    fits = _is_hoppers(q, kv_cache, rank) and kv_cache.dtype == q.dtype
    return fits and (q_len == 1 or q.shape[-2] % 64 == 0)


def aligned_parts(parts: int, batch: int) -> int:
    """Into how many parts, at most ``parts``, requests of equal length are cut.

    Where 95 % of the processors then have work, parts end where a request ends.

    >>> [aligned_parts(66, batch) for batch in (1, 16, 100, 128)]
    [66, 64, 66, 64]
    """
    whole = batch * (parts // batch) if batch <= parts else cdiv(batch, cdiv(batch, parts))
    return whole if whole >= 0.95 * parts else parts


def merge_tiles(batch: int, parts: int) -> tuple[int, int, int]:
    """(columns and rows of a program, parts that it loads together) of ``merge_parts_kernel``.

    As measured on an H200, where a batch was cut into at most ``parts``. Each is a power of two.

    >>> [merge_tiles(batch, 66) for batch in (1, 16, 128)]
    [(256, 1, 32), (512, 1, 4), (512, 2, 2)]
    """
    together = 1 << max(parts // batch, 1).bit_length() - 1
    return 256 if batch < 8 else 512, 1 if batch < 32 else 2, min(max(together, 2), 32)


def fits_equal_parts(q: torch.Tensor, kv_cache: torch.Tensor, rank: int, q_len: int, scale: float) -> bool:
    """Whether the Hopper kernels of equal parts support this call.

    A program has heads of one query token. They address the cache as rows of one token, compare scores
    before they scale them, and sum up the lengths of at most 1,024 requests. The cache may be E4M3.
    """
    heads = q.shape[-2]
    return (
        _is_hoppers(q, kv_cache, rank)
        and (q_len == 1 or heads <= FEW_HEADS or heads % 64 == 0)
        and q.shape[0] <= 1024
        and q_len * heads <= 1024
        and scale > 0
        and kv_cache.stride(0) % kv_cache.stride(1) == 0
        and kv_cache.shape[0] * (kv_cache.stride(0) // kv_cache.stride(1)) < 2**31
        and kv_cache.stride(1) < 2**24
    )


def equal_parts_are_faster(
    q: torch.Tensor, kv_cache: torch.Tensor, rank: int, q_len: int, scale: float, capacity: int
) -> bool:
    """Whether the Hopper kernels of equal parts support this call, and were faster on an H200.

    Lengths are not known here, so every request counts as ``capacity`` tokens. With unequal lengths these
    kernels are faster by several times; with equal ones, and programs for one request each that fill
    all processors, only once their faster tiles make up for the merge.
    """
    if not fits_equal_parts(q, kv_cache, rank, q_len, scale):
        return False
    batch, heads, tiles = q.shape[0], q.shape[-2], cdiv(capacity, 64)
    programs = batch * cdiv(q_len * heads, 64)
    work = programs * tiles
    if kv_cache.dtype != q.dtype:
        return batch * tiles >= EQUAL_FROM_FEW_E4M3 if heads <= FEW_HEADS else work >= EQUAL_FROM_E4M3
    if batch < 8:
        return batch * tiles >= EQUAL_FROM_SMALL_BATCH
    if heads <= 32:
        # Not timed with 17 to 32 heads: half of a product's rows are none there.
        least = EQUAL_FROM_WORK if heads <= FEW_HEADS else 2 * EQUAL_FROM_WORK
        return tiles >= FEW_FROM_TILES and batch * tiles >= least
    processors = processor_count(q.device.index)
    if 3 * programs < processors:
        return work >= EQUAL_FROM_WORK
    # In tiles: one of a program for one request takes 1.06 times as long, and it begins and ends in 4.
    # Equal parts begin, end and are merged in 10; in 14 with twice as many requests as fill the processors.
    alone = 1.06 * cdiv(programs, processors) * (tiles + 4)
    return work / processors + 10 + max(0, programs - processors) / 32 < alone
