"""The probes of everything but attention: one function a clause, ``(kernel, shape, device) -> Outcome``.

``kernel`` is the function under audit, called with the arguments that it names; ``shape`` is a dict of
what its adapter was registered with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from staleproof.contract.contract import Outcome, breaks, holds, not_run
from staleproof.contract.scenes import bound, dirty_memory, usual_dtype
from staleproof.evidence.canary import bits
from staleproof.evidence.rows import FILLS, same_bits

NAN, INF = float("nan"), float("inf")
Kernel = Callable[..., Any]
Shape = dict[str, Any]
ROWS = 6
# For kernels that take seconds under Triton's interpreter.
NAN_AND_NOISE = (FILLS[0], FILLS[3])


def _random(*dims: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
    x = torch.randn(*dims, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype or usual_dtype(device))


def _outputs(returned: Any) -> list[torch.Tensor]:
    parts = returned if isinstance(returned, tuple | list) else [returned]
    return [part.clone() for part in parts if isinstance(part, torch.Tensor)]


def _call(kernel: Kernel, known: dict[str, Any], fill: float = NAN) -> list[torch.Tensor]:
    with dirty_memory(fill):
        return _outputs(kernel(**bound(kernel, known)))


# Routing: (router_logits, top_k, bias, is_padding) -> weights, ids


def _route(
    kernel: Kernel, shape: Shape, logits: torch.Tensor, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    known = {"router_logits": logits, "top_k": shape.get("top_k", 4), **more}
    weights, ids = _call(kernel, known)[:2]
    return (weights, ids) if ids.dtype in (torch.int32, torch.int64, torch.uint32) else (ids, weights)


def _logits(shape: Shape, device: str) -> torch.Tensor:
    return _random(ROWS, shape.get("experts", 16), device=device, dtype=torch.float32)


def _expected_ids(shape: Shape, logits: torch.Tensor) -> torch.Tensor:
    """The ids of the best logits, by row, sorted; softmax and sigmoid keep their order."""
    return logits.topk(shape.get("top_k", 4), -1).indices.sort(-1).values


def _bad_ids(ids: torch.Tensor, experts: int) -> str:
    if bool(((ids < 0) | (ids >= experts)).any()):
        return f"id {int(ids[(ids < 0) | (ids >= experts)][0])} of {experts} experts"
    for row, chosen in enumerate(ids.tolist()):
        if len(set(chosen)) < len(chosen):
            return f"row {row} has {chosen}"
    return ""


def right_experts(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """0: on numbers, the best experts of each row, with finite weights."""
    logits = _logits(shape, device)
    weights, ids = _route(kernel, shape, logits)
    wanted = (ROWS, shape.get("top_k", 4))
    if tuple(ids.shape) != wanted or tuple(weights.shape) != wanted:
        return breaks(f"shapes {tuple(weights.shape)}, {tuple(ids.shape)}, expected {wanted}", "clean")
    if wrong := _bad_ids(ids, logits.shape[1]):
        return breaks(wrong, "clean")
    if not shape.get("grouped") and not torch.equal(ids.long().sort(-1).values, _expected_ids(shape, logits)):
        return breaks("not the experts with the largest logits", "clean")
    return holds() if bool(weights.isfinite().all()) else breaks("a weight is not finite", "clean")


def _odd_rows(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name of what is wrong with rows 1 and 4 -> logits. The others stay as they are."""
    found = {}
    for name, columns, value in (
        ("all NaN", slice(None), NAN),
        ("one NaN", slice(5, 6), NAN),
        ("a NaN in the first column", slice(0, 1), NAN),
        ("half NaN", slice(0, None, 2), NAN),
        ("all -inf", slice(None), -INF),
        ("all +inf", slice(None), INF),
        ("one +inf", slice(3, 4), INF),
        ("all equal", slice(None), 0.0),
    ):
        x = logits.clone()
        x[1, columns], x[4, columns] = value, value
        found[name] = x
    return found


