"""What was in a tensor before: a look at memory at a chosen moment of a running engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Contents(NamedTuple):
    """What a piece of memory held.

    Attributes:
        values: how many.
        nonzero: those that are not 0; a NaN is not.
        nan: those that are NaN.
    """

    values: int
    nonzero: int
    nan: int


def contents(memory: torch.Tensor) -> Contents:
    """Count what a tensor holds, read in its own dtype. On a GPU this waits for the work before it.

    >>> import torch
    >>> contents(torch.tensor([0.0, 1.0, float("nan")]))
    Contents(values=3, nonzero=2, nan=1)
    """
    nonzero = int((memory != 0).sum())
    return Contents(memory.numel(), nonzero, int((memory != memory).sum()))


@contextlib.contextmanager
def before(owner: Any, name: str, look: Callable[..., object], *, runs: bool = True) -> Iterator[None]:
    """Call ``look`` with the arguments of each call of a method or function, before that call.

    Args:
        owner: class, object or module.
        name: of its function.
        look: e.g. keeps :func:`contents` of what the call is about to write.
        runs: whether the function itself runs; without, it is as if its body were ``pass``.
    """
    original = getattr(owner, name)

    def spied(*args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return original(*args, **kwargs) if runs else None

    own = name in vars(owner)
    setattr(owner, name, spied)
    try:
        yield
    finally:
        setattr(owner, name, original) if own else delattr(owner, name)
