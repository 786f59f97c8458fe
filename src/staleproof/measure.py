"""Time on the device: launches captured in a CUDA graph, replayed between two events.

The graph keeps host time out of the figures. Each row says where its inputs were before the call:
``cold`` in device memory, ``warm`` in the L2. Large inputs take turns until they exceed three times
the L2. Small ones would need thousands of copies for that, so they are measured in both ways. Each
benchmark first checks the result, from an output filled with NaN: no speed is reported for a wrong
result.
"""

from __future__ import annotations

import ctypes
import datetime
import runpy
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from staleproof import check, device, machine
from staleproof.device import DeviceError, Provenance
from staleproof.lab import SCHEMA
from staleproof.ops.cuda_runtime import cudart

LAUNCHES = 20
REPLAYS = 30
# Input sets that may take turns in one graph. With more, capturing takes longer than measuring.
MOST_SETS = 128
# Rounds in which the host is timed, and calls a round: fewer than the launches that CUDA queues, so that
# the calling thread never waits for the device.
HOST_ROUNDS, HOST_CALLS = 60, 20
COLD, WARM = "cold", "warm"
_QUANTILES = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)


class WrongResult(AssertionError):
    """A kernel of ours gave a wrong result in a benchmark: nothing is recorded."""


@dataclass(frozen=True)
class Times:
    """Microseconds a launch over the replays of one graph."""

    p50: float
    p20: float
    p80: float


def quantiles(each: Sequence[float]) -> Times:
    """Times of their median and of their 20th and 80th percentile.

    >>> quantiles([1.0, 2.0, 3.0])
    Times(p50=2.0, p20=1.4, p80=2.6)
    """
    p20, p50, p80 = torch.tensor(each, dtype=torch.float64).quantile(_QUANTILES).tolist()
    return Times(p50=p50, p20=p20, p80=p80)


def times_between(marks: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]], launches: int = 1) -> Times:
    """Quantiles of the time between each pair of events, divided by ``launches`` calls.

    The device must have reached all events.
    """
    return quantiles([start.elapsed_time(end) * 1000 / launches for start, end in marks])


def require_gpu() -> None:
    """Check that this process runs kernels on a GPU.

    Raises:
        DeviceError: it does not.
    """
    if device.provenance() is not Provenance.MEASURED:
        raise DeviceError("timings need a CUDA device; Triton's interpreter says nothing about time")


def checked(provider: str, ok: bool, why: str) -> bool:
    """Whether this provider may be timed: ``ok``, unless it is ours.

    Args:
        provider: as in :func:`row`; it is ours if its name contains ``staleproof``.
        ok: whether its result is right.
        why: what is wrong with it if not.

    Raises:
        WrongResult: ours is wrong.

    >>> checked("a peer", False, "2 of 8 rows differ")
    a peer: refused, 2 of 8 rows differ
    False
    """
    if not ok and "staleproof" in provider:
        raise WrongResult(f"{provider}: {why}")
    if not ok:
        print(f"{provider}: refused, {why}")
    return ok


@dataclass(frozen=True)
class Rotation:
    """How the inputs of a benchmark take turns.

    Attributes:
        sets: input sets to make.
        caches: :data:`COLD`, or :data:`WARM` and :data:`COLD`: how they are to be measured.
    """

    sets: int
    caches: tuple[str, ...]


