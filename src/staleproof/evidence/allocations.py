"""Who allocated memory, and which attribute of the model keeps it alive.

Two trackers record allocations: one reads the trace of torch's CUDA caching allocator, the other
watches operations on the CPU. The walk over a module tree then finds the attribute, buffer or global
variable that refers to each tensor. The ledger (:mod:`staleproof.evidence.ledger`) joins the two.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# The name given to memory that no attribute of the module tree refers to.
UNOWNED = "(no attribute holds it)"

_TORCH = str(Path(torch.__file__).parent)
_INTERPRETER = str(Path("triton", "runtime", "interpreter.py"))
# The walk does not look inside these.
_LEAVES = (
    *(str, bytes, int, float, complex, bool, type(None)),
    *(type, FunctionType, ModuleType, torch.dtype, torch.device),
)


def size_text(nbytes: int, short: bool = False) -> str:
    """Bytes in the units of torch's out-of-memory error; ``short`` drops zeros and writes ``B``.

    >>> size_text(1536), size_text(262144), size_text(262144, short=True), size_text(8, short=True)
    ('1.50 KiB', '256.00 KiB', '256 KiB', '8 B')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) > unit:
            text = f"{nbytes / unit:.2f} {name}"
            return re.sub(r"\.?0+(?= )", "", text) if short else text
    return f"{nbytes} {'B' if short else 'bytes'}"


class Usage(NamedTuple):
    """Device memory at one moment, in bytes.

    Attributes:
        used: memory in use on the device, by every process.
        reserved: the part of it that this process's caching allocator took from the device.
        allocated: the part of ``reserved`` that belongs to live tensors.
        releasable: the part of ``reserved`` that the allocator returns to the device before it
            reports out of memory.

    >>> Usage(used=100, reserved=80, allocated=50, releasable=10).stuck
    20
    """

    used: int
    reserved: int
    allocated: int
    releasable: int

    @property
    def stuck(self) -> int:
        """Reserved bytes that no tensor uses and that cannot be returned: graph pools, fragments."""
        return self.reserved - self.allocated - self.releasable


def cuda_usage() -> Usage:
    """Read the current CUDA device: the driver's free memory and the caching allocator's segments."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    segments = torch.cuda.memory_snapshot()
    return Usage(
        used=total - free,
        reserved=sum(s["total_size"] for s in segments),
        allocated=sum(s["allocated_size"] for s in segments),
        # The allocator never returns segments of a graph's private pool, even when they are empty.
        releasable=sum(
            s["total_size"]
            for s in segments
            if s["active_size"] == 0 and tuple(s["segment_pool_id"]) == (0, 0)
        ),
    )


@dataclass
class Allocation:
    """One live allocation: its bytes, the phase and the source line (``file.py:12``) that made it."""

    nbytes: int
    phase: str
    source: str
    # Keeps the weak reference, and with it the callback that notices the release.
    reference: object = None


@dataclass
class OwnedAllocations:
    """The live allocations of one owner, summed over the layers that have such an attribute."""

    by_layer: dict[str, int] = field(default_factory=dict)
    phases: set[str] = field(default_factory=set)
    sources: list[str] = field(default_factory=list)
    shared: bool = False

    def add(self, allocation: Allocation, layer: str) -> None:
        """Count one allocation to the layer with this path in the module tree."""
        self.by_layer[layer] = self.by_layer.get(layer, 0) + allocation.nbytes
        self.phases.add(allocation.phase)
        self.sources.append(allocation.source)


def _tensors_in(
    value: Any, path: str, visited: set[int], depth: int = 4
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors reachable from an attribute: itself, items of containers, attributes of plain objects."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield path, value
        return
    if isinstance(value, _LEAVES) or depth == 0 or id(value) in visited:
        return
    visited.add(id(value))
    inside: list[tuple[str, Any]] = []
    if isinstance(value, dict):  # another mapping may compute its items, as vLLM's registries do
        inside = [(path, item) for item in value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inside = [(path, item) for item in value]
    elif not isinstance(value, nn.Module):
        inside = [(f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
    for name, item in inside:
        yield from _tensors_in(item, name, visited, depth - 1)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(module).items()):
        if name in ("_parameters", "_buffers"):
            yield from value.items()
        elif name != "_modules":
            yield name, value


def _globals(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Global variables of the Python modules that define the classes of the tree."""
    homes = {cls.__module__ for m in module.modules() for cls in type(m).__mro__}
    for home in sorted(homes):
        python = sys.modules.get(home)
        if python is None or home.partition(".")[0] in ("torch", "builtins", "typing"):
            continue
        for name, value in list(vars(python).items()):
            if not name.startswith("__"):
                yield f"{home}:{name}", value


