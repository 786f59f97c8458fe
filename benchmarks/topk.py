"""Routing that no NaN can break: ours with and without sanitising, vLLM's kernels, and others.

Run: ``python benchmarks/topk.py`` on a machine with a CUDA device. ``STALEPROOF_VLLM_MOE_SO``
names the compiled ``_moe_C`` library of a vLLM wheel (0.20.2 was meant), and ``STALEPROOF_VLLM_OLD_MOE_SO``
one of a release without #39391 (0.19.1), which is asked in a process of its own, as both bear one name;
without them those peers are left out. FlashInfer has a stand-alone kernel for DeepSeek's grouped routing
alone, which it compiles at its first call; without FlashInfer or nvcc it is left out. SGLang's Triton router
(sglang #25835, #29771) is one file of its wheel; ``STALEPROOF_SGLANG`` names the folder of an unpacked one.

The logits of a decode batch are small and were written by the layer before: ``warm`` is their case.

A tenth of the rows of some cases is NaN, as in the benchmark of vLLM #39593. There a provider is timed
whatever it makes of these rows, and its row says in how many an expert is repeated or a weight is NaN.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from staleproof import device

device.select()

from staleproof import measure
from staleproof.kernels.vllm_sources import Finder
from staleproof.ops import topk as kernels
from staleproof.ops.reference import topk as reference

TOKENS = (1, 16, 128, 1024, 16384)
# Experts and experts a token: Qwen3-30B-A3B, DeepSeek-V3, Qwen3-Next, two that fit no warp, and the
# most that ours takes.
SOFTMAX_SHAPES = ((128, 8), (256, 8), (512, 10), (160, 6), (60, 4), (1024, 32))
# Without a bias as Llama 4 Maverick, with one as MiniMax-M2.
SIGMOID_SHAPES = ((128, 1, False), (256, 8, True))
GROUPS, TOPK_GROUP, SCALING = 8, 4, 2.5
# Tokens, and every how manyth row is NaN: those of vLLM #39593.
NAN_TOKENS, NAN_EVERY = 128, 10
OLD = "vLLM 0.19.1"
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


def sglang() -> Any:
    """SGLang's ``moe_fused_gate``, or ``None`` if the variable names no unpacked wheel of it."""
    root = Path(os.environ.get("STALEPROOF_SGLANG", "")) / "sglang"
    if not root.is_dir() or root == Path("sglang"):
        print("STALEPROOF_SGLANG names no unpacked wheel of SGLang: its router is not run")
        return None
    # This file alone: the rest of the package needs more than is here.
    name = "sglang.kernels.ops.moe.moe_fused_gate"
    sys.path.insert(0, str(root.parent))
    sys.meta_path.insert(0, Finder(root, [name], "sglang", torch.cuda.is_available()))
    module: Any = importlib.import_module(name)
    # A CUDA kernel that is compiled at its first call takes 896 experts only.
    module.moe_route_radix = SimpleNamespace(covered=lambda *given: False)
    return module.moe_fused_gate


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


def _cleaned(calls: dict[str, Call], of_vllm: Call) -> dict[str, Call]:
    """These and vLLM's kernel, as it is and behind the two launches that make NaN a number."""
    return calls | {
        "vLLM": of_vllm,
        "nan_to_num, vLLM": lambda x: of_vllm(x.nan_to_num()),
        "nan_to_num(-inf), vLLM": lambda x: of_vllm(x.nan_to_num(nan=-torch.inf)),
    }


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


def repeated(got: Routed) -> int:
    """In how many rows an expert is named twice."""
    ordered = got[1].sort(-1).values
    return int((ordered[:, 1:] == ordered[:, :-1]).any(-1).sum())


