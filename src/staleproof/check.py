"""Argument checks that name the argument, what was expected and what came.

Every public function checks its arguments through here before it writes anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def require(ok: bool, name: str, expected: str, got: object) -> None:
    """Raise ``ValueError("name: expected ..., got ...")`` unless ``ok``."""
    if not ok:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def _shape_text(shape: Iterable[int | str | None]) -> str:
    return "(" + ", ".join("*" if s is None else str(s) for s in shape) + ")"


def tensor(
    name: str,
    x: torch.Tensor,
    *,
    shape: tuple[int | None, ...] | None = None,
    ndim: int | tuple[int, ...] | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    like: torch.Tensor | None = None,
    contiguous: bool = False,
) -> None:
    """Check one tensor argument.

    Args:
        name: the argument's name, as the caller wrote it.
        x: the argument.
        shape: expected shape; ``None`` stands for any size.
        ndim: expected rank, or the ranks allowed.
        dtype: expected dtype, or the dtypes allowed.
        like: a tensor whose device ``x`` must share.
        contiguous: whether ``x`` must be contiguous.

    Raises:
        ValueError: naming the argument, what was expected and what came.
    """
    import torch

    require(isinstance(x, torch.Tensor), name, "a torch.Tensor", type(x).__name__)
    if ndim is not None:
        ranks = (ndim,) if isinstance(ndim, int) else ndim
        require(
            x.ndim in ranks,
            name,
            f"a tensor of rank {' or '.join(map(str, ranks))}",
            f"shape {tuple(x.shape)}",
        )
    if shape is not None:
        ok = x.ndim == len(shape) and all(
            want is None or have == want for want, have in zip(shape, x.shape, strict=False)
        )
        require(ok, name, f"shape {_shape_text(shape)}", f"shape {tuple(x.shape)}")
    if dtype is not None:
        dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
        require(x.dtype in dtypes, name, " or ".join(map(str, dtypes)), x.dtype)
    if like is not None:
        require(x.device == like.device, name, f"a tensor on {like.device}", f"one on {x.device}")
    if contiguous:
        require(x.is_contiguous(), name, "a contiguous tensor", f"strides {x.stride()}")
