"""Where the NaN comes from: padding rows of an attention output that nobody writes.

In piecewise graphs the attention output is ``torch.empty(num_tokens_padded, ...)`` and attention
writes the live rows (vLLM 0.18.1 ``attention.py:419``). Here a server in miniature takes those
steps over a pool of memory that its tensors share, and what the padding rows hold is looked at, not
assumed. Ranks of a data-parallel server are processes; each runs ``python -m`` of this module.

The requests are generated: as long as GSM8K's, all due at once, dealt out to the ranks in turn.
"""

from __future__ import annotations

import bisect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from staleproof import check
from staleproof.harness.graph import capture_sizes

REQUESTS = 96
# Per rank, as ``max_num_seqs`` and ``max_num_batched_tokens`` are.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 32, 2048
HIDDEN, HEADS, HEAD_DIM, EXPERTS, INTER, LAYERS, TOP_K = 128, 4, 128, 8, 64, 2, 2
ATTENTION = HEADS * HEAD_DIM
POOL_BYTES = 64 * 2**20
SIZES = capture_sizes()
RANKS_TIMEOUT_S = 90


class RankError(RuntimeError):
    """The ranks' processes gave no answer, or answers that do not belong together."""


@dataclass(frozen=True)
class Request:
    """Tokens of one request: new ones of its prompt, and those it answers."""

    prompt: int
    answer: int


def trace(requests: int = REQUESTS, seed: int = 0) -> list[Request]:
    """Lengths as in a GSM8K evaluation whose examples are in the prefix cache.

    Questions of 40 to 200 tokens, median 90; answers of 16 to 256, median 100, both log-normal.
    """
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(2, requests, generator=generator)
    prompts = (90 * (0.35 * z[0]).exp()).clamp(40, 200).int().tolist()
    answers = (100 * (0.5 * z[1]).exp()).clamp(16, 256).int().tolist()
    return [Request(p, a) for p, a in zip(prompts, answers, strict=True)]


class Scheduler:
    """One rank's requests: decode first, then prompts in chunks, up to both limits.

    Args:
        requests: in the order in which they start.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.waiting = list(requests)
        # Prompt tokens and answer tokens that are left of each running request.
        self.running: list[list[int]] = []

    def step(self) -> int:
        """Tokens of the next step; 0 when nothing is left."""
        while self.waiting and len(self.running) < MAX_NUM_SEQS:
            request = self.waiting.pop(0)
            self.running.append([request.prompt, request.answer])
        budget = MAX_NUM_BATCHED_TOKENS
        for left in sorted(self.running, key=lambda left: left[0] > 0):
            tokens = min(left[0] or 1, budget)
            budget -= tokens
            if left[0]:
                left[0] -= tokens
            # The chunk that ends a prompt brings the first token of the answer.
            if tokens and not left[0]:
                left[1] -= 1
        self.running = [left for left in self.running if left[1] > 0]
        return MAX_NUM_BATCHED_TOKENS - budget


def replayed_size(tokens: int) -> int | None:
    """The captured size that holds ``tokens``, or ``None``: then a step runs without a graph."""
    return SIZES[bisect.bisect_left(SIZES, tokens)] if tokens <= SIZES[-1] else None


class Memory(Protocol):
    """Where activations come from and go to."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Memory that nobody has written for this tensor."""

    def free(self, x: torch.Tensor) -> None:
        """Give a whole tensor back."""


