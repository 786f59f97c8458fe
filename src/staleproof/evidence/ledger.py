"""AllocationLedger: which memory was allocated after the memory profile, by whom, and whether it fits.

A serving engine chooses the size of its KV cache once, from the peak of one profile run. If a code
path that the profile did not reach allocates memory and keeps it, that memory was never counted, and a
later request runs out of memory although it did nothing wrong. A memory snapshot of torch shows the
blocks. The ledger adds three things: which attribute keeps them, how many more layers will allocate
one, and whether the profiled step still fits. It says so before that step runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from staleproof import check, device
from staleproof.evidence.allocations import (
    UNOWNED,
    CudaTracker,
    DispatchTracker,
    Usage,
    count_alike,
    cuda_usage,
    group_by_owner,
    owned_tensors,
    size_text,
    storage_of,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The phases of an engine's start, in order. Phases with other names may come at any time, but not first.
ORDER = ("profile", "capture", "serve")
# The caching allocator's smallest block. Less than that is bookkeeping, such as a graph's random state.
_BLOCK = 512


@dataclass(frozen=True)
class Owner:
    """Memory that one attribute keeps alive, summed over all layers that have the attribute.

    Attributes:
        name: module path and attribute, ``*`` for a layer's number: ``layers.*.attn._decode_out``;
            ``package.module:NAME`` for a global variable.
        source: file and line that allocated it.
        phase: the phase that allocated it first.
        planned: whether that phase was declared ``planned``.
        bytes_each: the most bytes that one layer has now.
        holders: number of layers that have such memory now.
        layers: number of layers of the same class at such a path; each is expected to allocate its own.
            1 if they share the memory.
        bytes: allocated now, all layers together.

    >>> buffer = Owner("layers.*.out", "mla.py:80", "serve", False, 2**20, holders=1, layers=61, bytes=2**20)
    >>> print(buffer)
    `layers.*.out`: 1024 KiB x 61 layers = 61 MiB
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
        """Bytes once every layer has allocated its own."""
        return max(self.bytes, self.bytes_each * self.layers)

    def __str__(self) -> str:
        each = (
            f"{size_text(self.bytes_each, short=True)} x {self.layers} layers = " if self.layers > 1 else ""
        )
        return f"`{self.name}`: {each}{size_text(self.predicted, short=True)}"


@dataclass(frozen=True)
class Phase:
    """One phase; it may have been entered several times in a row.

    Attributes:
        name: as given.
        planned: whether what it allocates counts as known.
        before: usage when it was first entered.
        after: usage when it was last left.
        transient: peak bytes allocated during the phase, less what stayed allocated after it (or was
            allocated before it, if that is more).
        by_owner: bytes allocated since the ledger began that are still in use at its end, by owner.
    """

    name: str
    planned: bool
    before: Usage
    after: Usage
    transient: int
    by_owner: Mapping[str, int]

    @property
    def outside(self) -> int:
        """Bytes taken from the device without the caching allocator, e.g. by NCCL or by another process."""
        return (self.after.used - self.after.reserved) - (self.before.used - self.before.reserved)

    @property
    def pools(self) -> int:
        """Bytes the allocator reserved and cannot return: graph pools and fragments."""
        return self.after.stuck - self.before.stuck


