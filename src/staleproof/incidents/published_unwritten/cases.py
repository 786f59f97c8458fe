"""The cases of incident 7: the miniature, vLLM's own scheduler of several releases, and a whole vLLM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from staleproof import device as devices
from staleproof.cases import children
from staleproof.cases.case import Case, Fix, MissingError, Reading, Scene, ablation, each, fix, reading
from staleproof.cases.finding import OFF_ON_OFF, Evidence, Grade, Key
from staleproof.cases.run import Table
from staleproof.cases.words import NOT_FIXED
from staleproof.incidents.published_unwritten import real, whole
from staleproof.incidents.published_unwritten.broken import REMEDIES, Remedy, Unpublish
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
    tenants,
)
from staleproof.vllm import hooks, standing, watch_published
from staleproof.vllm.plugin import patches

ALL = "all six"
RELEASES = ("0.18.1", "0.22.1", "0.26.0", "0.33.0")
NEWEST = RELEASES[-1]
# Sizes of pool and chat, around the one that the victim's chunk exactly fills.
SIZES = [(blocks, chat) for blocks in range(21, 29) for chat in (45, 46, 47, 48, 60, 61, 62, 63)]
ROUNDS = range(24)
SERVER: dict[str, Any] = {"threshold": 256, "budget": 2048, "seqs": 64}


def judged(memories: Iterable[Memory], **numbers: Any) -> Reading:
    """The worst verdict of some runs, with what was read and hit."""
    runs = [*memories]
    verdicts = [run.verdict for run in runs]
    worst = next(word for word in (FOREIGN, UNWRITTEN, WRITTEN) if word in verdicts)
    return reading(
        worst,
        runs=len(runs),
        bad_runs=sum(bool(run.reads) for run in runs),
        unwritten_tokens=len({(at, r.reader, r.position) for at, run in enumerate(runs) for r in run.reads}),
        readers=sorted({read.reader for run in runs for read in run.reads}),
        hit_tokens=sum(run.tokens for run in runs),
        **numbers,
    )


# --- The miniature.


@dataclass(frozen=True)
class Ingredients:
    """What the fault needs.

    Attributes:
        caching: prefix caching.
        publish: when hashes are published.
        policy: ``priority`` can take a request out of the plan that it is in.
        threshold: most tokens of a request in a step; 8 are two blocks.
        blocks: of the pool.
        late: requests that come after the preemption.
        remedy: what is done about it.
    """

    caching: bool = True
    publish: str = "plan"
    policy: str = "priority"
    threshold: int = 8
    blocks: int = 7
    late: tuple[Arrival, ...] = ()
    remedy: type[Remedy] = Remedy

    def run(self) -> Miniature:
        """The miniature after its load."""
        engine = Miniature(
            self.blocks,
            policy=self.policy,
            threshold=self.threshold,
            caching=self.caching,
            publish=self.publish,
            remedy=self.remedy(),
        )
        serve(engine, tenants(late=self.late))
        return engine


def small(parts: Ingredients, device: str) -> Reading:
    """The miniature with these ingredients."""
    return judged([parts.run().memory])


def _small_wrong(parts: Ingredients, device: str) -> str | None:
    """Compare with a scheduler that publishes after the write: the same plan, and every hit that it has."""
    ours, reference = parts.run().memory, replace(parts, remedy=Remedy, publish="write").run().memory
    if ours.plan != reference.plan:
        return "the plan is not that of a scheduler that publishes what was written"
    return None


# Comes while the victim waits, and takes the blocks that were withdrawn.
LATE = Arrival("late", [7] * 17, 2, at=5)
WITHOUT: dict[str, dict[str, Any]] = {
    "no prefix caching": {"caching": False},
    "published when written": {"publish": "write"},
    "never taken out of its plan (FCFS)": {"policy": "fcfs"},
    "one block a chunk": {"threshold": 4},
    "one block more in the pool": {"blocks": 8},
    "withdrawn blocks are used first": {"late": (LATE,)},
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
        remedy: another remedy, by name.
        options: of :func:`.real.scheduler`.
    """

    release: str
    patched: bool = False
    remedy: str = ""
    options: tuple[tuple[str, Any], ...] = field(default=())

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """Its files and the patch, inside a ``with``."""
        folder = real.package(self.release)
        if folder is None:
            raise MissingError(f"the source of vLLM {self.release} is not here")
        with contextlib.ExitStack() as stack:
            stack.enter_context(real.release(folder))
            if self.patched:
                stack.enter_context(patches()["unpublish"].applied(self.release))
            yield

    def serve(self, blocks: int, load: Sequence[Arrival], **options: Any) -> real.Real:
        """The scheduler after a load."""
        remedy = REMEDIES[self.remedy]() if self.remedy else None
        engine = real.Real(blocks, remedy, **{**options, **dict(self.options)})
        serve(engine, load)
        return engine


