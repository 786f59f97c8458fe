"""Incident 4 in a real engine: block ids that nothing drains."""

from __future__ import annotations

from typing import Any

from staleproof.cases.answers import Answer, answer
from staleproof.engine.bench import FIX, Bench, Results, fix, three
from staleproof.engine.orders import Order

UNDRAINED, IDS = "Qwen3 dense, undrained_ids", "undrained block ids"
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 64, 256]}
ORDER = Order("qwen3", {"start": {}, "undrained": {"requests": 1000}}, {"compilation_config": GRAPHS})


def _verdict(counted: dict[str, Any]) -> str:
    ids = counted["ids"]
    return "grows" if ids[-1] > ids[1] else "clean"


def _counted(results: Results, state: str) -> dict[str, Any]:
    return results.of(f"{UNDRAINED}, {state}", "undrained")


def ids(results: Results) -> Answer:
    """Ids that stay recorded, without the plugin, and host memory."""
    counted = _counted(results, "off")
    grown = counted["rss"][-1] - counted["rss"][1]
    return answer(_verdict(counted), **counted, rss_grown=grown)


def drained(results: Results) -> Answer:
    """Off / on / off."""
    states = [_counted(results, state) for state in ("off", "on", "off again")]
    off, on, _ = states
    wrong = None if off["tokens"] == on["tokens"] else "other tokens were generated"
    verdicts = [_verdict(counted) for counted in states]
    return fix(UNDRAINED, verdicts, wrong, ids_off=off["ids"], ids_on=on["ids"])


BENCH = Bench(
    "blocks",
    "incident 4: block ids that nothing drains, for 1,000 requests",
    three(UNDRAINED, ORDER),
    {(IDS, "Qwen3 dense"): ids, (FIX, UNDRAINED): drained},
)
