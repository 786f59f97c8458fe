"""The questions of incident 3: one function a question; it takes a variant, returns Findings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from staleproof import device as devices
from staleproof.evidence.rows import Verdict, bad_rows
from staleproof.harness.findings import (
    CLEAN,
    FIXED,
    NOT_FIXED,
    OFF_ON_OFF,
    Finding,
    finding,
    not_run,
    off_on_off,
)
from staleproof.incidents.moe_routing import broken, consumer, fused_moe, origin
from staleproof.incidents.moe_routing.broken import REMEDIES, rows_with_duplicates
from staleproof.incidents.moe_routing.consumer import ILLEGAL_ACCESS, RIGHT, SILENT, Observation
from staleproof.incidents.moe_routing.origin import Counts, Setting
from staleproof.ops.reference import topk as reference
from staleproof.ops.topk import grouped_topk, topk_sigmoid, topk_softmax

INCIDENT = "moe_routing"
NAN, INF = float("nan"), float("inf")
VLLM_VARIABLE = "STALEPROOF_VLLM_MOE_SO"

DISTINCT, DUPLICATES = "distinct", "duplicates"
NOT_THE_BEST, NAN_WEIGHTS, SKIPPED = "distinct, not the best", "distinct, NaN weights", "skipped"
NEARLY_ALL, SOME, NONE = "nearly all", "some", "none"

Routed = tuple[torch.Tensor, torch.Tensor]
# (router logits, top_k, softmax, bias) -> weights, ids
Select = Callable[[torch.Tensor, int, bool, torch.Tensor | None], Routed]


def make_logits(device: str, experts: int, rows: int) -> torch.Tensor:
    """(rows, experts) float32, normal, the same on every machine."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, experts, generator=generator).to(device)


class Asked(NamedTuple):
    """What a selection is given: logits, softmax or sigmoid, and a bias."""

    x: torch.Tensor
    softmax: bool
    bias: torch.Tensor | None = None


def _some(shape: tuple[int, ...], share: float, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(shape, generator=generator) < share).to(device)


def _all_nan(x: torch.Tensor) -> Asked:
    return Asked(torch.full_like(x, NAN), softmax=True)


def _one_nan(x: torch.Tensor) -> Asked:
    row = torch.arange(len(x), device=x.device)
    x[row, (row * 4 + 1) % x.shape[1]] = NAN
    return Asked(x, softmax=True)


def _inside_lanes(x: torch.Tensor) -> Asked:
    columns = x.view(len(x), -1, 4)[:, :, 1]
    columns[_some(tuple(columns.shape), 0.25, x.device)] = NAN
    return Asked(x, softmax=False)


def _first_of_lanes(x: torch.Tensor) -> Asked:
    # A lane of a warp holds four float32 logits side by side.
    columns = x.view(len(x), -1, 4)[:, :, 0]
    columns[_some(tuple(columns.shape), 0.25, x.device)] = NAN
    return Asked(x, softmax=False)


def _nan_bias(x: torch.Tensor) -> Asked:
    bias = torch.zeros(x.shape[1], device=x.device)
    bias[_some(tuple(bias.shape), 0.1, x.device)] = NAN
    return Asked(x, softmax=False, bias=bias)


# Question -> what the rows hold.
INPUTS: dict[str, Callable[[torch.Tensor], Asked]] = {
    "all NaN, softmax": _all_nan,
    "one NaN, softmax": _one_nan,
    "NaN inside lanes, sigmoid": _inside_lanes,
    "NaN first in lanes, sigmoid": _first_of_lanes,
    "NaN in the bias, sigmoid": _nan_bias,
}


@dataclass(frozen=True)
class Selector:
    """One way to choose experts.

    Attributes:
        select: the choice.
        expected: the verdict on each of :data:`INPUTS`, in their order; ``None`` asks openly.
        experts: how many it chooses from here, and ``top_k`` of them.
        rows: how many rows it is asked about; Triton's interpreter sorts slowly.
    """

    select: Select
    expected: tuple[str | None, ...]
    experts: int = 128
    top_k: int = 8
    rows: int = 256


