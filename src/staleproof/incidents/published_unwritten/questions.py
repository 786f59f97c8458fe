"""The questions of incident 7: the miniature, vLLM's own scheduler of several releases, and a whole vLLM."""

from __future__ import annotations

import contextlib
import operator
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from staleproof.grades import Evidence, Grade
from staleproof.incidents.published_unwritten import leak, real
from staleproof.incidents.published_unwritten.broken import NONE, REMEDIES, RESTART, Remedy
from staleproof.incidents.published_unwritten.scene import (
    FOREIGN,
    UNWRITTEN,
    WRITTEN,
    Arrival,
    Memory,
    Miniature,
    burst,
    one_victim,
    serve,
)
from staleproof.lab import FIXED, NOT_FIXED, Answer, Fix, Incident, MissingError, good_if
from staleproof.vllm import hooks, watch_published
from staleproof.vllm.plugin import patches

incident = Incident("published_unwritten")


def of_hits(memories: Iterable[Memory], **numbers: Any) -> Answer:
    """The worst verdict of some runs, with the numbers of unwritten reads and of hits."""
    runs = [*memories]
    verdicts = [run.verdict for run in runs]
    worst = next(word for word in (FOREIGN, UNWRITTEN, WRITTEN) if word in verdicts)
    return good_if(
        worst == WRITTEN,
        worst,
        runs=len(runs),
        bad_runs=sum(bool(run.reads) for run in runs),
        unwritten_tokens=len({(at, r.reader, r.position) for at, run in enumerate(runs) for r in run.reads}),
        readers=sorted({read.reader for run in runs for read in run.reads}),
        hit_tokens=sum(run.tokens for run in runs),
        **numbers,
    )


# --- The miniature.

# This request arrives while the victim waits, and takes the blocks that the victim lost.
LATE = Arrival("late", [7] * 17, 2, at=5)
INGREDIENTS = {
    "all six": Miniature(),
    "no prefix caching": Miniature(caching=False),
    "published when written": Miniature(publish="write"),
    "never taken out of its plan (FCFS)": Miniature(policy="fcfs"),
    "one block a chunk": Miniature(threshold=4),
    "one block more in the pool": Miniature(blocks=8),
    "withdrawn blocks are used first": Miniature(late=(LATE,)),
}


@incident.question(
    "remedy",
    {name: Miniature(remedy=remedy) for name, remedy in REMEDIES.items()},
    expect={
        "none": FOREIGN,
        "unpublish": WRITTEN,
        "same_step_guard": FOREIGN,
        "zero_at_allocation": UNWRITTEN,
        "withdraw_all": WRITTEN,
        "reset_cache": WRITTEN,
    },
)
@incident.question("ablation", INGREDIENTS, expect=dict.fromkeys(INGREDIENTS, WRITTEN) | {"all six": FOREIGN})
def miniature(parts: Miniature, device: str) -> Answer:
    """A load on the miniature. Does every slot below a hit hold what its prefix promises?"""
    return of_hits([parts.run().memory])


def differs_from_written(parts: Miniature, device: str) -> str | None:
    """Whether the plan is another than that of the miniature which publishes after the write."""
    same = parts.run().memory.plan == Miniature(publish="write").run().memory.plan
    return None if same else "the plan is not that of a scheduler that publishes what was written"


incident.fixes(
    miniature,
    {
        name: Fix(off=Miniature(), on=Miniature(remedy=REMEDIES[name]))
        for name in ("unpublish", "zero_at_allocation")
    },
    compare=differs_from_written,
    expect={"unpublish": FIXED, "zero_at_allocation": NOT_FIXED},
)


# --- vLLM's own scheduler.

RELEASES = ("0.18.1", "0.22.1", "0.26.0", "0.33.0")
NEWEST = RELEASES[-1]
# Sizes of pool and chat, around those at which the victim's chunk exactly fills the pool.
SIZES = [(blocks, chat) for blocks in range(21, 29) for chat in (45, 46, 47, 48, 60, 61, 62, 63)]
ROUNDS = range(24)
SERVER: dict[str, Any] = {"threshold": 256, "budget": 2048, "seqs": 64}


