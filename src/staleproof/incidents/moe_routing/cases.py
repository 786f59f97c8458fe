"""The cases of incident 3."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from staleproof import device as devices
from staleproof.cases.case import ALL, Case, Reading, Scene, ablation, absent, each, fix, reading
from staleproof.cases.finding import REPLICA, Evidence, Key, real
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
from staleproof.incidents.moe_routing.correct import wrong, wrong_choice
from staleproof.incidents.moe_routing.fused_moe_cases import MODULE_CASES
from staleproof.incidents.moe_routing.observation import Observation, observe
from staleproof.incidents.moe_routing.origin import Setting
from staleproof.incidents.moe_routing.scene import OURS, SELECTORS, TOP_8, TOP_10, RoutingCase, Selector
from staleproof.ops.reference import topk as reference
from staleproof.ops.topk import topk_softmax

DISTINCT, DUPLICATES = "distinct", "duplicates"
NOT_THE_BEST, NAN_WEIGHTS, SKIPPED = "distinct, not the best", "NaN weights", "skipped"
TAKES_LAST, PASSES_OVER = "takes the last expert", "passes over"
REAL, SANITIZER = "FlashInfer's kernel", "compute-sanitizer"
PADDING = "NaN in padding rows"
NEARLY_ALL, SOME, NONE = "nearly all", "some", "none"


def choose(kind: str, selector: Selector, device: str) -> Reading:
    """Whether a selection's experts are distinct, and the best, whatever the rows contain."""
    given, ids = scene.chosen(selector, kind, device)
    doubled = rows_with_duplicates(ids)
    verdict = DUPLICATES if bool(doubled.any()) else DISTINCT
    if verdict == DISTINCT and not given.softmax:
        # With softmax no score of a row with NaN is left, so any experts are as good.
        best = reference.topk_sigmoid(given.logits, selector.top_k, bias=given.bias)[1]
        verdict = DISTINCT if torch.equal(ids.sort().values, best.sort().values) else NOT_THE_BEST
    first = str(ids[int(doubled.int().argmax())].tolist())
    return reading(verdict, rows=selector.rows, rows_with_duplicates=int(doubled.sum()), ids=first)


def replay(name: str, device: str) -> Reading:
    """Whether a replayed choice gives the ids of vLLM's compiled kernel.

    It has the clamp of #39391, as that kernel has, and a NaN in the bias, which the clamp lets through.
    """
    selector = SELECTORS[name]
    given = scene.nan_bias(scene.make_logits(device, selector.experts, selector.rows))
    theirs = SELECTORS[scene.VLLM].select(given, selector.top_k)[1]
    ours = broken.route(
        broken.CHOICES[name],
        given.logits,
        selector.top_k,
        softmax=given.softmax,
        bias=given.bias,
        remedy=broken.REMEDIES["clamp_after_scoring"],
    )[1]
    same = (ours == theirs).all(1)
    verdict = "the same" if bool(same.all()) else "differ"
    return reading(verdict, rows=len(same), same_rows=int(same.sum()))


def needs_vllm(selector: Selector, device: str) -> str | None:
    """Why this selector cannot run, if it is vLLM's."""
    return scene.vllm_unavailable_reason(device) if selector is SELECTORS[scene.VLLM] else None


def _selector_evidence(selector: Selector) -> Evidence:
    if selector is SELECTORS[scene.VLLM]:
        return scene.vllm_evidence()
    return real("torch", "topk") if selector is SELECTORS[scene.TORCH] else REPLICA


def remedied(case: RoutingCase, name: str, device: str) -> str:
    """What the warp's argmax makes of bad rows with one remedy in place."""
    weights, ids = scene.routed(replace(case, choice=name), device)
    has_experts = (ids >= 0).all(1)
    if bool(rows_with_duplicates(ids[has_experts]).any()):
        return DUPLICATES
    if not bool(weights.isfinite().all()):
        return NAN_WEIGHTS
    return DISTINCT if bool(has_experts.all()) else SKIPPED