def owned_tensors(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Find every tensor that a module tree keeps alive.

    It visits parameters, buffers, attributes (four levels deep through containers and plain
    objects), and the global variables of the Python modules that define the tree's classes.

    Args:
        module: root of the tree.

    Yields:
        Name of the owner (``*`` stands for a layer's number), path of the layer, and the tensor.
        A tensor that several layers refer to is yielded once for each.

    >>> import torch
    >>> model = torch.nn.ModuleList(torch.nn.Linear(2, 2, bias=False) for _ in range(2))
    >>> [(name, layer) for name, layer, _ in owned_tensors(model)]
    [('*.weight', '0'), ('*.weight', '1')]
    """
    for path, part in module.named_modules():
        for name, value in _attributes(part):
            for attribute, tensor in _tensors_in(value, name, set()):
                yield f"{_starred(path)}.{attribute}".lstrip("."), path, tensor
    for name, value in _globals(module):
        for attribute, tensor in _tensors_in(value, name, set()):
            yield attribute, attribute.partition(":")[0], tensor


def _starred(path: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))


def count_alike(module: nn.Module) -> dict[str, int]:
    """For each numbered layer: how many layers have its class, and its path apart from the number.

    >>> import torch
    >>> count_alike(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.ReLU(), torch.nn.Tanh()))
    {'0': 2, '1': 2, '2': 1}
    """
    kinds = {path: (_starred(path), type(part)) for path, part in module.named_modules()}
    every = list(kinds.values())
    return {path: every.count(kind) for path, kind in kinds.items() if "*" in kind[0]}


def group_by_owner(
    module: nn.Module, tracker: CudaTracker | DispatchTracker
) -> dict[tuple[str, str], OwnedAllocations]:
    """Join the tracker's live allocations with the attributes that refer to them.

    Returns:
        (owner, "") -> its allocations. Memory without an owner is (:data:`UNOWNED`, source line).
    """
    owners: dict[int, dict[str, str]] = {}  # allocation -> layer -> owner
    for name, layer, tensor in owned_tensors(module):
        if (key := tracker.key(tensor)) in tracker.live:
            owners.setdefault(key, {}).setdefault(layer, name)
    groups: dict[tuple[str, str], OwnedAllocations] = {}
    for key, allocation in list(tracker.live.items()):
        if key not in owners:
            groups.setdefault((UNOWNED, allocation.source), OwnedAllocations()).add(allocation, "")
            continue
        layer, name = next(iter(owners[key].items()))
        group = groups.setdefault((name, ""), OwnedAllocations())
        group.add(allocation, layer)
        # Layers that refer to the same tensor will not allocate one each.
        group.shared |= len(owners[key]) > 1
    return groups


def _source(filename: str, line: int) -> str:
    return "/".join(Path(filename).parts[-2:]) + f":{line}"


def _is_machinery(filename: str, function: str) -> bool:
    """Whether a stack frame belongs to torch, to this file or to another dispatch mode."""
    return filename.startswith(_TORCH) or filename == __file__ or function == "__torch_dispatch__"


def storage_of(x: object) -> Any:
    """The storage behind a strided tensor; ``None`` for anything else.

    >>> import torch
    >>> storage_of(torch.zeros(4)[1:]).nbytes(), storage_of("a string")
    (16, None)
    """
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
        return None
    return x.untyped_storage()


class DispatchTracker(TorchDispatchMode):
    """Records storages that operations create on devices whose operations dispatch: CPU and meta."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, Allocation] = {}
        self.now = self.peak = 0
        self.phase = ""

    @staticmethod
    def key(tensor: torch.Tensor) -> int:
        """What identifies a tensor's memory in ``live``."""
        return id(tensor.untyped_storage())

    def begin(self, phase: str) -> None:
        """Start to record."""
        self.phase = phase
        self.peak = self.now
        self.__enter__()

    def end(self) -> None:
        """Stop recording; releases are still noticed."""
        self.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # torch.tensor() creates its storage outside of dispatch, then calls lift_fresh on it. So an
        # input of lift_fresh is a new storage; an input of any other operation is not.
        new = func._schema.name == "aten::lift_fresh"
        inputs = [] if new else [s for s in map(storage_of, pytree.tree_leaves((args, kwargs))) if s]
        before = {id(s) for s in inputs}
        result = func(*args, **kwargs)
        for storage in filter(None, map(storage_of, pytree.tree_leaves(result))):
            known = self.live.get(id(storage))
            if known is not None:  # resize_ may have changed it
                self._count(storage.nbytes() - known.nbytes)
                known.nbytes = storage.nbytes()
            elif id(storage) not in before:
                self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        source = _calling_line()
        if source is None:
            return
        key = id(storage)
        reference = weakref.ref(storage, lambda _: self._release(key))
        self.live[key] = Allocation(storage.nbytes(), self.phase, source, reference)
        self._count(storage.nbytes())

    def _release(self, key: int) -> None:
        self._count(-self.live.pop(key).nbytes)

    def _count(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def _calling_line() -> str | None:
    """The source line that is allocating; ``None`` if Triton's interpreter allocates for itself."""
    line = None
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename.endswith(_INTERPRETER):
            return None
        if line is None and not _is_machinery(filename, frame.f_code.co_name):
            line = _source(filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return line or "?"


class CudaTracker:
    """Records blocks of the CUDA caching allocator, from the allocator's own trace."""

    def __init__(self) -> None:
        self.live: dict[int, Allocation] = {}
        self.now = self.peak = 0

    @staticmethod
    def key(tensor: torch.Tensor) -> int:
        """What identifies a tensor's memory in ``live``."""
        return tensor.untyped_storage().data_ptr()

    def begin(self, phase: str) -> None:
        """Start to record."""
        self.phase = phase
        # Nothing was recorded between two phases, so blocks freed since the last one are still listed.
        active = _active_blocks(torch.cuda.memory_snapshot())
        self.live = {key: a for key, a in self.live.items() if key in active}
        self.now = self.peak = sum(a.nbytes for a in self.live.values())
        # context="state" keeps stacks of live blocks only; resolving those of every event takes seconds.
        torch.cuda.memory._record_memory_history("all", context="state", stacks="python", clear_history=True)

    def end(self) -> None:
        """Stop recording and read the trace."""
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        new = []
        for event in snapshot["device_traces"][torch.cuda.current_device()]:
            if event["action"] == "alloc":
                self.live[event["addr"]] = Allocation(event["size"], self.phase, "?")
                new.append(event["addr"])
                self.now += event["size"]
                self.peak = max(self.peak, self.now)
            elif event["action"] == "free_requested" and event["addr"] in self.live:
                self.now -= self.live.pop(event["addr"]).nbytes
        blocks = _active_blocks(snapshot["segments"])
        for key in new:
            if key in self.live and key in blocks:
                self.live[key].source = _first_line(blocks[key].get("frames", []))


def _active_blocks(segments: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Address -> block, of the blocks that a tensor uses."""
    blocks = (block for segment in segments for block in segment["blocks"])
    return {b["address"]: b for b in blocks if b["state"] == "active_allocated"}


def _first_line(frames: list[dict[str, Any]]) -> str:
    for frame in frames:
        if not _is_machinery(frame["filename"], frame["name"]):
            return _source(frame["filename"], frame["line"])
    return "?"
