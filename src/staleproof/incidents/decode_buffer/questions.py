"""The questions of incident 2: does a server live, what does its profile see, and what does a buffer hold."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from staleproof.device import Provenance
from staleproof.evidence.canary import plant, row_states
from staleproof.evidence.ledger import size_text
from staleproof.grades import Evidence, Grade
from staleproof.graph import capture
from staleproof.incidents.decode_buffer import correct
from staleproof.incidents.decode_buffer.allocator import GIB, oom_fields
from staleproof.incidents.decode_buffer.buffer import (
    LAYERS,
    ROWS,
    Turn,
    changed,
    in_turn,
    kept,
    ones,
    part,
    query,
    serving,
)
from staleproof.incidents.decode_buffer.released import ROWS as GRAPH_ROWS
from staleproof.incidents.decode_buffer.released import Released, profiled
from staleproof.incidents.decode_buffer.scene import DIES, LIVES, Outcome
from staleproof.incidents.decode_buffer.setups import (
    ATTENTION,
    MAX_NUM_SEQS,
    OFF,
    REPORT,
    SETUPS,
    SMALL,
    ServerCase,
    process,
    run_servers,
)
from staleproof.kernels.vllm_sources import package
from staleproof.lab import Answer, Fix, Incident, Scene, bad, good, good_if
from staleproof.ops.decode_workspace import WorkspaceLocked

incident = Incident("decode_buffer")

# --- A whole server. Real memory on CUDA, under a limit; simulated on a CPU.

SERVERS = {name: ServerCase(name) for name in SETUPS}
# Each starts twice: without and with a ledger.
STARTS = {
    name: Scene(f"servers, {name}", partial(run_servers, [case, replace(case, watched=True)]))
    for name, case in SERVERS.items()
}


def starts(case: ServerCase) -> Scene:
    """The two starts of a variant, which five questions share."""
    return STARTS[case.variant]


def too_small(case: ServerCase, device: str) -> str | None:
    """Why this device cannot hold the server of ``case``, or ``None``."""
    if device != "cuda":
        return None
    if case.config is None:
        # The bytes outside the report's plan, a gibibyte each for weights and KV cache, and the peak.
        wanted = int(18.4 * GIB) + 2 * REPORT.workspace_bytes + 2 * GIB
    else:
        wanted = case.config.total_bytes
    free = torch.cuda.mem_get_info()[0]
    if free >= wanted:
        return None
    return f"needs {size_text(wanted)} of free GPU memory, {size_text(free)} is free"


@incident.question(
    "largest graph", {f"{SMALL.batch} rows": SERVERS[OFF]}, expect=DIES, needs=too_small, scene=starts
)
@incident.question(
    "largest graph",
    {f"{rows} rows": ServerCase(OFF, changes={"batch": rows}) for rows in (16, 32, 48)},
    expect=LIVES,
    needs=too_small,
)
@incident.question(
    "ablation",
    {"a quarter of the batch": ServerCase(OFF, changes={"batch": SMALL.batch // 4})},
    expect=LIVES,
    needs=too_small,
)
@incident.question(
    "ablation",
    {
        "all four": SERVERS[OFF],
        "not kept": SERVERS["no_buffer"],
        "one for all layers": SERVERS["module_singleton"],
        "made before the profile": SERVERS["zeros_before_profile"],
    },
    expect={
        "all four": DIES,
        "not kept": LIVES,
        "one for all layers": LIVES,
        "made before the profile": LIVES,
    },
    needs=too_small,
    scene=starts,
)
@incident.question(
    "server",
    SERVERS,
    expect={
        "no_buffer": LIVES,
        "zeros_per_layer": DIES,
        "zeros_before_profile": LIVES,
        "module_singleton": LIVES,
        "decode_workspace": LIVES,
        "clear_empty_rows": LIVES,
        "lazy_moe_workspace": DIES,
    },
    needs=too_small,
    scene=starts,
)
def server(case: ServerCase, device: str, started: Sequence[Outcome] = ()) -> Answer:
    """A server starts and serves. Does it run out of memory?

    ``started`` holds its outcome if it was started already.
    """
    outcome = started[0] if started else run_servers([case], device)[0]
    numbers: dict[str, Any] = {
        "died_in": outcome.died_in,
        "kv_bytes": outcome.kv_bytes,
        "peak_bytes": outcome.peak_bytes,
        **{f"oom_{name}": text for name, text in oom_fields(outcome.error or "").items()},
    }
    if outcome.verdict == LIVES:
        grew = outcome.usages["serve"].allocated - outcome.usages["capture"].allocated
        numbers["grew_while_serving_bytes"] = grew
    return good_if(outcome.verdict == LIVES, outcome.verdict, **numbers)


@incident.question(
    "ledger",
    SERVERS,
    expect={
        "no_buffer": "fits",
        "zeros_per_layer": "will not fit",
        "zeros_before_profile": "fits",
        "module_singleton": "fits",
        "decode_workspace": "fits",
        "clear_empty_rows": "fits",
        "lazy_moe_workspace": "will not fit",
    },
    needs=too_small,
    scene=starts,
)
def ledger(case: ServerCase, device: str, started: Sequence[Outcome]) -> Answer:
    """A ledger watches the start. Does it say, before the first request, that the server will die?"""
    watched = started[1]
    report = watched.ready
    assert report is not None
    return good_if(
        bool(report.fits),
        "fits" if report.fits else "will not fit",
        note=report.sentence,
        owners=[owner.name for owner in report.surprises],
        headroom_bytes=report.headroom,
        then=watched.verdict,
    )


@incident.question(
    "profile",
    SERVERS,
    expect={
        "no_buffer": "nothing kept",
        "zeros_per_layer": "unseen",
        "zeros_before_profile": "seen",
        "module_singleton": "unseen",
        "decode_workspace": "seen",
        "clear_empty_rows": "nothing kept",
        "lazy_moe_workspace": "unseen",
    },
    needs=too_small,
    scene=starts,
)
def profile(case: ServerCase, device: str, started: Sequence[Outcome]) -> Answer:
    """How much of the kept memory was already allocated in the profile run?"""
    watched = started[1]
    assert watched.ready is not None
    late = sum(owner.predicted for owner in watched.ready.surprises)
    early = watched.kept_bytes - sum(owner.bytes for owner in watched.ready.surprises)
    buffers = (late + early) / SMALL.decode_out_bytes
    if late:
        return bad("unseen", buffers=buffers)
    return good("seen" if early else "nothing kept", buffers=buffers)


def wrong_output(case: ServerCase, device: str) -> str | None:
    """What one layer of a server computes wrongly, or what its buffer does to others, in one line."""
    if found := correct.wrong_rows(case.variant, device):
        return found
    answers = (ask(case.variant, device) for ask in (other_model, growth))
    return next((answer.verdict for answer in answers if answer.outcome == "bad"), None)


incident.fixes(
    server,
    {
        name: Fix(off=ServerCase(OFF), on=ServerCase(name))
        for name in ("decode_workspace", "clear_empty_rows")
    },
    compare=wrong_output,
    needs=too_small,
)


# --- The report's own size: 61 x (2048, 128, 512) bf16, then a prefill that asks for 3.94 GiB. On CUDA the
# server leaves as many bytes outside its plan as the report's; elsewhere it is simulated on the report's
# 184 GiB. "buffers only" has no transient memory between the buffers, so decoding takes only the buffers.

ALONE = ServerCase(OFF, None, {"workspace_per_token": 64}, watched=True)
STARTED_ALONE = Scene("buffers only", partial(run_servers, [ALONE]))


@incident.question(
    "true_size", {"zeros_per_layer, buffers only": ALONE}, expect=LIVES, needs=too_small, scene=STARTED_ALONE
)
@incident.question(
    "true_size",
    {
        "zeros_per_layer": ServerCase(OFF, None, watched=True),
        "zeros_per_layer, batch 1024": ServerCase(OFF, None, {"batch": MAX_NUM_SEQS}),
        "decode_workspace": ServerCase("decode_workspace", None),
        "clear_empty_rows": ServerCase("clear_empty_rows", None),
    },
    expect={
        "zeros_per_layer": DIES,
        "zeros_per_layer, batch 1024": LIVES,
        "decode_workspace": LIVES,
        "clear_empty_rows": LIVES,
    },
    needs=too_small,
)
def true_size(case: ServerCase, device: str, started: Sequence[Outcome] = ()) -> Answer:
    """A server of the report's own size. Does it die, and how many bytes did decoding take?"""
    started = started or run_servers([case], device)
    answer = server(case, device, started)
    return replace(answer, numbers={**answer.numbers, "taken_bytes": started[0].taken_bytes()})


