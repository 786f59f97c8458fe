"""Our own operations."""

from __future__ import annotations

from functools import partial

import torch

from staleproof import audit


@audit.attention(name="mla_decode", layout="mla", q_len=4)
def mla_decode(q, kv_cache, block_table, seq_lens, softmax_scale, out, lse):
    from staleproof.ops.mla.decode import mla_decode

    mla_decode(q, kv_cache, block_table, seq_lens, softmax_scale=softmax_scale, out=out, lse=lse)
    return out, lse


@audit.routing(name="topk_softmax")
def topk_softmax(router_logits, top_k, bias=None, is_padding=None):
    from staleproof.ops.topk import topk_softmax

    return topk_softmax(router_logits, top_k, bias=bias, is_padding=is_padding)


@audit.routing(name="topk_sigmoid")
def topk_sigmoid(router_logits, top_k, bias=None, is_padding=None):
    from staleproof.ops.topk import topk_sigmoid

    return topk_sigmoid(router_logits, top_k, bias=bias, is_padding=is_padding)


@audit.routing(name="grouped_topk", grouped=True)
def grouped_topk(router_logits, top_k, bias=None, is_padding=None):
    from staleproof.ops.topk import grouped_topk

    return grouped_topk(
        router_logits, top_k, num_expert_group=4, topk_group=2, bias=bias, is_padding=is_padding
    )


def _dequantized(packed, scales, swizzled):
    from staleproof.ops.reference.nvfp4 import dequantize_nvfp4

    one = torch.ones(1, device=packed.device)
    return dequantize_nvfp4(packed, scales, one, swizzled=swizzled)


@audit.rows(
    name="quantize_nvfp4, linear", inverse=partial(_dequantized, swizzled=False), given={"swizzled": False}
)
@audit.rows(
    name="quantize_nvfp4, swizzled",
    skip={"R": "its scales lie in tiles of rows; see the linear layout"},
    inverse=partial(_dequantized, swizzled=True),
    given={"swizzled": True},
)
def quantize_nvfp4(x, swizzled):
    from staleproof.ops.nvfp4 import quantize_nvfp4

    return quantize_nvfp4(x, torch.ones(1, device=x.device), swizzled=swizzled)


@audit.rows(name="quantize_fp8_per_tensor, live_rows=4", live_rows=4)
def quantize_fp8_per_tensor(x):
    from staleproof.ops.fp8 import quantize_fp8_per_tensor

    return quantize_fp8_per_tensor(x, live_rows=4)


@audit.attention(name="clear_empty_rows, after a decode that leaves NaN", layout="mla")
def clear_empty_rows(q, kv_cache, block_table, seq_lens, softmax_scale, out, lse):
    from staleproof.ops.clear_empty_rows import clear_empty_rows
    from staleproof.ops.reference.mla_decode import mla_decode

    results = mla_decode(q, kv_cache, block_table, seq_lens, softmax_scale=softmax_scale)
    out.copy_(results[0]), lse.copy_(results[1])
    empty = seq_lens == 0
    out[empty], lse[empty] = float("nan"), float("nan")
    clear_empty_rows(out, seq_lens, lse=lse)
    return out, lse