def _of_broken(name: str) -> Select:
    def select(x: torch.Tensor, top_k: int, softmax: bool, bias: torch.Tensor | None) -> Routed:
        return broken.route(broken.CHOICES[name], x, top_k, softmax=softmax, bias=bias)

    return select


def _of_ours(x: torch.Tensor, top_k: int, softmax: bool, bias: torch.Tensor | None) -> Routed:
    return (topk_softmax if softmax else topk_sigmoid)(x, top_k, bias=bias)


def _of_torch(x: torch.Tensor, top_k: int, softmax: bool, bias: torch.Tensor | None) -> Routed:
    scores = x.softmax(-1) if softmax else x.sigmoid()
    ids = (scores if bias is None else scores + bias).topk(top_k).indices
    return scores.gather(1, ids), ids.int()


@cache
def vllm_ops() -> Any:
    """vLLM's compiled routing operators: the library that STALEPROOF_VLLM_MOE_SO names."""
    torch.ops.load_library(os.environ[VLLM_VARIABLE])
    return torch.ops._moe_C


def _of_vllm(x: torch.Tensor, top_k: int, softmax: bool, bias: torch.Tensor | None) -> Routed:
    weights = torch.empty(len(x), top_k, device=x.device)
    ids = torch.empty(len(x), top_k, dtype=torch.int32, device=x.device)
    route = vllm_ops().topk_softmax if softmax else vllm_ops().topk_sigmoid
    route(weights, ids, torch.empty_like(ids), x, False, bias)
    return weights, ids


OURS, TORCH, VLLM = "staleproof", "torch.topk", "vLLM's compiled kernels"
_BAD, _OK = DUPLICATES, DISTINCT
SELECTORS: dict[str, Selector] = {
    "warp_keeps_its_first_column": Selector(
        _of_broken("warp_keeps_its_first_column"), (_BAD, _BAD, _OK, _BAD, _BAD)
    ),
    "block_keeps_the_left": Selector(
        _of_broken("block_keeps_the_left"), (_BAD, _BAD, _OK, NOT_THE_BEST, NOT_THE_BEST), experts=160
    ),
    "sort_swaps_raw_nan": Selector(_of_broken("sort_swaps_raw_nan"), (_BAD,) * 5, 16, 4, 16),
    "topk_swaps_raw_nan": Selector(_of_broken("topk_swaps_raw_nan"), (_BAD,) * 5, 16, 4, 16),
    # A NaN is larger than any number here: distinct, and taken first.
    TORCH: Selector(_of_torch, (_OK, _OK, NOT_THE_BEST, NOT_THE_BEST, NOT_THE_BEST)),
    VLLM: Selector(_of_vllm, (None,) * 5),
    OURS: Selector(_of_ours, (_OK,) * 5),
}


def chosen(name: str, question: str, device: str) -> tuple[Asked, torch.Tensor]:
    """What one selection was asked, and the ids (rows, top_k) it chose."""
    s = SELECTORS[name]
    asked = INPUTS[question](make_logits(device, s.experts, s.rows))
    return asked, s.select(asked.x, s.top_k, asked.softmax, asked.bias)[1]


