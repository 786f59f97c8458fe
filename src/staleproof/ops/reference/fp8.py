"""The contract of quantize_fp8_per_tensor in plain PyTorch."""

from __future__ import annotations

import torch

E4M3_MAX = 448.0


def quantize_fp8_per_tensor(
    x: torch.Tensor,
    *,
    live_rows: int | torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
    saturate_nan: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic per-tensor FP8, with the amax of the live rows.

    Args and results are those of :func:`staleproof.ops.fp8.quantize_fp8_per_tensor`.

    >>> x_fp8, scale = quantize_fp8_per_tensor(torch.tensor([[448.0], [torch.nan]]), live_rows=1)
    >>> x_fp8.float().flatten(), scale
    (tensor([448.,   0.]), tensor([1.]))
    """
    if is_padding is not None:
        live_rows = ~is_padding
    elif live_rows is None:
        live_rows = x.shape[0]
    if isinstance(live_rows, torch.Tensor) and live_rows.dtype == torch.bool:
        live = live_rows
    else:
        live = torch.arange(x.shape[0], device=x.device) < live_rows
    values = x[live].float()
    counted = values.nan_to_num(0.0, torch.inf, -torch.inf) if saturate_nan else values
    amax = counted.abs().max() if values.numel() else values.new_zeros(())
    smallest = torch.finfo(torch.float32).tiny
    # Divide by a tensor: for a Python number CUDA multiplies with the rounded reciprocal.
    scale = amax / torch.full_like(amax, E4M3_MAX)
    scale = torch.where(amax == 0, 1.0, scale.clamp(min=smallest)).reshape(1)
    x_fp8 = torch.zeros(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scaled = (values * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX)
    if saturate_nan:
        scaled = scaled.nan_to_num(E4M3_MAX)
    # PyTorch has no indexed write of FP8: write the bytes.
    x_fp8.view(torch.uint8)[live] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return x_fp8, scale
