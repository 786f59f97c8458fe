"""The questions of incident 2."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from staleproof.cases.answers import Answer, answer
from staleproof.cases.case import Ablation, Fix, Question, Questions
from staleproof.cases.finding import LIVES
from staleproof.cases.measure import Times, graph_times
from staleproof.device import Provenance
from staleproof.evidence.ledger import AllocationLedger, size_text
from staleproof.incidents.decode_buffer.allocator import GIB, oom_fields
from staleproof.incidents.decode_buffer.buffer import (
    MORE_NODES,
    ONE_BUFFER,
    SAME_NODES,
    TWO_BUFFERS,
    WHOSE_ROWS,
    captured_kernels,
    empty_rows,
    first_use,
    growth,
    layers_in_turn,
    ones,
    other_model,
    overlap,
    part,
    query,
    threads,
)
from staleproof.incidents.decode_buffer.correct import wrong_output
from staleproof.incidents.decode_buffer.model import Attention, Experts, Model, ServerConfig
from staleproof.incidents.decode_buffer.outside import OUTSIDE, outside
from staleproof.incidents.decode_buffer.scene import DIES, Outcome
from staleproof.incidents.decode_buffer.setups import (
    ATTENTION,
    MAX_NUM_SEQS,
    NOTHING,
    OFF,
    REPORT,
    SEEN,
    SEPARATE,
    SETUPS,
    SMALL,
    UNSEEN,
    Case,
    Setup,
    run_servers,
)

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
    if outcome.verdict == LIVES:
        grew = outcome.usages["serve"].allocated - outcome.usages["capture"].allocated
        numbers["grew_while_serving_bytes"] = grew
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

LARGEST_GRAPH = {f"{rows} rows": Case(OFF, changes={"batch": rows}) for rows in (16, 32, 48, 64)}
LARGEST_GRAPH_EXPECTED = dict(zip(LARGEST_GRAPH, (LIVES, LIVES, LIVES, DIES), strict=True))


@dataclass(frozen=True)
class Sweep:
    """Servers that differ in their utilisation alone.

    Attributes:
        config: their sizes; ``None`` for the report's, on the whole device.
        changes: fields of the sizes to change.
        utilisations: of the report's device; a device of another size leaves as many bytes outside.
    """

    config: ServerConfig | None
    changes: Mapping[str, Any]
    utilisations: tuple[float, ...]


_SMALL_STEPS, _TRUE_STEPS = (0.88, 0.9, 0.905, 0.91, 0.92, 0.95), (0.85, 0.9, 0.92, 0.95, 0.97)
UTILISATIONS = {
    "64 rows, a thirty-second": Sweep(SMALL, {}, _SMALL_STEPS),
    "1024 rows": Sweep(None, {"batch": MAX_NUM_SEQS}, _TRUE_STEPS),
    "2048 rows": Sweep(None, {}, _TRUE_STEPS),
    "2048 rows, buffers only": Sweep(None, {"workspace_per_token": 64}, _TRUE_STEPS),
}


def utilisation(sweep: Sweep, device: str) -> Answer:
    """From which utilisation on a server with a buffer a layer dies."""
    sizes = [{**sweep.changes, "utilisation": share} for share in sweep.utilisations]
    if sweep.config is None and device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        outside = [REPORT.total_bytes * (1 - share) for share in sweep.utilisations]
        sizes = [{**sweep.changes, "utilisation": 1 - left / total} for left in outside]
    outcomes = run_servers([Case(OFF, sweep.config, size) for size in sizes], device)
    said = dict(zip(map(str, sweep.utilisations), (o.verdict for o in outcomes), strict=True))
    dead = [share for share, verdict in said.items() if verdict == DIES]
    sharp = [*said.values()] == [LIVES] * (len(said) - len(dead)) + [DIES] * len(dead)
    verdict = LIVES if not dead else f"dies from {dead[0]}" if sharp else f"dies at {', '.join(dead)}"
    # A notebook asks for the simulation on every machine; then no GPU measured it.
    changes = {} if device == "cuda" else {"provenance": Provenance.INTERPRETED}
    return Answer(verdict, said, changes=changes)


def _sweep_too_small(sweep: Sweep, device: str) -> str | None:
    return too_small(Case(OFF, sweep.config), device)


# --- What a fix computes.


def wrong(case: Case, device: str) -> str | None:
    """What one layer of a server computes wrongly, in one line, or ``None``."""
    with SETUPS[case.variant].process() as wiring:
        layer = part(wiring, device)
        q = query(layer, 8, 1)
        for lane in (0, 1):
            layer.decode(q, ones(8, device), lane)
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
        return graph_times([partial(attn.decode, q, ones(REPORT.batch, device))])


def added_time(setup: Setup, device: str) -> Answer:
    """Microseconds of one layer's decode launch in a graph at (2048, 128, 512) bf16, beside no buffer."""
    base, times = _layer_times(SETUPS["no_buffer"], device), _layer_times(setup, device)
    return answer("measured", us=times.p50, p20=times.p20, p80=times.p80, added_us=times.p50 - base.p50)


def ledger_cost(_: object, device: str, steps: int = 20) -> Answer:
    """How much slower an eager step of 61 layers is under a ledger, host time included."""
    model = Model(replace(SMALL, weight_bytes=1), device, Attention, Experts)
    x = torch.ones(SMALL.batch, dtype=SMALL.dtype, device=device)
    seq_lens = ones(SMALL.batch, device)

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
FIRST_USE = {name: SETUPS[name] for name in ("module_singleton", "decode_workspace")}
FIRST_USE_EXPECTED = {"module_singleton": TWO_BUFFERS, "decode_workspace": ONE_BUFFER}


def _nodes_expected(setup: Setup) -> str:
    return MORE_NODES if setup is SETUPS["clear_empty_rows"] else SAME_NODES


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
    Question("largest graph", LARGEST_GRAPH, server, LARGEST_GRAPH_EXPECTED, too_small),
    # Where it turns depends on fragments, so that no verdict is expected of a real device.
    Question("utilisation", UTILISATIONS, utilisation, unavailable=_sweep_too_small),
    Question("overlap", _BUFFERS, overlap, expected=lambda s: s.overlap),
    Question("other_model", _BUFFERS, other_model, expected=lambda s: s.other_model),
    Question("growth", _BUFFERS, growth, expected=lambda s: s.growth),
    Question("empty_rows", _BUFFERS, empty_rows, expected=lambda s: s.empty_rows),
    Question("layers in turn", _BUFFERS, layers_in_turn, expected=SEPARATE, also=(WHOSE_ROWS,)),
    Question(
        "threads",
        # Not clear_empty_rows: it shares nothing, and Triton's interpreter takes one thread at a time.
        {name: _BUFFERS[name] for name in _BUFFERS if name != "clear_empty_rows"},
        threads,
        expected=lambda s: s.overlap,
    ),
    Question("first use in two threads", FIRST_USE, first_use, expected=FIRST_USE_EXPECTED),
    Question("captured kernels", _BUFFERS, captured_kernels, expected=_nodes_expected),
    Question("outside torch", tuple(OUTSIDE), outside, expected=OUTSIDE),
    Question("added_time", _BUFFERS, added_time, unavailable=_untimed),
    Question("ledger_cost", ("AllocationLedger",), ledger_cost, unavailable=_untimed),
)
