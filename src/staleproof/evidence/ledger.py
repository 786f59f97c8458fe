"""AllocationLedger: what was allocated after the profile run, by owner, and whether it will fit.

A serving engine sizes its KV cache once, from the peak of one profile run. Memory that a later
branch allocates and keeps was never in that sum, and shows up as an out-of-memory in some innocent
request. A memory snapshot shows such blocks; this says whose they are, how many layers will hold
one more, and whether the step that was profiled still fits, before it is run.
"""

from __future__ import annotations

import json
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from staleproof import check

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Phases that have a place in an engine's start; other names may stand anywhere but first.
ORDER = ("profile", "capture", "serve")
UNOWNED = "(no attribute holds it)"
# The caching allocator's smallest block; a graph's random state, say, is less.
_BLOCK = 512

_TORCH = str(Path(torch.__file__).parent)
_INTERPRETER = str(Path("triton", "runtime", "interpreter.py"))
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    FunctionType,
    ModuleType,
    torch.dtype,
    torch.device,
)


def size_text(nbytes: int) -> str:
    """Bytes as torch's out-of-memory error writes them: ``3.94 GiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) > unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"


def _short(nbytes: int) -> str:
    return re.sub(r"\.?0+(?= )", "", size_text(nbytes)) if abs(nbytes) > 1024 else f"{nbytes} B"


class Usage(NamedTuple):
    """Device memory at one moment, in bytes.

    Attributes:
        used: taken from the device, by whomever.
        reserved: of that, what the caching allocator took.
        allocated: of that, what live tensors hold.
        releasable: reserved bytes that the allocator gives back before it fails.
    """

    used: int
    reserved: int
    allocated: int
    releasable: int


def cuda_usage() -> Usage:
    """The current CUDA device, as the driver and torch's caching allocator see it."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    segments = torch.cuda.memory_snapshot()
    return Usage(
        used=total - free,
        reserved=sum(s["total_size"] for s in segments),
        allocated=sum(s["allocated_size"] for s in segments),
        # Segments of a graph's private pool stay, whatever they hold.
        releasable=sum(
            s["total_size"]
            for s in segments
            if s["active_size"] == 0 and tuple(s["segment_pool_id"]) == (0, 0)
        ),
    )


@dataclass
class _Allocation:
    nbytes: int
    phase: str
    source: str
    alive: object = None


@dataclass(frozen=True)
class Owner:
    """Bytes that one attribute holds, over all layers that have it.

    Attributes:
        name: module path and attribute, ``*`` for a layer's number: ``layers.*.attn._decode_out``;
            ``package.module:NAME`` for a module-level global.
        source: file and line that allocated it.
        phase: the phase that allocated it first.
        planned: whether that phase was announced as planned.
        bytes_each: what one layer holds, at most.
        holders: layers that hold one now.
        layers: layers of that place and class, each of which will hold one; 1 where they share it.
        bytes: held now.
    """

    name: str
    source: str
    phase: str
    planned: bool
    bytes_each: int
    holders: int
    layers: int
    bytes: int

    @property
    def predicted(self) -> int:
        """Bytes once every layer holds its own."""
        return max(self.bytes, self.bytes_each * self.layers)

    def __str__(self) -> str:
        text = f"`{self.name}`: {_short(self.predicted)}"
        if self.layers > 1:
            each = _short(self.bytes_each)
            text = f"`{self.name}`: {each} x {self.layers} layers = {_short(self.predicted)}"
        return text


@dataclass(frozen=True)
class Phase:
    """One phase, entered once or several times in a row.

    Attributes:
        name: as given.
        planned: whether what it allocates was announced.
        before: usage when it was first entered.
        after: usage when it was last left.
        transient: most bytes that lived during the phase beyond those it began with and kept.
        by_owner: bytes allocated since the ledger began and held at the end, by owner.
    """

    name: str
    planned: bool
    before: Usage
    after: Usage
    transient: int
    by_owner: Mapping[str, int]

    @property
    def outside(self) -> int:
        """Bytes taken from the device that the caching allocator does not own."""
        return (self.after.used - self.after.reserved) - (self.before.used - self.before.reserved)

    @property
    def pools(self) -> int:
        """Bytes the allocator reserved and cannot give back: graph pools and fragments."""
        return _stuck(self.after) - _stuck(self.before)


def _stuck(usage: Usage) -> int:
    return usage.reserved - usage.allocated - usage.releasable


