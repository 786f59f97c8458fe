"""The questions of incident 3: who repeats an expert, what that does, and which remedies work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from staleproof.device import Provenance
from staleproof.grades import REPLICA, Evidence, real
from staleproof.incidents.moe_routing import broken, consumer, fp8, fused_moe, in_words, ranks, scene
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
from staleproof.lab import Answer, Fix, Incident, Scene, bad, good, good_if, needs_cuda
from staleproof.ops.reference import topk as reference
from staleproof.ops.topk import topk_softmax

incident = Incident("moe_routing")

# --- Which choice of experts names an expert twice?

NOT_THE_BEST = "distinct, not the best"
# Input -> selector -> verdict.
CHOICES: dict[str, dict[str, str | None]] = {
    "all NaN, softmax": {
        "warp_keeps_its_first_column": "duplicates",
        "block_keeps_the_left": "duplicates",
        "sort_swaps_raw_nan": "duplicates",
        "topk_swaps_raw_nan": "duplicates",
        scene.TORCH: "distinct",
        scene.VLLM: None,
        OURS: "distinct",
    },
    "one NaN, softmax": {
        "warp_keeps_its_first_column": "duplicates",
        "block_keeps_the_left": "duplicates",
        "sort_swaps_raw_nan": "duplicates",
        "topk_swaps_raw_nan": "duplicates",
        scene.TORCH: "distinct",
        scene.VLLM: None,
        OURS: "distinct",
    },
    # torch.topk treats a NaN as larger than any number: experts are distinct, but NaN are chosen first.
    "NaN inside lanes, sigmoid": {
        "warp_keeps_its_first_column": "distinct",
        "block_keeps_the_left": "distinct",
        "sort_swaps_raw_nan": "duplicates",
        "topk_swaps_raw_nan": "duplicates",
        scene.TORCH: NOT_THE_BEST,
        scene.VLLM: None,
        OURS: "distinct",
    },
    "NaN first in lanes, sigmoid": {
        "warp_keeps_its_first_column": "duplicates",
        "block_keeps_the_left": NOT_THE_BEST,
        "sort_swaps_raw_nan": "duplicates",
        "topk_swaps_raw_nan": "duplicates",
        scene.TORCH: NOT_THE_BEST,
        scene.VLLM: None,
        OURS: "distinct",
    },
    "NaN in the bias, sigmoid": {
        "warp_keeps_its_first_column": "duplicates",
        "block_keeps_the_left": NOT_THE_BEST,
        "sort_swaps_raw_nan": "duplicates",
        "topk_swaps_raw_nan": "duplicates",
        scene.TORCH: NOT_THE_BEST,
        # vLLM's compiled kernels: what they do depends on the release.
        scene.VLLM: None,
        OURS: "distinct",
    },
}


def needs_vllm(selector: Selector, device: str) -> str | None:
    """Why vLLM's compiled operators cannot run, if they are this selector."""
    return scene.vllm_unavailable_reason(device) if selector is SELECTORS[scene.VLLM] else None


def evidence(selector: Selector) -> Evidence:
    """Whose code chooses."""
    if selector is SELECTORS[scene.VLLM]:
        return scene.vllm_evidence()
    return real("torch", "topk") if selector is SELECTORS[scene.TORCH] else REPLICA


def choose(kind: str, selector: Selector, device: str) -> Answer:
    """Router logits or bias hold NaN. Are the chosen experts distinct, and the best ones?"""
    given, ids = scene.chosen(selector, kind, device)
    doubled = rows_with_duplicates(ids)
    verdict = "duplicates" if bool(doubled.any()) else "distinct"
    if verdict == "distinct" and not given.softmax:
        # With softmax a row with NaN has no valid score left, so any experts are equally good.
        best = reference.topk_sigmoid(given.logits, selector.top_k, bias=given.bias)[1]
        verdict = "distinct" if torch.equal(ids.sort().values, best.sort().values) else NOT_THE_BEST
    numbers = {"rows": selector.rows, "rows_with_duplicates": int(doubled.sum())}
    first = str(ids[int(doubled.int().argmax())].tolist())
    return good_if(verdict == "distinct", verdict, **numbers, ids=first)


