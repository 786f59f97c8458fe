"""MXFP4 scales as Hopper's kernel stores and reads them, in plain torch, with the fault and without.

Follows ``triton_kernels`` v3.5.1, which vLLM 0.22.1 ships: ``tensor_details/layout_details/hopper_scale.py``
for the layout, ``matmul_ogs_details/_matmul_ogs.py:246-350`` for what a tile reads, and
``swiglu_details/_swiglu.py`` for the clamps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from staleproof.check import require
from staleproof.incidents.mxfp4_scales.weights import GROUP, Matrix, Shape, values

# SwiGLU of gpt-oss: gate * sigmoid(ALPHA * gate) * (up + 1), both clamped to LIMIT.
ALPHA, LIMIT = 1.702, 7.0
# Values along K in a tile of Hopper's kernel: 4 groups of scales.
TILE = 128
NONE, LANES, GROUPS = "none", "lanes", "groups"


@dataclass(frozen=True)
class Kernel:
    """One way to store and read the scales; the default is that of vLLM 0.16.0 to 0.25.1.

    Attributes:
        align: the layout pads the groups to a multiple of this. The kernel reads multiples of 4.
        mask: what the kernel masks in its last tile: ``"none"``; ``"lanes"`` of the swizzled load, as vLLM
            #47323 proposes; ``"groups"`` beyond K after the unswizzle, as triton #10190.
        drops_nan: whether the clamps of SwiGLU drop a NaN, as ``tl.minimum`` and ``fmin`` do.
        warps: number of warps of the kernel, which determines the layout.
    """

    align: int = 2
    mask: str = NONE
    drops_nan: bool = True
    warps: int = 8


SHIPPED = Kernel()


def _up(value: int, to: int) -> int:
    return -(-value // to) * to


def stored_groups(shape: Shape, kernel: Kernel) -> int:
    """Groups of scales that a row has in memory."""
    shape.check()
    return _up(shape.k // GROUP, kernel.align)


def read_groups(shape: Shape) -> int:
    """Groups of scales that the kernel reads for a row, in whole tiles.

    >>> read_groups(Shape(32, 5760, 2880)), stored_groups(Shape(32, 5760, 2880), SHIPPED)
    (92, 90)
    """
    return _up(shape.k, TILE) // GROUP


def stored_bytes(shape: Shape, kernel: Kernel) -> int:
    """Bytes of the swizzled scales.

    >>> stored_bytes(Shape(32, 5760, 2880), SHIPPED)
    16957440
    """
    return shape.experts * _up(shape.n, 32 * kernel.warps) * stored_groups(shape, kernel)


def byte_of(
    expert: torch.Tensor, row: torch.Tensor, group: torch.Tensor, shape: Shape, kernel: Kernel = SHIPPED
) -> torch.Tensor:
    """The byte offset of the scale of one row and group from the first scale.

    A storage row holds 32 rows of the matrix: with 8 warps, row ``m`` is in storage row
    ``(m // 256) * 8 + m // 16 % 8``. Two groups take 64 bytes of it.

    Args:
        expert, row, group: integers; broadcast against each other.
        shape: of the projection.
        kernel: its alignment and warps.

    >>> zero, one = torch.tensor(0), torch.tensor(1)
    >>> shape = Shape(1, 256, 128)
    >>> [int(byte_of(zero, *at, shape)) for at in ((zero, one), (one, zero), (8 * one, zero))]
    [2, 4, 1]
    """
    warps, width = kernel.warps, 32 * stored_groups(shape, kernel)
    storage = row // (32 * warps) * warps + row // 16 % warps
    column = group // 2 * 64 + row // (16 * warps) % 2 * 32 + row % 8 * 4 + group % 2 * 2 + row // 8 % 2
    return (expert * (_up(shape.n, 32 * warps) // 32) + storage) * width + column


def reach(shape: Shape, kernel: Kernel = SHIPPED) -> torch.Tensor:
    """The byte that each scale is read from, (experts, n rounded up, groups that are read)."""
    rows = torch.arange(_up(shape.n, 32 * kernel.warps))[:, None]
    experts = torch.arange(shape.experts)[:, None, None]
    return byte_of(experts, rows, torch.arange(read_groups(shape)), shape, kernel)


def past_the_end(shape: Shape, kernel: Kernel = SHIPPED) -> int:
    """How many bytes the kernel reads past the last scale.

    The last row of the last expert reads furthest, so the others need not be looked at.

    >>> past_the_end(Shape(128, 5760, 2880)), past_the_end(Shape(128, 5760, 2880), Kernel(align=4))
    (64, 0)
    """
    last = shape._replace(experts=1)
    end = stored_bytes(last, kernel)
    return max(0, int(reach(last, kernel).max()) + 1 - end)


def columns_behind(shape: Shape, kernel: Kernel = SHIPPED) -> dict[int, int]:
    """Byte past the end -> column of the product that it changes; columns of padding are omitted."""
    last = shape._replace(experts=1)
    offsets = reach(last, kernel)[0] - stored_bytes(last, kernel)
    found = (offsets >= 0).nonzero().tolist()
    return {int(offsets[row, group]): row for row, group in found if row < shape.n}


def swizzled(scale: torch.Tensor, kernel: Kernel = SHIPPED, pad: int = 0) -> torch.Tensor:
    """The scales of a checkpoint as bytes in memory.

    Args:
        scale: (experts, n, groups) uint8.
        kernel: the layout.
        pad: the value of the padding.
    """
    experts, n, groups = scale.shape
    shape = Shape(experts, n, groups * GROUP)
    where = reach(shape, kernel)[..., : stored_groups(shape, kernel)]
    whole = functional.pad(scale, (0, where.shape[2] - groups, 0, where.shape[1] - n), value=pad)
    memory = torch.empty(stored_bytes(shape, kernel), dtype=torch.uint8)
    memory[where.flatten()] = whole.flatten()
    return memory


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    """Scale bytes as the kernel decodes them: shifted into a bf16's exponent, where 0xff is infinity.

    >>> e8m0(torch.tensor([127, 128, 0xFE, 0xFF], dtype=torch.uint8)).tolist()
    [1.0, 2.0, 1.7014118346046923e+38, inf]
    """
    return (scale.to(torch.int32) << 23).view(torch.float32)


def product(x: torch.Tensor, matrix: Matrix, slab: torch.Tensor, kernel: Kernel = SHIPPED) -> torch.Tensor:
    """Each expert's product, with scales read from a slab.

    Args:
        x: (experts, rows, k) or (rows, k).
        matrix: the weights; its scales are not used.
        slab: (bytes,) uint8; :func:`swizzled` scales, and the bytes after them.
        kernel: its layout and mask.

    Returns:
        (experts, rows, n) fp32.

    Raises:
        ValueError: the slab ends before the last byte that the kernel reads.
    """
    shape = matrix.shape
    needed = stored_bytes(shape, kernel) + past_the_end(shape, kernel)
    require(len(slab) >= needed, "slab", f"at least {needed} bytes", len(slab))
    scale = slab[reach(shape, kernel)[:, : shape.n]]
    group = torch.arange(read_groups(shape))
    left = shape.k - group // 4 * TILE
    if kernel.mask == GROUPS:
        scale = torch.where(group % 4 * GROUP < left, scale, 0)
    if kernel.mask == LANES:
        # A tile has four times 32 lanes. Two of the four hold two groups of one set of rows, the other two
        # those of another set.
        lane = group % 4 // 2 * 2 + torch.arange(shape.n)[:, None] // (16 * kernel.warps) % 2
        scale = torch.where(lane * GROUP < left, scale, 0)
    pad = _up(shape.k, TILE) - shape.k
    weights = functional.pad(values(matrix.weight), (0, pad)) * e8m0(scale).repeat_interleave(GROUP, dim=-1)
    return functional.pad(x.float(), (0, pad)) @ weights.transpose(-2, -1)


def swiglu(h: torch.Tensor, drops_nan: bool = True) -> torch.Tensor:
    """SwiGLU as gpt-oss has it: (..., 2 * n) with gate and up interleaved, to (..., n).

    >>> swiglu(torch.full((1, 2), torch.nan)), swiglu(torch.full((1, 2), torch.nan), drops_nan=False)
    (tensor([[55.9996]]), tensor([[nan]]))
    """
    gate, up = h[..., ::2], h[..., 1::2]
    limit = torch.tensor(LIMIT, device=h.device)
    least, most = (torch.fmin, torch.fmax) if drops_nan else (torch.minimum, torch.maximum)
    gate, up = least(gate, limit), most(-limit, least(up, limit))
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)
