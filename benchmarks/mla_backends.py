"""A decode step of a whole vLLM, by attention backend: ours (CUSTOM) beside the released ones.

Dummy weights in the shapes of DeepSeek-V2-Lite (``lite``, 16 heads) and DeepSeek-V3 (``v3``, 128 heads), with
fewer layers and, for V3, fewer experts, so that the engines that are compared fit on one GPU together. They
start at once; then each measures while the others wait. A step is all that a server does for one more token
of each request, host and device, under full CUDA graphs.

Then greedy tokens: how many of 61 requests get the same 256 tokens from two backends, and with n-gram drafts
or piecewise graphs as without. Drawn weights amplify each rounding, so two released backends beside each
other are the measure.

Run: ``python benchmarks/mla_backends.py v3,fp8,CUSTOM v3,fp8,FLASHMLA > steps.json``, with
``STALEPROOF_WHOLE`` naming the Python of an environment with a vLLM and this staleproof. An engine is
named by shape, ``--kv-cache-dtype`` and ``--attention-backend``, and perhaps ``drafts`` or ``piecewise``, for
tokens alone.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from staleproof.child import report
from staleproof.incidents.mla_padding.whole import OTHERS
from staleproof.vllm.plugin import VARIABLE
from staleproof.whole import place
from staleproof.whole.load import Arrival
from staleproof.whole.shapes import DEEPSEEK_V2
from staleproof.whole.spy import before

LITE = DEEPSEEK_V2 | {
    "num_hidden_layers": 9, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "max_position_embeddings": 20000,
}  # fmt: skip
V3 = LITE | {
    "num_hidden_layers": 5, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "n_routed_experts": 32,
    "n_shared_experts": 1, "num_experts_per_tok": 8,
}  # fmt: skip
SHAPES = {
    "lite": (LITE, "DeepSeek-V2-Lite's shape, 9 layers, 16 heads"),
    "v3": (V3, "DeepSeek-V3's shape, 5 layers, 128 heads, 32 experts"),
}
BATCHES, CONTEXTS, STEPS, REPEATS = (16, 64, 128, 512), (4096, 16384), 40, 3
# Tokens that one engine's cache has room for.
ROOM = 512 * 4300
DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
FULL = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
# Up to three query tokens a request.
SIZES = [3 * batch for batch in BATCHES if batch < 512]
EXTRAS: dict[str, dict[str, Any]] = {
    "drafts": {
        "speculative_config": DRAFTS, "compilation_config": {**FULL, "cudagraph_capture_sizes": SIZES}
    },
    # vLLM cuts a graph at each attention only where it compiles.
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [64]}},
}  # fmt: skip
REQUESTS, TOKENS = 61, 256


def __getattr__(name: str) -> Any:
    """``Connector``, made when vLLM asks for it: this module is also imported where no vLLM is.

    Its hit is a whole long prompt but one token, and it loads nothing: a batch is at its length at once.
    """
    if name != "Connector":
        raise AttributeError(name)
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

    class Connector(KVConnectorBase_V1):
        def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
            found = request.num_prompt_tokens - 1 - num_computed_tokens
            return (found if found > 1000 else 0), False

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            return KVConnectorMetadata()

        def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
            return False, None

        def _nothing(self, *args: Any, **kwargs: Any) -> None:
            pass

        update_state_after_alloc = start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = (
            _nothing
        )

    return Connector


def serve(
    turns: str, engines: int, share: float, shape: str, cache: str, backend: str, extra: str = ""
) -> None:
    """In the child: one engine; report its tokens and the times of its steps.

    Args:
        turns: folder in which engines say that they are up; one measures at a time.
        engines: that are started at once.
        share: of the GPU's memory.
        shape: of :data:`SHAPES`.
        cache: ``--kv-cache-dtype``.
        backend: ``--attention-backend``.
        extra: of :data:`EXTRAS`, and then no step is timed.
    """
    import torch

    from staleproof.whole.engine import Engine, draw_dummies

    draw_dummies()
    more: dict[str, Any] = EXTRAS.get(extra) or {
        "async_scheduling": None,
        "kv_transfer_config": {
            "kv_connector": "Connector", "kv_connector_module_path": "benchmarks.mla_backends",
            "kv_role": "kv_both",
        },
    }  # fmt: skip
    row = SHAPES[shape][0]["num_hidden_layers"] * 576 * (1 if cache == "fp8" else 2)
    engine = Engine(
        SHAPES[shape][0], attention_backend=backend, kv_cache_dtype=cache, enforce_eager=False,
        max_model_len=17000, max_num_seqs=512, max_num_batched_tokens=8192, gpu_memory_utilization=share,
        moe_backend="triton", enable_prefix_caching=False,
        kv_cache_memory_bytes=ROOM // (8 if extra else 1) * row, block_size=64,
        **{"compilation_config": {**FULL, "cudagraph_capture_sizes": [*BATCHES]}} | more,
    )  # fmt: skip
    layers = engine.runner.compilation_config.static_forward_context.values()
    told: dict[str, Any] = {
        "impl": sorted({type(one.impl).__name__ for one in layers if hasattr(one, "impl")})
    }
    Path(turns, f"{shape}-{cache}-{backend}-{extra}").touch()
    until = time.monotonic() + 240
    while len([*Path(turns).iterdir()]) < engines and time.monotonic() < until:
        time.sleep(0.2)
    with Path(turns).with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        draw = torch.Generator().manual_seed(1)
        load = [
            Arrival(f"r{i}", torch.randint(2, 31999, (64 + 8 * i,), generator=draw).tolist(), TOKENS)
            for i in range(REQUESTS)
        ]
        proposed: list[int] = []

        def count(plan: Any, *rest: Any) -> None:
            proposed.append(sum(map(len, plan.scheduled_spec_decode_tokens.values())))

        with before(engine.runner, "execute_model", count):
            told["tokens"] = {name: one.tokens for name, one in engine.serve(load, ends=False).items()}
        told["drafted"] = sum(proposed)
        report(told)
        if not extra:
            told["steps"] = steps(engine)
    report(told)


def steps(engine: Any) -> list[dict[str, Any]]:
    """Milliseconds a step for each batch and length: of each repeat, the mean of its steps."""
    import torch

    from vllm import SamplingParams

    for cache in engine.caches():
        # Over zeros a kernel may be faster.
        for page in cache.split(2**14):
            numbers = torch.randn(page.shape, device=page.device, dtype=torch.float16) / 2
            page.copy_(
                numbers.to(torch.float8_e4m3fn).view(page.dtype) if page.element_size() == 1 else numbers
            )
    core, names, found = engine.llm.llm_engine, itertools.count(), []
    sampling = SamplingParams(
        temperature=0, max_tokens=30 + REPEATS * STEPS, ignore_eos=True, detokenize=False
    )
    for batch, context in itertools.product(BATCHES, CONTEXTS):
        if batch * (context + 200) > ROOM:
            continue
        for _ in range(batch):
            core.add_request(f"s{next(names)}", {"prompt_token_ids": [5] * context}, sampling)
        marks, step = [], 0
        while core.has_unfinished_requests():
            if step >= 20 and (step - 20) % STEPS == 0 and len(marks) <= REPEATS:
                torch.cuda.synchronize()
                marks.append(time.perf_counter())
            core.step()
            step += 1
        each = [(end - start) / STEPS * 1e3 for start, end in itertools.pairwise(marks)]
        found.append({"batch": batch, "context": context, "ms": each})
    return found


def rows(subject: str, told: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines of ``measurements.jsonl``; p20 and p80 are the fastest and the slowest repeat."""
    shape, cache, backend = subject.split(",")[:3]
    name = f"{SHAPES[shape][1]}, {'E4M3' if cache == 'fp8' else 'bf16'} cache"
    return [
        {
            "kernel": "whole_decode_step", "mode": "cuda graphs", "unit": "ms", "provider": backend,
            "p50": statistics.median(one["ms"]), "p20": min(one["ms"]), "p80": max(one["ms"]),
            "x_name": name, "x_value": f"{one['batch']} requests, {one['context']} tokens",
        }
        for one in told.get("steps", ())
    ]  # fmt: skip