def ids_under_nan(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """I: distinct ids in range in every row, and the finite rows as they were."""
    clean = _logits(shape, device)
    base = _route(kernel, shape, clean)
    finite = torch.tensor([True, False, True, True, False, True], device=device)
    found = []
    for name, logits in _odd_rows(clean).items():
        weights, ids = _route(kernel, shape, logits)
        if wrong := _bad_ids(ids, logits.shape[1]):
            found.append((f"{name}: {wrong}", name))
        elif not (
            torch.equal(ids[finite], base[1][finite]) and bool(same_bits(weights, base[0])[finite].all())
        ):
            found.append((f"{name}: a finite row changes", name))
    return breaks("; ".join(note for note, _ in found[:3]), "logits", found[0][1]) if found else holds()


def ids_under_nan_bias(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """Ib: the same with a bias of NaN, whole and in one expert."""
    logits = _logits(shape, device)
    if "bias" not in bound(kernel, {"router_logits": 0, "top_k": 0, "bias": 0, "is_padding": 0}):
        return not_run("takes no bias")
    for name, columns in (("all of the bias NaN", slice(None)), ("one NaN in the bias", slice(0, 1))):
        bias = torch.zeros(logits.shape[1], device=device)
        bias[columns] = NAN
        _, ids = _route(kernel, shape, logits, bias=bias)
        if wrong := _bad_ids(ids, logits.shape[1]):
            return breaks(f"{name}: {wrong}", "bias", name)
    return holds()


def padding_mask(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """P: padding rows choose no expert or the padding id, with weight 0; other rows stay as they are."""
    logits = _logits(shape, device)
    if "is_padding" not in bound(kernel, {"router_logits": 0, "top_k": 0, "bias": 0, "is_padding": 0}):
        return not_run("takes no padding mask")
    weights, ids = _route(kernel, shape, logits)
    mask = torch.tensor([False, True, False, False, True, False], device=device)
    logits[mask] = NAN
    masked_weights, masked_ids = _route(kernel, shape, logits, is_padding=mask)
    if not bool((masked_ids[mask] == shape.get("padding_id", -1)).all()):
        return breaks(f"a padding row has the ids {masked_ids[1].tolist()}", "mask")
    if not bool((masked_weights[mask] == 0).all()):
        return breaks("a padding row has a weight", "mask")
    same = torch.equal(masked_ids[~mask], ids[~mask]) and bool(
        same_bits(masked_weights, weights)[~mask].all()
    )
    return holds() if same else breaks("the mask changes another row", "mask")


# Rows: (x) -> tensors; ragged: (x, starts) -> tensors


def _rows_of(
    kernel: Kernel, shape: Shape, x: torch.Tensor, starts: torch.Tensor | None = None
) -> list[torch.Tensor]:
    return _call(kernel, {"x": x, "starts": starts})


def _hidden(shape: Shape, device: str, rows: int = ROWS) -> torch.Tensor:
    return _random(
        rows, shape.get("hidden", 64), device=device, dtype=usual_dtype(device, shape.get("dtype", ""))
    )


def same_twice(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """0: finite results, the same bits twice, and the input as it was."""
    x, starts = _hidden(shape, device), _starts(device)
    before = x.clone()
    # Over finite memory: what is not written is another clause's.
    first = _call(kernel, {"x": x, "starts": starts}, 3.0)
    second = _call(kernel, {"x": before.clone(), "starts": starts}, 3.0)
    if not first:
        return breaks("returns no tensor", "clean")
    if not shape.get("in_place") and not torch.equal(x, before):
        return breaks("writes to its input", "clean")
    if any(not bool(out.float().isfinite().all()) for out in first if out.is_floating_point()):
        return breaks("not finite on clean input", "clean")
    if not all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True)):
        return breaks("other bits the second time", "clean")
    wanted = shape.get("reference")
    if wanted is not None and not torch.allclose(
        first[0].float(), wanted(before).float(), rtol=0.07, atol=0.02
    ):
        return breaks("not the reference", "clean")
    return holds()


def row_alone(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """R: with other content in every other row, a live row and its scale keep their bits."""
    x = _hidden(shape, device)
    if "router_logits" in bound(kernel, {"router_logits": 0, "top_k": 0, "x": 0}):
        return _route_alone(kernel, shape, device)
    base = _rows_of(kernel, shape, x.clone())
    found: list[tuple[str, str]] = []
    for fill in FILLS:
        for live in _live_sets(shape):
            others = x.clone()
            mask = torch.ones(ROWS, dtype=torch.bool, device=device)
            mask[live] = False
            noise = others[mask]
            fill(noise)
            others[mask] = noise
            changed = _changed(base, _rows_of(kernel, shape, others), live)
            if changed and fill.name not in [name for _, name in found]:
                found.append((f"{fill.name} in other rows changes {changed}", fill.name))
    return breaks("; ".join(note for note, _ in found), "rows", found[0][1]) if found else holds()


def _live_sets(shape: Shape) -> list[list[int]]:
    """Rows that stay as they are while all others change."""
    return [[*range(shape["live_rows"])]] if "live_rows" in shape else [[0, 1, 2, 3], [1], [4]]


def _changed(base: Sequence[torch.Tensor], now: Sequence[torch.Tensor], live: Sequence[int]) -> str:
    for number, (a, b) in enumerate(zip(base, now, strict=True)):
        if a.shape != b.shape:
            return "the shape of a result"
        if a.ndim and a.shape[0] == ROWS:
            if not bool(same_bits(a, b)[list(live)].all()):
                return "a live row" if number == 0 else "the scale of a live row"
        elif not torch.equal(bits(a), bits(b)):
            return "the scale of all rows"
    return ""


def _route_alone(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    clean = _logits(shape, device)
    base = _route(kernel, shape, clean)
    for fill in FILLS:
        logits = clean.clone()
        fill(logits[3:])
        now = _route(kernel, shape, logits)
        if not all(
            bool(same_bits(a[:3].contiguous(), b[:3].contiguous()).all())
            for a, b in zip(base, now, strict=True)
        ):
            return breaks(f"{fill.name} in other rows changes a live row", "rows", fill.name)
    return holds()


def all_written(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """W: no byte of the result depends on what the memory held, at a number of rows that is no tile."""
    x = _hidden(shape, device, 5)
    first, second = (_call(kernel, {"x": x.clone()}, fill) for fill in (NAN, 3.0))
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        stale = int((bits(a.contiguous()) != bits(b.contiguous())).sum())
        if stale:
            return breaks(f"{stale} of {a.numel()} elements of result {number} are not written", "written")
    return holds()


def _starts(device: str, *given: int) -> torch.Tensor:
    return torch.tensor(given or (0, 3, 4, ROWS), dtype=torch.int32, device=device)


def ragged_replays(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """N: the same tensors, with other starts in them, against fresh tensors."""
    x, starts = _hidden(shape, device), _starts(device)
    for given in ((0, 3, 4, 6), (0, 1, 2, 6), (0, 2, 2, 6), (0, 3, 4, 6)):
        starts.copy_(torch.tensor(given))
        now = _rows_of(kernel, shape, x, starts)
        fresh = _rows_of(kernel, shape, x.clone(), _starts(device, *given))
        if not all(torch.equal(bits(a), bits(b)) for a, b in zip(now, fresh, strict=True)):
            return breaks(f"starts edited in place to {list(given)}: the result of other starts", "starts")
    return holds()


def ragged_rows(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """R: content of one sequence changes no other."""
    starts = _starts(device)
    base = _rows_of(kernel, shape, _hidden(shape, device), starts)
    for fill in NAN_AND_NOISE:
        x = _hidden(shape, device)
        fill(x[3:4])
        now = _rows_of(kernel, shape, x, starts)
        if not bool(same_bits(base[0], now[0])[[0, 1, 2, 4, 5]].all()):
            return breaks(f"{fill.name} in one sequence changes another", "rows", fill.name)
    return holds()


def ragged_spare_rows(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """U: rows past the last start are zeros in memory that the kernel allocates, and change nothing."""
    starts = _starts(device, 0, 2, 3, 4)
    base = _rows_of(kernel, shape, _hidden(shape, device), starts)
    for fill in NAN_AND_NOISE:
        x = _hidden(shape, device)
        fill(x[4:])
        first, second = (_call(kernel, {"x": x, "starts": starts}, memory)[0] for memory in (NAN, 3.0))
        if not bool(same_bits(base[0], first)[:4].all()):
            return breaks(f"{fill.name} past the last start changes a live row", "spare", fill.name)
        if not torch.equal(bits(first), bits(second)):
            return breaks("rows past the last start hold what the memory held", "spare", fill.name)
        if not bool((first[4:] == 0).all()):
            return breaks(f"rows past the last start hold {first[4].flatten()[0]:.4g}", "spare", fill.name)
    return holds()


PROBES: dict[str, dict[str, Callable[[Kernel, Shape, str], Outcome]]] = {
    "routing": {
        "0": right_experts,
        "I": ids_under_nan,
        "Ib": ids_under_nan_bias,
        "P": padding_mask,
        "R": row_alone,
    },
    "rows": {"0": same_twice, "R": row_alone, "W": all_written},
    "ragged": {"0": same_twice, "R": ragged_rows, "N": ragged_replays, "U": ragged_spare_rows},
}
