"""Row verdicts: where the NaN of a bad row comes from, and whether padding rows change live rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from staleproof import check
from staleproof.evidence.canary import bits, by_row


class Verdict(StrEnum):
    """What a step did to its rows. A row is bad if it has a NaN or an Inf.

    ``clean``: no row is bad. ``pad_only``: padding rows are bad, live rows are not. ``leaked``: a live
    row is bad, and becomes good if the padding is clean. ``live_born``: a live row is bad either way.
    """

    CLEAN = "clean"
    PAD_ONLY = "pad_only"
    LEAKED = "leaked"
    LIVE_BORN = "live_born"


@dataclass(frozen=True)
class Fill:
    """Named content for memory that belongs to no live row. A call fills a tensor in place.

    >>> x = torch.zeros(2)
    >>> FILLS[0](x)
    >>> FILLS[0].name, x
    ('nan', tensor([nan, nan]))
    """

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
    """Which rows of ``x`` have a NaN or an Inf.

    Args:
        x: (rows, ...), any floating dtype, fp8 included.

    Returns:
        (rows,) bool.

    Raises:
        ValueError: no tensor, or one without rows.

    >>> bad_rows(torch.tensor([[1.0, 2.0], [float("inf"), 0.0]]))
    tensor([False,  True])
    """
    check.rows("x", x)
    # isfinite is missing for some fp8 types. Their conversion to fp32 is exact.
    return ~torch.isfinite(by_row(x).float()).all(1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which rows of two tensors are equal bit for bit. NaN equals the same NaN; 0 differs from -0.

    Args:
        a, b: (rows, ...), of one shape and dtype.

    Returns:
        (rows,) bool.

    Raises:
        ValueError: no tensors, or two of other shapes or dtypes.

    >>> nan = float("nan")
    >>> same_bits(torch.tensor([[nan], [0.0]]), torch.tensor([[nan], [-0.0]]))
    tensor([ True, False])
    """
    check.rows("a", a)
    check.tensor("b", b, shape=tuple(a.shape), dtype=a.dtype)
    return by_row(bits(a.contiguous()) == bits(b.contiguous())).all(1)


