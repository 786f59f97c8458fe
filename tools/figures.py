"""Writes figures of an H200's recorded run, and the triage table, into README.md and pages of ``workbook``.

``python -m tools.figures`` writes the parts between markers, and README's picture. README has one sentence on
times, and an answer of ``diagnose``. The cases in the tables of times follow a rule, not our choice: each
kernel at the shapes of DeepSeek and Qwen, with each peer in ``figures.md``, in the case where it compares
best and in the case where it compares worst. README's sentence has the worst of all cases.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from staleproof import runs
from staleproof.runs import Run
from staleproof.triage import table as triage

MACHINE = "nvidia-h200"
_WRITTEN = "<!-- written by python -m tools.figures from"
# Where a written part begins, by its source.
BEGIN = f"{_WRITTEN} workbook/runs/{MACHINE} -->"
BEGIN_DIAGNOSE = f"{_WRITTEN} staleproof diagnose -->"
# What the example of diagnose is asked.
EXAMPLE = {"symptom": "nan", "version": "0.22.1", "model": "deepseek-r1", "graphs": "full"}
BEGIN_TRIAGE = f"{_WRITTEN} src/staleproof/triage/triage.toml -->"
END = "<!-- end of the written part -->"
PICTURE = "workbook/first-bad-stage.svg"
# The release whose kernels are the peers.
RELEASE = "0.20.2"
# The benchmark of the fourth table, and what it divides by; that of the fifth.
HOST, BARE = "host_time", "a bare Triton launch"
FIRST = "first_call"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Kernel:
    """One operation in the first table.

    Attributes:
        name: as in ``measurements.jsonl``.
        modes: pattern of the modes with DeepSeek's or Qwen's shapes.
        says: what to call it, if not by its name.
        drop: pattern of what is left out of a mode where a case is named.
    """

    name: str
    modes: str
    says: str = ""
    drop: str = ""


KERNELS = (
    Kernel(
        "clear_empty_rows", r"bf16 \(1024, 128, 512\)", "`clear_empty_rows`, (1024, 128, 512)", r"bf16 \(.*\)"
    ),
    Kernel(
        "mla_decode",
        r"bf16 batch \d+ heads 128 page 64(, (warm|cold))?$",
        "`mla_decode`, 128 heads",
        "bf16 | heads.*64",
    ),
    Kernel(
        "mla_decode",
        r"bf16 batch \d+ heads (16 page 64(?!, fp8)|128 page 64, (q_len|one in 32))",
        "`mla_decode`, 16 heads, mixed lengths, several query tokens",
        "bf16 | page 64",
    ),
    Kernel(
        "mla_decode",
        r"fp16 batch|bf16 batch .*fp8 cache",
        "`mla_decode`, float16, and an E4M3 cache",
        " page 64",
    ),
    Kernel("quantize_fp8_per_tensor", r"bf16 \(1024, \d+\)", drop="bf16 "),
    Kernel("quantize_nvfp4", r"bf16 \(m, 7168\)", "`quantize_nvfp4`, 7168 columns", r"bf16 \(m, 7168\)"),
    Kernel("topk_softmax", r"bf16, (128 experts, top 8|512 experts, top 10)", drop="bf16, "),
    Kernel(
        "grouped_topk", r"bf16, 256 experts, 8 groups, top 8", "`grouped_topk`, 256 experts", "bf16.*top 8"
    ),
    *(
        Kernel(
            "BlockZeroer.zero",
            rf"(28|15) layers, .*{ids}",
            f"`BlockZeroer.zero`, {says}",
            r", K/V.*?pages|, [\d,]+ B pages|, ids in a list, (copy included|host time)",
        )
        for ids, says in (
            ("(scattered|consecutive) ids", "ids on the device"),
            ("ids in a list, copy included", "ids in a list"),
            ("ids in a list, host time", "ids in a list, host time"),
        )
    ),
)


def us(value: float) -> str:
    """Microseconds in three digits or so.

    >>> us(1.539), us(99.96), us(2559.9)
    ('1.5', '100', '2560')
    """
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def is_ours(provider: str) -> bool:
    """Whether this is our public operation: its variants count neither as ours nor as peers.

    >>> [is_ours(name) for name in ("staleproof", "staleproof, mask", "zeros, then staleproof", "vLLM")]
    [True, False, False, False]
    """
    return provider == "staleproof"


@dataclass(frozen=True)
class Pair:
    """Ours and a peer in one case, in microseconds. Ratios that round below 1 are bold, except for limits.

    >>> for ours in (100.0, 100.4, 102.0, 10.02, 9.0):
    ...     print(Pair(ours, 100.0, "a case"))
    1.00: 100 for 100, a case
    1.00: 100 for 100, a case
    **0.98**: 102 for 100, a case
    9.98: 10.0 for 100, a case
    11: 9.0 for 100, a case
    >>> print(Pair(10.0, 5.0, "a case", limit=True))
    0.50: 10.0 for 5.0, a case
    """

    ours: float
    peer: float
    case: str
    limit: bool = False

    @property
    def ratio(self) -> float:
        """Above 1 where ours is faster."""
        return self.peer / self.ours

    def __str__(self) -> str:
        ratio = f"{self.ratio:.2f}" if self.ratio < 9.995 else f"{self.ratio:.0f}"
        bold = "**" if self.ratio < 0.995 and not self.limit else ""
        return f"{bold}{ratio}{bold}: {us(self.ours)} for {us(self.peer)}, {self.case}"


def pairs(kernel: Kernel, rows: Sequence[Row]) -> dict[str, list[Pair]]:
    """Peer -> every case of this kernel in which both were measured.

    A peer that was measured in one case of live rows did the same work in the others: it reads all rows,
    whichever are live.
    """
    mine = [
        row
        for row in rows
        # Drawn cells have a table of their own.
        if row["kernel"] == kernel.name and re.match(kernel.modes, row["mode"]) and "drawn" not in row
    ]
    ours = [row for row in mine if is_ours(row["provider"])]
    times: dict[str, dict[tuple[str, Any], float]] = {}
    for row in mine:
        # Variants of ours are no peers.
        if not row["provider"].startswith("staleproof"):
            times.setdefault(row["provider"], {})[row["mode"], row["x_value"]] = row["p50"]
    found: dict[str, list[Pair]] = {}
    for peer, cases in times.items():
        for row in ours:
            in_mode = [
                us for (mode, _), us in cases.items() if mode == row["mode"] and "live" in row["x_name"]
            ]
            theirs = cases.get((row["mode"], row["x_value"]), in_mode[0] if len(in_mode) == 1 else None)
            if theirs is not None:
                words = re.sub(kernel.drop, "", row["mode"])
                parts = *re.split(", ", words), f"{row['x_name']} {row['x_value']}"
                case = ", ".join(part.strip() for part in parts if part.strip())
                limit = peer.startswith("limit")
                found.setdefault(peer, []).append(Pair(row["p50"], theirs, case, limit))
    return found


def kernel_lines(rows: Sequence[Row]) -> Iterator[str]:
    """The first table: a line for each kernel and peer."""
    yield "| | beside | at best | at worst |"
    yield "|---|---|---|---|"
    for kernel in KERNELS:
        says = kernel.says or f"`{kernel.name}`"
        for peer, found in pairs(kernel, rows).items():
            best, worst = (choose(found, key=lambda pair: pair.ratio) for choose in (max, min))
            yield f"| {says} | {peer} | {best} | {worst} |"
            says = ""


def step_lines(rows: Sequence[Row]) -> Iterator[str]:
    """The second table: what a decode step takes, and what each variant adds."""
    steps = {
        (row["mode"], row["provider"], row["x_value"]): row["p50"]
        for row in rows
        if row["kernel"] == "decode_step"
    }
    live = sorted({x for _, _, x in steps})
    yield "| a decode step of | variant | " + " | ".join(f"{x} live" for x in live) + " |"
    yield "|---|---|" + "---|" * len(live)
    for mode, variant in dict.fromkeys((mode, variant) for mode, variant, _ in steps):
        cells = []
        for x in live:
            here, base = steps[mode, variant, x], steps[mode, "without", x]
            change = f"{here - base:+.1f} ({here / base - 1:+.1%})"
            cells.append(us(here) if variant == "without" else change)
        yield f"| {mode} | {variant} | " + " | ".join(cells) + " |"


def patch_lines(rows: Sequence[Row]) -> Iterator[str]:
    """The third table: each patch, where it applies, and its function without it and with."""
    yield "| patch | applies to vLLM | measured on | call | without | patched | |"
    yield "|---|---|---|---|---|---|---|"
    times: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["kernel"].startswith("patch "):
            times.setdefault((row["kernel"].removeprefix("patch "), row["mode"]), {})[row["provider"]] = row
    for (name, mode), found in times.items():
        patched, before, after = found["patched"], found["without"]["p50"], found["patched"]["p50"]
        where = patched["vllm"] + ("" if patched["needed"] else ", which does not need it")
        # Without the patch of an allocation there is nothing to wait for.
        change = f"{after / before - 1:+.0%}" if before else "-"
        times_of = f"{us(before)} | {us(after)} | {change}"
        yield f"| `{name}` | {patched['applies_to']} | {where} | {mode} | {times_of} |"


def host_lines(rows: Sequence[Row]) -> Iterator[str]:
    """The fourth table: what a call takes of the calling thread, beside a bare launch and the peers."""
    yield "| operation | us | of a bare Triton launch | peers' own calls, us |"
    yield "|---|---|---|---|"
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get("benchmark") == HOST:
            times.setdefault(row["kernel"], {})[row["provider"]] = row["p50"]
    for kernel, found in times.items():
        ours, bare = found.pop("staleproof"), found.pop(BARE)
        peers = ", ".join(f"{peer} {us(time)}" for peer, time in found.items()) or "-"
        yield f"| `{kernel}` | {us(ours)} | {ours / bare:.2f} | {peers} |"


def first_lines(rows: Sequence[Row]) -> Iterator[str]:
    """The fifth table: a new process from importing the package to its first result, and the next call."""
    yield "| operation | Triton's cache empty, s | filled, s | second call, us |"
    yield "|---|---|---|---|"
    times: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        if row.get("benchmark") == FIRST:
            cache = row["mode"].rpartition(" ")[2]
            times.setdefault(row["kernel"], {})[row["provider"], cache] = row["p50"]
    for kernel, found in times.items():
        empty, filled = (f"{found['staleproof', cache] / 1e6:.1f}" for cache in ("empty", "filled"))
        yield f"| `{kernel}` | {empty} | {filled} | {us(found['the second call', 'filled'])} |"


GRID = (
    "MLA decode over cells drawn from a grid (16 to 128 heads, 1 to 4 query tokens, uniform and ragged "
    "lengths), cold: our time divided by that of the fastest peer, FlashInfer or FlashMLA. Below 1 ours is "
    "faster:"
)
NAN = (
    "Routers of 128 tokens of which a tenth is NaN, as in the benchmark of vLLM #39593: their times, and "
    "their answers for the NaN rows:"
)


def cells(rows: Sequence[Row]) -> dict[tuple[str, int, int | None], dict[str, float]]:
    """(Mode, tokens, seed if drawn) of each cell of MLA decode -> our time, cold, and that of each peer.

    >>> row = {"kernel": "mla_decode", "mode": "bf16 batch 4, cold", "x_value": 128, "cache": "cold"}
    >>> row["drawn"] = 0
    >>> times = {"staleproof": 3.0, "FlashInfer 0.6 MLA fa3": 4.0, "FlashMLA of vLLM": 2.0}
    >>> cells([{**row, "provider": name, "p50": us} for name, us in times.items()])
    {('bf16 batch 4', 128, 0): {'ours': 3.0, 'fa3': 4.0, 'FlashMLA': 2.0}}
    """
    times: dict[tuple[str, int, int | None], dict[str, float]] = {}
    for row in rows:
        name = re.match(r"(staleproof)$|FlashInfer.* (fa\d)|(FlashMLA)", row["provider"])
        if name and row["kernel"] == "mla_decode" and row["cache"] == "cold":
            cell = row["mode"].removesuffix(", cold"), row["x_value"], row.get("drawn")
            times.setdefault(cell, {})["ours" if name[1] else name[name.lastindex]] = row["p50"]
    return {cell: of for cell, of in times.items() if "ours" in of and len(of) > 1}


def by_the_faster(of: Mapping[str, float]) -> float:
    """Our time divided by that of the fastest peer.

    >>> by_the_faster({"ours": 3.0, "fa3": 4.0, "FlashMLA": 2.0})
    1.5
    """
    return of["ours"] / min(us for name, us in of.items() if name != "ours")


def grid_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Geometric mean and largest ratio of the drawn cells."""
    ratios = {cell: by_the_faster(of) for cell, of in cells(rows).items()}

    def mean(ratios: Sequence[float]) -> float:
        return round(statistics.geometric_mean(ratios), 2)

    for says, of in (
        ("drawn with the seed used for tuning", [r for (*_, seed), r in ratios.items() if seed == 0]),
        ("drawn with another seed", [r for (*_, seed), r in ratios.items() if seed]),
    ):
        if of:
            close = sum(r <= 1.05 for r in of)
            yield (
                f"{len(of)} cells {says}: geometric mean {mean(of):.2f}, {close} at most 1.05, "
                f"worst {max(of):.2f}."
            )


