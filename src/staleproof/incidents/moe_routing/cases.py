"""The cases of incident 3."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from staleproof.cases.case import Case, Reading, Scene, ablation, each, fix, needs_cuda, reading
from staleproof.cases.finding import REPLICA, Evidence, real
from staleproof.cases.run import Table
from staleproof.cases.words import FIXED, NOT_FIXED, WRONG
from staleproof.device import Provenance
from staleproof.incidents.moe_routing import broken, consumer, fp8, fused_moe, ranks, scene
from staleproof.incidents.moe_routing.batch import (
    IDS,
    ILLEGAL_ACCESS,
    MISREAD,
    NAN_ROWS,
    RIGHT,
    SILENT,
    Batch,
    rows_with_duplicates,
)
from staleproof.incidents.moe_routing.correct import wrong
from staleproof.incidents.moe_routing.origin import Setting
from staleproof.incidents.moe_routing.scene import OURS, SELECTORS, TOP_8, TOP_10, RoutingCase, Selector
from staleproof.ops.reference import topk as reference
from staleproof.ops.topk import topk_softmax

REAL = "installed FlashInfer"
PADDING = "NaN in padding rows"
NOT_THE_BEST = "distinct, not the best"

# --- Choices of experts.


def choose(kind: str, selector: Selector, device: str) -> Reading:
    """Whether a selector chooses distinct experts, and the best ones, whatever the rows contain."""
    given, ids = scene.chosen(selector, kind, device)
    doubled = rows_with_duplicates(ids)
    verdict = "duplicates" if bool(doubled.any()) else "distinct"
    if verdict == "distinct" and not given.softmax:
        # With softmax a row with NaN has no valid score left, so any experts are equally good.
        best = reference.topk_sigmoid(given.logits, selector.top_k, bias=given.bias)[1]
        verdict = "distinct" if torch.equal(ids.sort().values, best.sort().values) else NOT_THE_BEST
    first = str(ids[int(doubled.int().argmax())].tolist())
    return reading(verdict, rows=selector.rows, rows_with_duplicates=int(doubled.sum()), ids=first)


def replay(name: str, device: str) -> Reading:
    """Whether an emulated choice gives the ids of vLLM's compiled kernel.

    It uses the clamp of #39391, like that kernel, and a NaN in the bias, which the clamp does not catch.
    """
    selector = SELECTORS[name]
    given = scene.nan_bias(scene.make_logits(device, selector.experts, selector.rows))
    theirs = SELECTORS[scene.VLLM].select(given, selector.top_k)[1]
    clamp = broken.REMEDIES["clamp_after_scoring"]
    ours = scene.select_broken(name, given, selector.top_k, remedy=clamp)[1]
    same = (ours == theirs).all(1)
    return reading("the same" if bool(same.all()) else "differ", rows=len(same), same_rows=int(same.sum()))


def _needs_vllm(selector: Selector, device: str) -> str | None:
    return scene.vllm_unavailable_reason(device) if selector is SELECTORS[scene.VLLM] else None


def _selector_evidence(selector: Selector) -> Evidence:
    if selector is SELECTORS[scene.VLLM]:
        return scene.vllm_evidence()
    return real("torch", "topk") if selector is SELECTORS[scene.TORCH] else REPLICA


# Selector -> the verdict on each of INPUTS, in their order; None: no expected verdict.
CHOICE_EXPECTED: dict[str, tuple[str | None, ...]] = {
    "warp_keeps_its_first_column": ("duplicates", "duplicates", "distinct", "duplicates", "duplicates"),
    "block_keeps_the_left": ("duplicates", "duplicates", "distinct", NOT_THE_BEST, NOT_THE_BEST),
    "sort_swaps_raw_nan": ("duplicates",) * 5,
    "topk_swaps_raw_nan": ("duplicates",) * 5,
    # torch.topk treats a NaN as larger than any number: experts are distinct, but NaN are chosen first.
    scene.TORCH: ("distinct", "distinct", NOT_THE_BEST, NOT_THE_BEST, NOT_THE_BEST),
    scene.VLLM: (None,) * 5,
    OURS: ("distinct",) * 5,
}

# --- Remedies.


def remedied(case: RoutingCase, name: str, device: str) -> str:
    """What the warp's argmax chooses for bad rows with one remedy applied."""
    weights, ids = scene.routed(replace(case, choice=name), device)
    has_experts = (ids >= 0).all(1)
    if bool(rows_with_duplicates(ids[has_experts]).any()):
        return "duplicates"
    if not bool(weights.isfinite().all()):
        return "NaN weights"
    return "distinct" if bool(has_experts.all()) else "skipped"


