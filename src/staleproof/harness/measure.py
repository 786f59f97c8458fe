"""Timing on the device: captured launches, replayed, between device events.

A CUDA graph holds the launches, so that no host time is in the figures; inputs rotate through more
memory than the L2 holds, so that they come from memory as they do in a model; and the result is
checked in the same run, from a poisoned output: a wrong kernel gets no speed.
"""

from __future__ import annotations

import ctypes
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from staleproof import device
from staleproof.device import DeviceError, Provenance
from staleproof.harness.findings import SCHEMA, source_digest
from staleproof.ops.cuda_runtime import cudart

LAUNCHES = 20
REPLAYS = 30


class WrongResult(AssertionError):
    """A kernel whose speed was asked for gave a wrong result."""


@dataclass(frozen=True)
class Times:
    """Microseconds a launch over the replays of one graph."""

    p50: float
    p20: float
    p80: float


def times_between(marks: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]], launches: int = 1) -> Times:
    """Quantiles of the time between each pair of events, all reached, over ``launches`` calls."""
    each = torch.tensor(
        [start.elapsed_time(end) * 1000 / launches for start, end in marks], dtype=torch.float64
    )
    p20, p50, p80 = each.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return Times(p50=p50, p20=p20, p80=p80)


def require_gpu() -> None:
    """Refuse to time on a machine that cannot.

    Raises:
        DeviceError: this process runs no kernels on a GPU.
    """
    if device.provenance() is not Provenance.MEASURED:
        raise DeviceError("timings need a CUDA device; the interpreter is silent on time")


def sets_beyond_l2(bytes_each: int) -> int:
    """How many input sets of this size rotate through three times the L2."""
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1, min(LAUNCHES, -(-3 * l2 // max(bytes_each, 1))))


def graph_times(
    calls: Sequence[Callable[[], object]], *, launches: int = LAUNCHES, replays: int = REPLAYS
) -> Times:
    """Time ``launches`` calls, taken from ``calls`` in turn, captured in one CUDA graph.

    Args:
        calls: one closure an input set, each enqueuing the same work on the current stream.
        launches: calls in the graph.
        replays: timed replays of the graph, after three untimed ones.

    Raises:
        DeviceError: no GPU.
    """
    require_gpu()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Compilation and first-use set-up stay outside the capture.
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            calls[index % len(calls)]()
    for _ in range(3):
        graph.replay()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)
    ]
    for start, end in marks:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return times_between(marks, launches)


def memset_async(x: torch.Tensor, value: int = 0) -> None:
    """``cudaMemsetAsync`` over a contiguous tensor: the ceiling of any clearing kernel.

    Raises:
        RuntimeError: the runtime refused.
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
) -> dict[str, Any]:
    """One line of ``measurements.jsonl``.

    Args:
        incident: folder of the kernel, for its source digest.
        kernel: public name of the kernel measured.
        provider: whose implementation: ``staleproof``, a peer, or a limit such as memset.
        mode: the fixed part of the case, in words.
        x_name: what varies between the rows of one kernel and mode.
        x_value: its value here.
        times: microseconds a call.
        bytes_moved: fewest bytes the call must move through device memory.
    """
    machine = device.machine()
    return {
        "schema": SCHEMA,
        "incident": incident,
        "kernel": kernel,
        "provider": provider,
        "mode": mode,
        "x_name": x_name,
        "x_value": x_value,
        "p50": round(times.p50, 3),
        "p20": round(times.p20, 3),
        "p80": round(times.p80, 3),
        "unit": "us",
        "bytes": bytes_moved,
        "machine": machine.name,
        "driver": machine.driver,
        "torch": machine.torch,
        "triton": machine.triton,
        "flashinfer": machine.flashinfer,
        "source_digest": source_digest(incident),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def print_rows(rows: Sequence[dict[str, Any]], *, baseline: str) -> None:
    """Print rows as a table, each beside its ratio to ``baseline`` in its case, or in its mode."""
    print(
        f"{'mode':<44} {'case':<16} {'provider':<34} {'p50 us':>9} {'p20':>9} {'p80':>9} "
        f"{'TB/s':>6} {'x ours':>7}"
    )
    ours = {r["mode"]: r["p50"] for r in rows if r["provider"] == baseline}
    ours |= {(r["mode"], r["x_value"]): r["p50"] for r in rows if r["provider"] == baseline}
    for r in rows:
        base = ours.get((r["mode"], r["x_value"]), ours.get(r["mode"]))
        ratio = f"{r['p50'] / base:7.2f}" if base else "      -"
        rate = r["bytes"] / r["p50"] / 1e6
        print(
            f"{r['mode']:<44} {r['x_name'] + ' ' + str(r['x_value']):<16} {r['provider']:<34} "
            f"{r['p50']:9.2f} {r['p20']:9.2f} {r['p80']:9.2f} {rate:6.2f} {ratio}"
        )
