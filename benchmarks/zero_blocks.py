"""Zeroing KV blocks: ours, upstream's form, vLLM's own, what PyTorch offers, and cudaMemsetAsync.

Run: ``python benchmarks/zero_blocks.py`` on a machine with a CUDA device. vLLM's kernel is taken
from the source file of an installed vLLM (0.20.2 was meant); without one that peer is left out.
All providers get the same ids in the same order, ascending ones where ids are on the device.
"""

from __future__ import annotations

import ast
import functools
import itertools
import random
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from staleproof import device

device.select()
device.load_triton()

import triton
import triton.language as tl

from staleproof import measure
from staleproof.ops.zero_blocks import BlockZeroer
from staleproof.vllm.sources import vllm_file

WORD = 4
# Turns of calls with ids in a list, and calls a turn where the host is timed.
TURNS, AHEAD = 80, 6


@dataclass(frozen=True)
class Pool:
    """The caches of a model, raw bytes: (segments, blocks, page) a layer."""

    name: str
    layers: int
    segments: int
    page: int
    blocks: int
    cases: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        return self.layers * self.segments * self.page


POOLS = (
    # Qwen3-0.6B: 8 heads of 128 in bf16, 16 tokens a block; a pool of 16 GiB.
    Pool("28 layers, K/V outermost, 32 KiB pages", 28, 2, 32768, 9362, (1, 30, 515)),
    # Qwen3.5-397B at TP 1 with an fp8 cache; a pool of 30 GiB.
    Pool("15 layers, 4,276,224 B pages", 15, 1, 4_276_224, 502, (1, 8)),
)


