"""What the plan of MLA decode predicts beside what a Hopper GPU takes, and its constants fitted to that.

    python -m tools.mla_plan time FILE   every cut that the plan considers, in each cell; needs a GPU
    python -m tools.mla_plan show FILE   predicted beside measured, and what the choice costs in each cell
    python -m tools.mla_plan fit FILE    constants for ``ops/mla/plan.py`` that predict these times better

FILE has a line a cell. After a kernel has changed: time, fit, write the constants into the plan, show.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import exp, log
from pathlib import Path
from typing import Any

import torch
from benchmarks.mla_decode import SCALE, SEEN, SHAPES, Inputs, Shape, drawn, make_inputs

from staleproof.cases import measure
from staleproof.ops.launching import Seen
from staleproof.ops.mla import decode, plan
from staleproof.ops.mla.plan import Cut, Work, cdiv

# Seed -> cells drawn with it, besides the benchmark's shapes. The benchmark's unseen seed is not among these.
DRAWN = {SEEN: 12, 101: 24, 102: 24}
E4M3 = torch.float8_e4m3fn
# Cells with an E4M3 cache, of which the benchmark has few.
E4M3_SHAPES = [
    Shape(batch, tokens, heads, cache=E4M3)
    for heads in (16, 32, 128)
    for batch, tokens in ((1, 4096), (4, 4096), (16, 512), (16, 4096), (64, 2048), (128, 512))
]
Times = Mapping[Shape, Mapping[Cut, float]]
# Cuts of a cell that take at most this many times the best cut's time have weight 1, others 0.1.
CLOSE = 1.3


def shapes() -> list[Shape]:
    """The cells, each once, with 16 bit numbers of one kind."""
    more = [shape for seed, count in DRAWN.items() for shape in drawn(count, seed)]
    return [s for s in dict.fromkeys([*SHAPES, *more, *E4M3_SHAPES]) if s.dtype == torch.bfloat16]


def work_of(shape: Shape) -> Work:
    """A batch as the prediction sees it, with the lengths that it has."""
    tiles = [max(1, cdiv(n, 64)) for n in shape.lengths()]
    sizes = shape.batch, shape.heads, shape.q_len, max(tiles), float(sum(tiles)), 132
    return Work(*sizes, shape.cache == E4M3)


def _calls(shape: Shape, cut: Cut, sets: Sequence[Inputs]) -> list[Any]:
    def call(q: Any, kv: Any, table: Any, lens: Any) -> Any:
        out = torch.empty(*q.shape[:-1], 512, device=q.device, dtype=q.dtype)
        lse = torch.empty(q.shape[:-1], device=q.device)
        return lambda: decode.mla_decode(q, kv, table, lens, softmax_scale=SCALE, out=out, lse=lse)

    decode.fastest = lambda *given: cut  # type: ignore[assignment]
    # What another cut has left.
    decode._SEEN = Seen()
    return [call(*inputs) for inputs in sets]


def _compile(shape: Shape) -> None:
    """In a process of its own: the compiled kernels are left in Triton's cache."""
    inputs = make_inputs(shape)
    for cut in work_of(shape).cuts():
        _calls(shape, cut, [inputs])[0]()
    torch.cuda.synchronize()


def timed(file: Path) -> None:
    """Time every cut of every cell, and write a line a cell."""
    measure.require_gpu()
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, shapes()))
    with file.open("w") as lines:
        for shape in shapes():
            turns = measure.rotation(sum(shape.lengths()) * 576 * shape.cache.itemsize)
            sets = [make_inputs(shape) for _ in range(turns.sets)]
            found = {
                " ".join(map(str, cut)): dict(measure.cached_times(_calls(shape, cut, sets), turns))
                for cut in work_of(shape).cuts()
            }
            us = {cut: round(times[measure.COLD].p50, 2) for cut, times in found.items()}
            lines.write(json.dumps({**_fields(shape), "us": us}) + "\n")


def _fields(shape: Shape) -> dict[str, Any]:
    """What differs from the default; numbers are bf16, and the cache may be E4M3."""
    fields = dataclasses.asdict(shape)
    defaults = {one.name: one.default for one in dataclasses.fields(Shape)}
    kept = {name: value for name, value in fields.items() if value != defaults[name]}
    return kept | ({"cache": "E4M3"} if shape.cache == E4M3 else {})


def _cut(text: str) -> Cut:
    """``"pairs 66 1"`` as a cut."""
    kernel, parts, splits = text.split()
    return Cut(kernel, int(parts), int(splits))


def read(file: Path) -> Times:
    """The microseconds of each cell by their cut."""
    found: dict[Shape, dict[Cut, float]] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        cuts = {_cut(cut): us for cut, us in row.pop("us").items()}
        found[Shape(**row | ({"cache": E4M3} if "cache" in row else {}))] = cuts
    return found


