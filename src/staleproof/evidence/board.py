"""Board: counts bad rows in a live server, one launch a stage; nothing waits for the device.

It counts rows of any stride, and a router's weights and ids in one launch. All counts are in one tensor, so
that one copy brings them to the host. The step's number, its live rows, and whether it is counted are packed
into one number on the device, which the host sets with one fill before the step.
:class:`staleproof.evidence.RowCounters` gives names to the slots, for a step that is captured as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from staleproof import check, device

device.load_triton()

import triton
import triton.language as tl

# A step as one int64: live rows in the low bits, then whether it is counted, then its number.
_ROW_BITS = tl.constexpr(24)
_ROW_MASK = tl.constexpr(2**24 - 1)
_STEP_SHIFT = tl.constexpr(25)
# The first bad row as one int64: step, slot, row, canary; atomic_min finds the earliest.
_CROSSING_STEP = tl.constexpr(33)
_CROSSING_SLOT = tl.constexpr(25)
NEVER = 2**63 - 1
_NEVER = tl.constexpr(NEVER)
# The counts of a slot. Three pairs for padding rows and live rows: rows with a NaN or Inf, those of them with
# a canary, and rows that name an expert twice. Then how often a counting kernel ran.
NUMBERS = 7
_NUMBERS = tl.constexpr(NUMBERS)
SLOTS, ROWS, STEPS = 256, 2**24, 2**30
# Plain numbers for the host, which would otherwise unwrap a constexpr at each step.
_SHIFT, _COUNTED = _STEP_SHIFT.value, 1 << _ROW_BITS.value
# The most launches to cache; a server has one for each number of tokens up to its largest batch.
MOST = 4096

# Format -> integer type; bits that are all set in a NaN or Inf; mantissa bits of a NaN that can carry a
# canary's number; the other bits of a canary (staleproof.evidence.canary); the largest number that is
# recognised. Hardware makes NaNs whose free bits are all 0 or all 1. A NaN converted from a narrower format
# has this in the upper free bits, so a canary's number uses only the lower ones. A one-byte NaN has no room
# for a number.
FORMATS = {
    torch.float32: (torch.int32, 0x7F800000, 0x3FFFFF, 0x7FC00000, 8191),
    torch.float16: (torch.int16, 0x7C00, 0x1FF, 0x7E00, 255),
    torch.bfloat16: (torch.int16, 0x7F80, 0x3F, 0x7FC0, 31),
    torch.float8_e4m3fn: (torch.uint8, 0x7F, 0, 0, 0),
    torch.float8_e5m2: (torch.uint8, 0x7C, 0, 0, 0),
}


@triton.jit
def _add_rows(board_ptr, first_ptr, step, slot, row, is_bad, is_canary, live):
    """Add the bad rows of one program to a slot, and keep the first padding row and the first live row."""
    if tl.sum(is_bad.to(tl.int32), axis=0) > 0:
        pad_bad = is_bad & (live == 0)
        live_bad = is_bad & live
        counts = board_ptr + slot.to(tl.int64) * _NUMBERS
        tl.atomic_add(counts, tl.sum(pad_bad.to(tl.int64), axis=0))
        tl.atomic_add(counts + 1, tl.sum(live_bad.to(tl.int64), axis=0))
        tl.atomic_add(counts + 2, tl.sum((pad_bad & is_canary).to(tl.int64), axis=0))
        tl.atomic_add(counts + 3, tl.sum((live_bad & is_canary).to(tl.int64), axis=0))
        crossing = ((step >> _STEP_SHIFT) << _CROSSING_STEP) | (slot.to(tl.int64) << _CROSSING_SLOT)
        crossing = crossing | (row << 1) | is_canary.to(tl.int64)
        tl.atomic_min(first_ptr, tl.min(tl.where(pad_bad, crossing, _NEVER), axis=0))
        tl.atomic_min(first_ptr + 1, tl.min(tl.where(live_bad, crossing, _NEVER), axis=0))


@triton.jit
def _add_run(board_ptr, slot):
    """Count that a counting kernel ran. If a captured graph lost it, zero bad rows mean nothing."""
    if tl.program_id(0) == 0:
        tl.atomic_add(board_ptr + slot.to(tl.int64) * _NUMBERS + 6, 1)


@triton.jit
def _live_rows(step, padding_ptr, row, rows, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(padding_ptr + row, mask=row < rows, other=1) == 0
    else:
        return row < (step & _ROW_MASK)


@triton.jit(do_not_specialize=["slot", "rows", "columns", "stride"])
def _count_rows_kernel(
    x_ptr, padding_ptr, step_ptr, board_ptr, first_ptr,
    slot, rows, columns, stride,
    BAD: tl.constexpr, FREE: tl.constexpr, QUIET: tl.constexpr, LARGEST: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    step = tl.load(step_ptr)
    if ((step >> _ROW_BITS) & 1) != 0:
        _add_run(board_ptr, slot)
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        in_range = row < rows
        bad = tl.zeros((ROWS, BLOCK), tl.int32)
        canary = tl.zeros((ROWS, BLOCK), tl.int32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            value = tl.load(
                x_ptr + row[:, None] * stride + column[None, :],
                mask=in_range[:, None] & (column < columns)[None, :],
                other=0,
            ).to(tl.int32)
            bad = bad | ((value & BAD) == BAD).to(tl.int32)
            if FREE != 0:
                number = value & FREE
                carries = ((value & ~FREE) == QUIET) & (number != 0) & (number <= LARGEST)
                canary = canary | carries.to(tl.int32)
        is_bad = tl.max(bad, axis=1) != 0
        live = _live_rows(step, padding_ptr, row, rows, MASKED)
        _add_rows(board_ptr, first_ptr, step, slot, row, is_bad, tl.max(canary, axis=1) != 0, live)


@triton.jit(do_not_specialize=["slot", "rows", "stride", "ids_stride"])
def _count_routing_kernel(
    x_ptr, ids_ptr, padding_ptr, step_ptr, board_ptr, first_ptr,
    slot, rows, stride, ids_stride, top_k,
    BAD: tl.constexpr, FREE: tl.constexpr, QUIET: tl.constexpr, LARGEST: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    step = tl.load(step_ptr)
    if ((step >> _ROW_BITS) & 1) != 0:
        _add_run(board_ptr, slot)
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        k = tl.arange(0, K)
        mask = (row < rows)[:, None] & (k < top_k)[None, :]
        value = tl.load(x_ptr + row[:, None] * stride + k[None, :], mask=mask, other=0).to(tl.int32)
        bad = ((value & BAD) == BAD).to(tl.int32)
        number = value & FREE
        carries = ((value & ~FREE) == QUIET) & (number != 0) & (number <= LARGEST)
        live = _live_rows(step, padding_ptr, row, rows, MASKED)
        is_canary = tl.max(carries.to(tl.int32), axis=1) != 0
        _add_rows(board_ptr, first_ptr, step, slot, row, tl.max(bad, axis=1) != 0, is_canary, live)
        # -1 means no expert: for slots and rows that do not exist, and for experts of other ranks.
        ids = tl.load(ids_ptr + row[:, None] * ids_stride + k[None, :], mask=mask, other=-1)
        pair = k[:, None] < k[None, :]
        same = (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, :, None] & pair[None, :, :]
        twice = (tl.sum(tl.sum(same.to(tl.int32), axis=2), axis=1) > 0) & (row < rows)
        if tl.sum(twice.to(tl.int32), axis=0) > 0:
            counts = board_ptr + slot.to(tl.int64) * _NUMBERS
            tl.atomic_add(counts + 4, tl.sum((twice & (live == 0)).to(tl.int64), axis=0))
            tl.atomic_add(counts + 5, tl.sum((twice & live).to(tl.int64), axis=0))


Launch = Callable[..., Callable[..., None] | None]


def _launch(
    kernel: Any, grid: tuple[int, ...], tensors: Sequence[torch.Tensor], sizes: Sequence[Any], **options: Any
) -> None:
    """Launch through Triton, without a cache of launches."""
    kernel[grid](*tensors, *sizes, **options)


class Board:
    """Counts of up to 256 slots on one device. Every method only launches work.

    Args:
        device: where the model runs.
        launch: launches a kernel, given its grid, its pointers, its other arguments and Triton's options;
            returns a callable that repeats the launch on other addresses, or ``None``. A server passes
            :func:`staleproof.ops.launching.launched`, which saves most of a launch's time on the host.

    Attributes:
        numbers: (256 * 7 + 2,) int64: :data:`NUMBERS` for each slot, then the first padding row and the
            first live row that had a NaN or Inf, packed.

    >>> board = Board("cpu")
    >>> board.begin(step=1, live=3, counted=True)
    >>> board.count(7, torch.full((4, 8), torch.nan))  # row 3 is padding
    >>> board.numbers[7 * NUMBERS : 7 * NUMBERS + 2].tolist()
    [1, 3]
    >>> crossing(int(board.numbers[-1]))
    (1, 7, 0, False)
    """

    def __init__(self, device: torch.device | str, launch: Launch = _launch) -> None:
        self._launcher = launch
        self.numbers = torch.zeros(SLOTS * NUMBERS + 2, dtype=torch.int64, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._counts, self._first = self.numbers[:-2], self.numbers[-2:]
        self._ready: dict[tuple[object, ...], Callable[..., None]] = {}
        self._addresses = self._step.data_ptr(), self._counts.data_ptr(), self._first.data_ptr()
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero; nothing is counted until :meth:`begin`."""
        self._counts.zero_()
        self._first.fill_(NEVER)
        self._step.zero_()

    def begin(self, step: int, live: int, counted: bool) -> None:
        """Set the number and the live rows of the next step.

        Args:
            step: its number, below 2**30.
            live: number of its leading rows that are live, below 2**24.
            counted: whether its rows are counted; if not, the kernels of the step return at once.
        """
        self._step.fill_((step % STEPS) << _SHIFT | (_COUNTED if counted else 0) | live)

    def next_step(self) -> None:
        """Go to the next step, with the same live rows: one addition on the device, for a captured graph."""
        self._step.add_(1 << _SHIFT)

    def slots(self) -> torch.Tensor:
        """The counts, (256, 7) int64, on the device."""
        return self._counts.view(SLOTS, NUMBERS)

    def count(
        self, slot: int, x: torch.Tensor, ids: torch.Tensor | None = None, padding: torch.Tensor | None = None
    ) -> None:
        """Count the rows of a stage's output that have a NaN or Inf, and rows that name an expert twice.

        Args:
            slot: below 256.
            x: (rows, ...), fp32, fp16, bf16, e4m3fn or e5m2, on the board's device; with ``ids``
                (rows, top_k).
            ids: (rows, top_k), int32 or int64, top_k at most 32. A negative id is no expert.
            padding: (at least rows,) bool, true for padding rows; by default the rows after the live
                ones of :meth:`begin` are padding.

        Raises:
            ValueError: a tensor of wrong dtype, device, layout or length; nothing was counted.
        """
        at, mask = x.data_ptr(), 0 if padding is None else padding.data_ptr()
        key: tuple[object, ...] = slot, x.dtype, x.shape, x.stride(), (at | mask) & 15, mask != 0
        if ids is None:
            if (ready := self._ready.get(key)) is not None:
                return ready(at, mask or at, *self._addresses)
        else:
            ids_at = ids.data_ptr()
            key = *key, ids.dtype, ids.shape, ids.stride(), ids_at & 15
            if (ready := self._ready.get(key)) is not None:
                return ready(at, ids_at, mask or at, *self._addresses)
        _check(self.numbers, slot, x, ids, padding)
        # Triton launches on the current device, which need not be the device of x.
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            ready = self._launch(slot, x, ids, padding)
        # Do not cache a launch on a copy of x or ids: the copy has another address each time.
        if ready is not None and x[0].is_contiguous() and (ids is None or ids.stride(1) == 1):
            if len(self._ready) >= MOST:
                self._ready.clear()
            self._ready[key] = ready
        return None

    def _launch(
        self, slot: int, x: torch.Tensor, ids: torch.Tensor | None, padding: torch.Tensor | None
    ) -> Callable[..., None] | None:
        integer, *bits = FORMATS[x.dtype]
        x = x if x[0].is_contiguous() else x.contiguous()
        raw, rows, columns = x.view(integer), x.shape[0], x[0].numel()
        mask = raw if padding is None else padding
        formats = *bits, padding is not None
        state = mask, self._step, self._counts, self._first
        if ids is not None:
            tile, k = 32, triton.next_power_of_2(columns)
            ids = ids if ids.stride(1) == 1 else ids.contiguous()
            routing = slot, rows, x.stride(0), ids.stride(0), columns, *formats, tile, k
            return self._launcher(
                _count_routing_kernel, (triton.cdiv(rows, tile),), (raw, ids, *state), routing, num_warps=4
            )
        block = min(8192, triton.next_power_of_2(columns))
        # On a GPU one program for a long row runs fastest. The interpreter's time grows with programs.
        tile = max(1, min(128, 2**19 // block)) if device.interpreting() else max(1, 2048 // block)
        sizes = slot, rows, columns, x.stride(0), *formats, tile, block
        # Rows are few and long: many warps keep enough loads of one row in flight.
        warps = 16 if block >= 8192 else 4
        return self._launcher(
            _count_rows_kernel, (triton.cdiv(rows, tile),), (raw, *state), sizes, num_warps=warps
        )


def _check(
    board: torch.Tensor, slot: int, x: torch.Tensor, ids: torch.Tensor | None, padding: torch.Tensor | None
) -> None:
    check.require(0 <= slot < SLOTS, "slot", f"0 to {SLOTS - 1}", slot)
    check.tensor("x", x, dtype=tuple(FORMATS), like=board)
    rows = x.shape[0] if x.ndim > 1 else 0
    check.require(0 < rows < ROWS and x.numel() > 0, "x", "at least one row, fewer than 2**24", x.shape)
    if ids is not None:
        check.tensor("ids", ids, dtype=(torch.int32, torch.int64), like=board)
        same = ids.shape == x.shape and ids.ndim == 2 and ids.shape[1] <= 32
        check.require(same, "ids", f"1 to 32 ids for each of the {rows} rows, as weights", ids.shape)
    if padding is not None:
        check.tensor("padding", padding, ndim=1, dtype=torch.bool, like=board, contiguous=True)
        check.require(padding.shape[0] >= rows, "padding", f"at least {rows} entries", padding.shape[0])


def crossing(packed: int) -> tuple[int, int, int, bool] | None:
    """Step, slot, row, and whether the row held a canary, unpacked from one of a board's last two numbers.

    >>> crossing(NEVER) is None
    True
    """
    if packed == NEVER:
        return None
    slot = packed >> _CROSSING_SLOT.value & SLOTS - 1
    row = packed >> 1 & ROWS - 1
    return packed >> _CROSSING_STEP.value, slot, row, bool(packed & 1)
