"""What the plugin and the watch cost a step of a real engine: one engine, in states that take turns.

    python -m tools.engine_cost --without eager --limit 240 --out RUNS
    python -m tools.engine_cost --by-layers --out RUNS

Needs a GPU and an importable vLLM, as ``staleproof engine`` does, and records a run of its own.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.engine_cost_probes import READY, TOKENS, State, states

from staleproof import device as devices
from staleproof.cases import store
from staleproof.cases.case import Case, MissingError, Reading, Scene, reading
from staleproof.cases.run import Table
from staleproof.engine import command
from staleproof.engine import orders as running
from staleproof.engine.bench import INCIDENT, Results, cell
from staleproof.engine.orders import EngineResult
from staleproof.engine.probes import start
from staleproof.engine.session import Order
from staleproof.report import terminal
from staleproof.vllm.watch import Settings

COST, NOISE, WATCH = "cost of a step", "noise of a step", "cost of the watch"
BY_LAYERS = "cost of a step by layers"
# The bars: the plugin; the watch of all stages; the watch of one layer in four.
BAR, WATCH_BAR = 0.01, {"watch": 0.03, "watch, one layer in four": 0.01}
LIVE, SIZES = (3, 50, 256), [8, 64, 256]
# Steps timed in a turn.
STEPS = 16
# Seconds until all engines are ready to be timed.
READY_S = 100.0
# Time limit of each engine.
TIMEOUT_S = 310.0
# How often each state captures its graphs. A graph's place in memory changes the time of a step by up to a
# per cent (in three captures on an H200 the plugin cost 0.9, 0.1 and -0.5 % at 3 of 8). So rounds go through
# the captures in turn, and no state always has a lucky place.
CAPTURES = 5

OFF, AGAIN, ON = "off", "off again", "on"
STATES = {OFF: State(), ON: State(patches=True), "watch": State(patches=True, watch=Settings())}
MODES: dict[str, dict[str, Any]] = {
    "full graphs": {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": SIZES,
        }
    },
    "piecewise graphs": {
        "compilation_config": {"mode": 3, "cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": SIZES}
    },
    "eager": {"enforce_eager": True},
}
# States beside those, and seconds for each number of live requests: a longer step needs longer for as many
# rounds.
FURTHER: dict[str, tuple[dict[str, State], tuple[float, float, float]]] = {
    "full graphs": (
        {
            # The same again with other graphs: what the method can tell apart.
            AGAIN: State(),
            "watch, one layer in four": State(patches=True, watch=Settings(layers=4)),
            "watch, one step in four": State(patches=True, watch=Settings(steps=4), every=4),
            # vLLM's own: it counts in the logits only, names no layer and sees no padding.
            "VLLM_COMPUTE_NANS_IN_LOGITS": State(patches=True, probe="vllm_count", every=8),
            "isnan(x).any() and its sync, last hidden states": State(
                patches=True, probe="sync_hidden", every=8
            ),
        },
        (28.0, 26.0, 32.0),
    ),
    "piecewise graphs": ({}, (14.0, 14.0, 20.0)),
    "eager": (
        {"isnan(x).any() and its sync, every stage": State(patches=True, probe="sync_stages", every=8)},
        (9.0, 10.0, 15.0),
    ),
}

# Layers, and the seconds that an engine of so many is timed for at each number of live requests.
LAYERS = {4: 10.0, 16: 12.0, 61: 30.0}
BATCHES = {3: 8, 50: 64, 500: 512}
# What the plugin launches and calls does not depend on how wide a layer is.
NARROW = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}


def _order(
    name: str,
    asked: Mapping[str, State],
    live: Mapping[int, float],
    captures: int,
    port: int,
    options: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
) -> Order:
    """An engine whose states are timed; the watch's hooks are there to be taken out."""
    timed = {"name": name, "asked": asked, "live": live, "steps": STEPS, "captures": captures}
    return Order(
        "deepseek_v2",
        {start: {}, states: timed},
        {"attention_backend": "TRITON_MLA", "moe_backend": "triton", **options},
        config or {},
        patches="all",
        env={"STALEPROOF_WATCH": "1", "STALEPROOF_WATCH_PORT": str(port)},
    )


