"""The setting of vLLM #39593: data-parallel ranks that pad up to one batch size, with one rank idle.

Counts the steps with padding in which a router got NaN or Inf, in live rows and in padding rows.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from staleproof.cases.case import Reading
from staleproof.engine.bench import Bench, Results, cell
from staleproof.engine.mla import PIECEWISE
from staleproof.engine.probes import Engine, generate, prompts, start
from staleproof.engine.session import RANK, Order
from staleproof.engine.spies import LARGEST, Rows

QUESTION = "router logits of padded steps"
VARIANT = "Qwen3-MoE, DEP 2, one rank idle"
# Requests of the busy rank in each round; the batch is padded to 8 or to 64 rows.
LIVE = (3, 50, 5, 60, 3)
NAN, INF = "NaN", "Inf"


def router_logits(watch: Rows) -> None:
    """Keep which rows of a router's logits hold NaN, and which Inf, in each step of the runner."""
    base = importlib.import_module("vllm.model_executor.layers.fused_moe.router.base_router")
    inner = base.BaseRouter.select_experts

    def select_experts(self: Any, hidden_states: Any, router_logits: Any, *args: Any, **kwargs: Any) -> Any:
        layer = watch.layers.setdefault(id(self), f"router {len(watch.layers)}")
        watch.keep(f"{layer} {NAN}", router_logits)
        watch.keep(f"{layer} {INF}", torch.where(router_logits.isinf(), torch.nan, 0.0))
        return inner(self, hidden_states, router_logits, *args, **kwargs)

    base.BaseRouter.select_experts = select_experts
    runner = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    runner.execute_model = _counted(runner.execute_model, watch, lambda out: out.total_num_scheduled_tokens)
    # What an idle rank runs beside a busy one.
    runner._dummy_run = _counted(runner._dummy_run, watch, lambda tokens: 0)


def _counted(inner: Any, watch: Rows, live: Callable[[Any], int]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        if watch.steps is None:
            return inner(*args, **kwargs)
        watch.clear()
        result = inner(*args, **kwargs)
        rows = live(args[1])
        if rows <= LARGEST and (counts := _bad_rows(watch, rows)):
            watch.steps.append(counts)
        return result

    return run


def _bad_rows(watch: Rows, live: int) -> dict[str, Any]:
    """Rows of the last step, how many are live, and how many live and padding rows are bad in any layer."""
    kept = {key: flags.tolist() for key, flags in watch.flags.items()}
    ran = {key: flags for key, flags in kept.items() if flags[0] >= 0}
    if not ran:
        return {}
    (size,) = {rows for _, rows in ran}
    counts: dict[str, Any] = {"live": live, "rows": size}
    for kind in (NAN, INF):
        layers = [flags for (stage, _), flags in ran.items() if stage.endswith(kind)]
        bad = [max(flags) for flags in zip(*layers, strict=True)]
        counts[kind] = [sum(bad[:live]), sum(bad[live:])]
    return counts


def uneven(engine: Engine, live: Sequence[int], tokens: int = 24) -> list[dict[str, Any]]:
    """Serve rounds of so many requests on the first rank, and none on the others.

    Returns:
        A mapping a step: ``rows``, ``live`` (0 in a step of an idle rank), ``NaN`` and ``Inf`` (rows whose
        router logits hold one in any layer, of the live and of the padding rows).
    """
    engine.watch.steps = []
    for count in live:
        if not int(os.environ.get(RANK, 0)):
            # Prompts are steps of more rows than are kept.
            asked = prompts([LARGEST + 3 + 7 * i % 90 for i in range(count)])
            generate(engine, asked, [tokens] * count)
        else:
            server = engine.llm.llm_engine
            while server.has_unfinished_requests():
                server.step()
    return engine.watch.steps


ORDER = Order(
    "qwen3_moe",
    {start: {}, uneven: {"live": LIVE}},
    {
        "moe_backend": "triton",
        "compilation_config": PIECEWISE,
        "enable_expert_parallel": True,
        # The spies are in this process; and each step of one rank must meet one of the other.
        "distributed_executor_backend": "uni",
        "async_scheduling": False,
    },
    spies=(router_logits,),
    ranks=2,
)
ORDERS = {f"{VARIANT}, off": ORDER, f"{VARIANT}, on": Order(**{**vars(ORDER), "patches": "all"})}


def counted(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The steps with padding, and what their router logits held.

    >>> steps = [{"live": 3, "rows": 8, "NaN": [0, 5], "Inf": [0, 0]}, {"live": 8, "rows": 8}]
    >>> counted(steps)["padded"], counted(steps)["with NaN"], counted(steps)["padding rows with NaN"]
    (1, 1, 5)
    """
    padded = [step for step in steps if step["rows"] > step["live"]]
    told: dict[str, Any] = {"steps": len(steps), "padded": len(padded)}
    told["mean padding"] = round(sum(s["rows"] - s["live"] for s in padded) / max(1, len(padded)), 2)
    for kind in (NAN, INF):
        told[f"with {kind}"] = sum(any(step[kind]) for step in padded)
        for index, rows in enumerate(("live", "padding")):
            told[f"{rows} rows with {kind}"] = sum(step[kind][index] for step in padded)
    return told


def padding(name: str, results: Results) -> Reading:
    """In how many padded steps of the busy rank a router gets NaN or Inf; the idle rank stands beside it."""
    busy = results.of(name, "uneven")
    idle = results.of(name, "rank 1")["uneven"]
    padded = [step for step in busy if step["rows"] > step["live"]]
    share = sum(any((*s[NAN], *s[INF])) for s in padded) / max(1, len(padded))
    verdict = "nearly all" if share >= 0.9 else "some" if share else "none"
    return Reading(verdict, {"busy rank": counted(busy), "idle rank": counted(idle)})


BENCH = Bench(
    "ranks", ORDERS, [cell(QUESTION, name, "padding rows", partial(padding, name)) for name in ORDERS]
)