class Pool:
    """A caching allocator: blocks of 512 bytes, best fit, split, and merged when free again.

    It starts as zeros and hands memory on as its last tenant left it, as CUDA's does; the layout
    and with it the answer does not depend on what else the process did.
    """

    def __init__(self, device: str, size: int = POOL_BYTES) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.free_blocks = {0: size}
        self.used: dict[int, int] = {}

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Memory that nobody has written for this tensor."""
        wanted = torch.Size(shape).numel() * dtype.itemsize
        size = -(-wanted // 512) * 512
        fitting = [(have, at) for at, have in self.free_blocks.items() if have >= size]
        have, at = min(fitting)
        del self.free_blocks[at]
        if have > size:
            self.free_blocks[at + size] = have - size
        self.used[at] = size
        return self.memory[at : at + wanted].view(dtype).view(shape)

    def free(self, x: torch.Tensor) -> None:
        """Give a whole tensor back."""
        at = x.data_ptr() - self.memory.data_ptr()
        size = self.used.pop(at)
        before = next((b for b, have in self.free_blocks.items() if b + have == at), None)
        if before is not None:
            size, at = size + self.free_blocks.pop(before), before
        size += self.free_blocks.pop(at + size, 0)
        self.free_blocks[at] = size


class CachingAllocator:
    """PyTorch's own allocator, asked and given back to in the same order."""

    def __init__(self, device: str) -> None:
        self.device = device

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Memory that nobody has written for this tensor."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def free(self, x: torch.Tensor) -> None:
        """Give a whole tensor back."""
        x.untyped_storage().resize_(0)


@dataclass(frozen=True)
class Setting:
    """One server and what is different about it.

    Attributes:
        ranks: 1, or data-parallel ranks.
        expert_parallel: whether the ranks share out the experts (DEP) or a slice of each (DP).
        wide: whether normalisation keeps fp32 intermediates, as fused kernels' fallbacks do.
        zeroed: whether the attention output is zeroed before attention writes to it.
        graphs: whether steps replay captured sizes at all.
        allocator: ``pool``, or ``torch`` for PyTorch's own.
        requests: of the trace.
    """

    ranks: int = 1
    expert_parallel: bool = False
    wide: bool = True
    zeroed: bool = False
    graphs: bool = True
    allocator: str = "pool"
    requests: int = REQUESTS


