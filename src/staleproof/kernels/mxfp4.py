"""MXFP4 weights, and two products of them: SGLang's ``matmul`` and vLLM's Marlin.

The wheel of sglang-kernel has the package ``triton_kernels``. 0.4.7 uses swizzled scales as they are in
memory; 0.4.10 clears the groups beyond K after the load, as Triton 3.8 does::

    python -m staleproof.kernels.mxfp4

downloads both wheels (373 MB each) and keeps the package, below 1 MB each, in the cache of packages under
audit. Triton's interpreter runs it in the same way as vLLM's (:mod:`staleproof.kernels.vllm_matmul_ogs`).
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from staleproof import device as devices
from staleproof.check import require
from staleproof.kernels import packages
from staleproof.kernels.vllm_matmul_ogs import be_hopper, launcher, teach
from staleproof.kernels.vllm_sources import UnavailableError

VERSIONS = ("0.4.7", "0.4.10")
NAME = "{}, MXFP4 scales of K 192"
# Values that share a scale; and multiples to which vLLM rounds hidden and intermediate sizes for Marlin.
GROUP, MARLIN = 32, (256, 128)
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


class Shape(NamedTuple):
    """Sizes of one projection: the product has ``n`` columns and sums over ``k``."""

    experts: int
    n: int
    k: int

    def check(self) -> None:
        """Raise unless the layout can hold it.

        >>> Shape(2, 256, 100).check()
        Traceback (most recent call last):
        ValueError: k: expected a multiple of 32, got 100
        """
        require(self.k > 0 and self.k % GROUP == 0, "k", "a multiple of 32", self.k)
        require(self.n > 0 and self.experts > 0, "n, experts", "at least 1", (self.n, self.experts))


class Matrix(NamedTuple):
    """One projection of all experts, in the format of a checkpoint.

    Attributes:
        weight: (experts, n, k / 2) uint8, two FP4 each, the first in the low half.
        scale: (experts, n, k / 32) uint8, E8M0.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    @property
    def shape(self) -> Shape:
        """Sizes of the projection."""
        experts, n, half = self.weight.shape
        return Shape(experts, n, 2 * half)

    def on(self, device: str) -> Matrix:
        """The same on a device."""
        return Matrix(*(each.to(device) for each in self))


def quantized(shape: Shape, generator: torch.Generator) -> Matrix:
    """Normal weights of std 0.02, converted to MXFP4 by the OCP Microscaling specification 1.0, section 6.3.

    Random bytes would hold 0xff more often than a checkpoint does.

    Args:
        shape: of the projection.
        generator: of the device.

    Raises:
        ValueError: K is no multiple of 32.
    """
    shape.check()
    experts, n, k = shape
    drawn = torch.randn(experts, n, k // GROUP, GROUP, generator=generator, device=generator.device) * 0.02
    exponent = drawn.abs().amax(-1).log2().floor() - 2
    middle = ((FP4[1:] + FP4[:-1]) / 2).to(drawn.device)
    codes = torch.bucketize(drawn.abs() / exponent.exp2()[..., None], middle) + 8 * (drawn < 0)
    low, high = codes.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return Matrix(low | high << 4, (exponent + 127).to(torch.uint8))


def values(weight: torch.Tensor) -> torch.Tensor:
    """The FP4 values, (..., k) fp32, of packed weights (..., k / 2) uint8, without their scales.

    >>> values(torch.tensor([0x1F], dtype=torch.uint8)).tolist()
    [-6.0, 0.5]
    """
    codes = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(-2).long()
    return torch.cat([FP4, -FP4]).to(weight.device)[codes]


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The numbers, (..., k) fp32, that weights and scales stand for."""
    return values(weight) * (scale.float() - 127).exp2().repeat_interleave(GROUP, -1)


def problem(device: str) -> tuple[torch.Tensor, ...]:
    """Two experts with K 192: their 6 groups of scales are stored without padding; a tile of 128 reads 8.

    Returns:
        x (3, 192) bf16, weight (2, 256, 96) uint8, scale (2, 256, 6) uint8, and on the CPU the
        dequantised values (2, 256, 192) fp64.
    """
    generator = torch.Generator().manual_seed(0)
    weight, scale = quantized(Shape(2, 256, 192), generator)
    x = torch.randn(3, 192, generator=generator).to(device, torch.bfloat16)
    return x, weight.to(device), scale.to(device), dequantized(weight, scale).double()


def each_expert(x: torch.Tensor, numbers: torch.Tensor, **operands: Any) -> tuple[torch.Tensor]:
    """The product of every row with each expert, (experts, rows, n) fp64."""
    return (torch.einsum("rk,enk->ern", x.cpu().double(), numbers),)


@cache
def _package(device: str) -> Any:
    if device == "cuda" and (why := devices.needs_sm90()):
        raise UnavailableError(why)
    if device == "cpu":
        be_hopper()
        teach()
    package = importlib.import_module("triton_kernels.matmul")
    if device == "cpu":
        details: Any = importlib.import_module("triton_kernels.matmul_details._matmul")
        # Compiled code reads this constexpr as its value; the interpreter needs a plain number. The functions
        # below return plain numbers where the interpreter needs tensors.
        details.MXFP_BLOCK_SIZE = 32
        for name in ("compute_pids", "compute_offsets"):
            setattr(details, name, _as_tensors(getattr(details, name)))
        package.specializations.get = lambda epilogue, activation: types.SimpleNamespace(
            _matmul=launcher(package._matmul, activation, epilogue, package.Tensor)
        )
    return package


def _as_tensors(function: Any) -> Any:
    def call(first: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return tuple(first * 0 + x if isinstance(x, int) else x for x in function(first, *args, **kwargs))

    return call


def sglang_operands(device: str) -> dict[str, Any]:
    """Rows, swizzled scales as bytes, and the package's weights and scales, for a product of each expert."""
    package = _package(device)
    layout = importlib.import_module("triton_kernels.tensor_details.layout")
    x, weight, scale, numbers = problem(device)
    values = layout.make_default_matmul_mxfp4_w_layout(mx_axis=-2)
    scales = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=-2, num_warps=8)
    tensor = importlib.import_module("triton_kernels.tensor")
    weights = tensor.convert_layout(tensor.wrap_torch_tensor(weight.mT, dtype=package.FP4), values)
    swizzled = tensor.convert_layout(tensor.wrap_torch_tensor(scale.mT), scales)
    operand = weights, swizzled
    return {"x": x, "scale": swizzled.storage.data, "operand": operand, "numbers": numbers}


