"""What our operations would take on a B200 or GB200, by arithmetic from an H200's recorded timings.

``python -m tools.cost`` rewrites the table of ``workbook/sm100-cost.md``. Nothing here is a
measurement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tools.figures import replaced

from staleproof.cases import store

NAME = "sm100-cost.md"
BEGIN, END = "## The table", "## Beside the threads' figures"
PROCESSORS = {"H200": 132, "B200": 148}
# A launch in a captured graph that does nothing, on an H200.
FLOOR_US = 1.4


@dataclass(frozen=True)
class Rates:
    """Bytes and bf16 FLOP a second.

    >>> round(Rates(8e12, 2.25e15).us(16 * 2**20), 2)
    2.1
    """

    bytes: float
    flop: float

    def us(self, size: float, flop: float = 0.0) -> float:
        """Microseconds if memory and tensor cores overlap completely."""
        return 1e6 * max(size / self.bytes, flop / self.flop)


# Dense bf16 and memory bandwidth of NVIDIA's data sheets, a GPU.
PUBLISHED = {"B200": Rates(8.0e12, 2.25e15), "GB200": Rates(8.0e12, 2.5e15)}
# Tensor cores by the instruction of sm_80, 2048 FLOP a cycle and processor as on an A100: the rate that
# Triton's tiles of fewer than 64 rows can have on SM100. 148 processors at 1.9 GHz; assumed, not published.
OLDER_FLOP = 2048 * 148 * 1.9e9


def flop_of(row: Mapping[str, Any]) -> float:
    """Both products of an MLA decode, with 576 and 512 elements a key; 0 for other operations.

    Each of a request's query tokens reads all its keys; one request in so many may have more of them.

    >>> flop_of({"kernel": "mla_decode", "mode": "bf16 batch 1 heads 128 page 64", "x_value": 4096})
    1140850688.0
    >>> flop_of({"kernel": "mla_decode", "mode": "bf16 batch 1 heads 128 page 64, q_len 4", "x_value": 4096})
    4563402752.0
    """
    found = re.search(r"batch (\d+) heads (\d+)", row["mode"])
    if row["kernel"] != "mla_decode" or found is None:
        return 0.0
    batch, heads = int(found[1]), int(found[2])
    queries = re.search(r"q_len (\d+)", row["mode"])
    longer = re.search(r"one in (\d+) of (\d+) tokens", row["mode"])
    few = batch // int(longer[1]) if longer else 0
    keys = (batch - few) * row["x_value"] + (few * int(longer[2]) if longer else 0)
    return 2.0 * keys * heads * (int(queries[1]) if queries else 1) * (576 + 512)


def measured_rates(rows: list[dict[str, Any]]) -> Rates:
    """What memset and matmul reached in the recorded run: the limits of MLA decode, each at its best."""
    by_bytes = (row["bytes"] / row["p50"] for row in rows if "bytes at the memset rate" in row["provider"])
    by_flop = (flop_of(row) / row["p50"] for row in rows if "FLOP at the matmul rate" in row["provider"])
    return Rates(max(by_bytes) * 1e6, max(by_flop) * 1e6)


def predicted_us(row: Mapping[str, Any], here: Rates, there: Rates) -> float:
    """The recorded time, less the launch, by the ratio of the limits; the launch as before.

    What takes more than three times its limit waits for instructions or latency, not for memory or
    tensor cores, and gets faster by the number of processors only.

    >>> row = {"kernel": "clear", "mode": "", "bytes": 8e6, "p50": 3.4}
    >>> round(predicted_us(row, Rates(4e12, 7e14), Rates(8e12, 2e15)), 2)
    2.4
    """
    limit, busy = here.us(row["bytes"], flop_of(row)), max(row["p50"] - FLOOR_US, 0.0)
    if busy > 3 * limit:
        return FLOOR_US + busy * PROCESSORS["H200"] / PROCESSORS["B200"]
    return FLOOR_US + busy * there.us(row["bytes"], flop_of(row)) / limit


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: the largest case of each operation and mode."""
    here = measured_rates(rows)
    older = Rates(PUBLISHED["B200"].bytes, OLDER_FLOP)
    largest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        # Warm inputs come from the L2, of which the data sheets say nothing.
        measured = row["provider"] == "staleproof" and row["unit"] == "us" and row.get("cache") != "warm"
        if measured and row["bytes"] and "drawn" not in row:
            key = row["kernel"], row["mode"]
            largest[key] = max(largest.get(key, row), row, key=lambda one: one["bytes"])
    yield f"H200, measured: {here.bytes / 1e12:.2f} TB/s, {here.flop / 1e12:.0f} TFLOP/s. " + "; ".join(
        f"{name}, published: {at.bytes / 1e12:.2f} TB/s, {at.flop / 1e12:.0f} TFLOP/s"
        for name, at in PUBLISHED.items()
    )
    yield "\n| operation | case | MB | GFLOP | H200 us | B200 us | GB200 us | B200 us, older instruction |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in largest.values():
        flop = flop_of(row)
        times = [predicted_us(row, here, at) for at in (*PUBLISHED.values(), older)]
        last = f"{times.pop():.1f}" if flop else "-"
        yield (
            f"| {row['kernel']} | {row['mode']}, {row['x_value']} {row['x_name']} | {row['bytes'] / 1e6:.1f} "
            f"| {flop / 1e9:.1f} | {row['p50']:.1f} | {times[0]:.1f} | {times[1]:.1f} | {last} |"
        )


def main() -> None:
    """Rewrite the page's table from the recorded run of an H200."""
    path = store.checkout() / "workbook" / NAME
    lines = "\n".join(table(store.find("nvidia-h200").measurements))
    path.write_text(replaced(path.read_text(), BEGIN, lines, END))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
