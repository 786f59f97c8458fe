"""Distinct expert ids for a consumer that cannot take repeated ones (vLLM #42906)."""

from __future__ import annotations

import torch

from staleproof import check, device

device.load_triton()

import triton
import triton.language as tl

# Tokens a program: a few, since a batch of decode has hundreds.
ROWS = 4


@triton.jit
def _distinct_kernel(
    weights, ids, weights_out, ids_out, rows,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = tl.arange(0, SLOTS)
    inside = (row < rows)[:, None] & (slot < TOP_K)[None, :]
    at = row[:, None] * TOP_K + slot[None, :]
    mine = tl.load(ids + at, mask=inside, other=-1)
    total = tl.zeros((ROWS, SLOTS), tl.float32)
    repeats = tl.zeros((ROWS, SLOTS), tl.int1)
    for k in tl.static_range(TOP_K):
        other = tl.load(ids + row * TOP_K + k, mask=row < rows, other=-1)
        weight = tl.load(weights + row * TOP_K + k, mask=row < rows, other=0).to(tl.float32)
        same = mine == other[:, None]
        total += tl.where(same, weight[:, None], 0.0)
        repeats = repeats | (same & (slot > k)[None, :])
    kept = tl.where(repeats, 0.0, total)
    tl.store(weights_out + at, kept.to(weights_out.dtype.element_ty), mask=inside)
    tl.store(ids_out + at, tl.where(repeats, -1, mine), mask=inside)


def distinct_experts(topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the expert ids of each token distinct, for the same result of the layer.

    A repeated slot gets the id -1, which FlashInfer's fused MoE skips in every release read, and
    its weight goes to the first slot of that expert. One launch, no host sync.

    Args:
        topk_weights: (tokens, top_k) float32, float16 or bfloat16, contiguous.
        topk_ids: (tokens, top_k) int32 or int64, contiguous.

    Returns:
        New ``topk_weights`` and ``topk_ids`` of the same shapes and dtypes.

    Raises:
        ValueError: an argument does not fit.
    """
    check.tensor("topk_ids", topk_ids, ndim=2, dtype=(torch.int32, torch.int64), contiguous=True)
    check.tensor(
        "topk_weights",
        topk_weights,
        shape=tuple(topk_ids.shape),
        like=topk_ids,
        contiguous=True,
        dtype=(torch.float32, torch.float16, torch.bfloat16),
    )
    rows, top_k = topk_ids.shape
    weights, ids = torch.empty_like(topk_weights), torch.empty_like(topk_ids)
    if rows and top_k:
        _distinct_kernel[(triton.cdiv(rows, ROWS),)](
            topk_weights,
            topk_ids,
            weights,
            ids,
            rows,
            TOP_K=top_k,
            SLOTS=max(2, triton.next_power_of_2(top_k)),
            ROWS=ROWS,
            num_warps=1,
        )
    return weights, ids