for kind, expected in CHOICES.items():
    incident.question(kind, SELECTORS, expect=expected, needs=needs_vllm, evidence=evidence)(
        partial(choose, kind)
    )


@incident.question(
    "ids of vLLM's kernel",
    ["warp_keeps_its_first_column", "block_keeps_the_left"],
    # vLLM takes the second path for other numbers of experts than this one.
    expect={"warp_keeps_its_first_column": "the same", "block_keeps_the_left": None},
    needs=lambda name, device: scene.vllm_unavailable_reason(device),
    evidence=lambda name: evidence(SELECTORS[scene.VLLM]),
)
def replay(name: str, device: str) -> Answer:
    """Does an emulated choice give the ids of vLLM's compiled kernel?

    It uses the clamp of #39391, like that kernel, and a NaN in the bias, which the clamp does not catch.
    """
    selector = SELECTORS[name]
    given = scene.nan_bias(scene.make_logits(device, selector.experts, selector.rows))
    replayed = SELECTORS[scene.VLLM].select(given, selector.top_k)[1]
    clamp = broken.REMEDIES["clamp_after_scoring"]
    ours = scene.select_broken(name, given, selector.top_k, remedy=clamp)[1]
    same = (ours == replayed).all(1)
    numbers = {"rows": len(same), "same_rows": int(same.sum())}
    return good("the same", **numbers) if bool(same.all()) else bad("differ", **numbers)


# --- Which remedy keeps the choice distinct?

REMEDY_CASES: dict[str, RoutingCase] = {
    "NaN in padding": RoutingCase(batch=TOP_8),
    "NaN in a live row": RoutingCase(bad="live row", batch=TOP_8),
    "Inf in a live row": RoutingCase(bad="infinity", batch=TOP_8),
    "NaN in the bias": RoutingCase(softmax=False, bad="bias", batch=TOP_8),
}
# Input -> remedy -> verdict.
REMEDIED: dict[str, dict[str, str]] = {
    "NaN in padding": {
        "none": "duplicates",
        "nan_to_num_before": "distinct",
        "nan_to_minus_infinity_before": "duplicates",
        "lowest_on_load": "distinct",
        "clamp_after_scoring": "distinct",
        "skip_padding": "skipped",
        OURS: "distinct",
    },
    "NaN in a live row": {
        "none": "duplicates",
        "nan_to_num_before": "distinct",
        "nan_to_minus_infinity_before": "duplicates",
        "lowest_on_load": "distinct",
        "clamp_after_scoring": "distinct",
        "skip_padding": "duplicates",
        OURS: "distinct",
    },
    "Inf in a live row": {
        "none": "duplicates",
        "nan_to_num_before": "distinct",
        "nan_to_minus_infinity_before": "distinct",
        "lowest_on_load": "duplicates",
        "clamp_after_scoring": "distinct",
        "skip_padding": "duplicates",
        OURS: "distinct",
    },
    "NaN in the bias": {
        "none": "duplicates",
        "nan_to_num_before": "duplicates",
        "nan_to_minus_infinity_before": "duplicates",
        "lowest_on_load": "duplicates",
        "clamp_after_scoring": "duplicates",
        "skip_padding": "duplicates",
        OURS: "distinct",
    },
}
REMEDIES = list(REMEDIED["NaN in padding"])


def remedied(case: RoutingCase, name: str, device: str) -> Answer:
    """The warp's argmax over bad rows, with one remedy. Are the chosen experts distinct?"""
    weights, ids = scene.routed(replace(case, choice=name), device)
    has_experts = (ids >= 0).all(1)
    if bool(rows_with_duplicates(ids[has_experts]).any()):
        return bad("duplicates")
    if not bool(weights.isfinite().all()):
        return bad("NaN weights")
    return good("distinct" if bool(has_experts.all()) else "skipped")


for name, case in REMEDY_CASES.items():
    incident.question(name, REMEDIES, expect=REMEDIED[name])(partial(remedied, case))


@incident.question("rows without NaN", REMEDIES, expect="right")
def good_rows(name: str, device: str) -> Answer:
    """One live row holds NaN. Does a remedy keep the right result in the others?"""
    case = replace(REMEDY_CASES["NaN in a live row"], choice=name)
    logits = scene.router_input(case, device).logits
    want, got = reference.topk_softmax(logits, TOP_8.top_k), scene.routed(case, device)
    kept = ~logits.isnan().any(1)
    if name == "skip_padding":
        kept[scene.LIVE :] = False
    close = torch.allclose(got[0][kept], want[0][kept], rtol=2e-6, atol=0)
    return good("right") if close and torch.equal(got[1][kept], want[1][kept]) else bad("wrong")


