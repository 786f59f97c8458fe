"""NVFP4 quantisation whose scale padding is written in the kernel, by a fill, or not at all.

Run: ``python benchmarks/quantize_nvfp4.py`` on a machine with a CUDA device. FlashInfer's quantiser
has no body below SM100 and is not run here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from staleproof import device

device.select()

from staleproof.cases import measure
from staleproof.ops import nvfp4 as kernels
from staleproof.ops.reference import nvfp4 as reference

# The scales are padded to 128 rows: 1, 32 and 200 rows have padding, the others have none.
ROWS = (1, 32, 128, 200, 1024, 8192)
HIDDEN = 7168  # DeepSeek's
Quantised = tuple[torch.Tensor, torch.Tensor]


def _into(x: torch.Tensor, factor: torch.Tensor, out: Quantised) -> Quantised:
    """Our kernel without its padding."""
    kernels._quantize(x, factor, *out, swizzled=True, pad=False)
    return out


def zeros_then_quantise(x: torch.Tensor, factor: torch.Tensor, out: Quantised) -> Quantised:
    """As from vLLM #38148 on: the scales filled with zeros, then the blocks written."""
    out[1].view(torch.uint8).zero_()
    return _into(x, factor, out)


def in_kernel(x: torch.Tensor, factor: torch.Tensor, out: Quantised) -> Quantised:
    """Ours."""
    return kernels.quantize_nvfp4(x, factor, out=out)


def rows() -> list[dict[str, Any]]:
    """Measure every case.

    Raises:
        DeviceError: no GPU.
        WrongResult: ours is wrong.
    """
    measure.require_gpu()
    compiled = torch.compile(reference.quantize_nvfp4, dynamic=False)
    providers: dict[str, Callable[..., Quantised]] = {
        "staleproof": in_kernel,
        "staleproof, padding not written": _into,
        "zeros, then staleproof": zeros_then_quantise,
        "torch.compile": lambda x, factor, out: compiled(x, factor),
    }
    found: list[dict[str, Any]] = []
    for m in ROWS:
        bytes_in, bytes_out = m * HIDDEN * 2, m * HIDDEN // 2
        shape = reference.scale_shape(m, HIDDEN)
        moved = bytes_in + bytes_out + shape[0] * shape[1]
        turns = measure.rotation(bytes_in)
        xs = [torch.randn(m, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(turns.sets)]
        factor = reference.global_scale_of(xs[0])
        outs = [
            (
                torch.empty(m, HIDDEN // 2, dtype=torch.uint8, device="cuda"),
                torch.empty(shape, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn),
            )
            for _ in xs
        ]
        want = reference.quantize_nvfp4(xs[0], factor)
        owned = reference.scale_offsets(m, HIDDEN // reference.BLOCK, device="cuda")
        for provider, call in providers.items():
            for part in outs[0]:
                part.view(torch.uint8).fill_(0xA5)
            got = call(xs[0], factor, outs[0])
            scales = [part[1].view(torch.uint8).flatten() for part in (got, want)]
            if "not written" in provider:
                scales = [part[owned] for part in scales]
            # torch.compile fuses a product and a sum, so that single codes differ by one.
            same = float((got[0] == want[0]).float().mean())
            wrong = same < 1 if "staleproof" in provider else same < 0.99
            if wrong or (provider != "torch.compile" and not torch.equal(*scales)):
                if "staleproof" in provider:
                    raise measure.WrongResult(f"{m} rows, {provider}")
                print(f"{m} rows, {provider}: refused, wrong result")
                continue
            calls = [lambda x=x, o=o, f=call, g=factor: f(x, g, o) for x, o in zip(xs, outs, strict=True)]
            found += _rows(provider, m, calls, turns, moved)
        copies = [torch.empty(2, moved // 2, dtype=torch.uint8, device="cuda") for _ in xs]
        calls = [lambda c=c: c[0].copy_(c[1]) for c in copies]
        found += _rows("limit: copy of as many bytes", m, calls, turns, moved)
    return found


def _rows(
    provider: str, m: int, calls: list[Callable[[], object]], turns: measure.Rotation, moved: int
) -> list[dict[str, Any]]:
    mode = f"bf16 (m, {HIDDEN})" + ("" if m % 128 else ", no scale padding")
    case = "scale_padding", "quantize_nvfp4", provider, mode, "rows", m
    return [
        measure.row(*case, times, moved, cache=cache) for cache, times in measure.cached_times(calls, turns)
    ]


if __name__ == "__main__":
    measure.print_rows(rows(), baseline="staleproof")
