"""The probes of all kinds but attention: one function a clause, each ``(kernel, shape, device) -> Answer``.

``kernel`` is the function under audit, called with the arguments that it names; ``shape`` holds what its
decorator was given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch

from staleproof.audit import ROWS, SIZES, SettingError
from staleproof.check import bound
from staleproof.contract import reproducer, scenes
from staleproof.contract.contract import NO_REFERENCE, Answer, breaks, holds, not_run
from staleproof.contract.reproducer import Example, keep, last, routed
from staleproof.evidence.canary import bits
from staleproof.evidence.compare import rounding
from staleproof.evidence.rows import FILLS, same_bits

NAN, INF = float("nan"), float("inf")
Kernel = Callable[..., Any]
Shape = dict[str, Any]
Known = dict[str, Any]
Probe = Callable[[Kernel, Shape, str], Answer]
# Rows of more than a tile, and its row of zeros, as a cleared row of padding is.
MORE, ZERO_ROW = 37, 5


def _random(*dims: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
    x = torch.randn(*dims, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype or scenes.usual_dtype(device))


def _several(returned: Any) -> Sequence[Any]:
    """What a function returned, whether that is one thing or several."""
    return returned if isinstance(returned, tuple | list) else (returned,)


def _results(kernel: Kernel, known: Known, fill: float = NAN) -> list[torch.Tensor]:
    """The tensors that a kernel returns; memory that it allocates holds ``fill`` before."""
    with scenes.dirty_memory(fill):
        arguments = bound(kernel, known)
        keep(arguments)
        returned = kernel(**arguments)
    return [part for part in _several(returned) if isinstance(part, torch.Tensor)]


def _call(kernel: Kernel, known: Known, fill: float = NAN) -> list[torch.Tensor]:
    """Copies of :func:`_results`."""
    return [part.clone() for part in _results(kernel, known, fill)]


def _held(kernel: Kernel, known: Known, first: Sequence[torch.Tensor]) -> Answer | None:
    """A break, if a result has other bits than over finite memory where memory held something else."""
    for fill in scenes.HELD:
        for number, (a, b) in enumerate(zip(first, _call(kernel, known, fill), strict=True)):
            if not scenes.same_results([a], [b]):
                note = f"result {number} depends on what the memory held, here {fill:g}"
                return breaks(note, reproducer.held(a, fill, 3.0, result=number))
    return None


def _size(shape: Shape, name: str) -> Any:
    """A size of a router or of a kernel of rows: the one given, or else its decorator's default."""
    return shape.get(name, (SIZES["routing"] | SIZES["rows"])[name])


def returning_x(kernel: Kernel) -> Kernel:
    """A kernel that works in place, which returns x where it returned nothing."""

    @wraps(kernel)
    def call(**known: Any) -> Any:
        returned = kernel(**known)
        return known["x"] if returned is None else returned

    return call


