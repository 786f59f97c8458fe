"""The questions of incident 2."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from staleproof.evidence.canary import plant, row_states
from staleproof.evidence.ledger import AllocationLedger, owned_tensors, size_text
from staleproof.harness.answers import Answer, answer
from staleproof.harness.findings import LIVES
from staleproof.harness.graph import capture
from staleproof.harness.measure import Times, graph_times
from staleproof.harness.questions import Ablation, Fix, Question, Questions
from staleproof.incidents.decode_buffer.allocator import GIB, oom_fields
from staleproof.incidents.decode_buffer.correct import wrong_output
from staleproof.incidents.decode_buffer.model import Attention, Experts, Model
from staleproof.incidents.decode_buffer.scene import DIES, Outcome
from staleproof.incidents.decode_buffer.setups import (
    ATTENTION,
    CLEARED,
    FREED,
    MAX_NUM_SEQS,
    MIXED,
    NOTHING,
    OFF,
    REFUSED,
    REPORT,
    RIGHT_SHAPE,
    SAFE,
    SEEN,
    SEPARATE,
    SETUPS,
    SMALL,
    STALE,
    UNSEEN,
    WRONG_SHAPE,
    Case,
    Setup,
    Wiring,
    run_servers,
)
from staleproof.ops.decode_workspace import WorkspaceLocked

WILL_NOT_FIT, FITS = "will not fit", "fits"
ACCURATE = "within 1 %"

# --- A whole server. Real memory on CUDA, under a limit; simulated on a CPU.


def too_small(case: Case, device: str) -> str | None:
    """Why this device cannot hold the server of ``case``, or ``None``."""
    if device != "cuda":
        return None
    if case.config is None:
        # What the report leaves outside its plan, weights and KV cache of a gibibyte each, the peak.
        wanted = int(18.4 * GIB) + 2 * REPORT.workspace_bytes + 2 * GIB
    else:
        wanted = case.config.total_bytes
    free = torch.cuda.mem_get_info()[0]
    if free >= wanted:
        return None
    return f"needs {size_text(wanted)} of free GPU memory, {size_text(free)} is free"


def _verdict(outcome: Outcome, **numbers: Any) -> Answer:
    numbers |= {f"oom_{name}": text for name, text in oom_fields(outcome.error or "").items()}
    numbers |= {"kv_bytes": outcome.kv_bytes, "peak_bytes": outcome.peak_bytes}
    return answer(outcome.verdict, died_in=outcome.died_in, **numbers)


def server(case: Case, device: str) -> Answer:
    """Whether a server dies."""
    return _verdict(*run_servers([case], device))


def server_and_ledger(case: Case, device: str) -> Iterator[Answer]:
    """Whether a server dies, whether the ledger says so beforehand, and what the profile run saw."""
    plain, watched = run_servers([case, replace(case, watched=True)], device)
    yield _verdict(plain)
    report, setup = watched.ready, SETUPS[case.variant]
    assert report is not None
    yield Answer(
        FITS if report.fits else WILL_NOT_FIT,
        {
            "owners": [owner.name for owner in report.surprises],
            "headroom_bytes": report.headroom,
            "then": watched.verdict,
        },
        note=report.sentence,
        question="ledger",
        expected=WILL_NOT_FIT if setup.server == DIES else FITS,
    )
    late = sum(owner.predicted for owner in report.surprises)
    early = watched.kept_bytes - sum(owner.bytes for owner in report.surprises)
    yield Answer(
        UNSEEN if late else SEEN if early else NOTHING,
        {"buffers": (late + early) / SMALL.decode_out_bytes},
        question="profile",
        expected=setup.profile,
    )


def true_size(case: Case, device: str) -> Iterator[Answer]:
    """The report's own size: 61 x (2048, 128, 512) bf16, then a prefill that asks for 3.94 GiB.

    On CUDA the server leaves as many bytes outside its plan as the report's; elsewhere it is simulated
    on the report's 184 GiB. Yields also how far the ledger's figure after one layer is from the bytes
    that the device gave, if nothing else was allocated between the buffers.
    """
    (outcome,) = run_servers([case], device)
    taken = outcome.taken_bytes()
    yield _verdict(outcome, taken_bytes=taken)
    if case is not BUFFERS_ONLY:
        return
    assert outcome.probed is not None
    owner = outcome.probed.surprises[0]
    accurate = abs(taken / owner.predicted - 1) <= 0.01
    yield Answer(
        ACCURATE if accurate else "off",
        {"predicted_bytes": owner.predicted, "taken_bytes": taken},
        note=str(owner),
        question="prediction",
        variant=OFF,
        expected=ACCURATE,
    )


# Without transients between the buffers, they are all that decoding takes.
BUFFERS_ONLY = Case(OFF, None, {"workspace_per_token": 64}, watched=True)
TRUE_SIZE = {
    OFF: Case(OFF, None, watched=True),
    f"{OFF}, batch {MAX_NUM_SEQS}": Case(OFF, None, {"batch": MAX_NUM_SEQS}),
    "decode_workspace": Case("decode_workspace", None),
    "clear_empty_rows": Case("clear_empty_rows", None),
    f"{OFF}, buffers only": BUFFERS_ONLY,
}

# --- The buffer of one layer.


def _part(wiring: Wiring, device: str, **sizes: int) -> Attention:
    small: dict[str, Any] = {"batch": 8, "heads": 8, "rank": 64, "layers": 1, **sizes}
    part = wiring.attention(replace(SMALL, **small), device)
    assert isinstance(part, Attention)
    return part


def _query(attn: Attention, rows: int, stage: int) -> torch.Tensor:
    """(rows, heads, rank) whose every element is the canary ``stage``."""
    return plant(attn.weight.new_empty(rows, *attn.weight.shape), stage)


def _ones(rows: int, device: str) -> torch.Tensor:
    return torch.ones(rows, dtype=torch.int32, device=device)


def overlap(setup: Setup, device: str, rounds: int = 20) -> Answer:
    """Whether one of two micro-batches in flight reads the other's output; each has its canary.

    On CUDA they run on two streams, with a delay before the output is read; elsewhere they alternate
    on the host, as in a dual-batch engine.
    """
    rows, seq_lens = 8, _ones(8, device)
    mixed = 0
    with setup.process() as wiring:
        attn = _part(wiring, device)
        queries = [_query(attn, rows, stage) for stage in (1, 2)]
        copies = [torch.empty_like(q) for q in queries]
        for lane, q in enumerate(queries):
            attn.decode(q, seq_lens, lane)
        wiring.ready()
        lanes: list[Any] = [contextlib.nullcontext()] * 2
        if device == "cuda":
            torch.cuda.synchronize()
            lanes = [torch.cuda.stream(torch.cuda.Stream()) for _ in queries]
        for _ in range(rounds):
            outs = []
            for lane, q in enumerate(queries):
                with lanes[lane]:
                    outs.append(attn.decode(q, seq_lens, lane))
                    if device == "cuda":
                        torch.cuda._sleep(200_000)
            for lane, out in enumerate(outs):
                with lanes[lane]:
                    copies[lane].copy_(out)
            if device == "cuda":
                torch.cuda.synchronize()
            # "unwritten" says that every canary of this stage is still there, bit for bit.
            states = [row_states(x, stage) for stage, x in enumerate(copies, 1)]
            mixed += sum(state != "unwritten" for one in states for state in one)
    return answer(MIXED if mixed else SEPARATE, mixed_rows=mixed, rows=2 * rows * rounds)


def other_model(setup: Setup, device: str) -> Answer:
    """The shape that a model gets after a draft model of other heads and rank has decoded."""
    with setup.process() as wiring:
        draft, target = _part(wiring, device, heads=4, rank=32), _part(wiring, device)
        draft.decode(_query(draft, 8, 1), _ones(8, device))
        q = _query(target, 8, 2)
        got = target.output(q, 0).shape
    return answer(RIGHT_SHAPE if got == q.shape else WRONG_SHAPE, asked=list(q.shape), got=list(got))


def _kept(attn: Attention) -> dict[int, torch.Tensor]:
    """Address -> memory that outlives a call, weights aside."""
    weights = {p.data_ptr() for p in attn.parameters()}
    owned = {t.untyped_storage().data_ptr(): t for _, _, t in owned_tensors(attn)}
    return {at: t for at, t in owned.items() if at not in weights}


def growth(setup: Setup, device: str) -> Answer:
    """Whether a captured graph writes freed memory after a batch larger than the captured one.

    A CUDA graph keeps addresses, not tensors. On CUDA another tensor takes the freed block; elsewhere
    the old buffer itself stands for it.
    """
    numbers: dict[str, Any] = {}
    verdict = SAFE
    with setup.process() as wiring:
        attn = _part(wiring, device)
        q, seq_lens = _query(attn, 8, 1), _ones(8, device)
        attn.decode(q, seq_lens)
        wiring.ready()
        graph = capture(lambda: attn.decode(q, seq_lens), device)
        before = _kept(attn)
        try:
            attn.decode(_query(attn, 16, 2), _ones(16, device))
        except WorkspaceLocked as refusal:
            return answer(REFUSED, said=str(refusal))
        freed = {at: x for at, x in before.items() if at not in _kept(attn)}
        if freed:
            at, tenant = next(iter(freed.items()))
            if device == "cuda":
                shape, dtype = tenant.shape, tenant.dtype
                del before, freed, tenant
                tenant = torch.empty(shape, dtype=dtype, device=device)
                numbers["same_address"] = tenant.data_ptr() == at
            plant(tenant, 3)
            graph.replay()
            damaged = sum(state != "unwritten" for state in row_states(tenant, 3))
            verdict = FREED if damaged else SAFE
            numbers["damaged_rows"] = damaged
    return answer(verdict, **numbers)


def empty_rows(setup: Setup, device: str) -> Answer:
    """What the seven empty rows of eight hold after a replay; canaries were there before."""
    with setup.process() as wiring:
        attn = _part(wiring, device)
        q, seq_lens = _query(attn, 8, 1), _ones(8, device)
        outs: list[torch.Tensor] = []
        graph = capture(lambda: outs.append(attn.decode(q, seq_lens)), device)
        plant(outs[-1], 2)
        seq_lens[1:] = 0
        graph.replay()
        states = row_states(outs[-1][1:], 2)
    verdict = CLEARED if set(states) == {"zero"} else STALE
    return answer(verdict, zero_rows=states.count("zero"), rows=len(states))


def wrong(case: Case, device: str) -> str | None:
    """What one layer of a server computes wrongly, in one line, or ``None``."""
    with SETUPS[case.variant].process() as wiring:
        layer = _part(wiring, device)
        q = _query(layer, 8, 1)
        for lane in (0, 1):
            layer.decode(q, _ones(8, device), lane)
        wiring.ready()
        return wrong_output(
            SETUPS[case.variant], layer, torch.arange(q.numel(), device=device).view_as(q).to(q)
        )


# --- Time.


def _untimed(subject: object, device: str) -> str | None:
    return None if device == "cuda" else "timings need a CUDA GPU"


def _layer_times(setup: Setup, device: str) -> Times:
    with setup.process() as wiring:
        attn = wiring.attention(REPORT, device)
        assert isinstance(attn, Attention)
        q = attn.weight.new_ones(REPORT.batch, REPORT.heads, REPORT.rank)
        return graph_times([partial(attn.decode, q, _ones(REPORT.batch, device))])


def added_time(setup: Setup, device: str) -> Answer:
    """Microseconds of one layer's decode launch in a graph at (2048, 128, 512) bf16, beside no buffer."""
    base, times = _layer_times(SETUPS["no_buffer"], device), _layer_times(setup, device)
    return answer("measured", us=times.p50, p20=times.p20, p80=times.p80, added_us=times.p50 - base.p50)