@triton.jit
def _upstream_form(
    segments, ids, count, SEGMENTS: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """One program for 4 KiB, block after block, as described in vLLM #35219."""
    pid = tl.program_id(0)
    chunks: tl.constexpr = PAGE // CHUNK
    block, part = pid // (SEGMENTS * chunks), pid % (SEGMENTS * chunks)
    if block < count:
        start = tl.load(segments + part // chunks).to(tl.pointer_type(tl.int32))
        at = tl.load(ids + block) * PAGE + (part % chunks) * CHUNK
        tl.store(start + at + tl.arange(0, CHUNK), tl.zeros([CHUNK], tl.int32))


@functools.cache
def _vllm_kernel() -> Any:
    """``_zero_kv_blocks_kernel`` of an installed vLLM, alone, or ``None``."""
    path = vllm_file("v1/worker/utils.py")
    source = path.read_text() if path else ""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or node.name != "_zero_kv_blocks_kernel":
            continue
        if "PAGE_SIZE_EL" not in {argument.arg for argument in node.args.args}:
            continue
        # Triton reads a kernel's source from its file, and this file imports all of vLLM.
        lines = source.splitlines()[node.decorator_list[0].lineno - 1 : node.end_lineno]
        copy = Path(tempfile.mkdtemp()) / "vllm_zero_kv_blocks.py"
        copy.write_text("\n".join(["import triton, triton.language as tl", *lines]) + "\n")
        return runpy.run_path(str(copy))[node.name]
    print("no vLLM with the kernel of 0.20.2 is installed: it is not run")
    return None


class Bench:
    """One pool, its caches allocated, and every provider's call on it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.caches = [
            torch.empty(pool.segments, pool.blocks, pool.page, dtype=torch.uint8, device="cuda")
            for _ in range(pool.layers)
        ]
        self.zeroer = BlockZeroer(self.caches, block_dim=1)
        self.segments = torch.tensor(
            [segment.data_ptr() for cache in self.caches for segment in cache],
            dtype=torch.int64,
            device="cuda",
        )
        self.flat = torch.empty(0, dtype=torch.uint8, device="cuda")

    def upstream(self, kernel: Any, ids: torch.Tensor) -> None:
        """Launch a kernel of upstream's form; ids are int64."""
        words = self.pool.page // WORD
        chunk = min(words & -words, 1024)
        segments, count = len(self.segments), len(ids)
        kernel[(count * segments * (words // chunk),)](self.segments, ids, count, segments, words, chunk)

    def index_fill(self, ids: torch.Tensor) -> None:
        for cache in self.caches:
            cache.index_fill_(1, ids, 0)

    def providers(self) -> dict[str, Callable[[torch.Tensor], object]]:
        """Calls that take ids on the device, int64."""
        calls: dict[str, Callable[[torch.Tensor], object]] = {
            "staleproof": self.zeroer.zero,
            "upstream's form, 4 KiB a program": lambda ids: self.upstream(_upstream_form, ids),
        }
        kernel = _vllm_kernel()
        if kernel is not None:
            calls["vLLM"] = lambda ids: self.upstream(kernel, ids)
        # What the first design of vLLM #35219 was reviewed for: a launch for each new block.
        calls["one launch a block"] = self.one_by_one
        return calls | {"index_fill_ a layer": self.index_fill}

    def one_by_one(self, ids: torch.Tensor) -> None:
        for one in ids.split(1):
            self.upstream(_upstream_form, one)

    def wrong(self, call: Callable[[Any], object], ids: Any) -> str:
        """Whether the call zeroes these blocks of poisoned caches, and no other: ``""``, or what is wrong."""
        for cache in self.caches:
            cache.fill_(255)
        call(ids)
        left = (self.pool.blocks - len(ids)) * self.pool.segments * self.pool.page
        right = all(
            not int(cache[:, ids].count_nonzero())
            and int(cache.view(torch.int64).count_nonzero()) * 8 == left
            for cache in self.caches
        )
        return "" if right else "wrong blocks"

    def turns(self, blocks: int) -> measure.Rotation:
        return measure.rotation(blocks * self.pool.block_bytes)

    def id_sets(self, blocks: int, scattered: bool) -> list[list[int]]:
        """Lists of ids that take turns."""
        rng = random.Random(blocks)
        found = []
        for _ in range(self.turns(blocks).sets):
            first = rng.randint(1, self.pool.blocks - blocks)
            run = [*range(first, first + blocks)]
            found.append(rng.sample(range(1, self.pool.blocks), blocks) if scattered else run)
        return found

    def timing(
        self,
        mode: str,
        blocks: int,
        providers: Mapping[str, Sequence[Callable[[], object]] | measure.Times],
        turns: measure.Rotation | None,
        calls: Mapping[str, Callable[[Any], object]],
        ids: Any,
    ) -> measure.Timing:
        """One case; ``calls`` are what is checked, with these ids."""
        moved = 0 if "host" in mode else blocks * self.pool.block_bytes
        return measure.Timing(
            *("kv_reuse", "BlockZeroer.zero", f"{self.pool.name}, {mode}", "blocks", blocks, moved),
            providers,
            turns,
            lambda provider: self.wrong(calls[provider], ids) if provider in calls else "",
        )

    def on_device(self, blocks: int) -> Iterator[measure.Timing]:
        """Time on the device, ids there already, and as many contiguous bytes."""
        for scattered in (False, True) if blocks > 1 else (True,):
            sets = [torch.tensor(sorted(ids), device="cuda") for ids in self.id_sets(blocks, scattered)]
            calls = self.providers()
            size = blocks * self.pool.block_bytes
            if len(self.flat) < size * len(sets):
                self.flat = self.flat.new_empty(size * len(sets))
            parts = self.flat[: size * len(sets)].split(size)
            fills = {
                "Tensor.zero_, contiguous bytes": torch.Tensor.zero_,
                "limit: cudaMemsetAsync, contiguous bytes": measure.memset_async,
            }
            yield self.timing(
                "scattered ids" if scattered else "consecutive ids",
                blocks,
                {name: [functools.partial(call, ids) for ids in sets] for name, call in calls.items()}
                | {name: [functools.partial(fill, part) for part in parts] for name, fill in fills.items()},
                self.turns(blocks),
                calls,
                sets[0],
            )

    def from_a_list(self) -> dict[str, Callable[[list[int]], object]]:
        """Calls that take ids in a Python list."""
        pinned = torch.empty(self.pool.blocks, dtype=torch.int64, pin_memory=True)
        there = torch.empty_like(pinned, device="cuda")

        def on_device(ids: list[int]) -> torch.Tensor:
            staged = torch.tensor(ids, dtype=torch.int64, pin_memory=True)
            return staged.to("cuda", non_blocking=True)

        def fresh(ids: list[int]) -> None:
            self.upstream(_upstream_form, on_device(ids))

        def reused(ids: list[int]) -> None:
            pinned[: len(ids)].numpy()[:] = ids
            there[: len(ids)].copy_(pinned[: len(ids)], non_blocking=True)
            self.upstream(_upstream_form, there[: len(ids)])

        return {
            "staleproof": self.zeroer.zero,
            "fresh pinned tensor, upstream's form": fresh,
            "fresh pinned tensor, one launch a block": lambda ids: self.one_by_one(on_device(ids)),
            # As vLLM 0.17.1 to 0.25.1 does it, which races (vLLM #48085).
            "one pinned buffer (races), upstream's form": reused,
        }

    def in_a_list(self, blocks: int) -> Iterator[measure.Timing]:
        """Ids in a list: time of the host, and of the device with the copy."""
        lists = self.id_sets(blocks, scattered=True)
        calls = self.from_a_list()
        turns = {name: itertools.cycle(lists) for name in calls}
        each = {name: functools.partial(_next, call, turns[name]) for name, call in calls.items()}
        host = measure.host_times(each, rounds=TURNS, each=AHEAD)
        device = {name: self.with_copy(call, lists) for name, call in calls.items()}
        for mode, times in (("ids in a list, host time", host), ("ids in a list, copy included", device)):
            yield self.timing(mode, blocks, times, None, calls, lists[0])

    def with_copy(self, call: Callable[[list[int]], object], lists: list[list[int]]) -> measure.Times:
        """Time on the device of a call with ids in a list, the copy of the ids included."""
        marks = []
        for ids in itertools.islice(itertools.cycle(lists), TURNS):
            torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # Busy, so that the device does not wait for the host.
            torch.cuda._sleep(200_000)
            start.record()
            call(ids)
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        return measure.times_between(marks)


def _next(call: Callable[[list[int]], object], lists: Iterator[list[int]]) -> None:
    call(next(lists))


def cases() -> Iterator[measure.Timing]:
    """Each pool and number of blocks."""
    for pool in POOLS:
        bench = Bench(pool)
        for blocks in pool.cases:
            yield from bench.on_device(blocks)
            yield from bench.in_a_list(blocks)
        del bench
        torch.cuda.empty_cache()


def rows() -> list[dict[str, Any]]:
    """Measure every case.

    Raises:
        DeviceError: no GPU.
        WrongResult: ours is wrong.
    """
    measure.require_gpu()
    return [row for case in cases() for row in case.rows()]


if __name__ == "__main__":
    sys.exit(measure.main(rows, baseline="staleproof"))