def _rounded(part: torch.Tensor, n: int, k: int) -> torch.Tensor:
    return functional.pad(part, (0, k - part.shape[2], 0, n - part.shape[1])).contiguous()


def marlin(w13: Matrix, w2: Matrix) -> Callable[..., torch.Tensor]:
    """gpt-oss' experts with vLLM's Marlin backend, on a GPU, converted as its loader does.

    Args:
        w13, w2: the projections, gate and up interleaved.

    Returns:
        ``moe(x, topk_ids, topk_weights, behind)``, with the bytes ``behind`` right after the scales of both.
    """
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts import marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4
    from vllm.scalar_type import scalar_types

    experts, *sizes = w2.shape
    hidden = sizes[0]
    wide, inner = (-(-size // to) * to for size, to in zip(sizes, MARLIN, strict=True))
    given = [_rounded(w13.weight, 2 * inner, wide // 2), _rounded(w2.weight, wide, inner // 2)]
    given += [_rounded(w13.scale, 2 * inner, wide // GROUP), _rounded(w2.scale, wide, inner // GROUP)]
    layer = types.SimpleNamespace(params_dtype=torch.bfloat16)
    first, second, *scales, _, _ = marlin_utils_fp4.prepare_moe_mxfp4_layer_for_marlin(
        layer, *given, None, None
    )

    def moe(
        x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, behind: torch.Tensor
    ) -> torch.Tensor:
        slabs = [torch.cat([s.flatten().view(torch.uint8), behind.to(x.device)]) for s in scales]
        placed = [slab[: s.nbytes].view(s.dtype).view(s.shape) for slab, s in zip(slabs, scales, strict=True)]
        out: torch.Tensor = marlin_moe.fused_marlin_moe(
            functional.pad(x, (0, wide - hidden)), first, second, None, None, *placed, topk_weights,
            topk_ids.int(), scalar_types.float4_e2m1f.id, activation=MoEActivation.SWIGLUOAI,
            global_num_experts=experts,
        )  # fmt: skip
        return out[:, :hidden]

    return moe


if __name__ == "__main__":
    for version in VERSIONS:
        folder = packages.cache() / f"sglang_kernel-{version}"
        packages.fetch(f"sglang-kernel=={version}", r"triton_kernels/.*\.py", folder)
        print(folder)