def selection(name: str, device: str) -> Iterator[Finding]:
    """Whether a selection's experts are distinct, and the best, whatever the rows hold."""
    s = SELECTORS[name]
    if name == VLLM and (why := _why_no_vllm(device)):
        for question in INPUTS:
            yield not_run(INCIDENT, question, name, why)
        return
    for question, expected in zip(INPUTS, s.expected, strict=True):
        asked, ids = chosen(name, question, device)
        doubled = rows_with_duplicates(ids)
        verdict = DUPLICATES if bool(doubled.any()) else DISTINCT
        if verdict == DISTINCT and not asked.softmax:
            # With softmax no score of such a row is left, and any experts are as good.
            best = reference.topk_sigmoid(asked.x, s.top_k, bias=asked.bias)[1]
            verdict = DISTINCT if torch.equal(ids.sort().values, best.sort().values) else (NOT_THE_BEST)
        row = int(doubled.int().argmax())
        yield finding(
            INCIDENT,
            question,
            name,
            verdict,
            expected=expected,
            rows=s.rows,
            rows_with_duplicates=int(doubled.sum()),
            ids=str(ids[row].tolist()),
        )


# Name -> experts, and what is expected: the block's path is asked openly.
REPLAYED: dict[str, tuple[int, str | None]] = {
    "warp_keeps_its_first_column": (128, "the same"),
    "block_keeps_the_left": (160, None),
}


def replay(name: str, device: str) -> Finding:
    """Whether a replayed choice, with #39391's clamp, gives the ids of vLLM's compiled kernel.

    Under a NaN bias, which that clamp lets through.
    """
    question = "ids of vLLM's kernel"
    if why := _why_no_vllm(device):
        return not_run(INCIDENT, question, name, why)
    experts, expected = REPLAYED[name]
    asked = _nan_bias(make_logits(device, experts, 256))
    theirs = _of_vllm(asked.x, 8, asked.softmax, asked.bias)[1]
    ours = broken.route(
        broken.CHOICES[name],
        asked.x,
        8,
        softmax=asked.softmax,
        bias=asked.bias,
        remedy=REMEDIES["clamp_after_scoring"],
    )[1]
    same = (ours == theirs).all(1)
    return finding(
        INCIDENT,
        question,
        name,
        "the same" if bool(same.all()) else "others",
        expected=expected,
        rows=len(same),
        same_rows=int(same.sum()),
    )


def _why_no_vllm(device: str) -> str | None:
    if device != "cuda":
        return "needs a CUDA device"
    return None if VLLM_VARIABLE in os.environ else f"{VLLM_VARIABLE} names no _moe_C library"


REMEDY_EXPECTED: dict[str, tuple[str, ...]] = {
    "none": (DUPLICATES, DUPLICATES, DUPLICATES, DUPLICATES),
    "nan_to_num_before": (DISTINCT, DISTINCT, DISTINCT, DUPLICATES),
    "lowest_on_load": (DISTINCT, DISTINCT, DUPLICATES, DUPLICATES),
    "clamp_after_scoring": (DISTINCT, DISTINCT, DISTINCT, DUPLICATES),
    "skip_padding": (SKIPPED, DUPLICATES, DUPLICATES, DUPLICATES),
    OURS: (DISTINCT,) * 4,
}
LIVE = 5


def remedy(name: str, device: str) -> Iterator[Finding]:
    """What one remedy makes of bad rows, on the warp's argmax, and whether it spares good ones."""
    experts, rows, top_k = 128, 8, 8
    clean = make_logits(device, experts, rows)
    is_padding = torch.arange(rows, device=device) >= LIVE

    def route(x: torch.Tensor, bias: torch.Tensor | None = None) -> Routed:
        softmax = bias is None
        if name == OURS:
            return _of_ours(x, top_k, softmax, bias)
        return broken.route(
            broken.warp_keeps_its_first_column,
            x,
            top_k,
            softmax=softmax,
            bias=bias,
            is_padding=is_padding,
            remedy=REMEDIES[name],
        )

    bad_padding, bad_live, infinite = clean.clone(), clean.clone(), clean.clone()
    bad_padding[LIVE:], bad_live[2], infinite[2, 9] = NAN, NAN, INF
    bias = torch.full((experts,), NAN, device=device)
    for question, (weights, ids), expected in zip(
        ("NaN in padding", "NaN in a live row", "Inf in a live row", "NaN in the bias"),
        (route(bad_padding), route(bad_live), route(infinite), route(clean, bias)),
        REMEDY_EXPECTED[name],
        strict=True,
    ):
        has_expert = ids[(ids >= 0).all(1)]
        verdict = DISTINCT if len(has_expert) == rows else SKIPPED
        if not bool(weights.isfinite().all()):
            verdict = NAN_WEIGHTS
        if bool(rows_with_duplicates(has_expert).any()):
            verdict = DUPLICATES
        yield finding(INCIDENT, question, name, verdict, expected=expected)
    want, got = reference.topk_softmax(bad_live, top_k), route(bad_live)
    good = torch.arange(rows, device=device) != 2
    if name == "skip_padding":
        good &= ~is_padding
    same = torch.equal(got[1][good], want[1][good])
    close = torch.allclose(got[0][good], want[0][good], rtol=2e-6, atol=0)
    yield finding(
        INCIDENT, "rows without NaN", name, "right" if same and close else "wrong", expected="right"
    )


