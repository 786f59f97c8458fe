"""flash-linear-attention (the distribution fla-core)."""

from __future__ import annotations

from functools import partial

import torch

from staleproof.kernels import references, subject

_ragged = partial(subject.ragged, package="fla-core")
_rows = partial(subject.rows, package="fla-core")


@_rows(name="l2norm", reference=references.l2_norm)
def l2norm(x):
    from fla.modules.norm.l2norm import l2norm

    return l2norm(x)


@_rows(name="rms_norm", reference=references.rms_norm)
def rms_norm(x):
    from fla.modules.norm.layernorm import rms_norm

    return rms_norm(x, torch.ones(x.shape[1], device=x.device, dtype=x.dtype), None)


@_ragged(name="fused_recurrent_gated_delta_rule", reference=references.gated_delta_rule)
def gated_delta_rule(x, starts):
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    x = x.view(1, len(x), 2, -1)
    g, beta = torch.full_like(x[..., 0], -0.1), torch.full_like(x[..., 0], 0.5)
    out, _ = fused_recurrent_gated_delta_rule(
        x, x, x, g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=starts.long()
    )
    return out[0]


@_ragged(name="chunk_gated_delta_rule", reference=references.gated_delta_rule)
def chunk_gated_delta_rule(x, starts):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    x = x.view(1, len(x), 2, -1)
    g, beta = torch.full_like(x[..., 0], -0.1), torch.full_like(x[..., 0], 0.5)
    out, _ = chunk_gated_delta_rule(x, x, x, g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=starts)
    return out[0]


@_ragged(name="causal_conv1d", reference=references.sum_of_four)
def causal_conv1d(x, starts):
    from fla.modules.causal_conv1d import causal_conv1d

    weight = torch.ones(x.shape[1], 4, device=x.device, dtype=x.dtype)
    return causal_conv1d(x[None], weight, cu_seqlens=starts, backend="triton")[0][0]
