"""BlockFingerprints: whether a block holds, at its first read, the bytes that were committed for its hash.

:class:`staleproof.evidence.PublishedBlocks` trusts the scheduler that a planned step is written, and that a
copy to the host and back is exact. Here the device computes a 64-bit fingerprint of all bytes of a block, in
all layers: after the step that wrote it, and again when a request first gets it from the prefix cache. That
detects a block that nobody wrote, one that was copied too early, and one that was overwritten. Nothing waits
for the device: results are read when they have arrived.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from staleproof import check, device

device.load_triton()

import triton
import triton.language as tl

# Words of 4 bytes that a program reads at a time.
WORDS = 2048


@triton.jit
def _fingerprint_kernel(table, ids, found, WORDS: tl.constexpr):
    """Add the words of one block in one cache to the block's fingerprint, each hashed with its position."""
    row = table + tl.program_id(1) * 3
    block = tl.load(ids + tl.program_id(0)).to(tl.int64)
    words, count = (tl.load(row) + block * tl.load(row + 1)).to(tl.pointer_type(tl.int32)), tl.load(row + 2)
    total = tl.zeros((WORDS,), tl.int64)
    for at in range(0, count, WORDS):
        place = at + tl.arange(0, WORDS).to(tl.int64)
        mixed = tl.load(words + place, mask=place < count, other=0).to(tl.int64) * 0x2545F4914F6CDD1D
        mixed += (place + (tl.program_id(1).to(tl.int64) << 32) + 1) * 0x1E3779B97F4A7C15
        mixed = (mixed ^ (mixed >> 32)) * 0x3F58476D1CE4E5B9
        # A sum, because it does not depend on the order of the programs.
        total += tl.where(place < count, mixed ^ (mixed >> 29), 0)
    tl.atomic_add(found + tl.program_id(0), tl.sum(total, axis=0))


@dataclass(frozen=True)
class OtherBytes:
    """A request that got a block whose bytes differ from those committed for its hash.

    Attributes:
        reader: the request.
        block: its id.
        committed: whether anything was committed for the hash; if not, nobody wrote the block.
    """

    reader: Hashable
    block: int
    committed: bool

    def __str__(self) -> str:
        why = "other bytes than were committed for its hash" if self.committed else "a hash nobody committed"
        return f"{self.reader} reads block {self.block}: {why}"


class _Asked(NamedTuple):
    """A launch whose results are being copied to the host."""

    reader: Hashable
    blocks: Mapping[int, Hashable]
    values: torch.Tensor
    ready: torch.cuda.Event | None


class BlockFingerprints:
    """Compares blocks of a KV cache at their first read with what they held when they were committed.

    Args:
        kv_caches: tensors on one device, one or more a layer, (blocks, ...) each. The bytes of a block are
            contiguous, in any order of its axes, and a multiple of 4. If K and V are the outermost axis, pass
            the two halves.

    It keeps one number for each committed hash, so it is for an investigation, not for months of service.
    Blocks that another server wrote have no commit here, and are reported as a hash that nobody committed.

    Attributes:
        reads: blocks whose first read was compared, so far.

    Raises:
        ValueError: a tensor does not fit.

    >>> cache = torch.arange(12, dtype=torch.int32).view(3, 4)
    >>> prints = BlockFingerprints([cache])
    >>> prints.commit({0: "hash", 1: "other"})  # after the step that wrote blocks 0 and 1
    >>> cache[2] = cache[0]  # a copy
    >>> cache[1, 3] += 1
    >>> prints.read("good", {2: "hash"}), prints.read("bad", {1: "other"}), prints.read("worse", {0: "none"})
    (None, None, None)
    >>> for found in prints.check():
    ...     print(found)
    bad reads block 1: other bytes than were committed for its hash
    worse reads block 0: a hash nobody committed
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor]) -> None:
        check.require(len(kv_caches) > 0, "kv_caches", "at least one tensor", "none")
        rows = []
        for index, cache in enumerate(kv_caches):
            name = f"kv_caches[{index}]"
            check.tensor(name, cache, like=kv_caches[0])
            size = cache[0].numel() * cache.element_size()
            last = sum((n - 1) * step for n, step in zip(cache.shape[1:], cache.stride()[1:], strict=True))
            whole = last + 1 == cache[0].numel() <= cache.stride(0)
            check.require(whole, name, "blocks outermost, each in one piece", cache.stride())
            check.require(size % 4 == 0, name, "a multiple of 4 bytes a block", size)
            check.require(len(cache) == len(kv_caches[0]), name, f"{len(kv_caches[0])} blocks", len(cache))
            rows.append([cache.data_ptr(), cache.stride(0) * cache.element_size(), size // 4])
        self._caches, self._device, self.reads = [*kv_caches], kv_caches[0].device, 0
        self._table = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self._known: dict[Hashable, set[int]] = {}
        self._seen: dict[int, Hashable] = {}
        self._asked: list[_Asked] = []

    def of(self, blocks: Sequence[int]) -> torch.Tensor:
        """Fingerprints of blocks, int64 (blocks,), on the device; no wait.

        Raises:
            ValueError: an id names no block.
        """
        most = len(self._caches[0])
        fits = all(0 <= block < most for block in blocks)
        check.require(fits, "blocks", f"ids from 0 to {most - 1}", [*blocks])
        ids = torch.tensor([*blocks], dtype=torch.int32).to(self._device, non_blocking=True)
        found = torch.zeros(len(blocks), dtype=torch.int64, device=self._device)
        if len(blocks):
            _fingerprint_kernel[(len(blocks), len(self._caches))](self._table, ids, found, WORDS=WORDS)
        return found

    def commit(self, blocks: Mapping[int, Hashable]) -> None:
        """Record that blocks were written. Call it after the step, on the step's stream.

        Args:
            blocks: id -> the hash that the block is found by.
        """
        self._seen.update(blocks)
        self._ask(None, blocks)

    def read(self, reader: Hashable, blocks: Mapping[int, Hashable]) -> None:
        """Record that a request got blocks from the prefix cache; compare those not yet read under this hash.

        Args:
            reader: the request.
            blocks: id -> hash.
        """
        first = {block: key for block, key in blocks.items() if self._seen.get(block) != (key, True)}
        self._seen.update({block: (key, True) for block, key in first.items()})
        self.reads += len(first)
        self._ask(reader, first)

    def _ask(self, reader: Hashable, blocks: Mapping[int, Hashable]) -> None:
        if not blocks:
            return
        values, ready = self.of([*blocks]), None
        if values.is_cuda:
            values = torch.empty(len(blocks), dtype=torch.int64, device="cpu", pin_memory=True).copy_(
                values, non_blocking=True
            )
            ready = torch.cuda.Event()
            ready.record()
        self._asked.append(_Asked(reader, dict(blocks), values, ready))

    def check(self, wait: bool = False) -> list[OtherBytes]:
        """Mismatches found since the last call.

        Args:
            wait: wait for all results; otherwise results that have not arrived are left to a later call.
        """
        found = []
        while self._asked:
            reader, blocks, values, ready = self._asked[0]
            if ready is not None and not ready.query():
                if not wait:
                    break
                ready.synchronize()
            self._asked.pop(0)
            for (block, key), value in zip(blocks.items(), values.tolist(), strict=True):
                if reader is None:
                    self._known.setdefault(key, set()).add(value)
                elif value not in self._known.get(key, ()):
                    found.append(OtherBytes(reader, block, key in self._known))
        return found
