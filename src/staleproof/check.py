"""Argument checks whose errors name the argument, the expected value and the actual one.

Every public function checks its arguments here before it writes anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch


def fail(name: str, expected: str, got: object) -> NoReturn:
    """Raise ``ValueError("name: expected ..., got ...")``.

    >>> fail("top_k", "1 to 8", 9)
    Traceback (most recent call last):
    ValueError: top_k: expected 1 to 8, got 9
    """
    raise ValueError(f"{name}: expected {expected}, got {got}")


def require(ok: bool, name: str, expected: str, got: object) -> None:
    """Fail unless ``ok``.

    The texts are made on every call. Where that costs too much, write
    ``if not ok: check.fail(...)``.

    >>> require(3 <= 8, "top_k", "1 to 8", 3)
    """
    if not ok:
        fail(name, expected, got)


def _shape_text(shape: Iterable[int | str | None]) -> str:
    sizes = ["*" if s is None else str(s) for s in shape]
    return f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"


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
        ValueError: naming the argument, the expected value and the actual one.

    >>> import torch
    >>> tensor("x", torch.ones(2, 3), shape=(None, 4))
    Traceback (most recent call last):
    ValueError: x: expected shape (*, 4), got shape (2, 3)
    """
    import torch

    # The texts are made only on failure: these checks run on every call of every operation.
    if not isinstance(x, torch.Tensor):
        fail(name, "a torch.Tensor", type(x).__name__)
    if ndim is not None:
        ranks = (ndim,) if isinstance(ndim, int) else ndim
        if x.ndim not in ranks:
            fail(name, f"a tensor of rank {' or '.join(map(str, ranks))}", f"shape {tuple(x.shape)}")
    if shape is not None and (
        x.ndim != len(shape)
        or any(want is not None and have != want for want, have in zip(shape, x.shape, strict=True))
    ):
        fail(name, f"shape {_shape_text(shape)}", f"shape {tuple(x.shape)}")
    if dtype is not None:
        dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
        if x.dtype not in dtypes:
            fail(name, " or ".join(map(str, dtypes)), x.dtype)
    if like is not None and x.device != like.device:
        fail(name, f"a tensor on {like.device}", f"one on {x.device}")
    if contiguous and not x.is_contiguous():
        fail(name, "a contiguous tensor", f"strides {x.stride()}")


def rows(name: str, x: torch.Tensor) -> None:
    """Check that an argument is a tensor with a first axis.

    >>> rows("x", [1.0])
    Traceback (most recent call last):
    ValueError: x: expected a torch.Tensor, got list
    """
    tensor(name, x)
    if not x.ndim:
        fail(name, "rows, at least one axis", "a tensor of shape ()")


def out_pair(out: object, names: str) -> None:
    """Check that ``out`` is a pair of results, e.g. ``names`` = "(x_fp8, scale)".

    >>> out_pair([1, 2, 3], "(x_fp8, scale)")
    Traceback (most recent call last):
    ValueError: out: expected (x_fp8, scale), got a list of 3
    """
    if not isinstance(out, (tuple, list)):
        fail("out", names, type(out).__name__)
    if len(out) != 2:
        fail("out", names, f"a {type(out).__name__} of {len(out)}")


def bound(kernel: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments among ``known`` that a kernel names.

    Raises:
        TypeError: the kernel requires an argument that is not in ``known``.

    >>> bound(lambda q, seq_lens, *, softmax_scale=1.0: q, {"q": 1, "seq_lens": 2, "out": 3})
    {'q': 1, 'seq_lens': 2}
    """
    found = {}
    for name, parameter in inspect.signature(kernel).parameters.items():
        if name in known:
            found[name] = known[name]
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise TypeError(f"needs {name}; known: {', '.join(known)}")
    return found
