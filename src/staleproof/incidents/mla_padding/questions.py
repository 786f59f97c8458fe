"""The questions of incident 1: kernels alone, the reproducer, served requests, and remedies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from staleproof.evidence.canary import plant, row_states
from staleproof.evidence.compare import too_far
from staleproof.evidence.rows import Fill, Verdict, bad_rows, judge_rows, pad_invariance, same_bits
from staleproof.grades import REPLICA, Evidence, Grade
from staleproof.incidents.mla_padding import broken, dcp, in_words, scene, whole
from staleproof.incidents.mla_padding.correct import wrong
from staleproof.incidents.mla_padding.pictures import ROWS
from staleproof.incidents.mla_padding.remedies import (
    SETUPS,
    SICK_STEP,
    WRONG_REMEDIES,
    ClearEmptyRows,
    Setup,
    StepVerdicts,
    ignores_out,
    serve,
    too_large,
)
from staleproof.incidents.mla_padding.scene import Batch, Engine, EngineConfig, Variant
from staleproof.kernels.adapter import Peer
from staleproof.kernels.mla import peers
from staleproof.kernels.vllm import vllm_fa3
from staleproof.lab import Answer, Fix, Incident, Scene, bad, failed, good, good_if, product
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.mla.decode import mla_decode
from staleproof.ops.reference.mla_decode import mla_decode as reference_decode

incident = Incident("mla_padding")


def rows(verdict: str, **numbers: Any) -> Answer:
    """A verdict about rows: only ``clean`` is good."""
    return good_if(verdict == Verdict.CLEAN, verdict, **numbers)


# --- How many requests are live.

COUNTS = {f"{live} of {ROWS} live": live for live in range(1, ROWS + 1)}


@incident.question(
    "live count", COUNTS, expect=dict.fromkeys(COUNTS, "leaked") | {f"{ROWS} of {ROWS} live": "clean"}
)
def live_count(live: int, device: str) -> Answer:
    """One step of the faulty kernel with some of 16 requests live. Does a live row become NaN?"""
    engine = Setup().engine("torch.max", device, batch=ROWS)
    engine.set_batch(Batch(live))
    return rows(engine.verdict())


# --- A kernel alone.

KERNELS: dict[str, broken.Kernel] = {
    **broken.KERNELS,
    "mla_decode": mla_decode,
    "vllm_fa3": vllm_fa3(),
    **peers(),
}
# Another package's kernel: any answer is recorded. That of vLLM's Triton kernel is known from its unmodified
# file on an H200.
ANY = dict.fromkeys(["vllm_fa3", *peers()])
# Kernels that must not mislead the question "empty row": live rows are wrong, or ``out`` is not used.
MISLEADING = {"three_times_too_large": too_large(3.0), "ignores_out": ignores_out}
LIVE_ROWS_WRONG = "live rows wrong"
# Worst first; if the rows of a batch differ, the worst state counts.
EMPTY_ROW_STATES = (LIVE_ROWS_WRONG, "unwritten", "partly written", "nan", "finite", "zero")


def unavailable(kernel: broken.Kernel, device: str) -> str | None:
    """Why another package's kernel cannot run here."""
    return kernel.unavailable_reason if isinstance(kernel, Peer) else None


def evidence(kernel: broken.Kernel, where: str = "") -> Evidence:
    """Whose kernel runs."""
    return Evidence(Grade.REAL, kernel.name + where) if isinstance(kernel, Peer) else REPLICA


def others_may_fail(ask: Callable[..., Answer]) -> Callable[..., Answer]:
    """If another package's kernel raises, the reason in one line, so that the others still run."""

    @wraps(ask)
    def answer(kernel: broken.Kernel, device: str) -> Answer:
        try:
            return ask(kernel, device)
        except Exception as error:
            if not isinstance(kernel, Peer):
                raise
            return failed(error)

    return answer


def _call(device: str, rows: int, live: int, tokens: int) -> scene.Call:
    return scene.make_call(device, rows=rows, live=live, tokens=tokens, dtype=scene.compared_dtype(device))


def _over_canaries(kernel: broken.Kernel, call: scene.Call) -> tuple[torch.Tensor, list[str]]:
    """A kernel's output, written over memory full of canaries, and the state of each row."""
    out = plant(call.q.new_empty(*call.q.shape[:-1], scene.KV_LORA_RANK), stage=5)
    given, _ = kernel(*call, softmax_scale=scene.SCALE, out=out)
    if given.data_ptr() == out.data_ptr():
        return given, row_states(given, stage=5)
    return _in_memory_of_its_own(kernel, call)