def _missing(server: Server, device: str) -> str | None:
    if real.package(server.release) is None:
        return f"the source of vLLM {server.release} is neither installed nor in the cache of tests/vllm"
    return None


def _scheduler(server: Server) -> Evidence:
    return Evidence(Grade.REAL, f"vLLM {server.release} Scheduler")


@cache
def _sizes(server: Server) -> list[Memory]:
    with server.loaded():
        return [server.serve(blocks, one_victim(chat)).memory for blocks, chat in SIZES]


def sizes(server: Server, device: str) -> Reading:
    """One victim and one chat, over 64 sizes around the edge of the pool."""
    return judged(_sizes.__wrapped__(server))


def _sizes_wrong(server: Server, device: str) -> str | None:
    """Where nothing was unwritten without the patch, the plan with it is the same, step by step."""
    pairs = zip(_sizes(replace(server, patched=False)), _sizes(server), strict=True)
    other = sum(before.plan != after.plan for before, after in pairs if not before.reads)
    return f"{other} plans without a fault are other plans with the patch" if other else None


def bursts(server: Server, device: str) -> Reading:
    """A burst of chats over a document in prefill, 24 rounds; then the document again."""
    with server.loaded():
        engines = [server.serve(*burst(seed), **SERVER) for seed in ROUNDS]
    taken = sum(engine.host_s for engine in engines) / sum(engine.steps for engine in engines)
    preempted = sum(engine.preempted for engine in engines)
    return judged(
        [engine.memory for engine in engines], preempted=preempted, host_us_a_step=round(1e6 * taken, 1)
    )


def watched(server: Server, device: str) -> Reading:
    """The watch beside the truth, block by block, over the same rounds."""
    seen = truth = rounds = 0
    hooks.logger.disabled, before = True, hooks.logger.disabled
    try:
        with server.loaded():
            for seed in ROUNDS:
                watch = watch_published.Published()
                hooks.wrap("watch", *watch.targets())
                reads = server.serve(*burst(seed), **SERVER).memory.reads
                hooks.unwrap("watch")
                blocks = {(read.step, read.reader, read.block) for read in reads}
                seen, truth = seen + watch.blocks.hits, truth + len(blocks)
                rounds += watch.blocks.hits == len(blocks)
    finally:
        hooks.logger.disabled = before
        hooks.unwrap("watch")
        standing.forget("watch")
    same = rounds == len(ROUNDS)
    return reading("the same" if same else "differ", hits_seen=seen, hits=truth, rounds_alike=rounds)


CHOICES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (word, {"remedy": name}) for name, word in AFTER.items()},
    "FCFS": (WRITTEN, {"options": (("policy", "fcfs"),)}),
    "no chunks (threshold 0)": (WRITTEN, {"options": (("threshold", 0),)}),
}
CONTROLS = {
    "AsyncScheduler": (UNWRITTEN, (("asynchronous", True),)),
    "FCFS": (WRITTEN, (("policy", "fcfs"),)),
    "no chunks (threshold 0)": (WRITTEN, (("threshold", 0),)),
}

# --- A whole vLLM.

SEEDS = [*range(60)]


def _whole(policy: str, device: str) -> dict[str, Any]:
    ended = children.call(whole.ask, policy, SEEDS, timeout_s=280)
    return dict(ended.told[-1]) if ended.told else {"failed": ended.last_line}


PRIORITY, FCFS = (Scene(f"a whole vLLM, {p}", partial(_whole, p)) for p in ("priority", "fcfs"))


def foreseen(release: str) -> list[str] | None:
    """The rounds in which the scheduler alone says that the stranger reads what nobody wrote.

    ``None`` where the source of that release is not here.
    """
    server = Server(release)
    if _missing(server, "cpu"):
        return None
    with server.loaded():
        runs = {seed: server.serve(whole.BLOCKS, burst(seed)[1], **SERVER).memory for seed in SEEDS}
    return [str(seed) for seed, run in runs.items() if "stranger" in {read.reader for read in run.reads}]


def _no_engine(subject: Any, device: str) -> str | None:
    if device != "cuda":
        return "needs a CUDA GPU"
    return None if devices.version_of("vllm") else "no vLLM is installed"


def _engine(subject: Any) -> Evidence:
    return Evidence(Grade.REAL, f"vLLM {devices.version_of('vllm') or ''}, whole")