def indexing_consumer(device: str) -> Iterator[Finding]:
    """What the id -1 of skipped padding does to a consumer that indexes with ids."""
    logits = make_logits(device, 128, 8)
    logits[LIVE:] = NAN
    is_padding = torch.arange(8, device=device) >= LIVE
    weights, ids = topk_softmax(logits, 8, is_padding=is_padding)
    x, table = torch.ones(8, 4, device=device), torch.ones(128, 4, device=device)
    # Who multiplies by the last expert's row by mistake gets its mark, though the weight is 0.
    table[-1] = NAN
    consumers: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
        "indexes with ids": (lambda *a: consumer.index_directly(*a).out, "takes the last expert"),
        "compares ids": (consumer.layer, "passes over"),
    }
    for name, (consumes, expected) in consumers.items():
        took = consumes(x, weights, ids, table)[LIVE:].isnan().any(1)
        verdict = "takes the last expert" if bool(took.all()) else "passes over"
        yield finding(INCIDENT, "padding id -1", name, verdict, expected=expected, rows=int(took.sum()))


class Batch(NamedTuple):
    """The shape of one call of the fused MoE."""

    tokens: int
    top_k: int
    experts: int

    def __str__(self) -> str:
        """As variants are named."""
        return f"{self.tokens} tokens, top {self.top_k}, {self.experts} experts"


BATCHES = [Batch(t, k, e) for t in (256, 257) for k in (8, 10) for e in (128, 512)]


def consume(batch: Batch, device: str) -> Iterator[Finding]:
    """Map and finalise step of one batch, with the canary in the map: distinct and equal ids."""
    sound = consumer.takes_one_block(*batch)
    for kind in consumer.IDS:
        seen = observe(batch, kind, device)
        yield finding(
            INCIDENT,
            f"ids {kind}",
            str(batch),
            seen.outcome,
            expected=RIGHT if sound or kind == "distinct" else ILLEGAL_ACCESS,
            **_numbers(seen),
        )


def observe(batch: Batch, ids: str | torch.Tensor, device: str, **changes: Any) -> Observation:
    """One batch through our map and finalise step; large ones in their torch form on a CPU."""
    in_torch = device == "cpu" and batch.tokens > 64
    return consumer.observe(*batch, ids, device=device, in_torch=in_torch, **changes)


def _numbers(seen: Observation) -> dict[str, Any]:
    fields = ("one_block", "unwritten", "wild_reads", "duplicate_rows", "wrong_rows", "wrong_clean_rows")
    return {name: getattr(seen, name) for name in fields}


# What the memory held, with and without the bounds check -> what a batch with duplicates does.
HELD: dict[tuple[str, bool], str] = {
    ("canary", False): ILLEGAL_ACCESS,
    ("canary", True): SILENT,
    ("zeros", False): SILENT,
    ("previous map", False): SILENT,
}
TOP_10 = Batch(8, 10, 64)


