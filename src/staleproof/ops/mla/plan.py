"""Which kernel decodes a batch, and how its keys are cut, from shapes alone.

On Hopper the plan takes the cut with the least predicted time. The prediction has two dozen constants, fitted
to the times of 94 cells on one H200; commit b8cd03a0 has them and the program that fits. Lengths are on the
device and are not read back. Only ``capacity`` is known: the number of tokens of a request that the block
table has room for.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

import torch

from staleproof.ops.cuda_runtime import capability, processor_count, shared_memory

# Shared memory of the tile of 32 rows and 32 keys on GPUs other than Hopper, for DeepSeek's shape.
WIDE_SHARED_BYTES = 102_400
# Up to this many heads, use the memory-bound Hopper kernel.
FEW_HEADS = 16
# Up to this many rows a program, use the kernel of ``e4m3.py`` for an E4M3 cache.
E4M3_ROWS = 32
# What beginning and ending a request takes, in tiles of 64 keys. With 0 ragged batches took 7 % longer.
REQUEST_COST = 4


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class Tiles(NamedTuple):
    """How the portable kernel cuts its work: rows and keys of a program, splits of the keys, warps."""

    rows: int
    keys: int
    splits: int
    warps: int


def is_measured(q: torch.Tensor) -> bool:
    """Whether to use the tiles measured on an H200: on Hopper, and on a CPU, where any tile works."""
    return not q.is_cuda or capability(q.device.index) == (9, 0)


def tiles_of(q: torch.Tensor, rows: int, capacity: int) -> Tiles:
    """The tiles of the portable kernel for ``rows`` rows of each request.

    Wide tiles read the cache less often; narrow ones spread a small batch over more processors. Hopper's
    were measured on an H200; those for other GPUs fit and spill no registers.
    """
    warps = 4 if (measured := is_measured(q)) or q.element_size() == 4 else 8
    block_m, block_n = 16, 16 if q.element_size() == 4 else 64 if measured else 32
    processors = processor_count(q.device.index) if q.is_cuda else 1
    batch, blocks = q.shape[0], cdiv(capacity, block_n)
    narrow = batch * cdiv(rows, block_m)
    if q.element_size() == 2 and narrow * blocks > 8 * processors:
        if measured and rows > 32:
            block_m, warps = 64, 8
        elif rows > 16 and (measured or shared_memory(q.device.index) >= WIDE_SHARED_BYTES):
            block_m = 32
    programs = batch * cdiv(rows, block_m)
    return Tiles(block_m, block_n, max(1, min(processors // programs, blocks)), warps)


def cache_dtypes(q: torch.Tensor) -> tuple[torch.dtype, ...]:
    """The dtypes that a cache may have with these queries: a GPU converts E4M3 from capability 8.9 on."""
    converts = not q.is_cuda or capability(q.device.index) >= (8, 9)
    return (q.dtype, torch.float8_e4m3fn) if converts else (q.dtype,)


def fits_hopper(q: torch.Tensor, kv_cache: torch.Tensor, rank: int, q_len: int, scale: float) -> bool:
    """Whether the Hopper kernels support this call.

    They are for DeepSeek's shape in 16 bits, with a cache of the same dtype or E4M3. A program has up to 64
    heads of one query token, or all heads of several. They address the cache as rows of one token, 16 bytes
    at a time, compare scores before they scale them, and sum up the lengths of at most 1,024 requests.
    """
    heads = q.shape[-2]
    return (
        q.is_cuda
        and capability(q.device.index) == (9, 0)
        and q.element_size() == 2
        and (rank, q.shape[-1]) == (512, 576)
        and kv_cache.shape[1] % 64 == 0
        and all(x.data_ptr() % 16 == 0 for x in (q, kv_cache))
        and all(n % 16 == 0 for n in (*q.stride()[:-1], *kv_cache.stride()[:-1]))
        and (q_len == 1 or heads <= 64 or heads % 64 == 0)
        and q.shape[0] <= 1024
        and q_len * heads <= 1024
        and scale > 0
        and kv_cache.stride(0) % kv_cache.stride(1) == 0
        and kv_cache.shape[0] * (kv_cache.stride(0) // kv_cache.stride(1)) < 2**31
        and kv_cache.stride(1) < 2**24
    )


def aligned_parts(parts: int, batch: int) -> int:
    """How many parts, up to ``parts``, if equal requests are cut so that a part never has pieces of two.

    >>> [aligned_parts(66, batch) for batch in (1, 16, 40, 100, 128)]
    [66, 64, 40, 50, 64]
    """
    return batch * (parts // batch) if batch <= parts else cdiv(batch, cdiv(batch, parts))


def whole_programs(batch: int, groups: int, processors: int) -> int:
    """How many programs share the requests uncut, for each of ``groups`` of rows.

    More programs would finish no sooner: some would still have as many requests, with less bandwidth each.

    >>> [whole_programs(batch, 2, 132) for batch in (16, 66, 99, 256)]
    [16, 66, 50, 64]
    """
    return min(batch, aligned_parts(max(1, processors // groups), batch))


def merge_tiles(batch: int, parts: int) -> tuple[int, int, int, int]:
    """(columns and rows of a program, parts that it loads together, warps) of ``merge_parts_kernel``.

    Measured on an H200, for ``parts`` of a batch. A thread has eight columns of two bytes. The parts of a row
    are never spread over several warps: adding across warps uses shared memory and took up to 40 us longer.

    >>> [merge_tiles(batch, 132) for batch in (1, 6, 9, 40, 128)]
    [(128, 1, 64, 1), (128, 1, 32, 1), (256, 1, 16, 1), (512, 2, 4, 4), (512, 4, 2, 4)]
    """
    together = min(1 << (cdiv(parts, batch) - 1).bit_length(), 64)
    if together > 16:
        return 128, 1, together, 1
    if together > 8:
        return 256, 1, together, 1
    if batch >= 64:
        # Most requests have two parts at most.
        return 512, 4, 2, 4
    return (512, 2, 4, 4) if together <= 4 else (512, 1, 8, 2)


class Cut(NamedTuple):
    """A kernel, and how it cuts the keys.

    Attributes:
        kernel: ``portable`` (16 rows a program), ``few``, ``pairs`` or ``packed`` (all heads of several query
            tokens).
        parts: for the last three kernels: equal parts of the line of all tiles, for each block of rows.
            With 0 a program has whole requests, or one split of a request.
        splits: splits of each request.
    """

    kernel: str
    parts: int = 0
    splits: int = 1

    def height(self, q_len: int, heads: int, converts: bool = False) -> int:
        """Rows (query token, head) of a program; ``converts``: with an E4M3 cache.

        >>> [Cut(kernel).height(3, 12) for kernel in ("portable", "pairs", "packed")]
        [16, 12, 36]
        >>> Cut("packed").height(3, 12, converts=True)
        24
        """
        if self.kernel == "packed":
            return min(q_len, (E4M3_ROWS if converts else 64) // heads) * heads
        return 16 if self.kernel == "portable" else min(heads, 64)


class Rates(NamedTuple):
    """Microseconds that a kernel takes.

    Attributes:
        tile: for a tile of 64 keys while no other program runs.
        request: to start and finish a request.
    """

    tile: float
    request: float


RATES = {
    "portable": Rates(1.87, 3.03),
    "pairs": Rates(1.41, 4.21),
    "few": Rates(0.973, 4.87),
    "packed": Rates(1.52, 5.48),
}
# With an E4M3 cache. "pairs" is for more than 32 rows; 16 and 32 are for up to that many rows (``e4m3.py``).
E4M3_RATES: dict[str | int, Rates] = {
    "portable": Rates(4.92, 4.13),
    "pairs": Rates(1.87, 3.31),
    16: Rates(1.02, 1.49),
    32: Rates(0.981, 4.03),
}
# Extra microseconds a request with an E4M3 cache if query tokens are packed.
E4M3_PACKED = 2.5
# Microseconds to start and end a program, besides its requests, and to find its part of all tiles.
LAUNCH, FIND_PART = 4.74, 1.44
# The fraction by which a tile slows down while programs run on all processors, and megabytes that the GPU
# reads in a microsecond. A tile takes the longer of the two times.
CROWD, BANDWIDTH = 0.435, 3.94
# Microseconds of merging: for each megabyte of parts, written and read again; and the extra time if the merge
# has to find which requests were cut and most were.
MERGE_MEGABYTE, MERGE_SOME = 0.368, 4.61
# Microseconds to convert the queries to float16 for an E4M3 cache.
CONVERT_QUERIES = 3.0
# The mean length of an uneven batch, as a fraction of the longest.
UNEVEN = 0.7


class Work(NamedTuple):
    """The sizes of a batch from which its time is predicted.

    Attributes:
        batch, heads, q_len: of the queries.
        tiles: tiles of 64 keys in the longest request.
        total: tiles of all requests.
        processors: of the GPU.
        converts: whether the cache is E4M3.
    """

    batch: int
    heads: int
    q_len: int
    tiles: int
    total: float
    processors: int
    converts: bool = False

    def microseconds(self, cut: Cut) -> float:
        """The predicted time.

        >>> work = Work(128, 128, 1, 64, 128 * 64, 132)
        >>> [round(work.microseconds(Cut("pairs", parts))) for parts in (0, 66)]
        [270, 271]
        """
        is_even = self.total == self.batch * self.tiles
        rows = self.q_len * self.heads
        height = cut.height(self.q_len, self.heads, self.converts)
        rate = self._rates(cut, height)
        fixed = CONVERT_QUERIES if self.converts and cut.kernel != "portable" else 0.0
        blocks = cdiv(rows, height)
        if cut.parts == 0:
            # A processor decodes the longest request or a split of it, then further ones of average length.
            programs = self.batch * blocks * cut.splits
            if cut.splits == 1 and cut.kernel != "portable":
                programs = whole_programs(self.batch, blocks, self.processors) * blocks
            requests = float(cdiv(self.batch * blocks * cut.splits, min(programs, self.processors)))
            tiles = cdiv(self.tiles, cut.splits) + (requests - 1) * self.total / self.batch / cut.splits
            is_cut = cut.splits > 1
        else:
            parts = min(float(cut.parts), self.total)
            tiles, is_cut = self.total / parts, True
            # A program's first and last request may be cut, so it has up to one request more.
            requests = cdiv(self.batch, int(parts)) + min(self.batch / parts, 1.0)
            aligned = aligned_parts(cut.parts, self.batch)
            units = self.total + REQUEST_COST * self.batch
            if is_even and cdiv(int(units), aligned) <= cdiv(int(units), cut.parts) + REQUEST_COST:
                parts, requests = aligned, float(cdiv(self.batch, aligned))
                tiles, is_cut = float(cdiv(self.batch * self.tiles, aligned)), aligned > self.batch
            else:
                fixed += MERGE_SOME * min(self.batch / parts, 1.0)
            programs = int(parts * blocks)
            fixed += FIND_PART
        if is_cut:
            size = 4 if cut.kernel == "portable" else 2
            fixed += MERGE_MEGABYTE * programs * min(rows, height) * 512 * size / 1e6
        crowd = 1 + CROWD * min(1.0, programs / self.processors)
        # Blocks of rows read the same keys, all but the first from the L2.
        read = (
            min(programs, self.processors) / blocks * 64 * 576 * (1 if self.converts else 2) / 1e6 / BANDWIDTH
        )
        return tiles * max(rate.tile * crowd, read) + requests * rate.request + LAUNCH + fixed

    def _rates(self, cut: Cut, height: int) -> Rates:
        """The rates of a kernel whose programs have ``height`` rows."""
        if not self.converts:
            return RATES[cut.kernel]
        if cut.kernel == "portable" or height > E4M3_ROWS:
            return E4M3_RATES[cut.kernel]
        tile, request = E4M3_RATES[16 if height <= 16 else 32]
        return Rates(tile, request + E4M3_PACKED * (cut.kernel == "packed"))

    def cuts(self) -> list[Cut]:
        """The cuts that may be fastest: as many parts or splits as there are processors, or none."""
        rows = self.q_len * self.heads
        kernels = ["few" if self.heads <= FEW_HEADS else "pairs"]
        # A program must have room for at least two query tokens.
        if self.q_len > 1 and self.heads <= (E4M3_ROWS if self.converts else 64) // 2:
            kernels.append("packed")
        found = []
        for kernel in kernels:
            blocks = cdiv(rows, Cut(kernel).height(self.q_len, self.heads, self.converts))
            found += [Cut(kernel, max(1, self.processors // blocks)), Cut(kernel)]
            wide = self.processors // (self.batch * blocks)
            splits = {min(wide, cdiv(self.tiles, tiles)) for tiles in (1, 2)}
            # Also the fewest splits that finish as soon.
            splits |= {cdiv(self.tiles, cdiv(self.tiles, n)) for n in splits if n}
            found += [Cut(kernel, 0, n) for n in sorted(splits) if n > 1]
        narrow = self.processors // (self.batch * cdiv(rows, 16))
        found.append(Cut("portable", 0, max(1, min(narrow, self.tiles))))
        return found


def fastest_of(equal: Work) -> Cut:
    """The cut with the least predicted time, for requests at most as long as those of ``equal``.

    It has to be fast for requests of equal length and for uneven ones, so the mean of both
    predictions' logarithms decides.
    """
    uneven = equal._replace(total=max(UNEVEN * equal.total, float(equal.tiles)))
    return min(equal.cuts(), key=lambda cut: log(equal.microseconds(cut)) + log(uneven.microseconds(cut)))


def fastest(q: torch.Tensor, kv_cache: torch.Tensor, q_len: int, capacity: int) -> Cut:
    """The cut with the least predicted time on Hopper, taking all requests as long as the table allows."""
    batch, tiles = q.shape[0], cdiv(capacity, 64)
    return fastest_of(
        Work(
            *(batch, q.shape[-2], q_len, tiles, float(batch * tiles), processor_count(q.device.index)),
            converts=kv_cache.dtype != q.dtype,
        )
    )