def answers(asked: tuple[str, str], device: str, told: dict[str, Any]) -> Reading:
    """Rounds in which the victim or the stranger answers NaN, or the first tenant's token."""
    state, kind = asked
    if f"{state}, {kind}" not in told:
        raise MissingError(f"the engine ended before: {told.get('failed', 'out of time')}")
    part = told[f"{state}, {kind}"]
    bad = {who: [s for s, row in part["rounds"].items() if row[who][kind]] for who in ("victim", "stranger")}
    shown = "NaN" if kind == "nan" else "another tenant's"
    word = shown if bad["victim"] or bad["stranger"] else "its own"
    step = round(part["us_a_step"], 1)
    rounds, victim, stranger = len(part["rounds"]), bad["victim"], bad["stranger"]
    return reading(word, rounds=rounds, victim_in=victim, stranger_in=stranger, us_a_step=step)


def _answers_wrong(asked: tuple[str, str], device: str, told: dict[str, Any]) -> str | None:
    """With the patch: it is in place to the end, and every answer has its full length."""
    rounds = told[f"on, {asked[1]}"]["rounds"].values()
    whole_ones = all(row["victim"]["of"] == 16 and row["stranger"]["of"] == 8 for row in rounds)
    if told["on, stepped back"] or not whole_ones:
        return f"stepped back: {told['on, stepped back']}; all answers whole: {whole_ones}"
    return None


def same_step(subject: Any, device: str, told: dict[str, Any]) -> Reading:
    """Two requests of one prompt in one step, the second of which hits what the step itself writes."""
    rows = told.get("same step", ())
    if not rows or not all(row["hit_tokens"] for row in rows):
        raise MissingError("the second request had no hit in the same step")
    word = "NaN" if any(row["nan"] for row in rows) else "its own"
    return reading(word, rounds=len(rows), hit_tokens=[row["hit_tokens"] for row in rows])


def _whole_cases() -> Iterator[Case]:
    shared: dict[str, Any] = {"needs": _no_engine, "evidence": _engine}
    words = "answers to a hit"
    for kind in ("nan", "secret"):
        yield Fix(
            *(Key("", OFF_ON_OFF, f"unpublish, whole vLLM, {kind}"), words, answers, ("on", kind)),
            off=("off", kind),
            again=("again", kind),
            wrong=_answers_wrong,
            scene=PRIORITY,
            **shared,
        )
        yield from each(
            f"FCFS, {kind}",
            words,
            {"whole vLLM": ("off", kind)},
            answers,
            expect="its own",
            scene=FCFS,
            **shared,
        )
    yield from each("same step", words, ["whole vLLM"], same_step, expect="its own", scene=PRIORITY, **shared)


TABLE = Table(
    "published_unwritten",
    ablation(
        Ingredients(),
        "hits",
        without=WITHOUT,
        ask=small,
        expect={ALL: FOREIGN, **dict.fromkeys(WITHOUT, WRITTEN)},
        whole=ALL,
    ),
    each("remedy", "hits", {n: Ingredients(remedy=r) for n, r in REMEDIES.items()}, small, expect=AFTER),
    fix(
        "unpublish",
        "hits",
        off=Ingredients(),
        on=Ingredients(remedy=Unpublish),
        ask=small,
        wrong=_small_wrong,
    ),
    fix(
        "zero_at_allocation",
        "hits",
        off=Ingredients(),
        on=Ingredients(remedy=REMEDIES["zero_at_allocation"]),
        ask=small,
        wrong=_small_wrong,
        expect=NOT_FIXED,
    ),
    *(
        fix(
            f"patch unpublish, vLLM {release}",
            "hits",
            off=Server(release),
            on=Server(release, patched=True),
            ask=sizes,
            wrong=_sizes_wrong,
            needs=_missing,
            evidence=_scheduler,
        )
        for release in RELEASES
    ),
    *(
        each(
            f"one victim, {name}",
            "hits",
            {f"vLLM {release}": Server(release, options=options) for release in RELEASES},
            sizes,
            expect=word,
            needs=_missing,
            evidence=_scheduler,
        )
        for name, (word, options) in CONTROLS.items()
    ),
    each(
        "burst",
        "hits",
        {name: Server(NEWEST, **fields) for name, (_, fields) in CHOICES.items()},
        bursts,
        expect={name: word for name, (word, _) in CHOICES.items()},
        needs=_missing,
        evidence=_scheduler,
    ),
    each(
        "watch beside the truth",
        "same",
        {"without the patch": Server(NEWEST), "with the patch": Server(NEWEST, patched=True)},
        watched,
        expect="the same",
        needs=_missing,
        evidence=_scheduler,
    ),
    *_whole_cases(),
)
