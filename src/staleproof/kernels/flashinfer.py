"""FlashInfer's Triton kernels, which need no nvcc; its compiled ones are in ``flashinfer_cuda``."""

from __future__ import annotations

from staleproof import audit

_UTILS = "flashinfer.triton.utils"
_NORM = (
    "flashinfer.triton.norm",
    "flashinfer.triton.kernels.norm",
    "flashinfer.triton.kernels.quant",
    _UTILS,
)
_ACTIVATION = ("flashinfer.triton.activation", "flashinfer.triton.kernels.activation", *_NORM[1:])


@audit.rows(name="triton.norm.rms_norm", package="flashinfer-python", files=_NORM)
def rms_norm(x):
    import torch
    from flashinfer.triton.norm import rms_norm

    out = torch.empty_like(x)
    rms_norm(x, torch.ones(x.shape[1], device=x.device, dtype=x.dtype), out, 1e-6)
    return out


@audit.rows(name="triton.norm.rms_norm_add_residual", package="flashinfer-python", files=_NORM)
def rms_norm_add_residual(x):
    import torch
    from flashinfer.triton.norm import rms_norm_add_residual

    x, residual = x.clone(), x.clone()
    rms_norm_add_residual(x, residual, torch.ones(x.shape[1], device=x.device, dtype=x.dtype), 1e-6)
    return x, residual


@audit.rows(name="triton.activation.silu_and_mul", package="flashinfer-python", files=_ACTIVATION)
def silu_and_mul(x):
    from flashinfer.triton.activation import silu_and_mul

    return silu_and_mul(x)
