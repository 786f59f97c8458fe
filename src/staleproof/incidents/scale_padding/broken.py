"""The faulty functions of incident 5, each named after what it does wrong.

Three faults that were blamed or overlooked: scales whose padding nobody writes, expert ids of the
wrong width or drawn twice, and a reduction "per token" that includes the neighbour's row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from staleproof import device
from staleproof.incidents.scale_padding import ids
from staleproof.ops import nvfp4 as kernels
from staleproof.ops.reference import nvfp4 as reference

device.load_triton()

import triton
import triton.language as tl

Leave = Callable[[torch.Tensor], object]


# A layout of the scales in vLLM's ``scaled_fp4_quant``: the rows of a tile, or ``None`` for plain rows.
PATHS: dict[str, int | None] = {"128x4": 128, "linear": None, "8x4": 8}
# The behaviour of create_fp4_scale_tensor in some release: the layouts that it filled with zeros. The 8 x 4
# branch (``use_8x4_sf_layout``: a trtllm backend, at most 32 rows) returns FlashInfer's own buffer and never
# calls it (read in 0.18.1 and 0.20.2; vLLM #47587).
ALLOCATIONS: dict[str, tuple[int | None, ...]] = {
    # Before vLLM #38148, and again after #42988 and #53568.
    "empty": (),
    # vLLM #38148.
    "zeros_both_layouts": (128, None),
    # vLLM #45739.
    "zeros_swizzled_only": (128,),
}


def quantize_blocks_only(
    x: torch.Tensor, factor: torch.Tensor, tile: int | None, allocation: str, leave: Leave
) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4 by a kernel that writes only the scales of blocks; padding keeps what ``allocation`` put there.

    Args:
        x: (m, n).
        factor: (1,) float32 global scale.
        tile: rows of a tile of scales, one of :data:`PATHS`.
        allocation: one of :data:`ALLOCATIONS`.
        leave: fills fresh memory, float8_e4m3fn, as an earlier owner would have left it.

    Returns:
        Packed values, and scales in that layout.
    """
    m, n = x.shape
    shape = reference.scale_shape(m, n, swizzled=tile is not None, row_tile=tile or 128)
    scales = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    leave(scales)
    if tile in ALLOCATIONS[allocation]:
        scales.view(torch.uint8).zero_()
    packed = torch.empty(m, n // 2, dtype=torch.uint8, device=x.device)
    if tile == 8:
        linear = torch.empty(m, n // 16, dtype=torch.float8_e4m3fn, device=x.device)
        kernels._launch(x, factor, packed, linear, False, False)
        at = reference.scale_offsets(m, n // 16, row_tile=8, device=x.device)
        scales.view(torch.uint8).view(-1)[at] = linear.view(torch.uint8)
    else:
        kernels._launch(x, factor, packed, scales, tile is not None, False)
    return packed, scales


def simulate_with_replacement(
    tokens: int, experts: int, top_k: int, *, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniformly random routing with ``randint``: an expert may come twice, and ids are int64.

    Stands for ``DistributionBasedRouting`` of vLLM up to 0.27.1 (drawing) and up to 0.33.0 (width: its
    ``indices_type`` is None for several all-to-all backends). Returns the same as
    :func:`staleproof.incidents.scale_padding.ids.simulate_routing`.
    """
    ids.check_route(tokens, experts, top_k)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, experts, (tokens, top_k), generator=generator)
    weights = torch.full((tokens, top_k), 1 / top_k)
    return weights.to(device), drawn.to(device)


def read_as_int32(topk_ids: torch.Tensor) -> torch.Tensor:
    """What a kernel reads if it takes the pointer as (tokens, top_k) int32.

    Little-endian int64 ids then read as id, 0, id, 0, ..., and the second half of the tokens is never read.
    """
    words = topk_ids.contiguous().view(torch.int32).flatten()
    return words[: topk_ids.numel()].view(topk_ids.shape)


def pack_in_the_width_of_the_ids(topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """``(id << 16) | weight`` without a cast: with int64 ids the packed tensor is int64 too.

    Stands for vLLM's ``experts/trtllm_fp8_moe.py`` (0.18.1), fed by the simulator.
    """
    return topk_ids << 16 | ids.weight_bits(topk_weights)


@triton.jit
def _per_token_kernel(
    x, x_fp8, scales, rows, hidden,
    SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Two rows a program, as two short rows share a warp. SHARED: one maximum over both."""
    row = tl.program_id(0).to(tl.int64) * 2 + tl.arange(0, 2)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    at = row[:, None] * hidden + column[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    # Like fmaxf: comparisons with NaN are false, so that a NaN never becomes the maximum.
    magnitude = tl.where(values > 0, values, tl.where(values < 0, -values, 0.0))
    amax = tl.max(magnitude, 1)
    if SHARED:
        amax = tl.where(amax == amax, tl.max(amax, 0), amax)
    scale = tl.where(amax > 0, tl.div_rn(amax, 448.0), 1.0)
    scaled = values * tl.div_rn(1.0, scale)[:, None]
    # Like fmaxf and fminf: a NaN becomes -448.
    scaled = tl.where(scaled > -448.0, scaled, -448.0)
    scaled = tl.where(scaled < 448.0, scaled, 448.0)
    tl.store(x_fp8 + at, scaled, mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


def _per_token(x: torch.Tensor, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, hidden = x.shape
    # Round to fp8 with torch, because the cast of Triton's interpreter loses carries.
    scaled = torch.empty(rows, hidden, dtype=torch.float32, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    _per_token_kernel[(triton.cdiv(rows, 2),)](
        x.contiguous(),
        scaled,
        scales,
        rows,
        hidden,
        SHARED=shared,
        BLOCK=triton.next_power_of_2(hidden),
        num_warps=1,
    )
    return scaled.to(torch.float8_e4m3fn), scales


def neighbour_in_the_maximum(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token fp8 whose maximum is taken over the two rows of a warp: a neighbour can set the scale.

    Stands for the quantisers of vLLM #40047, #42984 and FlashInfer #3057. A NaN in the
    neighbour is dropped, so that no NaN check fires; a large number there costs a live row digits.

    Args:
        x: (rows, hidden).

    Returns:
        (rows, hidden) float8_e4m3fn, and (rows,) float32 scales.
    """
    return _per_token(x, shared=True)


def row_alone(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same kernel with the maximum of each row kept apart. Arguments and results as above."""
    return _per_token(x, shared=False)


PER_TOKEN = {"neighbour_in_the_maximum": neighbour_in_the_maximum, "row_alone": row_alone}


def nan_chance(tile_bytes: int = 512) -> float:
    """Chance that random bytes hold an e4m3 NaN: 0x7F and 0xFF are the only two."""
    return 1 - math.pow(254 / 256, tile_bytes)
