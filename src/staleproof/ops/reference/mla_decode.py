"""The contract of mla_decode in plain PyTorch.

The padding part was missing in vLLM #37442: a row that belongs to no request is written, with the
sum over no keys (zero, and the logarithm of zero), and only a request's own tokens are read.
"""

from __future__ import annotations

import torch


def mla_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    kv_lora_rank: int = 512,
    k_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Absorbed MLA decode, one query token at a time, in float64.

    Args and results are those of :func:`staleproof.ops.mla.decode.mla_decode`; the output is
    rounded to the dtype of ``q`` at the end.

    >>> q, cache = torch.zeros(2, 1, 32), torch.ones(1, 16, 32)
    >>> table, seq_lens = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([4, 0])
    >>> out, lse = mla_decode(q, cache, table, seq_lens, softmax_scale=0.2, kv_lora_rank=16)
    >>> out[:, 0, 0], lse[:, 0]
    (tensor([1., 0.]), tensor([1.3863,   -inf]))
    """
    batch, q_len = q.shape[0], q.shape[1] if q.ndim == 4 else 1
    queries = q.reshape(batch, q_len, *q.shape[-2:])
    out = torch.zeros(*queries.shape[:-1], kv_lora_rank, dtype=q.dtype, device=q.device)
    lse = torch.full(queries.shape[:-1], -torch.inf, dtype=torch.float32, device=q.device)
    page_size = kv_cache.shape[1]
    for request, seq_len in enumerate(seq_lens.tolist()):
        pages = block_table[request, : -(-seq_len // page_size)].long()
        tokens = kv_cache[pages].flatten(0, 1).double() * k_scale
        for token in range(q_len):
            # Query token j is at position seq_len - q_len + j and attends to itself as well.
            keys = tokens[: max(seq_len - q_len + token + 1, 0)]
            if len(keys) == 0:
                continue
            scores = queries[request, token].double() @ keys.T * softmax_scale
            out[request, token] = (scores.softmax(-1) @ keys[:, :kv_lora_rank]).to(q.dtype)
            lse[request, token] = scores.logsumexp(-1)
    return out.reshape(*q.shape[:-1], kv_lora_rank), lse.reshape(q.shape[:-1])
