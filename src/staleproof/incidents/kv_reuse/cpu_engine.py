"""Incident 4 in a whole vLLM on a CPU: blocks that were recurrent state, read behind a request's end.

A hybrid model (Qwen3-Next's shape, random weights) keeps recurrent state of fp32 and keys and values of bf16
in blocks of one pool. Read as bf16, old state holds NaN. The CPU kernel gives keys behind a request's end the
weight 0, and 0 times a NaN value is NaN: each element of the output. vLLM therefore zeroes new blocks, except
on a CPU in 0.19.0 to 0.24.0 (#46347), where the body of ``_zero_block_ids`` is ``pass``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from staleproof.child import report
from staleproof.lab import Answer, Fix, Incident, Scene, bad, good
from staleproof.vllm import live
from staleproof.vllm.plugin import VARIABLE, patches
from staleproof.vllm.sources import within
from staleproof.whole import place
from staleproof.whole.engine import Engine, states_of, switch
from staleproof.whole.load import Arrival
from staleproof.whole.shapes import QWEN3_NEXT
from staleproof.whole.spy import before, contents

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "num_gpu_blocks_override": 24,
    "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 1024, "enable_prefix_caching": False,
}  # fmt: skip
RELEASED, PLUGIN = "released", "plugin "
UNDRAINED, ZEROING = "undrained_ids", "cpu_block_zeroing"


def hybrid(states: Sequence[str], requests: int) -> None:
    """In the child: serve the same requests in each state, and tell whose answer has a NaN, or is wrong.

    Args:
        states: ``off``, ``again``: new blocks are not zeroed; ``on``: they are, as 0.25.0 to 0.33.0 do;
            ``released``: what this release does; ``plugin off``, ``plugin on``, ``plugin again``: the same
            with the plugin's patch out of service or in service.
        requests: how many.
    """
    import torch
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    engine = Engine(QWEN3_NEXT, **OPTIONS)
    engine.draw_weights()
    draw = torch.Generator().manual_seed(1)
    load = [
        Arrival(f"r{i}", torch.randint(2, 2047, (20 + i * 37 % 300,), generator=draw).tolist(), 4 + i % 13)
        for i in range(requests)
    ]
    right: dict[str, Any] = {}
    for one in load:
        engine.empty(fill=0.0)
        right |= engine.serve([one], ends=False)
    caches = attention(engine.runner)
    replies: dict[str, Any] = {"requests": requests, "nan_alone": _nan(right)}
    for state in states:
        found: list[Any] = []

        def look(
            runner: Any, blocks: Sequence[int], found: list[Any] = found, on: bool = state == "on"
        ) -> None:
            given = [cache[block] for block in blocks for cache in caches]
            found += map(contents, given)
            for block in given if on else ():
                block.zero_()

        engine.empty(fill=0.0)
        if state.startswith(PLUGIN):
            switch(off=() if state.endswith("on") else (ZEROING,))
        with before(CPUModelRunner, "_zero_block_ids", look, runs=state.startswith((RELEASED, PLUGIN))):
            served = engine.serve(load, ends=False)
        replies[state] = {
            "nan": _nan(served),
            "other_tokens": [name for name, one in served.items() if one.tokens != right[name].tokens],
            "blocks_given": len(found),
            "held_nan": sum(one.nan > 0 for one in found),
            "patch": states_of(ZEROING)[ZEROING],
        }
        report(replies)


def waiting(requests: int) -> dict[str, Any]:
    """In the child: serve a dense model, and count the block ids that wait to be zeroed."""
    engine = Engine(Path(sys.prefix, place.MODEL), dtype="bfloat16", max_model_len=64, block_size=16)
    kinds, counts = engine.scheduler.kv_cache_manager.coordinator.single_type_managers, []
    for at in range(requests):
        # No two prompts share a block, so each request allocates two of its own.
        engine.serve([Arrival("one", [100 + at] * 24, 4)])
        counts.append(sum(len(kind.new_block_ids) for kind in kinds))
    return {"waiting": counts, "patch": states_of(UNDRAINED)[UNDRAINED]}


def attention(runner: Any) -> list[Any]:
    """The caches of attention layers, each once; the first axis counts blocks."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    layers = runner.compilation_config.static_forward_context
    names = [
        name
        for group in runner.kv_cache_config.kv_cache_groups
        if isinstance(group.kv_cache_spec, FullAttentionSpec)
        for name in group.layer_names
    ]
    caches = {layers[name].kv_cache.data_ptr(): layers[name].kv_cache for name in names}
    return [*caches.values()]


def _nan(answers: Any) -> list[str]:
    return [name for name, one in answers.items() if one.nan]


# --- The questions.

REQUESTS = 12
# Releases whose CPU runner zeroes nothing, and that serve a hybrid model.
BARE = "0.21.0", "0.24.0"


