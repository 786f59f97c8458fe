"""Dynamic per-tensor FP8 whose scale reads live rows only."""

from __future__ import annotations

import torch

from staleproof import check, device
from staleproof.ops.cuda_runtime import processor_count

device.load_triton()

import triton
import triton.language as tl

INTERPRET = device.interpreting()
E4M3_MAX = 448.0
# A scale below the smallest normal number would have no finite reciprocal.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


@triton.jit
def _row_is_live(row, rows, live_rows, live_count, LIVE: tl.constexpr):
    if LIVE == "mask":
        return tl.load(live_rows + row) != 0
    else:
        return row < live_count


@triton.jit
def _amax_kernel(
    x, live_rows, live_count, partial, rows, hidden, row_stride,
    LIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of the live rows, one partial result a program.

    Magnitudes are compared as the integers their bits spell: same order, and every NaN is above
    infinity, so that no version of Triton can lose one.
    """
    if LIVE == "tensor":
        live_count = tl.minimum(tl.load(live_rows), rows)
    slices = tl.cdiv(hidden, BLOCK)
    bits = tl.zeros([BLOCK], tl.int32)
    for tile in tl.range(tl.program_id(0), live_count * slices, tl.num_programs(0)):
        row = tile // slices
        if _row_is_live(row, rows, live_rows, live_count, LIVE):
            column = (tile % slices) * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(x + row.to(tl.int64) * row_stride + column, mask=column < hidden, other=0.0)
            magnitude = values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
            bits = tl.maximum(bits, magnitude)
    tl.store(partial + tl.program_id(0), tl.max(bits, 0))


@triton.jit
def _encode_e4m3(x):
    """The byte of the E4M3 number nearest to ``x`` (|x| <= 448, or NaN), ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    # Exponents are biased by 7 there and by 127 here; below 2**-6 numbers are 2**-9 apart, and
    # adding 2**14 leaves no finer bit.
    normal = rounded - (120 << 3)
    shifted = tl.where(x < 0, -x, x) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _quantize_kernel(
    x, live_rows, live_count, partial, programs, x_fp8, scale, rows, hidden, row_stride,
    smallest_scale,
    LIVE: tl.constexpr, BLOCK: tl.constexpr, PARTIALS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    if LIVE == "tensor":
        live_count = tl.minimum(tl.load(live_rows), rows)
    index = tl.arange(0, PARTIALS)
    amax = tl.max(tl.load(partial + index, mask=index < programs, other=0), 0).to(tl.float32, bitcast=True)
    factor = tl.div_rn(amax, 448.0)
    factor = tl.where(factor < smallest_scale, smallest_scale, factor)
    factor = tl.where(amax == 0.0, 1.0, factor)
    inverse = tl.div_rn(1.0, factor)
    if tl.program_id(0) == 0:
        tl.store(scale, factor)
    slices = tl.cdiv(hidden, BLOCK)
    for tile in tl.range(tl.program_id(0), rows * slices, tl.num_programs(0)):
        row = tile // slices
        column = (tile % slices) * BLOCK + tl.arange(0, BLOCK)
        target = x_fp8 + row.to(tl.int64) * hidden + column
        if _row_is_live(row, rows, live_rows, live_count, LIVE):
            values = tl.load(x + row.to(tl.int64) * row_stride + column, mask=column < hidden, other=0.0)
            scaled = values.to(tl.float32) * inverse
            # Comparisons, not clamp: a NaN passes both and stays visible.
            scaled = tl.where(scaled > 448.0, 448.0, scaled)
            scaled = tl.where(scaled < -448.0, -448.0, scaled)
            if INTERPRET:
                # The interpreter's cast drops the carry into the exponent, and NaN.
                codes = _encode_e4m3(scaled)
            else:
                codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            tl.store(target, codes, mask=column < hidden)
        else:
            tl.store(target, tl.zeros([BLOCK], tl.uint8), mask=column < hidden)


def quantize_fp8_per_tensor(
    x: torch.Tensor, *, live_rows: int | torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic per-tensor FP8 quantisation whose scale is that of the live rows.

    Upstream's scale is the amax of the whole padded batch, so that one stale row rescales, or
    with ``torch.max`` turns into NaN, every request of the step (vLLM #37442). Here the amax reads
    live rows only, which is also less work: two launches, no host sync.

    Args:
        x: (rows, hidden) float32, float16 or bfloat16; last axis contiguous.
        live_rows: which rows belong to requests: the first n of them (an int, or an int32 tensor
            of shape (1,) on the device), those where a (rows,) bool mask is true, or all (None).

    Returns:
        ``x_fp8`` (rows, hidden) float8_e4m3fn, padding rows zero; ``scale`` (1,) float32, such
        that ``x_fp8 * scale`` is about ``x``. The scale is amax / 448, at least the smallest
        normal float32, and 1 where no row is live or every live value is zero. As with
        ``torch.max``, a NaN in a live row makes the scale and all live rows NaN: it was born
        there, and stays visible. An infinite one makes the scale infinite.

    Raises:
        ValueError: an argument does not fit.
    """
    check.tensor("x", x, ndim=2, dtype=(torch.bfloat16, torch.float16, torch.float32))
    check.require(x.numel() > 0, "x", "at least one element", f"shape {tuple(x.shape)}")
    check.require(x.stride(1) == 1, "x", "a contiguous last axis", f"strides {x.stride()}")
    rows, hidden = x.shape
    kind, live, count = "all", None, rows
    if isinstance(live_rows, torch.Tensor):
        live = live_rows
        if live.dtype == torch.bool:
            check.tensor("live_rows", live, shape=(rows,), like=x, contiguous=True)
            kind = "mask"
        else:
            check.tensor("live_rows", live, shape=(1,), dtype=torch.int32, like=x)
            kind = "tensor"
    elif live_rows is not None:
        check.require(
            isinstance(live_rows, int) and 0 <= live_rows <= rows, "live_rows", f"0 to {rows} rows", live_rows
        )
        count = live_rows

    x_fp8 = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    block = min(4096, triton.next_power_of_2(hidden))
    tiles = rows * triton.cdiv(hidden, block)
    programs = min(tiles, 8 * processor_count(x.device.index) if x.is_cuda else 8)
    partial = torch.empty(programs, dtype=torch.int32, device=x.device)
    _amax_kernel[(programs,)](
        x, live, count, partial, rows, hidden, x.stride(0), LIVE=kind, BLOCK=block, num_warps=8
    )
    _quantize_kernel[(programs,)](
        x,
        live,
        count,
        partial,
        programs,
        x_fp8.view(torch.uint8),
        scale,
        rows,
        hidden,
        x.stride(0),
        SMALLEST_SCALE,
        LIVE=kind,
        BLOCK=block,
        PARTIALS=triton.next_power_of_2(programs),
        INTERPRET=INTERPRET,
        num_warps=8,
    )
    return x_fp8, scale
