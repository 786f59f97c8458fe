"""The routing of a small batch: router logits with bad values, the choices of experts, the consumer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from staleproof.grades import Evidence, real_file
from staleproof.incidents.moe_routing import broken, consumer
from staleproof.incidents.moe_routing.batch import Batch
from staleproof.incidents.moe_routing.broken import REMEDIES
from staleproof.lab import Answer
from staleproof.ops.topk import grouped_topk, topk_sigmoid, topk_softmax

NAN, INF = float("nan"), float("inf")
OURS, TORCH, VLLM = "staleproof", "torch.topk", "vLLM's compiled kernels"
VLLM_VARIABLE, VLLM_FP8_VARIABLE = "STALEPROOF_VLLM_MOE_SO", "STALEPROOF_VLLM_C_SO"
WARP = "warp_keeps_its_first_column"
# Of the rows of a small batch, the first LIVE belong to requests.
LIVE = 5
TOP_8, TOP_10 = Batch(8, 8, 128), Batch(8, 10, 64)

Routed = tuple[torch.Tensor, torch.Tensor]


class RouterInput(NamedTuple):
    """The arguments of a routing: logits (rows, experts), softmax or sigmoid, and a bias (experts,)."""

    logits: torch.Tensor
    softmax: bool
    bias: torch.Tensor | None = None


# (router input, top_k) -> weights, ids, both (rows, top_k)
Select = Callable[[RouterInput, int], Routed]


def make_logits(device: str, experts: int, rows: int) -> torch.Tensor:
    """(rows, experts) float32, normal, the same on every machine."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, experts, generator=generator).to(device)


def _some(shape: tuple[int, ...], share: float, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(shape, generator=generator) < share).to(device)


def _all_nan(x: torch.Tensor) -> RouterInput:
    return RouterInput(torch.full_like(x, NAN), softmax=True)


def _one_nan(x: torch.Tensor) -> RouterInput:
    row = torch.arange(len(x), device=x.device)
    x[row, (row * 4 + 1) % x.shape[1]] = NAN
    return RouterInput(x, softmax=True)


def _nan_in_lanes(x: torch.Tensor, place: int) -> RouterInput:
    # A lane of a warp holds four float32 logits side by side.
    columns = x.view(len(x), -1, 4)[:, :, place]
    columns[_some(tuple(columns.shape), 0.25, x.device)] = NAN
    return RouterInput(x, softmax=False)


def nan_bias(x: torch.Tensor) -> RouterInput:
    """``x`` as it is, with NaN for a tenth of the experts in the bias."""
    bias = torch.zeros(x.shape[1], device=x.device)
    bias[_some(tuple(bias.shape), 0.1, x.device)] = NAN
    return RouterInput(x, softmax=False, bias=bias)


# Kind of input -> the function that makes it from finite logits.
INPUTS: dict[str, Callable[[torch.Tensor], RouterInput]] = {
    "all NaN, softmax": _all_nan,
    "one NaN, softmax": _one_nan,
    "NaN inside lanes, sigmoid": lambda x: _nan_in_lanes(x, 1),
    "NaN first in lanes, sigmoid": lambda x: _nan_in_lanes(x, 0),
    "NaN in the bias, sigmoid": nan_bias,
}


def select_ours(given: RouterInput, top_k: int) -> Routed:
    """The choice of ``topk_softmax`` or ``topk_sigmoid``."""
    select = topk_softmax if given.softmax else topk_sigmoid
    return select(given.logits, top_k, bias=given.bias)


def select_torch(given: RouterInput, top_k: int) -> Routed:
    """The choice of ``torch.topk``."""
    scores = given.logits.softmax(-1) if given.softmax else given.logits.sigmoid()
    ids = (scores if given.bias is None else scores + given.bias).topk(top_k).indices
    return scores.gather(1, ids), ids.int()