def orders_by_layers() -> dict[str, Order]:
    """One engine for each number of layers, under full graphs, with and without the plugin."""
    sizes = {**MODES["full graphs"]["compilation_config"], "cudagraph_capture_sizes": [*BATCHES.values()]}
    # A request holds at most so many tokens of 576 bf16 numbers a layer.
    each = max(BATCHES) * (TOKENS + 128) * 576 * 2
    pair = {OFF: State(), ON: State(patches=True)}
    return {
        f"{layers} layers": _order(
            *(f"{layers} layers", pair, dict.fromkeys(BATCHES, seconds), 2, 9480 + layers),
            {
                "compilation_config": sizes,
                "max_num_seqs": max(BATCHES.values()),
                "max_num_batched_tokens": 64 * max(BATCHES),
                "kv_cache_memory_bytes": layers * each,
            },
            {**NARROW, "num_hidden_layers": layers},
        )
        for layers, seconds in LAYERS.items()
    }


def orders() -> dict[str, Order]:
    """One engine a mode."""
    return {
        mode: _order(
            *(mode, {**STATES, **FURTHER[mode][0]}, dict(zip(LIVE, FURTHER[mode][1], strict=True))),
            *(0 if mode == "eager" else CAPTURES, 9470 + number, options),
        )
        for number, (mode, options) in enumerate(MODES.items())
    }


def take_turns(
    players: Mapping[str, Order], timeout_s: float, seconds: float | None = None
) -> Iterator[tuple[str, EngineResult]]:
    """Start all engines at once; they are timed one after the other, never two together.

    Args:
        players: name -> engine.
        timeout_s: for each.
        seconds: shared out among all in the proportion of their own seconds, so that engines that were left
            out leave their time to the others; less if a limit ends them earlier; ``None`` for their own.
    """
    asked_for = sum(sum(order.probes[states]["live"].values()) for order in players.values())
    more = (
        1.0 if seconds is None else max(0.2 * seconds, min(seconds, running.left_s() - READY_S)) / asked_for
    )
    with tempfile.TemporaryDirectory(prefix="staleproof-turns-") as folder:

        def given(order: Order) -> Order:
            asked = order.probes[states]
            live = {count: more * each for count, each in asked["live"].items()}
            asked = {**asked, "folder": folder, "players": list(players), "live": live}
            return replace(order, probes={**order.probes, states: asked})

        told = {name: given(order) for name, order in players.items()}
        for name, one in running.run(told, timeout_s, at_once=len(told)):
            # The others need not wait for one that has ended.
            Path(folder, f"{READY} {name}").touch()
            yield name, one


def narrowed(order: Order, texts: Sequence[str]) -> Order:
    """An order without the states that have one of these texts in their name; the pair of all ratios stays.

    >>> left = narrowed(orders()["full graphs"], ["isnan", "VLLM", "one step"])
    >>> [*left.probes[states]["asked"]]
    ['off', 'on', 'watch', 'off again', 'watch, one layer in four']
    """
    asked = order.probes[states]["asked"]
    kept = {name: s for name, s in asked.items() if name in (OFF, ON) or not any(map(name.count, texts))}
    return replace(order, probes={**order.probes, states: {**order.probes[states], "asked": kept}})


def middle(values: Iterable[float]) -> tuple[float, float]:
    """The ends of the middle 95 % of some values.

    >>> middle(range(1000))
    (25, 974)
    """
    ordered = sorted(values)
    cut = int(0.025 * len(ordered))
    return ordered[cut], ordered[-cut - 1]


