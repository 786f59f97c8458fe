"""Routing that no NaN can break: ours with and without sanitising, vLLM's kernels, and PyTorch.

Run: ``python benchmarks/topk.py`` on a machine with a CUDA device. ``STALEPROOF_VLLM_MOE_SO``
names the compiled ``_moe_C`` library of a vLLM wheel (0.20.2 was meant); without it those peers are
left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from staleproof import device

device.select()

from staleproof.moe_routing import kernels, reference  # noqa: E402
from staleproof.runs import measure  # noqa: E402

TOKENS = (1, 16, 128, 1024, 16384)
# Experts and experts a token: Qwen3-30B-A3B, DeepSeek-V3, Qwen3-Next, and two that fit no warp.
SHAPES = ((128, 8), (256, 8), (512, 10), (160, 6), (60, 4))
GROUPS, TOPK_GROUP, SCALING = 8, 4, 2.5
Routed = tuple[torch.Tensor, torch.Tensor]
Call = Callable[[torch.Tensor], Routed]


def vllm() -> Any:
    """The operators of vLLM's compiled library, or ``None`` where it is not to be had."""
    path = os.environ.get("STALEPROOF_VLLM_MOE_SO")
    if path is None:
        print("STALEPROOF_VLLM_MOE_SO is not set: vLLM's kernels are not run")
        return None
    torch.ops.load_library(path)
    return torch.ops._moe_C


def softmax_then_topk(x: torch.Tensor, top_k: int) -> Routed:
    """PyTorch's two launches, and the casts."""
    weights, ids = x.softmax(-1, dtype=torch.float32).topk(top_k)
    return weights, ids.int()


def _unsanitised(x: torch.Tensor, top_k: int, **options: Any) -> Routed:
    arguments: dict[str, Any] = {
        "softmax": True, "bias": None, "renormalize": False, "is_padding": None, "padding_id": -1,
        "topk_ids_dtype": torch.int32, "out": None, "sanitize": False,
    }  # fmt: skip
    return kernels._route(x, top_k, **arguments | options)


def _right(got: Routed, want: Routed) -> bool:
    # Peers need not order their choice, and round scores otherwise: of two nearly equal experts at
    # the end of the choice they may take the other.
    same = got[1].long().sort(-1).values == want[1].long().sort(-1).values
    weights = (pair[0].float().sort(-1).values for pair in (got, want))
    return bool(same.all(-1).float().mean() > 0.98) and torch.allclose(*weights, rtol=2e-3)


def measured(
    kernel: str, mode: str, xs: list[torch.Tensor], want: Routed, providers: dict[str, Call]
) -> list[dict[str, Any]]:
    """One row a provider; a provider whose result is wrong gets none."""
    found = []
    tokens, experts = xs[0].shape
    for provider, call in providers.items():
        if not _right(call(xs[0]), want):
            print(f"{kernel}, {mode}, {tokens} tokens, {provider}: refused, wrong result")
            continue
        times = measure.graph_times([lambda x=x, c=call: c(x) for x in xs])
        moved = tokens * experts * 2 + want[0].numel() * 8
        found.append(
            measure.row("moe_routing", kernel, provider, mode, "tokens", tokens, times, moved)
        )
    return found


def rows() -> list[dict[str, Any]]:
    """Measure every case.

    Raises:
        DeviceError: no GPU.
    """
    measure.require_gpu()
    ops = vllm()
    found = []
    for experts, k in SHAPES:
        for tokens in TOKENS:
            count = measure.sets_beyond_l2(tokens * experts * 2)
            xs = [
                torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16)
                for _ in range(count)
            ]
            weights = torch.empty(tokens, k, device="cuda")
            ids = torch.empty(tokens, k, device="cuda", dtype=torch.int32)
            out, sources = (weights, ids), torch.empty_like(ids)

            def of_vllm(
                x: torch.Tensor, out: Routed = out, sources: torch.Tensor = sources
            ) -> Routed:
                ops.topk_softmax(*out, sources, x, False, None)
                return out

            providers: dict[str, Call] = {
                "staleproof": lambda x, k=k, o=out: kernels.topk_softmax(x, k, out=o),
                "staleproof, not sanitised": lambda x, k=k, o=out: _unsanitised(x, k, out=o),
                "softmax, torch.topk": lambda x, k=k: softmax_then_topk(x, k),
            }
            if ops is not None:
                providers["vLLM"] = of_vllm
                providers["nan_to_num, vLLM"] = lambda x, f=of_vllm: f(x.nan_to_num())
            want = reference.topk_softmax(xs[0], k)
            mode = f"bf16, {experts} experts, top {k}"
            found += measured("topk_softmax", mode, xs, want, providers)

    experts, k = 256, 8
    bias = torch.randn(experts, device="cuda") / 10
    grouping = {"num_expert_group": GROUPS, "topk_group": TOPK_GROUP}
    for tokens in TOKENS:
        count = measure.sets_beyond_l2(tokens * experts * 2)
        xs = [
            torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16) for _ in range(count)
        ]
        options: dict[str, Any] = {"bias": bias, "routed_scaling_factor": SCALING} | grouping
        private = {
            "softmax": False, "bias": bias, "renormalize": True,
            "scaling": SCALING, "groups": GROUPS, "topk_group": TOPK_GROUP,
        }  # fmt: skip
        providers = {
            "staleproof": lambda x, o=options: kernels.grouped_topk(x, k, **o),
            "staleproof, not sanitised": lambda x, o=private: _unsanitised(x, k, **o),
        }
        if ops is not None:
            providers["vLLM"] = lambda x: ops.grouped_topk(
                x, GROUPS, TOPK_GROUP, k, True, SCALING, bias, 1
            )
            providers["nan_to_num, vLLM"] = lambda x, f=providers["vLLM"]: f(x.nan_to_num())
        want = reference.grouped_topk(xs[0], k, **options)
        mode = f"bf16, {experts} experts, {GROUPS} groups, top {k}"
        found += measured("grouped_topk", mode, xs, want, providers)
    return found


if __name__ == "__main__":
    measure.print_rows(rows(), baseline="staleproof")