def chosen(shape: Shape) -> Cut:
    """What the plan takes: it knows the longest length, not the others."""
    work = work_of(shape)
    return plan.fastest_of(work._replace(total=float(work.batch * work.tiles)))


def wins(times: Times) -> dict[tuple[str, str], tuple[int, int]]:
    """By kernel and dtype of the cache: cells in which it is faster than each other by 3 %, of so many tried.

    Each kernel counts with the best of its cuts.
    """
    found: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for shape, each in times.items():
        cache = "fp8" if shape.cache == E4M3 else "bf16"
        best = {one: min(us for cut, us in each.items() if cut.kernel == one) for one, *_ in each}
        for kernel, us in best.items():
            found[kernel, cache].append(all(1.03 * us < best[other] for other in best if other != kernel))
    return {kind: (sum(won), len(won)) for kind, won in sorted(found.items())}


def show(times: Times) -> None:
    """Print the choice of each cell beside the best cut, worst first, and the mean of what it costs."""
    rows, errors = [], defaultdict(list)
    for shape, each in times.items():
        work, best = work_of(shape), min(each, key=each.__getitem__)
        for cut, us in each.items():
            if us <= CLOSE * each[best]:
                errors[cut.kernel, "fp8" if work.converts else "bf16"].append(work.microseconds(cut) / us)
        own = chosen(shape)
        rows.append((each[own] / each[best], shape, work, own, best))
    for ratio, shape, work, own, best in sorted(rows, key=lambda row: -row[0]):
        each = times[shape]
        told = f"{shape.batch} x {shape.tokens}, {shape.mode().split('page 64')[1].strip(', ')}"
        print(
            f"{ratio:.3f}  {told}, {shape.heads} heads: "
            f"{tuple(own)} {each[own]:.1f} us, predicted {work.microseconds(own):.1f}; "
            f"{tuple(best)} {each[best]:.1f}, predicted {work.microseconds(best):.1f}"
        )
    for kind, ratios in sorted(errors.items()):
        off = statistics.median(abs(log(ratio)) for ratio in ratios)
        print(
            f"{' '.join(kind)}: predicted and measured differ by {100 * off:.1f} % (median of {len(ratios)})"
        )
    for kind, (won, tried) in wins(times).items():
        print(f"{' '.join(kind)}: the fastest by more than 3 % in {won} of {tried}")
    longer = 100 * (exp(regret(times)) - 1)
    print(f"the choice takes {longer:.1f} % longer than the best cut (mean of {len(rows)} cells)")


def constants() -> dict[str, float]:
    """The plan's constants by name, e.g. ``RATES.pairs.tile``."""
    found: dict[str, float] = {}
    for table in ("RATES", "E4M3_RATES"):
        for kernel, rates in getattr(plan, table).items():
            found |= {f"{table}.{kernel}.{field}": rate for field, rate in rates._asdict().items()}
    names = "LAUNCH FIND_PART CROWD BANDWIDTH MERGE_MEGABYTE MERGE_SOME CONVERT_QUERIES E4M3_PACKED"
    return found | {name: getattr(plan, name) for name in names.split()}


def take(values: Mapping[str, float]) -> None:
    """Let the plan predict with other constants."""
    for name, value in values.items():
        table, *rest = name.split(".")
        if rest:
            rates = getattr(plan, table)
            kernel = next(one for one in rates if str(one) == rest[0])
            rates[kernel] = rates[kernel]._replace(**{rest[1]: value})
        else:
            setattr(plan, name, value)


def regret(times: Times) -> float:
    """Mean logarithm of what the chosen cut takes, in times of the best."""
    return statistics.fmean(log(each[chosen(shape)] / min(each.values())) for shape, each in times.items())


def fit(times: Times) -> dict[str, float]:
    """Constants that choose better and predict better: each is made larger or smaller while that helps.

    What is made small is the regret, and a third of the mean squared logarithm of predicted over measured.
    """
    cases = [
        (work_of(shape), cut, us, 1.0 if us <= CLOSE * min(each.values()) else 0.1)
        for shape, each in times.items()
        for cut, us in each.items()
    ]

    def loss() -> float:
        off = statistics.fmean(
            weight * log(work.microseconds(cut) / us) ** 2 for work, cut, us, weight in cases
        )
        return regret(times) + off / 3

    values, step = constants(), 0.1
    least = loss()
    while step > 0.01:
        before = least
        for name in values:
            for factor in (1 + step, 1 - step):
                take(tried := values | {name: values[name] * factor})
                if (new := loss()) < least:
                    values, least = tried, new
        if before - least < 1e-4:
            step /= 2
    take(values)
    return values


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=["time", "show", "fit"])
    parser.add_argument("file", type=Path)
    given = parser.parse_args(arguments)
    if given.verb == "time":
        timed(given.file)
    elif given.verb == "fit":
        for name, value in fit(read(given.file)).items():
            print(f"{name} = {value:.3g}")
    if given.verb != "time":
        show(read(given.file))


if __name__ == "__main__":
    main()