@cache
def vllm_ops(variable: str = VLLM_VARIABLE) -> Any:
    """The operators of a compiled library of vLLM, whose path is in an environment variable."""
    torch.ops.load_library(os.environ[variable])
    return torch.ops._moe_C if variable == VLLM_VARIABLE else torch.ops._C


def vllm_evidence(variable: str = VLLM_VARIABLE) -> Evidence:
    """The release of vLLM to which the library belongs that an environment variable names."""
    return real_file("vllm", Path(os.environ[variable]))


def select_vllm(given: RouterInput, top_k: int) -> Routed:
    """The choice of vLLM's compiled operators, from the library that STALEPROOF_VLLM_MOE_SO names."""
    x = given.logits
    weights = torch.empty(len(x), top_k, device=x.device)
    ids = torch.empty(len(x), top_k, dtype=torch.int32, device=x.device)
    route = vllm_ops().topk_softmax if given.softmax else vllm_ops().topk_sigmoid
    route(weights, ids, torch.empty_like(ids), x, False, given.bias)
    return weights, ids


def vllm_unavailable_reason(device: str, variable: str = VLLM_VARIABLE) -> str | None:
    """Why vLLM's compiled operators cannot run, in one line, or ``None`` if they can."""
    if device != "cuda":
        return "needs a CUDA device"
    library = "_moe_C" if variable == VLLM_VARIABLE else "_C"
    return None if variable in os.environ else f"{variable} names no {library} library"


def select_broken(choice: str, given: RouterInput, top_k: int, **more: Any) -> Routed:
    """One of :data:`broken.CHOICES`; ``more`` goes to :func:`broken.route`."""
    choose = broken.CHOICES[choice]
    return broken.route(choose, given.logits, top_k, softmax=given.softmax, bias=given.bias, **more)


@dataclass(frozen=True)
class Selector:
    """One way to choose experts.

    Attributes:
        select: the choice.
        experts: number of experts to choose from.
        top_k: number of experts it chooses.
        rows: of the batch; few if Triton's interpreter sorts, which is slow.
    """

    select: Select
    experts: int = 128
    top_k: int = 8
    rows: int = 256


SELECTORS: dict[str, Selector] = {
    "warp_keeps_its_first_column": Selector(partial(select_broken, "warp_keeps_its_first_column")),
    "block_keeps_the_left": Selector(partial(select_broken, "block_keeps_the_left"), experts=160),
    "sort_swaps_raw_nan": Selector(partial(select_broken, "sort_swaps_raw_nan"), 16, 4, 16),
    "topk_swaps_raw_nan": Selector(partial(select_broken, "topk_swaps_raw_nan"), 16, 4, 16),
    TORCH: Selector(select_torch),
    VLLM: Selector(select_vllm),
    OURS: Selector(select_ours),
}


def chosen(selector: Selector, kind: str, device: str) -> tuple[RouterInput, torch.Tensor]:
    """One of :data:`INPUTS`, and the ids (rows, top_k) that a selector chooses for it."""
    given = INPUTS[kind](make_logits(device, selector.experts, selector.rows))
    return given, selector.select(given, selector.top_k)[1]


@dataclass(frozen=True)
class RoutingCase:
    """One small batch on its way from router logits through the choice of experts to the consumer.

    Attributes:
        choice: a key of :data:`ROUTES`, or a remedy (:data:`REMEDIES`) of the warp's argmax.
        softmax: whether scores are a softmax; a sigmoid otherwise.
        bad: where NaN is: ``padding``, ``live row``, ``bias``, ``part of the bias`` or ``nowhere``. Or ``odd
            padding``, whose rows have one NaN, one Inf or only -Inf; or ``infinity``, one in a live row.
        batch: its shape.
        before: what the memory of the map contained, see :func:`consumer.observe`.
        guard: whether the consumer checks bounds.
        spread: whether padding rows are between the live ones; otherwise they come last, as in vLLM.
    """

    choice: str = "none"
    softmax: bool = True
    bad: str = "padding"
    batch: Batch = TOP_10
    before: str = "canary"
    guard: bool = False
    spread: bool = False


