"""Incident 4 in a real engine: block ids that nothing drains."""

from __future__ import annotations

from typing import Any

from staleproof.cases.case import Reading, reading
from staleproof.engine.bench import Bench, Results, cell, fix, three
from staleproof.engine.probes import start, undrained
from staleproof.engine.session import Order

UNDRAINED, IDS = "Qwen3 dense, undrained_ids", "undrained block ids"
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 64, 256]}
ORDER = Order("qwen3", {start: {}, undrained: {"requests": 1000}}, {"compilation_config": GRAPHS})


def _verdict(counted: dict[str, Any]) -> str:
    ids = counted["ids"]
    return "grows" if ids[-1] > ids[1] else "flat"


def _counted(results: Results, state: str) -> dict[str, Any]:
    return results.of(f"{UNDRAINED}, {state}", "undrained")


def ids(results: Results) -> Reading:
    """Ids that stay recorded, without the plugin, and host memory."""
    counted = _counted(results, "off")
    grown = counted["rss"][-1] - counted["rss"][1]
    return reading(_verdict(counted), **counted, rss_grown=grown)


def _state(results: Results, which: str) -> Reading:
    counted = _counted(results, which)
    return reading(_verdict(counted), ids=counted["ids"])


def _wrong(results: Results) -> str | None:
    same = _counted(results, "off")["tokens"] == _counted(results, "on")["tokens"]
    return None if same else "other tokens were generated"


BENCH = Bench(
    "blocks",
    three(UNDRAINED, ORDER),
    [cell(IDS, "Qwen3 dense", "host memory", ids), fix(UNDRAINED, "host memory", _state, _wrong)],
)
