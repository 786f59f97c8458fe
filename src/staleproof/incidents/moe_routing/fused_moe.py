"""The installed FlashInfer's own fused MoE over distinct and over repeated expert ids.

FlashInfer compiles the kernel itself. Each call runs in a child process, because an illegal access ends the
process. A map entry that nobody wrote holds old bytes of the allocator's free memory, so that memory is
filled with 0x7f first: as a row number, those bytes lie far outside any buffer.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from typing import NamedTuple

import torch

from staleproof import child
from staleproof import device as devices
from staleproof.evidence.compare import rounding
from staleproof.incidents.moe_routing.batch import NAN_ROWS, RIGHT, SILENT, Batch, make_ids
from staleproof.lab import Answer, bad, good_if, needs_cuda, not_run

# The text of CUDA's error, and two other ways in which a process may end.
CUDA_ILLEGAL_ACCESS, TIMED_OUT, DIED = "illegal memory access", "timed out", "died"
# FlashInfer releases from here on have the bounds check in the finalise kernel of a single rank.
CHECKED_FROM = (0, 6, 10)


class Call(NamedTuple):
    """One call: the kind of its ids, and the ranks of which it is rank 0; two exchange by all-to-all."""

    ids: str
    ranks: int = 1


class Shape(NamedTuple):
    """The batch and the layer. The default is Qwen3-30B-A3B's layer, the model of vLLM #39593."""

    batch: Batch = Batch(512, 8, 128)
    hidden: int = 2048
    inner: int = 768


SHAPE = Shape()
CALLS = {
    "distinct": Call("distinct"),
    "all equal": Call("all equal"),
    "distinct, all-to-all": Call("distinct", 2),
    "all equal, all-to-all": Call("all equal", 2),
}


def is_known() -> bool:
    """Whether outcomes are known: not on SM100, nor for a release without the bounds check."""
    version = (devices.version_of("flashinfer-python") or "0").split(".post")[0].split("rc")[0]
    old = tuple(int(part) for part in version.split(".")[:3]) < CHECKED_FROM
    return not old and not devices.is_sm100()


def unavailable_reason(name: str, device: str) -> str | None:
    """Why the kernel cannot be called here, in one line, or ``None``."""
    return needs_cuda(name, device) or devices.flashinfer_missing() or _not_compiled()


@cache
def _not_compiled() -> str | None:
    number = "".join(map(str, torch.cuda.get_device_capability()))
    module = importlib.import_module("flashinfer.jit.fused_moe")
    generate = getattr(module, f"gen_cutlass_fused_moe_sm{number}_module", None)
    if generate is None:
        return f"this FlashInfer has no fused MoE for sm_{number}"
    if generate().is_compiled:
        return None
    return (
        "FlashInfer has not compiled its fused MoE here: a first call does (40 minutes of 16 cores on SM90)"
    )


def call_installed(name: str, device: str, shape: Shape = SHAPE) -> Answer:
    """FlashInfer's fused MoE gets distinct ids, or one id for all. Right, wrong, or a crash?

    Args:
        name: of the call.
        device: ``"cuda"``.
        shape: of batch and layer.

    Returns:
        ``right``, ``wrong, silent``, ``NaN``, or how the process ended; with the number of wrong rows. A
        Python error is ``not run``: it says nothing about the kernel.
    """
    ended = child.call(_in_child, CALLS[name], shape, device, timeout_s=300, env={"TRITON_INTERPRET": "0"})
    if ended.answers:
        result: Answer = ended.answers[-1]
        return result
    if ended.code == 1:
        return not_run(ended.last_line)
    return bad(TIMED_OUT if ended.code is None else DIED, note=ended.last_line)


def _in_child(call: Call, shape: Shape, device: str) -> Answer:
    from flashinfer.fused_moe import cutlass_fused_moe

    torch.manual_seed(0)
    (tokens, top_k, experts), hidden, inner = shape
    local = experts // call.ranks
    x, w1, w2 = (
        torch.randn(size, dtype=torch.bfloat16, device=device)
        for size in ((tokens, hidden), (local, 2 * inner, hidden), (local, hidden, inner))
    )
    w1, w2 = w1 * hidden**-0.5, w2 * inner**-0.5
    weights = torch.rand(tokens, top_k, device=device).softmax(1)
    # Ids that are all equal name an expert of this rank.
    ids = make_ids(call.ids, shape.batch, seed=1, device=device)
    ids = ids % local if call.ids == "all equal" else ids
    out = torch.zeros_like(x)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.empty(2**30, dtype=torch.uint8, device=device).fill_(0x7F)
    try:
        cutlass_fused_moe(
            x, ids, weights, w1, w2, torch.bfloat16, None, output=out,
            ep_size=call.ranks, ep_rank=0, enable_alltoall=call.ranks > 1,
        )  # fmt: skip
        # Waits for the kernel, and raises its error.
        out = out.cpu()
    except RuntimeError as error:
        if CUDA_ILLEGAL_ACCESS not in str(error):
            raise
        child.report(bad(CUDA_ILLEGAL_ACCESS, note=str(error).strip().splitlines()[0]))
        # The CUDA context is lost: leave without the clean-up, which would call CUDA again.
        os._exit(3)
    want = _reference(x, w1, w2, weights, ids).cpu()
    # Rounded to bf16: gate, up, their product, the expert's row, the sum.
    far = (out.float() - want).norm(dim=1) > rounding(torch.bfloat16, 5) * want.norm(dim=1) + 1e-6
    nan = out.isnan().any(1)
    wrong = int((far | nan).sum())
    verdict = NAN_ROWS if bool(nan.any()) else SILENT if wrong else RIGHT
    return good_if(verdict == RIGHT, verdict, wrong_rows=wrong)


def _reference(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """(tokens, hidden) float32: the sum over the experts of this rank. The first half of ``w1`` is up."""
    out = torch.zeros(x.shape, device=x.device)
    for expert in range(len(w1)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        up, gate = (x[token].float() @ w1[expert].float().T).chunk(2, 1)
        inner = (torch.nn.functional.silu(gate) * up).to(x.dtype).float()
        out.index_add_(0, token, weights[token, slot, None] * (inner @ w2[expert].float().T))
    return out