def good_rows(name: str, device: str) -> str:
    """Whether a remedy keeps the right result in rows without NaN."""
    case = replace(REMEDY_CASES["NaN in a live row"], choice=name)
    logits = scene.router_input(case, device).logits
    want, got = reference.topk_softmax(logits, TOP_8.top_k), scene.routed(case, device)
    good = ~logits.isnan().any(1)
    if name == "skip_padding":
        good[scene.LIVE :] = False
    close = torch.allclose(got[0][good], want[0][good], rtol=2e-6, atol=0)
    return "right" if close and torch.equal(got[1][good], want[1][good]) else "wrong"


REMEDY_CASES: dict[str, RoutingCase] = {
    "NaN in padding": RoutingCase(batch=TOP_8),
    "NaN in a live row": RoutingCase(bad="live row", batch=TOP_8),
    "Inf in a live row": RoutingCase(bad="infinity", batch=TOP_8),
    "NaN in the bias": RoutingCase(softmax=False, bad="bias", batch=TOP_8),
}
# Remedy -> the verdict on each of REMEDY_CASES.
REMEDY_EXPECTED: dict[str, tuple[str, ...]] = {
    "none": ("duplicates",) * 4,
    "nan_to_num_before": ("distinct", "distinct", "distinct", "duplicates"),
    "nan_to_minus_infinity_before": ("duplicates", "duplicates", "distinct", "duplicates"),
    "lowest_on_load": ("distinct", "distinct", "duplicates", "duplicates"),
    "clamp_after_scoring": ("distinct", "distinct", "distinct", "duplicates"),
    "skip_padding": ("skipped", "duplicates", "duplicates", "duplicates"),
    OURS: ("distinct",) * 4,
}


def consume_padding_id(case: tuple[Callable[..., torch.Tensor], str], device: str) -> Reading:
    """What the id -1 of skipped padding does to a consumer."""
    logits = scene.router_input(RoutingCase(batch=TOP_8), device).logits
    is_padding = torch.arange(TOP_8.tokens, device=device) >= scene.LIVE
    weights, ids = topk_softmax(logits, TOP_8.top_k, is_padding=is_padding)
    x, table = torch.ones(len(ids), 4, device=device), torch.ones(TOP_8.experts, 4, device=device)
    # A consumer that multiplies by the last expert's row gets NaN, although the weight is 0.
    table[-1] = scene.NAN
    took = case[0](x, weights, ids, table)[scene.LIVE :].isnan().any(1)
    return reading("takes the last expert" if bool(took.all()) else "passes over", rows=int(took.sum()))


CONSUMERS: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "indexes with ids": (partial(consumer.layer, from_the_end=True), "takes the last expert"),
    "compares ids": (consumer.layer, "passes over"),
}

# --- The consumer.

BATCHES = {str(b): b for b in (Batch(t, k, e) for t in (256, 257) for k in (8, 10) for e in (128, 512))}


def consume(kind: str, batch: Batch, device: str) -> Reading:
    """The outcome of map and finalise step for one batch with one kind of ids, over a canary."""
    return consumer.observe(batch, kind, device)


def _consumed(kind: str, batch: Batch) -> str:
    if kind == "distinct" or consumer.takes_one_block(*batch):
        # The map is right for the ids it gets, but misread ids name other experts.
        return SILENT if kind == MISREAD else RIGHT
    return ILLEGAL_ACCESS


# What the memory contained, whether the consumer checks bounds, and the expected outcome.
MEMORY = {
    "canary": ("canary", False, ILLEGAL_ACCESS),
    "canary, bounds check": ("canary", True, SILENT),
    "zeros": ("zeros", False, SILENT),
    "previous map": ("previous map", False, SILENT),
    "previous map, NaN rows": ("previous map, NaN rows", False, NAN_ROWS),
    "previous map, NaN rows, bounds check": ("previous map, NaN rows", True, NAN_ROWS),
}


def consume_over(kind: str, batch: Batch, memory: tuple[str, bool, str], device: str) -> Reading:
    """The outcome for a batch with duplicates, given the content of the memory and the bounds check."""
    return consumer.observe(batch, kind, device, before=memory[0], guard=memory[1])


# --- Servers of one and two ranks.


