"""The cases put to a real engine, as one table."""

from __future__ import annotations

from collections.abc import Sequence

from staleproof.cases.run import Table
from staleproof.engine import blocks, cost, hybrid, memory, mla, router, starts, watched
from staleproof.engine.bench import INCIDENT, Bench, Pool
from staleproof.engine.orders import run

_MODULES = (mla, starts, blocks, hybrid, router, watched, memory, cost)
BENCHES: dict[str, Bench] = {module.BENCH.name: module.BENCH for module in _MODULES}


def table(*names: str, without: Sequence[str] = ()) -> Table:
    """The table of these benches; of all by default.

    Engines that may share the GPU come first and start together; those that must not wait for them.

    Args:
        names: of benches.
        without: engines with one of these in their name are not started, nor states of ``cost`` timed.
    """
    chosen = [BENCHES[name].without(without) for name in dict.fromkeys(names or BENCHES)]
    sharing = [bench for bench in chosen if bench.together is run]
    pool = Pool(sharing)
    rest = [bench for bench in chosen if bench.together is not run]
    return Table(INCIDENT, *(bench.rows() for bench in (*map(pool.of, sharing), *rest)))


TABLE = table()
