"""Incident 8 in a whole vLLM under a real CUDA graph: Qwen3-Next's shape, drawn weights, two draft tokens.

It runs in a child process (:func:`staleproof.whole.place.call`) with a vLLM and a GPU. One engine serves each
prompt without the patch ``uniform_decode``, with it, and without it again, and once without graphs, which is
the right answer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from staleproof.child import report
from staleproof.lab import Answer, Fix, Incident, Scene, bad, good, needs_cuda
from staleproof.vllm import live
from staleproof.vllm.plugin import VARIABLE
from staleproof.whole import place
from staleproof.whole.engine import Engine, switch
from staleproof.whole.load import Arrival
from staleproof.whole.shapes import QWEN3_NEXT

K = 2
# Tokens of a step, so that a longer prompt is cut into chunks.
STEP = 64
PATCH = "uniform_decode"
ROUNDS = ("off", "on", "off again")
# The value that all states hold before a prompt: a block that keeps it was never written.
UNTOUCHED = 7.0
CONFIG = QWEN3_NEXT | {
    "vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8,
    "head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}  # fmt: skip
SIZES = [K + 1, 2 * (K + 1), 4 * (K + 1)]
OPTIONS: dict[str, Any] = {
    "enforce_eager": False, "max_model_len": 2048, "max_num_seqs": 4, "max_num_batched_tokens": STEP,
    "gpu_memory_utilization": 0.2, "enable_prefix_caching": False, "mamba_ssm_cache_dtype": "float32",
    "num_gpu_blocks_override": 64, "moe_backend": "triton",
    "additional_config": {"gdn_prefill_backend": "triton"},
    "speculative_config": {
        "method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 3, "prompt_lookup_min": 1
    },
    "compilation_config": {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": SIZES
    },
}  # fmt: skip
# Seeds of two strangers' prompts, and drafts that nobody would accept but by chance.
STRANGERS = (11, 12)
WRONG = [3, 4]


class Served(NamedTuple):
    """One request's tokens and the log-probability of each, and the graph of each step of the load."""

    tokens: list[int]
    logprobs: list[float]
    graphs: list[str]


def prompt(tokens: int, seed: int) -> list[int]:
    """Random tokens; the same for the same arguments."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    return torch.randint(2, CONFIG["vocab_size"] - 1, (tokens,), generator=draw).tolist()


class Bench:
    """An engine, how its steps are dispatched, and which drafts it verifies.

    Args:
        engine: it has started.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.runner = engine, engine.runner
        self.eager, self.steps = False, 0
        self.graphs: list[str] = []
        # What the neighbour generates when it is alone: right drafts.
        self.known: list[int] = []
        dispatch = self.runner._determine_batch_execution_and_padding

        def observed(*args: Any, **kwargs: Any) -> Any:
            if self.eager:
                kwargs["force_eager"] = True
            chosen = dispatch(*args, **kwargs)
            self.graphs.append(chosen[0].name)
            return chosen

        self.runner._determine_batch_execution_and_padding = observed
        self.runner.drafter.propose = self._propose

    def _propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Drafts: the neighbour's are right in every second step, so that accepted counts change.

        A stranger's are all wrong; its steps fill the buffers that the graph reads.
        """
        # Newer releases pass the number of drafts first.
        sampled = next(value for value in args if isinstance(value, list))
        drafts: list[list[int]] = []
        for name, tokens in zip(self.runner.input_batch.req_ids, sampled, strict=False):
            done = len(self.runner.requests[name].output_token_ids)
            following = self.known[done : done + K] if name.startswith("neighbour") else WRONG
            if self.steps % 2 == 0:
                following = WRONG[: len(following)]
            drafts.append(following if tokens and not name.startswith("mine") else [])
        self.steps += 1
        return drafts

    def serve(self, *load: Arrival) -> dict[str, Served]:
        """Serve a load to its end."""
        self.steps, self.graphs[:] = 0, []
        answers = self.engine.serve(load, ends=False)
        graphs = [*self.graphs]
        return {name: Served([*a.tokens], [*a.logprobs], graphs) for name, a in answers.items()}

    def after_a_stranger(self, tokens: Sequence[int], stranger: int) -> Served:
        """Serve a prompt after a stranger's request has ended, whose states stay in their blocks."""
        eager, self.eager = self.eager, True
        self.serve(Arrival("stranger", prompt(40, stranger), 8))
        self.eager = eager
        return self.serve(Arrival("mine", tokens, 8))["mine"]

    @contextmanager
    def round(self, name: str) -> Iterator[None]:
        """One of :data:`ROUNDS`, or ``"no graphs"``, for a ``with`` block."""
        self.eager = name == "no graphs"
        switch([] if name == "on" else [PATCH])
        try:
            yield
        finally:
            self.eager = False