def held_before(device: str) -> Iterator[Finding]:
    """What the unwritten entries held decides how it ends; a bounds check saves nobody's answer."""
    for (held, guard), expected in HELD.items():
        seen = observe(TOP_10, "partly equal", device, held=held, guard=guard)
        name = f"{held}, bounds check" if guard else held
        yield finding(INCIDENT, "memory held", name, seen.outcome, expected=expected, **_numbers(seen))


REAL, SANITIZER = "FlashInfer's kernel", "compute-sanitizer"


def real_module(device: str) -> Iterator[Finding]:
    """The same of FlashInfer's own ``cutlass_fused_moe``, each case in a process of its own."""
    why = _why_no_module(device)
    cases = dict(fused_moe.TABLE)
    if why:
        for case in cases:
            yield not_run(INCIDENT, REAL, case.name, why)
    else:
        for row in fused_moe.run_cases(list(cases)):
            yield finding(
                INCIDENT,
                REAL,
                row.case.name,
                row.outcome,
                expected=cases[row.case],
                note=row.error,
                wrong_rows=row.wrong_rows,
                wrong_clean_rows=row.wrong_clean_rows,
            )


def _why_no_module(device: str) -> str | None:
    if device != "cuda":
        return "needs a CUDA device"
    # Some cases need FlashInfer as shipped, others one without its bounds check.
    return fused_moe.why_not(check=True) or fused_moe.why_not(check=False)


def under_sanitizer(device: str) -> Iterator[Finding]:
    """What NVIDIA's memory checker says of the real kernel."""
    why = _why_no_module(device) or fused_moe.sanitizer_missing()
    for ids, expected in (("distinct", "no error"), ("all equal", "invalid read")):
        case = fused_moe.Case(512, 8, ids, check=False)
        if why:
            yield not_run(INCIDENT, SANITIZER, case.name, why)
            continue
        try:
            seen = fused_moe.sanitize(case)
        except fused_moe.ModuleError as error:
            yield not_run(INCIDENT, SANITIZER, case.name, str(error))
            continue
        yield finding(
            INCIDENT,
            SANITIZER,
            case.name,
            "invalid read" if seen.errors else "no error",
            expected=expected,
            note=seen.first_error,
            kernel=seen.kernel,
            errors=seen.errors,
        )


# How an fp8 model quantises its attention output, and what NaN and Inf in padding become.
FIREWALLS: dict[str, tuple[bool, bool, tuple[Verdict, Verdict]]] = {
    "a scale a token, fmax": (True, True, (Verdict.CLEAN, Verdict.PAD_ONLY)),
    "a scale a token, torch.amax": (True, False, (Verdict.PAD_ONLY, Verdict.PAD_ONLY)),
    "one scale, fmax": (False, True, (Verdict.CLEAN, Verdict.LEAKED)),
    "one scale, torch.amax": (False, False, (Verdict.LEAKED, Verdict.LEAKED)),
}


def firewall(name: str, device: str) -> Iterator[Finding]:
    """What an fp8 quantiser between attention and router lets through to the router."""
    per_token, drops_nan, expected = FIREWALLS[name]
    clean = make_logits(device, 256, 8)
    weight = make_logits(device, 128, 256)
    for question, bad, verdict in zip(("NaN", "Inf"), (NAN, INF), expected, strict=True):
        attended = clean.clone()
        attended[LIVE:, ::64] = bad
        values, scale = broken.quantise_fp8(attended, per_token=per_token, drops_nan=drops_nan)
        logits = (values.float() * scale) @ weight
        rows = bad_rows(logits)
        seen = Verdict.PAD_ONLY if bool(rows.any()) else Verdict.CLEAN
        if bool(rows[:LIVE].any()):
            seen = Verdict.LEAKED
        _, ids = broken.route(broken.warp_keeps_its_first_column, logits, 8)
        yield finding(
            INCIDENT,
            f"{question} into fp8",
            name,
            seen,
            expected=verdict,
            rows_with_duplicates=int(rows_with_duplicates(ids).sum()),
        )