@dataclass
class Counts:
    """What the forward passes of all ranks showed. A pass is one rank's part of one step.

    Attributes:
        passes: forward passes.
        padded: those with padding rows.
        with_nan: of these, with NaN in a padding row of some layer's attention output.
        with_inf: likewise with an infinity.
        padding_rows: rows of padding, over all passes.
        idle: padded passes of a rank without a request; its attention output is all zeros, since
            without metadata attention fills it (vLLM 0.18.1 ``mla_attention.py:575``).
        nan_numbers: NaN in those rows, each layer counted.
        inf_numbers: infinities, likewise.
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
        """Padding rows of a padded pass."""
        return self.padding_rows / self.padded if self.padded else 0.0


class Model:
    """Two layers as of a Qwen3 MoE: normalisation, attention, router, experts. Weights are fixed.

    Attention itself is the value of the row's own token: what the *padding* rows get is the
    question, and no attention writes those.
    """

    def __init__(self, setting: Setting, device: str, rank: int) -> None:
        self.setting, self.device = setting, device
        kind = CachingAllocator if setting.allocator == "torch" else Pool
        self.memory: Memory = kind(device)
        generator = torch.Generator().manual_seed(1)

        def weight(*shape: int) -> torch.Tensor:
            w = torch.randn(*shape, generator=generator) / shape[-2] ** 0.5
            return w.to(device, torch.bfloat16)

        self.embedding = weight(1024, HIDDEN) * HIDDEN**0.5
        self.layers = []
        for _ in range(LAYERS):
            up, down = weight(EXPERTS, HIDDEN, INTER), weight(EXPERTS, INTER, HIDDEN)
            share = EXPERTS if setting.expert_parallel else INTER
            mine = slice(rank * share // setting.ranks, (rank + 1) * share // setting.ranks)
            self.experts = torch.arange(EXPERTS, device=device)
            if setting.expert_parallel:
                up, down, self.experts = up[mine], down[mine], self.experts[mine]
            else:
                up, down = up[:, :, mine], down[:, mine]
            self.layers.append(
                (weight(HIDDEN, 3 * ATTENTION), weight(ATTENTION, HIDDEN), weight(HIDDEN, EXPERTS), up, down)
            )

    def _normalise(self, x: torch.Tensor, group: int) -> None:
        """RMS norm in place over groups of the last axis."""
        wide = self.memory.empty(*x.shape, dtype=torch.float32 if self.setting.wide else x.dtype)
        wide.copy_(x)
        groups = wide.view(len(x), -1, group)
        groups.copy_(F.rms_norm(groups, (group,)))
        x.copy_(wide)
        self.memory.free(wide)

    def _experts(
        self, x: torch.Tensor, longest: int, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        """Every rank gets all ranks' rows, and what their shares of the weights make is added up.

        Where the ranks' rows are not as many, in steps without graphs, they travel in a buffer as
        long as the longest.
        """
        rows, first = len(x), 0
        if self.setting.ranks > 1:
            mine = F.pad(x, (0, 0, 0, longest - rows)).view(torch.uint8)
            parts = [torch.empty_like(mine) for _ in range(self.setting.ranks)]
            dist.all_gather(parts, mine)
            x = torch.cat(parts).view(torch.bfloat16)
            first = dist.get_rank() * longest
        weights, ids = (x @ router).float().softmax(-1).topk(TOP_K)
        by_expert = torch.matmul(F.silu(torch.matmul(x, up)), down).float()
        share = (weights[..., None] * (ids[..., None] == self.experts)).sum(1)
        mixed = torch.einsum("te,eth->th", share, by_expert)
        if self.setting.ranks > 1:
            dist.all_reduce(mixed)
        return mixed[first : first + rows]

    def forward(self, step: Step, live: int) -> torch.Tensor:
        """One pass, whose first ``live`` rows belong to requests.

        Returns:
            (3,) int64, on the device: NaN and infinities that the padding rows of the attention
            output held, all layers together; NaN in the live rows that come out.
        """
        m, rows = self.memory, step.rows
        x = m.empty(rows, HIDDEN)
        # Padding rows' tokens are 0: what goes in is finite.
        token = torch.arange(rows, device=self.device) % 1023 + 1
        torch.index_select(self.embedding, 0, token * (token <= live), out=x)
        held = []
        for qkv_weight, out_weight, router, up, down in self.layers:
            normed = m.empty(rows, HIDDEN)
            normed.copy_(x)
            self._normalise(normed, HIDDEN)
            qkv = m.empty(rows, 3 * ATTENTION)
            torch.matmul(normed, qkv_weight, out=qkv)
            m.free(normed)
            query = m.empty(rows, ATTENTION)
            query.copy_(qkv[:, :ATTENTION])
            self._normalise(query, HEAD_DIM)

            attended = m.empty(rows, ATTENTION)
            if self.setting.zeroed or live == 0:
                attended.zero_()
            attended[:live] = qkv[:live, 2 * ATTENTION :]
            padding = attended[live:]
            held.append(torch.stack([padding.isnan().sum(), padding.isinf().sum()]))
            m.free(qkv)
            m.free(query)

            projected = m.empty(rows, HIDDEN)
            torch.matmul(attended, out_weight, out=projected)
            m.free(attended)
            x += projected
            m.free(projected)
            normed = m.empty(rows, HIDDEN)
            normed.copy_(x)
            self._normalise(normed, HIDDEN)
            x += self._experts(normed, step.longest, router, up, down).to(x.dtype)
            m.free(normed)
        came_out = x[:live].isnan().sum()
        m.free(x)
        return torch.cat([torch.stack(held).sum(0), came_out[None]])


class Step(NamedTuple):
    """What the ranks agreed on: rows of this rank, of the longest one, and whether as a graph."""

    rows: int
    longest: int
    as_graph: bool


def agree(tokens: int, setting: Setting, device: str) -> Step | None:
    """The next step of a rank that has ``tokens`` tokens; ``None`` when no rank has any.

    With graphs every rank runs the captured size that the longest one needs. If any of them runs
    without, all do, each with its own tokens (vLLM's ``v1/worker/dp_utils.py``). A rank without
    requests runs a dummy step of one token.
    """
    own = max(tokens, 1)
    size = replayed_size(own) if setting.graphs else None
    padded, longest, without_graph, busy = size or 0, own, int(size is None), int(tokens > 0)
    if setting.ranks > 1:
        seen = torch.tensor([padded, longest, without_graph, busy], device=device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        padded, longest, without_graph, busy = (int(value) for value in seen.tolist())
    if not busy:
        return None
    return Step(own, longest, False) if without_graph else Step(padded, padded, True)


def serve(setting: Setting, device: str, rank: int = 0) -> Counts:
    """This rank's passes over the whole trace, until no rank has a request left."""
    model = Model(setting, device, rank)
    scheduler = Scheduler(trace(setting.requests)[rank :: setting.ranks])
    counts, sizes, held = Counts(), [], []
    while True:
        tokens = scheduler.step()
        step = agree(tokens, setting, device)
        if step is None:
            break
        sizes.append(step.rows if step.as_graph else 0)
        counts.passes += 1
        counts.many_rows += step.longest * setting.ranks > 256
        held.append(model.forward(step, tokens))
        if step.rows > tokens:
            counts.padded += 1
            counts.padding_rows += step.rows - tokens
            counts.idle += tokens == 0
    for nan, inf, live_nan in torch.stack(held).tolist():
        counts.with_nan += nan > 0
        counts.with_inf += inf > 0
        counts.nan_numbers += nan
        counts.inf_numbers += inf
        counts.live_bad += live_nan > 0
    counts.sizes = sizes
    return counts


def serve_ranks(
    settings: Sequence[Setting], device: str, *, timeout_s: float = RANKS_TIMEOUT_S
) -> list[Counts]:
    """Serve each setting, all of as many ranks, in that many processes: gloo, or NCCL on CUDA.

    Args:
        settings: servers, one after another; their ``ranks`` are equal.
        device: ``cpu``, or ``cuda`` with a GPU for each rank.
        timeout_s: for all of it; the processes are ended then.

    Returns:
        The ranks' counts added up, one a setting; ``sizes`` are those that all ranks ran.

    Raises:
        ValueError: settings of different ranks.
        RankError: a rank failed, was too slow, or ran other sizes than its neighbour.
    """
    ranks = settings[0].ranks
    check.require(
        all(s.ranks == ranks for s in settings),
        "settings",
        f"{ranks} ranks each",
        [s.ranks for s in settings],
    )
    asked = json.dumps([asdict(setting) for setting in settings])
    # One host: the loopback interface is there. Multicast over NVLink needs rights that a shared
    # machine may not give, and two small ranks have no use for it.
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **os.environ}
    environment["NCCL_NVLS_ENABLE"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        meeting = str(Path(folder) / "ranks")
        command = [sys.executable, "-m", "staleproof.incidents.moe_routing.origin", asked, device, meeting]
        processes = [
            subprocess.Popen(
                [*command, str(rank)],
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=timeout_s) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise RankError(f"the ranks gave no answer within {timeout_s:.0f} s") from error
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode != 0:
            last = errors.strip().splitlines()[-1:] or ["nothing"]
            raise RankError(f"a rank ended with {process.returncode} and said: {last[0]}")
    by_rank = [[Counts(**row) for row in json.loads(out)] for out, _ in said]
    return [add(of_setting) for of_setting in zip(*by_rank, strict=True)]


def add(counts: Sequence[Counts]) -> Counts:
    """The counts of all ranks of one server.

    Raises:
        RankError: graphs of different sizes.
    """
    total = Counts(sizes=counts[0].sizes)
    for one in counts:
        if one.sizes != total.sizes:
            raise RankError("the ranks ran steps of different sizes: they did not agree")
        for name, value in asdict(one).items():
            if name != "sizes":
                setattr(total, name, getattr(total, name) + value)
    return total


def _main() -> None:
    asked, device, meeting, rank_text = sys.argv[1:]
    rank, settings = int(rank_text), [Setting(**row) for row in json.loads(asked)]
    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    if settings[0].ranks > 1:
        dist.init_process_group(
            "nccl" if device != "cpu" else "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=settings[0].ranks,
        )
    counts = [serve(setting, device, rank) for setting in settings]
    if dist.is_initialized():
        dist.destroy_process_group()
    print(json.dumps([asdict(one) for one in counts]))


if __name__ == "__main__":
    _main()
