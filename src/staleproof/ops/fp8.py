"""Dynamic per-tensor FP8 quantisation whose scale depends on live rows only (incident 1)."""

from __future__ import annotations

import torch

from staleproof import check, device
from staleproof.ops.cuda_runtime import capability, processor_count
from staleproof.ops.e4m3 import encode_e4m3
from staleproof.ops.launching import Ready, Seen, address, empty, key_of, launched
from staleproof.ops.operators import operator, require_values

device.load_triton()

import triton
import triton.language as tl

INTERPRET = device.interpreting()
# A scale below the smallest normal number would have no finite reciprocal.
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Up to this many elements, one program of 1,024 threads quantises everything, eight elements a thread. That
# saves a second launch and the memory between the two.
WHOLE, WHOLE_WARPS = 8192, 32


@triton.jit
def _row_is_live(row, rows, live_rows, live_count, LIVE: tl.constexpr):
    if LIVE == "mask":
        return tl.load(live_rows + row, mask=row < rows, other=0) != 0
    elif LIVE == "padding":
        return tl.load(live_rows + row, mask=row < rows, other=1) == 0
    else:
        return row < live_count


@triton.jit
def _scale_of(amax_bits, smallest_scale):
    """The scale of values whose largest magnitude has these bits."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    factor = tl.div_rn(amax, 448.0)
    factor = tl.where(factor < smallest_scale, smallest_scale, factor)
    return tl.where(amax == 0.0, 1.0, factor)


@triton.jit
def _magnitude_of(values, SATURATE: tl.constexpr):
    """The bits of |values|, which sort as integers. A NaN is above infinity; with SATURATE it is 0."""
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if SATURATE:
        bits = tl.where(bits > 0x7F800000, 0, bits)
    return bits


@triton.jit
def _codes_of(values, inverse, BY_BITS: tl.constexpr, SATURATE: tl.constexpr):
    scaled = values * inverse
    if SATURATE:
        scaled = tl.where(scaled != scaled, 448.0, scaled)
    # Comparisons, because clamp may replace a NaN: here a NaN stays a NaN.
    scaled = tl.where(scaled > 448.0, 448.0, scaled)
    scaled = tl.where(scaled < -448.0, -448.0, scaled)
    if BY_BITS:
        bits = scaled.to(tl.int32, bitcast=True)
        magnitude = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        return (encode_e4m3(magnitude) | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        return scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


# Not specialised on numbers that change from step to step: no step should compile.
@triton.jit(do_not_specialize=["live_count", "rows"])
def _whole_kernel(
    x, live_rows, x_fp8, scale, live_count, rows, hidden, row_stride, smallest_scale,
    LIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BY_BITS: tl.constexpr,
    SATURATE: tl.constexpr,
):  # fmt: skip
    """All ROWS x BLOCK elements in one program, which reads them once and keeps them."""
    if LIVE == "tensor":
        live_count = tl.minimum(tl.load(live_rows), rows)
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    at = row.to(tl.int64)[:, None] * row_stride + column[None, :]
    # Padding rows are read too, because the flag that says which rows are padding is loaded meanwhile.
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    live = _row_is_live(row, rows, live_rows, live_count, LIVE)[:, None]
    magnitude = tl.where(live, _magnitude_of(values, SATURATE), 0)
    factor = _scale_of(tl.max(tl.max(magnitude, 1), 0), smallest_scale)
    tl.store(scale, factor)
    codes = _codes_of(values, tl.div_rn(1.0, factor), BY_BITS, SATURATE)
    target = row.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(x_fp8 + target, tl.where(live, codes, 0), mask=inside)


# Not specialised on numbers that change from step to step: no step should compile.
@triton.jit(do_not_specialize=["live_count", "rows"])
def _amax_kernel(
    x, live_rows, partial, live_count, rows, hidden, row_stride,
    LIVE: tl.constexpr, BLOCK: tl.constexpr, SATURATE: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of the live rows, one partial result a program.

    Magnitudes are compared by their bits, as integers. The order is the same, and every NaN is
    above infinity, while Triton's versions disagree on the maximum of a NaN and a number.
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
            bits = tl.maximum(bits, _magnitude_of(values.to(tl.float32), SATURATE))
    tl.store(partial + tl.program_id(0), tl.max(bits, 0))


@triton.jit(do_not_specialize=["live_count", "programs", "rows"])
def _quantize_kernel(
    x, live_rows, partial, x_fp8, scale, live_count, programs, rows, hidden, row_stride,
    smallest_scale,
    LIVE: tl.constexpr, BLOCK: tl.constexpr, PARTIALS: tl.constexpr, BY_BITS: tl.constexpr,
    SATURATE: tl.constexpr,
):  # fmt: skip
    if LIVE == "tensor":
        live_count = tl.minimum(tl.load(live_rows), rows)
    index = tl.arange(0, PARTIALS)
    amax = tl.max(tl.load(partial + index, mask=index < programs, other=0), 0)
    factor = _scale_of(amax, smallest_scale)
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
            codes = _codes_of(values.to(tl.float32), inverse, BY_BITS, SATURATE)
            tl.store(target, codes, mask=column < hidden)
        else:
            tl.store(target, tl.zeros([BLOCK], tl.uint8), mask=column < hidden)


def _by_bits(x: torch.Tensor) -> bool:
    """Whether FP8 codes are made from the bits of float32, without a cast.

    GPUs before compute capability 8.9 have no cast to e4m3. The interpreter's cast loses NaN and the
    carry into the exponent.
    """
    return INTERPRET or capability(x.device.index) < (8, 9)


@operator(
    "quantize_fp8_per_tensor(Tensor x, Tensor? live_rows, Tensor? is_padding, SymInt live_count, "
    "Tensor(a!) x_fp8, Tensor(b!) scale, bool saturate_nan=False) -> ()"
)
def _launch(
    x: torch.Tensor,
    live_rows: torch.Tensor | None,
    is_padding: torch.Tensor | None,
    live_count: int,
    x_fp8: torch.Tensor,
    scale: torch.Tensor,
    saturate_nan: bool = False,
) -> tuple[Ready | None, Ready, int] | None:
    """Launch without checks. With neither ``live_rows`` nor ``is_padding``, ``live_count`` rows are live.

    Returns:
        The launches of the amax and of the quantisation, to be repeated, and their number of programs. The
        first is ``None`` if one launch does both; all is ``None`` if nothing was compiled.
    """
    rows, hidden = x.shape
    kind, decides = "all", live_rows
    if is_padding is not None:
        kind, decides = "padding", is_padding
    elif live_rows is not None:
        kind = "mask" if live_rows.dtype == torch.bool else "tensor"
    block = triton.next_power_of_2(hidden)
    if rows * block <= WHOLE:
        numbers = live_count, rows, hidden, x.stride(0), SMALLEST_SCALE
        of_whole = (*numbers, kind, WHOLE // block, block, _by_bits(x), saturate_nan)
        operands = x, decides, x_fp8.view(torch.uint8), scale
        whole = launched(_whole_kernel, (1,), operands, of_whole, num_warps=WHOLE_WARPS)
        return None if whole is None else (None, whole, 1)
    block = min(4096, block)
    tiles = rows * triton.cdiv(hidden, block)
    most = 8 * processor_count(x.device.index) if x.is_cuda else 8
    programs = min(tiles, most)
    partial = torch.empty(programs, dtype=torch.int32, device=x.device)
    sizes = live_count, rows, hidden, x.stride(0), kind, block, saturate_nan
    amax = launched(_amax_kernel, (programs,), (x, decides, partial), sizes, num_warps=8)
    counts = live_count, programs, rows, hidden, x.stride(0), SMALLEST_SCALE
    # The same number of partial results for any number of rows, so that one compiled kernel serves all.
    of_quantize = (*counts, kind, block, triton.next_power_of_2(most), _by_bits(x), saturate_nan)
    tensors = x, decides, partial, x_fp8.view(torch.uint8), scale
    quantize = launched(_quantize_kernel, (programs,), tensors, of_quantize, num_warps=8)
    return None if amax is None or quantize is None else (amax, quantize, programs)


_SEEN: Seen[tuple[Ready | None, Ready, int]] = Seen()


def quantize_fp8_per_tensor(
    x: torch.Tensor,
    *,
    live_rows: int | torch.Tensor | None = None,
    is_padding: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    saturate_nan: bool = False,
    validate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dynamic per-tensor FP8 quantisation whose scale depends on live rows only.

    Upstream's scale is the amax of the whole padded batch: one stale row rescales every request of
    the step, or turns it into NaN with ``torch.max`` (vLLM #37442). Reading only live rows is also
    less work. Two launches, one up to 8,192 elements (counting a row up to the next power of two); no
    host sync.

    Args:
        x: (rows, hidden) float32, float16 or bfloat16; last axis contiguous.
        live_rows: the older way to say which rows belong to requests: the first n of them (an int,
            or a (1,) int32 tensor on the device), or those where a (rows,) bool mask is True.
        is_padding: (rows,) bool, True for padding rows, as in the routing functions. With neither
            keyword all rows are live.
        out: (x_fp8, scale) to write, contiguous, of the results' shapes and dtypes.
        saturate_nan: a NaN in a live row does not count in the scale and becomes 448, as in vLLM's CUDA
            kernel: then it stays in its row.
        validate: also check the value of a ``live_rows`` count on the device, which waits for the
            device; for tests and notebooks. Without it a count below 0 counts as 0, one above
            ``rows`` as ``rows``.

    Returns:
        ``x_fp8`` (rows, hidden) float8_e4m3fn, padding rows zero; ``scale`` (1,) float32, such
        that ``x_fp8 * scale`` is about ``x``. The scale is amax / 448, at least the smallest
        normal float32, and 1 if no row is live or every live value is zero. A NaN in a live row
        makes the scale and all live rows NaN, as with ``torch.max``, unless ``saturate_nan``: it was
        computed there, and hiding it would hide the fault. An infinite value makes the scale infinite.

    Raises:
        ValueError: an argument does not fit; nothing was written.

    >>> x = torch.tensor([[448.0, -2.0], [torch.nan, 7.0]])
    >>> x_fp8, scale = quantize_fp8_per_tensor(x, is_padding=torch.tensor([False, True]))
    >>> x_fp8.float(), scale
    (tensor([[448.,  -2.],
            [  0.,   0.]]), tensor([1.]))
    """
    results = out if isinstance(out, tuple | list) else (out,)
    key = key_of(x, live_rows, is_padding, saturate_nan, *results)
    if not validate and (again := _SEEN.get(key)) is not None:
        amax, quantize, programs = again
        if out is None:
            rows, hidden = x.shape
            x_fp8 = empty((rows, hidden), torch.float8_e4m3fn, x)
            scale = empty((1,), torch.float32, x)
        else:
            x_fp8, scale = out
        decides = live_rows if isinstance(live_rows, torch.Tensor) else is_padding
        at, decides_at = x.data_ptr(), address(decides)
        if amax is None:
            quantize(at, decides_at, x_fp8.data_ptr(), scale.data_ptr())
        else:
            partial = empty((programs,), torch.int32, x)
            amax(at, decides_at, partial.data_ptr())
            quantize(at, decides_at, partial.data_ptr(), x_fp8.data_ptr(), scale.data_ptr())
        return x_fp8, scale
    check.tensor("x", x, ndim=2, dtype=(torch.bfloat16, torch.float16, torch.float32))
    rows, hidden = x.shape
    if rows == 0 or hidden == 0:
        check.fail("x", "at least one element", f"shape {tuple(x.shape)}")
    if x.stride(1) != 1:
        check.fail("x", "a contiguous last axis", f"strides {x.stride()}")
    mask, count = None, rows
    if is_padding is not None:
        check.require(live_rows is None, "is_padding", "None beside live_rows", "both")
        check.tensor("is_padding", is_padding, shape=(rows,), dtype=torch.bool, like=x, contiguous=True)
    if isinstance(live_rows, torch.Tensor):
        mask = live_rows
        if mask.dtype == torch.bool:
            check.tensor("live_rows", mask, shape=(rows,), like=x, contiguous=True)
        else:
            check.tensor("live_rows", mask, shape=(1,), dtype=torch.int32, like=x)
    elif live_rows is not None:
        count = live_rows
    if validate and mask is not None and mask.dtype == torch.int32:
        require_values(x)
        count = int(mask)
    if not isinstance(count, (int, torch.SymInt)) or not 0 <= count <= rows:
        check.fail("live_rows", f"0 to {rows} rows", count)
    if out is None:
        x_fp8 = torch.empty(rows, hidden, dtype=torch.float8_e4m3fn, device=x.device)
        scale = torch.empty(1, dtype=torch.float32, device=x.device)
    else:
        check.out_pair(out, "(x_fp8, scale)")
        x_fp8, scale = out
        check.tensor(
            "out[0]", x_fp8, shape=(rows, hidden), dtype=torch.float8_e4m3fn, like=x, contiguous=True
        )
        check.tensor("out[1]", scale, shape=(1,), dtype=torch.float32, like=x, contiguous=True)
    _SEEN.keep(key, _launch(x, mask, is_padding, count, x_fp8, scale, saturate_nan))
    return x_fp8, scale
