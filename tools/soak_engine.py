"""A whole vLLM 0.22.1 engine on a GPU, serving for minutes: what grows with the plugin off and on.

    python -m tools.soak_engine --patches none --seconds 600 --out off.json &
    sleep 90
    python -m tools.soak_engine --patches all --seconds 600 --out on.json

Each is one engine in one process, with dummy weights, prefix caching, asynchronous scheduling and few KV
blocks, so that requests preempt each other. Requests arrive as others leave. Once a second it notes the
resident memory, block ids that nobody took, log lines, the median step and the preemptions so far. The
second starts when the first has measured its memory. Needs an importable vLLM with its compiled parts.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from staleproof.engine.models import write_config
from staleproof.kernels import whole_vllm
from tools import soak

SEQUENCES = 32
WAITING = 48
# 32 sequences of up to 22 blocks of 16 tokens do not fit.
BLOCKS = 256


class Engine(Protocol):
    """What the soak needs of an engine."""

    preemptions: int

    def add(self, number: int, prompt: list[int], max_tokens: int) -> None:
        """Let a request arrive."""

    def step(self) -> int:
        """Run one step; return how many requests have left with it."""

    def pending(self) -> int:
        """Count the recorded block ids that nobody has taken."""


class Served:
    """A real engine in this process."""

    def __init__(self) -> None:
        vllm = importlib.import_module("vllm")
        folder = tempfile.mkdtemp(prefix="staleproof-soak-")
        write_config(Path(folder), "qwen3", {})
        self.parameters = vllm.SamplingParams
        self.engine = vllm.LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=1024,
            max_num_seqs=SEQUENCES,
            gpu_memory_utilization=0.2,
            num_gpu_blocks_override=BLOCKS,
            block_size=16,
            enable_prefix_caching=True,
            async_scheduling=True,
            seed=0,
            compilation_config={
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [8, SEQUENCES],
            },
        ).llm_engine
        self.core = self.engine.engine_core.engine_core
        self.preemptions = 0
        self.own = self.core.scheduler._preempt_request
        self.core.scheduler._preempt_request = self._count

    def _count(self, *args: Any, **kwargs: Any) -> Any:
        self.preemptions += 1
        return self.own(*args, **kwargs)

    def add(self, number: int, prompt: list[int], max_tokens: int) -> None:
        parameters = self.parameters(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self.engine.add_request(str(number), {"prompt_token_ids": prompt}, parameters)

    def step(self) -> int:
        return sum(output.finished for output in self.engine.step())

    def pending(self) -> int:
        managers = self.core.scheduler.kv_cache_manager.coordinator.single_type_managers
        return sum(len(manager.new_block_ids) for manager in managers)

    def facts(self) -> dict[str, Any]:
        """What ran."""
        torch = importlib.import_module("torch")
        return {
            "vllm": importlib.import_module("vllm").__version__,
            "torch": torch.__version__,
            "machine": torch.cuda.get_device_name(),
            "blocks": self.core.scheduler.cache_config.num_gpu_blocks,
            "scheduler": type(self.core.scheduler).__name__,
            "prefix caching": self.core.scheduler.cache_config.enable_prefix_caching,
        }


def arrival(number: int, chance: random.Random) -> tuple[list[int], int]:
    """A prompt, one of eight prefixes of four blocks and some tokens of its own; how many to make."""
    own = [chance.randrange(2, 31999) for _ in range(chance.randrange(8, 160))]
    return [2 + number % 8] * 64 + own, chance.randrange(8, 128)


def drive(
    engine: Engine, seconds: float, lines: Callable[[], int], clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Let requests arrive and leave for so many seconds; return a point a second of each curve.

    Args:
        lines: how many lines were logged so far.
        clock: seconds that pass.
    """
    names = "seconds", "requests", "rss_kib", "pending", "log_lines", "step_us", "preemptions"
    curves: dict[str, list[float]] = {name: [] for name in names}
    chance = random.Random(0)
    arrived = left = steps = 0
    took: list[float] = []
    start = clock()
    while (now := clock() - start) < seconds:
        while arrived - left < WAITING:
            engine.add(arrived, *arrival(arrived, chance))
            arrived += 1
        before = clock()
        left += engine.step()
        took.append(clock() - before)
        steps += 1
        if now >= len(curves["seconds"]) + 1:
            median = statistics.median(took) * 1e6
            values = now, left, soak.resident(), engine.pending(), lines(), median, engine.preemptions
            for curve, value in zip(curves.values(), values, strict=True):
                curve.append(round(value, 1))
            took.clear()
    return {"curves": curves, "totals": {"steps": steps, "arrived": arrived, "left": left}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--patches", choices=["none", "all"], required=True)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    os.environ |= {**whole_vllm.ENVIRONMENT, "STALEPROOF_PATCHES": given.patches}
    importlib.import_module("vllm")
    count = soak.Count()
    logging.getLogger("vllm").addHandler(count)
    served = Served()
    result = {"patches": given.patches, **served.facts(), **drive(served, given.seconds, lambda: count.lines)}
    given.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    last = {name: (curve[0], curve[-1]) for name, curve in result["curves"].items() if curve}
    print(given.patches, result["totals"], last, sep="\n  ")
