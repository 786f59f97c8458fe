"""Timing one engine in several states that take turns, in its own process.

Two engines differ by a per cent or two even if they are equal: other addresses, other cores. So one engine
is timed in all states. Hooks are taken out and put back, and each state has CUDA graphs of its own, captured
with its hooks in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from staleproof.cases.children import tell
from staleproof.engine.probes import Engine, prompts
from staleproof.vllm import hooks, standing, watch_hooks
from staleproof.vllm.fp8_scales import padding_mask
from staleproof.vllm.watch import Settings, Watch

# Steps that a request generates before its batch is started anew: longer ones would fill the cache.
TOKENS = 900
# Steps before a timed turn: they still run what the last state began.
WARM = 3
READY, LOCK = "ready", "lock"


@dataclass(frozen=True)
class State:
    """What an engine runs with.

    Attributes:
        patches: whether the plugin's patches are in place.
        watch: what the watch counts; ``None`` if its hooks are out.
        probe: a key of :data:`PROBES`: what else looks for NaN.
        every: it is timed in one round of so many; a large cost needs few.
    """

    patches: bool = False
    watch: Settings | None = None
    probe: str | None = None
    every: int = 1


class Switch:
    """Puts one engine into one state or another.

    Args:
        engine: started with the patches and the watch in place.
        states: by name.
    """

    def __init__(self, engine: Engine, states: Mapping[str, State]) -> None:
        self.engine, self.states = engine, dict(states)
        # State -> its captures: of each wrapper, its graphs.
        self._graphs: dict[str, list[dict[int, Any]]] = {}
        self._watches: dict[str, Any] = {}
        self._hooks = watch_hooks.installed[0]
        self._inside = contextlib.ExitStack()
        # (Place, owners) -> what stands there: the same objects each time, so that Python's caches hold.
        self._standing: dict[tuple[int, frozenset[str]], Any] = {}
        for name, state in self.states.items():
            given = engine.runner.device, padding_mask
            self._watches[name] = None if state.watch is None else Watch(state.watch, *given)

    def capture(self, name: str) -> int:
        """Capture the graphs of a state; return how many there are now."""
        import torch

        self.enter(name)
        for wrapper in _wrappers():
            wrapper.concrete_cudagraph_entries = {}
        with torch.inference_mode():
            self.engine.runner.capture_model()
        captured = {id(w): w.concrete_cudagraph_entries for w in _wrappers()}
        self._graphs.setdefault(name, []).append(captured)
        if (watch := self._watches[name]) is not None:
            watch.reset()
        return sum(map(len, captured.values()))

    def enter(self, name: str, number: int = 0) -> None:
        """Put the engine into a state, between two steps; of its captures the one of this number runs."""
        state = self.states[name]
        self._inside.close()
        owners = {watch_hooks.OWNER} if state.watch is not None or state.probe == "sync_stages" else set()
        put_in_place(owners | (_patches() if state.patches else set()), self._standing)
        self._hooks.watch = self._watches[name]
        for wrapper in _wrappers():
            if captures := self._graphs.get(name):
                wrapper.concrete_cudagraph_entries = captures[number % len(captures)][id(wrapper)]
        if state.probe is not None:
            self._inside.enter_context(PROBES[state.probe](self.engine))


def _patches() -> set[str]:
    """Owners of hooks, but the watch."""
    return {hook.owner for place in hooks._places.values() for hook in place.hooks} - {watch_hooks.OWNER}


def put_in_place(owners: set[str], kept: dict[tuple[int, frozenset[str]], Any]) -> None:
    """Leave the hooks of these owners in place, and take all others out: vLLM's own functions stand there.

    Args:
        owners: names of patches, or the watch's.
        kept: (place, owners) -> the function that was installed there for them; filled here.

    >>> put_in_place(set(), {})
    """
    for number, place in enumerate(hooks._places.values()):
        inside = [hook for hook in place.hooks if hook.owner in owners and not hook.target.single]
        key = number, frozenset(hook.owner for hook in inside)
        if key not in kept:
            kept[key] = place.original
            for hook in inside:
                swap = getattr(hook.target, "swap", None)
                kept[key] = swap(kept[key]) if swap else hooks._wrapped(kept[key], hook)
        if vars(place.holder)[place.attribute] is not kept[key]:
            setattr(place.holder, place.attribute, kept[key])
        # For references to a wrapper that a module has imported by name.
        for owner in {hook.owner for hook in place.hooks}:
            if owner in owners:
                standing.stepped_back.pop(owner, None)
            else:
                standing.stepped_back[owner] = "taken out to be timed"


def _wrappers() -> list[Any]:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    return list(CUDAGraphWrapper._all_instances)


@contextlib.contextmanager
def vllm_count(engine: Engine) -> Iterator[None]:
    """vLLM's own count of NaN in the logits, which waits for the device."""
    import vllm.envs

    vllm.envs.__dict__["VLLM_COMPUTE_NANS_IN_LOGITS"] = True
    try:
        yield
    finally:
        del vllm.envs.__dict__["VLLM_COMPUTE_NANS_IN_LOGITS"]


