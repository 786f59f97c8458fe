"""The cases of incident 4: what stale bytes of a reused block do, and which remedies work.

The table is at the end. Each function above it computes the result of one row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from staleproof.cases import case as cases
from staleproof.cases import children
from staleproof.cases.case import Reading, ablation, absent, each, fix, reading
from staleproof.cases.finding import ARITHMETIC, REPLICA, Evidence, Grade
from staleproof.cases.run import Table
from staleproof.cases.words import FIXED, NOT_FIXED
from staleproof.evidence.rows import Fill, judge_rows
from staleproof.evidence.tenancy import STALE, WIPED
from staleproof.incidents.kv_reuse import broken
from staleproof.incidents.kv_reuse.attention import HEAD_DIM, Call, kernels, masked_loads
from staleproof.incidents.kv_reuse.bits import DTYPES, nan_share
from staleproof.incidents.kv_reuse.correct import wrong_bytes
from staleproof.incidents.kv_reuse.host_memory import host_memory
from staleproof.incidents.kv_reuse.hybrid import KERNEL_BLOCK, FirstStep, corrupted, serve
from staleproof.incidents.kv_reuse.scene import (
    CLEAN,
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
from staleproof.ops.zero_blocks import BlockZeroer
from staleproof.vllm.sources import vllm_file

MILLION = 1_000_000


def nan_in_bits(source: str, dtype: str, device: str) -> Reading:
    """How often the bits of fp32 values are NaN when they are read as ``dtype``."""
    share = nan_share(source, dtype)
    return reading(
        "some" if share.elements else "none",
        elements=share.elements,
        infinite=share.infinite,
        words=share.words,
        head_vectors=share.heads,
    )


def part_full_blocks(device: str, dtype: torch.dtype) -> Call:
    """Three rows of 20, 33 and 1 tokens in blocks of 16, so that each last block is part empty."""
    generator = torch.Generator().manual_seed(2)
    cache_ = torch.randn(8, 2, KERNEL_BLOCK, 1, HEAD_DIM, generator=generator).to(dtype).to(device)
    q = torch.randn(3, 1, HEAD_DIM, generator=generator)
    table = torch.tensor([[1, 2, 0], [3, 4, 5], [6, 0, 0]], device=device)
    seq_lens = torch.tensor([20, 33, 1], device=device)
    compute = torch.bfloat16 if device == "cuda" else torch.float32
    return Call(q.to(device, compute), cache_[:, 0], cache_[:, 1], table, seq_lens)


def past_seq_len(side: str, name: str, device: str) -> str:
    """The effect of NaN after the last token of a request, in K or in V, on one kernel's output."""
    kernel = kernels()[name]
    call = part_full_blocks(device, kernel.dtypes[0])
    cache_ = call.keys if side == "K" else call.values
    tails = [cache_[2, 4:], cache_[5, 1:], cache_[6, 1:]]

    def run(fill: Fill | None) -> torch.Tensor:
        for tail in tails:
            # All bits set are NaN in every dtype used here; fill_ does not support all of them.
            tail.view(torch.uint8).fill_(0xFF if fill is None else 0)
        return kernel.attend(call)

    return judge_rows(run, 3)


def served(scene: Scene, device: str, remedy: Remedy = no_zeroing) -> Reading:
    """The outcome for the requests of a scene on this device."""
    seen = judge(replace(scene, device=device), remedy)
    return Reading(seen.verdict, seen.numbers)


def served_with(scene: Scene, remedy: Remedy, device: str) -> Reading:
    """:func:`served` with a remedy."""
    return served(scene, device, remedy)


def wrong_on(scene: Scene, remedy: Remedy, device: str) -> str | None:
    """:func:`wrong_bytes` on this device, for a remedy that zeroes new blocks."""
    return wrong_bytes(replace(scene, device=device), remedy, broken.both)


# How blocks are chosen for zeroing; then the verdicts with prefix caching and without.
POLICIES: dict[str, tuple[Remedy, str, str]] = {
    "no_zeroing": (no_zeroing, NAN, NAN),
    "zero_on_free": (partial(broken.Fill, pick=broken.freed), WRONG, CLEAN),
    "zero_on_change": (lambda buffers: broken.Fill(buffers, broken.OnChange()), CLEAN, CLEAN),
    "zero_hits_too": (partial(broken.Fill, pick=broken.hits_too), WRONG, CLEAN),
    "zero_attention_only": (partial(broken.Fill, pick=broken.attention_only), CLEAN, CLEAN),
    "zero_mamba_only": (partial(broken.Fill, pick=broken.mamba_only), NAN, NAN),
    "BlockZeroer": (ZeroNewBlocks, CLEAN, CLEAN),
}


