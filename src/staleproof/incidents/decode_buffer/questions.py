"""The questions of incident 2: one function a question, each takes a variant and returns Findings.

A server that dies is started in a process of its own on CUDA; ``python -m`` of this module is that
process.
"""

from __future__ import annotations

import contextlib
import gc
import math
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import staleproof
from staleproof import device as devices
from staleproof.evidence.canary import plant, row_states
from staleproof.evidence.ledger import AllocationLedger, Usage, owned_tensors, size_text
from staleproof.harness.findings import Finding, finding, not_run, off_on_off
from staleproof.harness.graph import capture
from staleproof.incidents.decode_buffer import broken
from staleproof.incidents.decode_buffer.scene import (
    DIES,
    GIB,
    LIVES,
    Attention,
    CudaMemory,
    Experts,
    Memory,
    Model,
    Outcome,
    Part,
    Server,
    ServerConfig,
    SimulatedMemory,
    decode_out_bytes,
    oom_fields,
)
from staleproof.ops.decode_workspace import DecodeWorkspace, WorkspaceLocked

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INCIDENT = "decode_buffer"
SERVER_TIMEOUT_S = 300

REPORT = ServerConfig()
# A thirty-second of everything. Blocks round differently at this size and leave fewer fragments, so
# the share that the engine leaves outside its plan is a little under the report's tenth.
SMALL = replace(REPORT.scaled(32), utilisation=0.92)
# The report's command caps a decode step here; 256 MiB a layer needs its capture size, 2048.
MAX_NUM_SEQS = 1024

WILL_NOT_FIT, FITS = "will not fit", "fits"
SEEN, UNSEEN, NOTHING = "seen", "unseen", "nothing kept"
MIXED, SEPARATE = "mixed", "separate"
WRONG_SHAPE, RIGHT_SHAPE = "wrong shape", "right shape"
FREED, REFUSED, SAFE = "writes freed memory", "refused", "safe"
CLEARED, STALE = "cleared", "stale"