# Servers, with what NaN in the padding of their attention output must come to.
SERVERS: dict[str, tuple[Setting, str]] = {
    "1 rank": (Setting(), NEARLY_ALL),
    "1 rank, fp32 never in that memory": (Setting(wide=False), NONE),
    "1 rank, output zeroed": (Setting(zeroed=True), NONE),
    "1 rank, no graphs": (Setting(graphs=False), NONE),
}
PARALLEL = {"DP 2": Setting(ranks=2), "DEP 2": Setting(ranks=2, expert_parallel=True)}
# vLLM #39593, Qwen3-30B-A3B BF16, GSM8K: steps with padding, with NaN, with Inf, mean padding.
REPORTED = {"1 rank": (62, 62, 5, 4.0), "DP 2": (832, 829, 22, 16.7), "DEP 2": (729, 729, 11, 14.2)}
PADDING = "NaN in padding rows"


def padding(device: str) -> Iterator[Finding]:
    """Which passes of a server have padding, and what its rows hold: alone, DP 2 and DEP 2."""
    yield from _ranks(SERVERS, device)
    name = "1 rank, PyTorch's allocator"
    if device == "cuda":
        # Its layout is not ours to fix: asked openly.
        yield from _ranks({name: (Setting(allocator="torch"), None)}, device)
    else:
        yield not_run(INCIDENT, PADDING, name, "needs a CUDA device")
    for found in _ranks({f"{n}, gloo": (s, NEARLY_ALL) for n, s in PARALLEL.items()}, "cpu"):
        yield replace(found, provenance=devices.Provenance.INTERPRETED, note=found.note or "ranks on the CPU")
    nccl = {f"{n}, NCCL": (s, NEARLY_ALL) for n, s in PARALLEL.items()}
    if device == "cuda" and torch.cuda.device_count() >= 2:
        yield from _ranks(nccl, device)
    else:
        for name in nccl:
            yield not_run(INCIDENT, PADDING, name, "needs two CUDA devices")


def _ranks(servers: Mapping[str, tuple[Setting, str | None]], device: str) -> Iterator[Finding]:
    try:
        counts = origin.serve_ranks([setting for setting, _ in servers.values()], device)
    except origin.RankError as error:
        for name, (_, expected) in servers.items():
            wanted = expected or NEARLY_ALL
            yield finding(INCIDENT, PADDING, name, "failed", expected=wanted, note=str(error))
        return
    for (name, (_, expected)), seen in zip(servers.items(), counts, strict=True):
        yield _padding_finding(name, seen, expected)


def _padding_finding(name: str, counts: Counts, expected: str | None) -> Finding:
    # An idle rank's rows are padding too, and zeros: attention fills them in a dummy step.
    busy = counts.padded - counts.idle
    share = counts.with_nan / busy if busy else 0.0
    verdict = NEARLY_ALL if share >= 0.9 else SOME if share else NONE
    numbers = asdict(counts) | {"mean_padding": round(counts.mean_padding, 2)}
    del numbers["sizes"]
    return finding(INCIDENT, PADDING, name, verdict, expected=expected, **numbers)


@dataclass(frozen=True)
class Served:
    """From router logits through the choice of experts to the consumer, over one batch.

    Attributes:
        choice: a remedy of the warp's argmax, or one of our kernels.
        softmax: or sigmoid.
        bad: where the NaN is: ``padding``, ``live row``, ``bias`` or ``nowhere``.
        batch: its shape.
        held: what the memory of the map held.
        guard: whether the consumer checks bounds.
    """

    choice: str = "none"
    softmax: bool = True
    bad: str = "padding"
    batch: Batch = TOP_10
    held: str = "canary"
    guard: bool = False