def slowdown(off: Sequence[float], on: Sequence[float], resamples: int = 4000) -> tuple[float, float, float]:
    """How much slower the second of a pair is: median of the rounds' ratios, and its 95 % interval.

    The interval is the percentile bootstrap over rounds, with a fixed seed.

    Args:
        off: seconds a step of each round, without the plugin.
        on: the same rounds with it.

    Returns:
        Median, lower and upper end, each as a share: 0.01 is one per cent.

    >>> [round(x, 3) for x in slowdown([1.0] * 9, [1.02, 1.01] * 4 + [1.01])]
    [0.01, 0.01, 0.02]
    """
    ratios = [b / a - 1 for a, b in zip(off, on, strict=True)]
    draw = random.Random(0)
    medians = (statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    return statistics.median(ratios), *middle(medians)


def line(points: Mapping[int, float]) -> tuple[float, float]:
    """The straight line of least squares: its value at 0, and its slope.

    >>> line({4: 9.0, 16: 33.0, 61: 123.0})
    (1.0, 2.0)
    """
    slope, at_0 = statistics.linear_regression(list(points), list(points.values()))
    return at_0, slope


def judge_layers(live: int) -> Any:
    """The judge of the plugin's cost by layers: is it under the bar of a step at the most layers?"""

    def judged(results: Results) -> Reading:
        pairs: dict[int, list[tuple[float, float]]] = {}
        for layers in LAYERS:
            times = results.of(f"{layers} layers", f"{live} live")
            pairs[layers] = [(a, b) for a, b in zip(times[OFF], times[ON], strict=True) if a and b]
            if not pairs[layers]:
                raise MissingError(f"{layers} layers: no round timed both states")

        def added(of: Mapping[int, Sequence[tuple[float, float]]]) -> dict[int, float]:
            return {layers: statistics.median(1e6 * (b - a) for a, b in each) for layers, each in of.items()}

        draw, most = random.Random(0), max(LAYERS)
        lines = [
            line(added({layers: draw.choices(each, k=len(each)) for layers, each in pairs.items()}))
            for _ in range(2000)
        ]

        def spread(values: Sequence[float]) -> list[float]:
            return [round(end, 3) for end in middle(values)]

        at_0, slope = line(added(pairs))
        step = {layers: statistics.median(1e6 * a for a, _ in each) for layers, each in pairs.items()}
        at_most = [at_0 + most * slope for at_0, slope in lines]
        low, high = (us / step[most] for us in spread(at_most))
        where = "under" if high < BAR else "over" if low > BAR else "around"
        return reading(
            f"{where} 1 %",
            us_a_layer=round(slope, 3),
            us_a_layer_interval=spread([slope for _, slope in lines]),
            us_at_no_layer=round(at_0, 3),
            us_at_no_layer_interval=spread([at_0 for at_0, _ in lines]),
            us_added=[round(us, 2) for us in added(pairs).values()],
            us_at_61_layers=round(at_0 + most * slope, 2),
            us_at_61_layers_interval=spread(at_most),
            percent_at_61_layers=round(100 * (at_0 + most * slope) / step[most], 3),
            step_us_off=[round(us, 1) for us in step.values()],
            rounds=[len(each) for each in pairs.values()],
        )

    return judged


def _table(cases: Iterable[Case], run: Callable[[], Iterator[tuple[str, EngineResult]]]) -> Table:
    """These cases, about the engines that ``run`` starts."""
    scene = Scene("cost", lambda device: Results(run()), limit_s=3 * TIMEOUT_S)
    return Table(INCIDENT, [replace(case, scene=scene) for case in cases])


def table_by_layers() -> Table:
    """The cases of the plugin's cost by layers, one for each size of a graph."""
    words = ", ".join(map(str, LAYERS))
    cases = (
        cell(BY_LAYERS, f"full graphs, {live} of {size}, {words} layers", "cost", judge_layers(live))
        for live, size in BATCHES.items()
    )
    return _table(cases, lambda: take_turns(orders_by_layers(), TIMEOUT_S))


def judge(mode: str, live: int, off: str, on: str, bar: float = BAR) -> Any:
    """The judge of one pair of states: does the interval of the slowdown lie under the bar?"""

    def judged(results: Results) -> Reading:
        times = results.of(mode, f"{live} live")
        if not {off, on} <= {*times}:
            left_out = results.of(mode, "states")["left_out"]
            raise MissingError(f"{mode}: {left_out or 'it was not asked to time both'}")
        pairs = [(a, b) for a, b in zip(times[off], times[on], strict=True) if a and b]
        if len(pairs) < 2:
            raise MissingError(f"{mode}: {len(pairs)} rounds: an interval takes two")
        a, b = zip(*pairs, strict=True)
        median, low, high = slowdown(a, b)
        where = "under" if high < bar else "over" if low > bar else "around"
        return reading(
            f"{where} {bar:.0%}".replace("%", " %"),
            slowdown_percent=round(median * 100, 3),
            interval_percent=[round(low * 100, 3), round(high * 100, 3)],
            step_ms_off=round(statistics.median(a) * 1e3, 4),
            step_ms_on=round(statistics.median(b) * 1e3, 4),
            tokens_per_s_off=round(live / statistics.median(a)),
            tokens_per_s_on=round(live / statistics.median(b)),
            rounds=len(a),
        )

    return judged


def _cases(quantization: str | None) -> Iterator[Case]:
    named = f", {quantization}" if quantization else ""
    for live, size in zip(LIVE, SIZES, strict=True):
        for mode in MODES:
            rows = f"{live} live" if mode == "eager" else f"{live} of {size}"
            shape = f"{mode}{named}, {rows}"
            yield cell(COST, shape, "cost", judge(mode, live, OFF, ON))
            for state in [*STATES, *FURTHER[mode][0]]:
                if state == AGAIN:
                    yield cell(NOISE, shape, "cost", judge(mode, live, OFF, AGAIN))
                elif state not in (OFF, ON):
                    bar = WATCH_BAR.get(state, BAR)
                    yield cell(WATCH, f"{state}, {shape}", "cost", judge(mode, live, ON, state, bar))


def table(without: Sequence[str] = (), quantization: str | None = None) -> Table:
    """The cases; engines and states with one of these texts in their name are not timed.

    Args:
        without: those texts.
        quantization: of the engines, as vLLM names it; ``None`` for bf16.
    """
    asked = {
        name: narrowed(replace(order, options={**order.options, "quantization": quantization}), without)
        for name, order in orders().items()
        if not any(map(name.count, without))
    }
    seconds = sum(sum(each) for _, each in FURTHER.values())
    return _table(_cases(quantization), lambda: take_turns(asked, TIMEOUT_S, seconds))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=float, help="seconds after which all engines are ended")
    parser.add_argument("--without", action="append", default=[], help="engines and states not to time")
    parser.add_argument("--quantization", help="of the engines, e.g. fp8; bf16 by default")
    parser.add_argument("--by-layers", action="store_true", help="4 to 61 layers and graphs of 8 to 512")
    parser.add_argument("--out", type=Path, required=True, help="record the run in OUT/<machine>-engine-cost")
    given = parser.parse_args(arguments)
    kind = "cost-by-layers" if given.by_layers else "cost"
    folder = given.out / f"{command.run_name(devices.machine())}-{kind}"
    store.open_for_writing(folder).rmdir()
    found = command.ask(
        table_by_layers() if given.by_layers else table(given.without, given.quantization),
        devices.select(),
        print,
        lambda one: print(terminal.finding_text(one)),
        folder.with_suffix(".jsonl"),
        given.limit,
    )
    store.write(folder, found, [])


if __name__ == "__main__":
    # Under its own name: an engine's process imports what it is asked from there.
    from tools.engine_cost import main

    main()
