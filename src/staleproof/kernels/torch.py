"""PyTorch's attention over gathered keys and values with a boolean mask, by backend."""

from __future__ import annotations

import torch


def sdpa(q, k, v, mask, softmax_scale, backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mask = mask.expand(-1, q.shape[1], 1, -1)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale)


def flex(q, k, v, mask, softmax_scale, compiled):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def within(b, h, i, j):
        return mask[b, 0, 0, j]

    size, attend = (128, torch.compile(flex_attention)) if compiled else (16, flex_attention)
    blocks = create_block_mask(within, len(q), None, 1, k.shape[2], device=str(q.device), BLOCK_SIZE=size)
    return attend(q, k, v, block_mask=blocks, scale=softmax_scale)
