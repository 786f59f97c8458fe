"""The ring of block ids: each launch reads its own list, however late the device is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from staleproof.ops.id_ring import IdRing
from staleproof.ops.reference import zero_blocks as reference
from staleproof.ops.zero_blocks import BlockZeroer

# Steps that a scheduler may be ahead of the device without its host waiting.
AHEAD = 4


class LateRing(IdRing):
    """A device that does nothing before it is waited for: the latest that it may be."""

    def _allocate(self, size: int, device: torch.device) -> None:
        self._host = np.zeros(size, np.int32)
        self.there = np.zeros(size, np.int32)
        self._from = self._to = 0
        self.queue: list[Callable[[], None]] = []
        self.done = self.waits = 0

    def catch_up(self, mark: int) -> None:
        for work in self.queue[self.done : mark]:
            work()
        self.done = max(self.done, mark)

    def _wait(self, events: dict[int, Any]) -> None:
        for mark in events.values():
            self.waits += mark > self.done
            self.catch_up(mark)

    def _copy(self, to: int, source: int, size: int, stream: int) -> None:
        (a, b, n), rest = zip(*(divmod(number, 4) for number in (to, source, size)), strict=True)
        assert not any(rest), "a copy of whole ids"

        def copy() -> None:
            self.there[a : a + n] = self._host[b : b + n]

        self.queue.append(copy)

    def _record(self, events: dict[int, Any], stream: int) -> None:
        events[stream] = len(self.queue)


def test_each_launch_reads_its_own_ids_however_late() -> None:
    ring = LateRing(5, torch.device("cpu"))
    read: list[list[int]] = []
    sent = [[n, n + 1, n + 2][: 1 + n % 3] for n in range(40)]
    for step, ids in enumerate(sent):

        def reader(at: int, n: int = len(ids)) -> None:
            ring.queue.append(lambda: read.append(ring.there[at // 4 : at // 4 + n].tolist()))

        ring.send(np.array(ids), 0, reader)
        if step < AHEAD:
            assert ring.waits == 0, "a host that is a few steps ahead waits"
    ring.catch_up(len(ring.queue))
    assert read == sent


class Pages:
    """Caches (blocks, page) of ones on the GPU, and what the reference leaves of them."""

    def __init__(self, blocks: int, *pages: int) -> None:
        self.want = [torch.ones(blocks, page, dtype=torch.uint8) for page in pages]
        self.caches = [cache.cuda() for cache in self.want]
        self.zeroer = BlockZeroer(self.caches)

    def expect(self, ids: list[int]) -> None:
        reference.zero_blocks(self.want, ids)

    def check(self) -> None:
        for cache, want in zip(self.caches, self.want, strict=True):
            assert torch.equal(cache.cpu(), want)


@pytest.mark.gpu
def test_many_steps_ahead_of_a_busy_stream() -> None:
    """Async scheduling: ids are staged while the device is far behind, then for another stream."""
    pages = Pages(400, 8192, 1000)
    # Lists so long that they go round the ring several times, each with an id of its own.
    steps = [[n, *range(200, 350)] for n in range(1, 41)]
    for ids in steps:
        pages.expect(ids)
    torch.cuda.synchronize()
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(400_000_000)
    started = time.perf_counter()
    for step, ids in enumerate(steps):
        with torch.cuda.stream(busy if step < 8 else other):
            pages.zeroer.zero(ids)
        if step == AHEAD - 1:
            ahead = time.perf_counter() - started
            assert not busy.query(), "a host that is a few steps ahead waits"
    torch.cuda.synchronize()
    pages.check()
    assert ahead < 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["global", "thread_local"])
@pytest.mark.parametrize("thread", [False, True], ids=["same thread", "other thread"])
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_beside_a_capture(mode: Any, thread: bool, own_stream: bool) -> None:
    pages = Pages(64, 4096)
    steps = [[n, *range(34, 60)] for n in range(1, 33)]
    x = torch.zeros(8, device="cuda")
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            with torch.cuda.stream(stream):
                for ids in steps:
                    pages.expect(ids)
                    pages.zeroer.zero(ids)
        except BaseException as error:  # shown by the assert below
            errors.append(error)

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode=mode):
        x += 1
        if thread:
            server = threading.Thread(target=serve)
            server.start()
            server.join()
        else:
            serve()
        x += 1
    assert not errors
    torch.cuda.synchronize()
    pages.check()
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [2.0] * 8
    pages.check()


@pytest.mark.gpu
def test_a_list_cannot_be_captured() -> None:
    pages = Pages(8, 64)
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="block_ids: expected a tensor on the device"):
            pages.zeroer.zero([3])
        x += 1
    graph.replay()
    torch.cuda.synchronize()
    assert x.item() == 1
    pages.check()
