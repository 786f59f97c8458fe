"""The cases of incident 7: the miniature, vLLM's own scheduler of several releases, and a whole vLLM."""

from __future__ import annotations

import contextlib
import operator
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

from staleproof import device as devices
from staleproof.cases import children
from staleproof.cases.case import (
    Case,
    Fix,
    MissingError,
    Reading,
    Scene,
    ablation,
    each,
    fix,
    needs_cuda,
    reading,
)
from staleproof.cases.finding import OFF_ON_OFF, Evidence, Grade, Key
from staleproof.cases.run import Table
from staleproof.cases.words import NOT_FIXED
from staleproof.incidents.published_unwritten import real, whole
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
from staleproof.vllm import hooks, watch_published
from staleproof.vllm.plugin import patches

ALL = "all six"
RELEASES = ("0.18.1", "0.22.1", "0.26.0", "0.33.0")
NEWEST = RELEASES[-1]
# Sizes of pool and chat, around those at which the victim's chunk exactly fills the pool.
SIZES = [(blocks, chat) for blocks in range(21, 29) for chat in (45, 46, 47, 48, 60, 61, 62, 63)]
ROUNDS = range(24)
SERVER: dict[str, Any] = {"threshold": 256, "budget": 2048, "seqs": 64}


def judged(memories: Iterable[Memory], **numbers: Any) -> Reading:
    """The worst verdict of some runs, with the numbers of unwritten reads and of hits."""
    runs = [*memories]
    verdicts = [run.verdict for run in runs]
    return reading(
        next(word for word in (FOREIGN, UNWRITTEN, WRITTEN) if word in verdicts),
        runs=len(runs),
        bad_runs=sum(bool(run.reads) for run in runs),
        unwritten_tokens=len({(at, r.reader, r.position) for at, run in enumerate(runs) for r in run.reads}),
        readers=sorted({read.reader for run in runs for read in run.reads}),
        hit_tokens=sum(run.tokens for run in runs),
        **numbers,
    )


# --- The miniature.


def small(parts: Miniature, device: str) -> Reading:
    """The miniature with these ingredients."""
    return judged([parts.run().memory])


def _small_wrong(parts: Miniature, device: str) -> str | None:
    """Check that the plan is that of the miniature which publishes after the write."""
    same = parts.run().memory.plan == Miniature(publish="write").run().memory.plan
    return None if same else "the plan is not that of a scheduler that publishes what was written"


WITHOUT: dict[str, tuple[dict[str, Any], str]] = {
    "no prefix caching": ({"caching": False}, WRITTEN),
    "published when written": ({"publish": "write"}, WRITTEN),
    "never taken out of its plan (FCFS)": ({"policy": "fcfs"}, WRITTEN),
    "one block a chunk": ({"threshold": 4}, WRITTEN),
    "one block more in the pool": ({"blocks": 8}, WRITTEN),
    # This request arrives while the victim waits, and takes the blocks that the victim lost.
    "withdrawn blocks are used first": ({"late": (Arrival("late", [7] * 17, 2, at=5),)}, WRITTEN),
}
AFTER = {
    "none": FOREIGN,
    "unpublish": WRITTEN,
    "same_step_guard": FOREIGN,
    "zero_at_allocation": UNWRITTEN,
    "withdraw_all": WRITTEN,
    "reset_cache": WRITTEN,
}

# --- vLLM's own scheduler.


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


# The memories of the last run of each server, to compare plans.
_last: dict[Server, list[Memory]] = {}


def sizes(server: Server, device: str) -> Reading:
    """One victim and one chat, over 64 sizes around the edge of the pool."""
    with server.loaded():
        _last[server] = [server.serve(blocks, one_victim(chat)).memory for blocks, chat in SIZES]
    return judged(_last[server])


def _sizes_wrong(server: Server, device: str) -> str | None:
    """Check that in runs without a fault the patch does not change the plan of any step."""
    pairs = zip(_last[Server(server.release)], _last[server], strict=True)
    other = sum(before.plan != after.plan for before, after in pairs if not before.reads)
    return f"{other} plans without a fault are other plans with the patch" if other else None


def _us(engine: real.Real) -> float:
    return 1e6 * engine.host_s / engine.memory.steps