def _policies(scene: Scene) -> cases.Scene:
    """One load served with each policy. The policies' verdicts and two off / on / off use these runs."""

    def tell(device: str) -> dict[str, Reading]:
        return {name: served(scene, device, remedy) for name, (remedy, *_) in POLICIES.items()}

    return cases.Scene(f"every policy, prefix caching {'on' if scene.prefix_caching else 'off'}", tell)


# Zeroing -> whether a request that is NaN by itself poisons others through reused blocks.
ISOLATED = {
    "no_zeroing": "leaked",
    "zero_on_change": "leaked",
    "zero_attention_only": "live_born",
    "BlockZeroer": "live_born",
}


def _sick(scene: Scene) -> cases.Scene:
    """A load in which every tenth request turns NaN by itself at its second token, with each policy."""

    def tell(device: str) -> dict[str, Reading]:
        here = replace(scene, device=device)
        base, model = trace_of(here), here.model()
        ill = (base.owners % 10 == 0) & (base.positions > 0)
        load = replace(base, tokens=base.tokens.masked_fill(ill, len(model.embedding)))
        model.embedding = torch.cat([model.embedding, model.embedding[:1] * torch.nan])
        apart = serve(load, model, here.buffers(base.clean_pages), clean=True)
        sick = {*base.owners[ill].tolist()}
        others = {*base.owners.unique().tolist()} - sick
        # Requests that hit a prefix which a sick request filled: they are NaN even on clean memory.
        by_prefix = {*base.owners[~apart.outputs.isfinite().all(-1)].tolist()} & others
        said = {}
        for policy in ISOLATED:
            buffers = here.buffers()
            served = serve(load, model, buffers, POLICIES[policy][0](buffers))
            poisoned = corrupted(load, served, apart) & others
            verdict = "leaked" if poisoned else "live_born"
            said[policy] = reading(
                verdict, sick=len(sick), poisoned=len(poisoned), by_prefix=len(by_prefix), others=len(others)
            )
        return said

    return cases.Scene(f"sick requests, prefix caching {'on' if scene.prefix_caching else 'off'}", tell)


AGAIN = "no_zeroing, again"


def in_turn(scene: Scene, policy: str, device: str, told: Mapping[str, Reading]) -> Reading:
    """The result of a policy; for :data:`AGAIN` the load is served once more without zeroing."""
    return served(scene, device) if policy == AGAIN else told[policy]


def cured_late(load: Scene, device: str) -> Reading:
    """Whether requests that begin in the last third are clean if new blocks are zeroed only from then on."""
    scene = replace(load, device=device)
    start = scene.steps * 2 // 3
    seen = judge(scene, partial(broken.ZeroFromStep, start=start))
    owners = trace_of(scene).owners
    later = {*owners[start:].unique().tolist()} - {*owners[:start].unique().tolist()}
    hurt = later & seen.corrupted
    log = tenancies(scene, seen.served)
    return reading(
        NAN if hurt else CLEAN,
        corrupted=len(hurt),
        began=len(later),
        through_cached_blocks_alone=sum(all(s.via for s in log.explain(r)) for r in hurt),
    )


# What a block can contain -> a scene in which only this can be stale. In the Mamba scenes the kernel masks
# its loads, so that attention cannot cause the fault. The device is a placeholder, here and in the table:
# `served` replaces it.
_MAMBA = brief("cpu", kernel="masked_loads")
STATE_TYPES = {
    "keys and values": brief("cpu"),
    "Mamba, written whole first": _MAMBA,
    "Mamba, read first": replace(_MAMBA, first_step=FirstStep.LOADED),
    "Mamba, partly written": replace(_MAMBA, first_step=FirstStep.PARTLY_WRITTEN),
}
# Which blocks are zeroed, and the verdict for each of STATE_TYPES. Whether Mamba blocks must be zeroed is
# disputed: vLLM #54004 says no, because their state is overwritten; #56524 says yes.
ZEROED: dict[str, tuple[Remedy, tuple[str, str, str, str]]] = {
    "none": (no_zeroing, (NAN, CLEAN, WRONG, WRONG)),
    "attention": (POLICIES["zero_attention_only"][0], (CLEAN, CLEAN, WRONG, WRONG)),
    "Mamba": (POLICIES["zero_mamba_only"][0], (NAN, CLEAN, CLEAN, CLEAN)),
    "both": (broken.Fill, (CLEAN, CLEAN, CLEAN, CLEAN)),
}
# The ingredients of the corruption: a change of the scene that removes one, and the verdict then.
INGREDIENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no block is used twice": ({"blocks": 400}, CLEAN),
    "states in memory of their own": ({"shared": False}, CLEAN),
    "keys and values in fp32": ({"dtype": torch.float32}, CLEAN),
    "kernel masks its loads": ({"kernel": "masked_loads"}, CLEAN),
}

