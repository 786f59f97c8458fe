"""The right answer: one locked workspace for the decode output, keyed by all that must agree."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch

from staleproof import check

_Key = tuple[torch.device, object, torch.dtype, int, int]


class WorkspaceLocked(RuntimeError):
    """A locked workspace was asked for memory that it does not hold."""


class DecodeWorkspace:
    """Decode output memory that all layers share, and that cannot grow once it is locked.

    Layers of one step run one after another, so they may share a buffer; what runs at the same
    time may not. A buffer belongs to one device, one stream or micro-batch, one dtype, one number
    of heads and one rank, and grows in rows only. Ask for the largest batch of every micro-batch
    before the profile run, so that the profile counts it; :meth:`lock` before the first capture,
    since a captured graph keeps writing to the address it saw.

    The memory holds what the last step left there: a kernel that skips empty rows needs
    ``clear_empty_rows`` behind it.

    Follows vLLM's ``WorkspaceManager`` (``v1/worker/workspace.py``, 0.18.1: one buffer a
    micro-batch, locked after warm-up); the key is what the review of vLLM #37799 asked for.
    """

    def __init__(self) -> None:
        self._buffers: dict[_Key, torch.Tensor] = {}
        self._mutex = threading.Lock()
        self.locked = False

    def get(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        micro_batch: int | None = None,
    ) -> torch.Tensor:
        """Memory of one decode output, contiguous, with whatever bytes it holds.

        Args:
            shape: (batch, heads, rank) or (batch, q_len, heads, rank).
            dtype: of the output.
            device: where it lives.
            micro_batch: which of the micro-batches in flight asks; None for the current stream.

        Returns:
            A view of the buffer. Calls with one key overlap in memory.

        Raises:
            ValueError: not three or four positive sizes.
            WorkspaceLocked: locked, and no buffer of this key is as large.
        """
        sizes = tuple(shape)
        check.require(
            len(sizes) in (3, 4) and all(size > 0 for size in sizes),
            "shape",
            "(batch, heads, rank) or (batch, q_len, heads, rank), all positive",
            sizes,
        )
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        lane: object = micro_batch
        if micro_batch is None and device.type == "cuda":
            lane = torch.cuda.current_stream(device)
        *leading, heads, rank = sizes
        rows = math.prod(leading)
        key = (device, lane, dtype, heads, rank)
        # Micro-batches may run in host threads of their own.
        with self._mutex:
            held = self._buffers.get(key)
            if held is None or len(held) < rows:
                if self.locked:
                    what = "none" if held is None else f"{len(held)} rows"
                    raise WorkspaceLocked(
                        f"decode workspace is locked: shape {sizes} ({dtype}, {device}, "
                        f"micro-batch {micro_batch}) needs {rows} rows of ({heads}, {rank}), held "
                        f"{what}; warm up with the largest batch before lock()"
                    )
                held = torch.empty(rows, heads, rank, dtype=dtype, device=device)
                self._buffers[key] = held
            return held[:rows].view(sizes)

    def lock(self) -> None:
        """Refuse growth from now on."""
        self.locked = True

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        with self._mutex:
            return sum(buffer.nbytes for buffer in self._buffers.values())
