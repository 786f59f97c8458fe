"""Expert ids made distinct, for a fused MoE kernel that fails on repeated ids (vLLM #42906)."""

from __future__ import annotations

import torch

from staleproof import check, device
from staleproof.ops.launching import Ready, Seen, empty, key_of, launched
from staleproof.ops.operators import operator

device.load_triton()

import triton
import triton.language as tl

# Tokens a program: few, because a decode batch has only hundreds.
ROWS = 4


@triton.jit(do_not_specialize=["rows"])
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


@operator(
    "distinct_experts(Tensor topk_weights, Tensor topk_ids, Tensor(a!) new_weights, Tensor(b!) new_ids) -> ()"
)
def _launch(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, new_weights: torch.Tensor, new_ids: torch.Tensor
) -> Ready | None:
    rows, top_k = topk_ids.shape
    if not rows or not top_k:
        return None
    tensors = topk_weights, topk_ids, new_weights, new_ids
    sizes = rows, top_k, max(2, triton.next_power_of_2(top_k)), ROWS
    return launched(_distinct_kernel, (triton.cdiv(rows, ROWS),), tensors, sizes, num_warps=1)


_SEEN: Seen[Ready] = Seen()


def distinct_experts(topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the expert ids of each token distinct, without changing the result of the layer.

    The first slot of an expert gets the sum of its weights. The other slots get the id -1, which
    FlashInfer's fused MoE skips (in every release that was read), and the weight 0. One launch, no
    host sync.

    Args:
        topk_weights: (tokens, top_k) float32, float16 or bfloat16, contiguous.
        topk_ids: (tokens, top_k) int32 or int64, contiguous.

    Returns:
        New ``topk_weights`` and ``topk_ids`` of the same shapes and dtypes.

    Raises:
        ValueError: an argument does not fit.

    >>> weights, ids = distinct_experts(torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[7, 3, 7]]))
    >>> weights.tolist(), ids.tolist()
    ([[0.75, 0.25, 0.0]], [[7, 3, -1]])
    """
    key = key_of(topk_ids, topk_weights)
    if (again := _SEEN.get(key)) is not None:
        rows, top_k = topk_ids.shape
        weights = empty((rows, top_k), topk_weights.dtype, topk_ids)
        ids = empty((rows, top_k), topk_ids.dtype, topk_ids)
        again(topk_weights.data_ptr(), topk_ids.data_ptr(), weights.data_ptr(), ids.data_ptr())
        return weights, ids
    check.tensor("topk_ids", topk_ids, ndim=2, dtype=(torch.int32, torch.int64), contiguous=True)
    check.tensor(
        "topk_weights",
        topk_weights,
        shape=tuple(topk_ids.shape),
        like=topk_ids,
        contiguous=True,
        dtype=(torch.float32, torch.float16, torch.bfloat16),
    )
    weights, ids = torch.empty_like(topk_weights), torch.empty_like(topk_ids)
    _SEEN.keep(key, _launch(topk_weights, topk_ids, weights, ids))
    return weights, ids
