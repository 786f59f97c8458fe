"""Incident 1 in a real engine: NaN rows of MLA decode, layer by layer, and what a live token notices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from staleproof.cases.case import Case, MissingError, Reading, reading
from staleproof.cases.words import FIXED
from staleproof.engine.bench import STATES, Bench, Results, cell, fix, three
from staleproof.engine.probes import control, rows, spoilt_blocks, start
from staleproof.engine.router_probes import planted, quantizers
from staleproof.engine.session import Order, Probe
from staleproof.engine.spies import attention, logits, routing, stages
from staleproof.engine.tuning import compiled_kernels

LIVE = (3, 8, 3, 50)
NAN_ROWS, LIVE_LOGITS, LIVE_PADDING = "NaN rows", "live logits, off / on", "live logits, 3 / 8 live"
QUANTIZERS = "dynamic fp8 quantizers"
PLANTED, WITHOUT = "other padding", "without padding"
SIZES = [8, 64]
FULL = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES}
# torch.compile times kernels, and whether two are faster as one. Equal engines can keep different ones, which
# give other bits: engines that are compared let it time none.
UNTIMED = {"combo_kernels": False, "benchmark_combo_kernel": False, "deterministic": True}
COMPILED = {
    "mode": 3,
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_capture_sizes": SIZES,
    "inductor_compile_config": UNTIMED,
}
PIECEWISE = {"mode": 3, "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": SIZES}
# Graphs of exactly the sizes that the rounds need.
EXACT = {**FULL, "cudagraph_capture_sizes": sorted({*LIVE})}
SPIES = (attention, logits, routing)
KERNELS = "compiled_kernels"
PROBES: dict[Probe, dict[str, Any]] = {start: {}, control: {}, rows: {"live": LIVE}, spoilt_blocks: {}}


def _fp8_checkpoint() -> dict[str, Any]:
    """What the configuration of an fp8 checkpoint says: a scale a tensor for weights, and for activations."""
    scale = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    kept = ["lm_head", "re:.*gate$", "re:.*experts.*", "re:.*kv_b_proj"]
    group = {
        "targets": ["Linear"],
        "weights": {**scale, "dynamic": False},
        "input_activations": {**scale, "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": kept,
        "config_groups": {"group_0": group},
    }


def engine(backend: str = "TRITON_MLA", spies: Sequence[Any] = (*SPIES, stages), **options: Any) -> Order:
    """An order for a DeepSeek-V2 shape that answers ``rows``."""
    options = {"attention_backend": backend, "moe_backend": "triton", **options}
    if "enforce_eager" not in options:
        options.setdefault("compilation_config", FULL)
    order = Order("deepseek_v2", PROBES, options, spies=spies)
    return replace(order, probes={**PROBES, compiled_kernels: {}}) if order.compiles else order


FP8, COMPILED_FP8 = "TRITON_MLA, full graphs, fp8", "TRITON_MLA, full graphs, compiled, fp8"
# What torch.compile looks into must not be spied on: only attention, routing and logits are.
PATCHED = {
    "TRITON_MLA, full graphs": engine(),
    "TRITON_MLA, full graphs, compiled": engine(spies=SPIES, compilation_config=COMPILED),
    # What the command of vLLM #57017 starts: online fp8, whose experts share one scale a batch.
    FP8: engine(quantization="fp8"),
    COMPILED_FP8: engine(spies=SPIES, compilation_config=COMPILED, quantization="fp8"),
}
PIECEWISE_FP8, INVARIANT_FP8 = "TRITON_MLA, piecewise graphs, fp8", f"{FP8}, batch invariant"
_INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
# Their experts quantize a whole batch with one scale, so that a live row's bits depend on the others. In the
# batch-invariant mode of vLLM 0.22.1 as well; its other kernels give a row the same bits in any batch.
SHARED_SCALE = {
    FP8: PATCHED[FP8],
    COMPILED_FP8: PATCHED[COMPILED_FP8],
    PIECEWISE_FP8: engine(
        spies=SPIES, compilation_config={**PIECEWISE, "inductor_compile_config": UNTIMED}, quantization="fp8"
    ),
    INVARIANT_FP8: replace(engine(quantization="fp8"), env=_INVARIANT),
}
UNPATCHED = {
    "TRITON_MLA, piecewise graphs, compiled": engine(spies=SPIES, compilation_config=PIECEWISE),
    "TRITON_MLA, eager": engine(enforce_eager=True),
    "FLASHMLA, full graphs": engine("FLASHMLA"),
    "FLASH_ATTN_MLA, full graphs": engine("FLASH_ATTN_MLA"),
    "TRITON_MLA, eager, fp8": replace(
        engine(quantization="fp8", enforce_eager=True), probes={**PROBES, quantizers: {}}
    ),
    "TRITON_MLA, full graphs, fp8 checkpoint": replace(
        engine(), config={"quantization_config": _fp8_checkpoint()}
    ),
}
# The same engines with no padding row in any round.
UNPADDED = {
    name: replace(engine(quantization="fp8", compilation_config=EXACT), env=SHARED_SCALE[name].env)
    for name in (FP8, INVARIANT_FP8)
}
QUANTIZER = "TRITON_MLA, eager, fp8"


def verdict(rounds: Sequence[Mapping[str, Any]]) -> str:
    """``clean``, ``pad_only`` or ``leaked``, of the rounds that ``probes.rows`` returned.

    Raises:
        MissingError: a round in which no step was seen.

    >>> one = {"stages": {"layers.0.attention": [0, 5]}, "nan": 0}
    >>> verdict([one]), verdict([{**one, "nan": 1}])
    ('pad_only', 'leaked')
    """
    if not all(one["stages"] for one in rounds):
        raise MissingError("a round in which no step was seen")
    counts = [count for one in rounds for count in one["stages"].values()]
    if any(one["nan"] for one in rounds) or any(live for live, _ in counts):
        return "leaked"
    return "pad_only" if any(padding for _, padding in counts) else "clean"


def by_stage(rounds: Sequence[Mapping[str, Any]], which: int) -> dict[str, dict[str, str]]:
    """Rows with a NaN by round and stage, in order of execution; stages without any are left out.

    Args:
        rounds: of ``probes.rows``.
        which: 0 for live rows, 1 for padding rows.

    >>> stages = {"layers.0.attention": [0, 5], "layers.1.attention": [0, 5], "layers.1.mlp": [0, 0]}
    >>> by_stage([{"live": 3, "size": 8, "stages": stages}], 1)
    {'3 of 8': {'attention': '5 in 2 of 2 layers'}}
    """
    found: dict[str, dict[str, str]] = {}
    for one in rounds:
        layers: dict[str, list[int]] = {}
        for stage, counts in one["stages"].items():
            _, _, *rest = stage.split(".")
            layers.setdefault(".".join(rest) or "layer", []).append(counts[which])
        label = f"{one['live']} of {one['size']}"
        label += " again" if label in found else ""
        found[label] = {
            stage: f"{max(counts)} in {sum(map(bool, counts))} of {len(counts)} layers"
            for stage, counts in layers.items()
            if any(counts)
        }
    return {label: stages for label, stages in found.items() if stages}


def _rounds(results: Results, name: str) -> list[dict[str, Any]]:
    return results.of(name, "rows")


def _control(results: Results, name: str) -> str:
    """That the checksums notice a change at all.

    Raises:
        MissingError: they do not, so that equal checksums say nothing.
    """
    other, of = results.of(name, "control")
    if not other:
        raise MissingError(f"{name}: the logits do not notice another first token of the prompt")
    return f"another first token changes {other} of {of} steps"


def _comparable(results: Results, name: str, noise: int) -> None:
    """That other bits of the plugin's engine are the plugin's.

    Args:
        noise: rows of logits that differ between the two engines without it.

    Raises:
        MissingError: they need not be: two engines without it differ too, or it runs kernels that neither of
            them has compiled.
    """
    if noise:
        raise MissingError(
            f"{name}: {noise} rows of live logits differ between engines without the plugin too"
        )
    if (PATCHED | SHARED_SCALE)[name].compiles:
        off, on, again = (set(results.of(f"{name}, {which}", KERNELS)) for which in STATES)
        if not on or on - off - again:
            own = sorted(on - off - again)
            raise MissingError(
                f"{name}: other bits, and compiled kernels of its own: {own[:3] or 'none seen'}"
            )


def _off(name: str) -> str:
    return f"{name}, off" if name in PATCHED | SHARED_SCALE else name


def nan_rows(name: str, results: Results) -> Reading:
    """What one engine without the plugin did."""
    rounds = _rounds(results, _off(name))
    padding = by_stage(rounds, 1)
    return reading(
        verdict(rounds),
        padding=padding,
        # A list keeps its order in a file, unlike the stages above.
        in_order_of_execution=[*next(iter(padding.values()), {})],
        live=by_stage(rounds, 0),
        sizes=[f"{one['live']} of {one['size']}" for one in rounds],
        nan_tokens=sum(one["nan"] for one in rounds),
        routers_with_an_expert_twice=[one["twice"] for one in rounds],
        kv_blocks_with_nan=results.of(_off(name), "spoilt_blocks"),
        start=results.of(_off(name), "start"),
    )


def different(one: Sequence[Mapping[str, Any]], *others: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How much of an engine's live rows none of the others gave, which served the same rounds.

    Returns:
        ``logits``: rows of logits with a checksum of its own; ``tokens``: requests with tokens of its own;
        ``of``: rows of logits compared.

    >>> a, b = ([{"sums": [[1, 2], [3, last]], "tokens": [[5], [last]]}] for last in (4, 0))
    >>> different(a, b), different(a, b, a)
    ({'logits': 1, 'tokens': 1, 'of': 4}, {'logits': 0, 'tokens': 0, 'of': 4})
    """
    rounds = [*zip(one, *others, strict=True)]
    steps = [step for each in rounds for step in zip(*(x["sums"] for x in each), strict=False)]
    rows = [row for step in steps for row in zip(*step, strict=False)]
    tokens = [request for each in rounds for request in zip(*(x["tokens"] for x in each), strict=True)]
    logits, other = (sum(mine not in theirs for mine, *theirs in of) for of in (rows, tokens))
    return {"logits": logits, "tokens": other, "of": len(rows)}