def is_padding(case: RoutingCase, device: str) -> torch.Tensor:
    """(tokens,) bool."""
    rows = torch.arange(case.batch.tokens, device=device)
    return rows % 2 == 0 if case.spread else rows >= LIVE


def router_input(case: RoutingCase, device: str) -> RouterInput:
    """The router's input with the case's bad values in it."""
    logits, bias = make_logits(device, case.batch.experts, case.batch.tokens), None
    padding = is_padding(case, device).nonzero().flatten()
    if case.bad == "padding":
        logits[padding] = NAN
    elif case.bad == "odd padding":
        logits[padding[0::3], 7], logits[padding[1::3], 7], logits[padding[2::3]] = NAN, INF, -INF
    elif case.bad == "live row":
        logits[2] = NAN
    elif case.bad == "infinity":
        logits[2, 9] = INF
    elif case.bad == "bias":
        bias = torch.full((case.batch.experts,), NAN, device=device)
    elif case.bad == "part of the bias":
        bias = nan_bias(logits).bias
    return RouterInput(logits, case.softmax, bias)


# Router input, top_k, which rows are padding -> weights, ids
Route = Callable[[RouterInput, int, torch.Tensor], Routed]


def _grouped(given: RouterInput, top_k: int, padding: torch.Tensor) -> Routed:
    return grouped_topk(given.logits, top_k, num_expert_group=8, topk_group=4, bias=given.bias)


def _then(change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Routed]) -> Route:
    return lambda given, top_k, padding: change(*select_ours(given, top_k), padding)


def _whole_nan_rows_only(given: RouterInput, top_k: int, padding: torch.Tensor) -> Routed:
    logits = given.logits.masked_fill(given.logits.isnan().all(1, keepdim=True), 0.0)
    return select_broken(WARP, RouterInput(logits, given.softmax), top_k)


def _skip_from_the_first(weights: torch.Tensor, ids: torch.Tensor, padding: torch.Tensor) -> Routed:
    behind = (padding.cumsum(0) > 0)[:, None]
    return weights.masked_fill(behind, 0.0), ids.masked_fill(behind, -1)


# Choices that avoid the crash but are wrong.
WRONG_ROUTES: dict[str, Route] = {
    "torch_topk": lambda given, top_k, padding: select_torch(given, top_k),
    "takes_the_worst": _then(lambda weights, ids, padding: (weights, TOP_10.experts - 1 - ids)),
    "zero_weights": _then(lambda weights, ids, padding: (weights * 0, ids)),
    "one_bit_too_large": _then(lambda weights, ids, padding: (weights * (1 + 2**-23), ids)),
    "whole_nan_rows_only": _whole_nan_rows_only,
    "skips_from_the_first_padding_row": _then(_skip_from_the_first),
}
ROUTES: dict[str, Route] = {
    OURS: lambda given, top_k, padding: select_ours(given, top_k),
    "grouped_topk": _grouped,
    **WRONG_ROUTES,
}


# These use torch's scores, which are rounded differently from our kernels'.
TORCHS_SCORES = {*REMEDIES, "torch_topk", "whole_nan_rows_only"}


def routed(case: RoutingCase, device: str) -> Routed:
    """The weights and ids (tokens, top_k) that the case's choice sends to the consumer."""
    given, top_k, padding = router_input(case, device), case.batch.top_k, is_padding(case, device)
    if case.choice in ROUTES:
        return ROUTES[case.choice](given, top_k, padding)
    remedy = REMEDIES[case.choice]
    return select_broken(WARP, given, top_k, is_padding=padding, remedy=remedy)


def serve(case: RoutingCase, device: str) -> Answer:
    """The outcome of the batch in the consumer."""
    ids = routed(case, device)[1]
    return consumer.observe(case.batch, ids, device, before=case.before, guard=case.guard)
