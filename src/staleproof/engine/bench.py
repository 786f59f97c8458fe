"""Benches: some engines that start together, and the cases that judge what their probes told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from staleproof.cases.case import Case, Fix, MissingError, Reading, Scene
from staleproof.cases.finding import OFF_ON_OFF, Evidence, Key, real
from staleproof.cases.words import FIXED
from staleproof.engine.orders import EngineResult, Order, run, unavailable

INCIDENT = "engine"
# Why most cases expect nothing.
ASKED = "what this release does with dummy weights is the question"


class Results(dict[str, EngineResult]):
    """Order -> what its engine told."""

    def of(self, name: str, probe: str) -> Any:
        """The answer of one engine to one probe.

        Raises:
            MissingError: it gave none.
        """
        told = self.get(name, EngineResult({}, "it was not started"))
        if probe not in told.answers:
            raise MissingError(f"{name}: {told.failed}")
        return told.answers[probe]


@dataclass(frozen=True)
class Bench:
    """Engines and the questions that they answer.

    Attributes:
        name: as the user names it: ``staleproof engine NAME``.
        about: what it shows, in a few words.
        orders: name -> engine.
        cases: what is judged of the results.
        timeout_s: for each engine.
        slow: its engines take longest to start, so that they start before those of other benches.
        together: runs the orders: as many at a time as fit, unless the engines take turns or must be
            alone.
        narrowed: an order without what is not wanted of it: texts that name it.
    """

    name: str
    about: str
    orders: Mapping[str, Order]
    cases: Sequence[Case]
    timeout_s: float = 200.0
    slow: bool = False
    together: Callable[..., Iterable[tuple[str, EngineResult]]] = run
    narrowed: Callable[[Order, Sequence[str]], Order] = lambda order, texts: order

    def without(self, texts: Sequence[str]) -> Bench:
        """The bench without engines that have one of these texts in their name, and the rest narrowed."""
        orders = {
            name: self.narrowed(order, texts)
            for name, order in self.orders.items()
            if not any(map(name.count, texts))
        }
        return replace(self, orders=orders)

    def rows(self) -> list[Case]:
        """Its cases, which share one start of its engines."""
        limit_s = 60.0 + self.timeout_s * max(1, len(self.orders))
        scene = Scene(self.name, self._tell, limit_s=limit_s)
        return [replace(case, scene=scene) for case in self.cases]

    def _tell(self, device: str) -> Results:
        return Results(self.together(self.orders, timeout_s=self.timeout_s))


Judge = Callable[[Results], Reading]


def cell(
    question: str, variant: str, words: str, judge: Judge, *, expect: str | None = None, reason: str = ASKED
) -> Case:
    """A case about what the engines of a bench told.

    Args:
        question, variant: of its key.
        words: family of its verdicts.
        judge: from the results to the reading; a :class:`MissingError` means ``not run``.
        expect, reason: see :class:`~staleproof.cases.case.Case`.
    """
    key = Key(INCIDENT, question, variant)
    return Case(key, words, _judged, judge, expect=expect, reason=reason, needs=_missing, evidence=_evidence)


def fix(
    variant: str,
    words: str,
    state: Callable[[Results, str], Reading],
    wrong: Callable[[Results], str | None],
    *,
    expect: str | None = FIXED,
    reason: str = ASKED,
) -> Fix:
    """Off / on / off over three engines, or three states of some.

    Args:
        variant: the remedy.
        words: family of the three readings.
        state: from the results and ``off``, ``on`` or ``off again`` to the reading.
        wrong: what is wrong with the results of the engine with the remedy, or ``None``.
        expect, reason: see :class:`~staleproof.cases.case.Case`.
    """
    off, on, again = (partial(_of_state, state, name) for name in STATES)
    return Fix(
        *(Key(INCIDENT, OFF_ON_OFF, variant), words, _judged, on),
        off=off,
        again=again,
        wrong=lambda subject, device, results: wrong(results),
        expect=expect,
        reason=reason,
        needs=_missing,
        evidence=_evidence,
    )


STATES = ("off", "on", "off again")


def _of_state(state: Callable[[Results, str], Reading], name: str, results: Results) -> Reading:
    return state(results, name)


def _judged(judge: Judge, device: str, results: Results) -> Reading:
    said = judge(results)
    return replace(said, numbers=spelled(said.numbers))


def _missing(judge: Judge, device: str) -> str | None:
    return unavailable(device)


def _evidence(judge: Judge) -> Evidence:
    return real("vllm")


def spelled(value: Any) -> Any:
    """The value with text as keys, at every depth: JSON can sort no others.

    >>> spelled({"first": {"sound": [0, {1: 2}], 5: (3,)}})
    {'first': {'sound': [0, {'1': 2}], '5': [3]}}
    """
    if isinstance(value, Mapping):
        return {str(key): spelled(one) for key, one in value.items()}
    return [spelled(one) for one in value] if isinstance(value, list | tuple) else value


class Pool:
    """Engines of several benches that start together: a bench gets its own as they end.

    Args:
        benches: those whose engines need not be alone on the GPU.
    """

    def __init__(self, benches: Sequence[Bench]) -> None:
        self._orders = {
            (bench.name, name): order
            for bench in sorted(benches, key=lambda bench: not bench.slow)
            for name, order in bench.orders.items()
        }
        self._ended: dict[tuple[str, str], EngineResult] = {}
        self._running: Iterator[tuple[str, EngineResult]] | None = None

    def of(self, bench: Bench) -> Bench:
        """The bench with its engines in the pool."""
        return replace(bench, together=partial(self._take, bench.name))

    def _take(
        self, bench: str, orders: Iterable[str], timeout_s: float
    ) -> Iterator[tuple[str, EngineResult]]:
        keys = {"/".join(key): key for key in self._orders}
        if self._running is None:
            self._running = run({name: self._orders[key] for name, key in keys.items()}, timeout_s)
        for name in orders:
            while (bench, name) not in self._ended:
                key, told = next(self._running)
                self._ended[keys[key]] = told
            yield name, self._ended[bench, name]


def three(name: str, order: Order) -> dict[str, Order]:
    """The orders ``name, off``, ``name, on`` and ``name, off again``: with the plugin in the second only.

    torch.compile times kernels, so that two equal engines can keep different ones, which give other bits. So
    these three share their compiled kernels.
    """
    kernels = name if order.compiles else None
    return {
        f"{name}, {state}": replace(order, patches=patches, kernels=kernels)
        for state, patches in (("off", "none"), ("on", "all"), ("off again", "none"))
    }
