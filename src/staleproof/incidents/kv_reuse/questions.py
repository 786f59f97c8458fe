"""The questions of incident 4: what stale bytes of a reused block do, and which remedies work."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from staleproof import child, lab
from staleproof.evidence.rows import Fill, Verdict, judge_rows
from staleproof.evidence.tenancy import STALE, WIPED
from staleproof.grades import ARITHMETIC, REPLICA, Evidence, Grade
from staleproof.incidents.kv_reuse import broken, cpu_engine, in_words
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
from staleproof.lab import Answer, Fix, Incident, bad, good, good_if, needs_cuda, not_run, open_
from staleproof.ops.zero_blocks import BlockZeroer
from staleproof.vllm.sources import vllm_file

incident = Incident("kv_reuse")
MILLION = 1_000_000
# In tables of scenes the device is a placeholder; `served` replaces it.
LOADS = {"with prefix caching": Scene("cpu"), "without prefix caching": Scene("cpu", prefix_caching=False)}

# --- Stale bits, and kernels that read past the end of a request.


def nan_in_bits(source: str, dtype: str, device: str) -> Answer:
    """How often are the bits of fp32 values NaN when they are read as ``dtype``?"""
    share = nan_share(source, dtype)
    return open_(
        "some" if share.elements else "none",
        elements=share.elements,
        infinite=share.infinite,
        words=share.words,
        head_vectors=share.heads,
    )


incident.question("NaN in the bits of N(0, 1)", list(DTYPES), expect="some", evidence=ARITHMETIC)(
    partial(nan_in_bits, "N(0, 1)")
)
# Read as 16 bits, such a value gives a bf16 number and a low half, which is zero.
incident.question(
    "NaN in the bits of bf16 values in fp32",
    list(DTYPES),
    expect={"e4m3": "some", "e5m2": "some", "fp16": "none", "bf16": "none"},
    evidence=ARITHMETIC,
)(partial(nan_in_bits, "bf16 values in fp32"))


def part_full_blocks(device: str, dtype: torch.dtype) -> Call:
    """Three rows of 20, 33 and 1 tokens in blocks of 16, so that each last block is part empty."""
    generator = torch.Generator().manual_seed(2)
    cache_ = torch.randn(8, 2, KERNEL_BLOCK, 1, HEAD_DIM, generator=generator).to(dtype).to(device)
    q = torch.randn(3, 1, HEAD_DIM, generator=generator)
    table = torch.tensor([[1, 2, 0], [3, 4, 5], [6, 0, 0]], device=device)
    seq_lens = torch.tensor([20, 33, 1], device=device)
    compute = torch.bfloat16 if device == "cuda" else torch.float32
    return Call(q.to(device, compute), cache_[:, 0], cache_[:, 1], table, seq_lens)


# What NaN past the end of a request does, as one H200 and one CPU showed.
PAST_IN_K = {
    "sdpa_math": "leaked",
    "sdpa_flash_cpu": "leaked",
    "sdpa_efficient": "leaked",
    "sdpa_cudnn": "leaked",
    "flex_attention": "clean",
    "flashinfer_fa2": "clean",
    "flashinfer_fa3": "clean",
    "masked_loads": "clean",
}
PAST_IN_V = PAST_IN_K | {"flex_attention": "leaked"}


def no_kernel(name: str, device: str) -> str | None:
    """Why a kernel cannot run here."""
    return kernels()[name].unavailable_reason


def evidence(name: str, where: str = "") -> Evidence:
    """Whose kernel runs."""
    kernel = kernels()[name]
    return REPLICA if kernel.attend is masked_loads else Evidence(Grade.REAL, kernel.name + where)


def past_seq_len(side: str, name: str, device: str) -> Answer:
    """NaN after the last token of a request, in K or in V. Does it reach the output?"""
    kernel = kernels()[name]
    call = part_full_blocks(device, kernel.dtypes[0])
    cache_ = call.keys if side == "K" else call.values
    tails = [cache_[2, 4:], cache_[5, 1:], cache_[6, 1:]]

    def run(fill: Fill | None) -> torch.Tensor:
        for tail in tails:
            # All bits set are NaN in every dtype used here; fill_ does not support all of them.
            tail.view(torch.uint8).fill_(0xFF if fill is None else 0)
        return kernel.attend(call)

    verdict = judge_rows(run, 3)
    return good_if(verdict == Verdict.CLEAN, verdict)


for side, past in {"K": PAST_IN_K, "V": PAST_IN_V}.items():
    incident.question(
        f"NaN in {side} past seq_len", list(kernels()), expect=past, needs=no_kernel, evidence=evidence
    )(partial(past_seq_len, side))


# --- Served requests.


def served(scene: Scene, device: str, remedy: Remedy = no_zeroing) -> Answer:
    """Serve the requests of a scene. Do they answer as on zeroed memory?"""
    outcome = judge(replace(scene, device=device), remedy)
    return good_if(outcome.verdict == CLEAN, outcome.verdict, **outcome.numbers)


# The default kernel is asked below, with each policy.
OTHERS = {name: kernel for name, kernel in kernels().items() if name != KERNEL}
for how, load in LOADS.items():
    incident.question(
        f"served {how}",
        {
            f"no_zeroing, {name}": replace(load, kernel=name, dtype=kernel.dtypes[0])
            for name, kernel in OTHERS.items()
        },
        expect={f"no_zeroing, {name}": CLEAN if PAST_IN_V[name] == CLEAN else NAN for name in OTHERS},
        needs=lambda scene, device: no_kernel(scene.kernel, device),
        evidence=lambda scene: evidence(scene.kernel, ", in our engine"),
    )(served)

# How blocks are chosen for zeroing.
POLICIES: dict[str, Remedy] = {
    "no_zeroing": no_zeroing,
    "zero_on_free": partial(broken.Fill, pick=broken.freed),
    "zero_on_change": lambda buffers: broken.Fill(buffers, broken.OnChange()),
    "zero_hits_too": partial(broken.Fill, pick=broken.hits_too),
    "zero_attention_only": partial(broken.Fill, pick=broken.attention_only),
    "zero_mamba_only": partial(broken.Fill, pick=broken.mamba_only),
    "BlockZeroer": ZeroNewBlocks,
}
WITHOUT_CACHING = {
    "no_zeroing": NAN,
    "zero_on_free": CLEAN,
    "zero_on_change": CLEAN,
    "zero_hits_too": CLEAN,
    "zero_attention_only": CLEAN,
    "zero_mamba_only": NAN,
    "BlockZeroer": CLEAN,
}
# A block that was zeroed when it was freed, or hit, may be a cached prefix.
WITH_CACHING = WITHOUT_CACHING | {"zero_on_free": WRONG, "zero_hits_too": WRONG}
SERVED = {"with prefix caching": WITH_CACHING, "without prefix caching": WITHOUT_CACHING}
AGAIN = "no_zeroing, again"


def every_policy(load: Scene) -> lab.Scene:
    """One load served with each policy. The policies' verdicts and two off / on / off use these runs."""

    def begin(device: str) -> dict[str, Answer]:
        return {name: served(load, device, remedy) for name, remedy in POLICIES.items()}

    return lab.Scene(f"every policy, prefix caching {'on' if load.prefix_caching else 'off'}", begin)


def with_policy(load: Scene, policy: str, device: str, answers: Mapping[str, Answer]) -> Answer:
    """One load with each way to choose blocks for zeroing. Do requests answer as on zeroed memory?

    For :data:`AGAIN` the load is served once more without zeroing.
    """
    return served(load, device) if policy == AGAIN else answers[policy]


def wrong_policy(
    load: Scene, wanted: broken.Pick, policy: str, device: str, answers: Mapping[str, Answer]
) -> str | None:
    """:func:`wrong_bytes` of a policy that must zero the wanted blocks."""
    return wrong_bytes(replace(load, device=device), POLICIES[policy], wanted)


for how, load in LOADS.items():
    runs, ask = every_policy(load), partial(with_policy, load)
    incident.question(f"served {how}", list(POLICIES), expect=SERVED[how], scene=runs)(ask)
    incident.fixes(
        ask,
        {f"zero_on_free, {how}": Fix(off="no_zeroing", on="zero_on_free", again=AGAIN)},
        compare=partial(wrong_policy, load, broken.freed),
        expect="not fixed" if load.prefix_caching else "fixed",
        scene=runs,
    )
    incident.fixes(
        ask,
        {f"BlockZeroer, {how}": Fix(off="no_zeroing", on="BlockZeroer", again=AGAIN)},
        compare=partial(wrong_policy, load, broken.both),
        scene=runs,
    )