class KeyedWorkspace(Attention):
    """Our :class:`DecodeWorkspace`, asked for the largest batch before the profile run."""

    def __init__(self, config: ServerConfig, device: str, workspace: DecodeWorkspace) -> None:
        super().__init__(config, device)
        self.workspace = workspace
        shape = (config.batch, config.heads, config.rank)
        workspace.get(shape, config.dtype, device, micro_batch=0)

    def output(self, q: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """(batch, heads, rank) of the workspace."""
        return self.workspace.get(q.shape, q.dtype, q.device, micro_batch=micro_batch)


class ClearedRows(Attention):
    """No buffer at all: fresh memory, and ``clear_empty_rows`` behind the kernel."""

    def decode(self, q: torch.Tensor, seq_lens: torch.Tensor, micro_batch: int = 0) -> torch.Tensor:
        """The output (batch, heads, rank) of one decode launch, empty rows 0."""
        out = super().decode(q, seq_lens, micro_batch)
        # No kernel runs on a meta tensor, and this one allocates nothing.
        if not out.is_meta:
            staleproof.clear_empty_rows(out, seq_lens)
        return out


@dataclass(frozen=True)
class Wiring:
    """The parts of one server process, their state fresh."""

    attention: Part = Attention
    experts: Part = Experts
    ready: Callable[[], object] = lambda: None


def _keyed() -> Wiring:
    workspace = DecodeWorkspace()
    return Wiring(partial(KeyedWorkspace, workspace=workspace), ready=workspace.lock)


def _singleton() -> Wiring:
    broken.forget_singleton()
    return Wiring(broken.ModuleSingleton)


@dataclass(frozen=True)
class Setup:
    """One row of the verdict matrix: a buffer, and what must come out.

    Attributes:
        wire: makes the parts of a fresh process.
        source: where the variant comes from.
        server: whether the server dies; the ledger must say so beforehand.
        profile: whether the profile run counted what is kept.
        overlap: what two micro-batches in flight make of each other's output.
        other_model: the shape that a model of other heads and rank is handed.
        growth: what a batch larger than the captured one does.
        empty_rows: what an empty row of the output holds after a step.
        fix: whether it is one of ours, verified off / on / off.
    """

    wire: Callable[[], Wiring]
    source: str
    server: str
    profile: str
    overlap: str | None = None
    other_model: str | None = None
    growth: str | None = None
    empty_rows: str | None = None
    fix: bool = False


SETUPS: dict[str, Setup] = {
    "no_buffer": Setup(
        Wiring, "vLLM before 0.18.0 and from 0.20.0 on", LIVES, NOTHING, SEPARATE, RIGHT_SHAPE, SAFE, STALE
    ),
    "zeros_per_layer": Setup(
        partial(Wiring, broken.ZerosPerLayer), "vLLM #37442", DIES, UNSEEN, MIXED, RIGHT_SHAPE, FREED, STALE
    ),
    "zeros_before_profile": Setup(
        partial(Wiring, broken.ZerosBeforeProfile),
        "for comparison",
        LIVES,
        SEEN,
        MIXED,
        RIGHT_SHAPE,
        FREED,
        STALE,
    ),
    "module_singleton": Setup(_singleton, "vLLM #37799", LIVES, UNSEEN, MIXED, WRONG_SHAPE, FREED, STALE),
    "decode_workspace": Setup(_keyed, "ours", LIVES, SEEN, SEPARATE, RIGHT_SHAPE, REFUSED, STALE, fix=True),
    "clear_empty_rows": Setup(
        partial(Wiring, ClearedRows), "ours", LIVES, NOTHING, SEPARATE, RIGHT_SHAPE, SAFE, CLEARED, fix=True
    ),
    "lazy_moe_workspace": Setup(
        partial(Wiring, Attention, broken.LazyMoeWorkspace), "vLLM #40655, #40420", DIES, UNSEEN
    ),
}
OFF = "zeros_per_layer"
ATTENTION = [name for name, setup in SETUPS.items() if setup.overlap is not None]


class Case(NamedTuple):
    """One server run: a variant, the sizes (None: the report's, on the whole device), a ledger."""

    variant: str
    config: ServerConfig | None = SMALL
    changes: dict[str, Any] = {}  # noqa: RUF012
    watched: bool = False


def true_size_config(total_bytes: int) -> ServerConfig:
    """The report's server on a device of another size, with as many bytes outside its plan.

    Raises:
        ValueError: too small a device for it.
    """
    outside = REPORT.total_bytes - int(REPORT.utilisation * REPORT.total_bytes)
    share = 1 - outside / total_bytes
    weights = int(share * total_bytes) // 2
    return replace(REPORT, total_bytes=total_bytes, utilisation=share, weight_bytes=weights)


def run_server(case: Case, device: str) -> Outcome:
    """Start one server and let it serve, in this process."""
    memory: Memory
    if device == "cuda":
        memory = CudaMemory(None if case.config is None else case.config.total_bytes)
        config = case.config or true_size_config(memory.total_bytes)
    else:
        config = case.config or REPORT
        memory = SimulatedMemory(config.total_bytes)
    wiring = SETUPS[case.variant].wire()
    server = Server(replace(config, **case.changes), memory, wiring.attention, wiring.experts, wiring.ready)
    ledger = None
    if case.watched:
        ledger = AllocationLedger(server.model, budget_bytes=memory.total_bytes, usage=memory.usage)
    try:
        return server.start(ledger)
    finally:
        broken.forget_singleton()


def run_servers(cases: Sequence[Case], device: str) -> list[Outcome]:
    """Start one server after another: on CUDA in a process of their own, elsewhere simulated here.

    Raises:
        RuntimeError: the process ended without an answer.
    """
    if device != "cuda":
        return [run_server(case, device) for case in cases]
    done = subprocess.run(
        [sys.executable, "-m", "staleproof.incidents.decode_buffer.questions"],
        input=pickle.dumps(cases),
        capture_output=True,
        timeout=SERVER_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace")
        raise RuntimeError(f"the server's process ended with {done.returncode}: {said}")
    return pickle.loads(done.stdout)


def _main() -> None:
    devices.select("cuda")
    outcomes = []
    for case in pickle.load(sys.stdin.buffer):
        outcomes.append(run_server(case, "cuda"))
        gc.collect()
        torch.cuda.empty_cache()
    sys.stdout.buffer.write(pickle.dumps(outcomes))


def _numbers(outcome: Outcome) -> dict[str, Any]:
    fields = {f"oom_{k}": v for k, v in oom_fields(outcome.error or "").items()}
    return {
        "died_in": outcome.died_in,
        "kv_bytes": outcome.kv_bytes,
        "peak_bytes": outcome.peak_bytes,
        **fields,
    }


def servers(device: str) -> Iterator[Finding]:
    """Which server dies, off / on / off of the fixes, and what the ledger says beforehand.

    Real memory on CUDA, under a limit; simulated on a CPU.
    """
    plain = [Case(name) for name in SETUPS]
    cases = [*plain, Case(OFF), *(case._replace(watched=True) for case in plain)]
    try:
        outcomes = run_servers(cases, device)
    except ValueError as error:
        yield not_run(INCIDENT, "server", "all variants", str(error))
        return
    first = dict(zip(SETUPS, outcomes, strict=False))
    again = outcomes[len(SETUPS)]
    watched = dict(zip(SETUPS, outcomes[len(SETUPS) + 1 :], strict=True))
    for name, setup in SETUPS.items():
        seen = first[name]
        yield finding(INCIDENT, "server", name, seen.verdict, expected=setup.server, **_numbers(seen))
    for name, setup in SETUPS.items():
        yield _ledger_finding(name, setup, watched[name])
        yield _profile_finding(name, setup, watched[name])
    for name, setup in SETUPS.items():
        if setup.fix:
            yield off_on_off(
                INCIDENT, name, off=first[OFF].verdict, on=first[name].verdict, off_again=again.verdict
            )


def _ledger_finding(name: str, setup: Setup, seen: Outcome) -> Finding:
    assert seen.ready is not None
    return finding(
        INCIDENT,
        "ledger",
        name,
        FITS if seen.ready.fits else WILL_NOT_FIT,
        expected=WILL_NOT_FIT if setup.server == DIES else FITS,
        note=seen.ready.sentence,
        owners=[o.name for o in seen.ready.surprises],
        headroom_bytes=seen.ready.headroom,
        then=seen.verdict,
    )


def _profile_finding(name: str, setup: Setup, seen: Outcome) -> Finding:
    assert seen.ready is not None
    late = sum(owner.predicted for owner in seen.ready.surprises)
    early = seen.kept_bytes - sum(owner.bytes for owner in seen.ready.surprises)
    verdict = UNSEEN if late else SEEN if early else NOTHING
    each = SMALL.decode_out_bytes
    return finding(INCIDENT, "profile", name, verdict, expected=setup.profile, buffers=(late + early) / each)


# Name -> the server run without that ingredient, and what must come out.
INGREDIENTS: dict[str, tuple[Case, str]] = {
    "all four": (Case(OFF), DIES),
    "not kept": (Case("no_buffer"), LIVES),
    "one for all layers": (Case("module_singleton"), LIVES),
    "made before the profile": (Case("zeros_before_profile"), LIVES),
    "a quarter of the batch": (Case(OFF, changes={"batch": SMALL.batch // 4}), LIVES),
}


def ablation(device: str) -> Iterator[Finding]:
    """The failure with each of its four ingredients taken away."""
    outcomes = run_servers([case for case, _ in INGREDIENTS.values()], device)
    for (name, (_, expected)), seen in zip(INGREDIENTS.items(), outcomes, strict=True):
        yield finding(INCIDENT, "ablation", name, seen.verdict, expected=expected, **_numbers(seen))


def true_size(device: str) -> Iterator[Finding]:
    """The report's own size: 61 x (2048, 128, 512) bf16, then 3.94 GiB.

    On CUDA with real memory, leaving as many bytes outside the plan as the report does; elsewhere
    simulated on the report's 184 GiB.
    """
    question = "true_size"
    capped = {"batch": MAX_NUM_SEQS}
    # Without transients between them, the buffers are all that decoding takes.
    bare = {"workspace_per_token": 64}
    asked: dict[str, tuple[Case, str]] = {
        OFF: (Case(OFF, None, watched=True), DIES),
        f"{OFF}, batch {MAX_NUM_SEQS}": (Case(OFF, None, capped), LIVES),
        "decode_workspace": (Case("decode_workspace", None), LIVES),
        "clear_empty_rows": (Case("clear_empty_rows", None), LIVES),
        f"{OFF}, buffers only": (Case(OFF, None, bare, watched=True), LIVES),
    }
    if device == "cuda" and (short := _too_small()):
        for name in asked:
            yield not_run(INCIDENT, question, name, short)
        return
    outcomes = run_servers([case for case, _ in asked.values()], device)
    for (name, (_, expected)), seen in zip(asked.items(), outcomes, strict=True):
        numbers = _numbers(seen) | {"taken_bytes": seen.taken_bytes()}
        yield finding(INCIDENT, question, name, seen.verdict, expected=expected, **numbers)
    yield _prediction(outcomes[-1], outcomes[0])


def _prediction(bare: Outcome, whole: Outcome) -> Finding:
    """The ledger's figure after one layer, against what the device gave once all had decoded."""
    assert bare.probed is not None
    predicted = bare.probed.surprises[0].predicted
    error = abs(bare.taken_bytes() / predicted - 1)
    return finding(
        INCIDENT,
        "prediction",
        OFF,
        "within 1 %" if error <= 0.01 else "off",
        expected="within 1 %",
        note=str(bare.probed.surprises[0]),
        predicted_bytes=predicted,
        taken_bytes=bare.taken_bytes(),
        taken_with_fragments_bytes=whole.taken_bytes(),
    )


def _too_small() -> str | None:
    free = torch.cuda.mem_get_info()[0]
    # Outside the plan, then weights and KV cache of a gibibyte at least, and the peak.
    wanted = 18.4 * GIB + 2 * REPORT.workspace_bytes + 2 * GIB
    if free >= wanted:
        return None
    return f"needs {size_text(int(wanted))} of free GPU memory, {size_text(free)} is free"


def _part(wiring: Wiring, device: str, **sizes: int) -> Attention:
    config = replace(SMALL, **{"batch": 8, "heads": 8, "rank": 64, "layers": 1, **sizes})  # type: ignore[arg-type]
    part = wiring.attention(config, device)
    assert isinstance(part, Attention)
    return part


def _query(attn: Attention, rows: int, stage: int) -> torch.Tensor:
    """(rows, heads, rank) whose every element is the canary ``stage``."""
    return plant(attn.weight.new_empty(rows, *attn.weight.shape), stage)


def _ones(rows: int, device: str) -> torch.Tensor:
    return torch.ones(rows, dtype=torch.int32, device=device)


def overlap(name: str, device: str, rounds: int = 20) -> Finding:
    """Two micro-batches in flight, each with its canary; who reads the other's?

    On CUDA on two streams, the consumer behind a delay; elsewhere interleaved on the host, as a
    dual-batch engine interleaves them.
    """
    setup = SETUPS[name]
    wiring = setup.wire()
    attn = _part(wiring, device)
    rows, seq_lens = 8, _ones(8, device)
    queries = [_query(attn, rows, stage) for stage in (1, 2)]
    seen = [torch.empty_like(q) for q in queries]
    for lane, q in enumerate(queries):
        attn.decode(q, seq_lens, lane)
    wiring.ready()
    lanes: list[Any] = [contextlib.nullcontext()] * 2
    if device == "cuda":
        torch.cuda.synchronize()
        lanes = [torch.cuda.stream(torch.cuda.Stream()) for _ in queries]
    mixed = 0
    for _ in range(rounds):
        outs = []
        for lane, q in enumerate(queries):
            with lanes[lane]:
                outs.append(attn.decode(q, seq_lens, lane))
                if device == "cuda":
                    torch.cuda._sleep(200_000)
        for lane, out in enumerate(outs):
            with lanes[lane]:
                seen[lane].copy_(out)
        if device == "cuda":
            torch.cuda.synchronize()
        # "unwritten" says that every canary of this stage is there, bit for bit.
        states = [row_states(x, stage) for stage, x in enumerate(seen, 1)]
        mixed += sum(state != "unwritten" for one in states for state in one)
    broken.forget_singleton()
    return finding(
        INCIDENT,
        "overlap",
        name,
        MIXED if mixed else SEPARATE,
        expected=setup.overlap,
        mixed_rows=mixed,
        rows=2 * rows * rounds,
    )


def other_model(name: str, device: str) -> Finding:
    """A draft model of other heads and rank decodes first, then the target asks for its output."""
    setup = SETUPS[name]
    wiring = setup.wire()
    draft = _part(wiring, device, heads=4, rank=32)
    target = _part(wiring, device)
    draft.decode(_query(draft, 8, 1), _ones(8, device))
    q = _query(target, 8, 2)
    got = tuple(target.output(q, 0).shape)
    broken.forget_singleton()
    return finding(
        INCIDENT,
        "other_model",
        name,
        RIGHT_SHAPE if got == q.shape else WRONG_SHAPE,
        expected=setup.other_model,
        asked=list(q.shape),
        got=list(got),
    )


def _kept(attn: Attention) -> dict[int, torch.Tensor]:
    """Address -> memory that outlives a call, weights aside."""
    weights = {p.data_ptr() for p in attn.parameters()}
    held = {t.untyped_storage().data_ptr(): t for _, _, t in owned_tensors(attn)}
    return {at: t for at, t in held.items() if at not in weights}


def growth(name: str, device: str) -> Finding:
    """A batch larger than the captured one comes; whose memory does the graph write afterwards?

    A CUDA graph holds addresses, not tensors. On CUDA the freed block is taken by a real tenant;
    elsewhere the old buffer itself stands for the next tenant's memory.
    """
    setup = SETUPS[name]
    wiring = setup.wire()
    attn = _part(wiring, device)
    q, seq_lens = _query(attn, 8, 1), _ones(8, device)
    attn.decode(q, seq_lens)
    wiring.ready()
    graph = capture(lambda: attn.decode(q, seq_lens), device)
    before = _kept(attn)
    numbers: dict[str, Any] = {}
    try:
        attn.decode(_query(attn, 16, 2), _ones(16, device))
        freed = {at: x for at, x in before.items() if at not in _kept(attn)}
        verdict = SAFE
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
    except WorkspaceLocked as refusal:
        verdict, numbers["said"] = REFUSED, str(refusal)
    broken.forget_singleton()
    return finding(INCIDENT, "growth", name, verdict, expected=setup.growth, **numbers)


def empty_rows(name: str, device: str) -> Finding:
    """One live row of eight in a replay, over canaries: what do the seven hold?"""
    setup = SETUPS[name]
    attn = _part(setup.wire(), device)
    q, seq_lens = _query(attn, 8, 1), _ones(8, device)
    outs: list[torch.Tensor] = []
    graph = capture(lambda: outs.append(attn.decode(q, seq_lens)), device)
    plant(outs[-1], 2)
    seq_lens[1:] = 0
    graph.replay()
    states = row_states(outs[-1][1:], 2)
    broken.forget_singleton()
    return finding(
        INCIDENT,
        "empty_rows",
        name,
        CLEARED if set(states) == {"zero"} else STALE,
        expected=setup.empty_rows,
        zero_rows=states.count("zero"),
        rows=len(states),
    )


def added_time(device: str) -> Iterator[Finding]:
    """Microseconds of one layer's decode launch in a graph, at (2048, 128, 512) bf16."""
    if device != "cuda":
        for name in ATTENTION:
            yield not_run(INCIDENT, "added_time", name, "timings need a CUDA GPU")
        return
    from staleproof.harness.measure import graph_times

    base = math.nan
    for name in ATTENTION:
        attn = SETUPS[name].wire().attention(REPORT, device)
        assert isinstance(attn, Attention)
        q = attn.weight.new_ones(REPORT.batch, REPORT.heads, REPORT.rank)
        seq_lens = _ones(REPORT.batch, device)
        times = graph_times([partial(attn.decode, q, seq_lens)])
        base = times.p50 if math.isnan(base) else base
        broken.forget_singleton()
        yield finding(
            INCIDENT,
            "added_time",
            name,
            "measured",
            us=times.p50,
            p20=times.p20,
            p80=times.p80,
            added_us=times.p50 - base,
        )


def ledger_cost(device: str, steps: int = 20) -> Finding:
    """How much slower an eager step of 61 layers is under a ledger, host time included."""
    question = "ledger_cost"
    if device != "cuda":
        return not_run(INCIDENT, question, "AllocationLedger", "timings need a CUDA GPU")
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
    return finding(
        INCIDENT,
        question,
        "AllocationLedger",
        "measured",
        off_us=off * 1e6,
        on_us=on * 1e6,
        slow_down=on / off,
        slow_down_with_entering_and_leaving=whole / off,
        off_again_us=seconds() * 1e6,
        steps=steps,
    )


class Arithmetic(NamedTuple):
    """One reading of the report: rows of a decode step, bytes a layer and over all layers."""

    batch: int
    layer_bytes: int
    total_bytes: int
    source: str


def arithmetic() -> list[Arithmetic]:
    """Both readings of "~256 MiB a layer, 15 GiB", from shapes."""
    readings = (
        (2048, "max_cudagraph_capture_size; the comment on vLLM #37442"),
        (MAX_NUM_SEQS, "--max-num-seqs of the same command; the dispatcher keeps no larger size"),
    )
    found = []
    for batch, source in readings:
        each = decode_out_bytes(batch, REPORT.heads, rank=REPORT.rank)
        found.append(Arithmetic(batch, each, REPORT.layers * each, source))
    return found


class Headroom(NamedTuple):
    """Where the memory outside the KV cache goes when every layer keeps a decode buffer, in bytes.

    Attributes:
        layer: one layer's buffer.
        buffers: of all layers.
        fragments: segments that the buffers pin but do not fill.
        graph: private pool of the captured step.
        room: device memory that the KV cache leaves.
        needed: workspace of a prefill.
        verdict: whether the server dies or lives.
    """

    layer: int
    buffers: int
    fragments: int
    graph: int
    room: int
    needed: int
    verdict: str

    @property
    def left(self) -> int:
        """Bytes left to serve with."""
        return self.room - self.buffers - self.fragments - self.graph

    def __str__(self) -> str:
        return (
            f"{size_text(self.layer)} x {self.buffers // self.layer} layers = "
            f"{size_text(self.buffers)}, headroom {size_text(self.left)}, a prefill needs "
            f"{size_text(self.needed)}: the server {self.verdict}"
        )


def headroom(batch: int = 2048, heads: int = 128, layers: int = 61, utilisation: float = 0.9) -> Headroom:
    """The report's server with zeros per layer and other sizes, on simulated memory everywhere.

    Raises:
        ValueError: a size below 1, or a utilisation outside (0, 1] or too small for the weights.
    """
    config = replace(
        REPORT,
        batch=batch,
        heads=heads,
        layers=layers,
        utilisation=utilisation,
        tokens=max(batch, REPORT.tokens),
    )
    seen = run_server(Case(OFF, config), "cpu")
    planned, decoded = seen.usages["kv_cache"], seen.usages["warm_up"]
    captured = seen.usages.get("capture", decoded)
    buffers = config.layers * config.decode_out_bytes
    return Headroom(
        layer=config.decode_out_bytes,
        buffers=buffers,
        fragments=seen.taken_bytes() - buffers,
        graph=_in_use(captured) - _in_use(decoded),
        room=config.total_bytes - _in_use(planned),
        needed=config.workspace_bytes,
        verdict=seen.verdict,
    )


def _in_use(usage: Usage) -> int:
    return usage.used - usage.releasable


def headroom_figure(cases: Mapping[str, Headroom]) -> Figure:
    """One bar a case: what fills the memory that the KV cache leaves, and the headroom line.

    The line marks how far a bar may reach for a prefill to fit.
    """
    import seaborn
    from matplotlib.figure import Figure

    ink = "#808080"
    fig = Figure(figsize=(8, 1.3 + 0.4 * len(cases)), facecolor="none", layout="constrained")
    ax = fig.add_subplot(facecolor="none")
    names = list(cases)
    foot = [0.0] * len(names)
    hatches = {"buffers": "", "fragments": "///", "graph": "..."}
    colours = seaborn.color_palette("colorblind", len(hatches))
    for colour, (part, hatch) in zip(colours, hatches.items(), strict=True):
        widths = [getattr(case, part) / GIB for case in cases.values()]
        ax.barh(names, widths, left=foot, color=colour, hatch=hatch, label=part, height=0.6)
        foot = [a + b for a, b in zip(foot, widths, strict=True)]
    for y, case in enumerate(cases.values()):
        ends = (case.room - case.needed) / GIB
        ax.plot([ends, ends], [y - 0.4, y + 0.4], color=ink, linewidth=3)
    ax.plot([], [], color=ink, linewidth=3, label="headroom line")
    ax.invert_yaxis()
    ax.set_xlabel("GiB outside the KV cache", color=ink)
    ax.tick_params(colors=ink, labelsize=8)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(ink)
    fig.legend(loc="outside upper left", ncols=4, fontsize=8, frameon=False, labelcolor=ink)
    return fig


def table(findings: Iterable[Finding]) -> str:
    """The variants side by side; times only where a GPU took them."""
    cells = {(f.variant, f.question): f for f in findings}
    head = ("variant", "kept at the report's size", "profile", "overlap", "growth", "added time")
    rows: list[tuple[str, ...]] = [head]
    for name in ATTENTION:
        kept = cells[name, "profile"].numbers["buffers"] * REPORT.decode_out_bytes
        time_ = cells.get((name, "added_time"))
        added = "-"
        if time_ is not None and time_.ran:
            added = f"{time_.numbers['added_us']:+.1f} us"
        verdicts = [cells[name, q].verdict for q in ("profile", "overlap", "growth")]
        rows.append((name, size_text(round(kept)), *verdicts, added))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def run(device: str, progress: Callable[[str], None]) -> Iterator[Finding]:
    """Every question of the incident, one finding at a time."""
    steps: list[tuple[str, Callable[[], Iterator[Finding] | Finding]]] = [
        ("servers", partial(servers, device)),
        ("ablation", partial(ablation, device)),
        ("the report's size", partial(true_size, device)),
        *(
            (f"{question.__name__}, {name}", partial(question, name, device))
            for question in (overlap, other_model, growth, empty_rows)
            for name in ATTENTION
        ),
        ("added time", partial(added_time, device)),
        ("cost of the ledger", partial(ledger_cost, device)),
    ]
    for number, (name, ask) in enumerate(steps, 1):
        progress(f"{INCIDENT} {number}/{len(steps)}: {name}")
        answer = ask()
        yield from (answer,) if isinstance(answer, Finding) else answer


if __name__ == "__main__":
    _main()
