"""The ranks of the server in miniature: they agree on each step and count what their padding contains.

Each rank is a process of its own, also when there is only one. Requests are dealt out in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from staleproof import check
from staleproof.cases import children
from staleproof.cases.children import ChildError
from staleproof.incidents.moe_routing.origin import Model, Scheduler, Setting, Step, replayed_size, trace

TIMEOUT_S = 90


@dataclass
class Counts:
    """Counts over the forward passes of all ranks. A pass is one rank's part of one step.

    Attributes:
        passes: forward passes.
        padded: passes with padding rows.
        with_nan: of these, passes with NaN in a padding row of some layer's attention output.
        with_inf: of these, passes with an infinity there.
        padding_rows: rows of padding, over all passes.
        idle: padded passes of a rank without a request; without metadata, attention fills its output
            with zeros (vLLM 0.18.1 ``mla_attention.py:575``).
        nan_numbers: NaN in padding rows, over all layers.
        inf_numbers: infinities in padding rows, over all layers.
        live_bad: passes with a NaN in a row of a request after the last layer.
        many_rows: passes whose experts get more than 256 rows, those of the other ranks included.
        sizes: captured size of each step, 0 for one without a graph; the same on all ranks.
    """

    passes: int = 0
    padded: int = 0
    with_nan: int = 0
    with_inf: int = 0
    padding_rows: int = 0
    idle: int = 0
    nan_numbers: int = 0
    inf_numbers: int = 0
    live_bad: int = 0
    many_rows: int = 0
    sizes: list[int] | None = None

    @property
    def mean_padding(self) -> float:
        """Padding rows per padded pass."""
        return self.padding_rows / self.padded if self.padded else 0.0


def agree(tokens: int, setting: Setting, device: str) -> Step | None:
    """The next step of a rank with ``tokens`` tokens, or ``None`` when no rank has any.

    With graphs every rank runs the captured size that the longest one needs. If any of them runs
    without, all do, each with its own tokens (vLLM's ``v1/worker/dp_utils.py``). A rank without
    requests runs a dummy step of one token.
    """
    own = max(tokens, 1)
    size = replayed_size(own) if setting.graphs else None
    padded, longest, without_graph, busy = size or 0, own, int(size is None), int(tokens > 0)
    if setting.ranks > 1:
        state = torch.tensor([padded, longest, without_graph, busy], device=device)
        dist.all_reduce(state, op=dist.ReduceOp.MAX)
        padded, longest, without_graph, busy = (int(value) for value in state.tolist())
    if not busy:
        return None
    return Step(own, longest, False) if without_graph else Step(padded, padded, True)


def serve_trace(setting: Setting, device: str, rank: int = 0) -> Counts:
    """This rank's passes over the whole trace, until no rank has a request left."""
    model = Model(setting, device, rank)
    scheduler = Scheduler(trace(setting.requests)[rank :: setting.ranks])
    counts, sizes, by_pass = Counts(), [], []
    while True:
        tokens = scheduler.step()
        step = agree(tokens, setting, device)
        if step is None:
            break
        sizes.append(step.rows if step.as_graph else 0)
        counts.passes += 1
        counts.many_rows += step.longest * setting.ranks > 256
        by_pass.append(model.forward(step, tokens))
        if step.rows > tokens:
            counts.padded += 1
            counts.padding_rows += step.rows - tokens
            counts.idle += tokens == 0
    for nan, inf, live_nan in torch.stack(by_pass).tolist():
        counts.with_nan += nan > 0
        counts.with_inf += inf > 0
        counts.nan_numbers += nan
        counts.inf_numbers += inf
        counts.live_bad += live_nan > 0
    counts.sizes = sizes
    return counts


def serve_ranks(settings: Sequence[Setting], device: str, *, timeout_s: float = TIMEOUT_S) -> list[Counts]:
    """Serve each setting, all of as many ranks, in that many processes: gloo, or NCCL on CUDA.

    Args:
        settings: servers, one after another; their ``ranks`` are equal.
        device: ``cpu``, or ``cuda`` with a GPU for each rank.
        timeout_s: for all of it; the processes are ended then.

    Returns:
        The ranks' counts added up, one a setting; ``sizes`` are those that all ranks ran.

    Raises:
        ValueError: settings of different ranks.
        ChildError: a rank failed, was too slow, or ran other sizes than its neighbour.
    """
    ranks = settings[0].ranks
    check.require(
        all(s.ranks == ranks for s in settings),
        "settings",
        f"{ranks} ranks each",
        [s.ranks for s in settings],
    )
    by_rank = children.call_ranks(_serve_as_rank, ranks, settings, device, timeout_s=timeout_s)
    return [add(of_setting) for of_setting in zip(*by_rank, strict=True)]


def _serve_as_rank(rank: int, meeting: str, settings: Sequence[Setting], device: str) -> list[Counts]:
    """One rank, in its own process: its counts, one a setting."""
    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    ranks = settings[0].ranks
    if ranks > 1:
        backend = "gloo" if device == "cpu" else "nccl"
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks)
    counts = [serve_trace(setting, device, rank) for setting in settings]
    if dist.is_initialized():
        dist.destroy_process_group()
    return counts


def add(counts: Sequence[Counts]) -> Counts:
    """The counts of all ranks of one server, added up.

    Raises:
        ChildError: graphs of different sizes.
    """
    total = Counts(sizes=counts[0].sizes)
    for one in counts:
        if one.sizes != total.sizes:
            raise ChildError("the ranks ran steps of different sizes: they did not agree")
        for name, value in asdict(one).items():
            if name != "sizes":
                setattr(total, name, getattr(total, name) + value)
    return total
