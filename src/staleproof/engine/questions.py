"""The questions put to a real engine, as one table."""

from __future__ import annotations

from staleproof.engine import blocks, cost, hybrid, memory, mla, router, watched
from staleproof.engine.bench import INCIDENT, Bench
from staleproof.harness.questions import Questions

_MODULES = (mla, blocks, hybrid, router, watched, memory, cost)
BENCHES: dict[str, Bench] = {module.BENCH.name: module.BENCH for module in _MODULES}


def table(*names: str) -> Questions:
    """The table of these benches; of all by default."""
    return Questions(INCIDENT, *(BENCHES[name].row for name in names or BENCHES))


QUESTIONS = table()