def bursts(server: Server, device: str) -> Reading:
    """24 rounds of a burst of chats during the prefill of a document, then the same document again."""
    with server.loaded():
        engines = [server.serve(*burst(seed), **SERVER) for seed in ROUNDS]
    took = round(statistics.median(map(_us, engines)), 1)
    preempted = sum(engine.preempted for engine in engines)
    return judged([engine.memory for engine in engines], preempted=preempted, host_us_a_step=took)


@contextlib.contextmanager
def watching() -> Iterator[watch_published.Published]:
    """Install the watch stage, inside a ``with``."""
    watch = watch_published.Published()
    hooks.wrap("watch", *watch.targets())
    try:
        yield watch
    finally:
        hooks.unwrap("watch")


def watched(server: Server, device: str) -> Reading:
    """Compare the watch's hits with the true ones in the same rounds, and measure its cost a step."""
    rounds: list[tuple[int, int, float]] = []
    with mock.patch.object(hooks.logger, "disabled", True), server.loaded():
        for seed in ROUNDS:
            plain = server.serve(*burst(seed), **SERVER)
            with watching() as watch:
                engine = server.serve(*burst(seed), **SERVER)
            blocks = {(read.step, read.reader, read.block) for read in engine.memory.reads}
            rounds.append((watch.blocks.hits, len(blocks), _us(engine) - _us(plain)))
    seen, truth, took = zip(*rounds, strict=True)
    alike = sum(map(operator.eq, seen, truth))
    return reading(
        "the same" if alike == len(rounds) else "differ",
        hits_seen=sum(seen),
        hits=sum(truth),
        rounds_alike=alike,
        host_us_a_step_more=round(statistics.median(took), 1),
    )


def failed_load(server: Server, device: str) -> Reading:
    """A load from a connector fails (policy ``recompute``); its client aborts, and another request comes."""
    prompt = [100 + i for i in range(300)]
    with server.loaded():
        engine = real.Real(64, server.remedy, store=real.Store(256), policy="fcfs")
        engine.add(Arrival("first", prompt, 4))
        engine.step()
        engine.abort("first")
        return judged([serve(engine, [Arrival("stranger", [*prompt, 9], 2)])])


CONTROLS = {
    "AsyncScheduler": (UNWRITTEN, (("asynchronous", True),)),
    "FCFS": (WRITTEN, (("policy", "fcfs"),)),
    "no chunks (threshold 0)": (WRITTEN, (("threshold", 0),)),
}
PLAIN = {f"vLLM {release}": Server(release) for release in RELEASES}
BURSTS = {
    **{name: Server(NEWEST, remedy=remedy) for name, remedy in REMEDIES.items() if name != "none"},
    **{name: Server(NEWEST, options=CONTROLS[name][1]) for name in ("FCFS", "no chunks (threshold 0)")},
    **PLAIN,
    **{f"vLLM {release}, patched": Server(release, patched=True) for release in RELEASES},
}


def _real(server: Server) -> Evidence:
    return Evidence(Grade.REAL, f"vLLM {server.release} Scheduler")


_servers = partial(each, words="hits", evidence=_real)

# --- A whole vLLM.


SEEDS = [*range(60)]
WHOLE = ("0.22.1", "0.26.0")


def _whole(device: str) -> dict[str, Any]:
    ended = children.call(whole.ask, SEEDS, timeout_s=400)
    return dict(ended.told[-1] if ended.told else {}) | {"failed": ended.last_line}


ENGINE = Scene("a whole vLLM", _whole)


def foreseen(release: str) -> list[str] | None:
    """The rounds for which a run of the scheduler alone predicts that the stranger reads unwritten blocks.

    ``None`` if the source of that release is missing.
    """
    server = Server(release)
    with contextlib.suppress(MissingError), server.loaded():
        runs = {seed: server.serve(whole.BLOCKS, burst(seed)[1], **SERVER).memory for seed in SEEDS}
        return [str(seed) for seed, run in runs.items() if "stranger" in {read.reader for read in run.reads}]
    return None


def _no_engine(asked: tuple[str, ...], device: str) -> str | None:
    absent = None if devices.version_of("vllm") == asked[0] else f"vLLM {asked[0]} is not installed"
    return needs_cuda(asked, device) or absent


def _part(asked: tuple[str, ...], told: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] | None = told.get(", ".join(asked[1:]))
    if part is None:
        raise MissingError(f"the engine ended before: {told['failed']}")
    return part


