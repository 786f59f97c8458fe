"""The right answers of incident 1 in plain PyTorch: slow, exact, and on any device.

They state the padding contract that vLLM #37442 found missing: a row that belongs to no request is
written, with the empty sum (zero, and the logarithm of zero), and nothing outside a request's own
tokens is read. The kernels beside this file answer to them.
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

    Args and results are those of :func:`staleproof.ops.mla_decode.mla_decode`; the output is
    rounded to the dtype of ``q`` at the end.
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
            # Query token j stands at position seq_len - q_len + j, and sees itself.
            keys = tokens[: max(seq_len - q_len + token + 1, 0)]
            if len(keys) == 0:
                continue
            scores = queries[request, token].double() @ keys.T * softmax_scale
            out[request, token] = (scores.softmax(-1) @ keys[:, :kv_lora_rank]).to(q.dtype)
            lse[request, token] = scores.logsumexp(-1)
    return out.reshape(*q.shape[:-1], kv_lora_rank), lse.reshape(q.shape[:-1])
