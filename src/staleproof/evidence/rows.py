"""Row verdicts: whose NaN is it, and does padding decide what a live row says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from staleproof import check
from staleproof.evidence.canary import bits


class Verdict(StrEnum):
    """What became of the rows of one step.

    ``clean``: no row is bad. ``pad_only``: padding rows are bad, no live row is. ``leaked``: a live
    row is bad, and good again over clean padding. ``live_born``: a live row is bad by itself.
    """

    CLEAN = "clean"
    PAD_ONLY = "pad_only"
    LEAKED = "leaked"
    LIVE_BORN = "live_born"


@dataclass(frozen=True)
class Fill:
    """Named content for memory that belongs to no live row. Calling it fills a tensor in place."""

    name: str
    write: Callable[[torch.Tensor], object]

    def __call__(self, x: torch.Tensor) -> None:
        if x.numel():
            self.write(x)


def _noise(seed: int) -> Callable[[torch.Tensor], object]:
    def write(x: torch.Tensor) -> object:
        generator = torch.Generator().manual_seed(seed)
        return x.copy_(torch.randn(x.shape, generator=generator) * 100)

    return write


def _largest(x: torch.Tensor) -> object:
    return x.fill_(torch.finfo(x.dtype).max)


CLEAN = Fill("zeros", lambda x: x.zero_())
FILLS = (
    Fill("nan", lambda x: x.fill_(float("nan"))),
    Fill("inf", lambda x: x.fill_(float("inf"))),
    Fill("largest", _largest),
    Fill("noise", _noise(0)),
)

Outputs = torch.Tensor | Sequence[torch.Tensor]
Run = Callable[[Fill | None], Outputs]
Rows = int | torch.Tensor


def bad_rows(x: torch.Tensor) -> torch.Tensor:
    """(rows,) bool: which rows of ``x`` (rows, ...) hold a NaN or an Inf."""
    flat = x.reshape(x.shape[0], -1)
    # isfinite is not implemented for every fp8 type; the conversion to fp32 is exact.
    return ~torch.isfinite(flat.float()).all(1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """(rows,) bool: which rows of two tensors of one shape and dtype agree bit for bit."""
    return (bits(a.contiguous()) == bits(b.contiguous())).reshape(a.shape[0], -1).all(1)


def _as_list(outputs: Outputs) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


def _copies(outputs: Outputs) -> list[torch.Tensor]:
    return [x.clone() for x in _as_list(outputs)]


def live_mask(live_rows: Rows, rows: int, device: torch.device) -> torch.Tensor:
    """(rows,) bool from a number of leading live rows or from a mask.

    Raises:
        ValueError: more live rows than rows, or a mask of another length or dtype.
    """
    if isinstance(live_rows, int):
        check.require(0 <= live_rows <= rows, "live_rows", f"0 to {rows}", live_rows)
        return torch.arange(rows, device=device) < live_rows
    check.tensor("live_rows", live_rows, shape=(rows,), dtype=torch.bool)
    return live_rows.to(device)


def judge_rows(run: Run, live_rows: Rows) -> Verdict:
    """Judge one step.

    Args:
        run: does the step on one fixed input and returns its outputs, each (rows, ...). Called with
            ``None`` it leaves the padding as the system has it; called with :data:`CLEAN` it hands
            clean padding to whatever mixes rows. It may return several stages.
        live_rows: number of leading live rows, or a (rows,) bool mask.

    Returns:
        The verdict over all returned outputs.

    Raises:
        ValueError: no output, or ``live_rows`` does not fit the rows.
    """
    as_is = _copies(run(None))
    check.require(bool(as_is), "run", "at least one output tensor", "none")
    live = live_mask(live_rows, as_is[0].shape[0], as_is[0].device)
    bad = torch.stack([bad_rows(x) for x in as_is]).any(0)
    if not (bad & live).any():
        return Verdict.PAD_ONLY if bad.any() else Verdict.CLEAN
    clean = _copies(run(CLEAN))
    still = torch.stack([bad_rows(x) for x in clean]).any(0)
    # One live row that clean padding heals is enough to convict the padding.
    return Verdict.LEAKED if (bad & live & ~still).any() else Verdict.LIVE_BORN


@dataclass(frozen=True)
class PadInvariance:
    """Result of :func:`pad_invariance`; true in a boolean context when no live row changed."""

    trials: int
    changed: tuple[str, ...]
    changed_rows: int

    def __bool__(self) -> bool:
        return not self.changed


def pad_invariance(run: Run, live_rows: Rows, trials: int = len(FILLS)) -> PadInvariance:
    """Change only padding content and demand bit-identical live rows.

    It needs no NaN to fire: a wrong finite scale changes bits as well.

    Args:
        run: as for :func:`judge_rows`; called with :data:`CLEAN`, then with each fill.
        live_rows: number of leading live rows, or a (rows,) bool mask.
        trials: fills to try: NaN, Inf, the largest finite value, then noise of a new seed each.

    Returns:
        The fills that changed a live row, and the most live rows any of them changed.

    Raises:
        ValueError: fewer than one trial, or ``live_rows`` does not fit the rows.
    """
    check.require(trials >= 1, "trials", "at least 1", trials)
    fills = [*FILLS, *(Fill(f"noise {i}", _noise(i)) for i in range(1, trials))][:trials]
    base = _copies(run(CLEAN))
    live = live_mask(live_rows, base[0].shape[0], base[0].device)
    changed, most = [], 0
    for fill in fills:
        outputs = _as_list(run(fill))
        moved = torch.stack([~same_bits(a, b) for a, b in zip(base, outputs, strict=True)]).any(0)
        count = int((moved & live).sum())
        if count:
            changed.append(fill.name)
            most = max(most, count)
    return PadInvariance(trials=len(fills), changed=tuple(changed), changed_rows=most)
