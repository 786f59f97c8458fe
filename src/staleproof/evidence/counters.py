"""RowCounters: find the stage that first made a live row NaN or Inf, inside a CUDA graph.

The counters are device memory and the counting kernel is captured with the step, so nothing waits for
the device until somebody reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from staleproof import check, device
from staleproof.evidence.canary import BITS

device.load_triton()

import triton
import triton.language as tl

# A value is NaN or Inf if all of these bits are set: the exponent, or in e4m3fn (which has no Inf) all
# bits but the sign. Comparing bits gives the same answer from Triton's compiler and its interpreter.
_BAD_BITS = {
    torch.float32: 0x7F800000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7C,
}

# The first crossing is packed into one int64 (replay, stage, row), so that atomic_min finds the earliest.
_STAGE_SHIFT = tl.constexpr(24)
_REPLAY_SHIFT = tl.constexpr(32)
_NEVER = tl.constexpr(2**63 - 1)


# Without do_not_specialize Triton would compile again for a stage of 1 or a multiple of 16.
@triton.jit(do_not_specialize=["stage"])
def _count_bad_kernel(
    x_ptr, live_ptr, replay_ptr, counts_ptr, first_ptr,
    stage, rows, columns, rows_per_live,
    BAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = row < rows
    bad_here = tl.zeros((ROWS, BLOCK), tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(
            x_ptr + row[:, None] * columns + column[None, :],
            mask=in_range[:, None] & (column < columns)[None, :],
            other=0,
        )
        bad_here += ((value.to(tl.int32) & BAD) == BAD).to(tl.int32)
    bad = tl.sum(bad_here, axis=1).to(tl.int64)
    if tl.sum(bad, axis=0) > 0:
        live = tl.load(live_ptr + row // rows_per_live, mask=in_range, other=0) != 0
        is_bad = bad > 0
        live_bad = live & is_bad
        # counts: (stages, 2, 2); axis 1 is padding, live; axis 2 is values, rows.
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
    """The first live row with a NaN or Inf: number of the replay (from 1), name of the stage, row."""

    replay: int
    stage: str
    row: int


@dataclass(frozen=True)
class StageCount:
    """NaN and Inf values of one stage, and rows that have any, summed over replays."""

    pad_values: int
    pad_rows: int
    live_values: int
    live_rows: int


class RowCounters:
    """Counts NaN and Inf values per stage, apart for padding rows and live rows.

    Call :meth:`begin` at the start of the step and :meth:`observe` after each stage, while the step
    is captured. Both only launch work on the device. :meth:`read` and :attr:`first_crossing` wait for
    the device. At most 256 stages and 2**24 rows.

    Args:
        stages: names of the stages in order of execution.
        device: where the step runs.

    Raises:
        ValueError: no stage, more than 256, or a name twice.

    >>> counters = RowCounters(["attention", "quantize"], "cpu")
    >>> seq_lens = torch.tensor([3, 5, 0])  # row 2 is padding
    >>> attention, quantized = torch.ones(3, 4), torch.ones(3, 4)
    >>> attention[2] = quantized[:] = float("nan")
    >>> counters.begin()
    >>> counters.observe("attention", attention, seq_lens)
    >>> counters.observe("quantize", quantized, seq_lens)
    >>> counters.first_crossing
    Crossing(replay=1, stage='quantize', row=0)
    >>> counters.read()["attention"]
    StageCount(pad_values=4, pad_rows=1, live_values=0, live_rows=0)
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
        """Count one more replay. Call it first in the captured step."""
        self._replay.add_(1)

    def observe(self, stage: str, x: torch.Tensor, live: torch.Tensor) -> None:
        """Count the NaN and Inf values of one stage's output.

        Args:
            stage: one of the names given to the constructor.
            x: (rows, ...), contiguous, on the counters' device; fp32, fp16, bf16, e4m3fn or e5m2.
            live: (n,), any integer type or bool, where n divides rows; each entry stands for
                ``rows // n`` rows. They are live if the entry is not 0, so ``seq_lens`` can be given.

        Raises:
            ValueError: unknown stage, or a tensor of wrong dtype, device, layout or length.
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
        # On a GPU one program per row runs fastest. The interpreter's time grows with programs.
        tile = max(1, min(128, 2**19 // block)) if device.interpreting() else 1
        # Triton launches on the current device, which need not be the device of x.
        with torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext():
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
                # Rows are few and long: many warps keep enough loads of one row in flight.
                num_warps=16 if block >= 8192 else 4,
            )

    def reset(self) -> None:
        """Set all counts to zero. Allowed between replays of a captured step."""
        self._counts.zero_()
        self._replay.zero_()
        self._first.fill_(_NEVER.value)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The counts and the first crossing on the device, for a copy that nobody waits for.

        Give copies of them to :meth:`read` and :meth:`crossing`.
        """
        return self._counts, self._first

    def read(self, counts: torch.Tensor | None = None) -> dict[str, StageCount]:
        """Counts per stage, from a copy of the counts, or from the device, for which it waits."""
        counts = self._counts if counts is None else counts
        return {
            name: StageCount(*map(int, (p[0], p[1], v[0], v[1])))
            for name, (p, v) in zip(self.stages, counts.tolist(), strict=True)
        }

    @property
    def first_crossing(self) -> Crossing | None:
        """Where a live row first had a NaN or Inf, or ``None``. Waits for the device."""
        return self.crossing(self._first)

    def crossing(self, first: torch.Tensor) -> Crossing | None:
        """The same from a copy of the first crossing."""
        packed = int(first.item())
        if packed == _NEVER.value:
            return None
        stage = (packed >> _STAGE_SHIFT.value) & 0xFF
        row = packed & (2**_STAGE_SHIFT.value - 1)
        return Crossing(packed >> _REPLAY_SHIFT.value, self.stages[stage], row)
