"""Incident 4 in a real engine: blocks that were state of linear attention, with vLLM's zeroing on and off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from staleproof.cases.case import Case, Reading, reading
from staleproof.engine.bench import STATES, Bench, Results, cell, fix
from staleproof.engine.hybrid_probes import hybrid
from staleproof.engine.probes import start
from staleproof.engine.session import Order, Probe
from staleproof.engine.tenants import fifths, tenants, whole_tiles
from staleproof.engine.tuning import first_configs

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
SPIES = (tenants, first_configs)
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
    probes: dict[Probe, dict[str, Any]] = {start: {}, hybrid: {"states": list(states), "requests": REQUESTS}}
    return Order(model, probes, {**fixed, **options}, spies=SPIES)


# vLLM chooses the size of a block itself, so that a block of keys and values is as large as a state.
ORDERS = {
    "TRITON_ATTN": _order("TRITON_ATTN", *QUIET, *LATE, *FILLED),
    "FLASH_ATTN": _order("FLASH_ATTN", *QUIET, *FILLED),
    WIDE: _order("FLASH_ATTN", *QUIET, *FILLED, block_size=1024, mamba_ssm_cache_dtype="bfloat16"),
    KIMI: _order("TRITON_MLA", *QUIET, *FILLED, model="kimi_linear"),
    CONTROL: replace(_order("TRITON_ATTN", *QUIET, *FILLED), spies=(whole_tiles, *SPIES)),
    PLUGIN: replace(_order("TRITON_ATTN", "zeroing", *LATE), patches="all"),
    KIMI_PLUGIN: replace(_order("TRITON_MLA", "zeroing", model="kimi_linear"), patches="all"),
}
BACKENDS = [name for name in ORDERS if name not in (PLUGIN, KIMI_PLUGIN)]


def changed(one: dict[str, Any], two: dict[str, Any], what: str) -> list[int]:
    """Requests whose tokens or logprobs differ between two states, by fifth of the uptime."""
    return fifths([a != b for a, b in zip(one[what], two[what], strict=True)])


def bits(name: str, cache: str, results: Results) -> Reading:
    """What a request notices without zeroing, by fifth of the uptime.

    Args:
        name: of the engine.
        cache: what the cache held before the first request, as the states name it.
    """
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
    return reading(
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


def _unzeroed(results: Results, name: str, state: str) -> int:
    """Blocks that attention got with some byte not 0, although vLLM was to zero them."""
    return sum(results.of(name, state)["blocks_by_fifth"]["nonzero"])


def race(results: Results) -> Reading:
    """Does vLLM zero other blocks than it was asked to, if its copies of the ids start late?"""
    left = _unzeroed(results, "TRITON_ATTN", SHIPPED)
    return reading(
        "blocks not zeroed" if left else "all zeroed",
        blocks_not_zeroed=left,
        without_delay=_unzeroed(results, "TRITON_ATTN", "zeroing"),
        runner_waits=results.of("TRITON_ATTN", "cache")["waits"],
        asynchronous=results.of("TRITON_ATTN", "start")["async_scheduling"],
    )


def unguarded(results: Results) -> Reading:
    """The same without the runner's wait for the copies of its last step (``prepare_inputs_event``)."""
    left = _unzeroed(results, "TRITON_ATTN", UNGUARDED)
    served, shipped = (results.of("TRITON_ATTN", state) for state in (UNGUARDED, "zeroing"))
    given = sum(served["blocks_by_fifth"]["given"])
    other = changed(shipped, served, "tokens")
    said = "blocks not zeroed" if left else "all zeroed"
    return reading(said, blocks_not_zeroed=left, blocks_given=given, changed_tokens_by_fifth=other)


def _zeroed(plain: str, plugin: str, states: Sequence[str]) -> tuple[Any, Any]:
    """``state`` and ``wrong`` of a patch of the zeroing, from the blocks that each state left as they were.

    Right if without a delay the plugin changes no bit of the served logprobs.
    """
    where = dict(zip(STATES, zip((plain, plugin, plain), states, strict=True), strict=True))

    def state(results: Results, which: str) -> Reading:
        left = _unzeroed(results, *where[which])
        return reading("blocks not zeroed" if left else "all zeroed", blocks_not_zeroed=left)

    def wrong(results: Results) -> str | None:
        without, with_it = (results.of(name, "zeroing") for name in (plain, plugin))
        other = sum(changed(without, with_it, "logprobs"))
        return f"logprobs of {other} requests differ without a delay" if other else None

    return state, wrong


def _cases() -> Iterator[Case]:
    for name in BACKENDS:
        yield cell(BITS, name, "live logits", partial(bits, name, ""))
        expect = "nan" if name == CONTROL else None
        yield cell(POISONED, name, "live logits", partial(bits, name, ", cache of NaN"), expect=expect)
    yield cell(RACE, "late copies", "zeroing", race)
    yield cell(RACE, UNGUARDED, "zeroing", unguarded)
    # The patch of the staging race, with late copies and without the runner's wait.
    late = LATE[1], LATE[1], LATE[2]
    yield fix(STAGING, "zeroing", *_zeroed("TRITON_ATTN", PLUGIN, late))
    # The patch that records new blocks of MLA layers, so that vLLM's zeroing gets them.
    yield fix(RECORDING, "zeroing", *_zeroed(KIMI, KIMI_PLUGIN, ("zeroing", "zeroing", "zeroing again")))


BENCH = Bench("hybrid", ORDERS, [*_cases()], slow=True)