class _Filled(TorchDispatchMode):
    """Fills every new floating-point tensor that torch leaves uninitialised."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        unwritten = func.overloadpacket.__name__.removeprefix("new_").startswith("empty")
        return made.fill_(self.value) if unwritten and made.is_floating_point() else made


def _in_memory_of_its_own(kernel: broken.Kernel, call: scene.Call) -> tuple[torch.Tensor, list[str]]:
    """The same for a kernel that returns a new tensor: run over memory of NaN, then over memory of ones."""
    outputs = []
    for value in (torch.nan, 1.0):
        with _Filled(value):
            outputs.append(kernel(*call, softmax_scale=scene.SCALE)[0])
    over_nan, over_ones = outputs
    # Elements that equal the fill in both runs were never written.
    kept = (over_nan.isnan() & (over_ones == 1)).reshape(len(over_nan), -1)
    states = row_states(over_nan)
    for row, (some, every) in enumerate(zip(kept.any(1).tolist(), kept.all(1).tolist(), strict=True)):
        states[row] = "unwritten" if every else "partly written" if some else states[row]
    return over_ones, states


@incident.question(
    "empty row",
    KERNELS | MISLEADING,
    expect=ANY
    | {
        "empty_row_not_written": "unwritten",
        "zero_by_zero_written": "nan",
        "tail_masked_by_multiplication": "zero",
        "block_table_not_padded": "zero",
        "mla_decode": "zero",
        "vllm_triton": "nan",
        "three_times_too_large": LIVE_ROWS_WRONG,
        "ignores_out": "zero",
    },
    needs=unavailable,
    evidence=evidence,
)
@others_may_fail
def empty_row(kernel: broken.Kernel, device: str) -> Answer:
    """The output starts as canaries. What do the rows of requests without tokens hold after the call?

    If the canary survives, the row was not written; any other NaN was computed by the kernel. If live rows
    differ from the reference, the empty rows are not judged.
    """
    return _empty_rows(kernel, device, batch=8)


def _empty_rows(kernel: broken.Kernel, device: str, batch: int) -> Answer:
    call = _call(device, rows=batch, live=3, tokens=20)
    out, states = _over_canaries(kernel, call)
    live, padding = sorted({*states[:3]}), sorted({*states[3:]})
    worst = next(state for state in EMPTY_ROW_STATES if state in padding)
    want, _ = reference_decode(call.q.double(), *call[1:], softmax_scale=scene.SCALE)
    # It is not known how often another package rounds to bf16, so allow it twice as often as ours.
    times = 4 if isinstance(kernel, Peer) else 2
    budget = scene.decode_budget(call.q.dtype, tokens=20, times=times)
    far = too_far("live rows", out.view_as(want)[:3], want[:3], budget) or ""
    verdict = LIVE_ROWS_WRONG if far else worst
    numbers = {"padding_rows": " ".join(padding), "live_rows": " ".join(live)}
    return good_if(verdict == "zero", verdict, note=far, **numbers)


def _reads(kernel: broken.Kernel, call: scene.Call, memory: list[torch.Tensor]) -> Answer:
    """Whether a decode depends on ``memory``: filled with NaN, with zeros, then with other content."""

    def run(fill: Fill | None) -> torch.Tensor:
        for part in memory:
            part.fill_(float("nan")) if fill is None else fill(part)
        return kernel(*call, softmax_scale=scene.SCALE)[0]

    live = call.q.shape[0]
    verdict = judge_rows(run, live)
    if verdict == Verdict.CLEAN and not pad_invariance(run, live):
        return bad("wrong, finite")
    return rows(verdict)


@incident.question(
    "past seq_len",
    KERNELS,
    expect=ANY
    | {
        "empty_row_not_written": "clean",
        "zero_by_zero_written": "clean",
        "tail_masked_by_multiplication": "leaked",
        "block_table_not_padded": "leaked",
        "mla_decode": "clean",
        "vllm_triton": "clean",
    },
    needs=unavailable,
    evidence=evidence,
)
@others_may_fail
def past_seq_len(kernel: broken.Kernel, device: str) -> Answer:
    """NaN, zeros and other bytes past ``seq_len`` on a request's last page. Does its output change?"""
    call = _call(device, rows=3, live=3, tokens=84)
    return _reads(kernel, call, [call.kv_cache[page, 84 - 64 :] for page in call.block_table[:, 1].tolist()])