@dataclass(frozen=True)
class Report:
    """State of the ledger at one moment. ``str(report)`` is its text.

    Attributes:
        budget: bytes of the device, or ``None``.
        before: bytes in use when the ledger began.
        phases: in order.
        owners: what was allocated since the ledger began and is still in use, largest prediction first.
        headroom: budget left once every layer has allocated its own; ``None`` without a budget.
        required: transient bytes of the first phase. A step like it will need the same amount.
    """

    budget: int | None
    before: int
    phases: tuple[Phase, ...]
    owners: tuple[Owner, ...]
    headroom: int | None
    required: int

    @property
    def surprises(self) -> tuple[Owner, ...]:
        """Owners of at least one block allocated in a phase that is neither the first nor planned."""
        first = self.phases[0].name
        return tuple(o for o in self.owners if o.phase != first and not o.planned and o.predicted >= _BLOCK)

    @property
    def fits(self) -> bool | None:
        """Whether a step like the first phase still fits; ``None`` without a budget."""
        return None if self.headroom is None else self.headroom >= self.required

    @property
    def sentence(self) -> str:
        """The largest surprise and its consequence, in one line."""
        surprises = self.surprises
        text = f"{surprises[0]} allocated after profiling" if surprises else "nothing new after profiling"
        if self.headroom is None:
            return text
        verdict = "this fits" if self.fits else "this will not fit"
        return f"{text}; headroom {size_text(self.headroom, short=True)}; {verdict}"

    def to_json(self) -> str:
        """All fields and the derived numbers, as one JSON object."""
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
            for nbytes, what in (
                (phase.pools, "in graph pools and fragments"),
                (phase.outside, "outside the caching allocator"),
            ):
                if nbytes > self.required // 100:
                    lines.append(f"{phase.name}: {size_text(nbytes, short=True)} {what}")
        if self.headroom is not None:
            lines.append(f"a step as in {self.phases[0].name} needs {size_text(self.required, short=True)}")
        lines += [f"  {o.name} at {o.source}, first in {o.phase}" for o in self.owners]
        return "\n".join(lines)

    def figure(self) -> Figure:
        """Draw memory over phases, stacked by owner, with a line for the budget.

        Returns:
            A figure with a transparent background; ``.savefig("ledger.svg")`` writes it.

        Raises:
            MissingExtraError: matplotlib or seaborn is not installed.
        """
        device.need_workbook("matplotlib", "seaborn")
        import seaborn
        from matplotlib.figure import Figure

        # pyplot is left alone: it would keep the figure, and choose a backend for the process.
        ink, unit = "#808080", 2**30 if self.before > 2**30 else 2**20
        fig = Figure(figsize=(8, 3.6), facecolor="none")
        ax = fig.add_axes((0.09, 0.12, 0.56, 0.84), facecolor="none")
        names = [phase.name for phase in self.phases]
        stacks = {"before the ledger": [self.before] * len(names)}
        stacks |= {o.name: [p.by_owner.get(o.name, 0) for p in self.phases] for o in self.owners}
        stacks["pools, fragments, outside"] = [
            max(0, p.after.used - p.after.releasable - self.before - sum(p.by_owner.values()))
            for p in self.phases
        ]
        foot = [0.0] * len(names)
        colours = seaborn.color_palette("colorblind", len(stacks))
        for colour, (name, sizes) in zip(colours, stacks.items(), strict=True):
            heights = [size / unit for size in sizes]
            ax.bar(names, heights, bottom=foot, color=colour, label=name, width=0.6)
            foot = [a + b for a, b in zip(foot, heights, strict=True)]
        transient = [p.transient / unit for p in self.phases]
        hatched = ax.bar(names, transient, bottom=foot, label="freed again in the phase", width=0.6)
        for bar in hatched:
            bar.set(fill=False, edgecolor=ink, hatch="///", linewidth=0.5)
        if self.budget is not None:
            ax.axhline(self.budget / unit, color=ink, linestyle="--", linewidth=1, label="budget")
        ax.set_ylabel("GiB" if unit == 2**30 else "MiB", color=ink)
        ax.tick_params(colors=ink, labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["bottom", "left"]].set_color(ink)
        fig.legend(loc="center right", fontsize=8, frameon=False, labelcolor=ink)
        return fig


def _by_name(owners: tuple[Owner, ...]) -> dict[str, int]:
    """Bytes by owner; memory without an owner is one entry, whatever lines allocated it."""
    found: dict[str, int] = {}
    for owner in owners:
        found[owner.name] = found.get(owner.name, 0) + owner.bytes
    return found


@dataclass
class _Entered:
    """A phase that was entered. ``done`` is ``None`` until the phase has ended for the first time."""

    name: str
    planned: bool
    before: Usage
    done: Phase | None = None