@incident.question(
    "requests after the cure", LOADS, expect={"with prefix caching": NAN, "without prefix caching": CLEAN}
)
def cured_late(load: Scene, device: str) -> Answer:
    """New blocks are zeroed from the last third on. Are requests clean that begin after that?"""
    scene = replace(load, device=device)
    start = scene.steps * 2 // 3
    result = judge(scene, partial(broken.ZeroFromStep, start=start))
    owners = trace_of(scene).owners
    later = {*owners[start:].unique().tolist()} - {*owners[:start].unique().tolist()}
    hurt = later & result.corrupted
    log = tenancies(scene, result.served)
    return good_if(
        not hurt,
        NAN if hurt else CLEAN,
        corrupted=len(hurt),
        began=len(later),
        through_cached_blocks_alone=sum(all(s.via for s in log.explain(r)) for r in hurt),
    )


def served_with(scene: Scene, remedy: Remedy, device: str) -> Answer:
    """:func:`served` with a remedy."""
    return served(scene, device, remedy)


def wrong_on(scene: Scene, remedy: Remedy, device: str) -> str | None:
    """:func:`wrong_bytes` on this device, for a remedy that zeroes new blocks."""
    return wrong_bytes(replace(scene, device=device), remedy, broken.both)


for name, dtype in DTYPES.items():
    for kv_outermost in (False, True):
        layout = brief("cpu", dtype=dtype, kv_outermost=kv_outermost)
        incident.fixes(
            partial(served_with, layout),
            {
                f"BlockZeroer, {name}, {'K/V' if kv_outermost else 'blocks'} outermost": Fix(
                    off=no_zeroing, on=ZeroNewBlocks
                )
            },
            compare=partial(wrong_on, layout),
        )

# --- What the corruption needs.

incident.question(
    "ablation",
    {
        "all four": brief("cpu"),
        "no block is used twice": brief("cpu", blocks=400),
        "states in memory of their own": brief("cpu", shared=False),
        "keys and values in fp32": brief("cpu", dtype=torch.float32),
        "kernel masks its loads": brief("cpu", kernel="masked_loads"),
    },
    expect={
        "all four": NAN,
        "no block is used twice": CLEAN,
        "states in memory of their own": CLEAN,
        "keys and values in fp32": CLEAN,
        "kernel masks its loads": CLEAN,
    },
)(served)