def error(got: Served, right: Served) -> float:
    """Largest difference of log-probabilities, up to the first token that differs."""
    pairs = zip(got.tokens, right.tokens, got.logprobs, right.logprobs, strict=True)
    worst = 0.0
    for token, wanted, value, reference in pairs:
        worst = max(worst, abs(value - reference))
        if token != wanted:
            break
    return worst


def row(kind: str, n: int, name: str, got: Served, right: Served, **more: Any) -> dict[str, Any]:
    """What one round gave, as JSON."""
    return {
        "kind": kind,
        "tokens": n,
        "round": name,
        "first_graphs": got.graphs[:2],
        "replays": got.graphs.count("FULL"),
        "same_tokens": got.tokens == right.tokens,
        "error": error(got, right),
        **more,
    }


def ask(options: dict[str, Any]) -> None:
    """In the child: start the engine, and tell a row for each prompt and round.

    Args:
        options: of ``vllm.LLM``, beside :data:`OPTIONS`.
    """
    engine = Engine(CONFIG, **OPTIONS | options)
    engine.draw_weights()
    # The norm behind a recurrent layer too: vLLM's dummy of 0.001 would silence it.
    for name, weight in engine.runner.model.named_parameters():
        if weight.dim() == 1 and "linear_attn" in name and "norm" in name:
            weight.data.fill_(1.0)
    bench = Bench(engine)
    rows = []
    for kind, lengths in (("prompt", range(1, K + 4)), ("last chunk", range(STEP + K, STEP + K + 3))):
        for n in lengths:
            tokens = prompt(n, 100 + n)
            with bench.round("no graphs"):
                right = bench.after_a_stranger(tokens, STRANGERS[0])
            for name in ROUNDS:
                with bench.round(name):
                    one, two = (bench.after_a_stranger(tokens, stranger) for stranger in STRANGERS)
                    blocks = _blocks_written(bench, tokens) if kind == "prompt" else {}
                same = one.tokens == two.tokens
                rows.append(row(kind, n, name, one, right, same_after_another=same, **blocks))
    report([*rows, *_neighbours(bench)])


def _blocks_written(bench: Bench, tokens: Sequence[int]) -> dict[str, Any]:
    """Which state blocks a prompt writes, of its own and of others, in its first step."""
    layers = bench.runner.compilation_config.static_forward_context
    states = [layer.kv_cache[-1] for name, layer in layers.items() if name.endswith("linear_attn")]
    for state in states:
        state.fill_(UNTOUCHED)
    owned: list[list[int]] = []
    kept = bench.engine.scheduler.kv_cache_manager
    finish = bench.runner._update_states

    def look(plan: Any) -> Any:
        if not owned and plan.scheduled_new_reqs:
            owned.extend([*group] for group in kept.get_block_ids(plan.scheduled_new_reqs[0].req_id))
        return finish(plan)

    bench.runner._update_states = look
    try:
        bench.serve(Arrival("mine", tokens, 1))
    finally:
        del bench.runner._update_states
    changed = [(state != UNTOUCHED).flatten(1).any(1).nonzero().flatten().tolist() for state in states]
    touched = {block for blocks in changed for block in blocks}
    own = {block for group in owned for block in group}
    return {"own_blocks_written": len(touched & own), "others_blocks_written": len(touched - own)}


