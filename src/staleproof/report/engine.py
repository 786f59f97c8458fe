"""What a whole vLLM answered: one table for the report, and one for the end of each notebook.

>>> print(chapter("no_incident", [])[-1])
No engine run is recorded: `staleproof engine --record` makes one on a machine with a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from staleproof.cases.finding import Finding
from staleproof.cases.store import Run
from staleproof.cases.words import NOT_RUN
from staleproof.engine.cases import BENCHES

# Name of a bench -> the incident whose notebook shows it, and what the bench is about.
CHAPTERS = {
    "mla": "mla_padding",
    "starts": "mla_padding",
    "cost": "mla_padding",
    "watch": "mla_padding",
    "memory": "decode_buffer",
    "router": "moe_routing",
    "ranks": "moe_routing",
    "hybrid": "kv_reuse",
    "blocks": "kv_reuse",
}
# What tools/engine_cost.py asks.
COST = ("cost of a step", "noise of a step", "cost of the watch")
NONE = "No engine run is recorded: `staleproof engine --record` makes one on a machine with a GPU."
# A file has them sorted by name.
PHASES = ("profile", "kv cache", "capture")
Numbers = Mapping[str, Any]


def is_engine(run: Run) -> bool:
    """Whether a recorded run is one of ``staleproof engine``.

    >>> from pathlib import Path
    >>> is_engine(Run(Path("h200-engine"), {}, [], []))
    False
    """
    return bool(run.findings) and all(found.incident == "engine" for found in run.findings)


_BENCH = {case.key[1:3]: name for name, bench in BENCHES.items() for case in bench.cases}


def bench_of(found: Finding) -> str | None:
    """The bench that asks this question; ``None`` if none does any more."""
    return "cost" if found.question in COST else _BENCH.get((found.question, found.variant))


def size(count: float) -> str:
    """Bytes in the unit that fits.

    >>> size(2**21), size(3 * 2**30), size(1008)
    ('2 MiB', '3 GiB', '1008 B')
    """
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count:.4g} B"


def _rows(n: Numbers) -> str:
    """The first round with NaN: how many rows of attention, and through which stages they go."""
    for what in ("live", "padding"):
        for rounds, stages in n[what].items():
            rows = stages.get("attention", next(iter(stages.values())))
            through = [stage for stage in n.get("in_order_of_execution", ()) if stage in stages]
            path = f"; in {', '.join(through)}" if through else ""
            return f"{what} rows, {rounds}: {rows}{path}"
    return "no row has a NaN: " + ", ".join(n["sizes"])


def _bits(n: Numbers) -> str:
    if "without_padding" in n:
        n = {"all rounds": n["off_against_on"], "rounds without padding": n["without_padding"]}
    return "; ".join(
        f"{name.replace('_', ' ')}: {part['logits']} of {part['of']} rows of logits, {part['tokens']} tokens"
        for name, part in n.items()
        if isinstance(part, Mapping)
    )


def _equal(n: Numbers) -> str:
    """Of each round without padding: how many different bits the engines gave."""
    sets = ", ".join(
        f"{label}: {len(parts['prefill'])} and {len(parts['decode'])}"
        for label, parts in n["engines_with_equal_bits"].items()
        if len(set(label.split(" ")[:3:2])) == 1
    )
    engines = sum(map(len, n["engines_with_equal_kernels"]))
    kernels = len(n["engines_with_equal_kernels"])
    return (
        f"{engines} engines with {kernels} sets of compiled kernels; sets of bits of prefill and of decode, "
        f"{sets}"
    )


def _fixed(n: Numbers) -> str:
    seen = ""
    for name in ("blocks_not_zeroed", "nan_tokens"):
        if f"{name}_off" in n:
            counts = " → ".join(str(n[f"{name}_{state}"]) for state in ("off", "on", "again"))
            seen += f"; {name.replace('_', ' ')} {counts}"
    if "ids_off" in n:
        seen += f"; ids {n['ids_off'][-1]} → {n['ids_on'][-1]}"
    return seen


def _fifths(n: Numbers) -> str:
    stale = n["blocks_by_fifth"]
    return (
        f"by fifth of {n['requests']} requests: NaN {n['nan_by_fifth']}, changed {n['changed_bits_by_fifth']}"
        f"; blocks given {stale['given']}, not zero {stale['nonzero']}, NaN behind the prompt "
        f"{stale['nan_in_tail']}"
    )


def _twice(n: Numbers) -> str:
    rows = "; ".join(
        f"NaN at expert {at}: {live} live and {padding} padding rows; rows that name it {usual} → {now}"
        for (at, (live, padding)), (usual, now) in zip(
            n["live_and_padding_rows_by_expert"].items(), n["rows_that_name_the_expert"].values(), strict=True
        )
    )
    nan = "".join(
        f"; {tokens} NaN tokens at {at}" for at, tokens in n["nan_tokens_by_expert"].items() if tokens
    )
    return f"{rows}{nan}; {', '.join(n['kind'])}, top {n['top_k']}"


def _account(n: Numbers) -> str:
    return "; ".join(
        f"{phase}: the device gave {size(got['device'])}, unexplained {size(n['unexplained_bytes'][phase])}"
        for phase, got in sorted(n["phases"].items(), key=lambda item: PHASES.index(item[0]))
    )


def _slower(n: Numbers) -> str:
    low, high = n["interval_percent"]
    return (
        f"{n['slowdown_percent']:+.2f} % [{low:+.2f}, {high:+.2f}] of {n['step_ms_off']:.3f} ms a step; "
        f"{n['tokens_per_s_off']} → {n['tokens_per_s_on']} tokens/s, {n['rounds']} rounds"
    )


# Question -> a line of its figures; another question shows its first numbers.
SEEN: dict[str, Callable[[Numbers], str]] = {
    "NaN rows": _rows,
    "live logits, off / on": _bits,
    "live logits, 3 / 8 live": _bits,
    "live logits, equal engines": _equal,
    "live logits with a sound bias": lambda n: (
        f"steps with other logits {n['steps_with_other_logits']}, off again "
        f"{n['steps_with_other_logits_off_again']}; "
        f"{n['requests_with_other_tokens']} requests with other tokens"
    ),
    "dynamic fp8 quantizers": lambda n: (
        "values of sound rows changed: "
        + ", ".join(
            f"{name} {row[2]}" for name, row in n["scale_alone_scale_with_nan_values_changed"].items()
        )
    ),
    "off/on/off": _fixed,
    "undrained block ids": lambda n: f"{n['ids'][-1]} ids after {n['requests'][-1]} requests",
    "zeroing off": _fifths,
    "zeroing off, cache of NaN": _fifths,
    "staging race": lambda n: f"{n['blocks_not_zeroed']} blocks reach attention not zeroed",
    "experts named twice": _twice,
    "router logits of padded steps": lambda n: (
        f"busy rank: {n['busy rank']['padded']} padded steps, {n['busy rank']['with NaN']} with NaN, "
        f"{n['busy rank']['with Inf']} with Inf; live rows "
        f"{n['busy rank']['live rows with NaN'] + n['busy rank']['live rows with Inf']}"
    ),
    "death after start": lambda n: (
        f"predicted {size(n['predicted'])}, taken {size(n['taken'])}; {str(n['died']).partition(':')[0]}"
    ),
    "account of the start": _account,
    "memory of graphs": lambda n: f"estimated {size(n['estimated'] or 0)}, taken {size(n['taken'])}",
    "counts of the watch": lambda n: f"{n['want'][0]} padding rows a layer in {n['steps']} steps",
    "cost of a step": _slower,
    "noise of a step": _slower,
    "cost of the watch": _slower,
}


def seen(found: Finding) -> str:
    """The figures of a finding that matter, in one line; the reason, if it was not run."""
    if not found.ran:
        return found.note
    try:
        line = SEEN[found.question](found.numbers)
        if found.three is not None:
            line = f"{found.three.off} → {found.three.on} → {found.three.again}{line}"
    except (KeyError, TypeError, ValueError, IndexError):
        # Recorded by another release of the bench.
        line = ", ".join(f"{name} {value}" for name, value in list(found.numbers.items())[:3])
    return f"{line}; {found.note}" if found.note else line


def title(run: Run) -> str:
    """Of an engine run: release, machine, date, whether the source changed since."""
    return f"{next((found.of for found in run.findings if found.ran), 'vLLM')}, {run.title}"


def chapter(incident: str, runs: Sequence[Run]) -> list[str]:
    """The lines of the section at the end of an incident's notebook, as Markdown.

    Args:
        incident: folder name, e.g. ``mla_padding``.
        runs: recorded runs.
    """
    lines: list[str] = []
    for run in filter(is_engine, runs):
        found = [one for one in run.findings if CHAPTERS.get(bench_of(one) or "") == incident]
        own = run.only([one for one in found if one.verdict != NOT_RUN])
        if not own.findings:
            continue
        absent = len(found) - len(own.findings)
        remark = run.environment.get("remark")
        lines += ["", f"RECORDED, {title(own)}", *(("", str(remark)) if remark else ())]
        lines += ["", "| asked | of | answer | seen |", "|---|---|---|---|"]
        for one in own.findings:
            cells = one.question, one.variant, one.verdict, seen(one)
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        lines += [f"\n{absent} more questions were not run."] if absent else []
    return lines or [NONE]


def in_a_real_engine(incident: str) -> None:
    """Show what the recorded engine runs say of an incident; the last section of its notebook.

    Args:
        incident: folder name, e.g. ``mla_padding``.
    """
    from IPython.display import Markdown, display

    from staleproof.cases import store

    display(Markdown("\n".join(chapter(incident, store.read_all(spoilt=lambda error: print(error))))))
