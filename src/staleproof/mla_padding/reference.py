"""The right answers of incident 1 in plain PyTorch: slow, exact, and on any device.

They state the padding contract that vLLM #37442 found missing: a row that belongs to no request is
written, with the empty sum (zero, and the logarithm of zero), and nothing outside a request's own
tokens is read. The kernels beside this file answer to them.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0


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

    Args and results are those of :func:`staleproof.mla_padding.kernels.mla_decode`; the output is
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


def clear_empty_rows(
    out: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    lse: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
) -> None:
    """Zero the rows of requests without tokens, with host-side indexing.

    Args are those of :func:`staleproof.mla_padding.kernels.clear_empty_rows`.
    """
    if out.ndim == 4:
        out, lse = out.flatten(0, 1), None if lse is None else lse.flatten(0, 1)
    if query_start_loc is None:
        owners = torch.arange(len(seq_lens), device=out.device)
        owner = owners.repeat_interleave(out.shape[0] // len(seq_lens))
    else:
        rows = torch.arange(out.shape[0], device=out.device)
        owner = torch.searchsorted(query_start_loc[1:].long(), rows, right=True)
    # Rows behind the last request belong to none: they get an owner without tokens.
    lengths = torch.cat([seq_lens, seq_lens.new_zeros(1)])
    empty = lengths[owner] <= 0
    out[empty] = 0
    if lse is not None:
        lse[empty] = -torch.inf


def quantize_fp8_per_tensor(
    x: torch.Tensor, *, live_rows: int | torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic per-tensor FP8 whose amax reads live rows only.

    Args and results are those of :func:`staleproof.mla_padding.kernels.quantize_fp8_per_tensor`.
    """
    if live_rows is None:
        live_rows = x.shape[0]
    if isinstance(live_rows, torch.Tensor) and live_rows.dtype == torch.bool:
        live = live_rows
    else:
        live = torch.arange(x.shape[0], device=x.device) < live_rows
    values = x[live].float()
    amax = values.abs().max() if values.numel() else values.new_zeros(())
    smallest = torch.finfo(torch.float32).tiny
    # By a tensor: CUDA divides by a Python number as a product with its rounded reciprocal.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    scale = torch.where(amax == 0, 1.0, scale.clamp(min=smallest)).reshape(1)
    x_fp8 = torch.zeros(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scaled = (values * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX)
    # Indexed writes know no FP8: write the bytes.
    x_fp8.view(torch.uint8)[live] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return x_fp8, scale