def l2_bytes() -> int:
    """Size of the current device's L2."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def rotation(bytes_each: int, l2: int | None = None) -> Rotation:
    """Choose how many input sets take turns, and whether they are measured warm too.

    Args:
        bytes_each: bytes of one set that a call reads.
        l2: size of the L2; that of the current device by default.

    Returns:
        As many sets as exceed three times the L2 together, measured cold. If that takes more than
        :data:`MOST_SETS`, then :data:`LAUNCHES` of them, which fit into half of the L2, measured warm
        and cold.

    >>> rotation(30 * 2**20, l2=50 * 2**20)
    Rotation(sets=6, caches=('cold',))
    >>> rotation(2**15, l2=50 * 2**20)
    Rotation(sets=20, caches=('warm', 'cold'))
    """
    needed = 3 * (l2_bytes() if l2 is None else l2) // max(bytes_each, 1) + 1
    return Rotation(needed, (COLD,)) if needed <= MOST_SETS else Rotation(LAUNCHES, (WARM, COLD))


@cache
def _more_than_l2(device_index: int) -> torch.Tensor:
    return torch.zeros(3 * l2_bytes() // 4, dtype=torch.int32, device=f"cuda:{device_index}")


def read_more_than_l2() -> None:
    """Read three times the L2, so that it holds nothing else. Reading leaves no lines to write back."""
    _more_than_l2(torch.cuda.current_device()).sum()


def launches_for(sets: int) -> int:
    """Launches in a graph: the multiple of ``sets`` from :data:`LAUNCHES` on.

    With any other number a replay would begin with sets that the last one has just read.

    >>> launches_for(1), launches_for(15), launches_for(64)
    (20, 30, 64)
    """
    return -(-LAUNCHES // sets) * sets


def graph_times(
    calls: Sequence[Callable[[], object]],
    *,
    launches: int | None = None,
    replays: int = REPLAYS,
    before: Callable[[], object] | None = None,
) -> Times:
    """Microseconds a call, from a CUDA graph of calls that take turns.

    Args:
        calls: one closure for each input set; each enqueues the same work on the current stream.
        launches: calls in the graph; see :func:`launches_for`.
        replays: timed replays of the graph, after three untimed ones.
        before: enqueues untimed work before each replay.

    Raises:
        DeviceError: no GPU.
    """
    require_gpu()
    launches = launches or launches_for(len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Compiling and setting up at the first call are not permitted in a capture.
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            calls[index % len(calls)]()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)
    ]
    for _ in range(3):
        graph.replay()
    for start, end in marks:
        if before is not None:
            before()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return times_between(marks, launches)


def cached_times(calls: Sequence[Callable[[], object]], turns: Rotation) -> Iterator[tuple[str, Times]]:
    """Measure calls in each of the ways that :func:`rotation` chose.

    Args:
        calls: as for :func:`graph_times`; ``turns.sets`` of them.
        turns: what :func:`rotation` returned for the bytes that one call reads.

    Yields:
        :data:`WARM` or :data:`COLD`, and microseconds a call.
    """
    if len(calls) != turns.sets:
        check.fail("calls", f"{turns.sets}, one a set", len(calls))
    for where in turns.caches:
        # Sets that exceed the L2 push each other out. Otherwise it is emptied before each replay, in
        # which every set is then read once.
        emptied = where == COLD and WARM in turns.caches
        yield where, graph_times(calls, before=read_more_than_l2 if emptied else None)


def host_times(
    calls: Mapping[str, Callable[[], object]], *, rounds: int = HOST_ROUNDS, each: int = HOST_CALLS
) -> dict[str, Times]:
    """Microseconds of the calling thread a call, without the time of the device.

    The calls take turns in each round, because a host's speed drifts: of two calls that were timed one
    after the other, either can look the faster.

    Args:
        calls: closures by name; each enqueues a few kernels at most, and does not wait for the device.
        rounds: timed rounds, after three untimed ones.
        each: calls of one closure in a round, back to back, from an idle device.

    >>> sorted(host_times({"nothing": lambda: None, "a sum": lambda: sum(range(9))}, rounds=2))
    ['a sum', 'nothing']
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            started = time.perf_counter_ns()
            for _ in range(each):
                call()
            if turn >= 3:
                found[name].append((time.perf_counter_ns() - started) / 1000 / each)
    return {name: quantiles(times) for name, times in found.items()}