@incident.question(
    "unused table entry",
    KERNELS,
    expect=ANY
    | {
        "empty_row_not_written": "clean",
        "zero_by_zero_written": "clean",
        "tail_masked_by_multiplication": "clean",
        "block_table_not_padded": "leaked",
        "mla_decode": "clean",
        "vllm_triton": "clean",
    },
    needs=unavailable,
    evidence=evidence,
)
@others_may_fail
def unused_table_entry(kernel: broken.Kernel, device: str) -> Answer:
    """The same in a page that only an unused entry of the block table names. Does the output change?"""
    call = _call(device, rows=3, live=3, tokens=64)
    return _reads(kernel, call, [call.kv_cache[page] for page in call.block_table[:, 1].tolist()])


# --- The reproducer behind vLLM #37442.

# Question -> query tokens, padding rows, tokens of the one live request.
REPRODUCER = {
    "1 + 127, q_len 1": (1, 127, 512),
    "1 + 127, q_len 4": (4, 127, 512),
    "1 + 1023, q_len 1": (1, 1023, 1200),
}


def padding_rows(sizes: tuple[int, int, int], remedy: str, device: str) -> Answer:
    """The raw attention output starts as NaN. Do its padding rows still hold NaN after the step?

    ``amax`` over all rows is the number that the reproducer prints.
    """
    q_len, padding, tokens = sizes
    call = scene.make_call(device, rows=1 + padding, live=1, tokens=tokens, q_len=q_len)
    out = plant(call.q.new_empty(*call.q.shape[:-1], scene.KV_LORA_RANK))
    broken.empty_row_not_written(*call, softmax_scale=scene.SCALE, out=out)
    if remedy == "clear_empty_rows":
        clear_empty_rows(out, call.seq_lens)
    numbers = {"amax": float(out.abs().max()), "q_len": q_len, "padding": padding, "tokens": tokens}
    return bad("padding NaN", **numbers) if bad_rows(out)[1:].any() else good("no padding NaN", **numbers)


for name, sizes in REPRODUCER.items():
    incident.question(
        name,
        ["empty_row_not_written", "clear_empty_rows"],
        expect={"empty_row_not_written": "padding NaN", "clear_empty_rows": "no padding NaN"},
    )(partial(padding_rows, sizes))


# --- Served requests.

SERVED = {
    "empty_row_not_written": "leaked",
    "zero_by_zero_written": "leaked",
    "zeros_once_per_layer": "leaked",
    "zeros_before_zero_by_zero": "leaked",
    "one_shared_buffer": "leaked",
    "clears_nothing_q_len_4": "leaked",
    "pad_with_seq_len_1": "leaked",
    "masked_fill": "clean",
    "clear_empty_rows": "clean",
    "clear_empty_rows_q_len_4": "clean",
    "clear_after_zero_by_zero": "clean",
    "mla_decode": "clean",
    "quantize_live_rows": "clean",
}


@cache
def _steps(setup: Setup) -> Scene:
    """The served steps of one setup; two questions use them."""
    return Scene("serve, torch.max", partial(serve, setup, "torch.max"))


@incident.question("served, torch.max", SETUPS, expect=SERVED, scene=_steps)
def served(setup: Setup, device: str, steps: StepVerdicts | None = None) -> Answer:
    """Five steps on one captured graph, one request sick by itself. Which is the worst that a step does?"""
    return _worst(steps or serve(setup, "torch.max", device))


def _worst(steps: StepVerdicts) -> Answer:
    return rows(steps.verdict, steps=" ".join(steps.steps), sick_step=steps.steps[SICK_STEP])


@incident.question(
    "padding content",
    SETUPS,
    expect={name: "ignored" if verdict == "clean" else "decides" for name, verdict in SERVED.items()},
    scene=_steps,
)
def padding_content(setup: Setup, device: str, steps: StepVerdicts) -> Answer:
    """The same step over other padding. Do live rows keep their bits?"""
    return good("ignored") if steps.invariant else bad("decides")


# A maximum that drops NaN keeps it in padding. With one shared buffer the second layer overwrites the sick
# request's NaN with finite rows before the step is judged: it is hidden.
_FMAX = {name: "clean" if verdict == "clean" else "pad_only" for name, verdict in SERVED.items()}
_FMAX = _FMAX | {"one_shared_buffer": "hidden"}
# The remedy in the consumer has a quantiser of its own.
_QUANTISED = {name: setup for name, setup in SETUPS.items() if setup.quantise is None}