@dataclass(frozen=True)
class Server:
    """vLLM's scheduler of one release.

    Attributes:
        release: of vLLM.
        patched: with the patch ``unpublish`` of the plugin.
        remedy: another remedy.
        options: of :class:`.real.Real`.
    """

    release: str
    patched: bool = False
    remedy: Remedy = NONE
    options: tuple[tuple[str, Any], ...] = ()

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """Load its files and apply the patch, inside a ``with``."""
        patch = patches()["unpublish"].applied(self.release) if self.patched else contextlib.nullcontext()
        with real.release(self.release), patch:
            yield

    def serve(self, blocks: int, load: Sequence[Arrival], **options: Any) -> real.Real:
        """The scheduler after a load."""
        engine = real.Real(blocks, self.remedy, **{**options, **dict(self.options)})
        serve(engine, load)
        return engine


def of_release(server: Server) -> Evidence:
    """Whose code runs."""
    return Evidence(Grade.REAL, f"vLLM {server.release} Scheduler")


EVERY = {f"vLLM {release}": Server(release) for release in RELEASES}


def some_releases(**options: Any) -> dict[str, Server]:
    """The scheduler of two releases with these options, by name."""
    return {
        f"vLLM {release}": Server(release, options=tuple(options.items())) for release in ("0.22.1", NEWEST)
    }


# The memories of the last run of each server, to compare plans.
_last: dict[Server, list[Memory]] = {}


@incident.question(
    "one victim, no chunks (threshold 0)", some_releases(threshold=0), expect=WRITTEN, evidence=of_release
)
@incident.question("one victim, FCFS", some_releases(policy="fcfs"), expect=WRITTEN, evidence=of_release)
@incident.question(
    "one victim, AsyncScheduler", some_releases(asynchronous=True), expect=UNWRITTEN, evidence=of_release
)
def sizes(server: Server, device: str) -> Answer:
    """One victim and one chat, over 64 sizes around the edge of the pool. Is every hit written?"""
    with server.loaded():
        _last[server] = [server.serve(blocks, one_victim(chat)).memory for blocks, chat in SIZES]
    return of_hits(_last[server])


def changes_sound_plans(server: Server, device: str) -> str | None:
    """Whether the patch changes the plan of any step in runs without a fault."""
    pairs = zip(_last[Server(server.release)], _last[server], strict=True)
    other = sum(before.plan != after.plan for before, after in pairs if not before.reads)
    return f"{other} plans without a fault are other plans with the patch" if other else None


incident.fixes(
    sizes,
    {
        f"patch unpublish, {name}": Fix(off=server, on=replace(server, patched=True))
        for name, server in EVERY.items()
    },
    compare=changes_sound_plans,
    evidence=of_release,
)


def _us_a_step(engine: real.Real) -> float:
    return 1e6 * engine.host_s / engine.memory.steps


BURSTS = {
    **{name: Server(NEWEST, remedy=remedy) for name, remedy in REMEDIES.items() if name != "none"},
    "FCFS": Server(NEWEST, options=(("policy", "fcfs"),)),
    "no chunks (threshold 0)": Server(NEWEST, options=(("threshold", 0),)),
    "vLLM 0.22.1": Server("0.22.1"),
    "vLLM 0.22.1, patched": Server("0.22.1", patched=True),
    "vLLM 0.33.0": Server("0.33.0"),
    "vLLM 0.33.0, patched": Server("0.33.0", patched=True),
}


@incident.question(
    "burst",
    BURSTS,
    expect={
        "unpublish": WRITTEN,
        "same_step_guard": FOREIGN,
        "zero_at_allocation": UNWRITTEN,
        "withdraw_all": WRITTEN,
        "reset_cache": WRITTEN,
        "FCFS": WRITTEN,
        "no chunks (threshold 0)": WRITTEN,
        "vLLM 0.22.1": FOREIGN,
        "vLLM 0.22.1, patched": WRITTEN,
        "vLLM 0.33.0": FOREIGN,
        "vLLM 0.33.0, patched": WRITTEN,
    },
    evidence=of_release,
)
def bursts(server: Server, device: str) -> Answer:
    """24 rounds of a burst of chats during the prefill of a document, then the document again."""
    with server.loaded():
        engines = [server.serve(*burst(seed), **SERVER) for seed in ROUNDS]
    took = round(statistics.median(map(_us_a_step, engines)), 1)
    preempted = sum(engine.preempted for engine in engines)
    return of_hits([engine.memory for engine in engines], preempted=preempted, host_us_a_step=took)


@contextlib.contextmanager
def watching() -> Iterator[watch_published.Published]:
    """Install the watch stage, inside a ``with``."""
    watch = watch_published.Published()
    hooks.wrap("watch", *watch.targets())
    try:
        yield watch
    finally:
        hooks.unwrap("watch")


