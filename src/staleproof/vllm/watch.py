"""The watch: counts rows with NaN or Inf behind the stages of a live vLLM, inside captured graphs.

Off unless ``STALEPROOF_WATCH=1``. The counting kernels are captured with the step, and the counts are
copied to the host twice a second on the step's own stream. Nobody waits for that copy: a later step
looks whether it has arrived. A scrape reads what has arrived, and touches no device.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from staleproof.vllm.hooks import logger
from staleproof.vllm.sources import PatchError

if TYPE_CHECKING:
    import torch

VARIABLE, PORT, STAGES, LAYERS = (
    "STALEPROOF_WATCH",
    "STALEPROOF_WATCH_PORT",
    "STALEPROOF_WATCH_STAGES",
    "STALEPROOF_WATCH_LAYERS",
)
KNOWN = ("attention", "router", "experts")
DEFAULT_PORT = 9464
# Stages of all layers together that one process can tell apart, and rows of a step.
SLOTS, ROWS = 256, 2**16
# Seconds between two copies of the counts.
INTERVAL_S = 0.5
# Steps whose request ids are remembered, so that the first bad row can be named.
REMEMBERED = 4096


@dataclass(frozen=True)
class Settings:
    """What is watched.

    Attributes:
        stages: some of :data:`KNOWN`.
        layers: one layer in this many.
        port: of the first worker; the others add their rank.
    """

    stages: tuple[str, ...] = KNOWN
    layers: int = 1
    port: int = DEFAULT_PORT


def settings(environment: Mapping[str, str]) -> Settings | None:
    """Read the settings; ``None`` if the watch is off.

    Raises:
        PatchError: a variable has a value that it cannot have; one line says which.

    >>> settings({}), settings({"STALEPROOF_WATCH": "1", "STALEPROOF_WATCH_LAYERS": "4"}).layers
    (None, 4)
    """
    if environment.get(VARIABLE, "").strip() not in ("1", "on", "true"):
        return None
    stages = tuple(
        word.strip() for word in environment.get(STAGES, ",".join(KNOWN)).split(",") if word.strip()
    )
    unknown = [stage for stage in stages if stage not in KNOWN]
    if unknown or not stages:
        raise PatchError(f"{STAGES}: expected some of {', '.join(KNOWN)}, got {', '.join(unknown) or 'none'}")
    return Settings(
        stages,
        _number(environment, LAYERS, 1, range(1, 10**6)),
        _number(environment, PORT, DEFAULT_PORT, range(1, 65536)),
    )


def _number(environment: Mapping[str, str], name: str, default: int, allowed: range) -> int:
    text = environment.get(name, str(default)).strip()
    if not text.isdecimal() or int(text) not in allowed:
        raise PatchError(f"{name}: expected {allowed[0]} to {allowed[-1]}, got {text!r}")
    return int(text)


@dataclass(frozen=True)
class Reading:
    """Counts that have arrived on the host.

    Attributes:
        steps: of the engine when they were copied.
        bad: (stage, layer) -> rows with a NaN or Inf: padding rows, live rows.
        repeats: layer -> rows of expert ids that name one twice: padding rows, live rows.
    """

    steps: int = 0
    bad: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    repeats: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class Watch:
    """Counts on one device. :meth:`observe` and :meth:`begin_step` only launch work there.

    Args:
        chosen: what is watched.
        device: where the model runs.

    >>> import torch
    >>> watch = Watch(Settings(), "cpu")
    >>> watch.begin_step(3)
    >>> watch.observe("attention", "layers.0", torch.full((4, 8), torch.nan))  # row 3 is padding
    >>> watch.copy()
    >>> watch.reading().bad
    {('attention', 'layers.0'): (1, 3)}
    """

    def __init__(self, chosen: Settings, device: torch.device | str) -> None:
        import torch

        from staleproof.evidence import RowCounters

        self.settings = chosen
        self.steps = 0
        self._slots: dict[tuple[str, str], int] = {}
        self._counters = RowCounters([str(slot) for slot in range(SLOTS)], device)
        self._repeats = torch.zeros(SLOTS, 2, dtype=torch.int64, device=device)
        self._index = torch.arange(ROWS, dtype=torch.int32, device=device)
        self._live = torch.zeros(ROWS, dtype=torch.bool, device=device)
        self._recent: deque[tuple[int, tuple[str, ...]]] = deque(maxlen=REMEMBERED)
        pinned = self._live.is_cuda
        on_device = (*self._counters.tensors, self._repeats)
        self._host = [torch.empty_like(x, device="cpu", pin_memory=pinned) for x in on_device]
        self._arrived: torch.cuda.Event | None = torch.cuda.Event() if pinned else None
        self._copied_steps = -1
        self._due = 0.0
        self._latest = Reading()
        self._reported = False

    def slot(self, stage: str, layer: str) -> int | None:
        """Where a stage of a layer is counted; ``None`` if it is not watched."""
        key = stage, layer
        if key not in self._slots:
            number = re.search(r"\d+", layer)
            if stage not in self.settings.stages or int(number[0] if number else 0) % self.settings.layers:
                return None
            if len(self._slots) == SLOTS:
                return None
            self._slots[key] = len(self._slots)
        return self._slots[key]

    def observe(self, stage: str, layer: str, x: torch.Tensor) -> None:
        """Count the rows of a stage's output, (rows, ...), that have a NaN or Inf."""
        slot = self.slot(stage, layer)
        if slot is not None and 0 < x.shape[0] <= ROWS and x.numel():
            self._counters.observe(str(slot), x.contiguous(), self._live[: x.shape[0]])

    def observe_ids(self, layer: str, ids: torch.Tensor) -> None:
        """Count the rows of expert ids, (rows, top_k), that name an expert twice."""
        from staleproof.evidence.repeats import count_repeats

        slot = self.slot("router", layer)
        if slot is not None and 0 < ids.shape[0] <= ROWS:
            count_repeats(ids.contiguous(), self._live[: ids.shape[0]], self._repeats[slot])

    def name_requests(self, requests: Sequence[str]) -> None:
        """Say whose rows those of the step to come are, in their order."""
        self._recent.append((self.steps, tuple(requests)))

    def begin_step(self, tokens: int) -> None:
        """Say how many rows of the step to come are live: they are its first.

        Args:
            tokens: number of tokens of all requests.
        """
        import torch

        self.steps += 1
        torch.lt(self._index, tokens, out=self._live)
        self._counters.begin()
        self.reading()
        now = time.monotonic()
        if now >= self._due and self._copied_steps < 0:
            self._due = now + INTERVAL_S
            self.copy()

    def copy(self) -> None:
        """Start a copy of the counts to the host, behind the work that is queued."""
        for host, x in zip(self._host, (*self._counters.tensors, self._repeats), strict=True):
            host.copy_(x, non_blocking=True)
        self._copied_steps = self.steps
        if self._arrived is not None:
            self._arrived.record()

    def reading(self) -> Reading:
        """The counts that have arrived. Call it in the thread of the steps; others use :attr:`latest`."""
        if self._copied_steps >= 0 and (self._arrived is None or self._arrived.query()):
            counts, first, repeats = self._host
            stages = self._counters.read(counts)
            rows = repeats.tolist()
            self._latest = Reading(
                self._copied_steps,
                {
                    key: (stages[str(slot)].pad_rows, stages[str(slot)].live_rows)
                    for key, slot in self._slots.items()
                },
                {
                    layer: (rows[slot][0], rows[slot][1])
                    for (stage, layer), slot in self._slots.items()
                    if stage == "router"
                },
            )
            self._copied_steps = -1
            self._report(first)
        return self._latest

    @property
    def latest(self) -> Reading:
        """The last reading; for any thread."""
        return self._latest

    def _report(self, first: torch.Tensor) -> None:
        """Log the first live row that had a NaN or Inf, once."""
        crossing = self._counters.crossing(first)
        if crossing is None or self._reported:
            return
        self._reported = True
        stage, layer = next(key for key, slot in self._slots.items() if str(slot) == crossing.stage)
        requests = next((ids for step, ids in self._recent if step == crossing.replay), ())
        who = f", request {requests[crossing.row]}" if crossing.row < len(requests) else ""
        logger.warning(
            "staleproof: first live row with NaN or Inf: step %d, %s of %s, row %d%s",
            crossing.replay, stage, layer, crossing.row, who,
        )  # fmt: skip

    def reset(self) -> None:
        """Forget all counts: those of the profile and of warm-up runs are nobody's."""
        self._counters.reset()
        self._repeats.zero_()
        self.steps = 0
        self._recent.clear()
        self._copied_steps, self._due, self._reported = -1, 0.0, False
        self._latest = Reading()


def read_settings() -> Settings | None:
    """The settings of this process; see :func:`settings`."""
    return settings(os.environ)