def memset_async(x: torch.Tensor, value: int = 0) -> None:
    """``cudaMemsetAsync`` of a contiguous tensor: the reference of a kernel that clears.

    Raises:
        RuntimeError: the CUDA runtime reported an error.
    """
    status = cudart().cudaMemsetAsync(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int(value),
        ctypes.c_size_t(x.numel() * x.element_size()),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    if status != 0:
        raise RuntimeError(f"cudaMemsetAsync: error {status}")


def row(
    incident: str,
    kernel: str,
    provider: str,
    mode: str,
    x_name: str,
    x_value: int,
    times: Times,
    bytes_moved: int,
    *,
    cache: str | None = None,
) -> dict[str, Any]:
    """One line of ``measurements.jsonl``.

    Args:
        incident: the incident it belongs to.
        kernel: public name of the kernel measured.
        provider: whose implementation: ``staleproof``, a peer, or a limit such as memset.
        mode: what does not vary between the rows of one plot, in words.
        x_name: what varies, e.g. ``tokens``.
        x_value: its value here.
        times: microseconds a call.
        bytes_moved: fewest bytes the call must move through device memory.
        cache: :data:`WARM` or :data:`COLD`, where the inputs were before the call. It becomes a part
            of ``mode``, because rows of two runs are compared by that.
    """
    machine = device.machine()
    return {
        "schema": SCHEMA,
        "incident": incident,
        "kernel": kernel,
        "provider": provider,
        "mode": f"{mode}, {cache}" if cache else mode,
        "x_name": x_name,
        "x_value": x_value,
        "p50": round(times.p50, 3),
        "p20": round(times.p20, 3),
        "p80": round(times.p80, 3),
        "unit": "us",
        "bytes": bytes_moved,
        "cache": cache,
        "machine": machine.name,
        "driver": machine.driver,
        "torch": machine.torch,
        "triton": machine.triton,
        "flashinfer": machine.flashinfer,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


@dataclass(frozen=True)
class Timing:
    """One case of a benchmark: what several providers take for the same work on the same inputs.

    Attributes:
        incident, kernel, mode, x_name, x_value, moved: as for :func:`row`.
        providers: provider -> closures, one for each set of inputs; or the times, where something else than
            :func:`graph_times` took them.
        turns: how the sets take turns, see :func:`rotation`; or, for sets that are timed in one way, the word
            for where the inputs are, or ``None``.
        wrong: takes a provider, calls it, and returns what is wrong with its result, or ``""``. Called for
            all but limits, which compute nothing.
        more: provider -> further fields of its rows, after ``wrong``.
    """

    incident: str
    kernel: str
    mode: str
    x_name: str
    x_value: int
    moved: int
    providers: Mapping[str, Sequence[Callable[[], object]] | Times]
    turns: Rotation | str | None
    wrong: Callable[[str], str]
    more: Callable[[str], Mapping[str, Any]] = lambda provider: {}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Check each provider, then time it; one whose result is wrong is left out.

        Raises:
            WrongResult: ours is wrong.
        """
        for provider, calls in self.providers.items():
            why = "" if provider.startswith("limit") else self.wrong(provider)
            if not checked(provider, not why, f"{why}, {self.mode}, {self.x_value} {self.x_name}"):
                continue
            for where, times in self._times(calls):
                case = self.incident, self.kernel, provider, self.mode, self.x_name, self.x_value
                yield row(*case, times, self.moved, cache=where) | dict(self.more(provider))

    def _times(self, calls: Sequence[Callable[[], object]] | Times) -> Iterable[tuple[str | None, Times]]:
        turns = self.turns
        if isinstance(calls, Times):
            return [(COLD if isinstance(turns, Rotation) else turns, calls)]
        return cached_times(calls, turns) if isinstance(turns, Rotation) else [(turns, graph_times(calls))]


def main(rows: Callable[[], Sequence[dict[str, Any]]], *, baseline: str) -> int:
    """Run a benchmark as a script: measure, then print the rows as a table.

    Returns:
        The exit code: 0; 1 if a kernel of ours gave a wrong result; 2 without a GPU. Then one line on stderr
        says why, and nothing is timed.
    """
    try:
        measured = rows()
    except (DeviceError, WrongResult) as error:
        print(" ".join(str(error).splitlines()), file=sys.stderr)
        return 1 if isinstance(error, WrongResult) else 2
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print_rows(measured, baseline=baseline, width=width)
    return 0


def benchmark_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Run one file of ``benchmarks/``, giving each row the file's name and the commit of the checkout.

    Args:
        path: a file with a function ``rows()``.

    Raises:
        WrongResult: a kernel of ours gave a wrong result.
    """
    for measured in runpy.run_path(str(path))["rows"]():
        yield measured | {"benchmark": path.stem, "commit": machine.commit()}


# Columns of a provider's name in a terminal of 80.
NARROW = 33


def print_rows(rows: Sequence[dict[str, Any]], *, baseline: str, width: int | None = None) -> None:
    """Print rows as a table.

    Args:
        rows: as :func:`row` makes them.
        baseline: the provider that the last column divides by: in the same case if it was measured
            there, otherwise in the same mode.
        width: columns of a terminal. If a row does not fit, mode and case stand above their rows.
    """
    ratio_name = "x ours" if baseline == "staleproof" else f"x {baseline}"
    numbers = f"{'p50 us':>9} {'p20':>9} {'p80':>9} {'TB/s':>6} {ratio_name:>7}"
    head = f"{'mode':<52} {'case':<16} {'provider':<34} {numbers}"
    is_narrow = width is not None and width < len(head)
    print(f"{'provider':<{NARROW}} {numbers}" if is_narrow else head)
    ours = {r["mode"]: r["p50"] for r in rows if r["provider"] == baseline}
    ours |= {(r["mode"], r["x_value"]): r["p50"] for r in rows if r["provider"] == baseline}
    above = ""
    for r in rows:
        base = ours.get((r["mode"], r["x_value"]), ours.get(r["mode"]))
        ratio = f"{r['p50'] / base:7.2f}" if base else "      -"
        rate = r["bytes"] / r["p50"] / 1e6
        values = f"{r['p50']:9.2f} {r['p20']:9.2f} {r['p80']:9.2f} {rate:6.2f} {ratio}"
        case = f"{r['x_name']} {r['x_value']}"
        if not is_narrow:
            print(f"{r['mode']:<52} {case:<16} {r['provider']:<34} {values}")
            continue
        if above != (above := f"{r['mode']}, {case}"):
            print(f"\n{above}")
        name = r["provider"]
        if len(name) > NARROW:
            print(name)
            name = ""
        print(f"{name:<{NARROW}} {values}")
