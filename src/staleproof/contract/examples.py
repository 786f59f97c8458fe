"""Two small decodes in PyTorch, registered as a user registers theirs: one breaks the contract, one keeps it.

``staleproof audit staleproof.contract.examples``
"""

from __future__ import annotations

import torch

from staleproof import audit


def _gathered(q, cache, block_table):
    """(batch, heads, tokens, head_dim) of all pages that the table names."""
    pages = cache[block_table.long()].flatten(1, 2).transpose(1, 2)
    return pages.repeat_interleave(q.shape[1] // pages.shape[1], 1).float()


@audit.attention(name="masked by a weight of 0")
def masked_by_weight(q, k_cache, v_cache, block_table, seq_lens, softmax_scale):
    """Reads every page that the table names, and gives what is not the request's a weight of 0."""
    k, v = (_gathered(q, cache, block_table) for cache in (k_cache, v_cache))
    past = torch.arange(k.shape[2], device=q.device) >= seq_lens[:, None]
    scores = (q.float().unsqueeze(2) @ k.transpose(2, 3)).squeeze(2) * softmax_scale
    weights = scores.masked_fill(past[:, None], float("-inf")).softmax(-1)
    return (weights.unsqueeze(2) @ v).squeeze(2).to(q.dtype)


@audit.attention(name="masked by selection")
def masked_by_selection(q, k_cache, v_cache, block_table, seq_lens, softmax_scale):
    """Follows no entry past the need, takes 0 for what is not the request's, and writes empty rows."""
    tokens = torch.arange(block_table.shape[1] * k_cache.shape[1], device=q.device)
    past = tokens >= seq_lens[:, None]
    table = torch.where(past[:, :: k_cache.shape[1]], 0, block_table)
    k, v = (_gathered(q, cache, table) for cache in (k_cache, v_cache))
    k, v = (x.masked_fill(past[:, None, :, None], 0.0) for x in (k, v))
    scores = (q.float().unsqueeze(2) @ k.transpose(2, 3)).squeeze(2) * softmax_scale
    weights = scores.masked_fill(past[:, None], float("-inf")).softmax(-1)
    out = (weights.unsqueeze(2) @ v).squeeze(2)
    return out.masked_fill((seq_lens == 0)[:, None, None], 0.0).to(q.dtype)


@audit.rows(name="fp8, one scale for the tensor")
def fp8_per_tensor(x):
    """Rows of padding decide the scale of live rows."""
    scale = x.abs().max().float() / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


@audit.rows(name="fp8, a scale for each row")
def fp8_per_row(x):
    """A row's scale is its own."""
    scale = x.abs().amax(1, keepdim=True).float() / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale
