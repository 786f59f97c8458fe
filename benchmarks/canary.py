"""What ``STALEPROOF_CONTAIN`` and ``STALEPROOF_POISON`` cost a step of a whole vLLM, off and on in turn.

One engine with dummy weights; the plugin's switch file switches contain and poison, as an operator does.
Times are medians over the steps of a steady decode: ``step_us`` of the wall, which is the device's time if
that is longer, and ``host_us`` of the calling thread. With poison, prompts of 16 lengths let some request get
a block in each step. Then the two experiments of ``tests/whole/test_canary.py`` run, if the environment has
their model.

Run: ``python benchmarks/canary.py > canary.json``, with ``STALEPROOF_WHOLE`` naming the Python of an
environment with a vLLM and this staleproof. The sizes are for a GPU of 80 GB or more; ``--small`` is for any
machine. ``--parts`` names some of the parts: cost, poison, contain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from staleproof.child import report
from staleproof.vllm import contain, live, poison
from staleproof.vllm.plugin import VARIABLE
from staleproof.whole import place
from staleproof.whole.engine import Engine, counters, states_of, switch

BOTH = contain.NAME, poison.NAME
# The states of an engine in turn, and what is switched off in each: a difference is of neighbours, since the
# clock rate of a GPU drifts.
STATES = [("off", BOTH), ("contain", BOTH[1:])] * 6 + [("off", BOTH), ("poison", BOTH[:1])] * 2
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


def serve(small: bool, steps: int) -> None:
    """In the child: one engine, all states, each batch."""
    from vllm import SamplingParams

    batches = (4,) if small else BATCHES
    full = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [*batches]}
    graphs = (
        {}
        if small
        else {"compilation_config": full, "gpu_memory_utilization": 0.6, "kv_cache_memory_bytes": 24 << 30}
    )
    engine = Engine(
        SHAPE | (SMALL if small else {}),
        enforce_eager=small,
        async_scheduling=None,
        max_model_len=2048,
        **graphs,
    )
    core, rows = engine.llm.llm_engine, []
    for batch in batches:
        for turn, (state, off) in enumerate(STATES):
            switch(off)
            sampling = SamplingParams(temperature=0, max_tokens=steps + 40, ignore_eos=True, detokenize=False)
            for number in range(batch):
                prompt = {"prompt_token_ids": [3 + number % 1000] * (100 + number % 16)}
                core.add_request(f"{turn}-{batch}-{number}", prompt, sampling)
            # The prompts, and steps until the pipeline is full.
            for _ in range(30):
                core.step()
            wall, host, filled = [], [], counters()["poisoned_blocks"]
            for _ in range(steps):
                began = time.perf_counter(), time.thread_time()
                core.step()
                wall.append(time.perf_counter() - began[0])
                host.append(time.thread_time() - began[1])
            while core.has_unfinished_requests():
                core.step()
            row = {"state": state, "batch": batch, "steps": steps}
            row |= {"step_us": 1e6 * statistics.median(wall), "host_us": 1e6 * statistics.median(host)}
            row |= {"step_us_p90": 1e6 * statistics.quantiles(wall, n=10)[-1]}
            row |= {
                "poisoned": counters()["poisoned_blocks"] - filled,
                "contained": counters()["contained_requests"],
            }
            rows.append(row | {"patches": states_of(contain.NAME, poison.NAME)})
    report({"device": str(engine.runner.device), "rows": rows})


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
    parser.add_argument("--steps", type=int, default=120)
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
        # Part -> function, its arguments, and variables.
        jobs: dict[str, tuple[Any, ...]] = {
            "cost": (canary.serve, (given.small, given.steps), alone | {poison.VARIABLE: "kv"}),
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