def timing(
    kernel: str, mode: str, xs: list[torch.Tensor], want: Routed, providers: dict[str, Call]
) -> measure.Timing:
    """All providers on these logits. A peer whose result is wrong in a row without NaN gets no row."""
    tokens, experts = xs[0].shape
    sick = xs[0].isnan().any(-1)
    told: dict[str, dict[str, int]] = {}

    def wrong(provider: str) -> str:
        got = providers[provider](xs[0])
        sound, right, at = ([pair[i][~sick] for i in (0, 1)] for pair in (got, want, (xs[0], xs[0])))
        others = other_choices((sound[0], sound[1]), (right[0], right[1]), at[0])
        if others is None:
            return "wrong result"
        told[provider] = {"rows_of_other_experts": others} if others else {}
        if not bool(sick.any()):
            return ""
        twice = repeated((got[0][sick], got[1][sick]))
        nan = int(got[0][sick].isnan().any(-1).sum())
        told[provider] |= {"nan_rows": int(sick.sum()), "of_these_repeat": twice, "of_these_weigh_nan": nan}
        return "a NaN row repeats experts or weighs NaN" if provider == "staleproof" and twice + nan else ""

    return measure.Timing(
        *("moe_routing", kernel, mode, "tokens", tokens, tokens * experts * 2 + want[0].numel() * 8),
        {name: [partial(call, x) for x in xs] for name, call in providers.items()},
        measure.rotation(tokens * experts * 2),
        wrong,
        told.__getitem__,
    )


