"""One locked workspace for the outputs of all decode layers (the fix of incident 2)."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

from staleproof import check

_Key = tuple[torch.device, object, torch.dtype, int, int]


class WorkspaceLocked(RuntimeError):
    """A locked workspace was asked for more memory than it has."""


class DecodeWorkspace:
    """Memory for decode outputs that all layers share, and that cannot grow once it is locked.

    Layers of one step run one after another, so they can share a buffer. Micro-batches and streams
    run at the same time, so each has its own. The workspace keeps one buffer for each combination
    of device, micro-batch or stream, dtype, heads and rank, and grows it in rows only.

    Before the profile run, get the largest batch of every micro-batch, so that the profile counts
    the memory. Call :meth:`lock` before the first CUDA graph is captured: a captured graph keeps
    writing to the address that it saw, so a buffer must not be replaced afterwards.

    A buffer holds what the last step wrote there. Behind a kernel that skips empty rows, call
    ``clear_empty_rows``.

    Inside ``torch.compile``, :meth:`get` works without a graph break for buffers that exist
    already; on CUDA give it ``micro_batch`` and a device with its index. Otherwise the graph breaks
    there, and ``fullgraph=True`` is an error. ``torch.export`` would make the buffer a constant of
    the program: pass the buffer in as an argument instead.

    Follows vLLM's ``WorkspaceManager`` (``v1/worker/workspace.py``, 0.18.1: one buffer a
    micro-batch, locked after warm-up), with the key that the review of vLLM #37799 asked for.

    >>> workspace = DecodeWorkspace()
    >>> out = workspace.get((8, 4, 16), torch.float16, "cpu")
    >>> workspace.lock()
    >>> workspace.get((2, 4, 16), torch.float16, "cpu").data_ptr() == out.data_ptr()
    True
    >>> workspace.nbytes
    1024
    """

    def __init__(self) -> None:
        self._buffers: dict[_Key, torch.Tensor] = {}
        self._growing = threading.Lock()
        self.locked = False

    def get(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        micro_batch: int | None = None,
    ) -> torch.Tensor:
        """Memory for one decode output, contiguous and not initialised.

        Args:
            shape: (batch, heads, rank) or (batch, q_len, heads, rank).
            dtype: of the output.
            device: where the memory is.
            micro_batch: number of the micro-batch, if several are in flight; None for the current stream.

        Returns:
            A view of the buffer. Two calls with one device, micro-batch or stream, dtype, heads
            and rank return overlapping memory.

        Raises:
            ValueError: not three or four positive sizes, no dtype, or no device.
            WorkspaceLocked: locked, and the buffer has fewer rows or does not exist.

        >>> workspace = DecodeWorkspace()
        >>> workspace.lock()
        >>> workspace.get((2, 4, 16), torch.float16, "cpu")
        Traceback (most recent call last):
        staleproof.ops.decode_workspace.WorkspaceLocked: decode workspace is locked: ...
        """
        whole = (int, torch.SymInt)
        is_shape = isinstance(shape, (tuple, list)) and len(shape) in (3, 4)
        if not is_shape or not all(isinstance(size, whole) and size > 0 for size in shape):
            check.fail(
                "shape", "(batch, heads, rank) or (batch, q_len, heads, rank), all positive", repr(shape)
            )
        sizes = tuple(shape)
        if not isinstance(dtype, torch.dtype):
            check.fail("dtype", "a torch.dtype", repr(dtype))
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError):
            check.fail("device", "a device of torch, such as cuda:0", repr(device))
        lane: object = micro_batch
        if device.type == "cuda" and (micro_batch is None or device.index is None):
            # A compiled function would keep the stream and the device of the call it was made for.
            if torch.compiler.is_compiling():
                check.fail("micro_batch", "a number, and a device with an index, in torch.compile", device)
            if device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
            if micro_batch is None:
                lane = torch.cuda.current_stream(device)
        *leading, heads, rank = sizes
        rows = math.prod(leading)
        key = (device, lane, dtype, heads, rank)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[0] < rows:
            buffer = self._grow(key, rows, sizes)
        return buffer[:rows].view(sizes)

    def _grow(self, key: _Key, rows: int, sizes: tuple[int, ...]) -> torch.Tensor:
        # Each micro-batch may run in its own host thread. torch.compile cannot trace a lock.
        with self._growing:
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape[0] < rows:
                device, lane, dtype, heads, rank = key
                if self.locked:
                    largest = "none" if buffer is None else f"{buffer.shape[0]} rows"
                    raise WorkspaceLocked(
                        f"decode workspace is locked: shape {sizes} ({dtype}, {device}, micro-batch "
                        f"{lane}) needs {rows} rows of ({heads}, {rank}), held {largest}; warm up with "
                        "the largest batch before lock()"
                    )
                buffer = torch.empty(rows, heads, rank, dtype=dtype, device=device)
                self._buffers[key] = buffer
            return buffer

    def lock(self) -> None:
        """Refuse growth from now on.

        >>> workspace = DecodeWorkspace()
        >>> workspace.lock()
        >>> workspace.locked
        True
        """
        self.locked = True

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in list(self._buffers.values()))