@incident.question("served, fmax", _QUANTISED, expect={name: _FMAX[name] for name in _QUANTISED})
def served_fmax(setup: Setup, device: str) -> Answer:
    """The same five steps with a maximum that drops NaN."""
    return _worst(serve(setup, "fmax", device))


def _not_served(setup: Setup, device: str) -> str | None:
    reason = unavailable(setup.kernel, device)
    return reason or (None if device == "cuda" else "served in bf16, which needs a CUDA device")


_VLLM = KERNELS["vllm_triton"]
incident.question(
    "served, torch.max",
    {"vllm_triton": Setup(_VLLM), "vllm_triton_cleared": Setup(_VLLM, ClearEmptyRows)},
    expect={"vllm_triton": "leaked", "vllm_triton_cleared": "clean"},
    needs=_not_served,
    evidence=lambda setup: evidence(setup.kernel, ", in our engine"),
)(served)

# --- Upstream's remedies where a condition that they rely on does not hold.

LIVE = 3


@incident.question(
    "growth after capture",
    {name: SETUPS[name] for name in ("zeros_once_per_layer", "clear_empty_rows", "mla_decode")},
    expect={
        "zeros_once_per_layer": "overwrites a tenant",
        "clear_empty_rows": "clean",
        "mla_decode": "clean",
    },
)
def growth_after_capture(setup: Setup, device: str, free_blocks: int = 0) -> Answer:
    """A kept buffer grows after the capture. Does a replay write into another tensor's memory?

    After the capture one larger eager batch comes. If a buffer grows for it, the old one is freed and
    given to another tensor, but the captured graph still writes to it.

    Args:
        setup: a kernel and its remedy.
        device: ``"cuda"``, where torch's allocator reuses freed blocks, or ``"cpu"``, where a list plays it.
        free_blocks: number of free blocks of the same size in torch's allocator before the growth.
    """
    freed: list[torch.Tensor] = []
    remedy = setup.remedy(setup.kernel)
    if isinstance(remedy, broken.ZerosOncePerLayer) and device == "cpu":
        remedy.free = freed.append
    config = setup.config(device)
    engine = Engine(Variant("grown", remedy, broken.QUANTISERS["torch.max"]), config)
    output = engine.taps[0]["attention"]
    shape, where = output.shape, output.data_ptr()
    # A serving engine keeps no reference to the stage outputs, so they can be freed.
    del output
    engine.taps = []
    idle = [torch.empty(shape, dtype=config.dtype, device=device) for _ in range(free_blocks)]
    del idle
    larger = 2 * config.batch
    q_shape = larger, config.q_len, config.heads, scene.LATENT
    remedy(
        scene.AttentionInputs(
            q=torch.zeros(q_shape, dtype=config.dtype, device=device),
            kv_cache=engine.kv_cache[0],
            block_table=engine.block_table.repeat(2, 1),
            seq_lens=torch.zeros(larger, dtype=torch.int32, device=device),
            num_decodes=larger,
            layer=0,
        )
    )
    tenant, before = (freed.pop() if freed else None), 0
    if device != "cpu":
        # The allocator may first hand out blocks of this size that were freed earlier.
        tenants: list[torch.Tensor] = []
        while tenant is None and len(tenants) < 64:
            tenants.append(torch.empty(shape, dtype=config.dtype, device=device))
            tenant = tenants[-1] if tenants[-1].data_ptr() == where else None
        before = len(tenants) - (tenant is not None)
    changed = 0
    if tenant is not None:
        plant(tenant, stage=9)
        engine.set_batch(Batch(3))
        engine.graph.replay()
        states = row_states(tenant.view(config.batch * config.q_len, -1), stage=9)
        changed = sum(state != "unwritten" for state in states)
    numbers = {"tenant_rows_overwritten": changed, "tensors_before_the_tenant": before}
    return bad("overwrites a tenant", **numbers) if changed else good("clean", **numbers)


def needs_an_allocator(free_blocks: int, device: str) -> str | None:
    """Why this device has no allocator history to test."""
    return "a list stands for the allocator on a CPU, and has no history" if device == "cpu" else None


@incident.question(
    "growth by history",
    {f"{n} other free blocks": n for n in (0, 1, 8)},
    expect="overwrites a tenant",
    needs=needs_an_allocator,
)
def growth_by_history(free_blocks: int, device: str) -> Answer:
    """The same if the allocator has other free blocks of this size, which it hands out first."""
    return growth_after_capture(SETUPS["zeros_once_per_layer"], device, free_blocks)


