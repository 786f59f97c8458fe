"""Clearing the rows of empty requests: ours, what PyTorch offers, and cudaMemsetAsync.

Run: ``python benchmarks/clear_empty_rows.py`` on a machine with a CUDA device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from staleproof import device

device.select()

from staleproof import measure
from staleproof.ops.clear_empty_rows import clear_empty_rows

ROWS, HEADS, RANK = 1024, 128, 512
LIVE = (1, 512, 1000, 1024)
ROW_BYTES = HEADS * RANK * 2
# Each launch of a graph writes a buffer of its own, so that none finds its lines in the L2.
SETS = measure.LAUNCHES


def cases() -> Iterator[measure.Timing]:
    """One for each number of live rows."""
    outs = [torch.empty(ROWS, HEADS, RANK, dtype=torch.bfloat16, device="cuda") for _ in range(SETS)]
    zero = torch.zeros((), dtype=torch.bfloat16, device="cuda")
    for live in LIVE:
        seq_lens = torch.zeros(ROWS, dtype=torch.int32, device="cuda")
        seq_lens[:live] = 512
        empty = (seq_lens == 0)[:, None, None]
        providers: dict[str, Callable[[torch.Tensor], object]] = {
            "staleproof": lambda out, lens=seq_lens: clear_empty_rows(out, lens),
            "masked_fill_": lambda out, mask=empty: out.masked_fill_(mask, 0),
            "torch.where": lambda out, mask=empty: torch.where(mask, zero, out, out=out),
        }
        if live < ROWS:
            providers |= {
                "slice zero_, n on the host": lambda out, n=live: out[n:].zero_(),
                "limit: cudaMemsetAsync, n on the host": lambda out, n=live: measure.memset_async(out[n:]),
            }

        def wrong(provider: str, calls: Any = providers, live: int = live) -> str:
            target = outs[0].fill_(torch.nan)
            calls[provider](target)
            right = bool(target[:live].isnan().all()) and not int(target[live:].count_nonzero())
            return "" if right else "wrong rows"

        yield measure.Timing(
            *("mla_padding", "clear_empty_rows", f"bf16 ({ROWS}, {HEADS}, {RANK})", "live rows", live),
            (ROWS - live) * ROW_BYTES,
            {name: [partial(call, out) for out in outs] for name, call in providers.items()},
            None,
            wrong,
        )


def rows() -> list[dict[str, Any]]:
    """Measure every case.

    Raises:
        DeviceError: no GPU.
    """
    measure.require_gpu()
    return [row for case in cases() for row in case.rows()]


if __name__ == "__main__":
    sys.exit(measure.main(rows, baseline="staleproof"))
