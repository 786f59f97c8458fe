"""How far a result is from a reference, as one line for :class:`staleproof.lab.Fix`.

Errors are judged a row at a time, so that a large row does not excuse a small one. What is allowed follows
from the dtype (:func:`rounding`): a correct kernel differs from a float64 reference because it rounds, and by
no more than it rounds.
"""

from __future__ import annotations

import torch

from staleproof.check import require, tensor


def rounding(dtype: torch.dtype, times: int = 1) -> float:
    """The share by which rounding to a dtype can move a number: ``times`` half the gap between neighbours.

    Count one for the result, one for each operand that the kernel rounds before a product (softmax weights
    in bf16, for example), and for sums in ``dtype`` one a term.

    Args:
        dtype: floating point, fp8 included.
        times: roundings one after another.

    >>> rounding(torch.bfloat16) == 2**-8, rounding(torch.float8_e4m3fn) == 2**-4
    (True, True)
    """
    return times * torch.finfo(dtype).eps / 2


def _same_shape(got: torch.Tensor, want: torch.Tensor) -> None:
    tensor("got", got)
    tensor("want", want)
    require(got.shape == want.shape, "got", f"the shape {tuple(want.shape)}", tuple(got.shape))


def too_far(what: str, got: torch.Tensor, want: torch.Tensor, budget: float) -> str | None:
    """What is wrong with ``got``, or ``None`` if each row is within the error budget, in three ways.

    - No element is further off than ``budget`` times the largest magnitude of its row.
    - The error's 2-norm is at most ``budget`` times that of the row: if each element may be off by a share
      of itself, so may the row.
    - No factor is common to all elements, beyond ``budget`` over the root of their number, or a quarter of
      ``budget`` for more than 16: roundings go either way, and over a row they average out. This finds what
      the first two let pass, such as rows 0.2 % too large in bf16.

    Args:
        what: what is compared, for the message.
        got: the result, (rows, ...), or (n,) for one row.
        want: the reference, same shape, finite; best not rounded.
        budget: share of the row, e.g. from :func:`rounding`; 0 for equal.

    Raises:
        ValueError: no tensor, another shape, or a ``want`` that is not finite.

    >>> want = torch.tensor([[1.0, 2.0], [100.0, 200.0]])
    >>> too_far("live rows", want * (1 + 2**-11), want, rounding(torch.bfloat16)) is None
    True
    >>> too_far("live rows", want * torch.tensor([[1.01], [1.0]]), want, rounding(torch.bfloat16))
    'live rows: row 0: an element off by 0.01, 0.00391 is allowed'
    """
    _same_shape(got, want)
    if not want.numel():
        return None
    require(bool(want.double().isfinite().all()), "want", "finite numbers", "a NaN or an infinity")
    rows = want.shape[0] if want.ndim > 1 else 1
    got, want = (x.double().reshape(rows, -1) for x in (got, want))
    if not bool(got.isfinite().all()):
        return f"{what}: not finite"
    error, common = got - want, min(4.0, want.shape[1] ** 0.5)
    found = (
        ("an element off by", error.abs().amax(1) / want.abs().amax(1), budget),
        ("the row off by", error.norm(dim=1) / want.norm(dim=1), budget),
        ("a common factor off by", (error * want).sum(1).abs() / (want * want).sum(1), budget / common),
    )
    for kind, shares, allowed in found:
        # A row of zeros allows no error: 0 / 0 is right, and anything else over 0 is infinite.
        row = int(shares.nan_to_num(0.0, torch.inf).argmax())
        if shares[row] > allowed:
            return f"{what}: row {row}: {kind} {shares[row]:.3g}, {allowed:.3g} is allowed"
    return None


def other_bits(what: str, got: torch.Tensor, want: torch.Tensor) -> str | None:
    """What is wrong with ``got``, or ``None`` if it holds the same bytes as ``want``.

    >>> nan = torch.tensor([float("nan")])
    >>> other_bits("untouched rows", nan, nan) is None
    True
    >>> other_bits("untouched rows", nan, torch.zeros(1))
    'untouched rows: 2 of 4 bytes differ'
    """
    _same_shape(got, want)
    got_bytes, want_bytes = (x.contiguous().view(torch.uint8) for x in (got, want))
    differ = int((got_bytes != want_bytes).sum())
    return f"{what}: {differ} of {want_bytes.numel()} bytes differ" if differ else None
