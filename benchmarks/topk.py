"""Routing that no NaN can break: ours with and without sanitising, vLLM's kernels, and others.

Run: ``python benchmarks/topk.py`` on a machine with a CUDA device. ``STALEPROOF_VLLM_MOE_SO``
names the compiled ``_moe_C`` library of a vLLM wheel (0.20.2 was meant); without it those peers are
left out. FlashInfer has a stand-alone kernel for DeepSeek's grouped routing alone, which it
compiles at its first call; without FlashInfer or nvcc it is left out.

The logits of a decode batch are small and were written by the layer before: ``warm`` is their case.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from staleproof import device

device.select()

from staleproof.cases import measure
from staleproof.ops import topk as kernels
from staleproof.ops.reference import topk as reference

TOKENS = (1, 16, 128, 1024, 16384)
# Experts and experts a token: Qwen3-30B-A3B, DeepSeek-V3, Qwen3-Next, two that fit no warp, and the
# most that ours takes.
SOFTMAX_SHAPES = ((128, 8), (256, 8), (512, 10), (160, 6), (60, 4), (1024, 32))
# Without a bias as Llama 4 Maverick, with one as MiniMax-M2.
SIGMOID_SHAPES = ((128, 1, False), (256, 8, True))
GROUPS, TOPK_GROUP, SCALING = 8, 4, 2.5
Routed = tuple[torch.Tensor, torch.Tensor]
Call = Callable[[torch.Tensor], Routed]


def vllm() -> Any:
    """The operators of vLLM's compiled library, or ``None`` if the variable does not name it."""
    path = os.environ.get("STALEPROOF_VLLM_MOE_SO")
    if path is None:
        print("STALEPROOF_VLLM_MOE_SO is not set: vLLM's kernels are not run")
        return None
    torch.ops.load_library(path)
    return torch.ops._moe_C


def flashinfer() -> Any:
    """FlashInfer's ``fused_topk_deepseek``, or ``None`` if it cannot be compiled here."""
    if importlib.util.find_spec("flashinfer") is None or shutil.which("nvcc") is None:
        print("no FlashInfer, or no nvcc to compile its kernel: it is not run")
        return None
    from flashinfer.fused_moe import fused_topk_deepseek
    from flashinfer.jit.core import MissingJITCacheError

    x = torch.zeros(1, 256, device="cuda", dtype=torch.bfloat16)
    weights, ids = x[:, :8].contiguous(), torch.zeros(1, 8, device="cuda", dtype=torch.int32)
    try:
        fused_topk_deepseek(x, x[0], GROUPS, TOPK_GROUP, 8, SCALING, weights, ids, False)
    except MissingJITCacheError as error:
        print(f"FlashInfer's kernel is not compiled, and may not be: it is not run ({error})")
        return None
    return fused_topk_deepseek


def softmax_then_topk(x: torch.Tensor, top_k: int) -> Routed:
    """PyTorch's two launches, and the casts."""
    weights, ids = x.softmax(-1, dtype=torch.float32).topk(top_k)
    return weights, ids.int()


def _not_sanitised(
    x: torch.Tensor,
    out: Routed,
    *,
    score: str,
    bias: torch.Tensor | None = None,
    renormalize: bool = False,
    scaling: float = 1.0,
    groups: tuple[int, int] = (0, 1),
) -> Routed:
    """Our launch without the handling of NaN."""
    kernels._launch(score, x, bias, None, *out, renormalize, scaling, -1, *groups, sanitize=False)
    return out


def _into(op: Any, out: Routed, *arguments: Any) -> Call:
    """vLLM's operators with the logits in the fourth place, as calls on the logits."""
    sources = torch.empty_like(out[1])

    def call(x: torch.Tensor) -> Routed:
        op(*out, sources, x, *arguments)
        return out

    return call


def _cleaned(call: Call) -> Call:
    return lambda x: call(x.nan_to_num())


def other_choices(got: Routed, want: Routed, x: torch.Tensor) -> int | None:
    """In how many rows a provider chose experts of other logits; ``None`` if its result is wrong.

    Peers need not sort their experts, and they round scores differently: of two nearly equal experts at
    the end of the choice they may pick the other one, in at most 2 % of the rows. FlashInfer compiles its
    kernel with ``-use_fast_math``, so its ``tanhf`` is an approximation to 2**-11, which decides otherwise
    in some rows a thousand. Weights can be compared only where the experts are the same.
    """
    ids = got[1].long()
    ordered = ids.sort(-1).values
    in_range = int(ordered[:, 0].min()) >= 0 and int(ordered[:, -1].max()) < x.shape[1]
    if not in_range or bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        return None
    logits, wanted = (x.gather(1, each.long()).sort(-1).values for each in (ids, want[1]))
    same = (logits == wanted).all(-1)
    # FlashInfer's weights have the dtype of the logits.
    weights, wanted = (pair[0].float().sort(-1).values[same] for pair in (got, want))
    others = int((~same).sum())
    right = others <= 0.02 * len(x) and torch.allclose(weights, wanted, rtol=5e-3)
    return others if right else None