def routed_logits(case: Served, device: str) -> torch.Tensor:
    """(tokens, experts) float32, with the case's NaN in it."""
    logits = make_logits(device, case.batch.experts, case.batch.tokens)
    if case.bad == "padding":
        logits[LIVE:] = NAN
    elif case.bad == "live row":
        logits[2] = NAN
    return logits


def routed_ids(case: Served, device: str) -> torch.Tensor:
    """The ids (tokens, top_k) that the case's choice sends to the consumer."""
    tokens, top_k, experts = case.batch
    logits, bias = routed_logits(case, device), None
    is_padding = torch.arange(tokens, device=device) >= LIVE
    if case.bad == "bias":
        bias = torch.full((experts,), NAN, device=device)
    if case.choice == "grouped_topk":
        return grouped_topk(logits, top_k, num_expert_group=8, topk_group=4, bias=bias)[1]
    if case.choice in ("topk_softmax", "topk_sigmoid"):
        return _of_ours(logits, top_k, case.softmax, bias)[1]
    return broken.route(
        broken.warp_keeps_its_first_column,
        logits,
        top_k,
        softmax=case.softmax,
        bias=bias,
        is_padding=is_padding,
        remedy=REMEDIES[case.choice],
    )[1]


def serve(case: Served, device: str) -> Observation:
    """What became of the batch in the consumer."""
    ids = routed_ids(case, device)
    return observe(case.batch, ids, device, held=case.held, guard=case.guard)


def picture(case: Served, device: str) -> tuple[list[list[int]], list[list[bool]]]:
    """Expert ids and holes of the map, row by row and slot by slot."""
    ids = routed_ids(case, device)
    made = consumer.build_map(ids, case.batch.experts)
    return ids.tolist(), consumer.holes(made, ids).tolist()


def stages(case: Served, device: str) -> list[tuple[str, int, int]]:
    """Each stage's bad rows: its name, how many live ones, how many padding rows."""
    ids, holes = picture(case, device)
    by_stage = {
        "router logits: NaN": bad_rows(routed_logits(case, device)).tolist(),
        "choice: an expert twice": [len(set(row)) < len(row) for row in ids],
        "map: an entry nobody wrote": [any(row) for row in holes],
    }
    return [(name, sum(bad[:LIVE]), sum(bad[LIVE:])) for name, bad in by_stage.items()]


# Name -> what is on, in a case that dies with it off, and what off / on / off must say.
_SOFTMAX, _SIGMOID = Served(), Served(softmax=False)
_BIAS, _LIVE_ROW = Served(softmax=False, bad="bias"), Served(bad="live row")
FIXES: dict[str, tuple[Served, Served, str]] = {
    "topk_softmax": (_SOFTMAX, replace(_SOFTMAX, choice="topk_softmax"), FIXED),
    "topk_sigmoid": (_SIGMOID, replace(_SIGMOID, choice="topk_sigmoid"), FIXED),
    "grouped_topk": (_SIGMOID, replace(_SIGMOID, choice="grouped_topk"), FIXED),
    "topk_sigmoid, NaN bias": (_BIAS, replace(_BIAS, choice="topk_sigmoid"), FIXED),
    "grouped_topk, NaN bias": (_BIAS, replace(_BIAS, choice="grouped_topk"), FIXED),
    "nan_to_num_before": (_SOFTMAX, replace(_SOFTMAX, choice="nan_to_num_before"), FIXED),
    "clamp_after_scoring": (_SOFTMAX, replace(_SOFTMAX, choice="clamp_after_scoring"), FIXED),
    "clamp_after_scoring, NaN bias": (_BIAS, replace(_BIAS, choice="clamp_after_scoring"), NOT_FIXED),
    "skip_padding": (_SOFTMAX, replace(_SOFTMAX, choice="skip_padding"), FIXED),
    "skip_padding, NaN in a live row": (_LIVE_ROW, replace(_LIVE_ROW, choice="skip_padding"), NOT_FIXED),
    "bounds check in the consumer": (_SOFTMAX, replace(_SOFTMAX, guard=True), NOT_FIXED),
}


