"""Incident 4 in a real engine: blocks that were state of linear attention, with vLLM's zeroing on and off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from staleproof.cases.answers import Answer, answer
from staleproof.engine.bench import FIX, Bench, Cell, Results, fix
from staleproof.engine.orders import Order
from staleproof.engine.tenants import fifths

REQUESTS = 100
BITS, POISONED, RACE = "zeroing off", "zeroing off, cache of NaN", "staging race"
QUIET, FILLED = (
    ("zeroing", "zeroing again", "no zeroing"),
    ("zeroing, cache of NaN", "no zeroing, cache of NaN"),
)
LATE = ("late copies", "late copies, no wait", "late copies, no wait again")
SHIPPED, UNGUARDED = "late copies", "late copies, no wait"
STAGING = "staging_race, late copies, no wait"
# Attention of torch over whole tiles: what the bench must notice.
CONTROL = "control: attention over whole tiles"
# With a state of fp32 vLLM gives FlashAttention blocks of 16 to 64 tokens, because its kernels read whole
# tiles of 128 (FlashAttention #1974). With another state the kernel's block is the scheduler's.
WIDE = "FLASH_ATTN, bf16 state, blocks of 1,024 tokens"
# What blocks hold, and no timing of kernels at the start: with the plugin the bits must be comparable.
SPIES = ("tenants", "first_configs")
KIMI = "Kimi-Linear, TRITON_MLA"
PLUGIN, KIMI_PLUGIN = "TRITON_ATTN, plugin", f"{KIMI}, plugin"
RECORDING = "mla_recording, Kimi-Linear"


def _order(backend: str, *states: str, model: str = "qwen3_next", **options: Any) -> Order:
    fixed = {
        "attention_backend": backend,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "enforce_eager": True,
        "moe_backend": "triton",
        "num_gpu_blocks_override": 24,
        "mamba_ssm_cache_dtype": "float32",
        "additional_config": {"gdn_prefill_backend": "triton"},
    }
    probes = {"start": {}, "hybrid": {"states": list(states), "requests": REQUESTS}}
    return Order(model, probes, {**fixed, **options}, spies=SPIES)


# vLLM chooses the size of a block itself, so that a block of keys and values is as large as a state.
ORDERS = {
    "TRITON_ATTN": _order("TRITON_ATTN", *QUIET, *LATE, *FILLED),
    "FLASH_ATTN": _order("FLASH_ATTN", *QUIET, *FILLED),
    WIDE: _order("FLASH_ATTN", *QUIET, *FILLED, block_size=1024, mamba_ssm_cache_dtype="bfloat16"),
    KIMI: _order("TRITON_MLA", *QUIET, *FILLED, model="kimi_linear"),
    CONTROL: replace(_order("TRITON_ATTN", *QUIET, *FILLED), spies=("whole_tiles", *SPIES)),
    PLUGIN: replace(_order("TRITON_ATTN", "zeroing", *LATE), patches="all"),
    KIMI_PLUGIN: replace(_order("TRITON_MLA", "zeroing", model="kimi_linear"), patches="all"),
}
BACKENDS = [name for name in ORDERS if name not in (PLUGIN, KIMI_PLUGIN)]


def changed(one: dict[str, Any], two: dict[str, Any], what: str) -> list[int]:
    """Requests whose tokens or logprobs differ between two states, by fifth of the uptime."""
    return fifths([a != b for a, b in zip(one[what], two[what], strict=True)])


def bits(name: str, cache: str = "") -> Any:
    """The judge of what a request notices without zeroing, by fifth of the uptime.

    Args:
        name: of the engine.
        cache: what the cache held before the first request, as the states name it.
    """

    def judge(results: Results) -> Answer:
        shipped, again = results.of(name, "zeroing"), results.of(name, "zeroing again")
        on, off = results.of(name, f"zeroing{cache}"), results.of(name, f"no zeroing{cache}")
        blocks = results.of(name, "cache")
        # The same requests served twice with zeroing: what repeats without any switch.
        noise = changed(shipped, again, "logprobs")
        nan, other = fifths(off["nan"]), changed(on, off, "logprobs")
        said = "nan" if sum(nan) else "other bits" if sum(other) > sum(noise) else "same bits"
        if sum(fifths(on["nan"])):
            said = "nan with zeroing too"
        elif sum(noise) and not sum(nan):
            said = "differ with it too"
        stale = off["blocks_by_fifth"]
        if said == "same bits" and not sum(stale["nonzero"]):
            said = "no stale block"
        found = answer(
            said,
            nan_by_fifth=nan,
            nan_with_zeroing_by_fifth=fifths(on["nan"]),
            changed_bits_by_fifth=other,
            changed_tokens_by_fifth=changed(on, off, "tokens"),
            changed_with_zeroing_again=noise,
            blocks_by_fifth=stale,
            blocks_with_zeroing_by_fifth=on["blocks_by_fifth"],
            requests=REQUESTS,
            blocks=blocks["blocks"],
            block_size=blocks["block_size"],
        )
        return replace(found, expected="nan") if (name, bool(cache)) == (CONTROL, True) else found

    return judge


def _unzeroed(results: Results, name: str, state: str) -> int:
    """Blocks that attention got with some byte not 0, although vLLM was to zero them."""
    return sum(results.of(name, state)["blocks_by_fifth"]["nonzero"])


def race(results: Results) -> Answer:
    """Does vLLM zero other blocks than it was asked to, if its copies of the ids start late?"""
    left = _unzeroed(results, "TRITON_ATTN", SHIPPED)
    return answer(
        "blocks not zeroed" if left else "all zeroed",
        blocks_not_zeroed=left,
        without_delay=_unzeroed(results, "TRITON_ATTN", "zeroing"),
        runner_waits=results.of("TRITON_ATTN", "cache")["waits"],
        asynchronous=results.of("TRITON_ATTN", "start")["async_scheduling"],
    )


def unguarded(results: Results) -> Answer:
    """The same without the runner's wait for the copies of its last step (``prepare_inputs_event``)."""
    left = _unzeroed(results, "TRITON_ATTN", UNGUARDED)
    served, shipped = (results.of("TRITON_ATTN", state) for state in (UNGUARDED, "zeroing"))
    given = sum(served["blocks_by_fifth"]["given"])
    other = changed(shipped, served, "tokens")
    said = "blocks not zeroed" if left else "all zeroed"
    return answer(said, blocks_not_zeroed=left, blocks_given=given, changed_tokens_by_fifth=other)


