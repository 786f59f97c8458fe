"""Incident 1 in a real engine: NaN rows of MLA decode, layer by layer, and what a live token notices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from staleproof.cases.case import Case, MissingError, Reading, reading
from staleproof.cases.words import FIXED
from staleproof.engine.bench import STATES, Bench, Results, cell, fix, three
from staleproof.engine.orders import Order

LIVE = (3, 8, 3, 50)
NAN_ROWS, LIVE_LOGITS, LIVE_PADDING = "NaN rows", "live logits, off / on", "live logits, 3 / 8 live"
QUANTIZERS = "dynamic fp8 quantizers"
FULL = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 64]}
COMPILED = {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [8, 64]}
PIECEWISE = {"mode": 3, "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [8, 64]}
SPIES = ("attention", "logits", "routing")
GRAPHS = "compiled_graphs"
PROBES: dict[str, dict[str, Any]] = {"start": {}, "control": {}, "rows": {"live": LIVE}, "spoilt_blocks": {}}


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


def engine(backend: str = "TRITON_MLA", spies: Sequence[str] = (*SPIES, "stages"), **options: Any) -> Order:
    """An order for a DeepSeek-V2 shape that answers ``rows``."""
    options = {"attention_backend": backend, "moe_backend": "triton", **options}
    if "enforce_eager" not in options:
        options.setdefault("compilation_config", FULL)
    order = Order("deepseek_v2", PROBES, options, spies=spies)
    return replace(order, probes={**PROBES, GRAPHS: {}}) if order.compiles else order


# What torch.compile looks into must not be spied on: only attention, routing and logits are.
FIXED_ONES = {
    "TRITON_MLA, full graphs": engine(),
    "TRITON_MLA, full graphs, compiled": engine(spies=SPIES, compilation_config=COMPILED),
    # What the command of vLLM #57017 starts: online fp8, whose experts share one scale a batch.
    "TRITON_MLA, full graphs, fp8": engine(quantization="fp8"),
    "TRITON_MLA, full graphs, compiled, fp8": engine(
        spies=SPIES, compilation_config=COMPILED, quantization="fp8"
    ),
}
OTHERS = {
    "TRITON_MLA, piecewise graphs, compiled": engine(spies=SPIES, compilation_config=PIECEWISE),
    "TRITON_MLA, eager": engine(enforce_eager=True),
    "FLASHMLA, full graphs": engine("FLASHMLA"),
    "FLASH_ATTN_MLA, full graphs": engine("FLASH_ATTN_MLA"),
    "TRITON_MLA, eager, fp8": replace(
        engine(quantization="fp8", enforce_eager=True), probes={**PROBES, "quantizers": {}}
    ),
    "TRITON_MLA, full graphs, fp8 checkpoint": replace(
        engine(), config={"quantization_config": _fp8_checkpoint()}
    ),
}
QUANTIZER = "TRITON_MLA, eager, fp8"
# Their experts quantize a whole batch with one scale, so that a live row's bits depend on the others.
SHARED_SCALE = ("TRITON_MLA, full graphs, fp8", "TRITON_MLA, full graphs, compiled, fp8")


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


def _same_kernels(results: Results, name: str) -> int:
    """How many graphs torch.compile has compiled for off / on / off: the first engine all of them.

    Raises:
        MissingError: the plugin's engine, or the last one, runs other kernels than the first. Then other bits
            say nothing: two compilations of one graph can give them.
    """
    if not FIXED_ONES[name].compiles:
        return 0
    first, *others = (set(results.of(f"{name}, {which}", GRAPHS)) for which in STATES)
    if not first:
        raise MissingError(f"{name}: torch.compile kept no graph: equal engines may run other kernels")
    if any(graphs != first for graphs in others):
        raise MissingError(f"{name}: graphs were compiled anew: the engines may run other kernels")
    return len(first)


def _off(name: str) -> str:
    return f"{name}, off" if name in FIXED_ONES else name


def nan_rows(name: str) -> Any:
    """The judge of one engine without the plugin."""

    def judge(results: Results) -> Reading:
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

    return judge


def different(one: Sequence[Mapping[str, Any]], two: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How much of the live rows differs between two engines that served the same rounds.

    Returns:
        ``logits``: rows of logits with another checksum; ``tokens``: requests with other tokens; ``of``:
        rows of logits compared.

    >>> a = [{"sums": [[1, 2], [3, 4]], "tokens": [[5], [6]]}]
    >>> different(a, [{"sums": [[1, 2], [3, 0]], "tokens": [[5], [7]]}])
    {'logits': 1, 'tokens': 1, 'of': 4}
    """
    rows = [
        (a, b)
        for x, y in zip(one, two, strict=True)
        for s, t in zip(x["sums"], y["sums"], strict=False)
        for a, b in zip(s, t, strict=False)
    ]
    tokens = [
        (a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x["tokens"], y["tokens"], strict=True)
    ]
    return {"logits": sum(a != b for a, b in rows), "tokens": sum(a != b for a, b in tokens), "of": len(rows)}


