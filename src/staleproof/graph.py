"""One captured step: a real ``torch.cuda.CUDAGraph``, or on a CPU a recorded list of launches.

Both fix which operations run, and on which memory. A replay runs no Python: host integers and
branches keep their values of the capture, and memory that no recorded operation writes keeps its
bytes from one replay to the next.

>>> x, total = torch.zeros(2), torch.zeros(2)
>>> step = capture(lambda: total.add_(x * 2), "cpu")
>>> total.tolist()  # the step ran once eagerly and once in the capture
[0.0, 0.0]
>>> _ = x.fill_(3)
>>> step.replay()
>>> total.tolist()
[6.0, 6.0]
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from staleproof import check, device

# Operations that only allocate. A CUDA graph keeps the memory, and does not write it at replay.
_ALLOCATIONS = (
    "aten::empty",
    "aten::new_empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty_strided",
)


def capture_sizes(max_size: int = 512) -> list[int]:
    """The batch sizes that vLLM captures by default: 1, 2, 4, steps of 8 up to 256, then of 16.

    >>> capture_sizes(32)
    [1, 2, 4, 8, 16, 24, 32]
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_size + 1, 16)]
    return [s for s in sizes if s <= max_size]


def padded_size(live: int, max_size: int = 512) -> int:
    """The captured size that a batch of ``live`` requests replays.

    Raises:
        ValueError: fewer than one request, or more than the largest captured size.

    >>> padded_size(3), padded_size(129)
    (4, 136)
    """
    sizes = capture_sizes(max_size)
    check.require(1 <= live <= sizes[-1], "live", f"1 to {sizes[-1]}", live)
    return sizes[bisect.bisect_left(sizes, live)]


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Run the captured operations once more on the same memory."""


class LaunchList(TorchDispatchMode):
    """Stands in for a CUDA graph on a CPU: records every operation of ``fn`` with its tensors.

    A Triton kernel is recorded as one launch. Reading a value back to the host raises
    ``RuntimeError``, as in a CUDA capture.
    """

    def __init__(self, fn: Callable[[], Any]) -> None:
        super().__init__()
        self._launches: list[Callable[[], Any]] = []
        # What was recorded, one name a launch.
        self.names: list[str] = []
        with _recorded_triton(self._launches, self.names), self:
            fn()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in ("aten::_local_scalar_dense", "aten::nonzero"):
            raise RuntimeError(f"{name} reads a value back to the host: not permitted in a capture")
        result = func(*args, **kwargs)
        if name in _ALLOCATIONS:
            return result
        aliases = [r.alias_info for r in func._schema.returns]
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        if aliases and all(a is not None and not a.is_write for a in aliases) and not writes:
            return result  # a view of the same memory: nothing to replay

        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]

        def launch() -> None:
            again = func(*args, **kwargs)
            if not writes:
                fresh = [t for t in pytree.tree_leaves(again) if isinstance(t, torch.Tensor)]
                for kept, new in zip(outputs, fresh, strict=True):
                    kept.copy_(new)

        self._launches.append(launch)
        self.names.append(name)
        return result

    def replay(self) -> None:
        """Run the recorded launches once more on the same tensors."""
        for launch in self._launches:
            launch()


@contextmanager
def _recorded_triton(launches: list[Callable[[], Any]], names: list[str]) -> Iterator[None]:
    """While active, interpreted Triton launches are also appended to ``launches``."""
    if not device.has_triton():
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def recorded(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        # The interpreter's own torch operations are not part of the step.
        with _disable_current_modes():
            result = run(kernel, *args, **kwargs)
        launches.append(lambda: run(kernel, *args, **kwargs))
        names.append(kernel.fn.__name__)
        return result

    with mock.patch.object(InterpretedFunction, "run", recorded):
        yield


class CudaGraph:
    """A real CUDA graph of ``fn``, captured after two eager runs on a side stream.

    Args:
        fn: the step.
        pool: graphs with the same pool share memory, as in a serving engine.
    """

    def __init__(self, fn: Callable[[], Any], pool: Any = None) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                fn()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            fn()

    def replay(self) -> None:
        """Replay the graph on the current stream."""
        self.graph.replay()


def capture(fn: Callable[[], Any], on: str) -> Graph:
    """Capture one step, after running it eagerly: once on a CPU, three times on a GPU.

    Args:
        fn: the step; reads and writes tensors that stay where they are. Its result is ignored.
        on: ``"cuda"`` or ``"cpu"``.
    """
    # As an engine does: buffers that the first call allocates then lie outside the graph's memory.
    fn()
    return CudaGraph(fn) if on == "cuda" else LaunchList(fn)