def _first_token_only(block: torch.Tensor) -> None:
    block.fill_(torch.nan)
    block[0] = 0


# The first kernel masks values past seq_len. The second multiplies them by 0, as CUTLASS SM100 MLA does
# according to its source (workbook/sm100.md, 2a and 2b).
TILES = {"masked tail": broken.empty_row_not_written, "over-read tile": broken.block_table_not_padded}
# What the null block holds.
FILLS: dict[str, Callable[[torch.Tensor], object]] = {
    "NaN": plant,
    "zeros": torch.Tensor.zero_,
    "other numbers": lambda block: block.copy_(torch.linspace(-4, 4, block.numel()).view_as(block)),
    "NaN after its first token": _first_token_only,
}


@cache
def _cleared(kernel: broken.Kernel, device: str) -> torch.Tensor:
    """Logits of the live rows of the same step, with its padding rows cleared."""
    engine = Setup(kernel, ClearEmptyRows).engine("torch.max", device)
    engine.set_batch(Batch(LIVE))
    return engine.replay()[engine.live]


@incident.question(
    "null block",
    product(TILES, FILLS),
    expect={
        "masked tail, NaN": "leaked",
        "masked tail, zeros": "clean",
        "masked tail, other numbers": "wrong, finite",
        "masked tail, NaN after its first token": "clean",
        "over-read tile, NaN": "leaked",
        "over-read tile, zeros": "clean",
        "over-read tile, other numbers": "wrong, finite",
        "over-read tile, NaN after its first token": "leaked",
    },
)
def null_block(case: tuple[str, str], device: str) -> Answer:
    """Padding rows get one token and read the null block. Do live rows change?

    Compared with the same step with cleared padding rows: other bits without NaN are "wrong, finite".
    """
    tile, fill = case
    engine = Setup(TILES[tile], broken.PadWithSeqLenOne).engine("torch.max", device)
    for kv_cache in engine.kv_cache:
        FILLS[fill](kv_cache[0])
    engine.set_batch(Batch(LIVE))
    verdict, live = engine.verdict(), engine.replay()[engine.live]
    moved = int((~same_bits(live, _cleared(TILES[tile], device))).sum())
    numbers = {"live_rows": len(live), "moved_rows": moved}
    if moved and verdict == Verdict.CLEAN:
        return bad("wrong, finite", **numbers)
    return rows(verdict, **numbers)


@incident.question(
    "num_decodes",
    {"the padded batch, as in a full graph": None, "the real count, set by hand": LIVE},
    expect={"the padded batch, as in a full graph": "leaked", "the real count, set by hand": "clean"},
)
def num_decodes(count: int | None, device: str) -> Answer:
    """A remedy that trusts ``num_decodes``. Does it clear, with the padded count or with the real one?"""
    remedy = broken.ClearsNothing(broken.empty_row_not_written)

    def attend(a: scene.AttentionInputs) -> torch.Tensor:
        return remedy(a if count is None else replace(a, num_decodes=count))

    config = SETUPS["clears_nothing_q_len_4"].config(device)
    engine = Engine(Variant("ClearsNothing", attend, broken.QUANTISERS["torch.max"]), config)
    engine.poison(plant)
    engine.set_batch(Batch(LIVE))
    return rows(engine.verdict())


# A kernel, and the query tokens a request.
BUFFERS: dict[str, tuple[broken.Kernel, int]] = {
    "empty_row_not_written, q_len 1": (broken.empty_row_not_written, 1),
    "empty_row_not_written, q_len 4": (broken.empty_row_not_written, 4),
    "mla_decode, q_len 4": (mla_decode, 4),
}


@incident.question(
    "3-D buffer",
    BUFFERS,
    expect={
        "empty_row_not_written, q_len 1": "stays inside",
        "empty_row_not_written, q_len 4": "writes past its end",
        "mla_decode, q_len 4": "refused",
    },
)
def three_d_buffer(case: tuple[broken.Kernel, int], device: str) -> Answer:
    """A buffer of (batch, heads, 512), a launch with ``q_len`` query tokens. Does it write past the buffer?

    The buffer of vLLM #37442 has three dimensions, the output of several query tokens four. A kernel
    that takes the sizes from the query and trusts the buffer writes ``q_len`` times its bytes. Here the
    buffer is the first part of a larger allocation with canaries, so no other tensor is overwritten.
    """
    (kernel, q_len), batch = case, 8
    call = scene.make_call(device, rows=batch, live=batch, tokens=20, q_len=q_len)
    slab = plant(call.q.new_empty(batch * (q_len + 1), call.q.shape[2], scene.KV_LORA_RANK), stage=6)
    try:
        kernel(*call, softmax_scale=scene.SCALE, out=slab[:batch])
    except ValueError as refusal:
        untouched = set(row_states(slab, stage=6)) == {"unwritten"}
        return good_if(untouched, "refused" if untouched else "refused too late", note=str(refusal))
    past = sum(state != "unwritten" for state in row_states(slab[batch:], stage=6))
    verdict = "writes past its end" if past else "stays inside"
    return good_if(not past, verdict, rows_past_the_end=past, rows=batch)


