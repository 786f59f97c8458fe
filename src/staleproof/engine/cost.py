"""What the plugin costs a step of a real engine: engines with and without it take turns on one GPU."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from staleproof.engine import orders as running
from staleproof.engine.bench import Bench, Cell, Results
from staleproof.engine.orders import Order, Told
from staleproof.harness.answers import Answer, answer

COST, NOISE, WATCH = "cost of a step", "noise of a step", "cost of the watch"
BAR = 0.01
# What looks for NaN in a server with the plugin: its variables, and the bar for what it may cost there. The
# last is vLLM's own: it counts in the logits only, names no layer and sees no padding.
WATCHES: dict[str, tuple[dict[str, str], float]] = {
    "all stages": ({"STALEPROOF_WATCH": "1", "STALEPROOF_WATCH_PORT": "9470"}, 0.03),
    "one layer in four": (
        {"STALEPROOF_WATCH": "1", "STALEPROOF_WATCH_PORT": "9471", "STALEPROOF_WATCH_LAYERS": "4"},
        0.01,
    ),
    "vLLM's count in the logits": ({"VLLM_COMPUTE_NANS_IN_LOGITS": "1"}, 0.01),
}
LIVE, ROUNDS, STEPS = (3, 50, 256), 16, 40
# The file in the folder of turns that tells the others to give up.
FAILED = "failed"
SIZES = [8, 64, 256]
# Under each mode: an engine without the plugin, and one with it. Full graphs have a third one, without,
# so that the difference of two equal engines shows what the method can tell apart.
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


def schedule(players: int, live: Sequence[int], rounds: int) -> Iterator[tuple[int, str, int]]:
    """Whose turn it is: (player, ``begin`` or ``time``, live requests), in order, the same for all players.

    Each round goes through the players once, every second one backwards, so that a drift of the clock
    hits the two of a pair alike.

    >>> [player for player, what, _ in schedule(3, [8], 2) if what == "time"]
    [0, 1, 2, 2, 1, 0]
    """
    for count in live:
        yield from ((player, "begin", count) for player in range(players))
        for number in range(rounds):
            turns = range(players) if number % 2 == 0 else reversed(range(players))
            yield from ((player, "time", count) for player in turns)


def orders(live: Sequence[int] = LIVE, rounds: int = ROUNDS, steps: int = STEPS) -> dict[str, Order]:
    """The players, in their order; each knows its number."""
    states = [(mode, state) for mode in MODES for state in ("off", "on")]
    states.append(("full graphs", "off again"))
    states += [("full graphs", watch) for watch in WATCHES]
    turns = {"players": len(states), "live": list(live), "rounds": rounds, "steps": steps}
    return {
        f"{mode}, {state}": Order(
            "deepseek_v2",
            {"start": {}, "turns": {"player": player, **turns}},
            {"attention_backend": "TRITON_MLA", "moe_backend": "triton", **MODES[mode]},
            patches="none" if state.startswith("off") else "all",
            env=WATCHES[state][0] if state in WATCHES else {},
        )
        for player, (mode, state) in enumerate(states)
    }


def take_turns(players: Mapping[str, Order], timeout_s: float) -> Iterator[tuple[str, Told]]:
    """Run all players at once; they time their steps one after the other, never two together."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="staleproof-turns-") as folder:
        told = {
            name: replace(
                order, probes={**order.probes, "turns": {**order.probes["turns"], "folder": folder}}
            )
            for name, order in players.items()
        }
        for name, one in running.run(told, timeout_s, at_once=len(told)):
            if one.failed is not None:
                # The others wait for a turn that never ends.
                Path(folder, FAILED).touch()
            yield name, one


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
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(resamples))
    cut = int(0.025 * resamples)
    return statistics.median(ratios), medians[cut], medians[-cut - 1]


def judge(off: str, on: str, live: int, bar: float = BAR) -> Any:
    """The judge of one pair: does the interval of the slowdown lie under the bar?"""

    def judged(results: Results) -> Answer:
        a, b = (results.of(name, "turns")[live] for name in (off, on))
        median, low, high = slowdown(a, b)
        where = "under" if high < bar else "over" if low > bar else "around"
        return answer(
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


def _cells() -> dict[Cell, Any]:
    cells: dict[Cell, Any] = {}
    for live, size in zip(LIVE, SIZES, strict=True):
        for mode in MODES:
            cells[COST, f"{mode}, {live} of {size}"] = judge(f"{mode}, off", f"{mode}, on", live)
        pair = "full graphs, off", "full graphs, off again"
        cells[NOISE, f"full graphs, {live} of {size}"] = judge(*pair, live)
        for watch, (_, bar) in WATCHES.items():
            watched = judge("full graphs, on", f"full graphs, {watch}", live, bar)
            cells[WATCH, f"{watch}, {live} of {size}"] = watched
    return cells


BENCH = Bench(
    "cost",
    "step time and tokens/s with and without the plugin, in turns",
    orders(),
    _cells(),
    timeout_s=280.0,
    together=take_turns,
)
