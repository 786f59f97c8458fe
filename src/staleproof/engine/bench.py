"""Benches: some engines that start together, and the answers that their probes give together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from staleproof.cases.answers import Answer, no_answer
from staleproof.cases.case import Several
from staleproof.cases.finding import FIXED, OFF_ON_OFF, off_on_off, real
from staleproof.engine.orders import Order, Told, run, unavailable

INCIDENT = "engine"
Cell = tuple[str, str]


class MissingError(RuntimeError):
    """An engine that an answer needs has not answered; the text says why, in one line."""


class Results(dict[str, Told]):
    """Order -> what its engine told."""

    def of(self, name: str, probe: str) -> Any:
        """The answer of one engine to one probe.

        Raises:
            MissingError: it gave none.
        """
        told = self.get(name, Told({}, "it was not started"))
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
        cells: (question, variant) -> a function from the results to its answer.
        timeout_s: for each engine.
        slow: its engines take longest to start, so that they start before those of other benches.
        together: runs the orders: as many at a time as fit, unless the engines take turns or must be
            alone.
        narrowed: an order without what is not wanted of it: texts that name it.
    """

    name: str
    about: str
    orders: Mapping[str, Order]
    cells: Mapping[Cell, Callable[[Results], Answer]]
    timeout_s: float = 200.0
    slow: bool = False
    together: Callable[..., Iterable[tuple[str, Told]]] = run
    narrowed: Callable[[Order, Sequence[str]], Order] = lambda order, texts: order

    def without(self, texts: Sequence[str]) -> Bench:
        """The bench without engines that have one of these texts in their name, and the rest narrowed."""
        orders = {
            name: self.narrowed(order, texts)
            for name, order in self.orders.items()
            if not any(map(name.count, texts))
        }
        return replace(self, orders=orders)

    @property
    def row(self) -> Several:
        """The row of the table of questions."""
        return Several(self.name, self.ask)

    def ask(self, device: str) -> Iterator[Answer]:
        """Start the engines, and answer every cell; ``not run`` with the reason if that cannot be."""
        why = unavailable(device)
        results = Results()
        if why is None:
            results = Results(self.together(self.orders, timeout_s=self.timeout_s))
        for (question, variant), judge in self.cells.items():
            try:
                if why is not None:
                    raise MissingError(why)
                said = judge(results)
                said = replace(said, numbers=spelled(said.numbers), evidence=real("vllm"))
            except MissingError as error:
                said = no_answer(str(error))
            yield replace(said, question=question, variant=variant)


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
        self._ended: dict[tuple[str, str], Told] = {}
        self._running: Iterator[tuple[str, Told]] | None = None

    def of(self, bench: Bench) -> Bench:
        """The bench with its engines in the pool."""
        return replace(bench, together=partial(self._take, bench.name))

    def _take(self, bench: str, orders: Iterable[str], timeout_s: float) -> Iterator[tuple[str, Told]]:
        keys = {"/".join(key): key for key in self._orders}
        if self._running is None:
            self._running = run({name: self._orders[key] for name, key in keys.items()}, timeout_s)
        for name in orders:
            while (bench, name) not in self._ended:
                key, told = next(self._running)
                self._ended[keys[key]] = told
            yield name, self._ended[bench, name]


def fix(
    variant: str, verdicts: Sequence[str], wrong: str | None, expected: str | None = FIXED, **numbers: Any
) -> Answer:
    """The answer of off / on / off from three engines.

    Args:
        variant: the fix.
        verdicts: without it, with it, without it again.
        wrong: see :func:`~staleproof.cases.finding.off_on_off`.
        expected: the verdict that must come out.
        numbers: other values that the verdict rests on.
    """
    off, on, again = verdicts
    found = off_on_off(INCIDENT, variant, off=off, on=on, off_again=again, wrong=wrong, **numbers)
    return Answer(found.verdict, found.numbers, found.note, expected=expected)


def three(name: str, order: Order) -> dict[str, Order]:
    """The orders ``name, off``, ``name, on`` and ``name, off again``: with the plugin in the second only."""
    return {
        f"{name}, {state}": replace(order, patches=patches)
        for state, patches in (("off", "none"), ("on", "all"), ("off again", "none"))
    }


def cell(question: str, variant: str) -> Cell:
    """A key of :attr:`Bench.cells`."""
    return question, variant


FIX = OFF_ON_OFF
