"""The ring of block ids: each launch reads its own list, however late the device is."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from staleproof.ops import id_ring
from staleproof.ops.id_ring import IdRing

sys.path.insert(0, str(Path(__file__).parent))

from test_zero_blocks import Case, plain

# Steps that a scheduler may be ahead of the device without its host waiting.
AHEAD = 4


class Runtime:
    """The CUDA runtime as the ring calls it, of a device that does nothing before it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.status, self.mode, self.stream = 0, 0, "stream 5"
        self.queue: list[Callable[[], object]] = []
        self.done = self.waits = 0
        monkeypatch.setattr(id_ring, "cudart", lambda: self)
        id_ring._memcpy_async.cache_clear()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda: self._event(len(self.asked)))

    def catch_up(self, mark: int) -> None:
        for work in self.queue[self.done : mark]:
            work()
        self.done = max(self.done, mark)

    def _event(self, made: int) -> SimpleNamespace:
        def record(stream: Any) -> None:
            self.asked.append(("record", made, stream))
            event.mark = len(self.queue)

        def synchronize() -> None:
            self.asked.append(("wait", made, self.mode))
            self.waits += event.mark > self.done
            self.catch_up(event.mark)
            if self.status:
                raise RuntimeError("a lost device")

        event = SimpleNamespace(record=record, synchronize=synchronize)
        return event

    def cudaThreadExchangeStreamCaptureMode(self, mode: Any) -> None:
        mode._obj.value, self.mode = self.mode, mode._obj.value

    def __getitem__(self, name: str) -> Callable[..., int]:
        assert name == "cudaMemcpyAsync"

        def copy(to: int, source: int, size: int, kind: int, stream: int) -> int:
            self.asked.append(("copy", size, kind, stream))
            self.queue.append(lambda: ctypes.memmove(to, source, size))
            return self.status

        return copy

    def reader(self, count: int, into: list[list[int]]) -> Callable[[int], None]:
        """Enqueues a kernel that reads as many ids."""
        of = ctypes.c_int32 * count

        def read(at: int) -> None:
            self.asked.append(("read", count))
            self.queue.append(lambda: into.append([*of.from_address(at)]))

        return read


def test_each_launch_reads_its_own_ids_however_late(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, ring, read = Runtime(monkeypatch), IdRing(3, torch.device("cpu")), []
    # Each of the first lists fills a slot.
    sent = [[n, n + 1, n + 2][: 3 if n < AHEAD else 1 + n % 3] for n in range(40)]
    for step, ids in enumerate(sent):
        ring.send(np.array(ids), 0, runtime.reader(len(ids), read))
        if step < AHEAD:
            assert runtime.waits == 0, "a host that is a few steps ahead waits"
    runtime.catch_up(len(runtime.queue))
    assert read == sent


def test_a_thread_waits_while_another_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, ring, read = Runtime(monkeypatch), IdRing(5, torch.device("cpu")), []
    other = threading.Thread(target=lambda: ring.send(np.array([3, 4]), 6, runtime.reader(2, read)))

    def meanwhile(at: int) -> None:
        other.start()
        # Without a lock it is over by then, and in the same slot.
        other.join(0.2)
        runtime.reader(2, read)(at)

    ring.send(np.array([1, 2]), 5, meanwhile)
    other.join()
    runtime.catch_up(len(runtime.queue))
    assert read == [[1, 2], [3, 4]]


def test_the_copy_takes_addresses_of_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(monkeypatch)
    given = id_ring._memcpy_async().argtypes  # type: ignore[attr-defined]
    assert [ctypes.sizeof(kind) for kind in given] == [8, 8, 8, 4, 8]
    assert not runtime.asked


@pytest.mark.gpu
def test_many_steps_ahead_of_a_busy_stream() -> None:
    """Async scheduling: ids are staged while the device is far behind, then for another stream."""
    pages = Case([plain(400, 8192), plain(400, 1000)], "cuda")
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
@pytest.mark.parametrize(
    ("mode", "thread", "own_stream"),
    [
        ("global", False, True),
        ("global", True, False),
        ("thread_local", False, False),
        ("thread_local", True, True),
    ],
)
def test_beside_a_capture(mode: Any, thread: bool, own_stream: bool) -> None:
    pages = Case([plain(64, 4096)], "cuda")
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
    pages = Case([plain(8, 64)], "cuda")
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