def nan_lines(rows: Sequence[Row]) -> Iterator[str]:
    """What each router takes, and makes of rows of nothing but NaN."""
    yield "| router | provider | us, warm | of the NaN rows: repeat an expert | weigh NaN |"
    yield "|---|---|---|---|---|"
    for row in rows:
        if "nan_rows" in row and row["cache"] == "warm":
            told = row["of_these_repeat"], row["of_these_weigh_nan"]
            repeat, weigh = (f"{count} of {row['nan_rows']}" for count in told)
            yield f"| `{row['kernel']}` | {row['provider']} | {us(row['p50'])} | {repeat} | {weigh} |"


def about(run: Run) -> str:
    """Machine, days and versions of the timings of a recorded run, in a few words."""
    first = run.measurements[0]
    return (
        f"RECORDED on an {run.machine}, {run.date} (torch {first['torch']}, Triton {first['triton']}, "
        f"FlashInfer {first['flashinfer']}, kernels of vLLM {RELEASE})"
    )


def section(run: Run) -> str:
    """The tables of ``workbook/figures.md``."""
    rows = run.measurements
    head = (
        f"{about(run)}; CUDA graphs, median us; all of it in `runs/{MACHINE}/`, and "
        "`python benchmarks/NAME.py` measures yours. " + run.environment.get("remark", "")
    ).strip()
    rule = (
        "Each kernel at the shapes of DeepSeek and Qwen, beside each peer: our best case and our worst, as "
        "the speed-up (the peer's time divided by ours), then our time and the peer's. **Bold**: ours is "
        "slower by more than half a per cent. A limit is the time of a memset, a copy or a product of as "
        "many bytes or operations. `warm`: inputs in the L2; `cold`: in device memory."
    )
    # Above each table what it shows.
    parts = {
        f"{head}\n\n{rule}": kernel_lines,
        "What a variant adds to a captured decode step, us:": step_lines,
        "What the quantisers gain with all rows live is one fused kernel in place of eager `torch.max`, not "
        "the fix.\n\nWhat a patch changes, us of the device, or of the calling thread where the call "
        "says `host`:": patch_lines,
        GRID: grid_lines,
        NAN: nan_lines,
        "Time of the calling thread for a call outside a graph, checks on, small inputs:": host_lines,
        "A new process, from `import staleproof` to the first result, and the next call; once each:": (
            first_lines
        ),
    }
    return "\n\n".join("\n".join([f"{says}\n", *lines(rows)]) for says, lines in parts.items())


