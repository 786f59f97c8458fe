"""A prompt of one token in a whole vLLM on a CPU: whose recurrent state does it start from?

A hybrid model (Qwen3-Next's shape, random weights) answers the same prompt on empty caches, and after three
other users' texts. Nothing of these may reach it. Up to 0.30.0 their state is still in the block (#51562).
Releases that zero no blocks on a CPU do so by the patch ``cpu_block_zeroing``: it is another fault.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from staleproof.child import report
from staleproof.lab import Answer, Fix, Incident, Scene, bad, good
from staleproof.vllm import live
from staleproof.vllm.plugin import VARIABLE
from staleproof.vllm.sources import within
from staleproof.whole import place
from staleproof.whole.engine import Engine, states_of, switch
from staleproof.whole.load import Arrival
from staleproof.whole.shapes import QWEN3_NEXT

PATCH, ROUNDS = "one_token_prompt", ("off", "on", "again")
OTHERS = "cpu_block_zeroing"
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "num_gpu_blocks_override": 9,
    "max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 1024, "enable_prefix_caching": False,
}  # fmt: skip
PROMPTS = {"one": [7], "two": [7, 8]}
# Releases whose builder takes one token for a decode, and that serve this model on a CPU.
AFFECTED, MENDED = ("0.21.0", "0.30.0"), ("0.31.0", "0.33.0")


def serve(states: Sequence[str]) -> None:
    """In the child: each prompt on empty caches and after others' texts, in each state of the patch.

    Args:
        states: ``off``, ``on``, ``again``.
    """
    import torch

    engine = Engine(QWEN3_NEXT, **OPTIONS)
    engine.draw_weights()
    with torch.no_grad():
        # A state that decays slowly and counts, as in trained models. A CPU keeps most weights packed, out of
        # reach at vLLM's dummy of 0.001, so the norm behind a recurrent layer makes up for them.
        for name, weight in engine.runner.model.named_parameters():
            if "conv1d" in name:
                weight.copy_((torch.randn(weight.shape) * 0.5).to(weight.dtype))
            elif name.endswith("A_log"):
                weight.fill_(-4.0)
            elif "norm" in name:
                weight.fill_(256.0 if "linear_attn" in name else 1.0)
    draw = torch.Generator().manual_seed(1)
    strangers = [torch.randint(2, 2047, (200,), generator=draw).tolist() for _ in range(3)]
    found: dict[str, Any] = {}
    for state in states:
        switch(off=() if state == "on" else (PATCH,))
        found[state] = {}
        for name, prompt in PROMPTS.items():
            engine.empty(fill=0.0)
            rows = [engine.serve([Arrival("mine", prompt, 6)], ends=False)["mine"]]
            for text in strangers:
                engine.serve([Arrival(f"other{i}", text, 6) for i in range(2)], ends=False)
                rows += [engine.serve([Arrival("mine", prompt, 6)], ends=False)["mine"]]
            first = [row.logprobs[0] for row in rows]
            # NaN, if one is.
            error = float((torch.tensor(first) - first[0]).abs().max())
            found[state][name] = {"first_logprob": first, "error": error}
        found[state]["patch"] = states_of(PATCH)[PATCH]
    report(found)


def _served(device: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        env = {
            "VLLM_PLUGINS": "staleproof",
            VARIABLE: f"{PATCH},{OTHERS}",
            live.SWITCH: str(Path(folder, "off")),
        }
        found: dict[str, Any] = place.call(serve, ROUNDS, env=env, timeout_s=600).answer()
    return found


SCENE = Scene("a whole hybrid vLLM, short prompts", _served)
# Releases, which prompt, which round.
Subject = tuple[tuple[str, str], str, str]


def _missing(subject: Subject, device: str) -> str | None:
    if reason := place.unavailable_reason():
        return reason
    (first, last), (_, release) = subject[0], place.release(place.python())
    return None if within(release, subject[0]) else f"about {first} to {last}; vLLM {release} is beside"


def answer(subject: Subject, device: str, found: Mapping[str, Any]) -> Answer:
    """Is the answer to a short prompt the same, to the bit, on empty caches and after other users' texts?"""
    _, prompt, state = subject
    row = {**found[state][prompt], "evidence": place.evidence()}
    return good("the same", **row) if row["error"] == 0 else bad("moves with others' texts", **row)


def compare(subject: Subject, device: str, found: Mapping[str, Any]) -> str | None:
    """The patch must be in place, and the first answer that on empty caches without it."""
    on, off = (found[state]["one"]["first_logprob"][0] for state in ("on", "off"))
    stands = found["on"]["patch"]
    return (
        None if stands == "in place" and on == off else f"patch {stands}, on empty caches {off}, with it {on}"
    )


def add(incident: Incident) -> None:
    """Add the questions to the incident."""
    more: dict[str, Any] = {"needs": _missing, "scene": SCENE}
    subjects = {
        f"{prompt} token{'s' * (prompt == 'two')}, {span[0]} to {span[1]}": (span, prompt, "off")
        for span in (AFFECTED, MENDED)
        for prompt in PROMPTS
    }
    moved = dict.fromkeys(subjects, "the same") | {"one token, 0.21.0 to 0.30.0": "moves with others' texts"}
    incident.question("whole vLLM on a CPU, short prompt", subjects, expect=moved, **more)(answer)
    three = Fix(*((AFFECTED, "one", state) for state in ROUNDS))
    incident.fixes(answer, {f"{PATCH}, whole vLLM on a CPU": three}, compare=compare, **more)