def _whole(rounds: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rounds that fill a graph. Attention does not tell: under piecewise graphs it sees no padding."""
    return [one for one in rounds if one["live"] in SIZES]


def by_round(one: Sequence[Mapping[str, Any]], two: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """What :func:`different` says of each round; the later of two equal ones counts."""
    return {f"{a['live']} of {a['size']}": different([a], [b]) for a, b in zip(one, two, strict=True)}


def live_logits(name: str, results: Results) -> Reading:
    """Whether the plugin changes a bit of a live row's logits.

    It changes what padding rows hold. If only rounds that have some differ, padding reaches live rows.
    """
    off, on, again = (_rounds(results, f"{name}, {state}") for state in STATES)
    noise, changed = different(off, again), different(on, off, again)
    without = different(*map(_whole, (on, off, again)))
    said = "same bits"
    if changed["logits"]:
        said = "other bits" if without["logits"] else "padding reaches live rows"
    if changed["logits"] and noise["logits"]:
        said = "differ without it too"
    if said == "other bits":
        _comparable(results, name, noise["logits"])
    control = _control(results, f"{name}, on")
    return reading(
        said,
        off_against_on=changed,
        off_against_off=noise,
        without_padding=without,
        by_round=by_round(off, on),
        largest_of_live_and_padding_rows={
            state: {f"{one['live']} of {one['size']}": one["largest"] for one in rounds}
            for state, rounds in (("off", off), ("on", on))
        },
        control=control,
    )


def _first_three(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"sums": [row[:3] for row in one["sums"]], "tokens": one["tokens"][:3]}


def live_padding(name: str, results: Results) -> Reading:
    """Whether five live requests more change a bit of the first three.

    If they do and it happens between the two rounds of three as well, then what the padding rows held
    reached the live ones: only that differs between these.
    """
    three_live, eight_live, again, _ = _rounds(results, name)
    changed = different([three_live], [_first_three(eight_live)])
    noise = different([three_live], [again])
    said = "same bits" if not changed["logits"] else "other bits"
    if noise["logits"]:
        said = "other bits of three again"
    control = _control(results, name)
    return reading(said, with_8_live=changed, with_3_live_again=noise, control=control)


def state(name: str, results: Results, which: str) -> Reading:
    """Which rows of one of the three engines hold NaN."""
    rounds = _rounds(results, f"{name}, {which}")
    nan = sum(one["nan"] for one in rounds)
    return reading(verdict(rounds), nan_tokens=nan, padding=by_stage(rounds, 1))


def wrong(name: str, results: Results) -> str | None:
    """What the plugin changes of live rows, in one line."""
    off, on, again = (_rounds(results, f"{name}, {which}") for which in STATES)
    # Where padding reached live rows without the plugin, only rounds without any can keep their bits.
    leaks = verdict(off) == "leaked" or name in SHARED_SCALE
    one, two, three = (_whole(rounds) if leaks else rounds for rounds in (off, on, again))
    if not one:
        return "no round without padding to compare"
    # A bit that an engine without the plugin gives as well is not the plugin's.
    if changed := different(two, one, three)["logits"]:
        _comparable(results, name, different(one, three)["logits"])
        return f"live logits: {changed} differ"
    return None


def other_padding(name: str, results: Results, which: str) -> Reading:
    """Whether another token in the padding rows changes a bit of a live row's logits."""
    engine = f"{name}, {which}"
    plain, spike = (results.of(engine, "planted")[token] for token in ("plain", "spike"))
    changed = different(plain, spike)
    control = _control(results, engine)
    said = "padding reaches live rows" if changed["logits"] else "same bits"
    # Spies of stages see that the other token came as far as the experts.
    largest = {f"{one['live']} of {one['size']}": one["largest"] for one in spike}
    return reading(
        said,
        changed=changed,
        by_round=by_round(plain, spike),
        control=control,
        largest_of_live_and_padding_rows=largest,
    )


def without_padding(name: str, results: Results, which: str) -> Reading:
    """Whether live logits have the bits of an engine whose graphs leave no row to padding."""
    alone, padded = _rounds(results, f"{name}, {WITHOUT}"), _rounds(results, f"{name}, {which}")
    if any(one["live"] != one["size"] for one in alone):
        raise MissingError(f"{name}, {WITHOUT}: a round had padding rows")
    changed = different(padded, alone)
    control = _control(results, f"{name}, {which}")
    said = "other bits" if changed["logits"] else "same bits"
    return reading(said, changed=changed, by_round=by_round(padded, alone), control=control)


def hurt_by_nan(results: Results) -> Reading:
    """Whether a NaN row changes what vLLM's fp8 quantizers make of the sound rows beside it."""
    found = results.of(QUANTIZER, "quantizers")
    hurt = [name for name, (_, _, other) in found.items() if other]
    return reading(
        "leaked" if hurt else "clean", leaked=hurt, scale_alone_scale_with_nan_values_changed=found
    )


def _cases() -> Iterator[Case]:
    for name in (*PATCHED, *UNPATCHED):
        yield cell(NAN_ROWS, name, "rows", partial(nan_rows, name))
        yield cell(LIVE_PADDING, name, "live logits", partial(live_padding, _off(name)))
    yield cell(QUANTIZERS, "3 sound rows, 5 rows of NaN", "rows", hurt_by_nan)
    for name in PATCHED:
        yield cell(LIVE_PADDING, f"{name}, plugin", "live logits", partial(live_padding, f"{name}, on"))
        yield cell(LIVE_LOGITS, name, "live logits", partial(live_logits, name))
        yield fix(name, "rows", partial(state, name), partial(wrong, name))
    yield cell(LIVE_PADDING, INVARIANT_FP8, "live logits", partial(live_padding, f"{INVARIANT_FP8}, off"))
    for name in SHARED_SCALE:
        told = partial(other_padding, name)
        yield fix(f"{name}, {PLANTED}", "live logits", told, partial(wrong, name))
    for name in UNPADDED:
        told = partial(without_padding, name)
        # Kernels of another batch size may round otherwise, but for the batch-invariant ones.
        expect = FIXED if name == INVARIANT_FP8 else None
        yield fix(f"{name}, {WITHOUT}", "live logits", told, partial(wrong, name), expect=expect)


def _orders() -> Iterator[tuple[str, Order]]:
    for name, order in (PATCHED | SHARED_SCALE).items():
        if name in SHARED_SCALE:
            order = replace(order, probes={**order.probes, planted: {}})
        for key, one in three(name, order).items():
            # torch.compile times nothing in these, so that none needs the kernels of another.
            yield key, replace(one, kernels=None) if name == PIECEWISE_FP8 else one
    for name, order in UNPADDED.items():
        yield f"{name}, {WITHOUT}", order


ORDERS = dict(_orders()) | UNPATCHED
BENCH = Bench("mla", ORDERS, [*_cases()])
