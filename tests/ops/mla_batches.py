"""Batches for mla_decode, as its arguments; what belongs to no request is poisoned."""

from __future__ import annotations

from typing import Any

import torch

from staleproof.evidence.canary import bits
from staleproof.ops.reference import mla_decode as reference

RANK, ROPE = 64, 16
HUGE = 2**31 - 1
E4M3 = torch.float8_e4m3fn
Batch = dict[str, Any]


def make(
    device: str,
    lens: list[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    cache: torch.dtype | None = None,
    heads: int = 16,
    q_len: int | None = None,
    page_size: int = 16,
    rank: int = RANK,
    rope: int = ROPE,
    spare_pages: int = 2,
) -> Batch:
    """Unused block-table entries are -1 or huge, and must never be followed."""
    gen = torch.Generator().manual_seed(0)
    max_pages = max(-(-max(lens) // page_size), 1) + spare_pages
    pages = sum(-(-n // page_size) for n in lens) + 3
    q_shape = (len(lens), heads) if q_len is None else (len(lens), q_len, heads)
    q = torch.randn(*q_shape, rank + rope, generator=gen).to(dtype)
    kv_cache = torch.randn(pages, page_size, rank + rope, generator=gen).to(dtype)
    order = torch.randperm(pages, generator=gen).int()
    block_table = torch.full((len(lens), max_pages), -1, dtype=torch.int32)
    block_table[1::2] = HUGE
    taken = 0
    for request, n in enumerate(lens):
        count = -(-n // page_size)
        block_table[request, :count] = order[taken : taken + count]
        taken += count
    return {
        "q": q.to(device),
        "kv_cache": kv_cache.to(device).to(cache or dtype),
        "block_table": block_table.to(device),
        "seq_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "softmax_scale": (rank + rope) ** -0.5,
        "kv_lora_rank": rank,
    }


def poisoned(batch: Batch, value: float) -> Batch:
    """Every number of the cache that no request may read becomes ``value``."""
    # Which holds the numbers of every dtype.
    kept = batch["kv_cache"].float()
    cache = torch.full_like(kept, value)
    for request, n in enumerate(batch["seq_lens"].tolist()):
        position = torch.arange(n, device=cache.device)
        page = batch["block_table"][request][position // cache.shape[1]].long()
        cache[page, position % cache.shape[1]] = kept[page, position % cache.shape[1]]
    return batch | {"kv_cache": cache.to(batch["kv_cache"].dtype)}


def spoil(batch: Batch, request: int) -> None:
    """A number of the first page of a request becomes NaN."""
    cache, page = batch["kv_cache"], batch["block_table"][request, 0].item()
    # Not every device can fill E4M3 numbers.
    if cache.dtype == E4M3:
        bits(cache)[page, 3, 5] = 0x7F
    else:
        cache[page, 3, 5] = torch.nan


def assert_close(batch: Batch, out: torch.Tensor, lse: torch.Tensor) -> None:
    want_out, want_lse = reference.mla_decode(**batch)
    error = (out.float() - want_out.float()).norm() / want_out.float().norm()
    # bfloat16 holds 8 bits; the interpreter rounds to it toward zero.
    bound = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 1e-5}[out.dtype]
    assert error.item() <= bound
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=2e-3)