# How the ids reach the device, and how many steps the host is ahead of it.
RACES: dict[str, tuple[Remedy, int]] = {
    "one_pinned_buffer, in step": (broken.OnePinnedBuffer, 0),
    "one_pinned_buffer": (broken.OnePinnedBuffer, 1),
    "fresh_pinned_buffer": (broken.FreshPinnedBuffer, 1),
    "BlockZeroer": (ZeroNewBlocks, 1),
}


def race(how: tuple[Remedy, int], device: str) -> Reading:
    """Ids are copied to the device while the host prepares the next step, in a full pool.

    A request frees its blocks while its last step, which reads them, is in flight (vLLM does so, too; #45357
    defers it in one case). That is correct as long as the stream keeps the order.
    """
    remedy, ahead = how
    scene = brief(device, blocks=2 * brief(device).batch + 1)
    seen = judge(scene, remedy, ahead=ahead, delay=_late(device) if ahead else _in_time)
    log = tenancies(scene, seen.served)
    suspects = [s for r in sorted(seen.corrupted) for s in log.explain(r) if not s.via]
    return reading(
        seen.verdict,
        **seen.numbers,
        live_blocks_wiped=sum(s.kind == WIPED for s in suspects),
        stale_blocks_kept=sum(s.kind == STALE for s in suspects),
    )


def _in_time() -> None:
    return None


def _late(device: str) -> Callable[[], None]:
    # About ten milliseconds. The host needs two or three to enqueue a step, so it is at the next step when
    # the copy of the ids begins.
    return partial(torch.cuda._sleep, 20_000_000) if device == "cuda" else _in_time


def grows(taken: bool, device: str) -> Reading:
    """The memory of the list of new ids on a model whose blocks are never zeroed."""
    memory = host_memory(MILLION, taken=taken, frozen=True)
    return reading(
        "grows" if memory.kept else "flat",
        blocks=MILLION,
        ids_kept=memory.kept,
        list_bytes=memory.list_bytes,
        traced_bytes=memory.traced_bytes,
    )


def slept(outside: bool, device: str) -> Reading:
    """Whether a zeroer zeroes exactly its blocks after vLLM's sleep mode has unmapped and remapped memory."""
    ended = children.call(_sleep_and_wake, outside, timeout_s=120)
    return ended.answer() if ended.told else reading("died", note=ended.last_line)


def _sleep_and_wake(outside: bool) -> Reading:
    try:
        cumem = importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator.get_instance()
    except (ImportError, AssertionError) as error:
        return absent(f"vLLM's cumem_allocator does not load: {error}")
    with cumem.use_memory_pool(tag="kv_cache"):
        caches = [torch.zeros(64, 4096, device="cuda") for _ in range(8)]
        inside = BlockZeroer(caches)
    zeroer = BlockZeroer(caches) if outside else inside
    cumem.sleep(offload_tags=())
    cumem.wake_up()
    for cache in caches:
        cache.fill_(1.0)
    try:
        zeroer.zero([3, 5])
        zero = torch.stack([(cache == 0).all(1) for cache in caches])
        right = bool(zero[:, [3, 5]].all()) and int(zero.sum()) == 16
    except torch.AcceleratorError as error:
        return reading("illegal memory access", note=str(error).partition("\n")[0])
    return reading("right" if right else "wrong, silent", zeroed=int(zero.sum()))


def _no_sleep_mode(outside: bool, device: str) -> str | None:
    if why := cases.needs_cuda(outside, device):
        return why
    return None if vllm_file("cumem_allocator.abi3.so") else "needs vLLM's cumem_allocator"


class Witness(NamedTuple):
    """A way to look for the growing list, whether garbage collection is frozen, and the expected result."""

    seen: str
    blocks: int
    frozen: bool
    expected: str


WITNESSES = {
    "gc.get_objects()": Witness("gc_sees", 16_000, False, "seen"),
    "gc.get_objects() after gc.freeze()": Witness("gc_sees", MILLION, True, "hidden"),
    "tracemalloc after gc.freeze()": Witness("tracemalloc_sees", MILLION, True, "seen"),
}


def who_sees(witness: Witness, device: str) -> str:
    """Whether this way of looking finds the growing list."""
    memory = host_memory(witness.blocks, taken=False, frozen=witness.frozen)
    return "seen" if getattr(memory, witness.seen) else "hidden"


def _no_kernel(name: str, device: str) -> str | None:
    return kernels()[name].unavailable_reason


def _evidence(name: str, where: str = "") -> Evidence:
    kernel = kernels()[name]
    return REPLICA if kernel.attend is masked_loads else Evidence(Grade.REAL, kernel.name + where)


LOADS = {"with prefix caching": Scene("cpu"), "without prefix caching": Scene("cpu", prefix_caching=False)}
# The expected result of zero_on_free: with prefix caching, a block that it zeroed may still be hit.
FREED = {"with prefix caching": NOT_FIXED, "without prefix caching": FIXED}


