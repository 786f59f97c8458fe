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
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch

from staleproof import device

device.select()

from staleproof import measure
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


def few() -> Iterator[measure.Timing]:
    """Small batches with one launch, and with two."""
    for count, hidden in FEW:
        x = torch.randn(count, hidden, device="cuda", dtype=torch.bfloat16)
        for provider, whole in (("staleproof", fp8.WHOLE), ("staleproof, two launches", 0)):
            # While it is timed as well: the caller reads its rows before it asks for the next case.
            with mock.patch.multiple(fp8, WHOLE=whole, _SEEN=fp8.Seen()):
                call = partial(quantize_fp8_per_tensor, x)
                yield measure.Timing(
                    *("mla_padding", "quantize_fp8_per_tensor", f"bf16 ({count}, {hidden})"),
                    *("live rows", count, 3 * count * hidden),
                    {provider: [call]},
                    measure.WARM,
                    lambda provider, call=call, x=x: wrong(call(), x, len(x)),
                )


def wrong(got: Quantized, x: torch.Tensor, live: int) -> str:
    """What is wrong with a result, or nothing."""
    return "" if right(got, x, live) else "wrong result"


def cases() -> Iterator[measure.Timing]:
    """Small batches, then each hidden size with each number of live rows, and with all."""
    compiled, of_vllm = torch.compile(all_rows), vllm()
    yield from few()
    for hidden in HIDDEN:
        turns = measure.rotation(ROWS * hidden * 2)
        xs = [torch.randn(ROWS, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(turns.sets)]
        targets = [torch.empty(ROWS * hidden, dtype=torch.uint8, device="cuda") for _ in xs]
        case = "mla_padding", "quantize_fp8_per_tensor", f"bf16 ({ROWS}, {hidden})", "live rows"

        def timing(
            live: int,
            calls: dict[str, Callable[[torch.Tensor], Quantized]],
            xs: list[torch.Tensor] = xs,
            turns: measure.Rotation = turns,
            case: Any = case,
        ) -> measure.Timing:
            moved = live * xs[0].shape[1] * 2 + xs[0].numel()
            each = {name: [partial(call, x) for x in xs] for name, call in calls.items()}
            return measure.Timing(
                *case, live, moved, each, turns, lambda name: wrong(calls[name](xs[0]), xs[0], live)
            )

        for live in LIVE:
            count_on_device = torch.tensor([live], dtype=torch.int32, device="cuda")
            mask = torch.arange(ROWS, device="cuda") < live
            yield timing(
                live,
                {
                    "staleproof": partial(quantize_fp8_per_tensor, live_rows=count_on_device),
                    "staleproof, mask": partial(quantize_fp8_per_tensor, live_rows=mask),
                },
            )
        everything = {"staleproof": quantize_fp8_per_tensor, **of_vllm, "torch eager": all_rows}
        everything["torch.compile"] = compiled
        yield timing(ROWS, {f"{name}, all rows": call for name, call in everything.items()})
        fills = [partial(measure.memset_async, target) for target in targets]
        limit = {"limit: memset of the result": fills}
        yield measure.Timing(*case, 1, ROWS * hidden, limit, measure.COLD, wrong=lambda provider: "")


def rows() -> list[dict[str, Any]]:
    """Measure every case.

    Raises:
        DeviceError: no GPU.
    """
    measure.require_gpu()
    return [row for case in cases() for row in case.rows()]


if __name__ == "__main__":
    sys.exit(measure.main(rows, baseline="staleproof, all rows"))