def good_rows(name: str, device: str) -> str:
    """Whether a remedy leaves the rows without NaN as they were."""
    case = replace(REMEDY_CASES["NaN in a live row"], choice=name)
    logits = scene.router_input(case, device).logits
    want, got = reference.topk_softmax(logits, TOP_8.top_k), scene.routed(case, device)
    good = ~logits.isnan().any(1)
    if name == "skip_padding":
        good[scene.LIVE :] = False
    close = torch.allclose(got[0][good], want[0][good], rtol=2e-6, atol=0)
    return "right" if close and torch.equal(got[1][good], want[1][good]) else "wrong"


def consume_padding_id(consumes: tuple[Callable[..., torch.Tensor], str], device: str) -> Reading:
    """What the id -1 of skipped padding does to a consumer."""
    logits = scene.router_input(RoutingCase(batch=TOP_8), device).logits
    is_padding = torch.arange(TOP_8.tokens, device=device) >= scene.LIVE
    weights, ids = topk_softmax(logits, TOP_8.top_k, is_padding=is_padding)
    x, table = torch.ones(len(ids), 4, device=device), torch.ones(TOP_8.experts, 4, device=device)
    # Whoever multiplies by the last expert's row gets NaN, although the weight is 0.
    table[-1] = scene.NAN
    took = consumes[0](x, weights, ids, table)[scene.LIVE :].isnan().any(1)
    return reading(TAKES_LAST if bool(took.all()) else PASSES_OVER, rows=int(took.sum()))


def _observed(observation: Observation) -> Reading:
    numbers = asdict(observation)
    return reading(numbers.pop("outcome"), **numbers)


def consume(kind: str, batch: Batch, device: str) -> Reading:
    """What map and finalise step make of one batch with one kind of ids, over a canary."""
    return _observed(observe(batch, kind, device))


def _consumed(kind: str, batch: Batch) -> str:
    if kind == "distinct" or consumer.takes_one_block(*batch):
        # The map is right for the ids it gets, but misread ids name other experts.
        return SILENT if kind == MISREAD else RIGHT
    return ILLEGAL_ACCESS


def consume_over(kind: str, batch: Batch, memory: tuple[str, bool, str], device: str) -> Reading:
    """What they make of a batch with duplicates, by what the memory contained and the bounds check."""
    before, guard, _ = memory
    return _observed(observe(batch, kind, device, before=before, guard=guard))


def needs_module(subject: object, device: str) -> str | None:
    """Why FlashInfer's kernel cannot run: some cases need it as shipped, others without its check."""
    if device != "cuda":
        return "needs a CUDA device"
    return fused_moe.unavailable_reason(check=True) or fused_moe.unavailable_reason(check=False)


Results = Mapping[fused_moe.Case, fused_moe.CaseResult]


def of_module(case: fused_moe.Case, device: str, results: Results) -> Reading:
    """What FlashInfer's own ``cutlass_fused_moe`` made of one case."""
    result = results[case]
    numbers = {name: getattr(result, name) for name in ("wrong_rows", "wrong_clean_rows", "nan_rows")}
    return Reading(result.outcome, numbers, result.error)


def run_module(cases: Sequence[fused_moe.Case]) -> Results:
    """The results of FlashInfer's kernel; the cases share their processes."""
    return {result.case: result for result in fused_moe.run_cases(cases)}


def module_alone(case: fused_moe.Case, device: str) -> Reading:
    """What it makes of one case in a process of its own, for off / on / off."""
    return of_module(case, device, run_module([case]))


def _module_expected(outcome: str | None) -> Callable[[str], str | None]:
    # Nobody has run these on SM100.
    return lambda device: None if devices.machine().capability == "sm_100" else outcome


def _module_evidence(case: fused_moe.Case) -> Evidence:
    return real("flashinfer-python", "" if case.check else "without its bounds check")


def under_sanitizer(case: fused_moe.Case, device: str) -> Reading:
    """What NVIDIA's memory checker says of the real kernel."""
    try:
        report = fused_moe.sanitize(case)
    except fused_moe.ModuleError as error:
        return absent(str(error))
    verdict = "invalid read" if report.errors else "no error"
    return reading(verdict, note=report.first_error, kernel=report.kernel, errors=report.errors)


def needs_sanitizer(case: fused_moe.Case, device: str) -> str | None:
    """Why the real kernel cannot run under compute-sanitizer."""
    return needs_module(case, device) or fused_moe.sanitizer_missing()