@incident.question(
    "padding id -1",
    {"indexes with ids": partial(consumer.layer, from_the_end=True), "compares ids": consumer.layer},
    expect={"indexes with ids": "takes the last expert", "compares ids": "passes over"},
)
def consume_padding_id(layer: Callable[..., torch.Tensor], device: str) -> Answer:
    """Padding that the router skips has the id -1. In Python that index is the last expert: is it taken?"""
    logits = scene.router_input(RoutingCase(batch=TOP_8), device).logits
    is_padding = torch.arange(TOP_8.tokens, device=device) >= scene.LIVE
    weights, ids = topk_softmax(logits, TOP_8.top_k, is_padding=is_padding)
    x, table = torch.ones(len(ids), 4, device=device), torch.ones(TOP_8.experts, 4, device=device)
    # The last expert's row is NaN, so that a consumer which takes it is seen: the weight 0 times NaN is NaN.
    table[-1] = scene.NAN
    took = layer(x, weights, ids, table)[scene.LIVE :].isnan().any(1)
    rows = int(took.sum())
    return bad("takes the last expert", rows=rows) if bool(took.all()) else good("passes over", rows=rows)


# --- What does a repeated expert do to map and finalise step?

BATCHES = {str(b): b for b in (Batch(t, k, e) for t in (256, 257) for k in (8, 10) for e in (128, 512))}
# FlashInfer builds the map of a small batch with one kernel, which fills every entry even if experts repeat.
# Three kernels build it if the batch has more than 256 tokens, more than 510 experts, or a top_k that is not
# 1, 2, 4, 6 or 8. They leave an entry unwritten for each repetition. Of these batches the small one is:
ONE_KERNEL = "256 tokens, top 8, 128 experts"
REPEATED = dict.fromkeys(BATCHES, ILLEGAL_ACCESS)
IDS_EXPECTED = {
    "distinct": dict.fromkeys(BATCHES, RIGHT),
    "all equal": REPEATED | {ONE_KERNEL: RIGHT},
    "partly equal": REPEATED | {ONE_KERNEL: RIGHT},
    # int64 ids that are read as int32 name other experts: also the small batch, whose map is whole, is wrong.
    MISREAD: REPEATED | {ONE_KERNEL: SILENT},
}


def consume(kind: str, batch: Batch, device: str) -> Answer:
    """Are the sums right, or does the consumer follow a map entry that nobody wrote?

    Before the call the map's memory is filled with a number that no row has. So an entry that nobody writes
    points outside of the buffer, and following it is an illegal access.
    """
    return consumer.observe(batch, kind, device)


for kind in IDS:
    incident.question(f"ids {kind}", BATCHES, expect=IDS_EXPECTED[kind])(partial(consume, kind))

# What the map's memory held before the call, and whether the consumer skips entries outside of the buffer.
MEMORY = {
    "canary": ("canary", False),
    "canary, bounds check": ("canary", True),
    "zeros": ("zeros", False),
    "previous map": ("previous map", False),
    "previous map, NaN rows": ("previous map, NaN rows", False),
    "previous map, NaN rows, bounds check": ("previous map, NaN rows", True),
}
HELD = {
    "canary": ILLEGAL_ACCESS,
    "canary, bounds check": SILENT,
    "zeros": SILENT,
    "previous map": SILENT,
    "previous map, NaN rows": NAN_ROWS,
    "previous map, NaN rows, bounds check": NAN_ROWS,
}


def consume_over(kind: str, batch: Batch, memory: tuple[str, bool], device: str) -> Answer:
    """With repeated experts, and other memory before: does the call crash, or answer wrongly in silence?"""
    before, guard = memory
    return consumer.observe(batch, kind, device, before=before, guard=guard)


incident.question("memory held", MEMORY, expect=HELD)(partial(consume_over, "partly equal", TOP_10))
incident.question(f"{MISREAD}, memory held", MEMORY, expect=HELD)(
    partial(consume_over, MISREAD, Batch(257, 8, 128))
)