def serve_ranks(servers: Mapping[str, Setting], where: str | None, device: str) -> dict[str, ranks.Passes]:
    """The counts of several servers' passes, summed over ranks; on ``where`` if given, else on ``device``."""
    return dict(zip(servers, ranks.serve_ranks([*servers.values()], where or device), strict=True))


def padding(name: str, device: str, served: Mapping[str, ranks.Passes], *, on_cpu: bool = False) -> Reading:
    """Which passes of a server have padding, and whether its rows hold NaN."""
    counts = served[name].counts
    # The padding of an idle rank is zeros, because attention fills it in a dummy step.
    busy = counts["padded"] - counts["idle"]
    share = counts["with_nan"] / busy if busy else 0.0
    mean = round(counts["padding_rows"] / counts["padded"], 2) if counts["padded"] else 0.0
    # Ranks on the CPU are no GPU measurement, even on a machine with a GPU.
    on_cpu = on_cpu or device == "cpu"
    return Reading(
        "nearly all" if share >= 0.9 else "some" if share else "none",
        counts | {"mean_padding": mean},
        "ranks on the CPU" * on_cpu,
        provenance=Provenance.INTERPRETED if on_cpu else None,
    )


def needs_two_gpus(subject: object, device: str) -> str | None:
    """Why two ranks cannot run on GPUs."""
    return None if device == "cuda" and torch.cuda.device_count() > 1 else "needs two CUDA devices"


def _served(
    name: str, servers: Mapping[str, Setting], *, where: str | None = None, **fields: Any
) -> Sequence[Case]:
    """The cases of servers that have the same number of ranks and are served together."""
    shared = Scene(f"serve {name}", partial(serve_ranks, servers, where))
    ask = partial(padding, on_cpu=where == "cpu")
    return each(PADDING, "padding rows", [*servers], ask, scene=shared, **fields)


# Server -> its setting, and how many busy passes have NaN in the padding of the attention output.
SERVERS: dict[str, tuple[Setting, str]] = {
    "1 rank": (Setting(), "nearly all"),
    "1 rank, fp32 never in that memory": (Setting(wide=False), "none"),
    "1 rank, output zeroed": (Setting(zeroed=True), "none"),
    "1 rank, no graphs": (Setting(graphs=False), "none"),
}
_PARALLEL = {"DP 2": Setting(ranks=2), "DEP 2": Setting(ranks=2, expert_parallel=True)}
_GLOO, _NCCL = ({f"{n}, {b}": s for n, s in _PARALLEL.items()} for b in ("gloo", "NCCL"))
# vLLM #39593, Qwen3-30B-A3B BF16, GSM8K: steps with padding, with NaN, with Inf, mean padding.
REPORTED = {"1 rank": (62, 62, 5, 4.0), "DP 2": (832, 829, 22, 16.7), "DEP 2": (729, 729, 11, 14.2)}

# --- Fixes, and what the crash needs.

# Fix -> a case that fails without it, the change, and the expected result of off / on / off.
_SOFTMAX, _SIGMOID = RoutingCase(), RoutingCase(softmax=False)
_BIAS, _LIVE_ROW = RoutingCase(softmax=False, bad="bias"), RoutingCase(bad="live row")
FIXES: dict[str, tuple[RoutingCase, dict[str, Any], str]] = {
    "topk_softmax": (_SOFTMAX, {"choice": OURS}, FIXED),
    "topk_sigmoid": (_SIGMOID, {"choice": OURS}, FIXED),
    "grouped_topk": (_SIGMOID, {"choice": "grouped_topk"}, FIXED),
    "topk_sigmoid, NaN bias": (_BIAS, {"choice": OURS}, FIXED),
    "grouped_topk, NaN bias": (_BIAS, {"choice": "grouped_topk"}, FIXED),
    "nan_to_num_before": (_SOFTMAX, {"choice": "nan_to_num_before"}, FIXED),
    "nan_to_minus_infinity_before": (_SOFTMAX, {"choice": "nan_to_minus_infinity_before"}, NOT_FIXED),
    "clamp_after_scoring": (_SOFTMAX, {"choice": "clamp_after_scoring"}, FIXED),
    "clamp_after_scoring, NaN bias": (_BIAS, {"choice": "clamp_after_scoring"}, NOT_FIXED),
    "skip_padding": (_SOFTMAX, {"choice": "skip_padding"}, FIXED),
    "skip_padding, NaN in a live row": (_LIVE_ROW, {"choice": "skip_padding"}, NOT_FIXED),
    "bounds check in the consumer": (_SOFTMAX, {"guard": True}, NOT_FIXED),
}
# Wrong remedies that nobody merged. They show that the test does not call a wrong remedy fixed.
WRONG_REMEDIES = {name: (_SOFTMAX, {"choice": name}, WRONG) for name in scene.WRONG_ROUTES}
# An ingredient of the crash that is removed -> the change, and the outcome then.
INGREDIENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no NaN in padding": ({"bad": "nowhere"}, RIGHT),
    "a choice that no NaN confuses": ({"choice": OURS}, RIGHT),
    "a map built in one block": ({"batch": TOP_10._replace(top_k=8)}, RIGHT),
    "a map over an earlier map": ({"before": "previous map"}, SILENT),
}