def consume_case(case: RoutingCase, device: str) -> Reading:
    """What the consumer makes of a routed batch."""
    return _observed(scene.serve(case, device))


def serve_ranks(servers: Mapping[str, Setting], where: str | None, device: str) -> dict[str, ranks.Counts]:
    """The passes of several servers, counted by rank and added up; on ``where``, or else on ``device``."""
    return dict(zip(servers, ranks.serve_ranks([*servers.values()], where or device), strict=True))


def padding(name: str, device: str, served: Mapping[str, ranks.Counts], *, on_cpu: bool = False) -> Reading:
    """Which passes of a server have padding, and whether its rows hold NaN."""
    counts = served[name]
    # The padding of an idle rank is zeros, because attention fills it in a dummy step.
    busy = counts.padded - counts.idle
    share = counts.with_nan / busy if busy else 0.0
    numbers = asdict(counts) | {"mean_padding": round(counts.mean_padding, 2)}
    del numbers["sizes"]
    # Ranks on the CPU measure nothing, also on a machine with a GPU.
    on_cpu = on_cpu or device == "cpu"
    return Reading(
        NEARLY_ALL if share >= 0.9 else SOME if share else NONE,
        numbers,
        "ranks on the CPU" * on_cpu,
        provenance=Provenance.INTERPRETED if on_cpu else None,
    )


def needs_gpus(count: int, subject: object, device: str) -> str | None:
    """Why ``count`` ranks cannot run on GPUs."""
    enough = device == "cuda" and (count == 1 or torch.cuda.device_count() >= count)
    return None if enough else "needs a CUDA device" if count == 1 else "needs two CUDA devices"


