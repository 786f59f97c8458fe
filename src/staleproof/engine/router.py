"""Incident 3 in a real engine: a NaN in the correction bias of a router."""

from __future__ import annotations

from typing import Any

from staleproof.cases.answers import Answer, answer
from staleproof.engine.bench import FIX, Bench, Cell, Results, fix, three
from staleproof.engine.mla import FULL
from staleproof.engine.orders import Order

TWICE = "experts named twice"
# Routers with groups go to vLLM's grouped_topk, also with one group; others to topk_sigmoid or topk_softmax.
GROUPED, ONE_GROUP = "DeepSeek-V3 router, NaN bias", "DeepSeek-V3 router with one group, NaN bias"
SIGMOID, SOFTMAX = "MiniMax-M2 router, NaN bias", "Ernie 4.5 router, NaN bias"
# Names a folder with flashinfer-python, if that is not installed for all engines.
FLASHINFER = "STALEPROOF_FLASHINFER"
BEHIND = "MiniMax-M2 router, NaN bias, FlashInfer's fused MoE"
OPTIONS = {"moe_backend": "triton", "compilation_config": FULL}
MLA = {"attention_backend": "TRITON_MLA", **OPTIONS}
SPIES = ("attention", "logits", "routing")
PROBES: dict[str, dict[str, Any]] = {"start": {}, "nan_bias": {}, "same_choice": {}}
# Largest difference of a routing weight, of at most 1, between our kernels and vLLM's.
BUDGET = 2**-20
ONCE = {
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
        spies=("flashinfer_moe", *SPIES),
        # The module is compiled already, so that no compiler is needed.
        env={"VLLM_HAS_FLASHINFER_CUBIN": "1"},
        packages=FLASHINFER,
    ),
}
FIXED_ONES = {
    GROUPED: Order("deepseek_v3", PROBES, MLA, spies=SPIES),
    SIGMOID: Order("minimax_m2", PROBES, OPTIONS, spies=SPIES),
    SOFTMAX: Order("ernie4_5_moe", PROBES, OPTIONS, spies=SPIES),
}


def verdict(told: dict[str, Any]) -> str:
    """``duplicates`` if a router names an expert twice for a live row; ``nan`` if a token's logprob is NaN;
    ``first experts`` if every row of a step gets the experts 0, 1, 2, ..., whatever its scores are;
    ``always chosen`` if every live row of a step names the expert whose bias is NaN.

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
    return "always chosen" if any(usual < live <= now for usual, now in told["chosen"].values()) else "clean"


def twice(name: str) -> Any:
    """The judge of what a NaN bias does without the plugin."""

    def judge(results: Results) -> Answer:
        told = results.of(f"{name}, off" if name in FIXED_ONES else name, "nan_bias")
        sound = told["sound"]
        return answer(
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

    return judge


def fixed(name: str) -> Any:
    """The judge of off / on / off; right if with a sound bias the plugin chooses as vLLM's kernels do."""

    def judge(results: Results) -> Answer:
        states = [results.of(f"{name}, {state}", "nan_bias") for state in ("off", "on", "off again")]
        off, on, _ = states
        rows = [[tuple(row) for row in told["sound"]["sums"]] for told in states]
        noise, other = (
            sum(a != b for a, b in zip(rows[0], them, strict=True)) for them in (rows[2], rows[1])
        )
        tokens = sum(a != b for a, b in zip(off["sound"]["tokens"], on["sound"]["tokens"], strict=True))
        choice = {state: results.of(f"{name}, {state}", "same_choice") for state in ("off", "on")}
        far = [op for op, (other, error) in choice["on"].items() if other or error > BUDGET]
        wrong = f"{', '.join(far)}: not vLLM's choice with a sound bias" if far else None
        twice_on = {at: one["twice"] for at, one in on["spoilt"].items()}
        return fix(
            name,
            [verdict(told) for told in states],
            wrong,
            live_and_padding_rows_by_expert=twice_on,
            rows_that_choose_otherwise_and_error_of_weights=choice,
            requests_with_other_tokens_with_a_sound_bias=tokens,
            steps_with_other_logits_with_a_sound_bias=other,
            steps_with_other_logits_off_again=noise,
        )

    return judge


def _cells() -> dict[Cell, Any]:
    cells: dict[Cell, Any] = {(TWICE, name): twice(name) for name in (*ONCE, *FIXED_ONES)}
    return cells | {(FIX, name): fixed(name) for name in FIXED_ONES}


BENCH = Bench(
    "router",
    "incident 3: a NaN in the bias of routers with and without groups",
    {**ONCE, **{key: order for name, one in FIXED_ONES.items() for key, order in three(name, one).items()}},
    _cells(),
)
