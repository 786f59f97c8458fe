"""Incident 4 in a real engine: blocks that were Mamba state, with vLLM's zeroing on and off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from staleproof.engine.bench import Bench, Cell, Results
from staleproof.engine.orders import Order
from staleproof.harness.answers import Answer, answer

REQUESTS, FIFTHS = 100, 5
BITS, POISONED, RACE = "zeroing off", "zeroing off, cache of NaN", "staging race"
BACKENDS = ("TRITON_ATTN", "FLASH_ATTN")
ORDER = Order(
    "qwen3_next",
    {"start": {}, "hybrid": {"requests": REQUESTS}},
    {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "enforce_eager": True,
        "moe_backend": "triton",
        "block_size": 1024,
        "num_gpu_blocks_override": 24,
        "mamba_ssm_cache_dtype": "float32",
        "additional_config": {"gdn_prefill_backend": "triton"},
    },
    spies=("staging",),
)


def _orders(backend: str) -> dict[str, Order]:
    options = {**ORDER.options, "attention_backend": backend}
    on = replace(ORDER, options=options)
    poisoned = {"start": {}, "hybrid": {"requests": REQUESTS, "poison": True}}
    return {
        f"{backend}, zeroing": on,
        f"{backend}, zeroing again": on,
        f"{backend}, no zeroing": replace(on, spies=("no_zeroing",)),
        f"{backend}, zeroing, cache of NaN": replace(on, probes=poisoned),
        f"{backend}, no zeroing, cache of NaN": replace(on, spies=("no_zeroing",), probes=poisoned),
    }


def fifths(flags: list[bool]) -> list[int]:
    """How many are set in each fifth.

    >>> fifths([True, False] + [False] * 7 + [True])
    [1, 0, 0, 0, 1]
    """
    each = len(flags) // FIFTHS
    return [sum(flags[i * each : (i + 1) * each]) for i in range(FIFTHS)]


def changed(one: dict[str, Any], two: dict[str, Any], what: str) -> list[int]:
    """Requests whose tokens or logprobs differ between two engines, by fifth of the uptime."""
    return fifths([a != b for a, b in zip(one[what], two[what], strict=True)])


def bits(backend: str, cache: str = "") -> Any:
    """The judge of what a request notices without zeroing, by fifth of the uptime.

    Args:
        backend: of the attention.
        cache: what the cache held before the first request, as the orders name it.
    """
    states = (f"zeroing{cache}", "zeroing again", f"no zeroing{cache}")

    def judge(results: Results) -> Answer:
        on, again, off = (results.of(f"{backend}, {state}", "hybrid") for state in states)
        noise = changed(on, again, "logprobs")
        nan, other = fifths(off["nan"]), changed(on, off, "logprobs")
        said = "nan" if sum(nan) else "other bits" if sum(other) > sum(noise) else "same bits"
        if sum(fifths(on["nan"])):
            said = "nan with zeroing too"
        elif sum(noise) and not sum(nan):
            said = "differ with it too"
        return answer(
            said,
            nan_by_fifth=nan,
            nan_with_zeroing_by_fifth=fifths(on["nan"]),
            changed_bits_by_fifth=other,
            changed_tokens_by_fifth=changed(on, off, "tokens"),
            changed_with_zeroing_again=noise,
            requests=REQUESTS,
            blocks=off["blocks"],
            block_size=off["block_size"],
        )

    return judge


def race(results: Results) -> Answer:
    """Did a zeroing kernel read other ids than its step asked for, under async scheduling?"""
    calls = other = 0
    for backend in BACKENDS:
        for state in ("zeroing", "zeroing again"):
            one = results.of(f"{backend}, {state}", "hybrid")["staged"]
            calls, other = calls + one[0], other + one[1]
    scheduled = results.of(f"{BACKENDS[0]}, zeroing", "start")["async_scheduling"]
    return answer(
        "other ids" if other else "same ids", calls=calls, with_other_ids=other, asynchronous=scheduled
    )


def _cells() -> dict[Cell, Any]:
    cells: dict[Cell, Any] = {}
    for backend in BACKENDS:
        cells[BITS, backend] = bits(backend)
        cells[POISONED, backend] = bits(backend, ", cache of NaN")
    cells[RACE, "asynchronous scheduling"] = race
    return cells


BENCH = Bench(
    "hybrid",
    "incident 4: a hybrid engine with 24 blocks, zeroing on and off",
    {name: order for backend in BACKENDS for name, order in _orders(backend).items()},
    _cells(),
)
