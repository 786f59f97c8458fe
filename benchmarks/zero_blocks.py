"""Zeroing KV blocks: ours, upstream's form, vLLM's own, what PyTorch offers, and cudaMemsetAsync.

Run: ``python benchmarks/zero_blocks.py`` on a machine with a CUDA device. vLLM's kernel is taken
from the source file of an installed vLLM (0.20.2 was meant); without one that peer is left out.
All providers get the same ids in the same order, ascending ones where ids are on the device.
"""

from __future__ import annotations

import ast
import functools
import random
import runpy
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from staleproof import device

device.select()
device.load_triton()

import triton
import triton.language as tl

from staleproof.cases import measure
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
        return calls | {"index_fill_ a layer": self.index_fill}

    def is_right(self, provider: str, mode: str, call: Callable[[Any], object], ids: Any) -> bool:
        """Whether the call zeroes these blocks of poisoned caches, and no other.

        Raises:
            WrongResult: it does not, and it is ours.
        """
        for cache in self.caches:
            cache.fill_(255)
        call(ids)
        left = (self.pool.blocks - len(ids)) * self.pool.segments * self.pool.page
        right = all(
            not int(cache[:, ids].count_nonzero())
            and int(cache.view(torch.int64).count_nonzero()) * 8 == left
            for cache in self.caches
        )
        if not right:
            case = f"{provider}, {mode}, {len(ids)} blocks"
            if provider == "staleproof":
                raise measure.WrongResult(case)
            print(f"{case}: refused, wrong blocks")
        return right

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

    def row(
        self, mode: str, provider: str, blocks: int, times: measure.Times, cache: str | None = None
    ) -> dict[str, Any]:
        moved = 0 if "host" in mode else blocks * self.pool.block_bytes
        return measure.row(
            "kv_reuse",
            "BlockZeroer.zero",
            provider,
            f"{self.pool.name}, {mode}",
            "blocks",
            blocks,
            times,
            moved,
            cache=cache,
        )

    def cached_rows(
        self, mode: str, provider: str, blocks: int, calls: list[Callable[[], object]]
    ) -> Iterator[dict[str, Any]]:
        for cache, times in measure.cached_times(calls, self.turns(blocks)):
            yield self.row(mode, provider, blocks, times, cache)

    def device_rows(self, blocks: int) -> Iterator[dict[str, Any]]:
        """Time on the device, ids there already."""
        for scattered in (False, True) if blocks > 1 else (True,):
            mode = "scattered ids" if scattered else "consecutive ids"
            sets = [torch.tensor(sorted(ids), device="cuda") for ids in self.id_sets(blocks, scattered)]
            for provider, call in self.providers().items():
                if not self.is_right(provider, mode, call, sets[0]):
                    continue
                calls = [lambda i=ids, c=call: c(i) for ids in sets]
                yield from self.cached_rows(mode, provider, blocks, calls)
            yield from self.limits(mode, blocks, len(sets))

    def limits(self, mode: str, blocks: int, sets: int) -> Iterator[dict[str, Any]]:
        """As many contiguous bytes, by a fill kernel and by the runtime."""
        size = blocks * self.pool.block_bytes
        self.flat = self.flat if len(self.flat) >= size * sets else self.flat.new_empty(size * sets)
        parts = [self.flat[i * size : (i + 1) * size] for i in range(sets)]
        for provider, fill in (
            ("Tensor.zero_, contiguous bytes", torch.Tensor.zero_),
            ("limit: cudaMemsetAsync, contiguous bytes", measure.memset_async),
        ):
            calls = [functools.partial(fill, part) for part in parts]
            yield from self.cached_rows(mode, provider, blocks, calls)

    def from_a_list(self) -> dict[str, Callable[[list[int]], object]]:
        """Calls that take ids in a Python list."""
        pinned = torch.empty(self.pool.blocks, dtype=torch.int64, pin_memory=True)
        there = torch.empty_like(pinned, device="cuda")

        def fresh(ids: list[int]) -> None:
            staged = torch.tensor(ids, dtype=torch.int64, pin_memory=True)
            self.upstream(_upstream_form, staged.to("cuda", non_blocking=True))

        def reused(ids: list[int]) -> None:
            pinned[: len(ids)].numpy()[:] = ids
            there[: len(ids)].copy_(pinned[: len(ids)], non_blocking=True)
            self.upstream(_upstream_form, there[: len(ids)])

        return {
            "staleproof": self.zeroer.zero,
            "fresh pinned tensor, upstream's form": fresh,
            # As vLLM 0.17.1 to 0.25.1 does it, which races (vLLM #48085).
            "one pinned buffer (races), upstream's form": reused,
        }

    def list_rows(self, blocks: int) -> Iterator[dict[str, Any]]:
        """Ids in a list: time of the host, and of the device with the copy."""
        lists = self.id_sets(blocks, scattered=True) * TURNS
        for provider, call in self.from_a_list().items():
            if not self.is_right(provider, "ids in a list", call, lists[0]):
                continue
            host, marks = [], []
            for ids in lists[:TURNS]:
                torch.cuda.synchronize()
                started = time.perf_counter_ns()
                for _ in range(AHEAD):
                    call(ids)
                host.append((time.perf_counter_ns() - started) / 1000 / AHEAD)
            for ids in lists[:TURNS]:
                torch.cuda.synchronize()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                # Busy, so that the device does not wait for the host.
                torch.cuda._sleep(200_000)
                start.record()
                call(ids)
                end.record()
                marks.append((start, end))
            torch.cuda.synchronize()
            yield self.row("ids in a list, host time", provider, blocks, measure.quantiles(host))
            yield self.row("ids in a list, copy included", provider, blocks, measure.times_between(marks))


def rows() -> list[dict[str, Any]]:
    """Measure every case.

    Raises:
        DeviceError: no GPU.
        WrongResult: ours is wrong.
    """
    measure.require_gpu()
    found = []
    for pool in POOLS:
        bench = Bench(pool)
        for blocks in pool.cases:
            found += [*bench.device_rows(blocks), *bench.list_rows(blocks)]
        del bench
        torch.cuda.empty_cache()
    return found


if __name__ == "__main__":
    measure.print_rows(rows(), baseline="staleproof")