def agreement(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Requests with the same tokens in both, and after how many tokens the others part, on average."""
    same = [
        next((at for at, (a, b) in enumerate(zip(tokens, other[name], strict=True)) if a != b), len(tokens))
        for name, tokens in one.items()
    ]
    return {"equal": sum(at == TOKENS for at in same), "of": len(same), "mean_same": statistics.mean(same)}


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="+", metavar="SHAPE,CACHE,BACKEND[,EXTRA]")
    subjects = parser.parse_args().engines
    for subject in subjects:
        parts = subject.split(",")
        known = parts[0] in SHAPES and {*parts[1:2]} <= {"auto", "fp8"} and {*parts[3:]} <= {*EXTRAS}
        if len(parts) not in (3, 4) or not known:
            form = f"SHAPE of {[*SHAPES]}, CACHE auto or fp8, EXTRA of {[*EXTRAS]}"
            parser.error(f"expected SHAPE,CACHE,BACKEND[,EXTRA], {form}, got {subject}")
    if reason := place.unavailable_reason(cpu=False):
        sys.exit(f"staleproof: {reason}")
    # By its name, because a child imports it.
    from benchmarks import mla_backends

    count, root = len(subjects), Path(__file__).parents[1]
    env = {"VLLM_PLUGINS": "staleproof", VARIABLE: OTHERS, "PYTHONPATH": str(root)}

    def ask(subject: str) -> dict[str, Any]:
        given = turns, count, 0.9 / count, *subject.split(",")
        try:
            told: dict[str, Any] = place.call(mla_backends.serve, *given, env=env, timeout_s=900).answer()
        except Exception as error:
            # The others do not wait for it.
            Path(turns, f"failed-{subject}").touch()
            told = {"failed": str(error)[-2000:]}
        return told

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as pool:
        turns = str(Path(folder, "turns"))
        Path(turns).mkdir()
        told = dict(zip(subjects, pool.map(ask, subjects), strict=True))
    tokens = {name: one.pop("tokens") for name, one in told.items() if "tokens" in one}
    pairs = itertools.combinations(tokens, 2)
    print(
        json.dumps(
            {
                "evidence": str(place.evidence().of),
                "rows": [row for name in told for row in rows(name, told[name])],
                "agreement": {f"{a}, {b}": agreement(tokens[a], tokens[b]) for a, b in pairs},
                "engines": told,
            }
        )
    )


if __name__ == "__main__":
    main()
