"""The cases put to a real engine, as one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from staleproof.cases.case import Case, Scene
from staleproof.cases.run import Table
from staleproof.engine import blocks, hybrid, memory, mla, ranks, router, starts, watched
from staleproof.engine.bench import INCIDENT, Bench, Results
from staleproof.engine.orders import run

_MODULES = (mla, starts, blocks, hybrid, router, ranks, watched, memory)
# Of each engine.
TIMEOUT_S = 240.0
BENCHES: dict[str, Bench] = {module.BENCH.name: module.BENCH for module in _MODULES}


def table(*names: str, without: Sequence[str] = ()) -> Table:
    """The table of these benches; of all by default.

    Engines that may share the GPU come first and start together; those that must not wait for them.

    Args:
        names: of benches.
        without: engines with one of these in their name are not started.
    """
    chosen = [BENCHES[name] for name in dict.fromkeys(names or BENCHES)]
    return Table(
        INCIDENT,
        *_together([b for b in chosen if not b.alone], without),
        *(case for bench in chosen if bench.alone for case in _together([bench], without)),
    )


def _together(benches: Sequence[Bench], without: Sequence[str]) -> Iterator[Case]:
    """The cases of benches whose engines start together, those that start slowly first."""
    orders = {
        name: order
        for bench in sorted(benches, key=lambda bench: not bench.slow)
        for name, order in bench.orders.items()
        if not any(map(name.count, without))
    }
    at_once = 1 if any(bench.alone for bench in benches) else None
    scene = Scene(
        "engines",
        lambda device: Results(run(orders, TIMEOUT_S, at_once)),
        limit_s=60.0 + TIMEOUT_S * max(1, len(orders)),
    )
    return (replace(case, scene=scene) for bench in benches for case in bench.cases)


TABLE = table()
