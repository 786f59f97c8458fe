"""The null block: two data-parallel ranks, one idle, and what its dummy batch writes where.

With experts spread over ranks every rank joins every step's exchange, so an idle rank runs a dummy
batch. Its slot mapping is a persistent buffer made of zeros; slot 0 is a valid slot, of block 0,
and block 0 is what every unused block-table entry names (vLLM #39444; the fix there: slot -1).

:func:`reproduce` starts two ranks, real processes of ``torch.distributed``, and ends them when
their time is up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANKS = 2
BLOCK_SIZE, BLOCKS, HEAD = 4, 8, 16
# The dummy batch's slot, off / on / off: as a buffer of zeros has it, as the fix has it, and again.
SLOTS = (0, -1, 0)


class RanksFailed(RuntimeError):
    """A rank died or did not come back in time."""


@dataclass(frozen=True)
class RankStep:
    """What one rank saw of one repetition.

    Attributes:
        rank: which.
        slot: slot of every token of the dummy batch, when this rank was idle.
        null_block_bad: whether block 0 of its cache holds a NaN afterwards.
        row_bad: whether the answer of its own, healthy request does.
    """

    rank: int
    slot: int
    null_block_bad: bool
    row_bad: bool


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

    The weight past ``seq_len`` is 0 and the value there is multiplied all the same, as a tile of
    128 tokens does over smaller blocks (vLLM #37442): 0 times NaN is NaN.
    """
    keys = cache[table].flatten(0, 1)
    score = keys @ q / HEAD**0.5
    score = score.masked_fill(torch.arange(len(keys), device=q.device) >= seq_len, -torch.inf)
    return score.softmax(0) @ keys


def run_rank(rank: int, device: str) -> list[RankStep]:
    """The three repetitions of one rank: rank 0 busy and rank 1 idle, then both with a request."""
    steps = []
    for slot in SLOTS:
        generator = torch.Generator().manual_seed(rank)
        cache = torch.randn(BLOCKS, BLOCK_SIZE, HEAD, generator=generator).to(device)
        cache[0] = 0
        # A request of six tokens: two blocks, and two unused entries that name the null block.
        table = torch.tensor([3, 5, 0, 0], device=device)
        q = torch.randn(HEAD, generator=generator).to(device)

        idle = rank == 1
        if idle:
            # Hidden states of a dummy batch are whatever the buffer holds.
            hidden = torch.full((BLOCK_SIZE, HEAD), torch.nan, device=device)
            slots = torch.full((BLOCK_SIZE,), slot, device=device)
        else:
            hidden = torch.randn(BLOCK_SIZE, HEAD, generator=generator).to(device)
            slots = torch.arange(BLOCK_SIZE, device=device) + 3 * BLOCK_SIZE
        write_kv(cache, hidden, slots)
        # The exchange that the idle rank must not miss. Each rank fills its own place, so the rows
        # of the two never mix.
        places = torch.zeros(RANKS, BLOCK_SIZE, HEAD, device=device)
        places[rank] = hidden.nan_to_num(0)
        dist.all_reduce(places)

        answer = attend(q, cache, table, 6)
        dist.all_reduce(torch.ones(1, device=device))
        bad = (bool(cache[0].isnan().any()), bool(answer.isnan().any()))
        steps.append(RankStep(rank, slot, *bad))
    return steps


def main(rank: int, backend: str, folder: str) -> None:
    """One rank of the group that meets in ``folder``; leaves what it saw there."""
    device = "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    meeting = Path(folder) / "meeting"
    dist.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=30)
    )
    seen = [vars(step) for step in run_rank(rank, device)]
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


def why_not(backend: str) -> str | None:
    """Why two ranks of this backend cannot run here, or ``None``."""
    if not dist.is_available():
        return "this torch has no torch.distributed"
    if backend == "nccl":
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            return "needs a CUDA device"
        if torch.cuda.device_count() < RANKS:
            return f"needs {RANKS} GPUs, this machine has {torch.cuda.device_count()}"
    elif not dist.is_gloo_available():
        return "this torch has no gloo"
    return None


def reproduce(backend: str = "gloo", *, device: str = "cpu", timeout_s: float = 60) -> list[RankStep]:
    """Run the two ranks as processes of their own.

    Args:
        backend: ``gloo``, or ``nccl`` where there are two GPUs.
        device: ``cpu`` hides the GPUs from the ranks.
        timeout_s: after so many seconds the ranks are ended.

    Returns:
        Steps of rank 0, then of rank 1, each in the order of :data:`SLOTS`.

    Raises:
        RanksFailed: a rank died or did not come back.
    """
    env = dict(os.environ)
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    if backend == "gloo" and sys.platform == "linux":
        # Both ranks are here: no name of this machine needs to resolve.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    code = "import sys; from staleproof.incidents.scale_padding import null_block as n; "
    code += "n.main(int(sys.argv[1]), *sys.argv[2:])"
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), backend, folder],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            for number, rank in enumerate(ranks):
                _, error = rank.communicate(timeout=timeout_s)
                if rank.returncode != 0:
                    last = (error.strip().splitlines() or ["no message"])[-1]
                    raise RanksFailed(f"rank {number} ended with {rank.returncode}: {last}")
        except subprocess.TimeoutExpired as error:
            raise RanksFailed(f"the ranks did not come back in {timeout_s:.0f} s") from error
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
        files = [Path(folder) / f"rank{number}.json" for number in range(RANKS)]
        return [RankStep(**row) for path in files for row in json.loads(path.read_text())]
