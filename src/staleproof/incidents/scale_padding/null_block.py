"""The null block: the dummy batch of an idle data-parallel rank writes into it.

With experts spread over ranks, every rank takes part in every step's exchange, so an idle rank runs
a dummy batch. Its slot mapping is a buffer of zeros. Slot 0 belongs to block 0, and every unused
block-table entry names block 0 (vLLM #39444; the fix there: slot -1).

:func:`reproduce` runs two ranks, real processes of ``torch.distributed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from staleproof import child

RANKS = 2
BLOCK_SIZE, BLOCKS, HEAD = 4, 8, 16
# The dummy batch's slot, off / on / off: of a buffer of zeros, of the fix, of the zeros again.
SLOTS = (0, -1, 0)
# Hidden states of a dummy batch are whatever is in the buffer, so each of these is tried.
CONTENTS = {
    "nan": torch.nan,
    "inf": torch.inf,
    "largest": torch.finfo(torch.float32).max,
    "300": 300.0,
    "zero": 0.0,
}


@dataclass(frozen=True)
class RankStep:
    """The result of one repetition on one rank.

    Attributes:
        written: blocks of this rank's cache that its batch wrote.
        null_block_bad: whether block 0 of this rank's cache has NaN after a dummy batch with NaN.
        row_wrong: the contents of the dummy batch that make the output of this rank's healthy request wrong.
    """

    written: tuple[int, ...]
    null_block_bad: bool
    row_wrong: tuple[str, ...]


# What :func:`reproduce` returns: the repetitions of the busy rank, and of the idle one.
Ranks = tuple[list[RankStep], list[RankStep]]


def write_kv(cache: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """Store each token's latent at its slot; a negative slot is skipped, as in vLLM's kernels.

    Args:
        cache: (blocks, block_size, head).
        kv: (tokens, head).
        slots: (tokens,) int64, block * block_size + offset.
    """
    kept = slots >= 0
    cache.view(-1, cache.shape[-1])[slots[kept]] = kv[kept]


def attend(q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, seq_len: int) -> torch.Tensor:
    """One request's decode over all blocks its table row names, the unused ones masked.

    Values past ``seq_len`` are multiplied by a weight of 0, as in a kernel whose tile of 128 tokens
    spans smaller blocks (vLLM #37442). 0 times NaN is NaN.
    """
    keys = cache[table].flatten(0, 1)
    score = keys @ q / HEAD**0.5
    score = score.masked_fill(torch.arange(len(keys), device=q.device) >= seq_len, -torch.inf)
    return score.softmax(0) @ keys


def _repetitions(rank: int, device: str) -> list[RankStep]:
    """The three repetitions of one rank: rank 0 busy and rank 1 idle, then both with a request."""
    steps = []
    for slot in SLOTS:
        ended = {name: _repetition(rank, slot, value, device) for name, value in CONTENTS.items()}
        wrong = tuple(name for name, (*_, row_wrong) in ended.items() if row_wrong)
        steps.append(RankStep(*ended["nan"][:2], wrong))
    return steps


def _repetition(rank: int, slot: int, content: float, device: str) -> tuple[tuple[int, ...], bool, bool]:
    """The blocks written, whether block 0 has a NaN then, and whether the next request's output is wrong."""
    generator = torch.Generator().manual_seed(rank)
    cache = torch.randn(BLOCKS, BLOCK_SIZE, HEAD, generator=generator).to(device)
    cache[0] = 0
    # A request of six tokens: two blocks, and two unused entries that name the null block.
    table = torch.tensor([3, 5, 0, 0], device=device)
    q = torch.randn(HEAD, generator=generator).to(device)

    if rank == 1:
        hidden = torch.full((BLOCK_SIZE, HEAD), content, device=device)
        slots = torch.full((BLOCK_SIZE,), slot, device=device)
    else:
        hidden = torch.randn(BLOCK_SIZE, HEAD, generator=generator).to(device)
        slots = torch.arange(BLOCK_SIZE, device=device) + 3 * BLOCK_SIZE
    before = cache.clone()
    write_kv(cache, hidden, slots)
    written = tuple((cache != before).flatten(1).any(1).nonzero().flatten().tolist())
    # The exchange in which the idle rank must take part. Each rank fills its own place, so the rows of the
    # two ranks never mix.
    places = torch.zeros(RANKS, BLOCK_SIZE, HEAD, device=device)
    places[rank] = hidden.nan_to_num(0)
    dist.all_reduce(places)

    answer = attend(q, cache, table, 6)
    dist.all_reduce(torch.ones(1, device=device))
    # The right answer uses only the request's own six tokens.
    right = attend(q, cache, table[:2], 6)
    return written, bool(cache[0].isnan().any()), not torch.allclose(answer, right, rtol=1e-4, atol=1e-5)


def run_rank(rank: int, meeting: str) -> list[RankStep]:
    """Run one rank of the group that meets at ``meeting``, an ``init_method`` of torch."""
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=RANKS, timeout=timedelta(seconds=30)
    )
    steps = _repetitions(rank, device)
    dist.destroy_process_group()
    return steps


def unavailable_reason(subject: object = None, device: str = "cpu") -> str | None:
    """Why two ranks cannot run here, or ``None``."""
    if not dist.is_available():
        return "this torch has no torch.distributed"
    return None if dist.is_gloo_available() else "this torch has no gloo"


def reproduce(device: str = "cpu", *, timeout_s: float = 60) -> Ranks:
    """Run the two ranks as processes of their own, over gloo.

    Args:
        device: ``cpu`` hides the GPUs from the ranks.
        timeout_s: after this many seconds the ranks are ended.

    Returns:
        Steps of rank 0, which is busy, and of rank 1, which is idle, in the order of :data:`SLOTS`.

    Raises:
        ChildError: a rank died or did not finish.
    """
    env = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    busy, idle = child.call_ranks(run_rank, RANKS, timeout_s=timeout_s, env=env)
    return busy, idle
