"""What ``STALEPROOF_CONTAIN`` and ``STALEPROOF_POISON`` cost a step of a whole vLLM, off and on in turn.

One engine with dummy weights; the plugin's switch file switches contain or poison every few steps of one
decode, because the clock rate of a GPU and the load of its host drift. A stretch of steps with it is compared
with the mean of the two stretches beside it, without: ``wall`` is the time of a step, which is the device's
if that is longer, and ``host`` the calling thread's. With poison, prompts of 16 lengths let some request get
a block in each step. Then the two experiments of ``tests/whole/test_canary.py`` run, if the environment has
their model.

Run: ``python benchmarks/canary.py > canary.json``, with ``STALEPROOF_WHOLE`` naming the Python of an
environment with a vLLM and this staleproof. The sizes are for a GPU of 80 GB or more; ``--small`` is for any
machine. ``--parts`` names some of the parts: cost, poison, contain.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from staleproof.child import report
from staleproof.vllm import contain, live, poison
from staleproof.vllm.plugin import VARIABLE
from staleproof.whole import place
from staleproof.whole.engine import Engine, counters, switch

BOTH = contain.NAME, poison.NAME
# Stretches with a patch in a decode, each between two without; steps after a switch that are not counted.
TIMES, SETTLE = {contain.NAME: 12, poison.NAME: 6}, 4
PARTS = "cost", "poison", "contain"
# Which of vLLM's two model runners serves.
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
# The shape of Llama 3.1 8B.
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BATCHES = 1, 64, 256
SMALL = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 2048,
}  # fmt: skip


def serve(small: bool, steps: int, decodes: int) -> None:
    """In the child: one engine, all states, each batch."""
    from vllm import SamplingParams

    batches = (4,) if small else BATCHES
    full = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [*batches]}
    graphs = (
        {}
        if small
        else {"compilation_config": full, "gpu_memory_utilization": 0.6, "kv_cache_memory_bytes": 26 << 30}
    )
    engine = Engine(
        SHAPE | (SMALL if small else {}),
        enforce_eager=small,
        async_scheduling=None,
        max_model_len=2048,
        **graphs,
    )
    core, rows = engine.llm.llm_engine, []
    for batch, name in itertools.product(batches, BOTH):
        before = counters()
        # The more requests, the more the times of a host differ.
        count = decodes * (1 if batch < 256 else 3) if name == contain.NAME else 1
        times = [_decode(core, SamplingParams, batch, name, steps) for _ in range(count)]
        row = {"patch": name, "batch": batch, "steps": steps}
        for key, of in zip(("wall", "host"), zip(*times, strict=True), strict=True):
            row |= {f"{key}_{what}": number for what, number in _added(of).items()}
        after = counters()
        counted = {key: after[key] - before[key] for key in ("poisoned_blocks", "contained_requests")}
        rows.append(row | counted)
    report({"device": str(engine.runner.device), "rows": rows})


def _decode(core: Any, params: Any, batch: int, name: str, steps: int) -> tuple[list[float], list[float]]:
    """One decode, switched every few steps: of each stretch, the median step of the wall and of the host."""
    stretches = 2 * TIMES[name] + 1
    total = (steps + SETTLE) * stretches
    sampling = params(temperature=0, max_tokens=total + 40, ignore_eos=True, detokenize=False)
    for number in range(batch):
        prompt = {"prompt_token_ids": [3 + number % 1000] * (100 + number % 16)}
        core.add_request(f"{name}-{batch}-{number}", prompt, sampling)
    # The prompts, and steps until the pipeline is full.
    for _ in range(30):
        core.step()
    wall, host = [], []
    for turn in range(stretches):
        switch([x for x in BOTH if x != name or not turn % 2], at_once=True)
        times = [_step(core) for _ in range(steps + SETTLE)][SETTLE:]
        wall.append(statistics.median(took for took, _ in times))
        host.append(statistics.median(took for _, took in times))
    while core.has_unfinished_requests():
        core.step()
    return wall, host


def _step(core: Any) -> tuple[float, float]:
    """Microseconds of a step: of the wall, and of this thread."""
    began = time.perf_counter(), time.thread_time()
    core.step()
    return 1e6 * (time.perf_counter() - began[0]), 1e6 * (time.thread_time() - began[1])


def _added(decodes: Sequence[list[float]]) -> dict[str, Any]:
    """Median without, and what a stretch with the patch adds to its neighbours: median and quartiles."""
    added = [x[i] - (x[i - 1] + x[i + 1]) / 2 for x in decodes for i in range(1, len(x), 2)]
    low, median, high = statistics.quantiles(added, n=4)
    return {
        "us": statistics.median(itertools.chain.from_iterable(x[::2] for x in decodes)),
        "added_us": median,
        "quartiles_us": [low, high],
        "stretches": len(added),
        "all_us": decodes,
    }


def _answer(function: Any, *args: Any, env: dict[str, str]) -> Any:
    """What a part told, or why it failed; the others go on."""
    try:
        return place.call(function, *args, env=env, timeout_s=900).answer()
    except Exception as error:
        return {"failed": str(error)[-3000:]}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny model, for a machine without a GPU")
    parser.add_argument("--steps", type=int, default=20, help="of a stretch")
    parser.add_argument("--decodes", type=int, default=4, help="with contain; of 256 requests 3 x")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    if reason := place.unavailable_reason(cpu=False):
        sys.exit(f"staleproof: {reason}")
    # By its name, because a child imports it.
    from benchmarks import canary
    from tests.whole import real_canary

    with tempfile.TemporaryDirectory() as folder:
        plugin = {"VLLM_PLUGINS": "staleproof", live.SWITCH: str(Path(folder, "off"))}
        plugin["PYTHONPATH"] = str(Path(__file__).parents[1])
        told = {"evidence": str(place.evidence().of)}
        runners = {
            f"runner V{number + 1}": {RUNNER: str(number)} for number in range(1 if given.small else 2)
        }
        alone = {VARIABLE: "none", contain.VARIABLE: "1"}
        sizes = given.small, given.steps, given.decodes
        # Part -> function, its arguments, and variables.
        jobs: dict[str, tuple[Any, ...]] = {
            "cost": (canary.serve, sizes, alone | {poison.VARIABLE: "kv"}),
            "poison": (real_canary.poisoned, (200,), {VARIABLE: "unpublish", poison.VARIABLE: "kv"}),
            "contain": (real_canary.contained, (), alone),
        }
        has_model = (place.python().parents[1] / place.MODEL).exists() and not given.small
        for part in PARTS if has_model else PARTS[:1]:
            function, arguments, variables = jobs[part]
            for name, runner in runners.items() if part in given.parts else ():
                told[f"{part}, {name}"] = _answer(function, *arguments, env=plugin | variables | runner)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
