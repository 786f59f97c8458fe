"""Whether a fix of incident 2 still decodes right: a server that lives may still give wrong outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from staleproof.evidence.canary import plant
from staleproof.evidence.compare import other_bits
from staleproof.incidents.decode_buffer.buffer import ones, part, query
from staleproof.incidents.decode_buffer.setups import process

# More rows than in the questions that gave the verdict.
ROWS, SICK = 12, 1
# Which rows of a batch are empty: none, the last ones, some in the middle, all.
EMPTY_ROWS: tuple[list[int], ...] = ([], [*range(3, ROWS)], [0, 2, 5], [*range(ROWS)])


@contextlib.contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """New memory holds NaN, by torch's deterministic mode; else it may hold zeros, as if it were cleared."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def wrong_rows(variant: str, device: str) -> str | None:
    """What one layer of a server computes wrongly, in one line, or ``None``.

    The stub kernel copies the queries to the live rows of the output, so live rows must have the bits of the
    queries, including the row of a sick request, which is NaN. With ``clear_empty_rows`` empty rows must be
    0. A second micro-batch must not write what the first one holds.
    """
    with process(variant) as wiring:
        layer = part(wiring, device, batch=ROWS)
        q = query(layer, ROWS, 1)
        for lane in (0, 1):
            layer.decode(q, ones(ROWS, device), lane)
        wiring.ready()
        q = torch.arange(1, q.numel() + 1, device=device).view_as(q).to(q)
        q[SICK] = torch.nan
        for empty in EMPTY_ROWS:
            seq_lens = ones(ROWS, device)
            seq_lens[empty] = 0
            live = seq_lens > 0
            with unwritten_is_nan():
                out = layer.decode(q, seq_lens)
            found = other_bits(f"live rows beside the empty rows {empty}", out[live], q[live])
            if found is None and variant == "clear_empty_rows":
                found = other_bits(f"the empty rows {empty}", out[~live], torch.zeros_like(out[~live]))
            if found:
                return found
        first = layer.decode(q, ones(ROWS, device), 0)
        layer.decode(plant(q.clone()), ones(ROWS, device), 1)
        few = layer.decode(q[:3], ones(3, device), 1)
        found = other_bits("live rows beside another micro-batch", first, q)
        return found or other_bits("three rows in place of twelve", few, q[:3])