class AllocationLedger:
    """Finds what is allocated after the profile run, who keeps it, and whether it will fit.

    Wrap each step of an engine's start in a phase, the profile run first. On CUDA the ledger records
    the caching allocator's trace during a phase and turns the recording off at its end, even if
    somebody else had turned it on. It also reads the driver's count of free memory, which includes what
    other libraries took. On a CPU it is a dispatch mode. Outside of phases nothing is recorded. The
    ledger allocates nothing on the device and changes no value.

    Args:
        module: the model; its attributes are the owners. It is watched on CUDA if its tensors
            are there, else on the CPU.
        budget_bytes: bytes of the device. Default on CUDA: all of the device's memory. Default
            elsewhere: none, and then the report gives no verdict.
        usage: reads the device's usage; for the simulated devices of tests.

    Raises:
        ValueError: ``module`` is no module; the budget is not positive, or smaller than what is in use.

    >>> import torch
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, x, decode):
    ...         if decode and not hasattr(self, "out"):
    ...             self.out = torch.zeros(256, 1024)  # 1 MiB that the profile run never saw
    ...         return x
    >>> layers = torch.nn.ModuleList(Attention() for _ in range(4))
    >>> ledger = AllocationLedger(layers, budget_bytes=3 * 2**20)
    >>> with ledger.phase("profile"):
    ...     x = [layer(torch.ones(8), decode=False) for layer in layers]
    >>> with ledger.phase("serve"):
    ...     x = layers[0](torch.ones(8), decode=True)
    >>> print(ledger.read().sentence)
    `*.out`: 1024 KiB x 4 layers = 4 MiB allocated after profiling; headroom -1 MiB; this will not fit
    """

    _active: ClassVar[AllocationLedger | None] = None

    def __init__(
        self, module: nn.Module, *, budget_bytes: int | None = None, usage: Callable[[], Usage] | None = None
    ) -> None:
        check.require(isinstance(module, nn.Module), "module", "an nn.Module", type(module))
        tensors = [tensor for _, _, tensor in owned_tensors(module)]
        cuda = any(t.is_cuda for t in tensors)
        self.module = module
        self._tracker: CudaTracker | DispatchTracker = CudaTracker() if cuda else DispatchTracker()
        self._weights = sum({id(s): s.nbytes() for s in map(storage_of, tensors)}.values())
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
        used = self._weights + self._tracker.now
        return Usage(used, used, used, 0)

    @contextmanager
    def phase(self, name: str, *, planned: bool = False) -> Iterator[None]:
        """Record what is allocated inside a ``with``. The first phase is the profile.

        Args:
            name: any name; ``profile``, ``capture`` and ``serve`` must come in that order. The latest
                phase may be entered again.
            planned: what it allocates counts as known, such as the KV cache.

        Raises:
            ValueError: inside another phase, or out of order.
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
                _by_name(self._owners()),
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
        order = {entered.name: i for i, entered in enumerate(self._phases)}
        alike = count_alike(self.module)
        owners = []
        for (name, _), group in group_by_owner(self.module, self._tracker).items():
            phase = min(group.phases, key=order.__getitem__)
            single = group.shared or name == UNOWNED
            owners.append(
                Owner(
                    name=name,
                    source=group.sources[0],
                    phase=phase,
                    planned=self._phases[order[phase]].planned,
                    bytes_each=max(group.by_layer.values()),
                    holders=len(group.by_layer),
                    layers=1 if single else max(alike.get(layer, 1) for layer in group.by_layer),
                    bytes=sum(group.by_layer.values()),
                )
            )
        return tuple(sorted(owners, key=lambda o: (-o.predicted, o.name)))

    def read(self) -> Report:
        """The state of the ledger now.

        Raises:
            ValueError: no phase has ended yet.
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
        """Print what :meth:`read` returns, and return it."""
        report = self.read()
        print(report)
        return report
