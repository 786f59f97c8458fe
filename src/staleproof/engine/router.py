"""Incident 3 in a real engine: a NaN in the correction bias of a DeepSeek-V3 router."""

from __future__ import annotations

from typing import Any

from staleproof.engine.bench import FIX, Bench, Results, fix, three
from staleproof.engine.mla import FULL
from staleproof.engine.orders import Order
from staleproof.harness.answers import Answer, answer

NAME, TWICE = "DeepSeek-V3 router, NaN bias", "experts named twice"
ORDER = Order(
    "deepseek_v3",
    {"start": {}, "nan_bias": {}},
    {"attention_backend": "TRITON_MLA", "moe_backend": "triton", "compilation_config": FULL},
    spies=("attention", "logits", "routing"),
)


def _told(results: Results, state: str) -> dict[str, Any]:
    return results.of(f"{NAME}, {state}", "nan_bias")


def verdict(told: dict[str, Any]) -> str:
    """``duplicates`` if a router names an expert twice for a live row, ``nan`` if a token's logprob is NaN.

    >>> verdict({"spoilt": {"twice": [2, 0], "nan": 0}}), verdict({"spoilt": {"twice": [0, 5], "nan": 0}})
    ('duplicates', 'clean')
    """
    if told["spoilt"]["twice"][0]:
        return "duplicates"
    return "nan" if told["spoilt"]["nan"] else "clean"


def twice(results: Results) -> Answer:
    """What a NaN bias does without the plugin."""
    told = _told(results, "off")
    sound, spoilt = told["sound"], told["spoilt"]
    return answer(
        verdict(told),
        live_and_padding_rows_with_an_expert_twice=spoilt["twice"],
        with_a_sound_bias=sound["twice"],
        routers=told["routers"],
        nan_tokens=spoilt["nan"],
        same_tokens=spoilt["tokens"] == sound["tokens"],
    )


def fixed(results: Results) -> Answer:
    """Off / on / off; right if with a sound bias the plugin changes no bit of the live logits."""
    states = [_told(results, state) for state in ("off", "on", "off again")]
    off, on, _ = states
    wrong = None if off["sound"]["sums"] == on["sound"]["sums"] else "live logits differ with a sound bias"
    twice_on = on["spoilt"]["twice"]
    # None: whether vLLM's kernel repeats an expert here is what is asked.
    return fix(NAME, [verdict(told) for told in states], wrong, expected=None, twice_on=twice_on)


BENCH = Bench(
    "router",
    "incident 3: a NaN in the bias of a DeepSeek-V3 router",
    three(NAME, ORDER),
    {(TWICE, NAME): twice, (FIX, NAME): fixed},
)
