"""Per-tensor FP8 with and without padding rows: ours, vLLM's op, PyTorch eager and compiled, a memset.

With all rows live ours does the same work as the others: what it gains there over eager
``torch.max`` is the fusion of its kernels, and only what fewer live rows gain is the fix. Batches that one
program holds are timed with one launch and with two: the one must not be slower.

Run: ``python benchmarks/quantize_fp8_per_tensor.py`` on a machine with a CUDA device.
``STALEPROOF_VLLM_C_SO`` names the compiled library of a vLLM wheel that has
``dynamic_scaled_fp8_quant``: ``_C_stable_libtorch.abi3.so`` in 0.22.1, ``_C.abi3.so`` in 0.20.2;
without it that peer is left out. A release in the path, as in ``vllm-0.22.1/``, names the peer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from staleproof import device

device.select()

from staleproof.cases import measure
from staleproof.ops import fp8
from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.reference import fp8 as reference

ROWS = 1024
# DeepSeek's hidden size, its attention output before the projection, its latent output.
HIDDEN = (7168, 128 * 128, 128 * 512)
LIVE = (1, 512, 1024)
# Rows and columns of the largest batches that one program holds, and of a small one.
FEW = ((1, 7168), (16, 512), (4, 512))
Quantized = tuple[torch.Tensor, torch.Tensor]


def all_rows(x: torch.Tensor) -> Quantized:
    """Per-tensor dynamic FP8 as upstream's PyTorch path does it: over the padded batch."""
    scale = (x.abs().max().float() / reference.E4M3_MAX).reshape(1)
    scaled = (x.float() * scale.reciprocal()).clamp(-reference.E4M3_MAX, reference.E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn), scale


def vllm() -> dict[str, Callable[[torch.Tensor], Quantized]]:
    """vLLM's compiled op over all rows by its name; empty if the variable does not name its library."""
    path = os.environ.get("STALEPROOF_VLLM_C_SO")
    if path is None:
        print("STALEPROOF_VLLM_C_SO is not set: vLLM's fp8 op is not run")
        return {}
    torch.ops.load_library(path)
    op = torch.ops._C.dynamic_scaled_fp8_quant

    def quantise(x: torch.Tensor) -> Quantized:
        # As vLLM's scaled_fp8_quant allocates them: the op sets the scale itself.
        result = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        scale = torch.empty(1, dtype=torch.float32, device=x.device)
        op(result, x, scale)
        return result, scale

    release = re.search(r"vllm-(\d+\.\d+\.\d+)", path)
    return {f"vLLM {release[1]}'s op" if release else "vLLM's op": quantise}


def right(got: Quantized, x: torch.Tensor, live: int) -> bool:
    """Whether the scale is that of the rows read; a byte may round the other way."""
    want, scale = reference.quantize_fp8_per_tensor(x, live_rows=live)
    close = torch.isclose(got[0].float(), want.float(), rtol=0.13, atol=2**-9)
    return bool(close.all()) and torch.allclose(got[1], scale, rtol=1e-6)


def few() -> Iterator[dict[str, Any]]:
    """Small batches with one launch, and with two."""
    for count, hidden in FEW:
        x = torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16)
        for provider, whole in (("staleproof", fp8.WHOLE), ("staleproof, two launches", 0)):
            with mock.patch.multiple(fp8, WHOLE=whole, _SEEN=fp8.Seen()):
                is_right = right(quantize_fp8_per_tensor(x), x, count)
                if not measure.checked(provider, is_right, f"wrong result for {count} rows of {hidden}"):
                    continue
                times = measure.graph_times([lambda x=x: quantize_fp8_per_tensor(x)])
            yield measure.row(
                *("mla_padding", "quantize_fp8_per_tensor", provider, f"bf16 ({count}, {hidden})"),
                *("live rows", count, times, 3 * count * hidden),
                cache=measure.WARM,
            )


def rows() -> list[dict[str, Any]]:
    """Measure every case.

    Raises:
        DeviceError: no GPU.
    """
    measure.require_gpu()
    compiled, of_vllm = torch.compile(all_rows), vllm()
    found = [*few()]
    for hidden in HIDDEN:
        turns = measure.rotation(ROWS * hidden * 2)
        xs = [torch.randn(ROWS, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(turns.sets)]
        result_bytes = ROWS * hidden
        targets = [torch.empty(result_bytes, dtype=torch.uint8, device="cuda") for _ in xs]

        def add(
            provider: str,
            live: int,
            call: Callable[[torch.Tensor], Quantized],
            *,
            xs: list[torch.Tensor] = xs,
            turns: measure.Rotation = turns,
            hidden: int = hidden,
        ) -> None:
            is_right = right(call(xs[0]), xs[0], live)
            if not measure.checked(provider, is_right, f"wrong result for {live} rows of {hidden}"):
                return
            for cache, times in measure.cached_times([lambda x=x: call(x) for x in xs], turns):
                found.append(
                    measure.row(
                        "mla_padding",
                        "quantize_fp8_per_tensor",
                        provider,
                        f"bf16 ({ROWS}, {hidden})",
                        "live rows",
                        live,
                        times,
                        live * hidden * 2 + ROWS * hidden,
                        cache=cache,
                    )
                )

        for live in LIVE:
            count_on_device = torch.tensor([live], dtype=torch.int32, device="cuda")
            mask = torch.arange(ROWS, device="cuda") < live
            add("staleproof", live, lambda x, n=count_on_device: quantize_fp8_per_tensor(x, live_rows=n))
            add("staleproof, mask", live, lambda x, m=mask: quantize_fp8_per_tensor(x, live_rows=m))
        add("staleproof, all rows", ROWS, quantize_fp8_per_tensor)
        for name, op in of_vllm.items():
            add(f"{name}, all rows", ROWS, op)
        add("torch eager, all rows", ROWS, all_rows)
        add("torch.compile, all rows", ROWS, compiled)
        times = measure.graph_times([lambda t=target: measure.memset_async(t) for target in targets])
        found.append(
            measure.row(
                "mla_padding",
                "quantize_fp8_per_tensor",
                "limit: memset of the result",
                f"bf16 ({ROWS}, {hidden})",
                "live rows",
                1,
                times,
                result_bytes,
                cache=measure.COLD,
            )
        )
    return found


if __name__ == "__main__":
    measure.print_rows(rows(), baseline="staleproof, all rows")