def ledger_cost(_: object, device: str, steps: int = 20) -> Answer:
    """How much slower an eager step of 61 layers is under a ledger, host time included."""
    model = Model(replace(SMALL, weight_bytes=1), device, Attention, Experts)
    x = torch.ones(SMALL.batch, dtype=SMALL.dtype, device=device)
    seq_lens = _ones(SMALL.batch, device)

    def seconds() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            model(x, seq_lens)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps

    seconds()
    ledger = AllocationLedger(model)
    off = seconds()
    start = time.perf_counter()
    with ledger.phase("profile"):
        on = seconds()
    whole = (time.perf_counter() - start) / steps
    return answer(
        "measured",
        off_us=off * 1e6,
        on_us=on * 1e6,
        slow_down=on / off,
        slow_down_with_entering_and_leaving=whole / off,
        off_again_us=seconds() * 1e6,
        steps=steps,
    )


_BUFFERS = {name: SETUPS[name] for name in ATTENTION}

QUESTIONS = Questions(
    "decode_buffer",
    Question(
        "server",
        {name: Case(name) for name in SETUPS},
        server_and_ledger,
        expected=lambda case: SETUPS[case.variant].server,
        unavailable=too_small,
        also=("ledger", "profile"),
    ),
    *(
        Fix(name, off=Case(OFF), on=Case(name), ask=server, wrong=wrong, unavailable=too_small)
        for name, setup in SETUPS.items()
        if setup.fix
    ),
    Ablation(
        Case(OFF),
        without={
            "not kept": {"variant": "no_buffer"},
            "one for all layers": {"variant": "module_singleton"},
            "made before the profile": {"variant": "zeros_before_profile"},
            "a quarter of the batch": {"changes": {"batch": SMALL.batch // 4}},
        },
        ask=server,
        expected={
            "all four": DIES,
            "not kept": LIVES,
            "one for all layers": LIVES,
            "made before the profile": LIVES,
            "a quarter of the batch": LIVES,
        },
        unavailable=too_small,
    ),
    Question(
        "true_size",
        TRUE_SIZE,
        true_size,
        expected={name: DIES if name == OFF else LIVES for name in TRUE_SIZE},
        unavailable=too_small,
    ),
    Question("overlap", _BUFFERS, overlap, expected=lambda s: s.overlap),
    Question("other_model", _BUFFERS, other_model, expected=lambda s: s.other_model),
    Question("growth", _BUFFERS, growth, expected=lambda s: s.growth),
    Question("empty_rows", _BUFFERS, empty_rows, expected=lambda s: s.empty_rows),
    Question("added_time", _BUFFERS, added_time, unavailable=_untimed),
    Question("ledger_cost", ("AllocationLedger",), ledger_cost, unavailable=_untimed),
)