@dataclass(frozen=True)
class Report:
    """What the ledger knows now; ``str`` of it is the text.

    Attributes:
        budget: bytes of the device, or ``None``.
        before: bytes in use when the ledger began.
        phases: in order.
        owners: all that is held and was allocated since, largest prediction first.
        headroom: budget left once every layer holds its own; ``None`` without a budget.
        required: transient bytes of the first phase, which a step like it will ask for again.
    """

    budget: int | None
    before: int
    phases: tuple[Phase, ...]
    owners: tuple[Owner, ...]
    headroom: int | None
    required: int

    @property
    def surprises(self) -> tuple[Owner, ...]:
        """Owners of a block or more, first allocated after the profile in an unplanned phase."""
        first = self.phases[0].name
        return tuple(o for o in self.owners if o.phase != first and not o.planned and o.predicted >= _BLOCK)

    @property
    def fits(self) -> bool | None:
        """Whether a step like the first phase still fits; ``None`` without a budget."""
        return None if self.headroom is None else self.headroom >= self.required

    @property
    def sentence(self) -> str:
        """The largest surprise and what it means, in one line."""
        found = self.surprises
        text = f"{found[0]} allocated after profiling" if found else "nothing new after profiling"
        if self.headroom is None:
            return text
        verdict = "this fits" if self.fits else "this will not fit"
        return f"{text}; headroom {_short(self.headroom)}; {verdict}"

    def to_json(self) -> str:
        """Everything, derived numbers included."""
        derived = {"fits": self.fits, "sentence": self.sentence}
        owners = [asdict(o) | {"predicted": o.predicted} for o in self.owners]
        phases = [
            asdict(p)
            | {"before": p.before._asdict(), "after": p.after._asdict()}
            | {"outside": p.outside, "pools": p.pools}
            for p in self.phases
        ]
        return json.dumps(asdict(self) | derived | {"owners": owners, "phases": phases})

    def __str__(self) -> str:
        lines = [self.sentence]
        lines += [f"also {owner} allocated after profiling" for owner in self.surprises[1:]]
        for phase in self.phases[1:]:
            for bytes_, what in (
                (phase.pools, "in graph pools and fragments"),
                (phase.outside, "outside the caching allocator"),
            ):
                if bytes_ > self.required // 100:
                    lines.append(f"{phase.name}: {_short(bytes_)} {what}")
        if self.headroom is not None:
            lines.append(f"a step as in {self.phases[0].name} needs {_short(self.required)}")
        lines += [f"  {o.name} at {o.source}, first in {o.phase}" for o in self.owners]
        return "\n".join(lines)

    def figure(self) -> Figure:
        """Memory over phases, stacked by owner, with the budget line. Transparent, mid-grey ink.

        Returns:
            A figure that pyplot does not know; ``.savefig("ledger.svg")`` writes it.
        """
        import seaborn
        from matplotlib.figure import Figure

        ink, unit = "#808080", 2**30 if self.before > 2**30 else 2**20
        fig = Figure(figsize=(8, 3.6), facecolor="none")
        ax = fig.add_axes((0.09, 0.12, 0.56, 0.84), facecolor="none")
        names = [phase.name for phase in self.phases]
        held = [o.name for o in self.owners]
        rest = "pools, fragments, outside"
        base = "before the ledger"
        stacks = {base: [self.before] * len(names)}
        stacks |= {name: [p.by_owner.get(name, 0) for p in self.phases] for name in held}
        stacks[rest] = [
            max(0, p.after.used - p.after.releasable - self.before - sum(p.by_owner.values()))
            for p in self.phases
        ]
        colours = seaborn.color_palette("colorblind", len(stacks))
        foot = [0.0] * len(names)
        for colour, (name, heights) in zip(colours, stacks.items(), strict=True):
            scaled = [h / unit for h in heights]
            ax.bar(names, scaled, bottom=foot, color=colour, label=name, width=0.6)
            foot = [a + b for a, b in zip(foot, scaled, strict=True)]
        transient = [p.transient / unit for p in self.phases]
        ax.bar(
            names,
            transient,
            bottom=foot,
            width=0.6,
            fill=False,
            edgecolor=ink,
            hatch="///",
            linewidth=0.5,
            label="freed again in the phase",
        )
        if self.budget is not None:
            ax.axhline(self.budget / unit, color=ink, linestyle="--", linewidth=1, label="budget")
        ax.set_ylabel("GiB" if unit == 2**30 else "MiB", color=ink)
        ax.tick_params(colors=ink, labelsize=8)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        for side in ("bottom", "left"):
            ax.spines[side].set_color(ink)
        fig.legend(loc="center right", fontsize=8, frameon=False, labelcolor=ink)
        return fig


