"""The contract of clear_empty_rows in plain PyTorch."""

from __future__ import annotations

import torch


def clear_empty_rows(
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> None:
    """Zero the rows of requests without tokens, by indexing.

    Args are those of :func:`staleproof.ops.clear_empty_rows.clear_empty_rows`.

    >>> out = torch.full((2, 1, 2), torch.nan)
    >>> clear_empty_rows(out, torch.tensor([7, 0], dtype=torch.int32))
    >>> out[:, 0]
    tensor([[nan, nan],
            [0., 0.]])
    """
    if out.ndim == 4:
        out, lse = out.flatten(0, 1), None if lse is None else lse.flatten(0, 1)
    if query_start_loc is None:
        owners = torch.arange(len(seq_lens), device=out.device)
        owner = owners.repeat_interleave(out.shape[0] // len(seq_lens))
    else:
        rows = torch.arange(out.shape[0], device=out.device)
        owner = torch.searchsorted(query_start_loc[1:].long(), rows, right=True)
    # Rows after the last request belong to no request: their owner is one extra request without tokens.
    lengths = torch.cat([seq_lens, seq_lens.new_zeros(1)])
    empty = lengths[owner] <= 0
    out[empty] = 0
    if lse is not None:
        lse[empty] = -torch.inf
