"""The watch: counts rows with NaN or Inf behind the stages of a live vLLM, inside captured graphs.

Off unless ``STALEPROOF_WATCH=1``. The counting kernels are captured with the step, and the counts are
copied to the host twice a second on the step's own stream. Nobody waits for that copy: a later step
looks whether it has arrived. A scrape reads what has arrived, and touches no device. So what the last half
second before an idle time has counted arrives in the steps after it.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from staleproof.vllm.hooks import logger
from staleproof.vllm.sources import PatchError
from staleproof.vllm.watch_owners import Part, text

if TYPE_CHECKING:
    import torch

VARIABLE, PORT, STAGES, LAYERS, STEPS = (
    "STALEPROOF_WATCH",
    "STALEPROOF_WATCH_PORT",
    "STALEPROOF_WATCH_STAGES",
    "STALEPROOF_WATCH_LAYERS",
    "STALEPROOF_WATCH_STEPS",
)
# Rows behind these layers; block ids that change hands; memory that no profile saw.
ROW_STAGES = ("attention", "router", "experts")
KNOWN = (*ROW_STAGES, "blocks", "memory", "published")
DEFAULT_PORT = 9464
# The first release with the functions that the watch hooks. The last that was read is the last of the table.
OLDEST = "0.20.0"
# Seconds between two copies of the counts.
INTERVAL_S = 0.5
# Steps whose requests are remembered, so that the first bad row can be named; and requests named in a line.
REMEMBERED, NAMED = 1024, 8
# The device learns the number of a step when the batch changes, and after this many equal steps: setting it
# is most of what a watched step costs the host.
SPAN = 32
PADDING, LIVE = "padding", "live"
# Whose hooks they are: of no patch.
OWNER = "watch"


@dataclass(frozen=True)
class Settings:
    """What is watched.

    Attributes:
        stages: some of :data:`KNOWN`.
        layers: one layer in this many.
        steps: one step in this many.
        port: of the first worker; the others add their rank.
    """

    stages: tuple[str, ...] = KNOWN
    layers: int = 1
    steps: int = 1
    port: int = DEFAULT_PORT


def settings(environment: Mapping[str, str]) -> Settings | None:
    """Read the settings; ``None`` if the watch is off.

    Raises:
        PatchError: a variable has a value that it cannot have; one line says which.

    >>> settings({}), settings({"STALEPROOF_WATCH": "1", "STALEPROOF_WATCH_LAYERS": "4"}).layers
    (None, 4)
    """
    said = environment.get(VARIABLE, "").strip()
    if said in ("", "0", "off", "false"):
        return None
    if said not in ("1", "on", "true"):
        raise PatchError(f"{VARIABLE}: expected 1, on or true, got {said!r}")
    stages = tuple(
        word.strip() for word in environment.get(STAGES, ",".join(KNOWN)).split(",") if word.strip()
    )
    unknown = [stage for stage in stages if stage not in KNOWN]
    if unknown or not stages:
        raise PatchError(f"{STAGES}: expected some of {', '.join(KNOWN)}, got {', '.join(unknown) or 'none'}")
    return Settings(
        stages,
        number(environment, LAYERS, 1, range(1, 10**6)),
        number(environment, STEPS, 1, range(1, 10**6)),
        number(environment, PORT, DEFAULT_PORT, range(1, 65536)),
    )


def number(environment: Mapping[str, str], name: str, default: int, allowed: range) -> int:
    """Read a number.

    Raises:
        PatchError: it is none, or not allowed.
    """
    text = environment.get(name, str(default)).strip()
    if not text.isdecimal() or int(text) not in allowed:
        raise PatchError(f"{name}: expected {allowed[0]} to {allowed[-1]}, got {text!r}")
    return int(text)


@dataclass(frozen=True)
class Reading:
    """Counts that have arrived on the host. Pairs are padding rows, live rows.

    Attributes:
        steps: of the engine when they were copied.
        counted: those of the steps whose rows were counted. The counts below are of these steps only: of
            all steps there were about ``steps / counted`` times as many.
        bad: (stage, layer) -> rows with a NaN or Inf.
        canaries: (stage, layer) -> those of them that hold a canary: memory that nobody wrote.
        repeats: layer -> rows of expert ids that name one twice.
        runs: (stage, layer) -> how often its counting kernel ran on the device: at least once a counted step,
            if its graphs still hold it.
        at: when they arrived, in seconds of the monotonic clock.
    """

    steps: int = 0
    counted: int = 0
    bad: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    canaries: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    repeats: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    runs: Mapping[tuple[str, str], int] = field(default_factory=dict)
    at: float = 0.0


class Watch:
    """Counts on one device. :meth:`observe` and :meth:`begin_step` only launch work there.

    Args:
        chosen: what is watched.
        device: where the model runs.
        padding: gives the (at least rows,) bool mask of padding rows for so many rows, or ``None``. Without
            it, and for ``None``, the rows after the step's tokens are padding.

    >>> import torch
    >>> watch = Watch(Settings(), "cpu")
    >>> watch.begin_step(3)
    >>> watch.observe("attention", "layers.0", torch.full((4, 8), torch.nan))  # row 3 is padding
    >>> watch.copy()
    >>> watch.reading().bad
    {('attention', 'layers.0'): (1, 3)}
    """

    def __init__(
        self,
        chosen: Settings,
        device: torch.device | str,
        padding: Callable[[int], torch.Tensor | None] | None = None,
    ) -> None:
        import torch

        from staleproof.evidence.board import Board
        from staleproof.ops.launching import launched

        self.settings, self._padding = chosen, padding
        self._slots: dict[tuple[str, str], int | None] = {}
        # The same by a layer's full name.
        self._places: dict[tuple[str, str], int | None] = {}
        self.board = Board(device, launched)
        self._on_gpu = self.board.numbers.is_cuda
        self.capturing = torch.cuda.is_current_stream_capturing if self._on_gpu else lambda: False
        self._host = torch.empty_like(self.board.numbers, device="cpu", pin_memory=self._on_gpu)
        self._arrived: torch.cuda.Event | None = torch.cuda.Event() if self._on_gpu else None
        self._recent: deque[tuple[int, Sequence[str], Mapping[str, int]]] = deque(maxlen=REMEMBERED)
        # Gives the blocks that a request reads in a step, by who wrote them last.
        self.read_by: Callable[[str, int], list[Part]] | None = None
        self._forget()

    def _forget(self) -> None:
        self._steps = self._counted = 0
        # Equal steps to come that need nothing from the watch; whoever runs the steps counts them down. And
        # how many there were of them.
        self.left = self._allowed = 0
        # Until the engine is ready every launch is made, so that it is compiled and captured.
        self.counting = True
        self._copied: tuple[int, int] | None = None
        self._due = 0.0
        self._latest = Reading()
        self._reported: set[str] = set()
        # The request of the first bad live row, and the blocks that it read.
        self.bad_request = ""
        self.bad_blocks: list[Part] = []
        # What the device was told last: the number of a step, and its live rows.
        self._device_step = self._tokens = 0
        # First and last step that ran under one number.
        self._spans: deque[list[int]] = deque(maxlen=REMEMBERED)
        self._recent.clear()

    @property
    def steps(self) -> int:
        """Steps of the engine so far."""
        return self._steps + self._allowed - self.left

    @property
    def counted(self) -> int:
        """Those of them whose rows were counted."""
        return self._counted + self._allowed - self.left

    def _take_in(self) -> None:
        """Take in the equal steps since the last call, and let nobody count down any further."""
        passed, self._allowed, self.left = self._allowed - self.left, 0, 0
        if passed:
            self._steps += passed
            self._counted += passed
            self._spans[-1][1] = self._steps

    def _slot(self, stage: str, layer: str) -> int | None:
        """Where a stage of a layer is counted; ``None`` if it is not watched."""
        key = stage, layer
        if key in self._slots:
            return self._slots[key]
        from staleproof.evidence.board import SLOTS

        number = re.search(r"\d+", layer)
        taken = sum(slot is not None for slot in self._slots.values())
        left_out = stage not in self.settings.stages or taken == SLOTS
        left_out |= bool(int(number[0] if number else 0) % self.settings.layers)
        self._slots[key] = None if left_out else taken
        return self._slots[key]

    def observe(self, stage: str, layer: str, x: Any, ids: torch.Tensor | None = None) -> None:
        """Count the rows of a stage's output that have a NaN or Inf. All that a layer costs is this call.

        Args:
            stage: one of :data:`ROW_STAGES`.
            layer: vLLM's name for it.
            x: (rows, ...); a router's weights, (rows, top_k), come with its ids. What has no rows is left
                out, e.g. an attention backend's ``None``.
            ids: (rows, top_k) expert ids; rows that name an expert twice are counted.
        """
        key, places = (stage, layer), self._places
        slot = places[key] if key in places else places.setdefault(key, self._slot(stage, _short(layer)))
        # A step that is not counted costs nothing more on the host. Its graphs return at once.
        if slot is None or not (self.counting or self.capturing()):
            return
        shape: tuple[int, ...] = getattr(x, "shape", ())
        if len(shape) >= 2 and shape[0]:
            padding = self._padding
            self.board.count(slot, x, ids, None if padding is None else padding(shape[0]))

    def name_requests(self, requests: Sequence[str], tokens: Mapping[str, int]) -> None:
        """Say whose rows those of the current step are: requests in their order, and tokens of each."""
        if self.steps == self._device_step:
            self._recent.append((self.steps, tuple(requests), tokens))

    def begin_step(self, tokens: int, same: bool = False) -> None:
        """Say how many rows of the step to come are live: they are its first.

        Args:
            tokens: number of tokens of all requests.
            same: whether the requests are those of the last step, each with as many tokens. If they are, as
                many such steps as :attr:`left` says need no call: who leaves one out takes 1 off.
        """
        self._take_in()
        before, self.counting = self.counting, self._steps % self.settings.steps == 0
        self._steps = step = self._steps + 1
        self._counted += self.counting
        if same and before and self.counting and tokens == self._tokens and step < self._device_step + SPAN:
            self._spans[-1][1] = step
        elif self.counting or before:
            self.board.begin(step, tokens, self.counting)
            self._device_step, self._tokens = step, tokens
            self._spans.append([step, step])
        if self._copied is not None:
            self.reading()
        else:
            now = time.monotonic()
            if now >= self._due:
                self._due = now + INTERVAL_S
                self.copy()
        # The step after one that the device was told of must come here too: it names the requests of that
        # one. So must the steps until a copy has arrived.
        if self.settings.steps == 1 and step > self._device_step and self._copied is None:
            self._allowed = self.left = self._device_step + SPAN - 1 - step

    def pause(self) -> None:
        """The rows to come belong to no step: a dummy batch, which keeps data-parallel ranks together."""
        self._take_in()
        if self.steps and self.counting:
            self.board.begin(self.steps, 0, counted=False)
            self.counting = False

    def copy(self) -> None:
        """Start a copy of the counts to the host, behind the work that is queued."""
        self._take_in()
        self._host.copy_(self.board.numbers, non_blocking=True)
        self._copied = self.steps, self.counted
        if self._arrived is not None:
            self._arrived.record()

    def reading(self) -> Reading:
        """The counts that have arrived. Call it in the thread of the steps; others use :attr:`latest`."""
        if self._copied is not None and (self._arrived is None or self._arrived.query()):
            from staleproof.evidence.board import NUMBERS

            numbers = self._host.tolist()
            watched = {key: NUMBERS * slot for key, slot in self._slots.items() if slot is not None}
            self._latest = Reading(
                *self._copied,
                {key: (numbers[at], numbers[at + 1]) for key, at in watched.items()},
                {key: (numbers[at + 2], numbers[at + 3]) for key, at in watched.items()},
                {
                    layer: (numbers[at + 4], numbers[at + 5])
                    for (stage, layer), at in watched.items()
                    if stage == "router"
                },
                {key: numbers[at + 6] for key, at in watched.items()},
                time.monotonic(),
            )
            self._copied = None
            self._report(PADDING, numbers[-2])
            self._report(LIVE, numbers[-1])
        return self._latest

    @property
    def latest(self) -> Reading:
        """The last reading; for any thread."""
        return self._latest

    def _report(self, rows: str, packed: int) -> None:
        """Log the first padding row and the first live row that had a NaN or Inf, each once."""
        from staleproof.evidence.board import crossing

        first = crossing(packed)
        if first is None or rows in self._reported:
            return
        self._reported.add(rows)
        step, slot, row, canary = first
        stage, layer = next(key for key, at in self._slots.items() if at == slot)
        last = next((span[1] for span in self._spans if span[0] == step), step)
        # It was there when the counts were copied.
        last = max(step, min(last, self._latest.steps))
        owner, who = self._owner(step, row), self._who(step, row)
        if rows == LIVE and owner and self.read_by is not None:
            self.bad_request, self.bad_blocks = owner, self.read_by(owner, last)
            who += f"; it read blocks {text(self.bad_blocks, owner)}"
        logger.warning(
            "staleproof: first %s row with NaN or Inf: step %d%s, %s of %s, row %d, %s%s",
            rows, step, f" to {last}" if last > step else "", stage, layer, row,
            "canary: nobody wrote it" if canary else "computed, no canary", who,
        )  # fmt: skip

    def first_live(self) -> str:
        """Where a live row was bad first since the last call, in words; empty if none was.

        Waits for the device. :mod:`staleproof.vllm.contain` calls it, once a step with a bad request.
        """
        from staleproof.evidence.board import NEVER, crossing

        packed = int(self.board.numbers[-1])
        self._report(LIVE, packed)
        first = crossing(packed)
        if first is None:
            return ""
        self.board.numbers[-1] = NEVER
        step, slot, row, _ = first
        stage, layer = next(key for key, at in self._slots.items() if at == slot)
        # It may be another request's, from a time when nobody asked.
        owner = self._owner(step, row)
        return f", first bad: {stage} of {layer} in step {step}{f' ({owner})' if owner else ''}"

    def _batch(self, step: int) -> tuple[Sequence[str], Mapping[str, int]]:
        """The requests of a step in their order, and tokens of each, if they are known."""
        return next((known[1:] for known in self._recent if known[0] == step), ((), {}))

    def _owner(self, step: int, row: int) -> str:
        """The request of a row; empty if it is not known."""
        requests, tokens = self._batch(step)
        ends = accumulate(tokens.get(request, 0) for request in requests)
        return next((request for request, end in zip(requests, ends, strict=True) if row < end), "")

    def _who(self, step: int, row: int) -> str:
        """The request of a row, and those of its batch; empty if they are not known."""
        requests, _ = self._batch(step)
        if not requests:
            return ""
        owner = self._owner(step, row)
        more = f" and {len(requests) - NAMED} more" if len(requests) > NAMED else ""
        batch = f"batch {', '.join(requests[:NAMED])}{more}"
        return f", request {owner} of {batch}" if owner else f", {batch}"

    def reset(self) -> None:
        """Forget all counts: those of the profile and of warm-up runs are nobody's."""
        self.board.reset()
        self._forget()


def _short(name: str) -> str:
    """``layers.3`` of ``model.layers.3.self_attn.attn``; the name itself if it has no number.

    >>> _short("model.layers.3.mlp.experts"), _short("head")
    ('layers.3', 'head')
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return name if not number else ".".join(parts[number - 1 : number + 1])


def read_settings() -> Settings | None:
    """The settings of this process; see :func:`settings`."""
    return settings(os.environ)
