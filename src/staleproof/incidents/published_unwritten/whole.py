"""A whole vLLM on a GPU, in a child process: the answer of a request that hits KV which nobody wrote.

The model is set up to copy: one layer, every key is 0 and every value is its token. So attention averages the
tokens whose values are in the cache, and the answer is the most frequent one. There are two kinds of rounds:

- ``nan``: the KV cache is filled with NaN first. A NaN in the answer comes from a slot that nobody wrote.
- ``secret``: two earlier tenants and the chats send :data:`SECRET`, and the document does not contain it.
  A request that answers :data:`SECRET` to the document reveals what another tenant sent.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from staleproof.cases.children import tell
from staleproof.incidents.published_unwritten.scene import Arrival, burst
from staleproof.kernels import whole_vllm
from staleproof.vllm import sources
from staleproof.vllm.plugin import patches
from staleproof.vllm.standing import registry

# All widths equal the size of the vocabulary, so that a value can be the one-hot vector of its token.
WIDTH, BLOCKS, SECRET = 512, 340, 505
ENVIRONMENT = {
    **whole_vllm.ENVIRONMENT,
    "STALEPROOF_PATCHES": "none",
    # With NaN logits, the sampler of 0.22.1's V2 runner returns a token outside the vocabulary, and crashes.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "bfloat16",
    "hidden_size": WIDTH, "vocab_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def _copying(model: Any) -> None:
    """Make a model answer the token whose values it attends to most."""
    import torch

    eye = torch.eye(WIDTH)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            kind = name.rsplit(".", 2)[-2]
            weight.fill_(1) if "norm" in kind else weight.zero_()
            if kind == "o_proj":
                # Scale attention's output, so that the token itself is only a thousandth of it.
                weight.copy_(1000 * eye)
            elif kind in ("embed_tokens", "lm_head", "qkv_proj"):
                weight[2 * WIDTH if kind == "qkv_proj" else 0 :][:WIDTH] = eye


class _Engine:
    def __init__(self, policy: str) -> None:
        from vllm import LLM

        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(CONFIG))
            self.llm = LLM(
                model=folder, skip_tokenizer_init=True, load_format="dummy", seed=0, enforce_eager=True,
                attention_backend="TRITON_ATTN", gpu_memory_utilization=0.2, async_scheduling=False,
                max_model_len=4600, max_num_seqs=64, max_num_batched_tokens=2048, block_size=16,
                num_gpu_blocks_override=BLOCKS, enable_prefix_caching=True, scheduling_policy=policy,
                long_prefill_token_threshold=256,
            )  # fmt: skip
        self.engine = self.llm.llm_engine
        worker = self.engine.engine_core.engine_core.model_executor.driver_worker
        self.runner = getattr(worker, "worker", worker).model_runner
        _copying(self.runner.model)
        self.steps, self.rounds = 0, 0

    def answers(self, load: Sequence[Arrival]) -> dict[str, tuple[list[int], int, int]]:
        """Request -> its tokens, the number of NaN log-probabilities, and its tokens from the cache."""
        from vllm import SamplingParams

        self.rounds += 1
        left, found, step = [*load], dict[str, tuple[list[int], int, int]](), 0
        while left or self.engine.has_unfinished_requests():
            for one in [*left]:
                if step >= one.at and (not one.after or one.after in found):
                    left.remove(one)
                    asked = SamplingParams(
                        temperature=0, max_tokens=one.reply, ignore_eos=True, detokenize=False, logprobs=0
                    )
                    name, prompt = f"{one.name}-{self.rounds}", {"prompt_token_ids": [*one.prompt]}
                    self.engine.add_request(name, prompt, asked, priority=one.priority)
            for done in self.engine.step():
                if done.finished:
                    (out,) = done.outputs
                    bad = sum(math.isnan(p.logprob) for token in out.logprobs for p in token.values())
                    found[done.request_id.split("-")[0]] = [*out.token_ids], bad, done.num_cached_tokens or 0
            step += 1
        self.steps += step
        return found

    def empty(self, kind: str) -> None:
        """Drop every hash; for ``nan`` also fill the blocks with NaN."""
        self.llm.reset_prefix_cache()
        for cache in self.runner.kv_caches if kind == "nan" else ():
            cache.fill_(math.nan)

    def round(self, kind: str, seed: int) -> dict[str, Any]:
        load = burst(seed)[1]
        if kind == "secret":
            # Two tenants fill the cache. No two prompts share their first block.
            self.answers([Arrival(f"tenant{i}", [506 + i, *[SECRET] * 2699], 1) for i in (0, 1)])
            load = [
                Arrival(one.name, [3 + i, *[SECRET] * (len(one.prompt) - 1)], one.reply, at=one.at)
                if one.name.startswith("chat")
                else one
                for i, one in enumerate(load)
            ]
        self.empty(kind)
        found = self.answers(load)
        return {
            who: {"nan": found[who][1], "secret": found[who][0].count(SECRET), "of": len(found[who][0])}
            for who in ("victim", "stranger")
        }

    def same_step(self, seed: int) -> dict[str, int]:
        """Two requests with the same prompt in one step: the second hits blocks that this step writes."""
        prompt = random.Random(seed).choices(range(3, 500), k=200)
        self.empty("nan")
        found = self.answers([Arrival("first", prompt, 4), Arrival("second", [*prompt, 7], 4)])
        return {"hit_tokens": found["second"][2], "nan": sum(one[1] for one in found.values())}


def ask(seeds: Sequence[int]) -> None:
    """Start engines and report their answers: off, with the patch, off again; FCFS.

    Args:
        seeds: of :func:`~.scene.burst`, one a round.
    """
    os.environ.update(ENVIRONMENT)
    version = sources.installed()[0]
    told: dict[str, Any] = {}
    for policy, states in {"priority": ("off", "on", "again"), "fcfs": ("FCFS",)}.items():
        engine = _Engine(policy)
        if policy == "priority":
            told["same step"] = [engine.same_step(seed) for seed in range(8)]
        for state in states:
            on = patches()["unpublish"].applied(version) if state == "on" else contextlib.nullcontext()
            with on:
                for kind in ("nan", "secret"):
                    steps, started = engine.steps, time.perf_counter()
                    rows = {}
                    for seed in seeds:
                        rows[str(seed)] = engine.round(kind, seed)
                    steps = engine.steps - steps
                    told[f"{state}, {kind}"] = {
                        "rounds": rows,
                        "us_a_step": 1e6 * (time.perf_counter() - started) / steps,
                        "stepped_back": [*registry.out_of_service()],
                    }
            tell(told)
        del engine