def short(run: Run) -> str:
    """README's sentence: in how many groups of shapes no peer is faster, and the worst of the others."""
    worst = []
    for kernel in KERNELS:
        cases = [
            (pair.ratio, kernel.name, peer, pair)
            for peer, found in pairs(kernel, run.measurements).items()
            for pair in found
            if not pair.limit
        ]
        if cases:
            worst.append(min(cases, key=lambda case: case[0]))
    ahead = sum(ratio >= 1 for ratio, *_ in worst)
    _, name, peer, most = min(worst, key=lambda case: case[0])
    case = re.sub(r"(\w+) batch (\d+) heads (\d+)", r"\1 queries, batch \2, \3 heads", most.case)
    case = re.sub(r"tokens (\d+)", r"\1 tokens", case)
    return (
        f"{about(run)}. We timed our operations beside those of other libraries, in {len(worst)} groups of "
        f"cases. In {ahead} of these groups no case of ours is slower than the other library's. "
        f"In our worst case `{name}` takes {us(most.ours)} us and {peer} takes {us(most.peer)} us "
        f"({case}). Times are medians. "
        "[figures.md](workbook/figures.md) has every case, and says what its words mean."
    )


def diagnosis() -> str:
    """A command and its answer."""
    from staleproof.triage import answer, judge
    from staleproof.triage.facts import Facts

    known = Facts()
    for name, word in EXAMPLE.items():
        known.learn(name, word, f"--{name}")
    known.derive()
    said = answer.as_text(known, judge.judge_all(known), 80)
    options = " ".join(f"--{name} {word}" for name, word in EXAMPLE.items())
    return f"```console\n$ staleproof diagnose {options}\n{said}\n```"