@incident.question(
    "watch beside the truth",
    {name: BURSTS[name] for name in ("vLLM 0.22.1", "vLLM 0.33.0", "vLLM 0.33.0, patched")},
    expect="the same",
    evidence=of_release,
)
def watched(server: Server, device: str) -> Answer:
    """The rounds of a burst. Does the watch count the hits that are unwritten, and at which cost a step?"""
    rounds: list[tuple[int, int, float]] = []
    with mock.patch.object(hooks.logger, "disabled", True), server.loaded():
        for seed in ROUNDS:
            plain = server.serve(*burst(seed), **SERVER)
            with watching() as watch:
                engine = server.serve(*burst(seed), **SERVER)
            blocks = {(read.step, read.reader, read.block) for read in engine.memory.reads}
            rounds.append((watch.blocks.hits, len(blocks), _us_a_step(engine) - _us_a_step(plain)))
    counted, true, took = zip(*rounds, strict=True)
    alike = sum(map(operator.eq, counted, true))
    same = alike == len(rounds)
    return good_if(
        same,
        "the same" if same else "differ",
        hits_seen=sum(counted),
        hits=sum(true),
        rounds_alike=alike,
        host_us_a_step_more=round(statistics.median(took), 1),
    )


@incident.question(
    "failed load",
    EVERY | {f"vLLM {NEWEST}, restarted": Server(NEWEST, remedy=RESTART)},
    expect=dict.fromkeys(EVERY, UNWRITTEN) | {f"vLLM {NEWEST}, restarted": WRITTEN},
    evidence=of_release,
)
def failed_load(server: Server, device: str) -> Answer:
    """A load from a connector fails (policy ``recompute``), its client aborts. Does the next one hit it?"""
    prompt = [100 + i for i in range(300)]
    with server.loaded():
        engine = real.Real(64, server.remedy, store=real.Store(256), policy="fcfs")
        engine.add(Arrival("first", prompt, 4))
        engine.step()
        engine.abort("first")
        return of_hits([serve(engine, [Arrival("stranger", [*prompt, 9], 2)])])


# Release and tokens of the hit, in blocks of 16.
LOADS = {
    f"vLLM {release}, hit of {tokens} tokens": (release, tokens)
    for release in ("0.24.0", "0.26.0", NEWEST)
    for tokens in (40, 48)
}


@incident.question(
    "asynchronous load",
    LOADS,
    expect=dict.fromkeys(LOADS, "zeroed or loaded")
    | {f"vLLM {release}, hit of 40 tokens": "a tail is neither" for release in ("0.26.0", NEWEST)},
    evidence=lambda subject: Evidence(Grade.REAL, f"vLLM {subject[0]} Scheduler"),
)
def asynchronous_load(subject: tuple[str, int], device: str) -> Answer:
    """A hybrid model, a hit that a connector loads: who writes the rest of the block in which it ends?

    From 0.26.0 on vLLM does not zero blocks that await such a load, so it is the connector's duty (#55085).
    """
    release, tokens = subject
    with Server(release).loaded():
        engine = real.Real(24, store=real.AsyncStore(tokens), policy="fcfs", threshold=0, hybrid=True)
        engine.add(Arrival("one", [*range(60)], 2))
        blocks, zeroed = real.loaded(engine)
    # The block in which the load ends, if it ends inside one.
    tail = blocks[tokens // real.BLOCK : -(-tokens // real.BLOCK)]
    numbers = {"blocks": blocks, "zeroed": sorted(zeroed), "tail": tail}
    return good_if(
        {*tail} <= zeroed, "zeroed or loaded" if {*tail} <= zeroed else "a tail is neither", **numbers
    )


leak.add(incident)


# The rounds and the pool of the recorded runs of a whole vLLM 0.22.1 and 0.26.0.
SEEDS, BLOCKS, WHOLE = range(60), 340, ("0.22.1", "0.26.0")


def foreseen(release: str) -> list[str] | None:
    """The rounds for which a run of the scheduler alone predicts that the stranger reads unwritten blocks.

    ``None`` if the source of that release is missing.
    """
    server = Server(release)
    with contextlib.suppress(MissingError), server.loaded():
        runs = {seed: server.serve(BLOCKS, burst(seed)[1], **SERVER).memory for seed in SEEDS}
        return [str(seed) for seed, run in runs.items() if "stranger" in {read.reader for read in run.reads}]
    return None