def _neighbours(bench: Bench) -> Iterator[dict[str, Any]]:
    """A prompt that joins the step of a running neighbour: what the neighbour gets."""
    long = Arrival("neighbour", prompt(30, 21), 48)
    with bench.round("no graphs"):
        bench.known = bench.serve(long)["neighbour"].tokens
    for n in range(K, K + 3):
        load = long, Arrival("mine", prompt(n, 500 + n), 8, at=6)
        with bench.round("no graphs"):
            right = bench.serve(*load)
        for name in ROUNDS:
            with bench.round(name):
                got = bench.serve(*load)
            yield row("running neighbour", n, name, got["neighbour"], right["neighbour"])
            yield row("beside a neighbour", n, name, got["mine"], right["mine"])


# --- The questions.

OWN, OTHER = "its own", "another's"
# What rounding may change of a log-probability; without the fault the recorded runs have 0.
ROUNDING = 0.01


def _serve(device: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        env = {"VLLM_PLUGINS": "staleproof", VARIABLE: PATCH, live.SWITCH: str(Path(folder, "off"))}
        rows: list[dict[str, Any]] = place.call(ask, {}, env=env, timeout_s=600).answer()
    return rows


ENGINE = Scene("a whole vLLM with graphs", _serve)
# What is asked about, tokens, and a round.
Subject = tuple[str, int, str]


def _missing(subject: Subject, device: str) -> str | None:
    return needs_cuda(subject, device) or place.unavailable_reason(cpu=False)


def _row(subject: Subject, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next(one for one in rows if (one["kind"], one["tokens"], one["round"]) == subject)


def answered(subject: Subject, device: str, rows: Sequence[dict[str, Any]]) -> Answer:
    """Is the answer to a prompt that of an engine without graphs? The neighbour's, if it is about one."""
    one = _row(subject, rows)
    numbers = {name: value for name, value in one.items() if name not in ("kind", "round")}
    numbers["evidence"] = place.evidence()
    right = one["same_tokens"] and one["error"] <= ROUNDING
    return good(OWN, **numbers) if right else bad(OTHER, **numbers)


def compare(subject: Subject, device: str, rows: Sequence[dict[str, Any]]) -> str | None:
    """With the patch steps that verify drafts must still replay the graph, with the right answer."""
    one = _row((NEIGHBOUR, K, "on"), rows)
    right = one["replays"] and one["same_tokens"]
    return None if right else f"drafts replay {one['replays']} times, same tokens: {one['same_tokens']}"


PROMPT, CHUNK, NEIGHBOUR = "prompt", "last chunk", "running neighbour"
LENGTHS = {PROMPT: range(1, K + 4), CHUNK: range(STEP + K, STEP + K + 3), NEIGHBOUR: range(K, K + 3)}
SHAPED = {PROMPT: K + 1, CHUNK: STEP + K + 1, NEIGHBOUR: K + 1}


def add(incident: Incident) -> None:
    """Add the questions to the incident."""
    more: dict[str, Any] = {"needs": _missing, "scene": ENGINE}
    variants = {f"{kind}, {n} tokens": (kind, n, "off") for kind, every in LENGTHS.items() for n in every}
    expect: dict[str, str | None] = {
        name: OTHER if SHAPED[kind] == n else OWN for name, (kind, n, _) in variants.items()
    }
    # The older fault of one token (#51562), which later releases do not have.
    expect[f"{PROMPT}, 1 tokens"] = None
    incident.question("whole vLLM, real graph", variants, expect=expect, **more)(answered)
    rounds = {kind: [(kind, n, name) for name in ROUNDS] for kind, n in SHAPED.items()}
    fixes = {f"{PATCH}, whole vLLM, {kind}": Fix(*three) for kind, three in rounds.items()}
    incident.fixes(answered, fixes, compare=compare, **more)
