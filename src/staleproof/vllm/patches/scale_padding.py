"""Patch for incident 5: the padding of swizzled FP4 scales is zero."""

from __future__ import annotations

from typing import Any

from staleproof.vllm.arguments import Arguments, Keywords, argument
from staleproof.vllm.hooks import Target
from staleproof.vllm.patch import Patch
from staleproof.vllm.sources import Evidence, Sources

OPS = "vllm._custom_ops"
FUSED = "vllm.model_executor.layers.fusion.fused_act_quant"
NAMES = ("m", "n", "device", "is_sf_swizzled_layout")
# One scale for 16 elements; a tile is 128 rows by 4 columns, in memory (32, 4, 4).
BLOCK, ROWS, COLUMNS = 16, 128, 4
KERNEL = "silu_mul_cvt_fp16_to_fp4"


def _tracing() -> bool:
    """Say whether torch traces this call, for a graph in which vLLM may fuse what comes next."""
    import torch

    from staleproof.ops.private import mode_count

    return torch.compiler.is_compiling() or mode_count() > 0


def _zeroed(args: Arguments, kwargs: Keywords) -> Any:
    """Allocate vLLM's swizzled scale tensor zeroed: int32, four scales an element.

    In a graph only. Outside, nothing but the kernel of ``scaled_fp4_quant`` writes this memory, and that one
    writes the padding.
    """
    m, n, device, swizzled = (argument(args, kwargs, i, NAMES[i]) for i in range(4))
    if not swizzled or not _tracing():
        return NotImplemented
    import torch

    from staleproof.ops.reference.nvfp4 import create_fp4_scale_tensor

    scales = create_fp4_scale_tensor(m, n, swizzled=True, device=device)
    return scales.view(torch.int32)


def _clear_padding(result: Any, args: Arguments, kwargs: Keywords) -> Any:
    """Zero the padding of the swizzled scales in a ``QuantizedActivation`` of NVFP4.

    Other results (a plain activation, FP8) are returned as they are.
    """
    import torch

    # NVFP4 packs two values into a byte of ``data``.
    if getattr(getattr(result, "data", None), "dtype", None) is not torch.uint8:
        return result
    if not hasattr(result, "orig_shape"):
        return result
    width = result.orig_shape[-1]
    rows, columns = result.data.numel() * 2 // width, width // BLOCK
    # A trace would keep for all numbers of rows what is true of one.
    tracing = _tracing()
    if not tracing and rows % ROWS == 0 and columns % COLUMNS == 0:
        return result
    down, across = result.scale.shape[0] // ROWS, result.scale.shape[1] // COLUMNS
    tiles = result.scale.view(torch.uint8).view(down, across, 32, 4, COLUMNS)
    # Those of the last tile.
    used, columns = rows - (down - 1) * ROWS, columns - (across - 1) * COLUMNS
    if tracing:
        device = tiles.device
        row = torch.arange(32, device=device)[:, None] + 32 * torch.arange(4, device=device)
        tiles[-1].masked_fill_((row >= used)[None, :, :, None], 0)
    else:
        # A fill of a slice is one launch, and a mask takes six. Row r is at [r % 32, r // 32].
        full, part = divmod(used, 32)
        if part:
            tiles[-1, :, part:, full] = 0
            full += 1
        if full < 4:
            tiles[-1, :, :, full:] = 0
    if tracing or columns < COLUMNS:
        tiles[:, -1, :, :, columns:] = 0
    return result


def _probe(sources: Sources) -> Evidence:
    text = sources.text("_custom_ops.py")
    if "def create_fp4_scale_tensor(" in text:
        found = sources.function("_custom_ops.py", "create_fp4_scale_tensor")
        swizzled = found.text.partition("if is_sf_swizzled_layout:")[2].partition("else:")[0]
        if "return torch.empty" not in swizzled:
            return Evidence(False, f"{found.at('return torch.zeros')} allocates zeros")
        place = found.at("return torch.empty")
    elif "def scaled_fp4_quant(" in text:
        found = sources.function("_custom_ops.py", "scaled_fp4_quant")
        place = found.at("output_scale = torch.empty(")
    else:
        return Evidence(False, "_custom_ops.py has no create_fp4_scale_tensor")
    return Evidence(True, f"{place} allocates empty scales, of which {KERNEL} leaves the padding unwritten")


PATCHES = (
    Patch(
        name="scale_padding",
        incident="scale_padding",
        summary="allocates swizzled FP4 scales zeroed",
        models="NVFP4 models on Blackwell, where SiLU and quantisation are fused",
        versions=(("0.18.0", "0.19.1"), ("0.22.0", "0.24.0"), ("0.30.0", "0.33.0")),
        targets=(
            Target(OPS, "create_fp4_scale_tensor", NAMES, instead=_zeroed),
            # Allocates scales of its own.
            Target(
                FUSED,
                "maybe_fused_act_quant",
                ("act_fn", "x", "linear"),
                after=_clear_padding,
                versions=("0.30.0", "0.33.0"),
            ),
        ),
        probe=_probe,
        mechanism=(
            "Swizzled scales are padded to tiles of 128 rows by 4 columns. The kernel of "
            "scaled_fp4_quant writes the padding, but where SiLU, multiplication and quantisation are "
            f"fused, {KERNEL} writes into the same tensor and leaves the padding as it was. A scale "
            "of 0x7F or 0xFF there is a NaN to whatever reads the whole tile. With the patch the "
            "padding is zero. Outside of a compiled graph nothing is fused, and the tensor is left as it "
            "is. The scales of scaled_fp4_experts_quant are empty memory too, and stay "
            "so: zeroing them would write hundreds of MiB a layer, and no token reads the rows that "
            "they pad. Their columns are padded only if a row is not a multiple of 64 elements."
        ),
        threads=("vLLM #38148", "vLLM #42988", "vLLM #45741", "vLLM #45739", "vLLM #53568"),
        cost="in a compiled graph one fill of the scales, 1/16 byte an element; outside nothing, but where "
        "SiLU is fused by hand (0.30.0) and rows or columns do not fill their tiles",
        traced=True,
    ),
)