@incident.question(
    "prediction", {"zeros_per_layer": ALONE}, expect="within 1 %", needs=too_small, scene=STARTED_ALONE
)
def prediction(case: ServerCase, device: str, started: Sequence[Outcome]) -> Answer:
    """How far is the ledger's prediction after one layer from the bytes that all layers took?"""
    (outcome,) = started
    assert outcome.probed is not None
    owner = outcome.probed.surprises[0]
    taken = outcome.taken_bytes()
    near = abs(taken / owner.predicted - 1) <= 0.01
    numbers = {"predicted_bytes": owner.predicted, "taken_bytes": taken}
    return good_if(near, "within 1 %" if near else "off", note=str(owner), **numbers)


# --- vLLM's own profile run, and what its first decode keeps. Most changes remove one of the five steps.

_EAGER = Released("0.18.1", "CUTLASS")
_DECODE = (("uniform_decode", True), ("num_tokens", GRAPH_ROWS))


def of_release(case: Released) -> Evidence:
    """Whose code runs."""
    return Evidence(Grade.REAL, f"vLLM {case.version}'s runner and backend on a CPU")


@incident.question(
    "profile, released",
    {
        "vLLM 0.18.1, CUTLASS": _EAGER,
        "vLLM 0.18.1, FlashInfer": Released("0.18.1", "FlashInfer"),
        "vLLM 0.18.1, metadata built": replace(_EAGER, change=(("force_attention", True),)),
        # A batch as large as the profile's is larger than every graph, whether it is a profile or not.
        "vLLM 0.18.1, not as a profile": replace(_EAGER, change=(("is_profile", False),)),
        "vLLM 0.18.1, a batch that fits a graph": replace(_EAGER, change=_DECODE),
        "vLLM 0.18.1, both": replace(_EAGER, change=(*_DECODE, ("is_profile", False))),
        "vLLM 0.19.1, CUTLASS": Released("0.19.1", "CUTLASS"),
        "vLLM 0.19.1, FlashInfer": Released("0.19.1", "FlashInfer"),
        "vLLM 0.20.0, CUTLASS": Released("0.20.0", "CUTLASS"),
        "vLLM 0.20.0, FlashInfer": Released("0.20.0", "FlashInfer"),
    },
    expect={
        "vLLM 0.18.1, CUTLASS": "unseen",
        "vLLM 0.18.1, FlashInfer": "unseen",
        "vLLM 0.18.1, metadata built": "seen",
        "vLLM 0.18.1, not as a profile": "unseen",
        "vLLM 0.18.1, a batch that fits a graph": "unseen",
        "vLLM 0.18.1, both": "seen",
        "vLLM 0.19.1, CUTLASS": "unseen",
        "vLLM 0.19.1, FlashInfer": "unseen",
        "vLLM 0.20.0, CUTLASS": "nothing kept",
        "vLLM 0.20.0, FlashInfer": "nothing kept",
    },
    evidence=of_release,
)
def profile_released(case: Released, device: str) -> Answer:
    """A release's own profile run. Does it make the buffer that its first captured decode keeps?"""
    numbers = profiled(case, package(case.version))
    early, late = numbers["kept_by_profile"], numbers["kept_by_capture"]
    # vLLM's code runs on the CPU even if there is a GPU.
    numbers["provenance"] = None if device == "cpu" else Provenance.INTERPRETED
    if late and not early:
        return bad("unseen", **numbers)
    return good("seen" if early else "nothing kept", **numbers)


