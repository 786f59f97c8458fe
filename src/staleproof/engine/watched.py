"""The watch in a real engine: are its counts those of a reference, and does its port say the same?"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from staleproof.cases.case import Reading, reading
from staleproof.engine.bench import Bench, Results, cell
from staleproof.engine.mla import FULL, LIVE, PIECEWISE
from staleproof.engine.probes import rows, start
from staleproof.engine.session import Order
from staleproof.engine.spies import attention, logits
from staleproof.engine.watch_probes import watched

COUNTS = "counts of the watch"
PLAIN = "TRITON_MLA, full graphs"
LAYERS = 4


def _order(port: int, **changes: Any) -> Order:
    order = Order(
        "deepseek_v2",
        {start: {}, rows: {"live": LIVE}, watched: {"port": port}},
        {"attention_backend": "TRITON_MLA", "moe_backend": "triton", "compilation_config": FULL},
        spies=(attention, logits),
        env={"STALEPROOF_WATCH": "1", "STALEPROOF_WATCH_PORT": str(port)},
    )
    return replace(order, **changes)


# One step in this many is counted in one of the engines.
SAMPLED = 4
ORDERS = {
    PLAIN: _order(9480),
    f"{PLAIN}, plugin": _order(9481, patches="all"),
    f"{PLAIN}, one step in {SAMPLED}": _order(
        9483,
        env={
            "STALEPROOF_WATCH": "1",
            "STALEPROOF_WATCH_PORT": "9483",
            "STALEPROOF_WATCH_STEPS": str(SAMPLED),
        },
    ),
    "TRITON_MLA, piecewise graphs": _order(
        9482,
        options={"attention_backend": "TRITON_MLA", "moe_backend": "triton", "compilation_config": PIECEWISE},
    ),
}


def expected(rounds: list[dict[str, Any]], steps: int = 1) -> int:
    """Padding rows with a NaN that one layer's attention had, by the spies of the same run.

    Each round is one prompt step and then decode steps, each of which pads its batch alike.

    Args:
        rounds: of ``probes.rows``.
        steps: one step in this many is counted, beginning with the first.

    >>> one = {"live": 3, "size": 8, "sums": [0] * 24, "stages": {"layers.0.attention": [0, 5]}}
    >>> expected([one, {**one, "stages": {"layers.0.attention": [0, 0]}}])
    115
    >>> expected([one], steps=4)  # of steps 1, 5, 9, 13, 17, 21 the first is the prompt's
    25
    """
    total = before = 0
    for one in rounds:
        padding = next(iter(one["stages"].values()), [0, 0])[1]
        counted = sum((before + at) % steps == 0 for at in range(1, len(one["sums"])))
        total += padding * counted
        before += len(one["sums"])
    return total


def judge(name: str, results: Results) -> Reading:
    """Whether one engine counts as the reference does."""
    steps = int(ORDERS[name].env.get("STALEPROOF_WATCH_STEPS", 1))
    told, rounds = results.of(name, "watched"), results.of(name, "rows")
    want = [expected(rounds, steps), 0]
    got = [counts for stage, counts in told["bad"].items() if stage.startswith("attention")]
    live = sum(counts[1] for counts in told["bad"].values())
    nan = sum(one["nan"] for one in rounds)
    exact = got == [want] * LAYERS and (live > 0) == (nan > 0)
    taken = sum(len(one["sums"]) for one in rounds)
    exact = exact and (told["steps"], told["counted"]) == (taken, -(-taken // steps))
    seconds = results.of(name, "start")["seconds"]
    scraped = bool(told["scraped"])
    return reading(
        "exact" if exact and scraped else "not exact",
        want=want,
        reference_steps=taken,
        start_seconds=seconds,
        **told,
    )


BENCH = Bench("watch", ORDERS, [cell(COUNTS, name, "counts", partial(judge, name)) for name in ORDERS])
