"""Canaries: a NaN whose mantissa names who planted it.

Planted before a launch, it answers what a plain NaN cannot: a surviving canary is memory nobody
wrote, any other NaN was computed. Formats with a single NaN a sign (fp8 e4m3) have no room for a
name; :func:`unwritten_bitmap` tells the same of any dtype from two runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from staleproof import check

# Quiet-NaN bits of each format. The payload goes into the low mantissa bits; 0 and all-ones are
# left out because hardware and conversions produce them.
_QUIET_NAN = {
    torch.bfloat16: (torch.int16, 0x7FC0, 6),
    torch.float16: (torch.int16, 0x7E00, 9),
    torch.float32: (torch.int32, 0x7FC00000, 22),
}

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """``x`` seen as integers of the same width. NaN compares unequal to itself, bits do not."""
    return x.view(BITS[x.element_size()])


def _payload(stage: int, dtype: torch.dtype) -> tuple[torch.dtype, int]:
    check.require(dtype in _QUIET_NAN, "x", "bfloat16, float16 or float32", dtype)
    integer, quiet, width = _QUIET_NAN[dtype]
    last = 2**width - 2
    check.require(1 <= stage <= last, "stage", f"1 to {last} for {dtype}", stage)
    return integer, quiet | stage


def plant(x: torch.Tensor, stage: int = 1) -> torch.Tensor:
    """Fill ``x`` in place with the canary of ``stage``.

    Args:
        x: bf16, fp16 or fp32, any shape.
        stage: 1 to 62 (bf16), 510 (fp16), 4194302 (fp32).

    Returns:
        ``x``.

    Raises:
        ValueError: another dtype, or a stage the mantissa cannot hold.
    """
    integer, pattern = _payload(stage, x.dtype)
    x.view(integer).fill_(pattern)
    return x


def row_states(x: torch.Tensor, stage: int = 1) -> list[str]:
    """What became of each row since :func:`plant`.

    Args:
        x: (rows, ...), planted with ``stage`` before the launch.

    Returns:
        One word a row: ``unwritten`` (every canary survives), ``partly written``, ``nan`` (written,
        with a NaN or Inf in it), ``zero``, or ``finite``.
    """
    integer, pattern = _payload(stage, x.dtype)
    flat = x.reshape(x.shape[0], -1)
    kept = flat.view(integer) == pattern
    bad = ~torch.isfinite(flat)
    states = torch.full((x.shape[0],), 4, device=x.device)
    states[(flat == 0).all(1)] = 3
    states[bad.any(1)] = 2
    states[kept.any(1)] = 1
    states[kept.all(1)] = 0
    words = ("unwritten", "partly written", "nan", "zero", "finite")
    return [words[i] for i in states.tolist()]


def unwritten_bitmap(run: Callable[[], torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Which elements of ``out`` a launch leaves unwritten, for any dtype.

    ``run`` is launched twice over two complementary byte patterns; an element that shows the
    pattern both times was not written.

    Args:
        run: launches the kernel under test, which writes ``out``.
        out: the memory it writes; contiguous.

    Returns:
        bool, shape of ``out``.
    """
    check.tensor("out", out, contiguous=True)
    raw = bits(out)
    untouched = torch.ones_like(raw, dtype=torch.bool)
    for pattern in (0x55, 0xAA):
        out.view(torch.uint8).fill_(pattern)
        before = raw.clone()
        run()
        untouched &= raw == before
    return untouched