# --- The buffer of one layer.

POOL = "without a buffer these are blocks of the graph's memory pool, which its allocator hands out"


@incident.question(
    "overlap",
    ATTENTION,
    expect={
        "no_buffer": "separate",
        "zeros_per_layer": "mixed",
        "zeros_before_profile": "mixed",
        "module_singleton": "mixed",
        "decode_workspace": "separate",
        "clear_empty_rows": "separate",
    },
)
def overlap(variant: str, device: str, rounds: int = 20) -> Answer:
    """Whether one of two micro-batches in flight reads the other's output; each has its canary.

    On CUDA they run on two streams, with a delay before the output is read; elsewhere they alternate
    on the host, as in a dual-batch engine.
    """
    seq_lens, mixed = ones(ROWS, device), 0
    with serving(variant, device, lanes=2) as (attn, queries):
        copies = [torch.empty_like(q) for q in queries]
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
            mixed += sum(changed(x, stage) for stage, x in enumerate(copies, 1))
    return good_if(not mixed, "mixed" if mixed else "separate", mixed_rows=mixed, rows=2 * ROWS * rounds)


@incident.question(
    "other_model",
    ATTENTION,
    expect={
        "no_buffer": "right shape",
        "zeros_per_layer": "right shape",
        "zeros_before_profile": "right shape",
        "module_singleton": "wrong shape",
        "decode_workspace": "right shape",
        "clear_empty_rows": "right shape",
    },
)
def other_model(variant: str, device: str) -> Answer:
    """The shape that a model gets after a draft model of other heads and rank has decoded."""
    with process(variant) as wiring:
        draft, target = part(wiring, device, heads=4, rank=32), part(wiring, device)
        draft.decode(query(draft, ROWS, 1), ones(ROWS, device))
        q = query(target, ROWS, 2)
        got = target.output(q, 0).shape
    right = got == q.shape
    return good_if(right, "right shape" if right else "wrong shape", asked=list(q.shape), got=list(got))