def replaced(page: str, begin: str, text: str, end: str = END) -> str:
    """The page with this text in the part that begins so.

    >>> page = f"above {BEGIN} old {END} below {END} kept"
    >>> replaced(page, BEGIN, "new").replace(BEGIN, "(").replace(END, ")").split()
    ['above', '(', 'new', ')', 'below', ')', 'kept']
    """
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


def parts(run: Run) -> Iterator[tuple[str, str, str]]:
    """File, beginning and text of each written part."""
    yield "workbook/symptoms.md", BEGIN_TRIAGE, triage.markdown(lambda row: f"../notebooks/{row.notebook}")
    yield "README.md", BEGIN, short(run)
    yield "README.md", BEGIN_DIAGNOSE, diagnosis()
    yield "workbook/figures.md", BEGIN, section(run)


def picture() -> str:
    """README's picture: in which rows and stages of a captured step NaN stands, and where it crosses."""
    from staleproof.incidents.mla_padding.pictures import stage_picture
    from staleproof.report import plots

    drawn: str = plots.svg(plots.stages(stage_picture("empty_row_not_written", "cpu"))).data
    return drawn


def main() -> None:
    """Rewrite the parts, and the picture."""
    root = runs.checkout()
    for name, begin, text in parts(runs.find(MACHINE)):
        path = root / name
        path.write_text(replaced(path.read_text(), begin, text))
        print(f"written: {path}")
    (root / PICTURE).write_text(picture())


if __name__ == "__main__":
    main()
