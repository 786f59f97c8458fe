"""The questions of incident 1: one function a question; it takes a variant, returns Findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from staleproof.evidence.canary import plant, row_states
from staleproof.evidence.counters import Crossing, RowCounters
from staleproof.evidence.rows import Fill, Verdict, bad_rows, judge_rows, pad_invariance
from staleproof.harness.findings import Finding, finding, not_run, off_on_off
from staleproof.harness.peers import Peer, peers
from staleproof.incidents.mla_padding import broken
from staleproof.incidents.mla_padding.scene import (
    KV_LORA_RANK,
    LATENT,
    STAGES,
    AttentionInputs,
    Batch,
    Engine,
    EngineConfig,
    Variant,
)
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.fp8 import quantize_fp8_per_tensor
from staleproof.ops.mla_decode import mla_decode

INCIDENT = "mla_padding"
SCALE = 192**-0.5


class ClearEmptyRows(broken.NoRemedy):
    """The faulty kernel, then :func:`clear_empty_rows`: works behind any backend."""

    def __call__(self, a: AttentionInputs) -> torch.Tensor:
        """(batch, q_len, heads, 512)."""
        out = super().__call__(a)
        clear_empty_rows(out, a.seq_lens)
        return out


def quantise_live_rows(x: torch.Tensor, live_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`quantize_fp8_per_tensor` in the engine's quantiser slot."""
    return quantize_fp8_per_tensor(x, live_rows=live_rows)


@dataclass(frozen=True)
class Setup:
    """One row of the verdict matrix: a kernel, what is done about it, and what must come out.

    Attributes:
        kernel: the MLA decode.
        remedy: wraps the kernel into the engine's attention slot.
        quantise: replaces the engine's quantiser, for fixes at the consumer.
        served: verdict over the served steps with ``torch.max`` amax, and with fmax amax.
        invariant: whether padding content must leave live rows alone (``torch.max`` amax).
        layers: layers of the engine; two where layers can disturb each other.
        q_len: query tokens a request.
        fix: whether it is one of ours, verified off / on / off.
    """

    kernel: broken.Kernel
    remedy: Callable[[broken.Kernel], Callable[[AttentionInputs], torch.Tensor]]
    served: tuple[Verdict, Verdict]
    invariant: bool
    quantise: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    layers: int = 1
    q_len: int = 1
    fix: bool = False


_LEAKS = (Verdict.LEAKED, Verdict.PAD_ONLY)
_CLEAN = (Verdict.CLEAN, Verdict.CLEAN)

SETUPS: dict[str, Setup] = {
    "empty_row_not_written": Setup(broken.empty_row_not_written, broken.NoRemedy, _LEAKS, invariant=False),
    "zero_by_zero_written": Setup(broken.zero_by_zero_written, broken.NoRemedy, _LEAKS, invariant=False),
    "zeros_once_per_layer": Setup(
        broken.empty_row_not_written, broken.ZerosOncePerLayer, _LEAKS, invariant=False
    ),
    "zeros_before_zero_by_zero": Setup(
        broken.zero_by_zero_written, broken.ZerosOncePerLayer, _LEAKS, invariant=False
    ),
    # Under fmax the second layer's finite rows overwrite the sick request's NaN in the one buffer
    # before anyone looks; finite stale rows of another layer are what is left.
    "one_shared_buffer": Setup(
        broken.empty_row_not_written,
        broken.OneSharedBuffer,
        (Verdict.LEAKED, Verdict.CLEAN),
        invariant=False,
        layers=2,
    ),
    "clears_nothing_q_len_4": Setup(
        broken.empty_row_not_written, broken.ClearsNothing, _LEAKS, invariant=False, q_len=4
    ),
    "pad_with_seq_len_1": Setup(
        broken.empty_row_not_written, broken.PadWithSeqLenOne, _LEAKS, invariant=False
    ),
    "masked_fill": Setup(broken.empty_row_not_written, broken.MaskedFill, _CLEAN, invariant=True),
    "clear_empty_rows": Setup(broken.empty_row_not_written, ClearEmptyRows, _CLEAN, invariant=True, fix=True),
    "clear_empty_rows_q_len_4": Setup(
        broken.empty_row_not_written, ClearEmptyRows, _CLEAN, invariant=True, q_len=4, fix=True
    ),
    "clear_after_zero_by_zero": Setup(
        broken.zero_by_zero_written, ClearEmptyRows, _CLEAN, invariant=True, fix=True
    ),
    "mla_decode": Setup(mla_decode, broken.NoRemedy, _CLEAN, invariant=True, fix=True),
    "quantize_live_rows": Setup(
        broken.empty_row_not_written,
        broken.NoRemedy,
        _CLEAN,
        invariant=True,
        quantise=quantise_live_rows,
        fix=True,
    ),
}

