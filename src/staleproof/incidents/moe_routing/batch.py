"""A batch for a fused MoE: its shape, its expert ids, and the names of outcomes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from staleproof import check

# Outcomes. ILLEGAL_ACCESS is the miniature's word: it counts accesses on which a real kernel would crash.
RIGHT, SILENT, ILLEGAL_ACCESS = "right", "wrong, silent", "illegal access"
# NaN in an output row, without a crash.
NAN_ROWS = "NaN"
# What a kernel reads if (tokens, top_k) int64 ids are passed as int32: id, 0, id, 0, ... (vLLM #38359).
MISREAD = "int64 read as int32"
IDS = ("distinct", "all equal", "partly equal", MISREAD)


class Batch(NamedTuple):
    """The shape of one call of the fused MoE."""

    tokens: int
    top_k: int
    experts: int

    def __str__(self) -> str:
        """The name of its variant."""
        return f"{self.tokens} tokens, top {self.top_k}, {self.experts} experts"


def make_ids(kind: str, batch: Batch, *, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Expert ids of one batch, the same on every machine.

    Args:
        kind: one of :data:`IDS`; ``partly equal`` repeats one expert in a fifth of the rows, and
            :data:`MISREAD` is the distinct ids of the same seed, misread.
        batch: the shape.
        seed: of the choice.
        device: where the ids go.

    Returns:
        (tokens, top_k) int32.

    Raises:
        ValueError: an unknown kind, or more slots than experts.
    """
    check.require(kind in IDS, "kind", " or ".join(IDS), repr(kind))
    tokens, top_k, experts = batch
    check.require(top_k <= experts, "top_k", f"at most {experts} experts", top_k)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].int()
    if kind == "all equal":
        ids[:] = ids[0, 0]
    elif kind == "partly equal":
        repeated = torch.randperm(tokens, generator=generator)[: -(-tokens // 5)]
        ids[repeated] = ids[repeated, :1]
    elif kind == MISREAD:
        ids = ids.long().view(torch.int32).flatten()[: tokens * top_k].view(tokens, top_k)
    return ids.to(device)


def rows_with_duplicates(ids: torch.Tensor) -> torch.Tensor:
    """(rows,) bool: the rows of ``ids`` (rows, top_k) that name an expert twice."""
    ordered = ids.sort(-1).values
    return (ordered[:, 1:] == ordered[:, :-1]).any(-1)