def _column(expected: Mapping[str, tuple[Any, ...]], index: int) -> dict[str, Any]:
    return {name: verdicts[index] for name, verdicts in expected.items()}


TABLE = Table(
    "moe_routing",
    *(
        each(
            kind,
            "experts",
            SELECTORS,
            partial(choose, kind),
            expect=_column(CHOICE_EXPECTED, index),
            reason="vLLM's compiled kernels: what they do depends on the release",
            needs=_needs_vllm,
            evidence=_selector_evidence,
        )
        for index, kind in enumerate(scene.INPUTS)
    ),
    each(
        "ids of vLLM's kernel",
        "same",
        ["warp_keeps_its_first_column", "block_keeps_the_left"],
        replay,
        expect={"warp_keeps_its_first_column": "the same"},
        reason="vLLM takes this path for other numbers of experts than the one asked",
        needs=lambda name, device: scene.vllm_unavailable_reason(device),
        evidence=lambda name: _selector_evidence(SELECTORS[scene.VLLM]),
    ),
    *(
        each(
            name,
            "experts",
            [*REMEDY_EXPECTED],
            partial(remedied, case),
            expect=_column(REMEDY_EXPECTED, index),
        )
        for index, (name, case) in enumerate(REMEDY_CASES.items())
    ),
    each("rows without NaN", "result", [*REMEDY_EXPECTED], good_rows, expect="right"),
    each("padding id -1", "padding id", CONSUMERS, consume_padding_id, expect=lambda case: case[1]),
    *(
        each(f"ids {kind}", "access", BATCHES, partial(consume, kind), expect=partial(_consumed, kind))
        for kind in IDS
    ),
    *(
        each(name, "access", MEMORY, partial(consume_over, kind, batch), expect=lambda memory: memory[2])
        for name, kind, batch in (
            ("memory held", "partly equal", TOP_10),
            (f"{MISREAD}, memory held", MISREAD, Batch(257, 8, 128)),
        )
    ),
    each(
        REAL,
        "access",
        {name: name for name in fused_moe.CALLS},
        fused_moe.call_installed,
        expect=lambda name: partial(fused_moe.expected, name),
        reason="not run on SM100; in a release without the bounds check, memory decides",
        needs=fused_moe.unavailable_reason,
        evidence=real("flashinfer-python"),
    ),
    _served("one rank", _column(SERVERS, 0), expect=_column(SERVERS, 1)),
    _served(
        "one rank, PyTorch's allocator",
        {"1 rank, PyTorch's allocator": Setting(allocator="torch")},
        reason="the layout of PyTorch's allocator is not ours to fix",
        needs=needs_cuda,
    ),
    _served("two ranks, gloo", _GLOO, where="cpu", expect="nearly all"),
    _served("two ranks, NCCL", _NCCL, expect="nearly all", needs=needs_two_gpus),
    *(
        each(
            f"{name} into fp8",
            "rows",
            fp8.FIREWALLS,
            partial(fp8.through, bad),
            expect=attrgetter(name.lower()),
            reason="vLLM's compiled kernels: what they do depends on the release",
            needs=fp8.unavailable_reason,
            evidence=fp8.evidence,
        )
        for name, bad in (("NaN", scene.NAN), ("Inf", scene.INF))
    ),
    ablation(_SOFTMAX, "access", without=INGREDIENTS, ask=scene.serve, expect=ILLEGAL_ACCESS),
    *(
        fix(
            name, "access", off=off, on=replace(off, **changes), ask=scene.serve, wrong=wrong, expect=expected
        )
        for name, (off, changes, expected) in (FIXES | WRONG_REMEDIES).items()
    ),
)
