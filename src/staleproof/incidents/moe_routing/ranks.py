"""The ranks of the miniature server: they agree on each step and count bad values in their padding.

Each rank is a process of its own, even if there is only one. Requests are assigned to the ranks in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from staleproof import child
from staleproof.child import ChildError
from staleproof.graph import capture_sizes, padded_size
from staleproof.incidents.moe_routing.origin import Model, Scheduler, Setting, Step, trace

TIMEOUT_S = 90


# Counts over the forward passes of all ranks. A pass is one rank's part of one step. An idle rank has no
# request; without metadata, attention then fills its output with zeros (vLLM 0.18.1 mla_attention.py:575).
COUNTS = {
    "passes": "forward passes",
    "padded": "passes with padding rows",
    "with_nan": "of these, passes with NaN in a padding row of some layer's attention output",
    "with_inf": "of these, passes with an infinity there",
    "padding_rows": "rows of padding, over all passes",
    "idle": "padded passes of a rank without a request",
    "nan_numbers": "NaN in padding rows, over all layers",
    "inf_numbers": "infinities in padding rows, over all layers",
    "live_bad": "passes with a NaN in a row of a request after the last layer",
    "many_rows": "passes whose experts get more than 256 rows, those of the other ranks included",
}
LARGEST_SIZE = capture_sizes()[-1]


class Passes(NamedTuple):
    """What one rank, or all ranks of a server, ran.

    Attributes:
        sizes: captured size of each step, 0 for one without a graph; the same on all ranks.
        counts: by the names of :data:`COUNTS`.
    """

    sizes: list[int]
    counts: dict[str, int]


def agree(tokens: int, setting: Setting, device: str) -> Step | None:
    """The next step of a rank with ``tokens`` tokens, or ``None`` when no rank has any.

    With graphs every rank runs the captured size that the longest one needs. If any of them runs
    without, all do, each with its own tokens (vLLM's ``v1/worker/dp_utils.py``). A rank without
    requests runs a dummy step of one token.
    """
    own = max(tokens, 1)
    size = padded_size(own) if setting.graphs and own <= LARGEST_SIZE else None
    padded, longest, without_graph, busy = size or 0, own, int(size is None), int(tokens > 0)
    if setting.ranks > 1:
        state = torch.tensor([padded, longest, without_graph, busy], device=device)
        dist.all_reduce(state, op=dist.ReduceOp.MAX)
        padded, longest, without_graph, busy = (int(value) for value in state.tolist())
    if not busy:
        return None
    return Step(own, longest, False) if without_graph else Step(padded, padded, True)


def serve_trace(setting: Setting, device: str, rank: int = 0) -> Passes:
    """This rank's passes over the whole trace, until no rank has a request left."""
    model = Model(setting, device, rank)
    scheduler = Scheduler(trace(setting.requests)[rank :: setting.ranks])
    counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
    sizes, by_pass = [], []
    while True:
        tokens = scheduler.step()
        step = agree(tokens, setting, device)
        if step is None:
            break
        sizes.append(step.rows if step.as_graph else 0)
        by_pass.append(model.forward(step, tokens))
        padding = step.rows - tokens
        counts["passes"] += 1
        counts["many_rows"] += step.longest * setting.ranks > 256
        counts["padded"] += padding > 0
        counts["padding_rows"] += padding
        counts["idle"] += padding > 0 and tokens == 0
    for nan, inf, live_nan in torch.stack(by_pass).tolist():
        counts["with_nan"] += nan > 0
        counts["with_inf"] += inf > 0
        counts["nan_numbers"] += nan
        counts["inf_numbers"] += inf
        counts["live_bad"] += live_nan > 0
    return Passes(sizes, counts)


def serve_ranks(settings: Sequence[Setting], device: str, *, timeout_s: float = TIMEOUT_S) -> list[Passes]:
    """Serve each setting with one process per rank: gloo, or NCCL on CUDA.

    Args:
        settings: servers, one after another; their ``ranks`` are equal.
        device: ``cpu``, or ``cuda`` with a GPU for each rank.
        timeout_s: for all settings together; then the processes are ended.

    Returns:
        For each setting, the counts summed over the ranks.

    Raises:
        ChildError: a rank failed, was too slow, or ran other sizes than its neighbour.
    """
    ranks = settings[0].ranks
    by_rank = child.call_ranks(_serve_as_rank, ranks, settings, device, timeout_s=timeout_s)
    return [add(of_setting) for of_setting in zip(*by_rank, strict=True)]


def _multiply_in_float32() -> None:
    """On a CPU without AVX-512, give this process another product of bfloat16 matrices.

    Torch's own takes a hundred times as long there as one of float32. This one adds in float32 and rounds
    once, as torch's does.
    """
    if "AVX512" in torch.backends.cpu.get_cpu_capability():
        return
    multiply = torch.matmul

    def product(a: Any, b: Any, *, out: Any = None) -> Any:
        if not a.dtype == b.dtype == torch.bfloat16:
            return multiply(a, b, out=out)
        result = multiply(a.float(), b.float()).bfloat16()
        return result if out is None else out.copy_(result)

    torch.Tensor.__matmul__ = torch.matmul = product  # type: ignore[method-assign,assignment]


def _serve_as_rank(rank: int, meeting: str, settings: Sequence[Setting], device: str) -> list[Passes]:
    """Run one rank in its own process; returns its passes for each setting."""
    torch.set_num_threads(1)
    if device == "cpu":
        _multiply_in_float32()
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    ranks = settings[0].ranks
    if ranks > 1:
        backend = "gloo" if device == "cpu" else "nccl"
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks)
    served = [serve_trace(setting, device, rank) for setting in settings]
    if dist.is_initialized():
        dist.destroy_process_group()
    return served


def add(by_rank: Sequence[Passes]) -> Passes:
    """The counts of all ranks of one server, added up.

    Raises:
        ChildError: graphs of different sizes.
    """
    sizes = by_rank[0].sizes
    if any(one.sizes != sizes for one in by_rank):
        raise ChildError("the ranks ran steps of different sizes: they did not agree")
    return Passes(sizes, {name: sum(one.counts[name] for one in by_rank) for name in COUNTS})
