"""Host time of a call of each operation, compared with a bare Triton launch and the peers' calls.

A captured step does not pay this time; under piecewise graphs, or without graphs, a server pays it after each
layer. Inputs are small, so that the host never waits for the device. Each row is a median over rounds in
which all calls take turns. Argument checks are on. First, the results of the first call, which checks and
compiles, and of the next one, which reuses that, are compared.

Run: ``python benchmarks/host_time.py`` on a machine with a CUDA device. ``STALEPROOF_VLLM_MOE_SO`` and
``STALEPROOF_VLLM_C_SO`` name compiled libraries of a vLLM wheel, ``STALEPROOF_FLASHMLA_SO`` its FlashMLA;
without them those calls are left out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from staleproof import device

device.select()
device.load_triton()

import triton
import triton.language as tl

from staleproof import measure
from staleproof.kernels.mla import peers
from staleproof.kernels.vllm import flashmla
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.decode_workspace import DecodeWorkspace
from staleproof.ops.distinct_experts import distinct_experts
from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.nvfp4 import create_fp4_scale_tensor, dequantize_nvfp4, quantize_nvfp4
from staleproof.ops.topk import grouped_topk, topk_sigmoid, topk_softmax
from staleproof.ops.zero_blocks import BlockZeroer

BARE, OURS = "a bare Triton launch", "staleproof"
# What a scheduler hands out in a step.
THIRTY = [*range(1, 61, 2)]
ROWS, EXPERTS, HIDDEN, HEADS, CONTEXT = 8, 256, 512, 16, 128
Call = Callable[[], Any]


@triton.jit
def _touch(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, 0.0, mask=at < n)


def same_again(name: str, call: Call) -> None:
    """Check that a call gives the same bits twice.

    Raises:
        WrongResult: it does not.
    """
    first, again = ([x.clone() for x in _tensors(call())] for _ in range(2))
    same = all(torch.equal(*(x.view(torch.uint8) for x in pair)) for pair in zip(first, again, strict=True))
    measure.checked(f"staleproof, {name}", same, "the second call gives another result than the first")


def _tensors(result: Any) -> list[torch.Tensor]:
    return [x.contiguous() for x in result if isinstance(x, torch.Tensor)] if result is not None else []


class Inputs:
    """Tensors of one small decode step, and the calls on them."""

    def __init__(self) -> None:
        like = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(ROWS, HIDDEN, **like)
        self.padding = torch.arange(ROWS, device="cuda") > 2
        self.logits = torch.randn(ROWS, EXPERTS, **like)
        self.bias = torch.zeros(EXPERTS, device="cuda")
        self.factor = torch.ones(1, device="cuda")
        self.q = torch.randn(ROWS, HEADS, 576, **like)
        self.cache = torch.randn(ROWS * CONTEXT // 64, 64, 576, **like)
        self.table = torch.arange(len(self.cache), device="cuda", dtype=torch.int32).view(ROWS, -1)
        self.lens = torch.full((ROWS,), CONTEXT, dtype=torch.int32, device="cuda")
        self.out = torch.empty(ROWS, HEADS, 512, **like)
        self.ids = torch.arange(ROWS * 8, device="cuda", dtype=torch.int32).view(ROWS, 8)
        self.weights = torch.rand(ROWS, 8, device="cuda")
        # Kept here: a zeroer does not keep its caches alive.
        self.pages = [torch.zeros(64, 16, 64, **like) for _ in range(28)]
        self.zeroer = BlockZeroer(self.pages)
        self.numbers = torch.empty(64, device="cuda")
        self.packed = quantize_nvfp4(self.x, self.factor)
        self.workspace = DecodeWorkspace()

    def bare(self) -> None:
        _touch[(1,)](self.numbers, 64, 64)

    def ours(self) -> dict[str, tuple[str, Call]]:
        """Operation -> (incident, call)."""
        scale = 576**-0.5
        grouped = {"num_expert_group": 8, "topk_group": 4, "bias": self.bias}
        return {
            "mla_decode": (
                "mla_padding",
                lambda: mla_decode(self.q, self.cache, self.table, self.lens, softmax_scale=scale),
            ),
            "clear_empty_rows": ("mla_padding", lambda: clear_empty_rows(self.out, self.lens)),
            "quantize_fp8_per_tensor": (
                "mla_padding",
                lambda: quantize_fp8_per_tensor(self.x, is_padding=self.padding),
            ),
            "topk_softmax": ("moe_routing", lambda: topk_softmax(self.logits, 8)),
            "topk_sigmoid": ("moe_routing", lambda: topk_sigmoid(self.logits, 8, bias=self.bias)),
            "grouped_topk": ("moe_routing", lambda: grouped_topk(self.logits, 8, **grouped)),
            "distinct_experts": ("moe_routing", lambda: distinct_experts(self.weights, self.ids)),
            "BlockZeroer.zero": ("kv_reuse", lambda: self.zeroer.zero(THIRTY)),
            "quantize_nvfp4": ("scale_padding", lambda: quantize_nvfp4(self.x, self.factor)),
            "dequantize_nvfp4": ("scale_padding", lambda: dequantize_nvfp4(*self.packed, self.factor)),
            "create_fp4_scale_tensor": (
                "scale_padding",
                lambda: create_fp4_scale_tensor(ROWS, HIDDEN, device="cuda"),
            ),
            "DecodeWorkspace.get": (
                "decode_buffer",
                lambda: self.workspace.get(self.out.shape, torch.bfloat16, "cuda"),
            ),
        }

    def peers(self) -> dict[str, dict[str, Call]]:
        """Operation -> peer -> its own call, for the libraries that are here."""
        found: dict[str, dict[str, Call]] = {"mla_decode": self._mla_peers()}
        if path := os.environ.get("STALEPROOF_VLLM_MOE_SO"):
            torch.ops.load_library(path)
            ops = torch.ops._moe_C
            weights = torch.empty(ROWS, 8, device="cuda")
            ids, sources = (torch.empty(ROWS, 8, dtype=torch.int32, device="cuda") for _ in range(2))
            given = weights, ids, sources, self.logits, True
            found["topk_softmax"] = {"vLLM": lambda: ops.topk_softmax(*given, None)}
            found["topk_sigmoid"] = {"vLLM": lambda: ops.topk_sigmoid(*given, self.bias)}
            found["grouped_topk"] = {
                "vLLM": lambda: ops.grouped_topk(self.logits, 8, 4, 8, True, 2.5, self.bias, 1)
            }
        if path := os.environ.get("STALEPROOF_VLLM_C_SO"):
            torch.ops.load_library(path)
            quantize = torch.ops._C.dynamic_scaled_fp8_quant
            codes = torch.empty(ROWS, HIDDEN, dtype=torch.float8_e4m3fn, device="cuda")
            scale = torch.empty(1, device="cuda")
            found["quantize_fp8_per_tensor"] = {"vLLM": lambda: quantize(codes, self.x, scale)}
        return found

    def _mla_peers(self) -> dict[str, Call]:
        known = [*peers().values(), flashmla()]
        usable = [peer for peer in known if peer.unavailable_reason is None]
        given = self.q, self.cache, self.table, self.lens, 576**-0.5, None, self.out
        return {peer.name: peer.prepare(*given) for peer in usable}


def cases() -> Iterator[measure.Timing]:
    """One for each operation."""
    inputs = Inputs()
    given = inputs.peers()
    for name, (incident, call) in inputs.ours().items():
        same_again(name, call)
        calls = {BARE: inputs.bare, OURS: call} | given.get(name, {})
        yield measure.Timing(
            *(incident, name, f"{name}, host time", "rows", ROWS, 0),
            measure.host_times(calls),
            None,
            # Ours was compared above; what peers compute, their own benchmarks check.
            lambda provider: "",
        )


def rows() -> list[dict[str, Any]]:
    """Measure every operation.

    Raises:
        DeviceError: no GPU.
        WrongResult: a second call gives another result than the first.
    """
    measure.require_gpu()
    return [row for case in cases() for row in case.rows()]


if __name__ == "__main__":
    sys.exit(measure.main(rows, baseline=BARE))
