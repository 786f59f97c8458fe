"""Data for the figure of incident 3's notebook: entries of the expert map that a batch leaves unwritten."""

from __future__ import annotations

from typing import NamedTuple

from staleproof.incidents.moe_routing.batch import Batch, make_ids
from staleproof.incidents.moe_routing.consumer import build_map, holes


class MapPicture(NamedTuple):
    """The map of one batch.

    Attributes:
        batch: its shape.
        one_block: whether one kernel built the map; otherwise three did.
        holes: tokens x slots, whether nobody wrote the slot's entry.
    """

    batch: Batch
    one_block: bool
    holes: list[list[bool]]

    @property
    def unwritten(self) -> int:
        """Entries that nobody wrote."""
        return sum(map(sum, self.holes))

    @property
    def title(self) -> str:
        """Tokens, builder and holes in words."""
        tokens, top_k, _ = self.batch
        kernels = "one kernel" if self.one_block else "three kernels"
        return f"{tokens} tokens: {kernels}, {self.unwritten:,} of {tokens * top_k:,} entries never written"


def map_picture(batch: Batch, device: str, kind: str = "partly equal") -> MapPicture:
    """The map of one batch, built over canaries.

    Args:
        batch: tokens, top_k and experts; FlashInfer's choice between the builders follows from them.
        device: ``"cpu"`` or ``"cuda"``.
        kind: of the expert ids, one of :data:`staleproof.incidents.moe_routing.batch.IDS`.

    >>> map_picture(Batch(3, 10, 16), "cpu", "all equal").title
    '3 tokens: three kernels, 27 of 30 entries never written'
    """
    ids = make_ids(kind, batch, seed=1, device=device)
    expert_map = build_map(ids, batch.experts)
    return MapPicture(batch, expert_map.one_block, holes(expert_map, ids).tolist())