def _given(shape: Shape, name: str, *args: Any, **known: Any) -> Any:
    """What a function of the decorator returns: ``reference``, ``inverse`` or ``make``.

    Raises:
        SettingError: it raises.
    """
    try:
        return shape[name](*args, **known)
    except Exception as error:
        if "CUDA error" in str(error):
            raise  # It may come late, from the kernel's launch.
        raise SettingError(
            f"{name}: raises {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error


def _tensors(shape: Shape, name: str, *args: Any, **known: Any) -> list[torch.Tensor]:
    """The tensors that such a function returns.

    Raises:
        SettingError: it raises, or returns something else.
    """
    found = _several(_given(shape, name, *args, **known))
    if not found or not all(isinstance(part, torch.Tensor) for part in found):
        raise SettingError(f"{name}: expected a tensor or several, got {_kinds(found)}")
    return [*found]


def _kinds(found: Sequence[Any]) -> str:
    return ", ".join(type(one).__name__ for one in found) or "nothing"


def _made(kernel: Kernel, shape: Shape, device: str) -> Known:
    """The arguments that ``make`` returns, as far as the kernel takes them."""
    made = _given(shape, "make", device)
    if not isinstance(made, dict):
        raise SettingError(f"make: expected a dict of arguments by name, got {type(made).__name__}")
    try:
        return bound(kernel, made)
    except TypeError as error:
        raise SettingError(f"make: the kernel {error}") from error


def _takes(kernel: Kernel, name: str) -> bool:
    return name in inspect.signature(kernel).parameters


def _needs(kernel: Kernel, name: str) -> bool:
    found = inspect.signature(kernel).parameters.get(name)
    return found is not None and found.default is found.empty


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _in_turn(
    kernel: Kernel, calls: Iterable[Known], wrong: Callable[..., str], edits: Sequence[str] = ()
) -> Answer | None:
    """A break, if one of several calls is wrong, one after the other, or leaves a trace.

    Args:
        kernel: asked over finite memory: what is not written is another clause's.
        calls: the arguments of each. Where they have the shapes of the call before, they are copied into its
            tensors.
        wrong: ``wrong(before, after, results)``, with the arguments before and after the call.
        edits: arguments that the kernel may write, beside those whose memory it returns.
    """
    known: Known = {}
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for fresh in calls:
        tensors = [name for name, x in fresh.items() if isinstance(x, torch.Tensor)]
        if known and all(known[name].shape == fresh[name].shape for name in tensors):
            for name in tensors:
                known[name].copy_(fresh[name])
        else:
            known = fresh
        before = {**known, **{name: known[name].clone() for name in tensors}}
        results = _results(kernel, known, 3.0)
        if reason := wrong(before, known, results):
            return breaks(reason)
        returned_in = {_memory(x) for x in results}
        for name in tensors:
            may = name in edits or _memory(known[name]) in returned_in
            if not may and not torch.equal(bits(before[name]), bits(known[name])):
                return breaks(f"writes to {name}")
        if not all(torch.equal(bits(x), bits(copy)) for x, copy in kept):
            return breaks("overwrites what an earlier call returned")
        own = {_memory(known[name]) for name in tensors}
        kept += [(x, x.clone()) for x in results if _memory(x) not in own]
    return None


def _first_off(found: torch.Tensor, expected: torch.Tensor, budget: torch.Tensor | float) -> str:
    """One line about the first row that is further from the reference than its budget, or ``""``."""
    found, expected = found.cpu().double(), expected.cpu().double()
    # A comparison with NaN is false, so that NaN is off.
    distance = (found - expected).abs()
    over = ~(distance <= budget)
    if not over.any():
        return ""
    row = int(over.nonzero()[0, 0])
    return f"row {row} is off by {distance[row][over[row]].max():.3g}"


def _near(dtype: torch.dtype) -> float:
    """8 roundings; for float32 what approximate exp costs."""
    return max(rounding(dtype, 8), 2e-4)


def _far(found: torch.Tensor, expected: torch.Tensor) -> str:
    """One line about the first row that is off by more than :func:`_near`, or ``""``; NaN is not compared."""
    return scenes.far_row(found, expected, _near(found.dtype) if found.dtype.is_floating_point else 0.0)


# Routing: (router_logits, top_k, bias, is_padding) -> weights, ids


def _route(kernel: Kernel, shape: Shape, logits: torch.Tensor, **more: Any) -> tuple[torch.Tensor, ...]:
    return _ids_last(_call(kernel, _router_input(kernel, shape, logits) | more))


def _router_input(kernel: Kernel, shape: Shape, logits: torch.Tensor) -> Known:
    known: Known = {"router_logits": logits, "top_k": _size(shape, "top_k")}
    nothing = {"bias": logits.new_zeros(logits.shape[1]), "is_padding": logits.new_zeros(len(logits)).bool()}
    return known | {name: x for name, x in nothing.items() if _needs(kernel, name)}


def _repeated(kernel: Kernel, shape: Shape, logits: torch.Tensor, **more: Any) -> Any:
    """An example of bad ids: the call again, and its first row that is at fault."""
    found = _call(kernel, _router_input(kernel, shape, logits) | more)
    ids, experts = _ids_last(found)[1], logits.shape[1]
    result = next(n for n, part in enumerate(found) if part is ids)
    row = next((row for row in range(len(ids)) if _bad_ids(ids[row : row + 1], experts)), None)
    return None if row is None else routed(row, result, experts)


def _ids_last(results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights, ids = results[:2]
    return (weights, ids) if ids.dtype in (torch.int32, torch.int64, torch.uint32) else (ids, weights)


def _logits(shape: Shape, device: str, rows: int = ROWS, seed: int = 0) -> torch.Tensor:
    return _random(rows, _size(shape, "experts"), seed=seed, device=device, dtype=torch.float32)


def _bad_ids(ids: torch.Tensor, experts: int) -> str:
    # Unsigned integers have no comparison on a CPU.
    ids = ids.long()
    if bool(((ids < 0) | (ids >= experts)).any()):
        return f"id {int(ids[(ids < 0) | (ids >= experts)][0])} of {experts} experts"
    for row, chosen in enumerate(ids.tolist()):
        if len(set(chosen)) < len(chosen):
            return f"row {row} has {chosen}"
    return ""


def _choices(logits: torch.Tensor, top_k: int, grouped: bool) -> list[torch.Tensor]:
    """The ids that a router may choose, sorted: the best; with groups, of the 2 best of 4 groups.

    DeepSeek-V3 adds a group's two best scores, DeepSeek-V2 takes its best; scores are sigmoid or softmax.
    """
    if not grouped:
        return [logits.topk(top_k, -1).indices.sort(-1).values]
    found = []
    for scores in (logits.sigmoid(), logits.softmax(-1)):
        groups = scores.unflatten(1, (4, -1))
        for best in (groups.topk(2, -1).values.sum(-1), groups.amax(-1)):
            out = torch.ones_like(best, dtype=torch.bool).scatter(1, best.topk(2, -1).indices, False)
            masked = groups.masked_fill(out[..., None], -INF).flatten(1)
            found.append(masked.topk(top_k, -1).indices.sort(-1).values)
    return found


def _weights_off(logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> tuple[str, str]:
    """What is wrong with the weights of these ids, and what is not known of them."""
    near = _near(weights.dtype)
    chosen, weights = logits.double().gather(1, ids.long()), weights.double()
    if bool(((weights - chosen).abs() < near).all()):
        return "", "weights are the logits"
    if not bool((weights > 0).all()):
        return f"a weight is {weights.min():.3g} for finite logits", ""
    order = chosen.argsort(-1)
    if not bool((weights.gather(1, order).diff(dim=-1) >= 0).all()):
        return "the weights are not those of the ids beside them", ""
    scores = {"softmax": logits.double().softmax(-1), "sigmoid": logits.double().sigmoid()}
    note = "weights rise with their logits"
    for name, each in scores.items():
        part = each.gather(1, ids.long())
        for wanted, form in ((part, name), (part / part.sum(-1, keepdim=True), f"{name}, renormalised")):
            factor = weights / wanted
            if bool(((factor - 1).abs() < near).all()):
                return "", ""
            if bool(((factor / factor.mean() - 1).abs() < near).all()):
                note = f"weights are {factor.mean():.3g} times those of {form}"
    return "", note


def _routed_off(
    shape: Shape, logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> tuple[str, str]:
    """What is wrong with a choice of experts, and what is not known of its weights."""
    top_k = _size(shape, "top_k")
    wanted = (len(logits), top_k)
    if tuple(ids.shape) != wanted or tuple(weights.shape) != wanted:
        return f"shapes {tuple(weights.shape)}, {tuple(ids.shape)}, expected {wanted}", ""
    if wrong := _bad_ids(ids, logits.shape[1]):
        return wrong, ""
    if not bool(weights.isfinite().all()):
        return "a weight is not finite", ""
    if shape.get("reference"):
        rights = _tensors(shape, "reference", logits, top_k)
        if [tuple(part.shape) for part in rights] != [wanted, wanted]:
            got = ", ".join(str(tuple(part.shape)) for part in rights)
            raise SettingError(f"reference: expected weights and ids of shape {wanted}, got {got}")
        right, right_ids = rights
        if odd := _no_numbers([right]):
            raise SettingError(f"reference: expected finite weights for finite logits, got {odd}")
        if not torch.equal(ids.long().sort(-1).values, right_ids.long().sort(-1).values):
            return "not the experts of the reference", ""
        order, right_order = ids.long().argsort(-1), right_ids.long().argsort(-1)
        wrong = _far(weights.gather(1, order), right.gather(1, right_order))
        return wrong and f"weights of {wrong}", ""
    chosen = ids.long().sort(-1).values
    if not any(torch.equal(chosen, right) for right in _choices(logits, top_k, _size(shape, "grouped"))):
        of = "the best groups" if _size(shape, "grouped") else "the largest logits"
        return f"not the experts with {of}", ""
    return _weights_off(logits, weights, ids)


def right_experts(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """0: on numbers, the best experts of each row, with the weights of softmax or sigmoid, or a reference."""
    notes = set()

    def wrong(before: Known, after: Known, results: Sequence[torch.Tensor]) -> str:
        reason, note = _routed_off(shape, before["router_logits"], *_ids_last(results))
        notes.add(note)
        return reason

    sizes = ((ROWS, 0), (ROWS, 1), (1, 2), (MORE, 3))
    calls = (_router_input(kernel, shape, _logits(shape, device, *each)) for each in sizes)
    if reason := _in_turn(kernel, calls, wrong):
        return reason
    if _takes(kernel, "bias"):
        logits = _logits(shape, device)
        least = int(logits.sum(0).argmin())
        bias = torch.zeros_like(logits[0]).index_fill_(0, torch.tensor(least, device=device), 10.0)
        weights, ids = _route(kernel, shape, logits, bias=bias)
        if not bool((ids == least).any(1).all()):
            return breaks("an expert with a bias of 10 is not chosen")
        # Added to the scores that choose, or to the logits.
        with_bias = [_weights_off(each, weights, ids) for each in (logits, logits + bias)]
        if ("", "") not in with_bias:
            notes.add("with a bias they are of no known form")
    known = _router_input(kernel, shape, _logits(shape, device))
    if stale := _held(kernel, known, _call(kernel, known, 3.0)):
        return stale
    unknown = next(filter(None, sorted(notes)), "")
    return not_run(f"{NO_REFERENCE} for weights: {unknown}") if unknown else holds()


# What is wrong with rows 1 and 4: name, columns, value. The other rows stay as they are.
_ODD_ROWS = (
    ("all NaN", slice(None), NAN),
    ("one NaN", slice(5, 6), NAN),
    ("a NaN in the first column", slice(0, 1), NAN),
    ("half NaN", slice(0, None, 2), NAN),
    ("all -inf", slice(None), -INF),
    ("half -inf", slice(0, None, 2), -INF),
    ("all +inf", slice(None), INF),
    ("one +inf", slice(3, 4), INF),
    ("all equal", slice(None), 0.0),
)


def ids_under_nan(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """I: distinct ids in range in every row, and the finite rows as they were."""
    clean = _logits(shape, device)
    base = _route(kernel, shape, clean)
    finite = torch.tensor([True, False, True, True, False, True], device=device)
    found: list[str] = []
    shown = None
    for name, columns, value in _ODD_ROWS:
        logits = clean.clone()
        logits[1, columns], logits[4, columns] = value, value
        weights, ids = _route(kernel, shape, logits)
        same = torch.equal(ids[finite], base[1][finite]) and same_bits(weights, base[0])[finite].all()
        if wrong := _bad_ids(ids, logits.shape[1]) or ("" if same else "a finite row changes"):
            shown = shown if found else _repeated(kernel, shape, logits)
            found.append(f"{name}: {wrong}")
    return breaks("; ".join(found[:3]), shown) if found else holds()


def ids_under_nan_bias(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """Ib: the same with a bias of NaN, whole and in one expert."""
    logits = _logits(shape, device)
    if not _takes(kernel, "bias"):
        return not_run("takes no bias")
    for name, columns in (("all of the bias NaN", slice(None)), ("one NaN in the bias", slice(0, 1))):
        bias = torch.zeros(logits.shape[1], device=device)
        bias[columns] = NAN
        _, ids = _route(kernel, shape, logits, bias=bias)
        if wrong := _bad_ids(ids, logits.shape[1]):
            return breaks(f"{name}: {wrong}", _repeated(kernel, shape, logits, bias=bias))
    return holds()


def padding_mask(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """P: padding rows choose no expert or the padding id, with weight 0; other rows stay as they are."""
    logits = _logits(shape, device)
    if not _takes(kernel, "is_padding"):
        return not_run("takes no padding mask")
    weights, ids = _route(kernel, shape, logits)
    mask = torch.zeros(ROWS, dtype=torch.bool, device=device)
    for rows in ([1, 4], [0, 3]):
        mask.zero_()[rows] = True
        masked = logits.masked_fill(mask[:, None], NAN)
        masked_weights, masked_ids = _route(kernel, shape, masked, is_padding=mask)
        if not bool((masked_ids[mask] == _size(shape, "padding_id")).all()):
            return breaks(f"a padding row has the ids {masked_ids[rows[0]].tolist()}")
        if not bool((masked_weights[mask] == 0).all()):
            return breaks("a padding row has a weight")
        if not (same_bits(masked_weights, weights)[~mask].all() and masked_ids[~mask].equal(ids[~mask])):
            return breaks("the mask changes another row")
    return holds()


def routes_alone(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """R: content of the last rows changes no other."""
    clean = _logits(shape, device)
    base, before = _call(kernel, _router_input(kernel, shape, clean))[:2], last()
    live = torch.arange(ROWS, device=device) < 3
    for fill in FILLS:
        logits = clean.clone()
        fill(logits[3:])
        now = _call(kernel, _router_input(kernel, shape, logits))[:2]
        for number, (a, b) in enumerate(zip(base, now, strict=True)):
            if not bool(same_bits(a, b)[live].all()):
                shown = reproducer.same(before, a, result=number, rows=live)
                return breaks(f"{fill.name} in other rows changes a live row", shown)
    return holds()


# Rows: (x) -> tensors

# Values of a quantiser -> the largest, half a step relative to the number, and the smallest step.
_QUANTISED = {
    torch.float8_e4m3fn: (448.0, 2.0**-4, 2.0**-9),
    torch.float8_e5m2: (57344.0, 2.0**-3, 2.0**-16),
    torch.int8: (127.0, 0.0, 1.0),
}


def _rows(shape: Shape, device: str, rows: int = ROWS, seed: int = 0) -> Known:
    dtype = scenes.usual_dtype(device, shape.get("dtype", ""))
    return {"x": _random(rows, _size(shape, "hidden"), seed=seed, device=device, dtype=dtype)}


def _scales(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | None:
    """The scale of each value, from one for all, one a row, or one a group of columns; or ``None``."""
    # E8M0 is a power of two.
    scale = (scale.double() - 127).exp2() if scale.dtype == torch.uint8 else scale.double()
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(values.shape)
    if scale.shape[0] != values.shape[0] or scale.ndim > 2:
        return None
    scale = scale.reshape(len(scale), -1)
    size, rest = divmod(values.shape[1], scale.shape[1])
    return None if rest else scale.repeat_interleave(size, 1)


def _quantised_off(values: torch.Tensor, scales: torch.Tensor, expected: torch.Tensor, dynamic: bool) -> str:
    """What is wrong with values and their scales; ``dynamic``: the kernel has chosen the scales."""
    largest, relative, step = _QUANTISED[values.dtype]
    numbers = values.double()
    if wrong := _first_off(numbers * scales, expected, expected.abs() * (relative + 2.0**-7) + scales * step):
        return f"values times scales: {wrong}"
    for scale in scales.unique() if dynamic else ():
        # A scale that is rounded up to a power of two leaves at least half of the range in use.
        own = scales == scale
        used, row = numbers[own].abs().max(), int(own.any(1).nonzero()[0])
        if used < largest / 2 and expected[own].any():
            return f"of a range of {largest:.0f} row {row} uses {used:.3g}: its scale is too large"
    return ""


def _against(results: list[torch.Tensor], shape: Shape, x: torch.Tensor, live: int) -> str:
    """What differs from the reference; :data:`NO_REFERENCE` if there is none for every result."""
    x, gave = x.cpu().double()[:live], [part.cpu() for part in results]
    if shape.get("inverse"):
        back = _tensors(shape, "inverse", *results)[0]
        if back[:live].shape != x.shape:
            return f"dequantised, it has shape {tuple(back.shape)}, x {tuple(x.shape)}"
        # Steps between the 15 numbers of FP4 are the coarsest that a format here has.
        wrong = _first_off(back[:live], x, x.abs().amax(1, keepdim=True) / 6)
        return f"dequantised, {wrong}" if wrong else ""
    quantised, dynamic = gave[0].dtype in _QUANTISED, len(gave) > 1
    has_reference = shape.get("reference") is not None
    if not has_reference and not (quantised and dynamic):
        return NO_REFERENCE
    wanted = _tensors(shape, "reference", x) if has_reference else [x]
    if odd := _no_numbers(wanted, x, live):
        raise SettingError(f"reference: expected finite numbers for finite x, got {odd}")
    if quantised:
        right = wanted[0]
        if gave[0][:live].shape != right[:live].shape:
            return f"values have shape {tuple(gave[0].shape)}, the reference {tuple(right.shape)}"
        scales = _scales(gave[0], gave[1] if dynamic else torch.ones(1))
        if scales is None:
            return NO_REFERENCE
        return _quantised_off(gave[0][:live], scales[:live], right[:live], dynamic)
    return _other_than(gave, wanted, live)


def _no_numbers(
    wanted: Sequence[torch.Tensor], x: torch.Tensor | None = None, live: int | None = None
) -> str:
    """Where a reference has a NaN or an infinity, or ``""``; it may have one in a row of x that is zeros."""
    for number, part in enumerate(wanted):
        rows = _first(part, live).cpu().double()
        for row in (~rows.isfinite()).nonzero()[:, 0].unique().tolist():
            if x is None or row >= len(x) or x[row].any():
                value = rows[row][~rows[row].isfinite()][0]
                return f"{value:.3g} in row {row} of result {number}"
    return ""


def _other_than(gave: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], live: int | None = None) -> str:
    """What differs from a reference's results; :data:`NO_REFERENCE` if it has fewer."""
    rights = [_first(part, live) for part in wanted]
    if len(rights) > len(gave):
        return f"{len(gave)} results in place of {len(rights)}"
    if len(rights) < len(gave):
        return f"{NO_REFERENCE} for {len(gave) - len(rights)} of {len(gave)} results"
    for number, (part, right) in enumerate(zip(gave, rights, strict=True)):
        if _first(part, live).shape != right.shape:
            return (
                f"result {number} has shape {tuple(part.shape)}, the reference {tuple(wanted[number].shape)}"
            )
        if wrong := _far(_first(part, live), right):
            return f"result {number}: {wrong}"
    return ""


def _first(x: torch.Tensor, rows: int | None) -> torch.Tensor:
    """The first rows, also of a number."""
    return torch.atleast_1d(x)[:rows]


def _live(results: Sequence[torch.Tensor], live: int | None) -> list[torch.Tensor]:
    """The live rows of results; what is not a row each is whole."""
    return [part[:live] if part.ndim and len(part) == ROWS else part for part in results]


def same_twice(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """0: the reference; finite results, the same bits twice, and the input as it was."""
    given, live = _rows(shape, device), shape.get("live_rows")
    x, before = given["x"], given["x"].clone()
    # Over finite memory: what is not written is another clause's.
    first, second = _call(kernel, given, 3.0), _call(kernel, given | {"x": before.clone()}, 3.0)
    if not first:
        return breaks("returns no tensor")
    if not shape.get("in_place") and not torch.equal(x, before):
        return breaks("writes to its input")
    shown = _live(first, live)
    if any(not bool(out.float().isfinite().all()) for out in shown if out.is_floating_point()):
        return breaks("not finite on clean input")
    if not scenes.same_results(shown, _live(second, live)):
        return breaks("other bits the second time")

    def off(known: Known, after: Known, results: Sequence[torch.Tensor]) -> str:
        x = known["x"]
        reason = _against([*results], shape, x, live or len(x))
        return reason + ", which is zeros" * (f"row {ZERO_ROW} " in reason and not x[ZERO_ROW].any())

    wrong = off(given | {"x": before}, {}, first)
    if wrong.startswith(NO_REFERENCE):
        return not_run(wrong)
    if wrong:
        return breaks(f"not the reference: {wrong}")
    many = _rows(shape, device, MORE, 3)
    # Not zeros for quantisers: they often compute 0 / 0 there, which affects that row only.
    many["x"][ZERO_ROW] *= first[0].dtype in _QUANTISED
    calls = [given | {"x": before.clone()}, _rows(shape, device, ROWS, 1), many]
    if live is None:
        calls.insert(2, _rows(shape, device, 1, 2))
    broken = _in_turn(kernel, calls, off, ["x"] * shape.get("in_place", False))
    return broken or holds(f"not asked with one row: live_rows={live}" if live else "")


def row_alone(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """R: with other content in every other row, a live row and its scale keep their bits.

    Where the reference makes NaN of a NaN, so must the kernel.
    """
    # Of rows past the live ones a kernel need make nothing.
    x, compares = _rows(shape, device)["x"], bool(shape.get("reference")) and "live_rows" not in shape
    base, clean = _call(kernel, {"x": x.clone()}), last()
    # What changes -> the fills that change it.
    found: dict[str, dict[str, None]] = {}
    shown = None
    lives = [[*range(shape["live_rows"])]] if "live_rows" in shape else [[0, 1, 2, 3], [1], [4]]
    for fill in FILLS:
        for live in lives:
            others = x.clone()
            mask = torch.ones(ROWS, dtype=torch.bool, device=device)
            mask[live] = False
            noise = others[mask]
            fill(noise)
            others[mask] = noise
            now = _call(kernel, {"x": others.clone()})
            if fill is FILLS[0] and compares and now[0].dtype not in _QUANTISED:
                right = _tensors(shape, "reference", others.cpu().double())[0]
                hidden = right.isnan() & ~now[0].cpu()[: len(right)].isnan()
                if hidden.any() and hidden.equal(right.isnan()):
                    return breaks("the NaN of a row is hidden: its own result holds numbers")
            if changed := _changed(base, now, live):
                shown = shown if found else _kept_rows(clean, base, now, live)
                found.setdefault(changed, {})[fill.name] = None
    notes = (f"{', '.join(fills)} in other rows: changes {what}" for what, fills in found.items())
    return breaks("; ".join(notes), shown) if found else holds()


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


def _kept_rows(
    clean: Example | None, base: Sequence[torch.Tensor], now: Sequence[torch.Tensor], live: Sequence[int]
) -> Example | None:
    """An example of live rows that should have kept their bits: of the first result that differs."""
    for number, (a, b) in enumerate(zip(base, now, strict=True)):
        if a.shape != b.shape:
            continue
        if not a.ndim or a.shape[0] != ROWS:
            if not torch.equal(bits(a), bits(b)):
                return reproducer.same(clean, a, result=number)
        elif not bool(same_bits(a, b)[[*live]].all()):
            return reproducer.same(clean, a, result=number, rows=_mask(live, a.device))
    return None


def _mask(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    mask = torch.zeros(ROWS, dtype=torch.bool, device=device)
    mask[[*rows]] = True
    return mask


def all_written(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """W: no byte of the result depends on what the memory held, at a number of rows that is no tile."""
    # Of rows past the live ones there is at least one.
    rows = max(5, shape.get("live_rows", 0) + 1)
    first, *others = (_call(kernel, _rows(shape, device, rows), fill) for fill in scenes.HELD)
    for number, (a, *over) in enumerate(zip(first, *others, strict=True)):
        differ = [bits(a.contiguous()) != bits(b.contiguous()) for b in over]
        stale = torch.stack(differ).any(0)
        if not stale.any():
            continue
        again = _call(kernel, _rows(shape, device, rows))[number]
        if not scenes.same_results([a], [again]):
            return not_run(f"result {number} has other bits the second time, over the same memory")
        note = f"{int(stale.sum())} of {a.numel()} elements of result {number} depend on what the memory held"
        if a.is_floating_point() and (shown := a.float().isnan() & stale).any():
            return breaks(note, reproducer.written(shown, result=number))
        fill = next(fill for fill, off in zip(scenes.HELD[1:], differ, strict=True) if off.any())
        return breaks(note, reproducer.held(a, fill, NAN, result=number))
    return holds()


def right_operands(kernel: Kernel, shape: Shape, device: str) -> Answer:
    """0: the reference, over operands with zeros behind them, and the same bits twice."""
    known = _made(kernel, shape, device)
    placed = scenes.zeros_behind(known)
    first, second = _call(kernel, placed, 3.0), _call(kernel, scenes.zeros_behind(known), 3.0)
    for name, x in known.items():
        if isinstance(x, torch.Tensor) and not scenes.same_results([x], [placed[name]]):
            return breaks(f"writes to {name}")
    if not scenes.same_results(first, second):
        return breaks("other bits the second time")
    if stale := _held(kernel, scenes.zeros_behind(known), first):
        return stale
    if not shape.get("reference"):
        return not_run(NO_REFERENCE)
    wanted = _tensors(shape, "reference", **known)
    wrong = _other_than(first, wanted)
    if wrong and not wrong.startswith(NO_REFERENCE):
        return breaks(f"not the reference: {wrong}")
    if not wrong and (odd := _no_numbers(wanted)):
        # What make gives may be NaN on purpose.
        wrong = f"{NO_REFERENCE} where it has none: {odd}"
    return not_run(wrong) if wrong else holds()


def _operands(kind: str, kernel: Kernel, shape: Shape, device: str) -> Known:
    if kind == "routing":
        logits = _logits(shape, device)
        return {"bias": torch.zeros_like(logits[0])} | _router_input(kernel, shape, logits)
    return _rows(shape, device) if kind == "rows" else _made(kernel, shape, device)


def behind(kind: str) -> Probe:
    """O of a kind of kernel: with each operand at the end of its memory, and other bytes behind it."""

    def probe(kernel: Kernel, shape: Shape, device: str) -> Answer:
        known = bound(kernel, _operands(kind, kernel, shape, device))
        live = shape.get("live_rows")
        return scenes.behind_operands(lambda placed: _live(_call(kernel, placed), live), known)

    return probe


PROBES: dict[str, dict[str, Probe]] = {
    "routing": {
        "0": right_experts, "I": ids_under_nan, "Ib": ids_under_nan_bias, "P": padding_mask,
        "R": routes_alone,
    },
    "rows": {"0": same_twice, "R": row_alone, "W": all_written},
    "operands": {"0": right_operands},
}  # fmt: skip
for _kind, _probes in PROBES.items():
    _probes["O"] = behind(_kind)