# Live counts over replays of one captured graph, up, down and up again; None is the full batch. In
# one step the last request is sick by itself: what it leaves behind is the next step's padding.
LIVE_COUNTS = (1, None, 3, None, 3)
SICK_STEP = 3
_SEVERITY = [Verdict.CLEAN, Verdict.PAD_ONLY, Verdict.LEAKED, Verdict.LIVE_BORN]


def config_for(device: str, setup: Setup, **changes: object) -> EngineConfig:
    """Engine sizes for one setup on one device."""
    return EngineConfig.for_device(device, **{"layers": setup.layers, "q_len": setup.q_len, **changes})


def engine_for(
    name: str, setup: Setup, quantiser: str, config: EngineConfig, counters: RowCounters | None = None
) -> Engine:
    """A captured engine whose unowned memory holds canaries: the state before the first request."""
    remedy = setup.remedy(setup.kernel)
    variant = Variant(
        name,
        remedy,
        setup.quantise or broken.QUANTISERS.get(quantiser),
        judged_from="quantise" if setup.quantise else "attention",
        keeps_memory=isinstance(remedy, broken.ZerosOncePerLayer),
    )
    engine = Engine(variant, config, counters)
    engine.poison(plant)
    return engine


@dataclass(frozen=True)
class Served:
    """What a sequence of served steps showed.

    Attributes:
        steps: one verdict a step; the sick request's step is ``live_born`` for everybody.
        invariant: whether padding content left the live rows of the third step bit-identical.
    """

    steps: tuple[Verdict, ...]
    invariant: bool

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the steps without a sick request."""
        healthy = [v for i, v in enumerate(self.steps) if i != SICK_STEP]
        return max(healthy, key=_SEVERITY.index)


def serve(name: str, setup: Setup, quantiser: str, device: str) -> Served:
    """Serve :data:`LIVE_COUNTS` on one captured graph and judge each step."""
    engine = engine_for(name, setup, quantiser, config_for(device, setup))
    steps, invariant = [], True
    for step, count in enumerate(LIVE_COUNTS):
        live = count or engine.config.batch
        engine.set_batch(Batch(live, poisoned_row=live - 1 if step == SICK_STEP else None))
        steps.append(engine.verdict())
        if step == 2:
            invariant = engine.invariant()
    return Served(tuple(steps), invariant)


def served(name: str, device: str) -> Iterator[Finding]:
    """What requests see when this variant serves, under both kinds of amax."""
    setup = SETUPS[name]
    quantisers = [("live rows", 0)] if setup.quantise else [("torch.max", 0), ("fmax", 1)]
    for quantiser, index in quantisers:
        seen = serve(name, setup, quantiser, device)
        question = "served, torch.max" if index == 0 else "served, fmax"
        steps = " ".join(seen.steps)
        yield finding(
            INCIDENT,
            question,
            name,
            seen.verdict,
            expected=setup.served[index],
            steps=steps,
            sick_step=seen.steps[SICK_STEP],
        )
        if index == 0:
            yield finding(
                INCIDENT,
                "padding content",
                name,
                "ignored" if seen.invariant else "decides",
                expected="ignored" if setup.invariant else "decides",
            )


def verify(name: str, device: str) -> Finding:
    """Off / on / off: the same kernel without, with and again without this fix."""
    setup = SETUPS[name]
    faulty = broken.empty_row_not_written if setup.kernel is mla_decode else setup.kernel
    off = replace(setup, kernel=faulty, remedy=broken.NoRemedy, quantise=None)
    first = serve("off", off, "torch.max", device).verdict
    on = serve(name, setup, "torch.max", device).verdict
    again = serve("off again", off, "torch.max", device).verdict
    return off_on_off(INCIDENT, name, off=first, on=on, off_again=again)


@dataclass
class Call:
    """Arguments of one MLA decode: ``live`` requests of ``tokens`` tokens among ``rows`` rows."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        """Positional arguments of ``mla_decode``."""
        return self.q, self.kv_cache, self.block_table, self.seq_lens


def make_call(
    device: str,
    *,
    rows: int,
    live: int,
    tokens: int,
    q_len: int | None = None,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
) -> Call:
    """A decode batch whose last page is part full, and whose spare pages belong to nobody.

    q (rows, heads, 576) or, with ``q_len``, (rows, q_len, heads, 576); 128 heads on a GPU, 4 under
    the interpreter.
    """
    heads = 128 if device == "cuda" else 4
    generator = torch.Generator().manual_seed(1)
    pages = -(-tokens // page_size)
    shape = (rows, heads, LATENT) if q_len is None else (rows, q_len, heads, LATENT)
    q = torch.randn(shape, generator=generator).to(device, dtype)
    # One page more a request than it needs: the spare one's id stands in the unused table entry.
    kv_cache = torch.randn(live * (pages + 1) + 1, page_size, LATENT, generator=generator)
    table = torch.full((rows, pages + 1), 0, dtype=torch.int32)
    table[:live] = torch.arange(1, live * (pages + 1) + 1, dtype=torch.int32).view(live, pages + 1)
    seq_lens = torch.zeros(rows, dtype=torch.int32)
    seq_lens[:live] = tokens
    return Call(q, kv_cache.to(device, dtype), table.to(device), seq_lens.to(device))


def empty_row(name: str, kernel: broken.Kernel, device: str, expected: str | None) -> Finding:
    """What a kernel does with the output rows of requests without tokens.

    The output is planted with a canary: a surviving one was not written, another NaN was computed.
    """
    call = make_call(device, rows=8, live=3, tokens=20, dtype=_dtype(device))
    out = plant(call.q.new_empty(*call.q.shape[:-1], KV_LORA_RANK), stage=5)
    kernel(*call.args, softmax_scale=SCALE, out=out)
    states = row_states(out, stage=5)
    padding = sorted(set(states[3:]))
    verdict = padding[0] if len(padding) == 1 else " and ".join(padding)
    return finding(
        INCIDENT, "empty row", name, verdict, expected=expected, live_rows=" ".join(sorted(set(states[:3])))
    )


def _dtype(device: str) -> torch.dtype:
    # Third-party kernels are interpreted as they are, and the interpreter multiplies bf16 operands
    # as bit patterns; fp32 keeps their values right.
    return torch.bfloat16 if device == "cuda" else torch.float32


def _judge_stale(
    question: str,
    name: str,
    kernel: broken.Kernel,
    call: Call,
    stale: Callable[[], list[torch.Tensor]],
    expected: str | None,
) -> Finding:
    """Judge a decode whose stale memory first holds NaN, then zeros, then other content."""

    def run(fill: Fill | None) -> torch.Tensor:
        for memory in stale():
            if fill is None:
                memory.fill_(float("nan"))
            else:
                fill(memory)
        out, _ = kernel(*call.args, softmax_scale=SCALE)
        return out

    live = call.q.shape[0]
    verdict = str(judge_rows(run, live))
    if verdict == Verdict.CLEAN and not pad_invariance(run, live):
        verdict = "wrong, finite"
    return finding(INCIDENT, question, name, verdict, expected=expected)


def tail(name: str, kernel: broken.Kernel, device: str, expected: str | None) -> Finding:
    """Whether bytes past ``seq_len`` on a request's last page can change its output."""
    call = make_call(device, rows=3, live=3, tokens=84, dtype=_dtype(device))
    last = call.block_table[:, 1].tolist()
    return _judge_stale(
        "past seq_len",
        name,
        kernel,
        call,
        lambda: [call.kv_cache[page, 84 - 64 :] for page in last],
        expected,
    )