# What a block can contain -> a scene in which only this can be stale. In the Mamba scenes the kernel masks
# its loads, so that attention cannot cause the fault.
_MAMBA = brief("cpu", kernel="masked_loads")
STATE_TYPES = {
    "keys and values": brief("cpu"),
    "Mamba, written whole first": _MAMBA,
    "Mamba, read first": replace(_MAMBA, first_step=FirstStep.LOADED),
    "Mamba, partly written": replace(_MAMBA, first_step=FirstStep.PARTLY_WRITTEN),
}
# Which blocks are zeroed, and the verdict for each of STATE_TYPES. Whether Mamba blocks must be zeroed is
# disputed: vLLM #54004 says no, because their state is overwritten; #56524 says yes.
ZEROED: dict[str, tuple[Remedy, dict[str, str]]] = {
    "none": (
        no_zeroing,
        {
            "keys and values": NAN,
            "Mamba, written whole first": CLEAN,
            "Mamba, read first": WRONG,
            "Mamba, partly written": WRONG,
        },
    ),
    "attention": (
        POLICIES["zero_attention_only"],
        {
            "keys and values": CLEAN,
            "Mamba, written whole first": CLEAN,
            "Mamba, read first": WRONG,
            "Mamba, partly written": WRONG,
        },
    ),
    "Mamba": (
        POLICIES["zero_mamba_only"],
        {
            "keys and values": NAN,
            "Mamba, written whole first": CLEAN,
            "Mamba, read first": CLEAN,
            "Mamba, partly written": CLEAN,
        },
    ),
    "both": (broken.Fill, dict.fromkeys(STATE_TYPES, CLEAN)),
}
for zeroed, (remedy, verdicts) in ZEROED.items():
    incident.question(f"zeroed: {zeroed}", STATE_TYPES, expect=verdicts)(partial(served, remedy=remedy))

# --- A host that runs ahead.

# How the ids reach the device, and how many steps the host is ahead of it.
RACES: dict[str, tuple[Remedy, int]] = {
    "one_pinned_buffer, in step": (broken.OnePinnedBuffer, 0),
    "one_pinned_buffer": (broken.OnePinnedBuffer, 1),
    "fresh_pinned_buffer": (broken.FreshPinnedBuffer, 1),
    "BlockZeroer": (ZeroNewBlocks, 1),
}


@incident.question(
    "host one step ahead",
    RACES,
    expect={
        "one_pinned_buffer, in step": CLEAN,
        "one_pinned_buffer": NAN,
        "fresh_pinned_buffer": CLEAN,
        "BlockZeroer": CLEAN,
    },
)
def race(how: tuple[Remedy, int], device: str) -> Answer:
    """Ids go to the device while the host prepares the next step, in a full pool. Are requests clean?

    A request frees its blocks while its last step, which reads them, is in flight (vLLM does so, too; #45357
    defers it in one case). That is correct as long as the stream keeps the order.
    """
    remedy, ahead = how
    scene = brief(device, blocks=2 * brief(device).batch + 1)
    result = judge(scene, remedy, ahead=ahead, delay=_late(device) if ahead else _in_time)
    log = tenancies(scene, result.served)
    suspects = [s for r in sorted(result.corrupted) for s in log.explain(r) if not s.via]
    return good_if(
        result.verdict == CLEAN,
        result.verdict,
        **result.numbers,
        live_blocks_wiped=sum(s.kind == WIPED for s in suspects),
        stale_blocks_kept=sum(s.kind == STALE for s in suspects),
    )


def _in_time() -> None:
    return None


def _late(device: str) -> Callable[[], None]:
    # About ten milliseconds. The host needs two or three to enqueue a step, so it is at the next step when
    # the copy of the ids begins.
    return partial(torch.cuda._sleep, 20_000_000) if device == "cuda" else _in_time


# --- The host's list of new ids, on a model whose blocks are never zeroed.


@incident.question(
    "host memory",
    {"taken every step": True, "never": False},
    expect={"taken every step": "flat", "never": "grows"},
)
def grows(taken: bool, device: str) -> Answer:
    """A million blocks are handed out. Does the list of new ids grow with them?"""
    memory = host_memory(MILLION, taken=taken, frozen=True)
    return good_if(
        not memory.kept,
        "grows" if memory.kept else "flat",
        blocks=MILLION,
        ids_kept=memory.kept,
        list_bytes=memory.list_bytes,
        traced_bytes=memory.traced_bytes,
    )


