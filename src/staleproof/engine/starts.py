"""Do equal engines give the same bits? Off / on / off can only tell what the plugin changes if they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from staleproof.cases.case import Reading, reading
from staleproof.engine.bench import Bench, Results, cell
from staleproof.engine.mla import PATCHED
from staleproof.engine.probes import control, rows, start
from staleproof.engine.session import Order, Probe
from staleproof.engine.tuning import compiled_kernels

SAME = "live logits, equal engines"
FP8 = "TRITON_MLA, full graphs, compiled, fp8"
# torch.compile times kernels, and whether two of them are faster as one. Here it does neither.
UNTIMED = f"{FP8}, nothing timed"
# Each number of live requests twice, one after the other.
LIVE = (3, 8, 8, 50, 50)
# The rounds without padding rows, whose content a batch with one fp8 scale depends on.
WHOLE = (1, 2)
STATES = {"off": "none", "off again": "none", "off once more": "none", "on": "all", "on again": "all"}


ENGINES = {FP8: [*STATES], UNTIMED: ["off", "on"]}


def engine(name: str, state: str) -> str:
    """The key of one of the equal engines."""
    return f"{name}, equal engine, {state}"


def _orders() -> dict[str, Order]:
    probes: dict[Probe, dict[str, Any]] = {start: {}, control: {}, rows: {"live": LIVE}, compiled_kernels: {}}
    untimed = replace(PATCHED[FP8], probes=probes)
    compilation = {**untimed.options["compilation_config"], "inductor_compile_config": {}}
    timed = replace(untimed, options={**untimed.options, "compilation_config": compilation})
    return {
        engine(name, state): replace(untimed if name == UNTIMED else timed, patches=STATES[state])
        for name, states in ENGINES.items()
        for state in states
    }


ORDERS = _orders()


def alike(things: Mapping[str, Any]) -> list[list[str]]:
    """The names of equal things together.

    >>> alike({"a": [1], "b": [2], "c": [1]})
    [['a', 'c'], ['b']]
    """
    groups: list[tuple[Any, list[str]]] = []
    for name, thing in things.items():
        for other, names in groups:
            if other == thing:
                names.append(name)
                break
        else:
            groups.append((thing, [name]))
    return [names for _, names in groups]


def verdict(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """What the checksums of the rounds without padding say, of engines ``off...`` and ``on...``.

    >>> def engine(*sums):
    ...     return [{"sums": []}, *({"sums": [[n]]} for n in sums)]
    >>> verdict({"off": engine(1, 1), "off again": engine(1, 1), "on": engine(1, 1)})
    'same bits'
    >>> verdict({"off": engine(1, 2), "on": engine(1, 1)})
    'differ within an engine'
    >>> verdict({"off": engine(1, 1), "off again": engine(2, 2), "on": engine(1, 1)})
    'differ between equal engines'
    >>> verdict({"off": engine(1, 1), "on": engine(2, 2)})
    'differ with the plugin'
    """
    first, second = WHOLE
    if any(one[first]["sums"] != one[second]["sums"] for one in rounds.values()):
        return "differ within an engine"
    groups = alike({name: one[first]["sums"] for name, one in rounds.items()})
    for state in ("off", "on"):
        if sum(any(name.startswith(state) for name in names) for names in groups) > 1:
            return "differ between equal engines"
    return "same bits" if len(groups) == 1 else "differ with the plugin"


def equal_engines(name: str, results: Results) -> Reading:
    """Whether equal engines, without and with the plugin, give the same bits."""
    # A start that failed leaves the others to compare, but one of each kind must be there.
    told = {state: results.engine(engine(name, state)).answers for state in ENGINES[name]}
    states = [state for state in told if state in ("off", "on") or "compiled_kernels" in told[state]]
    rounds, kernels = (
        {state: results.of(engine(name, state), probe) for state in states}
        for probe in ("rows", "compiled_kernels")
    )
    numbers = {}
    for number, live in enumerate(LIVE):
        size = rounds["off"][number]["size"]
        label = f"{live} of {size}" + (" again" if live in LIVE[:number] else "")
        numbers[label] = {
            "prefill": alike({state: one[number]["sums"][:1] for state, one in rounds.items()}),
            "decode": alike({state: one[number]["sums"][1:] for state, one in rounds.items()}),
        }
    common = set.intersection(*(set(of) for of in kernels.values()))
    return reading(
        verdict(rounds),
        engines_with_equal_bits=numbers,
        engines_with_equal_kernels=alike(kernels),
        kernels_that_not_all_have={
            state: sorted(set(of) - common)[:20] for state, of in kernels.items() if set(of) - common
        },
        kernels={state: sum(of.values()) for state, of in kernels.items()},
    )


BENCH = Bench(
    "starts",
    ORDERS,
    [cell(SAME, name, "live logits", partial(equal_engines, name)) for name in ENGINES],
    slow=True,
)