def _served(states: Sequence[str], device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        env = {"VLLM_PLUGINS": ""}
        if RELEASED not in states:
            env = {"VLLM_PLUGINS": "staleproof", VARIABLE: ZEROING, live.SWITCH: str(Path(folder, "off"))}
        replies: dict[str, Any] = place.call(hybrid, states, REQUESTS, env=env, timeout_s=600).answer()
    return replies


def _waited(device: str) -> dict[str, Any]:
    return {
        state: place.call(
            waiting,
            6,
            env={"VLLM_PLUGINS": "staleproof", VARIABLE: UNDRAINED if state == "on" else "none"},
            timeout_s=300,
        ).answer()
        for state in ("off", "on", "again")
    }


HYBRID = Scene("a whole hybrid vLLM", partial(_served, ("off", "on", "again", RELEASED)))
PATCHED = Scene(
    "a whole hybrid vLLM, patched", partial(_served, [PLUGIN + s for s in ("off", "on", "again")])
)
DENSE = Scene("three whole vLLM", _waited)


def _missing(subject: str, device: str) -> str | None:
    return place.unavailable_reason()


def _missing_release(subject: str, device: str) -> str | None:
    """For questions about some releases: the subject says which."""
    if reason := place.unavailable_reason():
        return reason
    _, release = place.release(place.python())
    spans = {"undrained": patches()[UNDRAINED].versions[0], "bare": BARE, "zeroing": ("0.25.0", "0.33.0")}
    first, last = span = spans[subject.partition(" ")[0]]
    return None if within(release, span) else f"about {first} to {last}; vLLM {release} is beside"


def answers(state: str, device: str, replies: dict[str, Any]) -> Answer:
    """Requests of a hybrid model, each compared with its answer alone on a cache of zeros."""
    row = replies[state.removeprefix("bare ").removeprefix("zeroing ")]
    numbers = {**row, "requests": replies["requests"], "evidence": place.evidence()}
    if state in ("off", "on", "again"):
        numbers["note"] = "off: zeroing by our hook left out; on: by our hook, what 0.25.0 and later do"
    if row["nan"]:
        return bad("NaN", **numbers)
    return bad("other tokens", **numbers) if row["other_tokens"] else good("right", **numbers)


def compare(state: str, device: str, replies: dict[str, Any]) -> str | None:
    """Alone on a cache of zeros no answer may hold a NaN: those are the reference."""
    return f"NaN alone: {replies['nan_alone']}" if replies["nan_alone"] else None


def compare_patched(state: str, device: str, replies: dict[str, Any]) -> str | None:
    """The same, and the patch must be in place at the end."""
    status = replies[state.removeprefix("bare ")]["patch"]
    return compare(state, device, replies) if status == "in place" else f"the patch is {status}"


def drained(state: str, device: str, replies: dict[str, Any]) -> Answer:
    """How many block ids wait to be zeroed, of a model whose blocks nobody zeroes?"""
    row = replies[state.rpartition(" ")[2]]
    grows = row["waiting"][-1] > row["waiting"][0]
    return (bad if grows else good)("grows" if grows else "empty", **row, evidence=place.evidence())


def compare_drained(state: str, device: str, replies: dict[str, Any]) -> str | None:
    """The patch must be in place, and the list empty after every request."""
    row = replies[state.rpartition(" ")[2]]
    fine = row["patch"] == "in place" and not any(row["waiting"])
    return None if fine else f"{row['patch']}, waiting {row['waiting']}"


def add(incident: Incident) -> None:
    """Add the questions to the incident."""
    question = "whole vLLM on a CPU, hybrid"
    released = {f"as released, {BARE[0]} to {BARE[1]}": "bare", "as released, 0.25.0 and later": "zeroing"}
    incident.question(
        question,
        {name: f"{kind} {RELEASED}" for name, kind in released.items()},
        expect=dict(zip(released, ("NaN", "right"), strict=True)),
        needs=_missing_release,
        scene=HYBRID,
    )(answers)
    zeroing = Fix(off="off", on="on", again="again")
    more: dict[str, Any] = {"compare": compare, "needs": _missing, "scene": HYBRID}
    incident.fixes(answers, {"zero new blocks, whole vLLM on a CPU": zeroing}, **more)
    three = Fix(*(f"bare {PLUGIN}{state}" for state in ("off", "on", "again")))
    more = {"compare": compare_patched, "needs": _missing_release, "scene": PATCHED}
    incident.fixes(answers, {f"{ZEROING}, whole vLLM on a CPU": three}, **more)
    three = Fix(*(f"undrained {state}" for state in ("off", "on", "again")))
    more = {"compare": compare_drained, "needs": _missing_release, "scene": DENSE}
    incident.fixes(drained, {f"{UNDRAINED}, whole vLLM on a CPU": three}, **more)
