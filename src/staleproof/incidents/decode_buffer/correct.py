"""Whether a fix of incident 2 still decodes: that the server lives says nothing about its outputs."""

from __future__ import annotations

import torch

from staleproof.cases.compare import other_bits
from staleproof.evidence.canary import plant
from staleproof.incidents.decode_buffer.model import Attention
from staleproof.incidents.decode_buffer.setups import CLEARED, Setup

ROWS, LIVE = 8, 3


def wrong_output(setup: Setup, layer: Attention, q: torch.Tensor) -> str | None:
    """What is wrong with the outputs of one layer, or ``None``: for a full batch, then for three rows of it.

    Args:
        setup: the fix.
        layer: its attention, ready to decode.
        q: (8, heads, rank), which the stand-in kernel copies to the live rows of the output.
    """
    seq_lens = torch.ones(ROWS, dtype=torch.int32, device=q.device)
    found = other_bits("a full batch", layer.decode(q, seq_lens), q)
    seq_lens[LIVE:] = 0
    out = layer.decode(q, seq_lens)
    found = found or other_bits("live rows", out[:LIVE], q[:LIVE])
    if found is None and setup.empty_rows == CLEARED:
        found = other_bits("empty rows", out[LIVE:], torch.zeros_like(out[LIVE:]))
    # The second micro-batch must not write what the first one holds.
    first, kept = layer.decode(q, seq_lens, 0), out[:LIVE].clone()
    layer.decode(plant(q.clone()), seq_lens, 1)
    return found or other_bits("live rows beside another micro-batch", first[:LIVE], kept)