def verify(name: str, device: str) -> Finding:
    """Off / on / off: the same logits and the same consumer, without, with and without the fix."""
    off, on, expected = FIXES[name]
    first, fixed, again = (serve(case, device) for case in (off, on, off))
    return off_on_off(
        INCIDENT,
        name,
        off=_clean(first.outcome),
        on=_clean(fixed.outcome),
        off_again=_clean(again.outcome),
        expected=expected,
        unwritten_off=first.unwritten,
        unwritten_on=fixed.unwritten,
        wrong_on=fixed.wrong_rows,
    )


def _clean(outcome: str) -> str:
    return CLEAN if outcome == RIGHT else outcome


def verify_real(device: str) -> Finding:
    """Off / on / off of our routing in front of FlashInfer's own kernel."""
    name = f"topk_softmax, {REAL}"
    if why := _why_no_module(device):
        return not_run(INCIDENT, OFF_ON_OFF, name, why)
    off = fused_moe.Case(512, 8, "NaN through the warp argmax", check=False)
    on = replace(off, ids="NaN through topk_softmax")
    seen = [_clean(row.outcome) for row in fused_moe.run_cases([off, on, off])]
    return off_on_off(INCIDENT, name, off=seen[0], on=seen[1], off_again=seen[2])


# What the crash needs; without any one of them there is none.
INGREDIENTS: dict[str, tuple[Served, str]] = {
    "all four": (_SOFTMAX, ILLEGAL_ACCESS),
    "no NaN in padding": (replace(_SOFTMAX, bad="nowhere"), RIGHT),
    "a choice that no NaN confuses": (replace(_SOFTMAX, choice="topk_softmax"), RIGHT),
    "a map built in one block": (replace(_SOFTMAX, batch=TOP_10._replace(top_k=8)), RIGHT),
    "a map over an earlier map": (replace(_SOFTMAX, held="previous map"), SILENT),
}


def ingredient(name: str, device: str) -> Finding:
    """One row of the ablation: the crash without one of its ingredients."""
    case, expected = INGREDIENTS[name]
    seen = serve(case, device)
    return finding(INCIDENT, "ablation", name, seen.outcome, expected=expected, **_numbers(seen))


def run(device: str, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Every question of the incident, one finding at a time."""
    steps: list[tuple[str, Callable[[], Iterator[Finding] | Finding]]] = [
        *((f"choice, {name}", partial(selection, name, device)) for name in SELECTORS),
        *((f"replay, {name}", partial(replay, name, device)) for name in REPLAYED),
        *((f"remedy, {name}", partial(remedy, name, device)) for name in REMEDY_EXPECTED),
        ("padding id -1", partial(indexing_consumer, device)),
        *((f"consumer, {batch}", partial(consume, batch, device)) for batch in BATCHES),
        ("what the memory held", partial(held_before, device)),
        ("FlashInfer's kernel", partial(real_module, device)),
        ("compute-sanitizer", partial(under_sanitizer, device)),
        ("padding rows of a server", partial(padding, device)),
        *((f"fp8, {name}", partial(firewall, name, device)) for name in FIREWALLS),
        *((f"without: {name}", partial(ingredient, name, device)) for name in INGREDIENTS),
        *((f"off/on/off, {name}", partial(verify, name, device)) for name in FIXES),
        ("off/on/off, FlashInfer's kernel", partial(verify_real, device)),
    ]
    threads = torch.get_num_threads()
    # Operations of microseconds: a second thread computes nothing and waits.
    torch.set_num_threads(1)
    try:
        for number, (name, ask) in enumerate(steps, 1):
            progress(f"{INCIDENT} {number}/{len(steps)}: {name}")
            answer = ask()
            yield from (answer,) if isinstance(answer, Finding) else answer
    finally:
        torch.set_num_threads(threads)
