"""A long run of vLLM's own scheduler on a CPU, with the plugin off and on: what grows, and what does not.

    python -m tools.soak --requests 200000

serves as many requests in each state, in a process of its own, both side by side so that they meet the
same load of the machine. Requests arrive and leave, share prefixes, and preempt each other because there
are few blocks. Writes curves over the finished requests: resident memory, block ids that nobody took,
log lines, and the median time of a step (schedule, and take the tokens in).
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/vllm"))

import environment

VERSION = "0.22.1"
OUT = Path(__file__).parents[1] / "workbook/soak-cpu.json"
# Of 16 tokens each; eight requests of up to 9 blocks, two of them shared, do not fit.
BLOCKS = 40
WAITING = 16
STATES = {"off": "none", "on": "all"}


class Count(logging.Handler):
    """Counts what vLLM and the plugin log."""

    lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1


def arrival(number: int, chance: random.Random) -> tuple[list[int], int]:
    """A prompt, one of four prefixes of two blocks and some tokens of its own; how many tokens to make."""
    prefix = [1 + number % 4] * 32
    own = [chance.randrange(1, 100) for _ in range(chance.randrange(4, 64))]
    return prefix + own, chance.randrange(4, 40)


def serve(patches: str, requests: int, samples: int) -> dict[str, Any]:
    """Serve requests with these patches; return the curves and the totals."""
    os.environ["STALEPROOF_PATCHES"] = patches
    count = Count()
    logging.getLogger("vllm").addHandler(count)
    importlib.import_module("vllm.plugins").load_general_plugins()
    import real_scheduler as real

    from staleproof.engine.probes import resident

    engine = real.scheduler(real.attention_spec(), blocks=BLOCKS)
    chance = random.Random(0)
    curves: dict[str, list[float]] = {
        name: [] for name in ("requests", "rss_kib", "pending", "log_lines", "step_us")
    }
    totals = {"steps": 0, "preemptions": 0, "cached_tokens": 0}
    arrived, took = 0, []
    while arrived < requests or engine.get_num_unfinished_requests():
        while arrived < requests and engine.get_num_unfinished_requests() < WAITING:
            engine.add_request(real.request(arrived, *arrival(arrived, chance)))
            arrived += 1
        start = time.perf_counter()
        scheduled = real.step(engine)
        took.append(time.perf_counter() - start)
        totals["steps"] += 1
        totals["preemptions"] += len(scheduled.preempted_req_ids or ())
        totals["cached_tokens"] += sum(new.num_computed_tokens for new in scheduled.scheduled_new_reqs)
        finished = arrived - engine.get_num_unfinished_requests()
        if finished >= (len(curves["requests"]) + 1) * requests / samples:
            values = (
                finished,
                resident() // 1024,
                real.pending(engine),
                count.lines,
                statistics.median(took) * 1e6,
            )
            for curve, value in zip(curves.values(), values, strict=True):
                curve.append(round(value, 1))
            took.clear()
    return {"curves": curves, "totals": totals}


def main(requests: int, samples: int) -> dict[str, Any]:
    """Serve in both states, side by side; run inside a vLLM environment only."""
    importlib.import_module("vllm.v1.core.sched.scheduler")
    context = multiprocessing.get_context("fork")
    with context.Pool(len(STATES), maxtasksperchild=1) as pool:
        runs = {
            state: pool.apply_async(serve, (patches, requests, samples)) for state, patches in STATES.items()
        }
        found = {state: run.get() for state, run in runs.items()}
    return {"vllm": VERSION, "requests": requests, "blocks": BLOCKS} | found


def check(found: dict[str, Any]) -> None:
    """Both states served all requests, with prefix hits and preemption; with the plugin nothing grows."""
    off, on = (found[state]["curves"] for state in STATES)
    requests = found["requests"]
    assert off["requests"][-1] == on["requests"][-1] == requests
    # The plugin changes no decision of the scheduler.
    assert found["off"]["totals"] == found["on"]["totals"]
    assert found["on"]["totals"]["preemptions"] > requests / 100
    assert found["on"]["totals"]["cached_tokens"] > requests
    assert {*on["pending"]} == {0}
    steps = [later - earlier for earlier, later in itertools.pairwise(off["pending"])]
    assert all(step > 2 * requests / len(off["pending"]) for step in steps), steps
    # What was logged was logged at the start.
    assert len({*on["log_lines"]}) == len({*off["log_lines"]}) == 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--samples", type=int, default=50, help="points of a curve")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--inside", action="store_true", help="in a vLLM environment already")
    given = parser.parse_args()
    if not given.inside:
        again = [sys.executable, "-m", "tools.soak", *sys.argv[1:], "--inside"]
        raise SystemExit(subprocess.call(again, env=environment.variables(VERSION)))
    result = main(given.requests, given.samples)
    given.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    for state in STATES:
        first, last = ({name: curve[i] for name, curve in result[state]["curves"].items()} for i in (0, -1))
        print(state, result[state]["totals"], first, last, sep="\n  ")
