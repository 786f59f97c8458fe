"""Where the NaN comes from: padding rows of an attention output that nobody writes.

In piecewise graphs the attention output is ``torch.empty(num_tokens_padded, ...)`` and attention
writes only the live rows (vLLM 0.18.1 ``attention.py:419``). This is a miniature server whose tensors share
one pool of memory, so that the content of padding rows can be inspected. The ranks that run it are in
:mod:`staleproof.incidents.moe_routing.ranks`.

The requests are generated: as long as GSM8K's, and all due at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

REQUESTS = 96
# Limits per rank, like vLLM's ``max_num_seqs`` and ``max_num_batched_tokens``.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 32, 2048
HIDDEN, HEADS, HEAD_DIM, EXPERTS, INTER, LAYERS, TOP_K = 128, 4, 128, 8, 64, 2, 2
ATTENTION = HEADS * HEAD_DIM
POOL_BYTES = 64 * 2**20


class Request(NamedTuple):
    """Tokens of one request: of its prompt without the cached prefix, and of its answer."""

    prompt: int
    answer: int


def trace(requests: int = REQUESTS, seed: int = 0) -> list[Request]:
    """Requests as long as in a GSM8K evaluation whose examples are in the prefix cache.

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
        # Of each running request: prompt tokens left, and answer tokens left.
        self.running: list[list[int]] = []

    def step(self) -> int:
        """Tokens of the next step; 0 when nothing is left."""
        while self.waiting and len(self.running) < MAX_NUM_SEQS:
            request = self.waiting.pop(0)
            self.running.append([request.prompt, request.answer])
        budget = MAX_NUM_BATCHED_TOKENS
        for left in self.running:
            tokens = min(left[0] or 1, budget)
            budget -= tokens
            if left[0]:
                left[0] -= tokens
            # The chunk that ends a prompt also gives the first token of the answer.
            if tokens and not left[0]:
                left[1] -= 1
        self.running = [left for left in self.running if left[1] > 0]
        return MAX_NUM_BATCHED_TOKENS - budget


class Pool:
    """A caching allocator: blocks of 512 bytes, best fit, split, and merged when free again.

    It starts with zeros, and reuses memory without clearing it, like PyTorch's allocator on CUDA. Its layout,
    and so the answer, does not depend on what else the process did.
    """

    def __init__(self, device: str, size: int = POOL_BYTES) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.free_blocks = {0: size}
        self.used: dict[int, int] = {}

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Uninitialised memory for a tensor."""
        wanted = torch.Size(shape).numel() * dtype.itemsize
        size = -(-wanted // 512) * 512
        have, at = min((have, at) for at, have in self.free_blocks.items() if have >= size)
        del self.free_blocks[at]
        if have > size:
            self.free_blocks[at + size] = have - size
        self.used[at] = size
        return self.memory[at : at + wanted].view(dtype).view(shape)

    def free(self, x: torch.Tensor) -> None:
        """Free a tensor."""
        at = x.data_ptr() - self.memory.data_ptr()
        size = self.used.pop(at)
        before = next((b for b, have in self.free_blocks.items() if b + have == at), None)
        if before is not None:
            size, at = size + self.free_blocks.pop(before), before
        size += self.free_blocks.pop(at + size, 0)
        self.free_blocks[at] = size


class TorchAllocator:
    """PyTorch's own allocator, with the same interface as :class:`Pool`."""

    def __init__(self, device: str) -> None:
        self.device = device

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Uninitialised memory for a tensor."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def free(self, x: torch.Tensor) -> None:
        """Free a tensor."""
        x.untyped_storage().resize_(0)


@dataclass(frozen=True)
class Setting:
    """One server and what is different about it.

    Attributes:
        ranks: 1, or data-parallel ranks.
        expert_parallel: whether each rank has whole experts (DEP) or a slice of every expert (DP).
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


class Step(NamedTuple):
    """What the ranks agreed on: rows of this rank, most rows of any rank, and whether a graph runs."""

    rows: int
    longest: int
    as_graph: bool


class Model:
    """Two layers like those of a Qwen3 MoE: normalisation, attention, router, experts. Weights are fixed.

    Attention returns the value of the row's own token: only the *padding* rows matter here, and no
    attention writes those.
    """

    def __init__(self, setting: Setting, device: str, rank: int) -> None:
        self.setting, self.device = setting, device
        self.memory = TorchAllocator(device) if setting.allocator == "torch" else Pool(device)
        generator = torch.Generator().manual_seed(1)

        def weight(*shape: int) -> torch.Tensor:
            w = torch.randn(*shape, generator=generator) / shape[-2] ** 0.5
            return w.to(device, torch.bfloat16)

        self.embedding = weight(1024, HIDDEN) * HIDDEN**0.5
        self.layers = []
        for _ in range(LAYERS):
            up, down = weight(EXPERTS, HIDDEN, INTER), weight(EXPERTS, INTER, HIDDEN)
            share = EXPERTS if setting.expert_parallel else INTER
            own = slice(rank * share // setting.ranks, (rank + 1) * share // setting.ranks)
            self.experts = torch.arange(EXPERTS, device=device)
            if setting.expert_parallel:
                up, down, self.experts = up[own], down[own], self.experts[own]
            else:
                up, down = up[:, :, own], down[:, own]
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
        """The experts' sum for this rank's rows.

        Every rank gathers the rows of all ranks, applies its share of the weights, and the results are
        added up. Without graphs the ranks have different numbers of rows; each then sends a buffer with
        as many rows as the longest rank has.
        """
        rows, first = len(x), 0
        if self.setting.ranks > 1:
            own = F.pad(x, (0, 0, 0, longest - rows)).view(torch.uint8)
            parts = [torch.empty_like(own) for _ in range(self.setting.ranks)]
            dist.all_gather(parts, own)
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
            (3,) int64, on the device: the numbers of NaN and of infinities in the padding rows of the
            attention output, over all layers; the number of NaN in the live rows of the result.
        """
        m, rows = self.memory, step.rows
        x = m.empty(rows, HIDDEN)
        # Padding rows have token 0, so what goes in is finite.
        token = torch.arange(rows, device=self.device) % 1023 + 1
        torch.index_select(self.embedding, 0, token * (token <= live), out=x)
        padding_counts = []
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
            padding_counts.append(torch.stack([padding.isnan().sum(), padding.isinf().sum()]))
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
        return torch.cat([torch.stack(padding_counts).sum(0), came_out[None]])