def logits(tokens: int, experts: int, nan: bool = False) -> list[torch.Tensor]:
    """Bf16 logits, as many sets as take turns; healthy, or every tenth row nothing but NaN."""
    count = measure.rotation(tokens * experts * 2).sets
    xs = [torch.randn(tokens, experts, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    for x in xs if nan else ():
        x[::NAN_EVERY] = torch.nan
    return xs


def output(tokens: int, top_k: int) -> Routed:
    """Where weights and ids go to."""
    ids = torch.empty(tokens, top_k, device="cuda", dtype=torch.int32)
    return torch.empty(tokens, top_k, device="cuda"), ids


def biases(experts: int) -> torch.Tensor:
    """A correction bias in float32 that bfloat16, which FlashInfer wants, holds as well."""
    return (torch.randn(experts, device="cuda") / 10).bfloat16().float()


class Peers:
    """The libraries that are here, and each routing with all that have it."""

    def __init__(self, here: bool = True) -> None:
        self.vllm = vllm() if here else None
        self.flashinfer = flashinfer() if here else None
        self.sglang = sglang() if here else None

    def softmax(self, experts: int, k: int, tokens: int, nan: bool = False) -> measure.Timing:
        """``topk_softmax``."""
        xs, out = logits(tokens, experts, nan), output(tokens, k)
        providers: dict[str, Call] = {
            "staleproof": partial(kernels.topk_softmax, top_k=k, out=out),
            "staleproof, not sanitised": partial(_not_sanitised, out=out, score="softmax"),
            "softmax, torch.topk": partial(softmax_then_topk, top_k=k),
        }
        if self.vllm is not None:
            providers = _cleaned(providers, _into(self.vllm.topk_softmax, out, False, None))
        if self.sglang is not None:
            providers["SGLang"] = lambda x: self.sglang(x, None, k, "softmax", renormalize=False)
        mode = f"bf16, {experts} experts, top {k}" + ", a tenth of the rows NaN" * nan
        return timing("topk_softmax", mode, xs, reference.topk_softmax(xs[0], k), providers)

    def sigmoid(self, experts: int, k: int, biased: bool, tokens: int, nan: bool = False) -> measure.Timing:
        """``topk_sigmoid``."""
        bias = biases(experts) if biased else None
        options: dict[str, Any] = {"bias": bias, "renormalize": biased}
        xs, out = logits(tokens, experts, nan), output(tokens, k)
        providers: dict[str, Call] = {
            "staleproof": partial(kernels.topk_sigmoid, top_k=k, out=out, **options),
            "staleproof, not sanitised": partial(_not_sanitised, out=out, score="sigmoid", **options),
        }
        if self.vllm is not None:
            providers = _cleaned(providers, _into(self.vllm.topk_sigmoid, out, biased, bias))
        if self.sglang is not None:
            # It takes no sigmoid without a bias.
            added = torch.zeros(experts, device="cuda") if bias is None else bias
            providers["SGLang"] = lambda x: self.sglang(x, added, k, "sigmoid", renormalize=biased)
        mode = f"bf16, {experts} experts, top {k}" + ", bias" * biased + ", a tenth of the rows NaN" * nan
        return timing("topk_sigmoid", mode, xs, reference.topk_sigmoid(xs[0], k, **options), providers)

    def grouped(self, tokens: int, nan: bool = False) -> measure.Timing:
        """``grouped_topk``, as DeepSeek-V3 calls it."""
        experts, k = 256, 8
        bias = biases(experts)
        groups = {"num_expert_group": GROUPS, "topk_group": TOPK_GROUP}
        options: dict[str, Any] = {"bias": bias, "routed_scaling_factor": SCALING, **groups}
        without = partial(_not_sanitised, score="sigmoid", bias=bias, renormalize=True, scaling=SCALING)
        xs, out = logits(tokens, experts, nan), output(tokens, k)
        providers: dict[str, Call] = {
            "staleproof": partial(kernels.grouped_topk, top_k=k, out=out, **options),
            "staleproof, not sanitised": partial(without, out=out, groups=(GROUPS, TOPK_GROUP)),
        }
        if self.vllm is not None:
            op = self.vllm.grouped_topk
            providers = _cleaned(providers, lambda x: op(x, GROUPS, TOPK_GROUP, k, True, SCALING, bias, 1))
        if self.flashinfer is not None:
            narrow, bias16 = (out[0].bfloat16(), out[1]), bias.bfloat16()

            def with_flashinfer(x: torch.Tensor) -> Routed:
                # Programmatic dependent launch would overlap it with the next launch of itself.
                self.flashinfer(x, bias16, GROUPS, TOPK_GROUP, k, SCALING, *narrow, False)
                return narrow

            providers["FlashInfer"] = with_flashinfer
        if self.sglang is not None:
            providers["SGLang"] = lambda x: self.sglang(
                x, bias, k, "sigmoid", 0, True, SCALING, True, **groups
            )
        mode = f"bf16, {experts} experts, {GROUPS} groups, top {k}" + ", a tenth of the rows NaN" * nan
        return timing("grouped_topk", mode, xs, reference.grouped_topk(xs[0], k, **options), providers)

    def with_nan(self) -> Iterator[measure.Timing]:
        """A tenth of the rows NaN, by each routing."""
        yield self.softmax(128, 8, NAN_TOKENS, nan=True)
        yield self.sigmoid(128, 8, False, NAN_TOKENS, nan=True)
        yield self.grouped(NAN_TOKENS, nan=True)

    def cases(self) -> Iterator[measure.Timing]:
        """Each routing, shape and number of tokens."""
        for experts, k in SOFTMAX_SHAPES:
            yield from (self.softmax(experts, k, tokens) for tokens in TOKENS)
        for experts, k, biased in SIGMOID_SHAPES:
            yield from (self.sigmoid(experts, k, biased, tokens) for tokens in TOKENS)
        yield from (self.grouped(tokens) for tokens in TOKENS)
        yield from self.with_nan()


def old_rows() -> list[dict[str, Any]]:
    """What the older vLLM takes for rows with NaN, and makes of them: in a process of its own."""
    path = os.environ.get("STALEPROOF_VLLM_OLD_MOE_SO")
    if path is None:
        print(f"STALEPROOF_VLLM_OLD_MOE_SO is not set: {OLD} is not run")
        return []
    # Its CUDA runtime is of another major version than torch's, and may lie beside it.
    found = [str(one.parent) for one in Path(path).parents[1].rglob("libcudart.so.*")]
    libraries = os.pathsep.join([*found, os.environ.get("LD_LIBRARY_PATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), "--nan"],
        env=os.environ | {"STALEPROOF_VLLM_MOE_SO": path, "LD_LIBRARY_PATH": libraries},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{OLD}: not run, {why}")
        return []
    told = [row for row in json.loads(done.stdout.splitlines()[-1]) if "vLLM" in row["provider"]]
    return [row | {"provider": row["provider"].replace("vLLM", OLD)} for row in told]


def rows() -> list[dict[str, Any]]:
    """Measure every case.

    Raises:
        DeviceError: no GPU.
        WrongResult: ours is wrong.
    """
    measure.require_gpu()
    return [row for case in Peers().cases() for row in case.rows()] + old_rows()


if __name__ == "__main__":
    if sys.argv[1:] == ["--nan"]:
        print(json.dumps([row for case in Peers().with_nan() for row in case.rows()]))
    else:
        sys.exit(measure.main(rows, baseline="staleproof"))
