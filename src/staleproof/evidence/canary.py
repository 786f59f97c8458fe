"""Canaries: NaN values that carry a number in their mantissa.

Fill an output with them before a kernel is launched. If a canary is still there afterwards, the kernel did
not write that element. Any other NaN was computed. A plain NaN cannot distinguish the two. fp8 e4m3 has
a single NaN per sign and so no room for a number.
"""

from __future__ import annotations

import math

import torch

from staleproof import check

# Per format: integer type of its width, bits of its quiet NaN, number of mantissa bits free for the
# stage. Hardware and conversions produce NaNs with all free bits 0 or all 1, so a stage may have neither.
_QUIET_NAN = {
    torch.bfloat16: (torch.int16, 0x7FC0, 6),
    torch.float16: (torch.int16, 0x7E00, 9),
    torch.float32: (torch.int32, 0x7FC00000, 22),
}

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """View ``x`` as integers of the same width, to compare bits: a NaN is not equal to itself.

    >>> bits(torch.tensor([1.0, -0.0])).tolist()
    [1065353216, -2147483648]
    """
    return x.view(BITS[x.element_size()])


def by_row(x: torch.Tensor) -> torch.Tensor:
    """View a tensor of rows as (rows, elements); there may be none of either.

    >>> by_row(torch.zeros(2, 3, 4)).shape, by_row(torch.zeros(0, 3)).shape, by_row(torch.zeros(5)).shape
    (torch.Size([2, 12]), torch.Size([0, 3]), torch.Size([5, 1]))
    """
    return x.reshape(len(x), math.prod(x.shape[1:]))


def _payload(stage: int, x: torch.Tensor) -> tuple[torch.dtype, int]:
    check.tensor("x", x)
    dtype = x.dtype
    check.require(dtype in _QUIET_NAN, "x", "bfloat16, float16 or float32", dtype)
    integer, quiet, width = _QUIET_NAN[dtype]
    last = 2**width - 2
    in_range = isinstance(stage, int) and 1 <= stage <= last
    check.require(in_range, "stage", f"1 to {last} for {dtype}", repr(stage))
    return integer, quiet | stage


def plant(x: torch.Tensor, stage: int = 1) -> torch.Tensor:
    """Fill ``x`` in place with the canary of a stage.

    Args:
        x: bf16, fp16 or fp32, any shape.
        stage: number that the canary carries, from 1 to 62 (bf16), 510 (fp16) or 4194302 (fp32). Use
            one per kernel to see whose output was not written.

    Returns:
        ``x``.

    Raises:
        ValueError: no tensor, another dtype, or a stage that does not fit into the mantissa.

    >>> out = plant(torch.empty(3, 4))
    >>> out[0] = 1.0  # a kernel that forgets rows 1 and 2
    >>> row_states(out)
    ['finite', 'unwritten', 'unwritten']
    """
    integer, pattern = _payload(stage, x)
    x.view(integer).fill_(pattern)
    return x


def row_states(x: torch.Tensor, stage: int = 1) -> list[str]:
    """Say what happened to each row since :func:`plant`.

    Args:
        x: (rows, ...), bf16, fp16 or fp32, filled by ``plant(x, stage)`` before the launch.
        stage: as given to :func:`plant`.

    Returns:
        One word per row: ``unwritten`` (all canaries are still there), ``partly written`` (some are),
        ``nan`` (written, and at least one value is NaN or Inf), ``zero``, or ``finite``.

    Raises:
        ValueError: as :func:`plant`, or a tensor without rows.

    >>> out = plant(torch.empty(3, 2, dtype=torch.bfloat16), stage=5)
    >>> out[0], out[1], out[2, 0] = float("nan"), 0.0, 3.0
    >>> row_states(out, stage=5)
    ['nan', 'zero', 'partly written']
    """
    integer, pattern = _payload(stage, x)
    check.rows("x", x)
    flat = by_row(x)
    kept = flat.view(integer) == pattern
    bad = ~torch.isfinite(flat)
    states = torch.full((x.shape[0],), 4, device=x.device)
    states[(flat == 0).all(1)] = 3
    states[bad.any(1)] = 2
    states[kept.any(1)] = 1
    states[kept.all(1)] = 0
    words = ("unwritten", "partly written", "nan", "zero", "finite")
    return [words[i] for i in states.tolist()]