REAL = "installed FlashInfer"
# Expected of a FlashInfer release with a bounds check. The all-to-all path has a finalise kernel of its own,
# without that check in every release up to 0.7.2.post1, so it still crashes.
REAL_EXPECTED = {
    "distinct": RIGHT,
    "all equal": SILENT,
    "distinct, all-to-all": RIGHT,
    "all equal, all-to-all": fused_moe.CUDA_ILLEGAL_ACCESS,
}
incident.question(
    REAL,
    list(fused_moe.CALLS),
    expect=REAL_EXPECTED if fused_moe.is_known() else None,
    needs=fused_moe.unavailable_reason,
    evidence=real("flashinfer-python"),
)(fused_moe.call_installed)

# --- Where does NaN in padding rows come from?

PADDING = "NaN in padding rows"
SERVERS: dict[str, Setting] = {
    "1 rank": Setting(),
    "1 rank, fp32 never in that memory": Setting(wide=False),
    "1 rank, output zeroed": Setting(zeroed=True),
    "1 rank, no graphs": Setting(graphs=False),
}


def serve_ranks(servers: Mapping[str, Setting], where: str | None, device: str) -> dict[str, ranks.Passes]:
    """The counts of several servers' passes, summed over ranks; on ``where`` if given, else on ``device``."""
    return dict(zip(servers, ranks.serve_ranks([*servers.values()], where or device), strict=True))


def served_together(name: str, servers: Mapping[str, Setting], where: str | None = None) -> Scene:
    """Servers that have the same number of ranks."""
    return Scene(f"serve {name}", partial(serve_ranks, servers, where))


def padding(name: str, device: str, served: Mapping[str, ranks.Passes], *, on_cpu: bool = False) -> Answer:
    """A server's passes with padding. In how many do its rows hold NaN in the attention output?"""
    counts = served[name].counts
    # The padding of an idle rank is zeros, because attention fills it in a dummy step.
    busy = counts["padded"] - counts["idle"]
    share = counts["with_nan"] / busy if busy else 0.0
    mean = round(counts["padding_rows"] / counts["padded"], 2) if counts["padded"] else 0.0
    # Ranks on the CPU are no GPU measurement, even on a machine with a GPU.
    on_cpu = on_cpu or device == "cpu"
    return good_if(
        not share,
        "nearly all" if share >= 0.9 else "some" if share else "none",
        note="ranks on the CPU" if on_cpu else "",
        provenance=Provenance.INTERPRETED if on_cpu else None,
        **counts,
        mean_padding=mean,
    )


def needs_two_gpus(subject: object, device: str) -> str | None:
    """Why two ranks cannot run on GPUs."""
    return None if device == "cuda" and torch.cuda.device_count() > 1 else "needs two CUDA devices"


incident.question(
    PADDING,
    list(SERVERS),
    expect={
        "1 rank": "nearly all",
        "1 rank, fp32 never in that memory": "none",
        "1 rank, output zeroed": "none",
        "1 rank, no graphs": "none",
    },
    scene=served_together("one rank", SERVERS),
)(padding)
# The layout of PyTorch's allocator is not ours to fix: any answer is recorded.
incident.question(
    PADDING,
    ["1 rank, PyTorch's allocator"],
    expect=None,
    needs=needs_cuda,
    scene=served_together(
        "one rank, PyTorch's allocator", {"1 rank, PyTorch's allocator": Setting(allocator="torch")}
    ),
)(padding)
_GLOO = {"DP 2, gloo": Setting(ranks=2), "DEP 2, gloo": Setting(ranks=2, expert_parallel=True)}
_NCCL = {"DP 2, NCCL": Setting(ranks=2), "DEP 2, NCCL": Setting(ranks=2, expert_parallel=True)}
incident.question(
    PADDING, list(_GLOO), expect="nearly all", scene=served_together("two ranks, gloo", _GLOO, "cpu")
)(partial(padding, on_cpu=True))
incident.question(
    PADDING,
    list(_NCCL),
    expect="nearly all",
    needs=needs_two_gpus,
    scene=served_together("two ranks, NCCL", _NCCL),
)(padding)

# --- Does an fp8 quantiser on the way to the router stop it? vLLM's compiled ones: any answer is recorded.