def _outputs(run: Run, fill: Fill | None, before: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
    """What ``run`` returns, each with as many rows, and of the shapes of the call before."""
    outputs = run(fill)
    found = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    if not isinstance(found, list | tuple):
        check.fail("run", "a tensor of rows or a list of them", type(found).__name__)
    check.require(bool(found), "run", "at least one output tensor", "none")
    for number, x in enumerate(found):
        check.rows(f"output {number} of run", x)
    shapes = [tuple(x.shape) for x in found]
    wanted = [tuple(x.shape) for x in before]
    check.require(not before or shapes == wanted, "run", f"shapes {wanted} as before", shapes)
    check.require(len({len(x) for x in found}) == 1, "run", "outputs of as many rows each", shapes)
    return [*found]


def _copies(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.clone() for x in outputs]


def _judged(live_rows: Rows, x: torch.Tensor) -> torch.Tensor:
    """The mask of the live rows, of which there must be one."""
    live = live_mask(live_rows, len(x), x.device)
    check.require(bool(live.any()), "live_rows", "at least one live row", "none")
    return live


def live_mask(live_rows: Rows, rows: int, device: torch.device) -> torch.Tensor:
    """A mask of the live rows.

    Args:
        live_rows: number of leading live rows, or a (rows,) bool mask.
        rows: number of rows.
        device: device of the mask.

    Returns:
        (rows,) bool.

    Raises:
        ValueError: more live rows than rows, or a mask of another length or dtype.

    >>> live_mask(2, 4, torch.device("cpu"))
    tensor([ True,  True, False, False])
    """
    if not isinstance(live_rows, torch.Tensor):
        is_number = isinstance(live_rows, int)
        check.require(is_number, "live_rows", "a number or a (rows,) bool mask", repr(live_rows))
        check.require(0 <= live_rows <= rows, "live_rows", f"0 to {rows}", live_rows)
        return torch.arange(rows, device=device) < live_rows
    check.tensor("live_rows", live_rows, shape=(rows,), dtype=torch.bool)
    return live_rows.to(device)


def judge_rows(run: Run, live_rows: Rows) -> Verdict:
    """Run one step, and once more over clean padding if a live row came out bad.

    Args:
        run: does the step, always with the same input, and returns its output or a list of outputs
            (of several stages), each (rows, ...). Its argument is a :class:`Fill` or ``None``: with
            ``None`` it leaves the padding as the system leaves it; with :data:`CLEAN` it must fill
            the padding rows before a stage mixes rows.
        live_rows: number of leading live rows, or a (rows,) bool mask.

    Returns:
        The verdict over all outputs.

    Raises:
        ValueError: ``run`` returns something else, no row is live, or ``live_rows`` does not fit the rows.

    >>> def divide_by_largest(fill):
    ...     x = torch.ones(4, 2)
    ...     x[2:] = float("nan")  # rows that the attention kernel left unwritten
    ...     if fill is not None:
    ...         fill(x[2:])
    ...     return x / x.abs().max()
    >>> print(judge_rows(divide_by_largest, live_rows=2))
    leaked
    """
    as_is = _copies(_outputs(run, None))
    live = _judged(live_rows, as_is[0])
    bad = torch.stack([bad_rows(x) for x in as_is]).any(0)
    if not (bad & live).any():
        return Verdict.PAD_ONLY if bad.any() else Verdict.CLEAN
    clean = _outputs(run, CLEAN, as_is)
    still = torch.stack([bad_rows(x) for x in clean]).any(0)
    # If clean padding makes even one bad live row good, the padding was the cause.
    return Verdict.LEAKED if (bad & live & ~still).any() else Verdict.LIVE_BORN


@dataclass(frozen=True)
class PadInvariance:
    """Result of :func:`pad_invariance`; true if no live row changed.

    Attributes:
        trials: number of fills tried.
        changed: names of the fills that changed a live row.
        changed_rows: the most live rows that one fill changed.
    """

    trials: int
    changed: tuple[str, ...]
    changed_rows: int

    def __bool__(self) -> bool:
        return not self.changed


def pad_invariance(run: Run, live_rows: Rows, trials: int = len(FILLS)) -> PadInvariance:
    """Change only the padding, and check that live rows stay the same bit for bit.

    This also catches faults without a NaN, for example a scale that is finite but wrong.

    Args:
        run: as for :func:`judge_rows`; called with :data:`CLEAN`, then with each fill.
        live_rows: number of leading live rows, or a (rows,) bool mask.
        trials: number of fills to try: NaN, Inf, the largest finite value, then noise, each with
            another seed.

    Returns:
        Which fills changed a live row, and how many live rows at most.

    Raises:
        ValueError: fewer than one trial, ``run`` returns something else, no row is live, or ``live_rows``
            does not fit the rows.

    >>> def quantize(fill):
    ...     x = torch.ones(4, 2)
    ...     fill(x[2:])
    ...     scale = x.abs().nan_to_num(0, 0).max() / 448  # NaN and Inf are ignored
    ...     return x / scale
    >>> pad_invariance(quantize, live_rows=2)
    PadInvariance(trials=4, changed=('largest', 'noise'), changed_rows=2)
    """
    check.require(isinstance(trials, int) and trials >= 1, "trials", "at least 1", repr(trials))
    fills = [*FILLS, *(Fill(f"noise {i}", _noise(i)) for i in range(1, trials))][:trials]
    base = _copies(_outputs(run, CLEAN))
    live = _judged(live_rows, base[0])
    changed, most = [], 0
    for fill in fills:
        outputs = _outputs(run, fill, base)
        moved = torch.stack([~same_bits(a, b) for a, b in zip(base, outputs, strict=True)]).any(0)
        count = int((moved & live).sum())
        if count:
            changed.append(fill.name)
            most = max(most, count)
    return PadInvariance(trials=len(fills), changed=tuple(changed), changed_rows=most)
