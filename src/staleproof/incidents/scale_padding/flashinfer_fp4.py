"""FlashInfer's FP4 kernels on our bytes: its layout, its dequantisation, and its quantiser."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from staleproof import device as devices
from staleproof.cases import children
from staleproof.device import Provenance
from staleproof.incidents.scale_padding.scene import Product
from staleproof.ops.nvfp4 import quantize_nvfp4
from staleproof.ops.reference import nvfp4 as reference

BUILD_SECONDS = 90
Build = Callable[[], str | None]


def unavailable_reason(subject: object, device: str) -> str | None:
    """Why FlashInfer's kernels cannot run here, or ``None``."""
    if devices.provenance() is not Provenance.MEASURED:
        return "needs a CUDA device"
    return devices.flashinfer_missing()


def _fp4() -> Any:
    return importlib.import_module("flashinfer.quantization.fp4_quantization")


def _build_fp4() -> None:
    _fp4().get_fp4_quantization_module("{}{}".format(*torch.cuda.get_device_capability()))


def start_build(device: str) -> Build:
    """Compile FlashInfer's FP4 module in the background of other questions.

    Returns:
        A function that waits for the compilation and returns one line that says what went wrong, or ``None``.
    """
    child = children.start(_build_fp4)

    @cache
    def failure() -> str | None:
        ended = child.wait(BUILD_SECONDS)
        if ended.code is None:
            return f"FlashInfer's FP4 module did not compile in {BUILD_SECONDS} s"
        return "FlashInfer's FP4 module did not compile here" if ended.code else None

    return failure


def interleaves(a: Product) -> str:
    """Compare FlashInfer's 128x4 layout of our scales with ours."""
    _, linear = quantize_nvfp4(a.x, a.factor, swizzled=False)
    _, scales = quantize_nvfp4(a.x, a.factor)
    tiles = _fp4().block_scale_interleave(linear.view(torch.uint8).contiguous())
    same = torch.equal(tiles.flatten(), scales.view(torch.uint8).flatten())
    return "same bytes" if same else "differ"


def dequantizes(a: Product) -> str:
    """Compare FlashInfer's dequantisation of our bytes, which runs on the host, with ours."""
    packed, scales = quantize_nvfp4(a.x, a.factor)
    raw = scales.view(torch.uint8).flatten().cpu()
    back = _fp4().e2m1_and_ufp8sf_scale_to_float(packed.cpu(), raw, 1 / a.factor.cpu(), 16, 1, True)
    ours = reference.dequantize_nvfp4(packed, scales, a.factor).cpu()
    return "same values" if torch.allclose(back, ours, rtol=1e-6, atol=0) else "differ"


def quantizes(a: Product) -> str:
    """Run FlashInfer's quantiser twice over fresh memory, filled with one byte, then with another."""
    ours = [part.view(torch.uint8).flatten() for part in quantize_nvfp4(a.x, a.factor)]
    seen = {}
    for byte in (0x55, 0xAA):
        # Fill blocks of the sizes that it will request, and return them to the caching allocator.
        freed = [torch.full_like(part, byte) for part in ours for _ in range(4)]
        del freed
        seen[byte] = [part.view(torch.uint8).flatten() for part in _fp4().fp4_quantize(a.x, a.factor)]
        torch.cuda.synchronize()
    if all(map(torch.equal, seen[0x55], ours)):
        return "same bytes"
    untouched = all(bool((part == byte).all()) for byte, parts in seen.items() for part in parts)
    return "writes nothing" if untouched else "differ"


class PublicKernel(NamedTuple):
    """A comparison with ours, and its expected verdict; ``None``: any verdict is recorded."""

    compare: Callable[[Product], str]
    expected: str | None


KERNELS = {
    "block_scale_interleave": PublicKernel(interleaves, "same bytes"),
    "e2m1_and_ufp8sf_scale_to_float": PublicKernel(dequantizes, "same values"),
    # Below SM100 this kernel has no body and writes nothing.
    "fp4_quantize": PublicKernel(quantizes, None),
}