def answers(asked: tuple[str, str, str], device: str, told: dict[str, Any]) -> Reading:
    """Rounds in which the victim or the stranger answers NaN, or another tenant's token."""
    part, kind = _part(asked, told), asked[2]
    bad = {who: [s for s, row in part["rounds"].items() if row[who][kind]] for who in ("victim", "stranger")}
    shown = "NaN" if kind == "nan" else "another tenant's"
    return reading(
        shown if any(bad.values()) else "its own",
        rounds=len(part["rounds"]),
        victim_in=bad["victim"],
        stranger_in=bad["stranger"],
        us_a_step=round(part["us_a_step"], 1),
    )


def _answers_wrong(asked: tuple[str, str, str], device: str, told: dict[str, Any]) -> str | None:
    """Check that the patch stayed applied to the end, and that every answer has its full length."""
    part = _part(asked, told)
    lengths = {(row["victim"]["of"], row["stranger"]["of"]) for row in part["rounds"].values()}
    if part["stepped_back"] or lengths != {(16, 8)}:
        return f"stepped back: {part['stepped_back']}; tokens of victim and stranger: {lengths}"
    return None


def same_step(asked: tuple[str, ...], device: str, told: dict[str, Any]) -> Reading:
    """Two requests with the same prompt in one step; the second hits blocks that this step writes."""
    rows = told.get("same step", ())
    if not rows or not all(row["hit_tokens"] for row in rows):
        raise MissingError("the second request had no hit in the same step")
    word = "NaN" if any(row["nan"] for row in rows) else "its own"
    return reading(word, rounds=len(rows), hit_tokens=[row["hit_tokens"] for row in rows])


def _whole_cases(release: str) -> Iterator[Case]:
    shared: dict[str, Any] = {
        "needs": _no_engine,
        "evidence": Evidence(Grade.REAL, f"vLLM {release}, whole"),
        "scene": ENGINE,
    }
    name, words = f"vLLM {release}", "answers to a hit"
    for kind in ("nan", "secret"):
        on, off, again = ((release, state, kind) for state in ("on", "off", "again"))
        key = Key("", OFF_ON_OFF, f"unpublish, whole {name}, {kind}")
        yield Fix(key, words, answers, on, off=off, again=again, wrong=_answers_wrong, **shared)
        fcfs = {name: (release, "FCFS", kind)}
        yield from each(f"whole vLLM, FCFS, {kind}", words, fcfs, answers, expect="its own", **shared)
    one = {name: (release, "off", "nan")}
    yield from each("whole vLLM, same step", words, one, same_step, expect="its own", **shared)


def _small_fix(name: str, **fields: Any) -> Fix:
    on = Miniature(remedy=REMEDIES[name])
    return fix(name, "hits", off=Miniature(), on=on, ask=small, wrong=_small_wrong, **fields)


TABLE = Table(
    "published_unwritten",
    ablation(Miniature(), "hits", without=WITHOUT, ask=small, expect=FOREIGN, whole=ALL),
    each("remedy", "hits", {n: Miniature(remedy=r) for n, r in REMEDIES.items()}, small, expect=AFTER),
    _small_fix("unpublish"),
    _small_fix("zero_at_allocation", expect=NOT_FIXED),
    *(
        fix(
            f"patch unpublish, {name}",
            "hits",
            off=server,
            on=replace(server, patched=True),
            ask=sizes,
            wrong=_sizes_wrong,
            evidence=_real,
        )
        for name, server in PLAIN.items()
    ),
    *(
        _servers(
            f"one victim, {name}",
            subjects={on: replace(server, options=options) for on, server in PLAIN.items()},
            ask=sizes,
            expect=word,
        )
        for name, (word, options) in CONTROLS.items()
    ),
    _servers(
        "burst",
        subjects=BURSTS,
        ask=bursts,
        expect={name: AFTER.get(name, FOREIGN if name in PLAIN else WRITTEN) for name in BURSTS},
    ),
    _servers(
        "watch beside the truth",
        words="same",
        subjects={
            name: BURSTS[name] for name in BURSTS if name.startswith(("vLLM 0.22.1", f"vLLM {NEWEST}"))
        },
        ask=watched,
        expect="the same",
    ),
    _servers(
        "failed load",
        subjects=PLAIN | {f"vLLM {NEWEST}, restarted": Server(NEWEST, remedy=RESTART)},
        ask=failed_load,
        expect=lambda server: WRITTEN if server.remedy.restarts else UNWRITTEN,
    ),
    *(_whole_cases(release) for release in WHOLE),
)