def measured(
    kernel: str, mode: str, xs: list[torch.Tensor], want: Routed, providers: dict[str, Call]
) -> list[dict[str, Any]]:
    """One row a provider. A peer whose result is wrong gets none.

    Raises:
        WrongResult: ours is wrong.
    """
    tokens, experts = xs[0].shape
    others: dict[str, int | None] = {}

    def wrong(provider: str) -> str:
        others[provider] = other_choices(providers[provider](xs[0]), want, xs[0])
        return "wrong result" if others[provider] is None else ""

    timing = measure.Timing(
        *("moe_routing", kernel, mode, "tokens", tokens, tokens * experts * 2 + want[0].numel() * 8),
        {name: [partial(call, x) for x in xs] for name, call in providers.items()},
        measure.rotation(tokens * experts * 2),
        wrong,
        lambda provider: {"rows_of_other_experts": others[provider]} if others[provider] else {},
    )
    return [*timing.rows()]


def logits(tokens: int, experts: int) -> list[torch.Tensor]:
    """Healthy bf16 logits, as many sets as take turns."""
    count = measure.rotation(tokens * experts * 2).sets
    return [torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def output(tokens: int, top_k: int) -> Routed:
    """Where weights and ids go to."""
    ids = torch.empty(tokens, top_k, device="cuda", dtype=torch.int32)
    return torch.empty(tokens, top_k, device="cuda"), ids


def biases(experts: int) -> torch.Tensor:
    """A correction bias in float32 that bfloat16, which FlashInfer wants, holds as well."""
    return (torch.randn(experts, device="cuda") / 10).bfloat16().float()


def softmax_rows(ops: Any) -> list[dict[str, Any]]:
    """``topk_softmax``."""
    found = []
    for experts, k in SOFTMAX_SHAPES:
        for tokens in TOKENS:
            xs, out = logits(tokens, experts), output(tokens, k)
            providers: dict[str, Call] = {
                "staleproof": partial(kernels.topk_softmax, top_k=k, out=out),
                "staleproof, not sanitised": partial(_not_sanitised, out=out, score="softmax"),
                "softmax, torch.topk": partial(softmax_then_topk, top_k=k),
            }
            if ops is not None:
                of_vllm = _into(ops.topk_softmax, out, False, None)
                providers["vLLM"] = of_vllm
                providers["nan_to_num, vLLM"] = _cleaned(of_vllm)
            mode = f"bf16, {experts} experts, top {k}"
            want = reference.topk_softmax(xs[0], k)
            found += measured("topk_softmax", mode, xs, want, providers)
    return found


def sigmoid_rows(ops: Any) -> list[dict[str, Any]]:
    """``topk_sigmoid``."""
    found = []
    for experts, k, biased in SIGMOID_SHAPES:
        bias = biases(experts) if biased else None
        options: dict[str, Any] = {"bias": bias, "renormalize": biased}
        for tokens in TOKENS:
            xs, out = logits(tokens, experts), output(tokens, k)
            providers: dict[str, Call] = {
                "staleproof": partial(kernels.topk_sigmoid, top_k=k, out=out, **options),
                "staleproof, not sanitised": partial(_not_sanitised, out=out, score="sigmoid", **options),
            }
            if ops is not None:
                of_vllm = _into(ops.topk_sigmoid, out, biased, bias)
                providers["vLLM"] = of_vllm
                providers["nan_to_num, vLLM"] = _cleaned(of_vllm)
            mode = f"bf16, {experts} experts, top {k}" + ", bias" * biased
            want = reference.topk_sigmoid(xs[0], k, **options)
            found += measured("topk_sigmoid", mode, xs, want, providers)
    return found


def grouped_rows(ops: Any, of_flashinfer: Any) -> list[dict[str, Any]]:
    """``grouped_topk``, as DeepSeek-V3 calls it."""
    found = []
    experts, k = 256, 8
    bias = biases(experts)
    bias16 = bias.bfloat16()
    options: dict[str, Any] = {
        "bias": bias,
        "routed_scaling_factor": SCALING,
        "num_expert_group": GROUPS,
        "topk_group": TOPK_GROUP,
    }
    without = partial(_not_sanitised, score="sigmoid", bias=bias, renormalize=True, scaling=SCALING)
    for tokens in TOKENS:
        xs, out = logits(tokens, experts), output(tokens, k)
        providers: dict[str, Call] = {
            "staleproof": partial(kernels.grouped_topk, top_k=k, out=out, **options),
            "staleproof, not sanitised": partial(without, out=out, groups=(GROUPS, TOPK_GROUP)),
        }
        if ops is not None:

            def of_vllm(x: torch.Tensor) -> Routed:
                return ops.grouped_topk(x, GROUPS, TOPK_GROUP, k, True, SCALING, bias, 1)

            providers["vLLM"] = of_vllm
            providers["nan_to_num, vLLM"] = _cleaned(of_vllm)
        if of_flashinfer is not None:
            narrow = (out[0].bfloat16(), out[1])

            def with_flashinfer(x: torch.Tensor, out: Routed = narrow) -> Routed:
                # Programmatic dependent launch would overlap it with the next launch of itself.
                of_flashinfer(x, bias16, GROUPS, TOPK_GROUP, k, SCALING, *out, False)
                return out

            providers["FlashInfer"] = with_flashinfer
        mode = f"bf16, {experts} experts, {GROUPS} groups, top {k}"
        want = reference.grouped_topk(xs[0], k, **options)
        found += measured("grouped_topk", mode, xs, want, providers)
    return found


def rows() -> list[dict[str, Any]]:
    """Measure every case.

    Raises:
        DeviceError: no GPU.
    """
    measure.require_gpu()
    ops = vllm()
    return softmax_rows(ops) + sigmoid_rows(ops) + grouped_rows(ops, flashinfer())


if __name__ == "__main__":
    measure.print_rows(rows(), baseline="staleproof")