def _of_load(how: str, scene: Scene) -> list[cases.Case]:
    """Every policy on one load, and off / on / off for two of them."""
    runs = _policies(scene)
    caching = 1 if scene.prefix_caching else 2
    return [
        *each(
            f"served {how}",
            "answers",
            list(POLICIES),
            cases.from_scene,
            expect={name: policy[caching] for name, policy in POLICIES.items()},
            scene=runs,
        ),
        *(
            fix(
                f"{name}, {how}",
                "answers",
                off="no_zeroing",
                on=name,
                again=AGAIN,
                ask=partial(in_turn, scene),
                wrong=lambda policy, device, runs, ids=ids: wrong_bytes(
                    replace(scene, device=device), POLICIES[policy][0], ids
                ),
                expect=expect,
                scene=runs,
            )
            for name, ids, expect in (
                ("zero_on_free", broken.freed, FREED[how]),
                ("BlockZeroer", broken.both, FIXED),
            )
        ),
    ]


TABLE = Table(
    "kv_reuse",
    *(
        each(
            f"NaN in the bits of {source}",
            "bits",
            list(DTYPES),
            partial(nan_in_bits, source),
            expect=expect,
            evidence=ARITHMETIC,
        )
        for source, expect in (
            ("N(0, 1)", "some"),
            # Read as 16 bits, such a value gives a bf16 number and a low half, which is zero.
            ("bf16 values in fp32", lambda dtype: "none" if DTYPES[dtype].itemsize == 2 else "some"),
        )
    ),
    *(
        each(
            f"NaN in {side} past seq_len",
            "rows",
            list(kernels()),
            partial(past_seq_len, side),
            expect={
                name: kernel.keys if side == "K" else kernel.values for name, kernel in kernels().items()
            },
            needs=_no_kernel,
            evidence=_evidence,
        )
        for side in "KV"
    ),
    *(
        each(
            f"served {how}",
            "answers",
            {
                f"no_zeroing, {name}": replace(load, kernel=name, dtype=kernel.dtypes[0])
                for name, kernel in kernels().items()
                if name != KERNEL
            },
            served,
            expect=lambda scene: CLEAN if kernels()[scene.kernel].values == CLEAN else NAN,
            needs=lambda scene, device: _no_kernel(scene.kernel, device),
            evidence=lambda scene: _evidence(scene.kernel, ", in our engine"),
        )
        for how, load in LOADS.items()
    ),
    *(_of_load(how, load) for how, load in LOADS.items()),
    each(
        "requests after the cure",
        "answers",
        LOADS,
        cured_late,
        expect=lambda load: NAN if load.prefix_caching else CLEAN,
    ),
    *(
        fix(
            f"BlockZeroer, {name}, {'K/V' if kv_outermost else 'blocks'} outermost",
            "answers",
            off=no_zeroing,
            on=ZeroNewBlocks,
            ask=partial(served_with, brief("cpu", dtype=dtype, kv_outermost=kv_outermost)),
            wrong=partial(wrong_on, brief("cpu", dtype=dtype, kv_outermost=kv_outermost)),
        )
        for name, dtype in DTYPES.items()
        for kv_outermost in (False, True)
    ),
    ablation(brief("cpu"), "answers", without=INGREDIENTS, ask=served, expect=NAN),
    *(
        each(
            f"zeroed: {zeroed}",
            "answers",
            STATE_TYPES,
            partial(served, remedy=remedy),
            expect=dict(zip(STATE_TYPES, verdicts, strict=True)),
        )
        for zeroed, (remedy, verdicts) in ZEROED.items()
    ),
    each(
        "host one step ahead",
        "answers",
        RACES,
        race,
        expect=dict.fromkeys(RACES, CLEAN) | {"one_pinned_buffer": NAN},
    ),
    each(
        "host memory",
        "host memory",
        {"taken every step": True, "never": False},
        grows,
        expect=lambda taken: "flat" if taken else "grows",
    ),
    *(
        each(
            f"a request sick by itself, {how}",
            "rows",
            list(ISOLATED),
            cases.from_scene,
            expect=ISOLATED,
            scene=_sick(load),
        )
        for how, load in LOADS.items()
    ),
    each(
        "asleep and awake, vLLM's allocator",
        "access",
        {"tables outside the pool": True, "tables inside it": False},
        slept,
        expect=lambda outside: "right" if outside else None,
        reason="tables inside the pool: what the pages hold after the wake-up is the driver's",
        needs=_no_sleep_mode,
        evidence=Evidence(Grade.REAL, "vLLM's CuMemAllocator, our zeroer"),
    ),
    each("who sees the list", "block list", WITNESSES, who_sees, expect=lambda witness: witness.expected),
)