def padded(rounds: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Which rounds had padding rows."""
    return [one["live"] < one["size"] for one in rounds]


def by_round(one: Sequence[Mapping[str, Any]], two: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """What :func:`different` says of each round; the later of two equal ones counts."""
    return {f"{a['live']} of {a['size']}": different([a], [b]) for a, b in zip(one, two, strict=True)}


def live_logits(name: str) -> Any:
    """The judge of whether the plugin changes a bit of a live row's logits.

    It changes what padding rows hold. If only rounds that have some differ, padding reaches live rows.
    """

    def judge(results: Results) -> Reading:
        off, on, again = (_rounds(results, f"{name}, {state}") for state in ("off", "on", "off again"))
        noise, changed = different(off, again), different(off, on)
        whole = [number for number, pads in enumerate(padded(off)) if not pads]
        without = different([off[number] for number in whole], [on[number] for number in whole])
        said = "other bits" if without["logits"] else "padding reaches live rows"
        if not changed["logits"]:
            said = "same bits"
        if noise["logits"]:
            said = "differ without it too"
        control = _control(results, f"{name}, on")
        return reading(
            said,
            graphs_compiled_once=_same_kernels(results, name),
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

    return judge


def _first_three(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"sums": [row[:3] for row in one["sums"]], "tokens": one["tokens"][:3]}


def live_padding(name: str) -> Any:
    """The judge of whether five live requests more change a bit of the first three.

    If they do and it happens between the two rounds of three as well, then what the padding rows held
    reached the live ones: only that differs between these.
    """

    def judge(results: Results) -> Reading:
        three_live, eight_live, again, _ = _rounds(results, name)
        changed = different([three_live], [_first_three(eight_live)])
        noise = different([three_live], [again])
        said = "same bits" if not changed["logits"] else "other bits"
        if noise["logits"]:
            said = "other bits of three again"
        control = _control(results, name)
        return reading(said, with_8_live=changed, with_3_live_again=noise, control=control)

    return judge


def state(name: str) -> Any:
    """The reading of one of three engines: which rows hold NaN."""

    def read(results: Results, which: str) -> Reading:
        rounds = _rounds(results, f"{name}, {which}")
        nan = sum(one["nan"] for one in rounds)
        return reading(verdict(rounds), nan_tokens=nan, padding=by_stage(rounds, 1))

    return read


def wrong(name: str) -> Any:
    """What the plugin changes of live rows, or leaves to padding, in one line."""

    def compare(results: Results) -> str | None:
        off, on, again = (_rounds(results, f"{name}, {which}") for which in STATES)
        # Where padding reached live rows without the plugin, only rounds without any can keep their bits.
        leaks = verdict(off) == "leaked" or name in SHARED_SCALE
        whole = [number for number, pads in enumerate(padded(off)) if not (leaks and pads)]
        if not whole:
            return "no round without padding to compare"
        one, two, three = ([rounds[number] for number in whole] for rounds in (off, on, again))
        _same_kernels(results, name)
        changed, noise = different(one, two)["logits"], different(one, three)["logits"]
        if noise:
            raise MissingError(f"{name}: {noise} rows of live logits differ without the plugin")
        if changed:
            return f"live logits: {changed} differ"
        if name in SHARED_SCALE:
            # The rounds left out above: with the plugin, does padding still decide about live rows?
            first, among_eight, *_ = on
            moved = different([first], [_first_three(among_eight)])["logits"]
            if moved:
                return f"padding decides {moved} rows of live logits with the plugin, too"
        return None

    return compare


def quantizers(results: Results) -> Reading:
    """Whether a NaN row changes what vLLM's fp8 quantizers make of the sound rows beside it."""
    found = results.of(QUANTIZER, "quantizers")
    hurt = [name for name, (_, _, other) in found.items() if other]
    return reading(
        "leaked" if hurt else "clean", leaked=hurt, scale_alone_scale_with_nan_values_changed=found
    )


def _cases() -> Iterator[Case]:
    for name in (*FIXED_ONES, *OTHERS):
        yield cell(NAN_ROWS, name, "rows", nan_rows(name))
        yield cell(LIVE_PADDING, name, "live logits", live_padding(_off(name)))
    yield cell(QUANTIZERS, "3 sound rows, 5 rows of NaN", "rows", quantizers)
    for name in FIXED_ONES:
        yield cell(LIVE_PADDING, f"{name}, plugin", "live logits", live_padding(f"{name}, on"))
        yield cell(LIVE_LOGITS, name, "live logits", live_logits(name))
        # Whether a shared scale lets the plugin keep live bits is what is asked.
        expect = None if name in SHARED_SCALE else FIXED
        yield fix(name, "rows", state(name), wrong(name), expect=expect)


ORDERS = {key: order for name, one in FIXED_ONES.items() for key, order in three(name, one).items()} | OTHERS
BENCH = Bench("mla", "incident 1: NaN rows by layer and stage, live logits", ORDERS, [*_cases()])
