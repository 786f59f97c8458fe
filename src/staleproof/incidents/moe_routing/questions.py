"""The questions of incident 3, as a table. The functions above it answer one variant each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from staleproof.cases.answers import Answer, answer, no_answer
from staleproof.cases.case import ALL, Ablation, Fix, Question, Questions, Several
from staleproof.cases.finding import CLEAN, FIXED, NOT_FIXED, REPLICA, Evidence, real
from staleproof.incidents.moe_routing import broken, consumer, fp8, fused_moe, scene
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
from staleproof.incidents.moe_routing.observation import Observation, observe
from staleproof.incidents.moe_routing.padding import PADDING, padding
from staleproof.incidents.moe_routing.scene import OURS, SELECTORS, TOP_8, TOP_10, RoutingCase, Selector
from staleproof.ops.reference import topk as reference
from staleproof.ops.topk import topk_softmax

DISTINCT, DUPLICATES = "distinct", "duplicates"
NOT_THE_BEST, NAN_WEIGHTS, SKIPPED = "distinct, not the best", "distinct, NaN weights", "skipped"
TAKES_LAST, PASSES_OVER = "takes the last expert", "passes over"
REAL, SANITIZER = "FlashInfer's kernel", "compute-sanitizer"


def choose(kind: str, selector: Selector, device: str) -> Answer:
    """Whether a selection's experts are distinct, and the best, whatever the rows contain."""
    given, ids = scene.chosen(selector, kind, device)
    doubled = rows_with_duplicates(ids)
    verdict = DUPLICATES if bool(doubled.any()) else DISTINCT
    if verdict == DISTINCT and not given.softmax:
        # With softmax no score of a row with NaN is left, so any experts are as good.
        best = reference.topk_sigmoid(given.logits, selector.top_k, bias=given.bias)[1]
        verdict = DISTINCT if torch.equal(ids.sort().values, best.sort().values) else NOT_THE_BEST
    first = str(ids[int(doubled.int().argmax())].tolist())
    return answer(verdict, rows=selector.rows, rows_with_duplicates=int(doubled.sum()), ids=first)


def replay(name: str, device: str) -> Answer:
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
    verdict = "the same" if bool(same.all()) else "others"
    return answer(verdict, rows=len(same), same_rows=int(same.sum()))


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


def consume_padding_id(consumes: tuple[Callable[..., torch.Tensor], str], device: str) -> Answer:
    """What the id -1 of skipped padding does to a consumer."""
    logits = scene.router_input(RoutingCase(batch=TOP_8), device).logits
    is_padding = torch.arange(TOP_8.tokens, device=device) >= scene.LIVE
    weights, ids = topk_softmax(logits, TOP_8.top_k, is_padding=is_padding)
    x, table = torch.ones(len(ids), 4, device=device), torch.ones(TOP_8.experts, 4, device=device)
    # Whoever multiplies by the last expert's row gets NaN, although the weight is 0.
    table[-1] = scene.NAN
    took = consumes[0](x, weights, ids, table)[scene.LIVE :].isnan().any(1)
    return answer(TAKES_LAST if bool(took.all()) else PASSES_OVER, rows=int(took.sum()))


def _observed(observation: Observation) -> Answer:
    numbers = asdict(observation)
    return answer(numbers.pop("outcome"), **numbers)


def consume(kind: str, batch: Batch, device: str) -> Answer:
    """What map and finalise step make of one batch with one kind of ids, over a canary."""
    return _observed(observe(batch, kind, device))


def _consumed(kind: str, batch: Batch) -> str:
    if kind == "distinct" or consumer.takes_one_block(*batch):
        # The map is right for the ids it gets, but misread ids name other experts.
        return SILENT if kind == MISREAD else RIGHT
    return ILLEGAL_ACCESS


def consume_over(kind: str, batch: Batch, memory: tuple[str, bool, str], device: str) -> Answer:
    """What they make of a batch with duplicates, by what the memory contained and the bounds check."""
    before, guard, _ = memory
    return _observed(observe(batch, kind, device, before=before, guard=guard))


def needs_module(subject: object, device: str) -> str | None:
    """Why FlashInfer's kernel cannot run: some cases need it as shipped, others without its check."""
    if device != "cuda":
        return "needs a CUDA device"
    return fused_moe.unavailable_reason(check=True) or fused_moe.unavailable_reason(check=False)


def real_module(device: str) -> Iterator[Answer]:
    """What FlashInfer's own ``cutlass_fused_moe`` makes of each case."""
    expected = fused_moe.expected()
    if why := needs_module(None, device):
        yield from (no_answer(why, question=REAL, variant=case.name) for case in expected)
        return
    for row in fused_moe.run_cases([*expected]):
        numbers = {name: getattr(row, name) for name in ("wrong_rows", "wrong_clean_rows", "nan_rows")}
        yield Answer(
            row.outcome,
            numbers,
            row.error,
            REAL,
            row.case.name,
            expected[row.case],
            _module_evidence(row.case),
        )


def _module_evidence(case: fused_moe.Case) -> Evidence:
    return real("flashinfer-python", "" if case.check else "without its bounds check")


