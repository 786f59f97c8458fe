"""Per-tensor FP8 with and without padding rows: ours, PyTorch eager and compiled, and a memset.

Run: ``python benchmarks/quantize_fp8_per_tensor.py`` on a machine with a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from staleproof import device

device.select()

from staleproof.harness import measure
from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.reference import fp8 as reference

ROWS = 1024
# DeepSeek's hidden size, its attention output before the projection, its latent output.
HIDDEN = (7168, 128 * 128, 128 * 512)
LIVE = (1, 512, 1024)
Quantized = tuple[torch.Tensor, torch.Tensor]


def all_rows(x: torch.Tensor) -> Quantized:
    """Per-tensor dynamic FP8 as upstream's PyTorch path does it: over the padded batch."""
    scale = (x.abs().max().float() / reference.E4M3_MAX).reshape(1)
    scaled = (x.float() * scale.reciprocal()).clamp(-reference.E4M3_MAX, reference.E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn), scale


def rows() -> list[dict[str, Any]]:
    """Measure every case.

    Raises:
        DeviceError: no GPU.
    """
    measure.require_gpu()
    compiled = torch.compile(all_rows)
    found = []
    for hidden in HIDDEN:
        count = measure.sets_beyond_l2(ROWS * hidden * 2)
        xs = [torch.randn(ROWS, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        result_bytes = ROWS * hidden
        target = torch.empty(result_bytes, dtype=torch.uint8, device="cuda")

        def add(
            provider: str,
            live: int,
            call: Callable[[torch.Tensor], Quantized],
            *,
            xs: list[torch.Tensor] = xs,
            hidden: int = hidden,
        ) -> None:
            got, got_scale = call(xs[0])
            # The scale must be that of the rows read; a byte may round the other way.
            want, scale = reference.quantize_fp8_per_tensor(xs[0], live_rows=live)
            close = torch.isclose(got.float(), want.float(), rtol=0.13, atol=2**-9)
            right = bool(close.all()) and torch.allclose(got_scale, scale, rtol=1e-6)
            if not measure.checked(provider, right, f"wrong result for {live} rows of {hidden}"):
                return
            times = measure.graph_times([lambda x=x: call(x) for x in xs])
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
                )
            )

        for live in LIVE:
            count_on_device = torch.tensor([live], dtype=torch.int32, device="cuda")
            mask = torch.arange(ROWS, device="cuda") < live
            add("staleproof", live, lambda x, n=count_on_device: quantize_fp8_per_tensor(x, live_rows=n))
            add("staleproof, mask", live, lambda x, m=mask: quantize_fp8_per_tensor(x, live_rows=m))
        add("staleproof, all rows", ROWS, quantize_fp8_per_tensor)
        add("torch eager, all rows", ROWS, all_rows)
        add("torch.compile, all rows", ROWS, compiled)
        times = measure.graph_times([lambda t=target: measure.memset_async(t)])
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
            )
        )
    return found


if __name__ == "__main__":
    measure.print_rows(rows(), baseline="staleproof, all rows")