# --- A request that is NaN by itself.

# Zeroing -> whether a request that is NaN by itself poisons others through reused blocks.
ISOLATED = {
    "no_zeroing": "leaked",
    "zero_on_change": "leaked",
    "zero_attention_only": "live_born",
    "BlockZeroer": "live_born",
}


def sick_requests(scene: Scene) -> lab.Scene:
    """A load in which every tenth request turns NaN by itself at its second token, with each policy."""

    def begin(device: str) -> dict[str, Answer]:
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
        answers = {}
        for policy in ISOLATED:
            buffers = here.buffers()
            served = serve(load, model, buffers, POLICIES[policy](buffers))
            poisoned = corrupted(load, served, apart) & others
            answers[policy] = bad(
                "leaked" if poisoned else "live_born",
                sick=len(sick),
                poisoned=len(poisoned),
                by_prefix=len(by_prefix),
                others=len(others),
            )
        return answers

    return lab.Scene(f"sick requests, prefix caching {'on' if scene.prefix_caching else 'off'}", begin)


def sick_by_itself(policy: str, device: str, answers: Mapping[str, Answer]) -> Answer:
    """Every tenth request is NaN by itself. Does it poison others through blocks that they reuse?"""
    return answers[policy]


for how, load in LOADS.items():
    incident.question(
        f"a request sick by itself, {how}", list(ISOLATED), expect=ISOLATED, scene=sick_requests(load)
    )(sick_by_itself)

# --- vLLM's sleep mode.


def _no_sleep_mode(outside: bool, device: str) -> str | None:
    if reason := needs_cuda(outside, device):
        return reason
    return None if vllm_file("cumem_allocator.abi3.so") else "needs vLLM's cumem_allocator"


@incident.question(
    "asleep and awake, vLLM's allocator",
    {"tables outside the pool": True, "tables inside it": False},
    # Inside it: what the pages hold after the wake-up is the driver's.
    expect={"tables outside the pool": "right", "tables inside it": None},
    needs=_no_sleep_mode,
    evidence=Evidence(Grade.REAL, "vLLM's CuMemAllocator, our zeroer"),
)
def slept(outside: bool, device: str) -> Answer:
    """vLLM's sleep mode unmaps and remaps memory. Does a zeroer zero exactly its blocks afterwards?"""
    ended = child.call(_sleep_and_wake, outside, timeout_s=120)
    return ended.answer() if ended.answers else bad("died", note=ended.last_line)


def _sleep_and_wake(outside: bool) -> Answer:
    try:
        cumem = importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator.get_instance()
    except (ImportError, AssertionError) as error:
        return not_run(f"vLLM's cumem_allocator does not load: {error}")
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
        return bad("illegal memory access", note=str(error).partition("\n")[0])
    return good_if(right, "right" if right else "wrong, silent", zeroed=int(zero.sum()))


# --- Who sees the list that grows.


class Witness(NamedTuple):
    """A way to look for the growing list, and whether garbage collection is frozen."""

    way: str
    blocks: int
    frozen: bool


@incident.question(
    "who sees the list",
    {
        "gc.get_objects()": Witness("gc_sees", 16_000, frozen=False),
        "gc.get_objects() after gc.freeze()": Witness("gc_sees", MILLION, frozen=True),
        "tracemalloc after gc.freeze()": Witness("tracemalloc_sees", MILLION, frozen=True),
    },
    expect={
        "gc.get_objects()": "seen",
        "gc.get_objects() after gc.freeze()": "hidden",
        "tracemalloc after gc.freeze()": "seen",
    },
)
def who_sees(witness: Witness, device: str) -> Answer:
    """The list of new ids grows. Does this way of looking find it?"""
    memory = host_memory(witness.blocks, taken=False, frozen=witness.frozen)
    return good("seen") if getattr(memory, witness.way) else bad("hidden")


cpu_engine.add(incident)
in_words.add(incident)