def under_sanitizer(case: fused_moe.Case, device: str) -> Answer:
    """What NVIDIA's memory checker says of the real kernel."""
    try:
        report = fused_moe.sanitize(case)
    except fused_moe.ModuleError as error:
        return no_answer(str(error))
    verdict = "invalid read" if report.errors else "no error"
    return answer(verdict, note=report.first_error, kernel=report.kernel, errors=report.errors)


def needs_sanitizer(case: fused_moe.Case, device: str) -> str | None:
    """Why the real kernel cannot run under compute-sanitizer."""
    return needs_module(case, device) or fused_moe.sanitizer_missing()


def consume_case(case: RoutingCase, device: str) -> Answer:
    """What the consumer makes of a routed batch."""
    return _observed(scene.serve(case, device))


def judge_case(case: RoutingCase, device: str) -> Answer:
    """The verdict of the consumer on a routed batch, for off / on / off."""
    end = scene.serve(case, device)
    verdict = CLEAN if end.outcome == RIGHT else end.outcome
    return answer(verdict, unwritten=end.unwritten, wrong=end.wrong_rows)


def judge_real(case: fused_moe.Case, device: str) -> str:
    """The verdict of FlashInfer's own kernel on one case, for off / on / off."""
    (row,) = fused_moe.run_cases([case])
    return CLEAN if row.outcome == RIGHT else row.outcome


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
# What the crash needs, taken away one at a time -> the change, and what then comes out.
INGREDIENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no NaN in padding": ({"bad": "nowhere"}, RIGHT),
    "a choice that no NaN confuses": ({"choice": OURS}, RIGHT),
    "a map built in one block": ({"batch": TOP_10._replace(top_k=8)}, RIGHT),
    "a map over an earlier map": ({"before": "previous map"}, SILENT),
}
REAL_FIX = f"topk_softmax, {REAL}"
_REAL_OFF = fused_moe.Case(512, 8, fused_moe.VIA_WARP_ARGMAX, check=False)


def _column(expected: Mapping[str, tuple[Any, ...]], index: int) -> dict[str, Any]:
    return {name: verdicts[index] for name, verdicts in expected.items()}


# A question whose operators take microseconds.
_Small = partial(Question, one_thread=True)
QUESTIONS = Questions(
    "moe_routing",
    *(
        _Small(
            kind,
            SELECTORS,
            partial(choose, kind),
            _column(CHOICE_EXPECTED, index),
            needs_vllm,
            evidence=_selector_evidence,
        )
        for index, kind in enumerate(scene.INPUTS)
    ),
    _Small(
        "ids of vLLM's kernel",
        [*REPLAY_EXPECTED],
        replay,
        REPLAY_EXPECTED,
        lambda name, device: scene.vllm_unavailable_reason(device),
        evidence=lambda name: _selector_evidence(SELECTORS[scene.VLLM]),
    ),
    *(
        _Small(name, [*REMEDY_EXPECTED], partial(remedied, case), _column(REMEDY_EXPECTED, index))
        for index, (name, case) in enumerate(REMEDY_CASES.items())
    ),
    _Small("rows without NaN", [*REMEDY_EXPECTED], good_rows, "right"),
    _Small("padding id -1", CONSUMERS, consume_padding_id, lambda consumes: consumes[1]),
    *(_Small(f"ids {kind}", BATCHES, partial(consume, kind), partial(_consumed, kind)) for kind in IDS),
    *(
        _Small(name, MEMORY, partial(consume_over, kind, batch), lambda memory: memory[2])
        for name, kind, batch in (
            ("memory held", "partly equal", TOP_10),
            (f"{MISREAD}, memory held", MISREAD, MISREAD_BATCH),
        )
    ),
    Several(REAL, real_module),
    Question(
        SANITIZER,
        {case.name: case for case in _SANITIZED},
        under_sanitizer,
        lambda case: "no error" if case.ids == "distinct" else "invalid read",
        needs_sanitizer,
        evidence=_module_evidence,
    ),
    Several(PADDING, padding),
    *(
        _Small(
            f"{name} into fp8",
            fp8.FIREWALLS,
            partial(fp8.through, bad),
            attrgetter(name.lower()),
            unavailable=fp8.unavailable_reason,
            evidence=fp8.evidence,
        )
        for name, bad in (("NaN", scene.NAN), ("Inf", scene.INF))
    ),
    Ablation(
        _SOFTMAX,
        without=_column(INGREDIENTS, 0),
        ask=consume_case,
        expected={ALL: ILLEGAL_ACCESS, **_column(INGREDIENTS, 1)},
        one_thread=True,
    ),
    *(
        Fix(name, off, replace(off, **changes), judge_case, wrong, expected, one_thread=True)
        for name, (off, changes, expected) in FIXES.items()
    ),
    Fix(
        REAL_FIX,
        _REAL_OFF,
        replace(_REAL_OFF, ids=fused_moe.VIA_TOPK_SOFTMAX),
        judge_real,
        lambda case, device: wrong(replace(_SOFTMAX, choice=OURS), device),
        unavailable=needs_module,
        evidence=_module_evidence,
    ),
)