# Selector -> the verdict on each of INPUTS, in their order; None: no expected verdict.
_BAD, _OK = DUPLICATES, DISTINCT
CHOICE_EXPECTED: dict[str, tuple[str | None, ...]] = {
    "warp_keeps_its_first_column": (_BAD, _BAD, _OK, _BAD, _BAD),
    "block_keeps_the_left": (_BAD, _BAD, _OK, NOT_THE_BEST, NOT_THE_BEST),
    "sort_swaps_raw_nan": (_BAD,) * 5,
    "topk_swaps_raw_nan": (_BAD,) * 5,
    # A NaN is larger than any number here: distinct, and taken first.
    scene.TORCH: (_OK, _OK, NOT_THE_BEST, NOT_THE_BEST, NOT_THE_BEST),
    scene.VLLM: (None,) * 5,
    OURS: (_OK,) * 5,
}
REPLAY_EXPECTED = {"warp_keeps_its_first_column": "the same", "block_keeps_the_left": None}
REMEDY_CASES: dict[str, RoutingCase] = {
    "NaN in padding": RoutingCase(batch=TOP_8),
    "NaN in a live row": RoutingCase(bad="live row", batch=TOP_8),
    "Inf in a live row": RoutingCase(bad="infinity", batch=TOP_8),
    "NaN in the bias": RoutingCase(softmax=False, bad="bias", batch=TOP_8),
}
# Remedy -> the verdict on each of REMEDY_CASES.
REMEDY_EXPECTED: dict[str, tuple[str, ...]] = {
    "none": (_BAD, _BAD, _BAD, _BAD),
    "nan_to_num_before": (_OK, _OK, _OK, _BAD),
    "lowest_on_load": (_OK, _OK, _BAD, _BAD),
    "clamp_after_scoring": (_OK, _OK, _OK, _BAD),
    "skip_padding": (SKIPPED, _BAD, _BAD, _BAD),
    OURS: (_OK,) * 4,
}
CONSUMERS: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "indexes with ids": (lambda *args: consumer.index_directly(*args).out, TAKES_LAST),
    "compares ids": (consumer.layer, PASSES_OVER),
}
BATCHES = {str(b): b for b in (Batch(t, k, e) for t in (256, 257) for k in (8, 10) for e in (128, 512))}
# What the memory contained, whether the consumer checks bounds, and what must come out.
MEMORY = {
    "canary": ("canary", False, ILLEGAL_ACCESS),
    "canary, bounds check": ("canary", True, SILENT),
    "zeros": ("zeros", False, SILENT),
    "previous map": ("previous map", False, SILENT),
    "previous map, NaN rows": ("previous map, NaN rows", False, NAN_ROWS),
    "previous map, NaN rows, bounds check": ("previous map, NaN rows", True, NAN_ROWS),
}
MISREAD_BATCH = Batch(257, 8, 128)
_SANITIZED = [fused_moe.Case(512, 8, ids, check=False) for ids in ("distinct", "all equal")]
# Fix -> a case that fails without it, what it changes, and what off / on / off must say.
_SOFTMAX, _SIGMOID = RoutingCase(), RoutingCase(softmax=False)
_BIAS, _LIVE_ROW = RoutingCase(softmax=False, bad="bias"), RoutingCase(bad="live row")
FIXES: dict[str, tuple[RoutingCase, dict[str, Any], str]] = {
    "topk_softmax": (_SOFTMAX, {"choice": OURS}, FIXED),
    "topk_sigmoid": (_SIGMOID, {"choice": OURS}, FIXED),
    "grouped_topk": (_SIGMOID, {"choice": "grouped_topk"}, FIXED),
    "topk_sigmoid, NaN bias": (_BIAS, {"choice": OURS}, FIXED),
    "grouped_topk, NaN bias": (_BIAS, {"choice": "grouped_topk"}, FIXED),
    "nan_to_num_before": (_SOFTMAX, {"choice": "nan_to_num_before"}, FIXED),
    "clamp_after_scoring": (_SOFTMAX, {"choice": "clamp_after_scoring"}, FIXED),
    "clamp_after_scoring, NaN bias": (_BIAS, {"choice": "clamp_after_scoring"}, NOT_FIXED),
    "skip_padding": (_SOFTMAX, {"choice": "skip_padding"}, FIXED),
    "skip_padding, NaN in a live row": (_LIVE_ROW, {"choice": "skip_padding"}, NOT_FIXED),
    "bounds check in the consumer": (_SOFTMAX, {"guard": True}, NOT_FIXED),
}
# Remedies that nobody merged. They show that a wrong one is not called fixed.
WRONG_REMEDIES = {name: (_SOFTMAX, {"choice": name}, WRONG) for name in scene.WRONG_ROUTES}
# What the crash needs, taken away one at a time -> the change, and what then comes out.
INGREDIENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no NaN in padding": ({"bad": "nowhere"}, RIGHT),
    "a choice that no NaN confuses": ({"choice": OURS}, RIGHT),
    "a map built in one block": ({"batch": TOP_10._replace(top_k=8)}, RIGHT),
    "a map over an earlier map": ({"before": "previous map"}, SILENT),
}
REAL_FIX = f"topk_softmax, {REAL}"
_REAL_OFF = fused_moe.Case(512, 8, fused_moe.VIA_WARP_ARGMAX, check=False)


# Server -> what it is set to, and what NaN in the padding of its attention output must come to.
SERVERS: dict[str, tuple[Setting, str]] = {
    "1 rank": (Setting(), NEARLY_ALL),
    "1 rank, fp32 never in that memory": (Setting(wide=False), NONE),
    "1 rank, output zeroed": (Setting(zeroed=True), NONE),
    "1 rank, no graphs": (Setting(graphs=False), NONE),
}
_PYTORCH = {"1 rank, PyTorch's allocator": Setting(allocator="torch")}
_PARALLEL = {"DP 2": Setting(ranks=2), "DEP 2": Setting(ranks=2, expert_parallel=True)}
_GLOO, _NCCL = ({f"{n}, {b}": s for n, s in _PARALLEL.items()} for b in ("gloo", "NCCL"))
# vLLM #39593, Qwen3-30B-A3B BF16, GSM8K: steps with padding, with NaN, with Inf, mean padding.
REPORTED = {"1 rank": (62, 62, 5, 4.0), "DP 2": (832, 829, 22, 16.7), "DEP 2": (729, 729, 11, 14.2)}


def _served(
    name: str, servers: Mapping[str, Setting], *, where: str | None = None, **fields: Any
) -> Sequence[Case]:
    """The servers that are served together, with as many ranks each."""
    shared = Scene(f"serve {name}", partial(serve_ranks, servers, where))
    ask = partial(padding, on_cpu=where == "cpu")
    return each(PADDING, "padding rows", [*servers], ask, scene=shared, **fields)


