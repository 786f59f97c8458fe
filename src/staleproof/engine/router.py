"""Incident 3 in a real engine: a NaN in the correction bias of a router."""

from __future__ import annotations

from functools import partial
from typing import Any

from staleproof.cases.case import Case, Reading, reading
from staleproof.engine.bench import STATES, Bench, Results, cell, fix, three
from staleproof.engine.mla import FULL
from staleproof.engine.probes import start
from staleproof.engine.router_probes import nan_bias, same_choice
from staleproof.engine.session import Order, Probe
from staleproof.engine.spies import attention, logits, routing
from staleproof.engine.tenants import flashinfer_moe

TWICE, SOUND = "experts named twice", "live logits with a sound bias"
# Routers with groups go to vLLM's grouped_topk, also with one group; others to topk_sigmoid or topk_softmax.
GROUPED, ONE_GROUP = "DeepSeek-V3 router, NaN bias", "DeepSeek-V3 router with one group, NaN bias"
SIGMOID, SOFTMAX = "MiniMax-M2 router, NaN bias", "Ernie 4.5 router, NaN bias"
# Names a folder with flashinfer-python, if that is not installed for all engines.
FLASHINFER = "STALEPROOF_FLASHINFER"
BEHIND = "MiniMax-M2 router, NaN bias, FlashInfer's fused MoE"
OPTIONS = {"moe_backend": "triton", "compilation_config": FULL}
MLA = {"attention_backend": "TRITON_MLA", **OPTIONS}
SPIES = (attention, logits, routing)
PROBES: dict[Probe, dict[str, Any]] = {start: {}, nan_bias: {}, same_choice: {}}
# Largest difference of a routing weight, of at most 1, between our kernels and vLLM's.
BUDGET = 2**-20
UNPATCHED = {
    ONE_GROUP: Order("deepseek_v3", PROBES, MLA, {"n_group": 1, "topk_group": 1}, spies=SPIES),
    # Ten experts a token: FlashInfer then builds its map of rows in three steps, which repeated ids break.
    BEHIND: Order(
        "minimax_m2",
        PROBES,
        {
            "moe_backend": "flashinfer_cutlass",
            "compilation_config": FULL,
            "kernel_config": {"enable_flashinfer_autotune": False},
        },
        {"num_experts_per_tok": 10},
        spies=(flashinfer_moe, *SPIES),
        # The module is compiled already, so that no compiler is needed.
        env={"VLLM_HAS_FLASHINFER_CUBIN": "1"},
        packages=FLASHINFER,
    ),
}
PATCHED = {
    GROUPED: Order("deepseek_v3", PROBES, MLA, spies=SPIES),
    SIGMOID: Order("minimax_m2", PROBES, OPTIONS, spies=SPIES),
    SOFTMAX: Order("ernie4_5_moe", PROBES, OPTIONS, spies=SPIES),
}


def verdict(told: dict[str, Any]) -> str:
    """``duplicates`` if a router names an expert twice for a live row; ``nan`` if a token's logprob is NaN;
    ``first experts`` if every row of a step gets the experts 0, 1, 2, ..., whatever its scores are;
    ``always chosen`` if every live row of a step names the expert whose bias is NaN; else ``distinct``.

    >>> rounds = {5: {"twice": [0, 5], "nan": 0}, 8: {"twice": [2, 0], "nan": 0}}
    >>> told = {"sound": {"live": 3}, "routers": 3, "first": {"sound": [0, 64], 5: [0, 64]}, "spoilt": rounds}
    >>> told["chosen"] = {5: [1, 9]}
    >>> verdict(told), verdict({**told, "spoilt": {5: rounds[5]}})
    ('duplicates', 'always chosen')
    """
    rounds = told["spoilt"].values()
    if any(one["twice"][0] for one in rounds):
        return "duplicates"
    if any(one["nan"] for one in rounds):
        return "nan"
    sound, *spoilt = told["first"].values()
    if any(first == rows > 0 for first, rows in spoilt) and sound[0] < sound[1]:
        return "first experts"
    live = told["sound"]["live"] * told["routers"]
    return (
        "always chosen" if any(usual < live <= now for usual, now in told["chosen"].values()) else "distinct"
    )


def twice(name: str, results: Results) -> Reading:
    """What a NaN bias does without the plugin."""
    told = results.of(f"{name}, off" if name in PATCHED else name, "nan_bias")
    sound = told["sound"]
    return reading(
        verdict(told),
        live_and_padding_rows_by_expert={at: one["twice"] for at, one in told["spoilt"].items()},
        with_a_sound_bias=sound["twice"],
        nan_tokens_by_expert={at: one["nan"] for at, one in told["spoilt"].items()},
        rows_that_name_the_expert=told["chosen"],
        rows_with_the_first_experts=told["first"],
        requests_with_other_tokens={
            at: sum(a != b for a, b in zip(sound["tokens"], one["tokens"], strict=True))
            for at, one in told["spoilt"].items()
        },
        routers=told["routers"],
        kind=told["kind"],
        top_k=told["top_k"],
    )


def state(name: str, results: Results, which: str) -> Reading:
    """What a NaN bias does in one of the three engines."""
    told = results.of(f"{name}, {which}", "nan_bias")
    twice = {at: one["twice"] for at, one in told["spoilt"].items()}
    return reading(verdict(told), live_and_padding_rows_by_expert=twice)


def wrong(name: str, results: Results) -> str | None:
    """What the plugin chooses otherwise than vLLM's kernels do with a sound bias, in one line."""
    choice = results.of(f"{name}, on", "same_choice")
    far = [op for op, (other, error) in choice.items() if other or error > BUDGET]
    return f"{', '.join(far)}: not vLLM's choice with a sound bias" if far else None


def sound(name: str, results: Results) -> Reading:
    """What the plugin changes where the bias is sound."""
    states = [results.of(f"{name}, {which}", "nan_bias")["sound"] for which in STATES]
    off, on, again = ([tuple(row) for row in told["sums"]] for told in states)
    tokens = sum(a != b for a, b in zip(states[0]["tokens"], states[1]["tokens"], strict=True))
    other, noise = (sum(a != b for a, b in zip(off, them, strict=True)) for them in (on, again))
    choice = {which: results.of(f"{name}, {which}", "same_choice") for which in ("off", "on")}
    return reading(
        "same bits" if not other else "other bits",
        rows_that_choose_otherwise_and_error_of_weights=choice,
        requests_with_other_tokens=tokens,
        steps_with_other_logits=other,
        steps_with_other_logits_off_again=noise,
    )


def _cases() -> list[Case]:
    cases = [cell(TWICE, name, "experts", partial(twice, name)) for name in (*UNPATCHED, *PATCHED)]
    for name in PATCHED:
        cases.append(fix(name, "experts", partial(state, name), partial(wrong, name)))
        cases.append(cell(SOUND, name, "live logits", partial(sound, name)))
    return cases


BENCH = Bench(
    "router",
    {**UNPATCHED, **{key: order for name, one in PATCHED.items() for key, order in three(name, one).items()}},
    _cases(),
)
