"""The questions put to a real engine, as one table."""

from __future__ import annotations

from staleproof.engine import blocks, cost, hybrid, memory, mla, router
from staleproof.engine.bench import INCIDENT, Bench
from staleproof.harness.questions import Questions

BENCHES: dict[str, Bench] = {
    bench.name: bench
    for bench in (mla.BENCH, blocks.BENCH, hybrid.BENCH, router.BENCH, memory.BENCH, cost.BENCH)
}


def table(*names: str) -> Questions:
    """The table of these benches; of all by default."""
    return Questions(INCIDENT, *(BENCHES[name].row for name in names or BENCHES))


QUESTIONS = table()