def unused_pages(name: str, kernel: broken.Kernel, device: str, expected: str | None) -> Finding:
    """Whether a page that only an unused block-table entry names can change the output."""
    call = make_call(device, rows=3, live=3, tokens=64, dtype=_dtype(device))
    unused = call.block_table[:, 1].tolist()
    return _judge_stale(
        "unused table entry", name, kernel, call, lambda: [call.kv_cache[page] for page in unused], expected
    )


# What each faulty kernel must show: empty row, past seq_len, unused table entry.
_FAULTS = {
    "empty_row_not_written": ("unwritten", "clean", "clean"),
    "zero_by_zero_written": ("nan", "clean", "clean"),
    "tail_masked_by_multiplication": ("zero", "leaked", "clean"),
    "block_table_not_padded": ("zero", "leaked", "leaked"),
    "mla_decode": ("zero", "clean", "clean"),
}


def kernel_contract(name: str, device: str) -> Iterator[Finding]:
    """The three questions that a kernel can be asked alone."""
    kernel = mla_decode if name == "mla_decode" else broken.KERNELS[name]
    expected = _FAULTS[name]
    yield empty_row(name, kernel, device, expected[0])
    yield tail(name, kernel, device, expected[1])
    yield unused_pages(name, kernel, device, expected[2])


