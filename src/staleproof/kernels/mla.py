"""MLA decode kernels of other packages, each called as :func:`staleproof.mla_decode` is.

The incidents happened in these kernels, and our own kernel is measured against them. A peer that
cannot run on this machine gives the reason in one line.
"""

from __future__ import annotations

import torch

from staleproof.kernels.adapter import RANK, Peer, pages_in_use, peer
from staleproof.kernels.flashinfer import flashinfer_peers
from staleproof.kernels.vllm import vllm_triton


def _sdpa(q, kv_cache, block_table, seq_lens, softmax_scale, out):
    # Use page 0 for the arbitrary entries of the table.
    _, used = pages_in_use(block_table, seq_lens, kv_cache.shape[1])
    pages = torch.where(used, block_table, 0).long()
    position = torch.arange(pages.shape[1] * kv_cache.shape[1], device=q.device)
    mask = (position[None, :] < seq_lens[:, None])[:, None, None, :]

    def launch():
        keys = kv_cache[pages].flatten(1, 2).unsqueeze(1)
        attend = torch.nn.functional.scaled_dot_product_attention
        given = q.unsqueeze(1), keys, keys[..., :RANK], mask
        return out.copy_(attend(*given, scale=softmax_scale).squeeze(1))

    return launch


def torch_sdpa() -> Peer:
    """PyTorch's attention with a boolean mask, which runs everywhere.

    >>> torch_sdpa().unavailable_reason is None
    True
    """
    return peer(f"torch {torch.__version__} SDPA, boolean mask", None, _sdpa)


def peers() -> dict[str, Peer]:
    """The peers of the questions by their short keys, whether they can run here or not.

    >>> print(*peers())
    vllm_triton flashinfer_fa2 flashinfer_fa3 flashinfer_trtllm flashinfer_cutlass torch_sdpa
    """
    return {"vllm_triton": vllm_triton(), **flashinfer_peers(), "torch_sdpa": torch_sdpa()}
