"""Serves a load from one pool of blocks and reports which requests were corrupted, and why.

A request is corrupted if any of its outputs differs, in any bit, from the same step served from
clean memory: a memory in which every tenancy has a page that nobody used before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from staleproof.check import require
from staleproof.evidence.tenancy import TenancyLog
from staleproof.incidents.kv_reuse.attention import kernels
from staleproof.incidents.kv_reuse.bits import DTYPES
from staleproof.incidents.kv_reuse.block_pool import BlockPool, KVBuffers, Page, equalise
from staleproof.incidents.kv_reuse.hybrid import (
    KERNEL_BLOCK,
    LAYERS,
    STATE,
    FirstStep,
    HybridModel,
    Served,
    Zeroing,
    attention_spec,
    corrupted,
    serve,
)
from staleproof.incidents.kv_reuse.scheduler import ATTENTION, MAMBA, Scheduler, Step, Trace, requests, trace
from staleproof.ops.zero_blocks import BlockZeroer

# Outcomes of one run.
CLEAN, NAN, WRONG = "clean", "NaN", "wrong, finite"
WINDOWS = 5
# A kernel that every machine has and that masks by multiplication.
KERNEL = "sdpa_math"


@dataclass(frozen=True)
class Scene:
    """One load on one pool: everything that determines the outputs, except what is zeroed.

    Attributes:
        device: ``cpu`` or ``cuda``.
        kernel: a key of :func:`staleproof.incidents.kv_reuse.attention.kernels`.
        dtype: of keys and values.
        prefix_caching: whether full blocks are kept for later requests.
        first_step: what a Mamba layer does with the state of a new request.
        kv_outermost: layout of the attention cache.
        shared: whether Mamba states live in the attention layers' blocks.
        steps: of the trace.
        batch: rows of a step.
        blocks: of the pool.
        prefix: tokens of the shared prefixes.
        shortest: tokens of the shortest request.
        longest: tokens of the longest.
    """

    device: str
    kernel: str = KERNEL
    dtype: torch.dtype = torch.float8_e4m3fn
    prefix_caching: bool = True
    first_step: FirstStep = FirstStep.OVERWRITTEN
    kv_outermost: bool = False
    shared: bool = True
    steps: int = 210
    batch: int = 12
    blocks: int = 88
    prefix: int = 32
    shortest: int = 34
    longest: int = 80

    @property
    def page(self) -> Page:
        """The page both kinds of layer share."""
        return equalise(attention_spec(self.dtype), STATE)

    def buffers(self, blocks: int | None = None) -> KVBuffers:
        """Zeroed memory of that many blocks."""
        return KVBuffers(
            blocks or self.blocks,
            LAYERS,
            attention_spec(self.dtype, kv_outermost=self.kv_outermost),
            STATE,
            kernel_block_size=KERNEL_BLOCK,
            device=self.device,
        )

    def model(self) -> HybridModel:
        """The model of this scene."""
        return HybridModel(self.device, kernels()[self.kernel].attend, self.first_step)


def brief(device: str, **changes: Any) -> Scene:
    """A few dozen steps of short requests: blocks change hands all the time, none is ever full."""
    small = Scene(
        device, prefix_caching=False, steps=60, batch=8, blocks=25, prefix=2, shortest=3, longest=12
    )
    return replace(small, **changes)


@lru_cache(maxsize=16)
def _trace(scene: Scene) -> Trace:
    source = requests(prefix=scene.prefix, shortest=scene.shortest, longest=scene.longest)
    scheduler = Scheduler(
        BlockPool(scene.blocks),
        scene.page.block_size,
        source,
        batch=scene.batch,
        prefix_caching=scene.prefix_caching,
    )
    return trace(scheduler, scene.steps, scene.device)


def trace_of(scene: Scene) -> Trace:
    """The trace of a scene."""
    # These fields do not affect scheduling: scenes that differ only in them share one trace.
    return _trace(
        replace(scene, kernel=KERNEL, first_step=FirstStep.OVERWRITTEN, kv_outermost=False, shared=True)
    )


@lru_cache(maxsize=16)
def clean_run(scene: Scene) -> Served:
    """The scene on clean memory."""
    trace_ = trace_of(scene)
    return serve(trace_, scene.model(), scene.buffers(trace_.clean_pages), clean=True)


class ZeroNewBlocks(Zeroing):
    """The fix: :class:`staleproof.BlockZeroer` over every block that is new in a step."""

    def __init__(self, buffers: KVBuffers) -> None:
        caches = [buffers.kv_cache(layer) for layer in range(LAYERS)]
        self.zeroer = BlockZeroer(caches, block_dim=buffers.block_dim, block_size_ratio=buffers.ratio)

    def submit(self, step: Step) -> object:
        """The new blocks of both groups: an attention view covers the whole page, Mamba state included."""
        return step.new_blocks

    def run(self, ticket: object) -> list[int]:
        """One launch."""
        assert isinstance(ticket, list)
        self.zeroer.zero(ticket)
        return ticket


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run.

    Attributes:
        verdict: ``clean``; ``NaN`` if a corrupted output is not finite; ``wrong, finite`` if every corrupted
            output is finite.
        corrupted: request numbers.
        windows: (corrupted, finished) requests in each fifth of the run.
        served: outputs, and what was zeroed.
    """

    verdict: str
    corrupted: frozenset[int]
    windows: tuple[tuple[int, int], ...]
    served: Served = field(repr=False)

    @property
    def shares(self) -> list[float]:
        """Share of corrupted requests among those that finished, by window."""
        return [bad / max(of, 1) for bad, of in self.windows]

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers of a finding."""
        return {
            "corrupted": sum(bad for bad, _ in self.windows),
            "finished": sum(of for _, of in self.windows),
            "by_window": " ".join(f"{bad}/{of}" for bad, of in self.windows),
        }


Remedy = Callable[[KVBuffers], Zeroing]


def no_zeroing(buffers: KVBuffers) -> Zeroing:
    """Nothing is zeroed: vLLM 0.16.0."""
    return Zeroing()


def judge(
    scene: Scene, remedy: Remedy = no_zeroing, *, ahead: int = 0, delay: Callable[[], None] = lambda: None
) -> Outcome:
    """Serve a scene with a remedy and compare with clean memory."""
    trace_, clean = trace_of(scene), clean_run(scene)
    buffers = scene.buffers()
    served = serve(
        trace_,
        scene.model(),
        buffers,
        remedy(buffers),
        ahead=ahead,
        delay=delay,
        states=None if scene.shared else scene.buffers(),
    )
    bad = corrupted(trace_, served, clean)
    windows = [[0, 0] for _ in range(WINDOWS)]
    for request, step in trace_.finished.items():
        window = windows[step * WINDOWS // len(trace_.steps)]
        window[0] += request in bad
        window[1] += 1
    finite = bool(served.outputs.isfinite().all())
    verdict = CLEAN if not bad else WRONG if finite else NAN
    return Outcome(verdict, frozenset(bad), tuple((b, of) for b, of in windows), served)


def tenancies(scene: Scene, served: Served) -> TenancyLog:
    """The tenancy log of a served scene, from its trace and from what was zeroed."""
    log = TenancyLog()
    kv = next((name for name, dtype in DTYPES.items() if dtype == scene.dtype), "fp32")
    size = scene.page.block_size
    for step, zeroed in zip(trace_of(scene).steps, served.zeroed, strict=True):
        for request in step.ended:
            log.ended(request)
        for request, blocks in step.hits:
            log.hit(blocks, request)
        fresh = set(step.new[ATTENTION]), set(step.new[MAMBA])
        for row in step.rows:
            log.allocated(fresh[0] & {row.blocks[-1]}, row.request, kv)
            log.allocated(fresh[1] & {row.state_out}, row.request, "fp32")
        log.zeroed(zeroed)
        whole = scene.first_step is FirstStep.OVERWRITTEN
        for row in step.rows:
            log.wrote([row.blocks[row.position // size]], row.request, kv)
            log.wrote([row.state_out], row.request, "fp32", whole=whole)
        log.advance()
    return log


@dataclass(frozen=True)
class History:
    """One request through the stages of a run.

    Attributes:
        request: its number.
        steps: the steps it ran in, counted from its first.
        stages: of a step, in order.
        finite: steps x stages, whether the request's row was finite there.
    """

    request: int
    steps: list[int]
    stages: list[str]
    finite: list[list[bool]]

    @property
    def first_bad(self) -> tuple[int, str] | None:
        """Step and stage of the first row that is not finite."""
        for step, row in zip(self.steps, self.finite, strict=True):
            if not all(row):
                return step, self.stages[row.index(False)]
        return None


def history(scene: Scene) -> History:
    """A corrupted request of a scene served without zeroing.

    Preferably one whose first attention layer is finite again in its last step, because it has overwritten
    every stale position by then. Otherwise the first corrupted request that finishes.

    Raises:
        ValueError: no corrupted request finishes.
    """
    trace_ = trace_of(scene)
    bad = judge(scene).corrupted
    ended = [request for request in trace_.finished if request in bad]
    require(bool(ended), "scene", "one in which a corrupted request finishes", "none")
    served = serve(trace_, scene.model(), scene.buffers(), watch=True)
    histories = []
    for request in ended:
        own = trace_.owners == request
        finite = torch.stack([flags[own] for flags in served.finite.values()], 1)
        stages = list(served.finite)
        attention = finite[:, stages.index("0.attention")]
        healed = bool(attention[-1]) and not bool(attention.all())
        histories.append((healed, History(request, list(range(len(finite))), stages, finite.tolist())))
    return next((one for healed, one in histories if healed), histories[0][1])