def _column(expected: Mapping[str, tuple[Any, ...]], index: int) -> dict[str, Any]:
    return {name: verdicts[index] for name, verdicts in expected.items()}


_THEIRS = "vLLM's compiled kernels: what they do depends on the release"
_MODULE = Scene(REAL, lambda device: run_module([*MODULE_CASES]))
TABLE = Table(
    "moe_routing",
    *(
        each(
            kind,
            "experts",
            SELECTORS,
            partial(choose, kind),
            expect=_column(CHOICE_EXPECTED, index),
            reason=_THEIRS,
            needs=needs_vllm,
            evidence=_selector_evidence,
        )
        for index, kind in enumerate(scene.INPUTS)
    ),
    each(
        "ids of vLLM's kernel",
        "same",
        [*REPLAY_EXPECTED],
        replay,
        expect=REPLAY_EXPECTED,
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
    each("padding id -1", "padding id", CONSUMERS, consume_padding_id, expect=lambda consumes: consumes[1]),
    *(
        each(f"ids {kind}", "access", BATCHES, partial(consume, kind), expect=partial(_consumed, kind))
        for kind in IDS
    ),
    *(
        each(name, "access", MEMORY, partial(consume_over, kind, batch), expect=lambda memory: memory[2])
        for name, kind, batch in (
            ("memory held", "partly equal", TOP_10),
            (f"{MISREAD}, memory held", MISREAD, MISREAD_BATCH),
        )
    ),
    [
        Case(
            Key("", REAL, case.name),
            "access",
            of_module,
            case,
            expect=_module_expected(outcome),
            reason="what the memory held decides, and it is not filled",
            needs=needs_module,
            evidence=_module_evidence,
            scene=_MODULE,
        )
        for case, outcome in MODULE_CASES.items()
    ],
    each(
        SANITIZER,
        "access",
        {case.name: case for case in _SANITIZED},
        under_sanitizer,
        expect=lambda case: "no error" if case.ids == "distinct" else "invalid read",
        needs=needs_sanitizer,
        evidence=_module_evidence,
    ),
    _served(
        "one rank",
        {name: setting for name, (setting, _) in SERVERS.items()},
        expect={name: verdict for name, (_, verdict) in SERVERS.items()},
    ),
    _served(
        "one rank, PyTorch's allocator",
        _PYTORCH,
        reason="the layout of PyTorch's allocator is not ours to fix",
        needs=partial(needs_gpus, 1),
    ),
    _served("two ranks, gloo", _GLOO, where="cpu", expect=NEARLY_ALL),
    _served("two ranks, NCCL", _NCCL, expect=NEARLY_ALL, needs=partial(needs_gpus, 2)),
    *(
        each(
            f"{name} into fp8",
            "rows",
            fp8.FIREWALLS,
            partial(fp8.through, bad),
            expect=attrgetter(name.lower()),
            reason=_THEIRS,
            needs=fp8.unavailable_reason,
            evidence=fp8.evidence,
        )
        for name, bad in (("NaN", scene.NAN), ("Inf", scene.INF))
    ),
    ablation(
        _SOFTMAX,
        "access",
        without=_column(INGREDIENTS, 0),
        ask=consume_case,
        expect={ALL: ILLEGAL_ACCESS, **_column(INGREDIENTS, 1)},
    ),
    *(
        fix(
            name,
            "access",
            off=off,
            on=replace(off, **changes),
            ask=consume_case,
            wrong=wrong,
            expect=expected,
        )
        for name, (off, changes, expected) in (FIXES | WRONG_REMEDIES).items()
    ),
    fix(
        REAL_FIX,
        "access",
        off=_REAL_OFF,
        on=replace(_REAL_OFF, ids=fused_moe.VIA_TOPK_SOFTMAX),
        ask=module_alone,
        # That the kernel's sums are right for these ids is its verdict; here, that the ids are.
        wrong=lambda case, device: wrong_choice(fused_moe.bad_logits(case, device), case.top_k),
        needs=needs_module,
        evidence=_module_evidence,
    ),
)
