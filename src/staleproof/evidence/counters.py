"""RowCounters: which stage first made a live row bad, kept on the device inside the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from staleproof import check, device
from staleproof.evidence.canary import BITS

device.load_triton()

import triton
import triton.language as tl

# A value is NaN or Inf when these bits are all set: the exponent, or for e4m3fn (which has no Inf)
# everything but the sign. The test reads bits, so it means the same compiled and interpreted.
_BAD_BITS = {
    torch.float32: 0x7F800000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7C,
}

# A first crossing is one int64, ordered by replay, then stage, then row.
_STAGE_SHIFT = tl.constexpr(24)
_REPLAY_SHIFT = tl.constexpr(32)
_NEVER = tl.constexpr(2**63 - 1)


# Specialising on stage would compile the kernel again for stages 0, 1 and 16.
@triton.jit(do_not_specialize=["stage"])
def _count_bad_kernel(
    x_ptr, live_ptr, replay_ptr, counts_ptr, first_ptr,
    stage, rows, columns, rows_per_live,
    BAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < rows
    found = tl.zeros((ROWS, BLOCK), tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(
            x_ptr + row[:, None] * columns + column[None, :],
            mask=in_range[:, None] & (column < columns)[None, :],
            other=0,
        )
        found += ((value.to(tl.int32) & BAD) == BAD).to(tl.int32)
    bad = tl.sum(found, axis=1).to(tl.int64)
    if tl.sum(bad, axis=0) > 0:
        live = tl.load(live_ptr + row // rows_per_live, mask=in_range, other=0) != 0
        is_bad = bad > 0
        live_bad = live & is_bad
        # counts is (stages, padding | live, values | rows)
        slot = counts_ptr + stage.to(tl.int64) * 4
        tl.atomic_add(slot, tl.sum(tl.where(live, 0, bad), axis=0))
        tl.atomic_add(slot + 1, tl.sum((is_bad & (live == 0)).to(tl.int64), axis=0))
        tl.atomic_add(slot + 2, tl.sum(tl.where(live, bad, 0), axis=0))
        tl.atomic_add(slot + 3, tl.sum(live_bad.to(tl.int64), axis=0))
        replay = tl.load(replay_ptr)
        crossing = (replay << _REPLAY_SHIFT) | (stage.to(tl.int64) << _STAGE_SHIFT) | row
        crossing = tl.where(live_bad, crossing, _NEVER)
        tl.atomic_min(first_ptr, tl.min(crossing, axis=0))


@dataclass(frozen=True)
class Crossing:
    """The first time a live row was bad: replay (from 1), stage name, row."""

    replay: int
    stage: str
    row: int


@dataclass(frozen=True)
class StageCount:
    """Bad values and bad rows of one stage, summed over replays."""

    pad_values: int
    pad_rows: int
    live_values: int
    live_rows: int


class RowCounters:
    """Counts bad (NaN or Inf) values in padding and in live rows, stage by stage, inside a graph.

    Call :meth:`begin` once and :meth:`observe` after each stage while the step is captured; both
    are device work only. Read when you want to know: :meth:`read` and :attr:`first_crossing` are
    the only host syncs. At most 256 stages and 2^24 rows.

    Args:
        stages: stage names in order of execution.
        device: where the step runs.

    Raises:
        ValueError: no stage, a repeated name, or more than 256.
    """

    def __init__(self, stages: Sequence[str], device: torch.device | str) -> None:
        check.require(
            0 < len(stages) <= 256 and len(set(stages)) == len(stages),
            "stages",
            "1 to 256 distinct names",
            list(stages),
        )
        self.stages = tuple(stages)
        self._counts = torch.zeros(len(stages), 2, 2, dtype=torch.int64, device=device)
        self._replay = torch.zeros(1, dtype=torch.int64, device=device)
        self._first = torch.full((1,), _NEVER.value, dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Count one more replay. First call of the captured step."""
        self._replay.add_(1)

    def observe(self, stage: str, x: torch.Tensor, live: torch.Tensor) -> None:
        """Count the bad values of one stage's output.

        Args:
            stage: one of the names given at construction.
            x: (rows, ...), contiguous; fp32, fp16, bf16 or fp8.
            live: (n,) with ``rows % n == 0``; a row is live where its entry is not 0. ``seq_lens``
                serves as it is.

        Raises:
            ValueError: unknown stage, wrong dtype, layout or length.
        """
        check.require(stage in self.stages, "stage", f"one of {list(self.stages)}", stage)
        check.tensor("x", x, dtype=tuple(_BAD_BITS), like=self._counts, contiguous=True)
        check.tensor("live", live, ndim=1, like=self._counts)
        rows = x.shape[0] if x.ndim else 0
        check.require(
            0 < live.shape[0] <= rows < 2**24 and rows % live.shape[0] == 0,
            "live",
            f"a length that divides the {rows} rows of x",
            live.shape[0],
        )
        columns = x.numel() // rows
        raw = x.view(BITS[x.element_size()])
        block = min(16384, triton.next_power_of_2(columns))
        # A GPU wants a program a row; the interpreter pays for each program.
        tile = max(1, min(128, 2**19 // block)) if device.interpreting() else 1
        _count_bad_kernel[(triton.cdiv(rows, tile),)](
            raw,
            live,
            self._replay,
            self._counts,
            self._first,
            self.stages.index(stage),
            rows,
            columns,
            rows // live.shape[0],
            BAD=_BAD_BITS[x.dtype],
            ROWS=tile,
            BLOCK=block,
            # One program holds a whole row's loads in flight: rows are few and long.
            num_warps=16 if block >= 8192 else 4,
        )

    def reset(self) -> None:
        """Forget everything seen. Safe between replays of a captured step."""
        self._counts.zero_()
        self._replay.zero_()
        self._first.fill_(_NEVER.value)

    def read(self) -> dict[str, StageCount]:
        """Counts by stage. Waits for the device."""
        return {
            name: StageCount(*map(int, (p[0], p[1], v[0], v[1])))
            for name, (p, v) in zip(self.stages, self._counts.tolist(), strict=True)
        }

    @property
    def first_crossing(self) -> Crossing | None:
        """Where a live row first went bad, or ``None``. Waits for the device."""
        packed = int(self._first.item())
        if packed == _NEVER.value:
            return None
        stage = (packed >> _STAGE_SHIFT.value) & 0xFF
        row = packed & (2**_STAGE_SHIFT.value - 1)
        return Crossing(packed >> _REPLAY_SHIFT.value, self.stages[stage], row)
