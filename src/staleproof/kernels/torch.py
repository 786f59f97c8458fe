"""PyTorch: attention by backend, top-k, norms, and the grouped matrix product."""

from __future__ import annotations

from functools import partial

import torch

from staleproof.kernels import references, subject

_gathered = partial(subject.attention, package="torch", layout="gathered")
_varlen = partial(subject.attention, package="torch", needs="cuda", q_len=0, head_dim=64)


@_gathered(name="SDPA math, boolean mask", given={"backend": "MATH"})
@_gathered(name="SDPA flash of the CPU, boolean mask", needs="cpu", given={"backend": "FLASH_ATTENTION"})
@_gathered(name="SDPA memory-efficient, boolean mask", needs="cuda", given={"backend": "EFFICIENT_ATTENTION"})
@_gathered(name="SDPA cuDNN, boolean mask", needs="cuda", head_dim=64, given={"backend": "CUDNN_ATTENTION"})
def sdpa(q, k, v, mask, softmax_scale, backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mask = mask.expand(-1, q.shape[1], 1, -1)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale)


@_gathered(name="flex_attention, eager", given={"compiled": False})
@_gathered(name="flex_attention, compiled", needs="cuda", given={"compiled": True})
def flex(q, k, v, mask, softmax_scale, compiled):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def within(b, h, i, j):
        return mask[b, 0, 0, j]

    size, attend = (128, torch.compile(flex_attention)) if compiled else (16, flex_attention)
    blocks = create_block_mask(within, len(q), None, 1, k.shape[2], device=str(q.device), BLOCK_SIZE=size)
    return attend(q, k, v, block_mask=blocks, scale=softmax_scale)


@_varlen(name="varlen_attn, paged", page_size=256)
def varlen_attn(
    q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_q_len, max_seq_len, softmax_scale
):
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        q, k_cache, v_cache, query_start_loc, None, max_q_len, max_seq_len, scale=softmax_scale,
        seqused_k=seq_lens, block_table=block_table, window_size=(-1, 0),
    )  # fmt: skip


@_varlen(name="_flash_attention_forward, seqused_k", skip={"B": "takes no block table"})
def aten_flash(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, max_q_len, softmax_scale):
    k, v = (cache[block_table.long()].flatten(1, 2) for cache in (k_cache, v_cache))
    room = k.shape[1]
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=q.device) * room
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k.flatten(0, 1), v.flatten(0, 1), query_start_loc, starts, max_q_len, room, 0.0, True, False,
        scale=softmax_scale, seqused_k=seq_lens,
    )  # fmt: skip
    return out, lse.T


@subject.routing(name="softmax, then topk", package="torch")
def softmax_topk(router_logits, top_k):
    return torch.topk(router_logits.softmax(-1), top_k, dim=-1)


@subject.routing(name="sigmoid with a bias, then topk", package="torch")
def sigmoid_topk(router_logits, top_k, bias=None):
    scores = router_logits.sigmoid()
    ids = torch.topk(scores if bias is None else scores + bias, top_k, dim=-1).indices
    return scores.gather(1, ids), ids


@subject.rows(name="rms_norm", reference=references.rms_norm, package="torch")
def rms_norm(x):
    return torch.nn.functional.rms_norm(x, x.shape[-1:])


@subject.rows(name="amax / 448 over the tensor, as QuantFP8.forward_native", package="torch")
def fp8_per_tensor(x):
    scale = (x.abs().max().float() / 448).reshape(1)
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@subject.ragged(
    name="_grouped_mm",
    reference=references.grouped_product,
    package="torch",
    hidden=64,
    dtype="bfloat16",
    documented={"U": 'torch.nn.functional.grouped_mm: "elements beyond offs[-1] are ignored"'},
)
def grouped_mm(x, starts):
    torch.manual_seed(0)
    weights = torch.randn(len(starts) - 1, x.shape[1], 32).to(x.device, torch.bfloat16)
    return torch._grouped_mm(x.bfloat16(), weights, offs=starts[1:])