@dataclass
class _Group:
    """Live allocations of one owner."""

    by_holder: dict[str, int] = field(default_factory=dict)
    phases: set[str] = field(default_factory=set)
    sources: list[str] = field(default_factory=list)
    shared: bool = False

    def add(self, found: _Allocation, holder: str) -> None:
        self.by_holder[holder] = self.by_holder.get(holder, 0) + found.nbytes
        self.phases.add(found.phase)
        self.sources.append(found.source)


def _tensors_in(value: Any, path: str, seen: set[int], depth: int = 4) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors reachable from an attribute: itself, containers' items, plain objects' attributes."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            yield path, value
        return
    if isinstance(value, _LEAVES) or depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        for item in list(value.values()):
            yield from _tensors_in(item, path, seen, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in list(value):
            yield from _tensors_in(item, path, seen, depth - 1)
    elif not isinstance(value, nn.Module):
        for name, item in list(getattr(value, "__dict__", {}).items()):
            yield from _tensors_in(item, f"{path}.{name}", seen, depth - 1)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(module).items()):
        if name in ("_parameters", "_buffers"):
            yield from value.items()
        elif name != "_modules":
            yield name, value


def _globals(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Module-level names of the Python modules whose classes make up the tree."""
    homes = {cls.__module__ for m in module.modules() for cls in type(m).__mro__}
    for home in sorted(homes):
        python = sys.modules.get(home)
        if python is None or home.partition(".")[0] in ("torch", "builtins", "typing"):
            continue
        for name, value in list(vars(python).items()):
            if not name.startswith("__"):
                yield f"{home}:{name}", value


def owned_tensors(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Every tensor the module tree holds: parameters, buffers, attributes, globals of its code.

    Yields:
        Owner name with ``*`` for numbers in the module path, path of the holder, and the tensor;
        a tensor that several modules hold comes once for each.
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


def _same_place(module: nn.Module) -> dict[str, int]:
    """Path -> how many modules of the tree have its starred path and its class."""
    kinds: dict[str, tuple[str, type]] = {
        path: (_starred(path), type(part)) for path, part in module.named_modules()
    }
    every = list(kinds.values())
    return {path: every.count(kind) for path, kind in kinds.items() if "*" in kind[0]}


def _source(filename: str, line: int) -> str:
    return "/".join(Path(filename).parts[-2:]) + f":{line}"


def _ours(filename: str, function: str) -> bool:
    """Whether a frame is the machinery's: torch's, this file's, or another dispatch mode's."""
    machinery = filename.startswith(_TORCH) or filename == __file__
    return machinery or function == "__torch_dispatch__"


class _DispatchTracker(TorchDispatchMode):
    """Storages that operations create, on any device whose tensors dispatch: CPU and meta."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, _Allocation] = {}
        self.now = self.peak = 0
        self.phase = ""

    @staticmethod
    def key(tensor: torch.Tensor) -> int:
        return id(tensor.untyped_storage())

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.peak = self.now
        self.__enter__()

    def end(self) -> None:
        self.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # torch.tensor() makes its storage outside of dispatch and then lifts it.
        fresh = func._schema.name == "aten::lift_fresh"
        given = [] if fresh else [s for s in map(_storage, pytree.tree_leaves((args, kwargs))) if s]
        before = {id(s) for s in given}
        result = func(*args, **kwargs)
        for storage in filter(None, map(_storage, pytree.tree_leaves(result))):
            known = self.live.get(id(storage))
            if known is not None:
                self._count(storage.nbytes() - known.nbytes)
                known.nbytes = storage.nbytes()
            elif id(storage) not in before:
                self._add(storage)
        return result

    def _add(self, storage: Any) -> None:
        source = _caller()
        if source is None:
            return
        key = id(storage)
        alive = weakref.ref(storage, lambda _: self._gone(key))
        self.live[key] = _Allocation(storage.nbytes(), self.phase, source, alive)
        self._count(storage.nbytes())

    def _gone(self, key: int) -> None:
        self._count(-self.live.pop(key).nbytes)

    def _count(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def _storage(x: object) -> Any:
    strided = isinstance(x, torch.Tensor) and x.layout == torch.strided
    return x.untyped_storage() if strided else None  # type: ignore[attr-defined]


def _caller() -> str | None:
    """Source line that asked for memory; ``None`` where Triton's interpreter did, for itself."""
    found = None
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if filename.endswith(_INTERPRETER):
            return None
        if found is None and not _ours(filename, frame.f_code.co_name):
            found = _source(filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return found or "?"


class _CudaTracker:
    """Blocks of the caching allocator, from its own trace."""

    def __init__(self) -> None:
        self.live: dict[int, _Allocation] = {}
        self.now = self.peak = 0
        self.phase = ""

    @staticmethod
    def key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    def begin(self, phase: str) -> None:
        self.phase = phase
        # What was freed between two phases left no trace.
        active = _active_blocks(torch.cuda.memory_snapshot())
        self.live = {key: a for key, a in self.live.items() if key in active}
        self.now = self.peak = sum(a.nbytes for a in self.live.values())
        # Stacks are kept for blocks in use only: naming those of every event takes seconds.
        torch.cuda.memory._record_memory_history("all", context="state", stacks="python", clear_history=True)

    def end(self) -> None:
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        new = []
        for event in snapshot["device_traces"][torch.cuda.current_device()]:
            if event["action"] == "alloc":
                self.live[event["addr"]] = _Allocation(event["size"], self.phase, "?")
                new.append(event["addr"])
                self.now += event["size"]
                self.peak = max(self.peak, self.now)
            elif event["action"] == "free_requested" and event["addr"] in self.live:
                self.now -= self.live.pop(event["addr"]).nbytes
        blocks = _active_blocks(snapshot["segments"])
        for key in new:
            if key in self.live and key in blocks:
                self.live[key].source = _first_frame(blocks[key].get("frames", []))


def _active_blocks(segments: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Address -> block, of the blocks that a tensor holds."""
    blocks = (block for segment in segments for block in segment["blocks"])
    return {b["address"]: b for b in blocks if b["state"] == "active_allocated"}


def _first_frame(frames: list[dict[str, Any]]) -> str:
    for frame in frames:
        if not _ours(frame["filename"], frame["name"]):
            return _source(frame["filename"], frame["line"])
    return "?"


@dataclass
class _Entered:
    """One phase while it can still be entered again."""

    name: str
    planned: bool
    before: Usage
    done: Phase | None = field(default=None)


class AllocationLedger:
    """Attributes what is allocated after the profile run to its owner, and says if it will fit.

    Wrap the steps of an engine's start, the profile run first::

        ledger = AllocationLedger(model, budget_bytes=total)
        with ledger.phase("profile"):
            model(tokens)
        with ledger.phase("kv_cache", planned=True):
            allocate_kv_cache()
        with ledger.phase("capture"):
            capture_graphs()
        ledger.report()

    On CUDA it reads the caching allocator's own trace, whose recording it turns on for the length
    of a phase (and off afterwards, also where somebody else had turned it on), and the driver's
    count of free memory, so that memory the allocator does not own is seen as well. Elsewhere it
    is a dispatch mode. Outside a phase nothing is hooked. It allocates nothing on the device and
    changes no value.

    Args:
        module: whose attributes own memory. Its tensors say which kind of device is watched.
        budget_bytes: bytes of the device; on CUDA all of it unless given, else no verdict.
        usage: reads the device, where neither the driver nor the module's tensors can tell.

    Raises:
        ValueError: a budget smaller than what is in use already, or not positive.
    """

    _active: ClassVar[AllocationLedger | None] = None

    def __init__(
        self, module: nn.Module, *, budget_bytes: int | None = None, usage: Callable[[], Usage] | None = None
    ) -> None:
        check.require(isinstance(module, nn.Module), "module", "an nn.Module", type(module))
        held = [tensor for _, _, tensor in owned_tensors(module)]
        cuda = any(t.is_cuda for t in held)
        self.module = module
        self._tracker: _CudaTracker | _DispatchTracker
        self._tracker = _CudaTracker() if cuda else _DispatchTracker()
        self._weights = sum({id(_storage(t)): _storage(t).nbytes() for t in held}.values())
        self._usage = usage or (cuda_usage if cuda else self._live_usage)
        if budget_bytes is None and cuda:
            budget_bytes = torch.cuda.mem_get_info()[1]
        self._before = self._usage().used
        check.require(
            budget_bytes is None or budget_bytes >= max(1, self._before),
            "budget_bytes",
            f"at least the {self._before} bytes in use already",
            budget_bytes,
        )
        self.budget_bytes = budget_bytes
        self._phases: list[_Entered] = []

    def _live_usage(self) -> Usage:
        held = self._weights + self._tracker.now
        return Usage(held, held, held, 0)

    @contextmanager
    def phase(self, name: str, *, planned: bool = False) -> Iterator[None]:
        """Watch what is allocated inside. The first phase is the profile.

        Args:
            name: any; ``profile``, ``capture`` and ``serve`` must come in that order. The latest
                phase may be entered again.
            planned: what it allocates counts as known, such as the KV cache.

        Raises:
            ValueError: a ledger is active already, or the phase comes out of order.
        """
        active = AllocationLedger._active
        check.require(active is None, "phase", "no phase inside another, of this ledger or any", repr(name))
        names = [entered.name for entered in self._phases]
        if not names or name != names[-1]:
            self._check_order(name, names)
            self._phases.append(_Entered(name, planned, self._usage()))
        entered = self._phases[-1]
        AllocationLedger._active = self
        start = self._tracker.now
        try:
            self._tracker.begin(name)
            start = self._tracker.now
            yield
        finally:
            self._tracker.end()
            AllocationLedger._active = None
            transient = self._tracker.peak - max(start, self._tracker.now)
            entered.done = Phase(
                name,
                planned,
                entered.before,
                self._usage(),
                max(transient, entered.done.transient if entered.done else 0),
                {owner.name: owner.bytes for owner in self._owners()},
            )

    @staticmethod
    def _check_order(name: str, names: list[str]) -> None:
        check.require(name not in names, "phase", f"{names[-1:]} again or a new one", repr(name))
        later = ORDER[ORDER.index(name) + 1 :] if name in ORDER else ()
        before = [n for n in names if n in later]
        check.require(not before, "phase", f"{name!r} before {before}", "it after them")
        first_is_late = name == "profile" and names
        check.require(not first_is_late, "phase", "'profile' first", f"it after {names}")

    def _owners(self) -> tuple[Owner, ...]:
        live = self._tracker.live
        held_at: dict[int, dict[str, str]] = {}
        for name, holder, tensor in owned_tensors(self.module):
            if (key := self._tracker.key(tensor)) in live:
                held_at.setdefault(key, {}).setdefault(holder, name)
        groups: dict[tuple[str, str], _Group] = {}
        for key, found in list(live.items()):
            at = held_at.get(key)
            if at is None:
                group = groups.setdefault((UNOWNED, found.source), _Group())
                group.add(found, "")
                continue
            holder, name = next(iter(at.items()))
            group = groups.setdefault((name, ""), _Group())
            group.add(found, holder)
            # One tensor that several layers hold is not one tensor a layer.
            group.shared |= len(at) > 1
        order = {entered.name: i for i, entered in enumerate(self._phases)}
        layers = _same_place(self.module)
        owners = []
        for (name, _), group in groups.items():
            phase = min(group.phases, key=order.__getitem__)
            alone = group.shared or name == UNOWNED
            owners.append(
                Owner(
                    name=name,
                    source=group.sources[0],
                    phase=phase,
                    planned=self._phases[order[phase]].planned,
                    bytes_each=max(group.by_holder.values()),
                    holders=len(group.by_holder),
                    layers=1 if alone else max(layers.get(h, 1) for h in group.by_holder),
                    bytes=sum(group.by_holder.values()),
                )
            )
        return tuple(sorted(owners, key=lambda o: (-o.predicted, o.name)))

    def read(self) -> Report:
        """What is known now.

        Raises:
            ValueError: no phase was entered yet.
        """
        phases = tuple(entered.done for entered in self._phases if entered.done is not None)
        check.require(bool(phases), "report", "at least one phase before it", "none")
        owners = self._owners()
        headroom = None
        if self.budget_bytes is not None:
            usage = self._usage()
            to_come = sum(owner.predicted - owner.bytes for owner in owners)
            headroom = self.budget_bytes - usage.used + usage.releasable - to_come
        return Report(self.budget_bytes, self._before, phases, owners, headroom, phases[0].transient)

    def report(self) -> Report:
        """Print :meth:`read`, and return it."""
        report = self.read()
        print(report)
        return report
