"""How far a result is from a reference, as one line for :class:`staleproof.cases.case.Fix`."""

from __future__ import annotations

import torch

from staleproof.check import require


def too_far(what: str, got: torch.Tensor, want: torch.Tensor, budget: float) -> str | None:
    """What is wrong with ``got``, or ``None`` if every element is within the error budget.

    Args:
        what: what is compared, for the message.
        got: the result, any shape.
        want: the reference, same shape, finite.
        budget: largest error allowed, as a share of the largest magnitude of ``want``; 0 for equal.

    Raises:
        ValueError: another shape.

    >>> want = torch.tensor([1.0, 2.0])
    >>> too_far("live rows", want * 1.001, want, 2**-6) is None
    True
    >>> too_far("live rows", want * 3, want, 2**-6)
    'live rows: off by 4, 0.03125 is allowed'
    """
    require(got.shape == want.shape, "got", f"the shape {tuple(want.shape)}", tuple(got.shape))
    if not want.numel():
        return None
    want, got = want.double(), got.double()
    allowed = budget * float(want.abs().max())
    if not bool(got.isfinite().all()):
        return f"{what}: not finite"
    error = float((got - want).abs().max())
    return None if error <= allowed else f"{what}: off by {error:.4g}, {allowed:.4g} is allowed"


def other_bits(what: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
    """What is wrong with ``got``, or ``None`` if it holds the same bytes as ``want``.

    >>> nan = torch.tensor([float("nan")])
    >>> other_bits("untouched rows", nan, nan) is None
    True
    >>> other_bits("untouched rows", nan, torch.zeros(1))
    'untouched rows: 2 of 4 bytes differ'
    """
    require(got.shape == want.shape, "got", f"the shape {tuple(want.shape)}", tuple(got.shape))
    mine, theirs = (x.contiguous().view(torch.uint8) for x in (got, want))
    differ = int((mine != theirs).sum())
    return f"{what}: {differ} of {theirs.numel()} bytes differ" if differ else None