@contextlib.contextmanager
def sync_hidden(engine: Engine) -> Iterator[None]:
    """``torch.isnan(x).any()`` on the last hidden states of each step, and its wait for the device."""
    import torch

    model = engine.runner.get_model()
    inner = model.compute_logits

    def compute_logits(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        bool(torch.isnan(hidden).any())
        return inner(hidden, *args, **kwargs)

    with mock.patch.object(model, "compute_logits", compute_logits):
        yield


class _Syncing:
    """Stands where the watch stands, and waits for the device behind every stage."""

    latest, left = None, 0

    def begin_step(self, tokens: int, same: bool = False) -> None: ...
    def pause(self) -> None: ...
    def name_requests(self, requests: Any, tokens: Any) -> None: ...

    def observe(self, stage: str, layer: str, x: Any, ids: Any = None) -> None:
        import torch

        # Some attention backends return nothing.
        if x is not None:
            bool(torch.isnan(x).any())


@contextlib.contextmanager
def sync_stages(engine: Engine) -> Iterator[None]:
    """``torch.isnan(x).any()`` and its wait behind every stage that the watch counts; not in graphs."""
    with mock.patch.object(watch_hooks.installed[0], "watch", _Syncing()):
        yield


PROBES: dict[str, Callable[[Engine], contextlib.AbstractContextManager[None]]] = {
    "vllm_count": vllm_count,
    "sync_hidden": sync_hidden,
    "sync_stages": sync_stages,
}


def states(
    engine: Engine,
    folder: str,
    name: str,
    players: Sequence[str],
    asked: Mapping[str, State],
    live: Mapping[int, float],
    steps: int,
    captures: int,
) -> dict[str, Any]:
    """Time decode steps in each state, in turns, and tell the times of each number of live requests.

    Args:
        folder: shared by all engines of the bench.
        name: of this engine.
        players: names of all engines; none is timed before all are ready, and never two at a time.
        asked: states by name.
        live: numbers of live requests, and seconds for each of them.
        steps: timed in a turn.
        captures: how often each state captures graphs of its own; 0 without graphs. Rounds take turns with
            them.

    Returns:
        ``captured``: number of graphs of each state's last capture; ``left_out``: states that could not be
        captured, and why; ``cores``: where it was timed. Also told, as ``"N live"``: what
        :func:`rounds` returns.
    """
    switch = Switch(engine, asked)
    captured, left_out = dict.fromkeys(asked, 0), {}
    for number in range(captures):
        # Forward and backward: none is always captured first.
        for state in list(asked)[:: -1 if number % 2 else 1]:
            if state in left_out:
                continue
            try:
                captured[state] = switch.capture(state)
            except Exception as error:
                left_out[state] = f"{type(error).__name__}: {error}"
    captured = {state: of for state, of in captured.items() if state not in left_out}
    asked = {state: asked[state] for state in captured}
    for count in live:
        fill(engine, count, 2 * WARM * len(asked) * max(1, captures) + 4 * WARM)
        for number, state in itertools.product(range(max(1, captures)), asked):
            switch.enter(state, number)
            step(engine, 2 * WARM)
        drain(engine)
    Path(folder, f"{READY} {name}").touch()
    while any(not Path(folder, f"{READY} {player}").exists() for player in players):
        time.sleep(0.01)
    cores = stay(list(players).index(name))
    # Like a server that is ready: freeze the objects that exist now, so that no collection visits them.
    gc.collect()
    gc.freeze()
    for count, seconds in live.items():
        with Path(folder, LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tell((f"{count} live", rounds(engine, switch, list(asked), count, seconds, steps)))
    switch.enter(next(iter(asked)))
    return {"captured": captured, "left_out": left_out, "cores": cores}


def rounds(
    engine: Engine, switch: Switch, names: Sequence[str], count: int, seconds: float, steps: int
) -> dict[str, list[float | None]]:
    """State -> median seconds per step, one for each round; ``None`` if not timed.

    Not the mean, because a few steps take far longer.

    A round times each state twice, first in a random order and then in the reverse of it, so that anything
    that grows during the round, like the sequences, affects all states alike. Garbage is collected between
    rounds.
    """
    times: dict[str, list[float | None]] = {name: [] for name in names}
    draw = random.Random(count)
    end = time.monotonic() + seconds
    number, each = 0, float("inf")
    while (now_s := time.monotonic()) < end:
        # As many rounds as the requests may grow and as fit into the time, and so many tokens: whatever is
        # left must be served too. The first round says how long one takes.
        most = max(1, round((end - now_s) / each))
        planned: list[tuple[int, list[str]]] = []
        tokens = 0
        while not planned or (len(planned) < most and tokens < TOKENS - 2 * len(names) * (WARM + steps)):
            now = [name for name in names if number % switch.states[name].every == 0]
            planned.append((number, draw.sample(now, len(now))))
            tokens += 2 * len(now) * (WARM + steps)
            number += 1
        fill(engine, count, tokens + 8 * WARM)
        gc.collect()
        gc.disable()
        for capture, order in planned:
            taken: dict[str, list[float]] = {name: [] for name in order}
            for name in (*order, *reversed(order)):
                switch.enter(name, capture)
                taken[name] += timed(lambda: step(engine, 1), steps)
            for name in names:
                times[name].append(statistics.median(taken[name]) if name in taken else None)
        gc.enable()
        drain(engine)
        each = (time.monotonic() - now_s) / len(planned)
    return times


def timed(run: Callable[[], None], steps: int) -> list[float]:
    """Seconds of each step, after some that are not timed. The last one ends when the device has done all."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(WARM):
        run()
    wait()
    ends = [time.perf_counter()]
    for _ in range(steps - 1):
        run()
        ends.append(time.perf_counter())
    run()
    wait()
    ends.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(ends)]


def stay(number: int) -> list[int]:
    """Keep this thread on one core, another for each engine; return it, or nothing where that cannot be."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    # Not the first, which takes interrupts, nor the other half of a core that an engine has.
    chosen = cores[(1 + 2 * number) % len(cores)]
    os.sched_setaffinity(0, {chosen})
    return [chosen]


def step(engine: Engine, steps: int) -> None:
    """Take so many steps."""
    for _ in range(steps):
        engine.llm.llm_engine.step()


def drain(engine: Engine) -> None:
    """Step until no request is left."""
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()


def fill(engine: Engine, count: int, tokens: int) -> None:
    """Start requests of so many tokens, and step until all of them decode."""
    from vllm import SamplingParams

    for prompt in prompts([64] * count):
        engine.requests[0] += 1
        engine.llm.llm_engine.add_request(
            f"turn {engine.requests[0]}",
            prompt,
            SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False),
        )
    step(engine, 4 * WARM // 2)
