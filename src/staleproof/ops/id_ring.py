"""Copies of block ids to the device. No list is overwritten before the device has read it.

vLLM 0.17.1 to 0.25.1 copied from one pinned buffer. With async scheduling the ids of the next step
overwrote it before the copy of the last step ran, so that live blocks were zeroed and new ones were
not (vLLM #48085, #48399).
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

# Slots of the ring. Each holds the longest list.
PARTS = 4
HOST_TO_DEVICE = 1  # cudaMemcpyHostToDevice
RELAXED = 2  # cudaStreamCaptureModeRelaxed


@cache
def _memcpy_async() -> Callable[..., int]:
    # Indexing makes a new function object, so setting its argument types changes nobody else's. Set once,
    # they make each call cheaper.
    copy = cudart()["cudaMemcpyAsync"]
    copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return copy


class IdRing:
    """A ring of slots in host and in device memory, which lists of ids fill one after another.

    A slot is reused only after the kernels that read it have finished. The host waits only when it is
    a full ring ahead of the device. Any thread may send, on any stream.

    The host memory is not pinned. From pinned memory the copy engine fetches the ids, which takes
    longer than having the driver put these few bytes into the command stream. A kernel that reads
    pinned memory itself waits for it in every program.

    Args:
        capacity: the most ids of one list, and of a slot.
        device: the CUDA device that reads them.
        parts: number of slots.
    """

    def __init__(self, capacity: int, device: torch.device, parts: int | None = None) -> None:
        self._capacity = capacity
        self._part, self._used = 0, 0
        self._streams: dict[int, torch.cuda.Stream] = {}
        # For each slot, the last event on each stream that read it.
        self._events: list[dict[int, Any]] = [{} for _ in range(parts or PARTS)]
        self._lock = threading.Lock()
        self._allocate(len(self._events) * capacity, device)

    def send(self, ids: np.ndarray, stream: int, read: Callable[[int], None]) -> None:
        """Enqueue the copy of ``ids``, then the kernel that reads them.

        Args:
            ids: integers, at most ``capacity``, each within int32.
            stream: handle of the current stream.
            read: enqueues that kernel, given the address of the int32 ids on the device.

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
        # While any stream is capturing, waiting for an event is an error that breaks the capture. In
        # relaxed mode it is allowed: these events belong to no capture.
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
            # Kept, because making torch's stream object takes longer than the rest of this call.
            self._streams[stream] = torch.cuda.current_stream()
        events[stream].record(self._streams[stream])