def _peer_kernel(peer: Peer) -> broken.Kernel:
    def kernel(
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        softmax_scale: float,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat = q.squeeze(1) if q.ndim == 4 else q
        target = None if out is None else out.view(*flat.shape[:-1], KV_LORA_RANK)
        result, lse = peer(flat, kv_cache, block_table, seq_lens, softmax_scale=softmax_scale, out=target)
        return result, lse if lse is not None else torch.empty(0)

    return kernel


# Known from measurement (H200) or from executing the unmodified file; the others are asked openly.
_PEER_EXPECTED: dict[str, tuple[str | None, str | None, str | None]] = {
    "vllm_triton": ("nan", "clean", "clean")
}


def real_kernels(device: str) -> Iterator[Finding]:
    """The same three questions, put to other packages' kernels; and vLLM's kernel served."""
    for name, peer in peers().items():
        if peer.unavailable_reason is not None:
            for question in ("empty row", "past seq_len", "unused table entry"):
                yield not_run(INCIDENT, question, name, peer.unavailable_reason)
            continue
        kernel = _peer_kernel(peer)
        expected = _PEER_EXPECTED.get(name, (None, None, None))
        yield empty_row(name, kernel, device, expected[0])
        yield tail(name, kernel, device, expected[1])
        yield unused_pages(name, kernel, device, expected[2])


def served_real_kernel(device: str) -> Iterator[Finding]:
    """vLLM's own Triton MLA in the captured step: alone, and behind :func:`clear_empty_rows`."""
    peer = peers()["vllm_triton"]
    question = "served, torch.max"
    for name, remedy, expected in (
        ("vllm_triton", broken.NoRemedy, Verdict.LEAKED),
        ("vllm_triton_cleared", ClearEmptyRows, Verdict.CLEAN),
    ):
        if peer.unavailable_reason is not None:
            yield not_run(INCIDENT, question, name, peer.unavailable_reason)
            continue
        if device != "cuda":
            yield not_run(INCIDENT, question, name, "served in bf16, which needs a CUDA device")
            continue
        setup = Setup(_peer_kernel(peer), remedy, (expected, expected), remedy is ClearEmptyRows)
        seen = serve(name, setup, "torch.max", device)
        yield finding(INCIDENT, question, name, seen.verdict, expected=expected, steps=" ".join(seen.steps))


@dataclass(frozen=True)
class PaddingRow:
    """One line of the reproducer's table: what ``torch`` sees in the raw attention output."""

    q_len: int
    live: int
    padding: int
    tokens: int
    fixed: bool
    amax: float
    padding_nan: bool


def padding_row(device: str, q_len: int, padding: int, tokens: int, fixed: bool) -> PaddingRow:
    """One live request among ``padding`` padding rows, over a NaN-poisoned output buffer.

    The reproducer behind vLLM #37442: ``amax`` over all rows, and whether a padding row holds NaN.
    """
    call = make_call(device, rows=1 + padding, live=1, tokens=tokens, q_len=q_len)
    out = plant(call.q.new_empty(*call.q.shape[:-1], KV_LORA_RANK))
    broken.empty_row_not_written(*call.args, softmax_scale=SCALE, out=out)
    if fixed:
        clear_empty_rows(out, call.seq_lens)
    return PaddingRow(
        q_len,
        1,
        padding,
        tokens,
        fixed,
        amax=float(out.abs().max()),
        padding_nan=bool(bad_rows(out)[1:].any()),
    )


PADDING_TABLE = ((1, 127, 512), (4, 127, 512), (1, 1023, 1200))


def padding_table(device: str) -> list[PaddingRow]:
    """The reproducer's rows, fix off and on."""
    return [padding_row(device, *case, fixed=fixed) for case in PADDING_TABLE for fixed in (False, True)]


def reproducer(device: str) -> Iterator[Finding]:
    """The thread's table as Findings."""
    for row in padding_table(device):
        yield finding(
            INCIDENT,
            f"1 + {row.padding}, q_len {row.q_len}",
            "clear_empty_rows" if row.fixed else "empty_row_not_written",
            "padding NaN" if row.padding_nan else "no padding NaN",
            expected="no padding NaN" if row.fixed else "padding NaN",
            amax=row.amax,
            tokens=row.tokens,
        )


class _FreedBlocks:
    """What an allocator does with a freed block: hands it to the next tenant of that size.

    On CUDA torch's own caching allocator does it; under the interpreter this list stands for it.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.freed: list[torch.Tensor] = []

    def free(self, block: torch.Tensor) -> None:
        if self.device == "cpu":
            self.freed.append(block)

    def tenant_at(self, where: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """The next tenant of the block at address ``where``, if it goes to anybody."""
        if self.device == "cpu":
            return self.freed.pop() if self.freed else None
        # Blocks of this size that the process freed earlier may be handed out first.
        tenants: list[torch.Tensor] = []
        for _ in range(64):
            tenants.append(torch.empty(shape, dtype=dtype, device=self.device))
            if tenants[-1].data_ptr() == where:
                return tenants[-1]
        return None


def growth_after_capture(name: str, device: str) -> Finding:
    """Whether a replay writes into memory that belongs to somebody else by now.

    After the capture one larger eager batch comes. A buffer that grows then is freed, its block
    goes to another tenant, and the captured graph still writes to it.
    """
    setup = SETUPS[name]
    blocks = _FreedBlocks(device)
    remedy = (
        setup.remedy(setup.kernel)
        if name != "zeros_once_per_layer"
        else broken.ZerosOncePerLayer(setup.kernel, blocks.free)
    )
    config = config_for(device, setup)
    engine = Engine(Variant(name, remedy, broken.QUANTISERS["torch.max"]), config)
    old = engine.taps[0]["attention"]
    shape, where = old.shape, old.data_ptr()
    del old
    engine.forget_taps()
    larger = 2 * config.batch
    remedy(
        AttentionInputs(
            q=torch.zeros(larger, config.q_len, config.heads, LATENT, dtype=config.dtype, device=device),
            kv_cache=engine.kv_cache[0],
            block_table=engine.block_table.repeat(2, 1),
            seq_lens=torch.zeros(larger, dtype=torch.int32, device=device),
            num_decodes=larger,
            layer=0,
            softmax_scale=config.softmax_scale,
        )
    )
    tenant = blocks.tenant_at(where, tuple(shape), config.dtype)
    changed = 0
    if tenant is not None:
        plant(tenant, stage=9)
        engine.set_batch(Batch(3))
        engine.graph.replay()
        states = row_states(tenant.view(config.batch * config.q_len, -1), stage=9)
        changed = sum(state != "unwritten" for state in states)
    return finding(
        INCIDENT,
        "growth after capture",
        name,
        "overwrites a tenant" if changed else "clean",
        expected="overwrites a tenant" if name == "zeros_once_per_layer" else "clean",
        tenant_rows_overwritten=changed,
    )


# The four ingredients of a leak; without any one of them there is none.
INGREDIENTS: dict[str, tuple[dict[str, bool], Verdict]] = {
    "all four": ({}, Verdict.LEAKED),
    "no padding rows": ({"padding": False}, Verdict.CLEAN),
    "kernel writes every row": ({"unwritten": False}, Verdict.CLEAN),
    "memory held no NaN": ({"poison": False}, Verdict.CLEAN),
    "consumer keeps rows apart": ({"mixes": False}, Verdict.PAD_ONLY),
}


def ingredient(name: str, device: str) -> Finding:
    """One row of the ablation: the leak without one of its ingredients."""
    without, expected = INGREDIENTS[name]
    padding, unwritten, poison, mixes = (
        without.get(key, True) for key in ("padding", "unwritten", "poison", "mixes")
    )
    kernel = broken.empty_row_not_written if unwritten else mla_decode
    remedy = broken.NoRemedy(kernel)
    quantise = broken.quantise_amax_torch_max if mixes else None
    config = EngineConfig.for_device(device, batch=8)
    engine = Engine(Variant(name, remedy, quantise), config)
    # Zeros: memory whose last tenant left nothing worse.
    engine.poison(plant if poison else lambda x: x.zero_())
    engine.set_batch(Batch(1 if padding else config.batch))
    return finding(INCIDENT, "ablation", name, engine.verdict(), expected=expected)


@dataclass(frozen=True)
class StagePicture:
    """Rows x stages of one replay: 0 finite, 1 bad in a padding row, 2 bad in a live row."""

    stages: list[str]
    cells: list[list[int]]
    live: int
    first_crossing: Crossing | None


def stage_picture(name: str, device: str, live: int = 3, quantiser: str = "torch.max") -> StagePicture:
    """Where the NaN is born and where it crosses, seen by the counters inside the captured step."""
    setup = SETUPS[name]
    config = config_for(device, setup, batch=16, layers=2)
    counters = RowCounters(Engine.stage_names(config.layers), config.device)
    engine = engine_for(name, setup, quantiser, config, counters)
    engine.set_batch(Batch(live))
    engine.replay()
    outputs = [taps[stage] for taps in engine.taps for stage in STAGES]
    cells = []
    for x in [*outputs, engine.logits]:
        bad = bad_rows(x).tolist()
        cells.append([(2 if row < engine.live_rows else 1) if b else 0 for row, b in enumerate(bad)])
    rows = [list(row) for row in zip(*cells, strict=True)]
    return StagePicture(Engine.stage_names(config.layers), rows, engine.live_rows, counters.first_crossing)


def live_count_verdict(live: int, name: str = "empty_row_not_written", device: str = "cpu") -> Verdict:
    """Verdict of one step at one live count of 16, over canaries; for the notebook's slider."""
    setup = SETUPS[name]
    engine = engine_for(name, setup, "torch.max", config_for(device, setup, batch=16))
    engine.set_batch(Batch(live))
    return engine.verdict()


def run(device: str, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Every question of the incident, one finding at a time."""
    steps: list[tuple[str, Callable[[], Iterator[Finding] | Finding]]] = [
        *((name, partial(kernel_contract, name, device)) for name in _FAULTS),
        ("real kernels", partial(real_kernels, device)),
        ("reproducer", partial(reproducer, device)),
        *((name, partial(served, name, device)) for name in SETUPS),
        ("vLLM's kernel, served", partial(served_real_kernel, device)),
        *(
            (f"growth, {name}", partial(growth_after_capture, name, device))
            for name in ("zeros_once_per_layer", "clear_empty_rows", "mla_decode")
        ),
        *((f"without: {name}", partial(ingredient, name, device)) for name in INGREDIENTS),
        *((f"off/on/off, {n}", partial(verify, n, device)) for n, s in SETUPS.items() if s.fix),
    ]
    for number, (name, ask) in enumerate(steps, 1):
        progress(f"{INCIDENT} {number}/{len(steps)}: {name}")
        answer = ask()
        yield from (answer,) if isinstance(answer, Finding) else answer
