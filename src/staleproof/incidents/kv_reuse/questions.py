"""The questions of incident 4: one function a question, each takes a variant, returns Findings."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from staleproof.evidence.rows import Fill, judge_rows
from staleproof.evidence.tenancy import STALE, WIPED
from staleproof.harness.findings import CLEAN, FIXED, NOT_FIXED, Finding, finding, not_run, off_on_off
from staleproof.incidents.kv_reuse import broken
from staleproof.incidents.kv_reuse.attention import Call, kernels
from staleproof.incidents.kv_reuse.bits import DTYPES, nan_share
from staleproof.incidents.kv_reuse.block_pool import BlockPool, Page, equalise, qwen3_5_397b
from staleproof.incidents.kv_reuse.hybrid import HEAD_DIM, KERNEL_BLOCK, FirstStep
from staleproof.incidents.kv_reuse.scene import (
    KERNEL,
    NAN,
    WRONG,
    Remedy,
    Scene,
    ZeroNewBlocks,
    brief,
    judge,
    no_zeroing,
    tenancies,
    trace_of,
)
from staleproof.incidents.kv_reuse.scheduler import ATTENTION, NewBlocks

INCIDENT = "kv_reuse"

MILLION = 1_000_000


def geometry() -> list[tuple[int, str, Page]]:
    """(tensor parallelism, KV dtype, page) of Qwen3.5-397B-A17B."""
    cases = [(tp, name) for tp in (1, 2, 4, 8) for name in ("e4m3", "bf16")]
    return [(tp, name, equalise(*qwen3_5_397b(tp, DTYPES[name]))) for tp, name in cases]


def bits_of_a_state(device: str) -> Iterator[Finding]:
    """How often the bits of a fp32 state are NaN in each cache dtype."""
    for name in DTYPES:
        for source in ("N(0, 1)", "bf16 values in fp32"):
            share = nan_share(source, name)
            none = source != "N(0, 1)" and DTYPES[name].itemsize == 2
            yield finding(
                INCIDENT,
                f"NaN in the bits of {source}",
                name,
                "some" if share.elements else "none",
                expected="none" if none else "some",
                elements=share.elements,
                infinite=share.infinite,
                words=share.words,
                head_vectors=share.heads,
            )


def _call(device: str, dtype: torch.dtype) -> Call:
    """Three rows of 20, 33 and 1 tokens in blocks of 16, whose last blocks are part empty."""
    generator = torch.Generator().manual_seed(2)
    cache = torch.randn(8, 2, KERNEL_BLOCK, 1, HEAD_DIM, generator=generator).to(dtype).to(device)
    q = torch.randn(3, 1, HEAD_DIM, generator=generator)
    table = torch.tensor([[1, 2, 0], [3, 4, 5], [6, 0, 0]], device=device)
    seq_lens = torch.tensor([20, 33, 1], device=device)
    compute = torch.bfloat16 if device == "cuda" else torch.float32
    return Call(q.to(device, compute), cache[:, 0], cache[:, 1], table, seq_lens)


def past_seq_len(name: str, device: str) -> Iterator[Finding]:
    """What one kernel makes of NaN behind the last token of a request, in K and in V."""
    kernel = kernels()[name]
    for side, expected in (("K", kernel.keys), ("V", kernel.values)):
        question = f"NaN in {side} past seq_len"
        if kernel.why_not is not None:
            yield not_run(INCIDENT, question, name, kernel.why_not)
            continue
        call = _call(device, kernel.dtypes[0])
        cache = call.keys if side == "K" else call.values
        tails = [cache[2, 4:], cache[5, 1:], cache[6, 1:]]

        def run(fill: Fill | None, call: Call = call, tails: list[torch.Tensor] = tails) -> torch.Tensor:
            for tail in tails:
                # All bits set are NaN in every dtype here, and fill_ is not implemented for all.
                if fill is None:
                    tail.view(torch.uint8).fill_(0xFF)
                else:
                    tail.zero_()
            return kernels()[name].attend(call)

        verdict = str(judge_rows(run, 3))
        yield finding(INCIDENT, question, name, verdict, expected=expected)


def _cached(prefix_caching: bool) -> str:
    return "with prefix caching" if prefix_caching else "without prefix caching"


def decays(name: str, device: str) -> Iterator[Finding]:
    """Nothing zeroed, one kernel, hundreds of steps: does the share of bad requests grow?"""
    kernel = kernels()[name]
    for prefix_caching in (True, False):
        question = f"served {_cached(prefix_caching)}"
        variant = f"no_zeroing, {name}"
        if kernel.why_not is not None:
            yield not_run(INCIDENT, question, variant, kernel.why_not)
            continue
        seen = judge(Scene(device, name, kernel.dtypes[0], prefix_caching))
        yield finding(
            INCIDENT,
            question,
            variant,
            seen.verdict,
            expected=CLEAN if kernel.values == CLEAN else NAN,
            **seen.numbers,
        )


class Policy(NamedTuple):
    """One way to choose what is zeroed, and what must come of it."""

    remedy: Remedy
    source: str
    with_caching: str
    without_caching: str


POLICIES: dict[str, Policy] = {
    "no_zeroing": Policy(no_zeroing, "vLLM 0.16.0", NAN, NAN),
    "zero_on_free": Policy(broken.ZeroOnFree, "vLLM #35219, first design", WRONG, CLEAN),
    "zero_hits_too": Policy(broken.ZeroHitsToo, "for comparison", WRONG, CLEAN),
    "zero_attention_only": Policy(broken.ZeroAttentionOnly, "vLLM #35219, merged", CLEAN, CLEAN),
    "zero_mamba_only": Policy(broken.ZeroMambaOnly, "half of vLLM #56524", NAN, NAN),
    "BlockZeroer": Policy(ZeroNewBlocks, "ours", CLEAN, CLEAN),
}


def policies(device: str) -> Iterator[Finding]:
    """Each way to zero, with prefix caching on and off; and the fixes off / on / off."""
    for prefix_caching in (True, False):
        scene = Scene(device, prefix_caching=prefix_caching)
        seen = {}
        for name, policy in POLICIES.items():
            seen[name] = judge(scene, policy.remedy)
            yield finding(
                INCIDENT,
                f"served {_cached(prefix_caching)}",
                name,
                seen[name].verdict,
                expected=policy.with_caching if prefix_caching else policy.without_caching,
                **seen[name].numbers,
            )
        off, again = seen["no_zeroing"].verdict, judge(scene).verdict
        for name in ("zero_on_free", "BlockZeroer"):
            on = seen[name].verdict
            yield off_on_off(
                INCIDENT,
                f"{name}, {_cached(prefix_caching)}",
                off=off,
                on=on,
                off_again=again,
                expected=FIXED if name == "BlockZeroer" or not prefix_caching else NOT_FIXED,
            )


def cured_late(device: str) -> Iterator[Finding]:
    """New blocks are zeroed in the last third only: what of the requests that begin in it?"""
    for prefix_caching in (True, False):
        scene = Scene(device, prefix_caching=prefix_caching)
        start = scene.steps * 2 // 3
        seen = judge(scene, partial(broken.ZeroFromStep, start=start))
        owners = trace_of(scene).owners
        later = {*owners[start:].unique().tolist()} - {*owners[:start].unique().tolist()}
        hurt = later & seen.corrupted
        log = tenancies(scene, seen.served)
        yield finding(
            INCIDENT,
            "requests after the cure",
            _cached(prefix_caching),
            NAN if hurt else CLEAN,
            expected=NAN if prefix_caching else CLEAN,
            corrupted=len(hurt),
            began=len(later),
            through_cached_blocks_alone=sum(all(s.via for s in log.explain(r)) for r in hurt),
        )


def layouts(device: str) -> Iterator[Finding]:
    """Off / on / off in every cache dtype, and with K and V outermost."""
    for name, dtype in DTYPES.items():
        for kv_outermost in (False, True):
            scene = brief(device, dtype=dtype, kv_outermost=kv_outermost)
            off, on, again = (
                judge(scene, remedy).verdict for remedy in (no_zeroing, ZeroNewBlocks, no_zeroing)
            )
            layout = "K/V outermost" if kv_outermost else "blocks outermost"
            yield off_on_off(INCIDENT, f"BlockZeroer, {name}, {layout}", off=off, on=on, off_again=again)


# Each ingredient taken away: the scene without it, and what must come out.
INGREDIENTS: dict[str, tuple[dict[str, Any], str]] = {
    "all four": ({}, NAN),
    "no block is used twice": ({"blocks": 400}, CLEAN),
    "states in memory of their own": ({"shared": False}, CLEAN),
    "keys and values in fp32": ({"dtype": torch.float32}, CLEAN),
    "kernel masks its loads": ({"kernel": "masked_loads"}, CLEAN),
}


def ablation(device: str) -> Iterator[Finding]:
    """The corruption with each of its four ingredients taken away."""
    for name, (without, expected) in INGREDIENTS.items():
        seen = judge(brief(device, **without))
        yield finding(
            INCIDENT,
            "ablation",
            name,
            seen.verdict,
            expected=expected,
            corrupted=seen.numbers["corrupted"],
            finished=seen.numbers["finished"],
        )


ZEROED: dict[str, Remedy] = {
    "none": no_zeroing,
    "attention": broken.ZeroAttentionOnly,
    "Mamba": broken.ZeroMambaOnly,
    "both": broken.ZeroBoth,
}


class StateType(NamedTuple):
    """What a block can hold, alone in being exposed; and what must come out by what is zeroed."""

    changes: Mapping[str, Any]
    expected: tuple[str, str, str, str]


# Where Mamba is asked about, the kernel masks its loads, so that attention cannot be to blame.
_MASKED = {"kernel": "masked_loads"}
STATE_TYPES: dict[str, StateType] = {
    "keys and values": StateType({}, (NAN, CLEAN, NAN, CLEAN)),
    "Mamba, written whole first": StateType(_MASKED, (CLEAN, CLEAN, CLEAN, CLEAN)),
    "Mamba, read first": StateType({**_MASKED, "first_step": FirstStep.LOADED}, (WRONG, WRONG, CLEAN, CLEAN)),
    "Mamba, partly written": StateType(
        {**_MASKED, "first_step": FirstStep.PARTLY_WRITTEN}, (WRONG, WRONG, CLEAN, CLEAN)
    ),
}


def which_blocks(device: str) -> Iterator[Finding]:
    """Attention blocks, Mamba blocks or both: the experiment on which two threads disagree.

    vLLM #54004 has it that Mamba blocks need no zeroing, since their state is overwritten; #56524
    that they do.
    """
    for name, kind in STATE_TYPES.items():
        for (zeroed, remedy), expected in zip(ZEROED.items(), kind.expected, strict=True):
            seen = judge(brief(device, **kind.changes), remedy)
            yield finding(
                INCIDENT,
                f"zeroed: {zeroed}",
                name,
                seen.verdict,
                expected=expected,
                corrupted=seen.numbers["corrupted"],
                finished=seen.numbers["finished"],
            )


def race(device: str) -> Iterator[Finding]:
    """Ids through one pinned buffer, with the host one step ahead of the device, in a full pool.

    A request gives its blocks back while its last step is in flight (so does vLLM; #45357 defers it
    in one case), and the stream keeps the order: until that step is done they are still read.
    """
    variants: dict[str, tuple[Remedy, int, str]] = {
        "one_pinned_buffer, in step": (broken.OnePinnedBuffer, 0, CLEAN),
        "one_pinned_buffer": (broken.OnePinnedBuffer, 1, NAN),
        "fresh_pinned_buffer": (broken.FreshPinnedBuffer, 1, CLEAN),
        "BlockZeroer": (ZeroNewBlocks, 1, CLEAN),
    }
    scene = brief(device, blocks=2 * brief(device).batch + 1)
    for name, (remedy, ahead, expected) in variants.items():
        seen = judge(scene, remedy, ahead=ahead, delay=_late(device) if ahead else _in_time)
        log = tenancies(scene, seen.served)
        suspects = [s for r in sorted(seen.corrupted) for s in log.explain(r) if not s.via]
        yield finding(
            INCIDENT,
            "host one step ahead",
            name,
            seen.verdict,
            expected=expected,
            corrupted=seen.numbers["corrupted"],
            finished=seen.numbers["finished"],
            live_blocks_wiped=sum(s.kind == WIPED for s in suspects),
            stale_blocks_kept=sum(s.kind == STALE for s in suspects),
        )


def _in_time() -> None:
    return None


def _late(device: str) -> Callable[[], None]:
    # Some ten milliseconds: the host needs two or three for all that it enqueues behind the copy,
    # and goes on to the next step meanwhile.
    return partial(torch.cuda._sleep, 20_000_000) if device == "cuda" else _in_time


@dataclass(frozen=True)
class HostMemory:
    """What a list of new ids costs after a number of blocks.

    Attributes:
        kept: ids in the list.
        list_bytes: size of the list.
        traced_bytes: what tracemalloc saw grow.
        gc_sees: whether ``gc.get_objects()`` holds the list.
    """

    kept: int
    list_bytes: int
    traced_bytes: int
    gc_sees: bool


def host_memory(new: NewBlocks, blocks: int, *, frozen: bool) -> HostMemory:
    """Record ``blocks`` allocations, 16 a step, and weigh the list.

    Args:
        new: where the ids go; taken after every step.
        blocks: allocations; a multiple of 16.
        frozen: call ``gc.freeze()`` first, as vLLM's engine does when it has started.
    """
    # The ids that a pool hands out are its own objects: the list holds references, not integers.
    ids = BlockPool(1025).allocate(1024)
    gc.collect()
    if frozen:
        gc.freeze()
    try:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for start in range(0, blocks, 16):
            new.record(ATTENTION, ids[start % 1024 :][:16])
            new.take()
        traced = tracemalloc.get_traced_memory()[0] - before
        kept = new.ids[ATTENTION]
        return HostMemory(len(kept), sys.getsizeof(kept), traced, any(o is kept for o in gc.get_objects()))
    finally:
        tracemalloc.stop()
        if frozen:
            gc.unfreeze()


def leak(device: str, blocks: int = MILLION) -> Iterator[Finding]:
    """What an id list costs on a model that nobody zeroes for, and who sees it."""
    taken = host_memory(NewBlocks(), blocks, frozen=False)
    never = host_memory(broken.NeverTaken(), blocks, frozen=True)
    seen = host_memory(broken.NeverTaken(), 16_000, frozen=False)
    for name, memory, expected in (("taken every step", taken, "flat"), ("never", never, "grows")):
        yield finding(
            INCIDENT,
            "host memory",
            name,
            "grows" if memory.kept else "flat",
            expected=expected,
            blocks=blocks,
            ids_kept=memory.kept,
            list_bytes=memory.list_bytes,
            traced_bytes=memory.traced_bytes,
        )
    for name, visible, expected in (
        ("gc.get_objects()", seen.gc_sees, "seen"),
        ("gc.get_objects() after gc.freeze()", never.gc_sees, "hidden"),
        ("tracemalloc after gc.freeze()", never.traced_bytes > never.list_bytes // 2, "seen"),
    ):
        yield finding(INCIDENT, "who sees the list", name, "seen" if visible else "hidden", expected=expected)


def run(device: str, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Every question of the incident, one finding at a time."""
    names = list(kernels())
    steps: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("bits of a state", partial(bits_of_a_state, device)),
        *((f"past seq_len, {name}", partial(past_seq_len, name, device)) for name in names),
        *((f"decay, {name}", partial(decays, name, device)) for name in names if name != KERNEL),
        ("what is zeroed when", partial(policies, device)),
        ("cured late", partial(cured_late, device)),
        ("dtypes and layouts", partial(layouts, device)),
        ("ablation", partial(ablation, device)),
        ("which blocks", partial(which_blocks, device)),
        ("host one step ahead", partial(race, device)),
        ("host memory", partial(leak, device)),
    ]
    for number, (name, ask) in enumerate(steps, 1):
        progress(f"{INCIDENT} {number}/{len(steps)}: {name}")
        yield from ask()