incident.question(
    "NaN into fp8",
    fp8.FIREWALLS,
    expect={
        "a scale a token, fmax": "clean",
        "a scale a token, torch.amax": "pad_only",
        "one scale, fmax": "clean",
        "one scale, torch.amax": "leaked",
        "a scale a token, vLLM's op": None,
        "one scale, vLLM's op": None,
    },
    needs=fp8.unavailable_reason,
    evidence=fp8.evidence,
)(partial(fp8.through, scene.NAN))
incident.question(
    "Inf into fp8",
    fp8.FIREWALLS,
    expect={
        "a scale a token, fmax": "pad_only",
        "a scale a token, torch.amax": "pad_only",
        "one scale, fmax": "leaked",
        "one scale, torch.amax": "leaked",
        "a scale a token, vLLM's op": None,
        "one scale, vLLM's op": None,
    },
    needs=fp8.unavailable_reason,
    evidence=fp8.evidence,
)(partial(fp8.through, scene.INF))

# --- What does the crash need?

_SOFTMAX, _SIGMOID = RoutingCase(), RoutingCase(softmax=False)
_BIAS, _LIVE_ROW = RoutingCase(softmax=False, bad="bias"), RoutingCase(bad="live row")
incident.question(
    "ablation",
    {
        "all four": _SOFTMAX,
        "no NaN in padding": replace(_SOFTMAX, bad="nowhere"),
        "a choice that no NaN confuses": replace(_SOFTMAX, choice=OURS),
        "a map built in one block": replace(_SOFTMAX, batch=TOP_10._replace(top_k=8)),
        "a map over an earlier map": replace(_SOFTMAX, before="previous map"),
    },
    expect={
        "all four": ILLEGAL_ACCESS,
        "no NaN in padding": RIGHT,
        "a choice that no NaN confuses": RIGHT,
        "a map built in one block": RIGHT,
        "a map over an earlier map": SILENT,
    },
)(scene.serve)

# --- Off / on / off: ours, what upstream tried, and wrong remedies that nobody merged.


def _fix(off: RoutingCase, **changes: Any) -> Fix:
    return Fix(off=off, on=replace(off, **changes))


FIXES: dict[str, Fix] = {
    "topk_softmax": _fix(_SOFTMAX, choice=OURS),
    "topk_sigmoid": _fix(_SIGMOID, choice=OURS),
    "grouped_topk": _fix(_SIGMOID, choice="grouped_topk"),
    "topk_sigmoid, NaN bias": _fix(_BIAS, choice=OURS),
    "grouped_topk, NaN bias": _fix(_BIAS, choice="grouped_topk"),
    "nan_to_num_before": _fix(_SOFTMAX, choice="nan_to_num_before"),
    "nan_to_minus_infinity_before": _fix(_SOFTMAX, choice="nan_to_minus_infinity_before"),
    "clamp_after_scoring": _fix(_SOFTMAX, choice="clamp_after_scoring"),
    "clamp_after_scoring, NaN bias": _fix(_BIAS, choice="clamp_after_scoring"),
    "skip_padding": _fix(_SOFTMAX, choice="skip_padding"),
    "skip_padding, NaN in a live row": _fix(_LIVE_ROW, choice="skip_padding"),
    "bounds check in the consumer": _fix(_SOFTMAX, guard=True),
}
incident.fixes(
    scene.serve,
    FIXES,
    compare=wrong,
    expect={
        "topk_softmax": "fixed",
        "topk_sigmoid": "fixed",
        "grouped_topk": "fixed",
        "topk_sigmoid, NaN bias": "fixed",
        "grouped_topk, NaN bias": "fixed",
        "nan_to_num_before": "fixed",
        "nan_to_minus_infinity_before": "not fixed",
        "clamp_after_scoring": "fixed",
        "clamp_after_scoring, NaN bias": "not fixed",
        "skip_padding": "fixed",
        "skip_padding, NaN in a live row": "not fixed",
        "bounds check in the consumer": "not fixed",
    },
)
incident.fixes(
    scene.serve,
    {name: _fix(_SOFTMAX, choice=name) for name in scene.WRONG_ROUTES},
    compare=wrong,
    expect="wrong",
)

in_words.add(incident)
