"""Liger-Kernel's forward passes."""

from __future__ import annotations

from functools import partial

import torch

from staleproof.kernels import references, subject

_rows = partial(subject.rows, package="liger-kernel")


@_rows(name="rms_norm", reference=references.rms_norm)
def rms_norm(x):
    from liger_kernel.ops.rms_norm import rms_norm_forward

    weight = torch.ones(x.shape[1], device=x.device, dtype=x.dtype)
    return rms_norm_forward(x, weight, 1e-6, 0.0, "llama", None)[0]


@_rows(name="softmax", reference=references.softmax)
def softmax(x):
    from liger_kernel.ops.softmax import _softmax_forward

    return _softmax_forward(x)[0]


@_rows(name="layer_norm", reference=references.layer_norm)
def layer_norm(x):
    from liger_kernel.ops.layer_norm import layer_norm_forward

    weight = torch.ones(x.shape[1], device=x.device, dtype=x.dtype)
    return layer_norm_forward(x, weight, torch.zeros_like(weight), 1e-6)[0]


@_rows(name="swiglu", reference=references.swiglu)
def swiglu(x):
    from liger_kernel.ops.swiglu import swiglu_forward

    return swiglu_forward(x.clone(), x.clone())[-1]


@subject.experts(name="fused_moe", package="liger-kernel", hidden=64, inner=64)
def fused_moe(x, w1, w2, topk_weights, topk_ids):
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    return LigerFusedMoEFunction.apply(x, w1, w2, topk_ids.int(), topk_weights.to(x.dtype))
