"""Benches: some engines, and the cases that judge what their probes told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from staleproof.cases.case import Case, Fix, MissingError, Reading
from staleproof.cases.finding import OFF_ON_OFF, Evidence, Key, real
from staleproof.cases.words import FIXED
from staleproof.engine.orders import EngineResult, unavailable
from staleproof.engine.session import Order

INCIDENT = "engine"
# Why most cases expect nothing.
ASKED = "what this release does with dummy weights is the question"


@dataclass(frozen=True)
class Results:
    """The answers of engines; asking for one waits until its engine has ended.

    Attributes:
        running: name and result of each engine, as it ends.
        ended: name -> result of the engines that have ended.
    """

    running: Iterator[tuple[str, EngineResult]]
    ended: dict[str, EngineResult] = field(default_factory=dict)

    def engine(self, name: str) -> EngineResult:
        """All that one engine told; waits for its end."""
        while name not in self.ended:
            one, told = next(self.running, (name, EngineResult({}, "it was not started")))
            self.ended[one] = told
        return self.ended[name]

    def of(self, name: str, probe: str) -> Any:
        """The answer of one engine to one probe.

        Raises:
            MissingError: it gave none.
        """
        told = self.engine(name)
        if probe not in told.answers:
            raise MissingError(f"{name}: {told.failed}")
        return told.answers[probe]


@dataclass(frozen=True)
class Bench:
    """Engines and the questions that they answer.

    Attributes:
        name: as the user names it: ``staleproof engine NAME``.
        orders: name -> engine; no other bench has one of these names.
        cases: what is judged of the results.
        slow: its engines take longest to start, so that they start before those of other benches.
        alone: one engine at a time has the GPU.
    """

    name: str
    orders: Mapping[str, Order]
    cases: Sequence[Case]
    slow: bool = False
    alone: bool = False


Judge = Callable[[Results], Reading]
STATES = ("off", "on", "off again")


def cell(question: str, variant: str, words: str, judge: Judge, *, expect: str | None = None) -> Case:
    """A case about what the engines of a bench told.

    Args:
        question, variant: of its key.
        words: family of its verdicts.
        judge: from the results to the reading; a :class:`MissingError` means ``not run``.
        expect: see :class:`~staleproof.cases.case.Case`.
    """
    key = Key(INCIDENT, question, variant)
    return Case(key, words, _judged, judge, expect=expect, reason=ASKED, needs=_missing, evidence=_evidence)


def fix(
    variant: str,
    words: str,
    state: Callable[[Results, str], Reading],
    wrong: Callable[[Results], str | None],
    *,
    expect: str | None = FIXED,
) -> Fix:
    """Off / on / off over three engines, or three states of some.

    Args:
        variant: the remedy.
        words: family of the three readings.
        state: from the results and ``off``, ``on`` or ``off again`` to the reading.
        wrong: what is wrong with the results of the engine with the remedy, or ``None``.
        expect: see :class:`~staleproof.cases.case.Case`.
    """

    def named(name: str) -> Judge:
        return lambda results: state(results, name)

    off, on, again = map(named, STATES)
    return Fix(
        *(Key(INCIDENT, OFF_ON_OFF, variant), words, _judged, on),
        off=off,
        again=again,
        wrong=lambda subject, device, results: wrong(results),
        expect=expect,
        reason=ASKED,
        needs=_missing,
        evidence=_evidence,
    )


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


def three(name: str, order: Order) -> dict[str, Order]:
    """The orders ``name, off``, ``name, on`` and ``name, off again``: with the plugin in the second only.

    torch.compile times kernels, so that two equal engines can keep different ones, which give other bits. So
    these three share their compiled kernels.
    """
    kernels = name if order.compiles else None
    return {
        f"{name}, {state}": replace(order, patches=patches, kernels=kernels)
        for state, patches in zip(STATES, ("none", "all", "none"), strict=True)
    }
