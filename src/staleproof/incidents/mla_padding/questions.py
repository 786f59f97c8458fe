"""The questions of incident 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from staleproof.evidence.canary import plant, row_states
from staleproof.evidence.rows import Fill, Verdict, bad_rows, judge_rows, pad_invariance
from staleproof.harness.answers import Answer, answer, no_answer
from staleproof.harness.findings import FIXED, REPLICA, Evidence, Grade
from staleproof.harness.peers import Peer, peers
from staleproof.harness.questions import Ablation, Fix, Question, Questions
from staleproof.incidents.mla_padding import broken
from staleproof.incidents.mla_padding.correct import wrong
from staleproof.incidents.mla_padding.scene import (
    KV_LORA_RANK,
    LATENT,
    SCALE,
    AttentionInputs,
    Batch,
    Call,
    Engine,
    EngineConfig,
    Variant,
    make_call,
)
from staleproof.incidents.mla_padding.setups import SETUPS, SICK_STEP, ClearEmptyRows, Setup, serve
from staleproof.ops.clear_empty_rows import clear_empty_rows
from staleproof.ops.mla_decode import mla_decode

# --- A kernel alone.


@dataclass(frozen=True)
class PeerKernel:
    """Another package's decode kernel, called as ``mla_decode`` is."""

    peer: Peer

    def __call__(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        softmax_scale: float,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``out``, and ``lse`` or, if the kernel gives none, an empty tensor."""
        q = q.squeeze(1) if q.ndim == 4 else q
        out = None if out is None else out.view(*q.shape[:-1], KV_LORA_RANK)
        out, lse = self.peer(q, kv_cache, block_table, seq_lens, softmax_scale=softmax_scale, out=out)
        return out, torch.empty(0) if lse is None else lse


def _unavailable(kernel: broken.Kernel, device: str) -> str | None:
    return kernel.peer.unavailable_reason if isinstance(kernel, PeerKernel) else None


def _evidence(kernel: broken.Kernel, where: str = "") -> Evidence:
    return Evidence(Grade.REAL, kernel.peer.name + where) if isinstance(kernel, PeerKernel) else REPLICA


def _call(device: str, rows: int, live: int, tokens: int) -> Call:
    # fp32 under the interpreter: third-party kernels run there as they are, and its dot product of
    # bf16 operands multiplies their bit patterns.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return make_call(device, rows=rows, live=live, tokens=tokens, dtype=dtype)


def empty_row(kernel: broken.Kernel, device: str) -> Answer:
    """What a kernel does with the output rows of requests without tokens.

    The output is filled with a canary first: if it survives, the row was not written; another NaN was
    computed by the kernel.
    """
    call = _call(device, rows=8, live=3, tokens=20)
    out = plant(call.q.new_empty(*call.q.shape[:-1], KV_LORA_RANK), stage=5)
    kernel(*call, softmax_scale=SCALE, out=out)
    states = row_states(out, stage=5)
    live, padding = sorted({*states[:3]}), sorted({*states[3:]})
    return answer(" and ".join(padding), live_rows=" ".join(live))


def _reads(kernel: broken.Kernel, call: Call, memory: list[torch.Tensor]) -> str:
    """Whether a decode depends on ``memory``: filled with NaN, with zeros, then with other content."""

    def run(fill: Fill | None) -> torch.Tensor:
        for part in memory:
            part.fill_(float("nan")) if fill is None else fill(part)
        return kernel(*call, softmax_scale=SCALE)[0]

    live = call.q.shape[0]
    verdict = judge_rows(run, live)
    if verdict == Verdict.CLEAN and not pad_invariance(run, live):
        return "wrong, finite"
    return verdict


def past_seq_len(kernel: broken.Kernel, device: str) -> str:
    """Whether bytes past ``seq_len`` on a request's last page can change its output."""
    call = _call(device, rows=3, live=3, tokens=84)
    return _reads(kernel, call, [call.kv_cache[page, 84 - 64 :] for page in call.block_table[:, 1].tolist()])


def unused_table_entry(kernel: broken.Kernel, device: str) -> str:
    """Whether a page that only an unused entry of the block table names can change the output."""
    call = _call(device, rows=3, live=3, tokens=64)
    return _reads(kernel, call, [call.kv_cache[page] for page in call.block_table[:, 1].tolist()])


def _or_reason(ask: Callable[[broken.Kernel, str], str | Answer]) -> Callable[..., str | Answer]:
    """The question; if a peer refuses the call or fails, the reason in one line, and the others go on."""

    def guarded(kernel: broken.Kernel, device: str) -> str | Answer:
        try:
            return ask(kernel, device)
        except Exception as error:
            if not isinstance(kernel, PeerKernel):
                raise
            return no_answer(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}")

    return guarded


KERNELS: dict[str, broken.Kernel] = {
    **broken.KERNELS,
    "mla_decode": mla_decode,
    **{name: PeerKernel(peer) for name, peer in peers().items()},
}
ALONE: dict[str, Callable[[broken.Kernel, str], str | Answer]] = {
    "empty row": empty_row,
    "past seq_len": past_seq_len,
    "unused table entry": unused_table_entry,
}
# What must come out of these three questions. Of vLLM's kernel it is known from running its unmodified
# file on an H200; nothing is expected of the other packages' kernels.
CONTRACT = {
    "empty_row_not_written": ("unwritten", "clean", "clean"),
    "zero_by_zero_written": ("nan", "clean", "clean"),
    "tail_masked_by_multiplication": ("zero", "leaked", "clean"),
    "block_table_not_padded": ("zero", "leaked", "leaked"),
    "mla_decode": ("zero", "clean", "clean"),
    "vllm_triton": ("nan", "clean", "clean"),
}


# --- The reproducer behind vLLM #37442.


@dataclass(frozen=True)
class PaddingCase:
    """One live request of ``tokens`` tokens among ``padding`` padding rows, with the fix or without."""

    q_len: int
    padding: int
    tokens: int
    fixed: bool


def padding_rows(case: PaddingCase, device: str) -> Answer:
    """What the raw attention output, filled with NaN before, holds in its padding rows.

    ``amax`` over all rows is the reproducer's own figure.
    """
    call = make_call(device, rows=1 + case.padding, live=1, tokens=case.tokens, q_len=case.q_len)
    out = plant(call.q.new_empty(*call.q.shape[:-1], KV_LORA_RANK))
    broken.empty_row_not_written(*call, softmax_scale=SCALE, out=out)
    if case.fixed:
        clear_empty_rows(out, call.seq_lens)
    verdict = "padding NaN" if bad_rows(out)[1:].any() else "no padding NaN"
    return answer(
        verdict, amax=float(out.abs().max()), q_len=case.q_len, padding=case.padding, tokens=case.tokens
    )


_CASES = ((1, 127, 512), (4, 127, 512), (1, 1023, 1200))
# Question -> (fix off, fix on).
REPRODUCER = {
    f"1 + {case[1]}, q_len {case[0]}": (PaddingCase(*case, fixed=False), PaddingCase(*case, fixed=True))
    for case in _CASES
}

# --- Served requests.


def served(setup: Setup, device: str, quantiser: str = "torch.max") -> Iterator[Answer]:
    """The worst verdict of the served steps, and whether padding content decides what live rows say."""
    found = serve(setup, quantiser, device)
    yield answer(found.verdict, steps=" ".join(found.steps), sick_step=found.steps[SICK_STEP])
    content = "ignored" if found.invariant else "decides"
    yield Answer(content, question="padding content", expected=setup.padding_content)


def served_verdict(setup: Setup, device: str, quantiser: str = "torch.max") -> Answer:
    """The worst verdict of the served steps alone."""
    return next(served(setup, device, quantiser))


def _not_served(setup: Setup, device: str) -> str | None:
    why = _unavailable(setup.kernel, device)
    return why or (None if device == "cuda" else "served in bf16, which needs a CUDA device")


_VLLM = KERNELS["vllm_triton"]
SERVED_PEERS = {
    "vllm_triton": Setup(_VLLM, served=(Verdict.LEAKED, Verdict.LEAKED)),
    "vllm_triton_cleared": Setup(_VLLM, ClearEmptyRows, (Verdict.CLEAN, Verdict.CLEAN)),
}


def off_on_off(name: str, expected: str = FIXED) -> Fix:
    """The same kernel without, with and again without the remedy of one setup."""
    setup = SETUPS[name]
    return Fix(name, off=setup.without_fix, on=setup, ask=served_verdict, wrong=wrong, expected=expected)


class _FreedBlocks:
    """The next tenant of a freed block: on CUDA torch's allocator decides, elsewhere this list does."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.freed: list[torch.Tensor] = []

    def free(self, block: torch.Tensor) -> None:
        if self.device == "cpu":
            self.freed.append(block)

    def tenant_at(self, where: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """The tensor that gets the block at address ``where``, if any does."""
        if self.device == "cpu":
            return self.freed.pop() if self.freed else None
        # Blocks of this size that the process freed earlier may be handed out first.
        tenants: list[torch.Tensor] = []
        for _ in range(64):
            tenants.append(torch.empty(shape, dtype=dtype, device=self.device))
            if tenants[-1].data_ptr() == where:
                return tenants[-1]
        return None


def growth_after_capture(setup: Setup, device: str) -> Answer:
    """Whether a replay writes into memory that belongs to somebody else by then.

    After the capture one larger eager batch comes. If a buffer grows for it, the old one is freed and
    given to another tensor, but the captured graph still writes to it.
    """
    blocks = _FreedBlocks(device)
    remedy = setup.remedy(setup.kernel)
    if isinstance(remedy, broken.ZerosOncePerLayer):
        remedy.free = blocks.free
    config = setup.config(device)
    engine = Engine(Variant("grown", remedy, broken.QUANTISERS["torch.max"]), config)
    output = engine.taps[0]["attention"]
    shape, where = tuple(output.shape), output.data_ptr()
    del output
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
        )
    )
    tenant = blocks.tenant_at(where, shape, config.dtype)
    changed = 0
    if tenant is not None:
        plant(tenant, stage=9)
        engine.set_batch(Batch(3))
        engine.graph.replay()
        states = row_states(tenant.view(config.batch * config.q_len, -1), stage=9)
        changed = sum(state != "unwritten" for state in states)
    return answer("overwrites a tenant" if changed else "clean", tenant_rows_overwritten=changed)


GROWTH = {"zeros_once_per_layer": "overwrites a tenant", "clear_empty_rows": "clean", "mla_decode": "clean"}


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


def leak(parts: Ingredients, device: str) -> str:
    """Verdict of one step with these ingredients."""
    kernel = broken.empty_row_not_written if parts.unwritten else mla_decode
    quantise = broken.quantise_amax_torch_max if parts.mixes else None
    config = EngineConfig.for_device(device, batch=8)
    engine = Engine(Variant("ablation", broken.NoRemedy(kernel), quantise), config)
    engine.poison(plant if parts.poison else torch.Tensor.zero_)
    engine.set_batch(Batch(1 if parts.padding else config.batch))
    return engine.verdict()


QUESTIONS = Questions(
    "mla_padding",
    *(
        Question(
            name,
            KERNELS,
            _or_reason(ask),
            expected={kernel: CONTRACT.get(kernel, (None,) * 3)[index] for kernel in KERNELS},
            unavailable=_unavailable,
            evidence=_evidence,
        )
        for index, (name, ask) in enumerate(ALONE.items())
    ),
    *(
        Question(
            name,
            {"empty_row_not_written": off, "clear_empty_rows": on},
            padding_rows,
            expected=lambda case: "no padding NaN" if case.fixed else "padding NaN",
        )
        for name, (off, on) in REPRODUCER.items()
    ),
    Question("served, torch.max", SETUPS, served, lambda s: s.served[0], also=("padding content",)),
    Question(
        "served, fmax",
        {name: setup for name, setup in SETUPS.items() if setup.quantise is None},
        partial(served_verdict, quantiser="fmax"),
        lambda s: s.served[1],
    ),
    Question(
        "served, torch.max",
        SERVED_PEERS,
        served_verdict,
        lambda s: s.served[0],
        _not_served,
        evidence=lambda s: _evidence(s.kernel, ", in our engine"),
    ),
    Question("growth after capture", {name: SETUPS[name] for name in GROWTH}, growth_after_capture, GROWTH),
    Ablation(
        Ingredients(),
        without={
            "no padding rows": {"padding": False},
            "kernel writes every row": {"unwritten": False},
            "memory held no NaN": {"poison": False},
            "consumer keeps rows apart": {"mixes": False},
        },
        ask=leak,
        expected={
            "all four": Verdict.LEAKED,
            "no padding rows": Verdict.CLEAN,
            "kernel writes every row": Verdict.CLEAN,
            "memory held no NaN": Verdict.CLEAN,
            "consumer keeps rows apart": Verdict.PAD_ONLY,
        },
    ),
    *(off_on_off(name) for name, setup in SETUPS.items() if setup.fix),
)
