"""Block ids on their way to the device, each list in memory of its own until it was read.

Upstream copied from one pinned buffer (vLLM 0.17.1 to 0.25.1): with async scheduling the next
step's ids were in it before the copy of the last step's ran, so that live blocks were zeroed and
new ones were not (vLLM #48085, #48399).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch

from staleproof.ops.cuda_runtime import cudart

# Parts of the ring, each large enough for the longest list.
PARTS = 4
HOST_TO_DEVICE = 1  # cudaMemcpyHostToDevice
RELAXED = 2  # cudaStreamCaptureModeRelaxed


@cache
def _memcpy_async() -> Callable[..., int]:
    # A function object of its own: argument types set once here make each call cheaper.
    copy = cudart()["cudaMemcpyAsync"]
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return copy


class IdRing:
    """A ring of parts in host and in device memory, which lists of ids fill one after another.

    A part is written again only after the events behind the last readers of its lists were reached:
    the host waits where it is a ring ahead of the device, and otherwise never. Any thread and any
    stream may send.

    The host's memory is not pinned. From pinned memory the copy engine would fetch the ids, for
    which the kernel waits longer than for the few bytes that the driver then puts among the
    commands; and a kernel that reads pinned memory itself waits for it in every program.

    Args:
        capacity: the most ids of one list, and of a part.
        device: the CUDA device that reads them.
        parts: the length of the ring.
    """

    def __init__(self, capacity: int, device: torch.device, parts: int | None = None) -> None:
        self._capacity = capacity
        self._part, self._used = 0, 0
        self._streams: dict[int, torch.cuda.Stream] = {}
        # The last event of each part on each stream that read of it.
        self._events: list[dict[int, Any]] = [{} for _ in range(parts or PARTS)]
        self._lock = threading.Lock()
        self._allocate(len(self._events) * capacity, device)

    def send(self, ids: np.ndarray, stream: int, read: Callable[[int], None]) -> None:
        """Enqueue the copy of ``ids`` and behind it their reader.

        Args:
            ids: integers, at most ``capacity``, each within int32.
            stream: the handle of the current stream, on which all is enqueued.
            read: enqueues the reader; takes the address of the ids on the device, int32.

        Raises:
            RuntimeError: the runtime refused the copy.
        """
        with self._lock:
            if self._used + len(ids) > self._capacity:
                self._part, self._used = (self._part + 1) % len(self._events), 0
                self._wait(self._events[self._part])
            at = self._part * self._capacity + self._used
            self._host[at : at + len(ids)] = ids
            self._copy(self._to + at * 4, self._from + at * 4, len(ids) * 4, stream)
            read(self._to + at * 4)
            self._used += len(ids)
            self._record(self._events[self._part], stream)

    def _allocate(self, size: int, device: torch.device) -> None:
        self._host: np.ndarray = np.empty(size, np.int32)
        self._there = torch.empty(size, dtype=torch.int32, device=device)
        self._from, self._to = self._host.ctypes.data, self._there.data_ptr()

    def _wait(self, events: dict[int, Any]) -> None:
        # While any stream is capturing, CUDA refuses the question and breaks that capture, unless
        # this thread vouches that what it asks after is no part of one.
        mode = ctypes.c_int(RELAXED)
        cudart().cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            for event in events.values():
                event.synchronize()
        finally:
            cudart().cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def _copy(self, to: int, source: int, size: int, stream: int) -> None:
        status = _memcpy_async()(to, source, size, HOST_TO_DEVICE, stream)
        if status != 0:
            raise RuntimeError(f"cudaMemcpyAsync: error {status}")

    def _record(self, events: dict[int, Any], stream: int) -> None:
        if stream not in events:
            events[stream] = torch.cuda.Event()
        if stream not in self._streams:
            # Making torch's object for the current stream takes longer than all else here.
            self._streams[stream] = torch.cuda.current_stream()
        events[stream].record(self._streams[stream])