# --- Splits of the keys.

# Parts that a kernel splits the keys into: vLLM's takes the number, ours chooses from the shapes. Fewer
# under the interpreter, which is slow.
SPLITS = {"cuda": (1, 2, 4, 8, 16, 32, 64), "cpu": (1, 4)}
SPLIT_KERNELS: dict[str, Callable[[int], broken.Kernel]] = {
    "mla_decode": lambda splits: partial(mla_decode, num_kv_splits=splits),
    "vllm_triton": lambda splits: replace(peers()["vllm_triton"], num_kv_splits=splits),
}


@incident.question(
    "empty row, by splits",
    SPLIT_KERNELS,
    expect={"mla_decode": "zero", "vllm_triton": "nan"},
    needs=lambda kernel, device: unavailable(kernel(1), device),
    evidence=lambda kernel: evidence(kernel(1)),
)
def empty_row_by_splits(kernel: Callable[[int], broken.Kernel], device: str) -> Answer:
    """What an empty row holds with each number of splits; the worst counts."""
    states = [_empty_rows(kernel(splits), device, batch=4).verdict for splits in SPLITS[device]]
    worst = next(state for state in EMPTY_ROW_STATES if state in states)
    return good_if(worst == "zero", worst, splits=list(SPLITS[device]), states=states)


# --- What a leak needs.


@dataclass(frozen=True)
class Ingredients:
    """What a leak needs.

    Attributes:
        padding: the batch has padding rows.
        unwritten: the kernel leaves them unwritten.
        poison: their memory held NaN.
        mixes: the consumer takes one scale from all rows.
    """

    padding: bool = True
    unwritten: bool = True
    poison: bool = True
    mixes: bool = True


@incident.question(
    "ablation",
    {
        "all four": Ingredients(),
        "no padding rows": Ingredients(padding=False),
        "kernel writes every row": Ingredients(unwritten=False),
        "memory held no NaN": Ingredients(poison=False),
        "consumer keeps rows apart": Ingredients(mixes=False),
    },
    expect={
        "all four": "leaked",
        "no padding rows": "clean",
        "kernel writes every row": "clean",
        "memory held no NaN": "clean",
        "consumer keeps rows apart": "pad_only",
    },
)
def leak(parts: Ingredients, device: str) -> Answer:
    """One step with these ingredients. Does a live row become NaN?"""
    kernel = broken.empty_row_not_written if parts.unwritten else mla_decode
    quantise = broken.quantise_amax_torch_max if parts.mixes else None
    config = EngineConfig.for_device(device, batch=8)
    engine = Engine(Variant("ablation", broken.NoRemedy(kernel), quantise), config)
    engine.poison(plant if parts.poison else torch.Tensor.zero_)
    engine.set_batch(Batch(1 if parts.padding else config.batch))
    return rows(engine.verdict())


# --- Off / on / off: ours, the merged remedy, and wrong ones that nobody merged.

FIXES = {
    "clear_empty_rows": "fixed",
    "clear_empty_rows_q_len_4": "fixed",
    "clear_after_zero_by_zero": "fixed",
    "mla_decode": "fixed",
    "quantize_live_rows": "fixed",
    "zeros_once_per_layer": "not fixed",
    "nan_to_num": "not fixed",
    "clear_nan_rows": "not fixed",
    "clear_from_first_empty_row": "wrong",
    "clear_short_rows": "wrong",
    "mask_once": "not fixed",
    "one_per_cent_too_large": "wrong",
}


def off_on(setup: Setup) -> Fix:
    """The same kernel without the remedy of a setup, and with it."""
    return Fix(off=setup.without_fix, on=setup)


incident.fixes(
    served, {name: off_on((SETUPS | WRONG_REMEDIES)[name]) for name in FIXES}, compare=wrong, expect=FIXES
)

dcp.add(incident)
whole.add(incident)
in_words.add(incident)