@incident.question(
    "growth",
    ATTENTION,
    expect={
        "no_buffer": "safe",
        "zeros_per_layer": "writes freed memory",
        "zeros_before_profile": "writes freed memory",
        "module_singleton": "writes freed memory",
        "decode_workspace": "refused",
        "clear_empty_rows": "safe",
    },
)
def growth(variant: str, device: str) -> Answer:
    """Whether a captured graph writes freed memory after a batch larger than the captured one.

    A CUDA graph keeps addresses, not tensors. On CUDA another tensor takes the freed block; elsewhere
    the old buffer itself takes its place.
    """
    numbers: dict[str, Any] = {}
    with serving(variant, device) as (attn, (q,)):
        seq_lens = ones(ROWS, device)
        graph = capture(lambda: attn.decode(q, seq_lens), device)
        before = kept(attn)
        try:
            attn.decode(query(attn, 2 * ROWS, 2), ones(2 * ROWS, device))
        except WorkspaceLocked as refusal:
            return good("refused", said=str(refusal))
        freed = {at: x for at, x in before.items() if at not in kept(attn)}
        if freed:
            at, tenant = next(iter(freed.items()))
            if device == "cuda":
                shape, dtype = tenant.shape, tenant.dtype
                del before, freed, tenant
                tenant = torch.empty(shape, dtype=dtype, device=device)
                numbers["same_address"] = tenant.data_ptr() == at
            plant(tenant, 3)
            graph.replay()
            numbers["damaged_rows"] = changed(tenant, 3)
    return bad("writes freed memory", **numbers) if numbers.get("damaged_rows") else good("safe", **numbers)


@incident.question(
    "empty_rows",
    ATTENTION,
    expect={
        "no_buffer": "stale",
        "zeros_per_layer": "stale",
        "zeros_before_profile": "stale",
        "module_singleton": "stale",
        "decode_workspace": "stale",
        "clear_empty_rows": "cleared",
    },
)
def empty_rows(variant: str, device: str) -> Answer:
    """What the seven empty rows of eight contain after a replay over canaries."""
    with serving(variant, device) as (attn, (q,)):
        seq_lens = ones(ROWS, device)
        outs: list[torch.Tensor] = []
        graph = capture(lambda: outs.append(attn.decode(q, seq_lens)), device)
        plant(outs[-1], 2)
        seq_lens[1:] = 0
        graph.replay()
        states = row_states(outs[-1][1:], 2)
    cleared = set(states) == {"zero"}
    counts = {"zero_rows": states.count("zero"), "rows": len(states)}
    return good_if(cleared, "cleared" if cleared else "stale", **counts)


# One step of all layers in turn; two questions use it.
IN_TURN = {name: Scene(f"layers in turn, {name}", partial(in_turn, name)) for name in ATTENTION}


@incident.question("layers in turn", ATTENTION, expect="separate", scene=IN_TURN.__getitem__)
def layers_in_turn(name: str, device: str, turn: Turn) -> Answer:
    """Whether layers that decode one after another disturb each other's live rows."""
    verdict = "mixed" if turn.wrong_rows else "separate"
    return good_if(not turn.wrong_rows, verdict, wrong_rows=turn.wrong_rows, layers=LAYERS)


@incident.question(
    "in empty rows",
    ATTENTION,
    expect={
        # The allocator decides.
        "no_buffer": None,
        "zeros_per_layer": "its own",
        "zeros_before_profile": "its own",
        "module_singleton": "another layer's",
        "decode_workspace": "another layer's",
        "clear_empty_rows": "cleared",
    },
    scene=IN_TURN.__getitem__,
)
def in_empty_rows(name: str, device: str, turn: Turn) -> Answer:
    """Whose rows of the full step the empty ones hold: the worst, since layers may differ.

    In a shared buffer, the layer that decoded last finds its own rows.
    """
    worst_first = ("another layer's", "nobody's", "its own", "cleared")
    worst = next(one for one in worst_first if one in turn.owners)
    note = POOL if name == "no_buffer" else ""
    return good_if(worst == "cleared", worst, owners=turn.owners, note=note)
