"""NVFP4 quantisation whose scale padding is written in the kernel, by a fill, or not at all.

Run: ``python benchmarks/quantize_nvfp4.py`` on a machine with a CUDA device. FlashInfer's quantiser
has no body below SM100 and is not run here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from staleproof import device

device.select()

from staleproof import measure
from staleproof.ops import nvfp4 as kernels
from staleproof.ops.reference import nvfp4 as reference

# The scales are padded to 128 rows: 1, 32 and 200 rows have padding, the others have none.
ROWS = (1, 32, 128, 200, 1024, 8192)
HIDDEN = 7168  # DeepSeek's
Quantised = tuple[torch.Tensor, torch.Tensor]


def _into(x: torch.Tensor, factor: torch.Tensor, out: Quantised) -> Quantised:
    """Our kernel without its padding."""
    kernels._launch(x, factor, *out, True, False)
    return out


def zeros_then_quantise(x: torch.Tensor, factor: torch.Tensor, out: Quantised) -> Quantised:
    """As from vLLM #38148 on: the scales filled with zeros, then the blocks written."""
    out[1].view(torch.uint8).zero_()
    return _into(x, factor, out)


def in_kernel(x: torch.Tensor, factor: torch.Tensor, out: Quantised) -> Quantised:
    """Ours."""
    return kernels.quantize_nvfp4(x, factor, out=out)


def cases() -> Iterator[measure.Timing]:
    """One for each number of rows."""
    compiled = torch.compile(reference.quantize_nvfp4, dynamic=False)
    providers: dict[str, Callable[..., Quantised]] = {
        "staleproof": in_kernel,
        "staleproof, padding not written": _into,
        "zeros, then staleproof": zeros_then_quantise,
        "torch.compile": lambda x, factor, out: compiled(x, factor),
    }
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
        copies = [torch.empty(2, moved // 2, dtype=torch.uint8, device="cuda") for _ in xs]
        calls = {
            name: [partial(call, x, factor, out) for x, out in zip(xs, outs, strict=True)]
            for name, call in providers.items()
        }
        calls["limit: copy of as many bytes"] = [partial(pair[0].copy_, pair[1]) for pair in copies]
        want = reference.quantize_nvfp4(xs[0], factor)

        def wrong(provider: str, calls: Any = calls, out: Any = outs[0], want: Any = want, m: int = m) -> str:
            for part in out:
                part.view(torch.uint8).fill_(0xA5)
            got = calls[provider][0]()
            scales = [part[1].view(torch.uint8).flatten() for part in (got, want)]
            if "not written" in provider:
                owned = reference.scale_offsets(m, HIDDEN // reference.BLOCK, device="cuda")
                scales = [part[owned] for part in scales]
            # torch.compile fuses a product and a sum, so that single codes differ by one.
            same = float((got[0] == want[0]).float().mean())
            if same < (1 if "staleproof" in provider else 0.99):
                return "wrong values"
            return "" if provider == "torch.compile" or torch.equal(*scales) else "wrong scales"

        mode = f"bf16 (m, {HIDDEN})" + ("" if m % 128 else ", no scale padding")
        yield measure.Timing("scale_padding", "quantize_nvfp4", mode, "rows", m, moved, calls, turns, wrong)


def rows() -> list[dict[str, Any]]:
    """Measure every case.

    Raises:
        DeviceError: no GPU.
        WrongResult: ours is wrong.
    """
    measure.require_gpu()
    return [row for case in cases() for row in case.rows()]


if __name__ == "__main__":
    sys.exit(measure.main(rows, baseline="staleproof"))