def _zeroed(variant: str, left: list[int], plain: str, plugin: str, results: Results) -> Answer:
    """Off / on / off of a patch of the zeroing, from the blocks that each state left as they were.

    Right if without a delay the plugin changes no bit of the served logprobs.
    """
    without, with_it = (results.of(name, "zeroing") for name in (plain, plugin))
    other = sum(changed(without, with_it, "logprobs"))
    wrong = f"logprobs of {other} requests differ without a delay" if other else None
    verdicts = ["blocks not zeroed" if blocks else "clean" for blocks in left]
    return fix(variant, verdicts, wrong, blocks_not_zeroed=left)


def staged(results: Results) -> Answer:
    """The patch of the staging race, with late copies and without the runner's wait."""
    off, again = (_unzeroed(results, "TRITON_ATTN", state) for state in LATE[1:])
    left = [off, _unzeroed(results, PLUGIN, UNGUARDED), again]
    return _zeroed(STAGING, left, "TRITON_ATTN", PLUGIN, results)


def recorded(results: Results) -> Answer:
    """The patch that records new blocks of MLA layers, so that vLLM's zeroing gets them."""
    off, again = (_unzeroed(results, KIMI, state) for state in QUIET[:2])
    left = [off, _unzeroed(results, KIMI_PLUGIN, "zeroing"), again]
    return _zeroed(RECORDING, left, KIMI, KIMI_PLUGIN, results)


def _cells() -> dict[Cell, Any]:
    cells: dict[Cell, Any] = {}
    for name in BACKENDS:
        cells[BITS, name] = bits(name)
        cells[POISONED, name] = bits(name, ", cache of NaN")
    cells[RACE, "late copies"] = race
    cells[RACE, UNGUARDED] = unguarded
    cells[FIX, STAGING] = staged
    cells[FIX, RECORDING] = recorded
    return cells


BENCH = Bench(
    "hybrid",
    "incident 4: hybrid engines with 24 blocks, zeroing on and off",
    ORDERS,
    _cells(),
    timeout_s=240.0,
    slow=True,
)
