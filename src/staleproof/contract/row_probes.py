"""The probes of everything but attention: one function a clause, each ``(kernel, shape, device) -> Reading``.

``kernel`` is the function under audit, called with the arguments that it names; ``shape`` holds what its
decorator was given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any, NamedTuple

import torch

from staleproof.cases.case import Reading, absent
from staleproof.cases.compare import rounding
from staleproof.contract import scenes
from staleproof.contract.contract import NO_REFERENCE, SettingError, breaks, holds
from staleproof.evidence.canary import bits
from staleproof.evidence.rows import FILLS, Fill, same_bits
from staleproof.kernels.subject import bound

NAN, INF = float("nan"), float("inf")
Kernel = Callable[..., Any]
Shape = dict[str, Any]
Known = dict[str, Any]
Probe = Callable[[Kernel, Shape, str], Reading]
ROWS = 6
# Rows of more than a tile, and its row of zeros, as a cleared row of padding is.
MORE, ZERO_ROW = 37, 5
# For kernels that take seconds under Triton's interpreter.
NAN_AND_NOISE = (FILLS[0], FILLS[3])


def _random(*dims: int, seed: int = 0, device: str = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
    x = torch.randn(*dims, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype or scenes.usual_dtype(device))


def _several(returned: Any) -> Sequence[Any]:
    """What a function returned, whether that is one thing or several."""
    return returned if isinstance(returned, tuple | list) else (returned,)


def _results(kernel: Kernel, known: Known, fill: float = NAN) -> list[torch.Tensor]:
    """The tensors that a kernel returns; memory that it allocates holds ``fill`` before."""
    with scenes.dirty_memory(fill):
        returned = kernel(**bound(kernel, known))
    return [part for part in _several(returned) if isinstance(part, torch.Tensor)]


def _call(kernel: Kernel, known: Known, fill: float = NAN) -> list[torch.Tensor]:
    """Copies of :func:`_results`."""
    return [part.clone() for part in _results(kernel, known, fill)]


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
    kernel: Kernel,
    calls: Iterable[Known],
    wrong: Callable[..., str],
    edits: Sequence[str] = (),
    case: str = "clean",
) -> Reading | None:
    """A break, if one of several calls is wrong, one after the other, or leaves a trace.

    Args:
        kernel: asked over finite memory: what is not written is another clause's.
        calls: the arguments of each. Where they have the shapes of the call before, they are copied into its
            tensors.
        wrong: ``wrong(before, after, results)``, with the arguments before and after the call.
        edits: arguments that the kernel may write, beside those whose memory it returns.
        case: of the break, for a script.
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
        if said := wrong(before, known, results):
            return breaks(said, case)
        returned_in = {_memory(x) for x in results}
        for name in tensors:
            may = name in edits or _memory(known[name]) in returned_in
            if not may and not torch.equal(bits(before[name]), bits(known[name])):
                return breaks(f"writes to {name}", case)
        if not all(torch.equal(bits(x), bits(copy)) for x, copy in kept):
            return breaks("overwrites what an earlier call returned", case)
        mine = {_memory(known[name]) for name in tensors}
        kept += [(x, x.clone()) for x in results if _memory(x) not in mine]
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
    known: Known = {"router_logits": logits, "top_k": shape.get("top_k", 4)}
    nothing = {"bias": logits.new_zeros(logits.shape[1]), "is_padding": logits.new_zeros(len(logits)).bool()}
    return known | {name: x for name, x in nothing.items() if _needs(kernel, name)}


def _ids_last(results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    weights, ids = results[:2]
    return (weights, ids) if ids.dtype in (torch.int32, torch.int64, torch.uint32) else (ids, weights)


def _logits(shape: Shape, device: str, rows: int = ROWS, seed: int = 0) -> torch.Tensor:
    return _random(rows, shape.get("experts", 16), seed=seed, device=device, dtype=torch.float32)


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
    top_k = shape.get("top_k", 4)
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
        if not torch.equal(ids.long().sort(-1).values, right_ids.long().sort(-1).values):
            return "not the experts of the reference", ""
        order, theirs = ids.long().argsort(-1), right_ids.long().argsort(-1)
        wrong = _far(weights.gather(1, order), right.gather(1, theirs))
        return wrong and f"weights of {wrong}", ""
    chosen = ids.long().sort(-1).values
    if not any(torch.equal(chosen, right) for right in _choices(logits, top_k, shape.get("grouped", False))):
        of = "the best groups" if shape.get("grouped") else "the largest logits"
        return f"not the experts with {of}", ""
    return _weights_off(logits, weights, ids)


def right_experts(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """0: on numbers, the best experts of each row, with the weights of softmax or sigmoid, or a reference."""
    notes = set()

    def wrong(before: Known, after: Known, results: Sequence[torch.Tensor]) -> str:
        said, note = _routed_off(shape, before["router_logits"], *_ids_last(results))
        notes.add(note)
        return said

    sizes = ((ROWS, 0), (ROWS, 1), (1, 2), (MORE, 3))
    calls = (_router_input(kernel, shape, _logits(shape, device, *each)) for each in sizes)
    if said := _in_turn(kernel, calls, wrong):
        return said
    if _takes(kernel, "bias"):
        logits = _logits(shape, device)
        least = int(logits.sum(0).argmin())
        bias = torch.zeros_like(logits[0]).index_fill_(0, torch.tensor(least, device=device), 10.0)
        weights, ids = _route(kernel, shape, logits, bias=bias)
        if not bool((ids == least).any(1).all()):
            return breaks("an expert with a bias of 10 is not chosen", "clean")
        # Added to the scores that choose, or to the logits.
        with_bias = [_weights_off(each, weights, ids) for each in (logits, logits + bias)]
        if ("", "") not in with_bias:
            notes.add("with a bias they are of no known form")
    unknown = next(filter(None, sorted(notes)), "")
    return absent(f"{NO_REFERENCE} for weights: {unknown}") if unknown else holds()


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


def ids_under_nan(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """I: distinct ids in range in every row, and the finite rows as they were."""
    clean = _logits(shape, device)
    base = _route(kernel, shape, clean)
    finite = torch.tensor([True, False, True, True, False, True], device=device)
    found = []
    for name, columns, value in _ODD_ROWS:
        logits = clean.clone()
        logits[1, columns], logits[4, columns] = value, value
        weights, ids = _route(kernel, shape, logits)
        same = torch.equal(ids[finite], base[1][finite]) and same_bits(weights, base[0])[finite].all()
        if wrong := _bad_ids(ids, logits.shape[1]) or ("" if same else "a finite row changes"):
            found.append((f"{name}: {wrong}", name))
    return breaks("; ".join(note for note, _ in found[:3]), "logits", found[0][1]) if found else holds()


def ids_under_nan_bias(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """Ib: the same with a bias of NaN, whole and in one expert."""
    logits = _logits(shape, device)
    if not _takes(kernel, "bias"):
        return absent("takes no bias")
    for name, columns in (("all of the bias NaN", slice(None)), ("one NaN in the bias", slice(0, 1))):
        bias = torch.zeros(logits.shape[1], device=device)
        bias[columns] = NAN
        _, ids = _route(kernel, shape, logits, bias=bias)
        if wrong := _bad_ids(ids, logits.shape[1]):
            return breaks(f"{name}: {wrong}", "bias", name)
    return holds()


def padding_mask(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """P: padding rows choose no expert or the padding id, with weight 0; other rows stay as they are."""
    logits = _logits(shape, device)
    if not _takes(kernel, "is_padding"):
        return absent("takes no padding mask")
    weights, ids = _route(kernel, shape, logits)
    mask = torch.zeros(ROWS, dtype=torch.bool, device=device)
    for rows in ([1, 4], [0, 3]):
        mask.zero_()[rows] = True
        masked = logits.masked_fill(mask[:, None], NAN)
        masked_weights, masked_ids = _route(kernel, shape, masked, is_padding=mask)
        if not bool((masked_ids[mask] == shape.get("padding_id", -1)).all()):
            return breaks(f"a padding row has the ids {masked_ids[rows[0]].tolist()}", "mask")
        if not bool((masked_weights[mask] == 0).all()):
            return breaks("a padding row has a weight", "mask")
        if not (same_bits(masked_weights, weights)[~mask].all() and masked_ids[~mask].equal(ids[~mask])):
            return breaks("the mask changes another row", "mask")
    return holds()


def routes_alone(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """R: content of the last rows changes no other."""
    clean = _logits(shape, device)
    base = _route(kernel, shape, clean)
    for fill in FILLS:
        logits = clean.clone()
        fill(logits[3:])
        now = _route(kernel, shape, logits)
        if not all(bool(same_bits(a, b)[:3].all()) for a, b in zip(base, now, strict=True)):
            return breaks(f"{fill.name} in other rows changes a live row", "rows", fill.name)
    return holds()


# Rows: (x) -> tensors; ragged: (x, starts) -> tensors

# Values of a quantiser -> the largest, half a step relative to the number, and the smallest step.
_QUANTISED = {
    torch.float8_e4m3fn: (448.0, 2.0**-4, 2.0**-9),
    torch.float8_e5m2: (57344.0, 2.0**-3, 2.0**-16),
    torch.int8: (127.0, 0.0, 1.0),
}


def _rows(
    shape: Shape, device: str, rows: int = ROWS, seed: int = 0, starts: Sequence[int] = (0, 3, 4, ROWS)
) -> Known:
    dtype = scenes.usual_dtype(device, shape.get("dtype", ""))
    x = _random(rows, shape.get("hidden", 64), seed=seed, device=device, dtype=dtype)
    return {"x": x, "starts": torch.tensor(starts, dtype=torch.int32, device=device)}


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
        mine = scales == scale
        used, row = numbers[mine].abs().max(), int(mine.any(1).nonzero()[0])
        if used < largest / 2 and expected[mine].any():
            return f"of a range of {largest:.0f} row {row} uses {used:.3g}: its scale is too large"
    return ""


def _against(results: list[torch.Tensor], shape: Shape, x: torch.Tensor, live: int, *more: Any) -> str:
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
    wanted = _tensors(shape, "reference", x, *(part.cpu() for part in more)) if has_reference else [x]
    if quantised:
        right = wanted[0]
        if gave[0][:live].shape != right[:live].shape:
            return f"values have shape {tuple(gave[0].shape)}, the reference {tuple(right.shape)}"
        scales = _scales(gave[0], gave[1] if dynamic else torch.ones(1))
        if scales is None:
            return NO_REFERENCE
        return _quantised_off(gave[0][:live], scales[:live], right[:live], dynamic)
    return _other_than(gave, wanted, live)


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


def same_twice(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """0: the reference; finite results, the same bits twice, and the input as it was."""
    given = _rows(shape, device)
    x, before = given["x"], given["x"].clone()
    # Over finite memory: what is not written is another clause's.
    first, second = _call(kernel, given, 3.0), _call(kernel, given | {"x": before.clone()}, 3.0)
    if not first:
        return breaks("returns no tensor", "clean")
    if not shape.get("in_place") and not torch.equal(x, before):
        return breaks("writes to its input", "clean")
    if any(not bool(out.float().isfinite().all()) for out in first if out.is_floating_point()):
        return breaks("not finite on clean input", "clean")
    if not scenes.same_results(first, second):
        return breaks("other bits the second time", "clean")
    more = ["starts"] * _takes(kernel, "starts")

    def off(known: Known, after: Known, results: Sequence[torch.Tensor]) -> str:
        x = known["x"]
        said = _against([*results], shape, x, shape.get("live_rows", len(x)), *map(known.__getitem__, more))
        return said + ", which is zeros" * (f"row {ZERO_ROW} " in said and not x[ZERO_ROW].any())

    wrong = off(given | {"x": before}, {}, first)
    if wrong.startswith(NO_REFERENCE):
        return absent(wrong)
    if wrong:
        return breaks(f"not the reference: {wrong}", "clean")
    calls = [given | {"x": before.clone()}, _rows(shape, device, ROWS, 1, (0, 2, 2, ROWS))]
    if "live_rows" not in shape:
        many = _rows(shape, device, MORE, 3, (0, 20, 20, 21, 30, MORE))
        # Not zeros for quantisers: they often compute 0 / 0 there, which affects that row only.
        many["x"][ZERO_ROW] *= first[0].dtype in _QUANTISED
        calls += [_rows(shape, device, 1, 2, (0, 1)), many]
    return _in_turn(kernel, calls, off, ["x"] * shape.get("in_place", False)) or holds()


def row_alone(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """R: with other content in every other row, a live row and its scale keep their bits.

    Where the reference makes NaN of a NaN, so must the kernel.
    """
    # Of rows past the live ones a kernel need make nothing.
    x, compares = _rows(shape, device)["x"], bool(shape.get("reference")) and "live_rows" not in shape
    base = _call(kernel, {"x": x.clone()})
    found: dict[str, str] = {}
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
                found.setdefault(fill.name, f"{fill.name} in other rows changes {changed}")
    return breaks("; ".join(found.values()), "rows", next(iter(found))) if found else holds()


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


def all_written(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """W: no byte of the result depends on what the memory held, at a number of rows that is no tile."""
    first, second = (_call(kernel, _rows(shape, device, 5), fill) for fill in (NAN, 3.0))
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        if stale := int((bits(a.contiguous()) != bits(b.contiguous())).sum()):
            return breaks(f"{stale} of {a.numel()} elements of result {number} are not written", "written")
    return holds()


def ragged_replays(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """N: the same tensors, with other starts in them, against fresh tensors."""
    known = _rows(shape, device)
    for given in ((0, 3, 4, 6), (0, 1, 2, 6), (0, 2, 2, 6), (0, 3, 4, 6)):
        known["starts"].copy_(torch.tensor(given))
        if not scenes.same_results(_call(kernel, known), _call(kernel, _rows(shape, device, starts=given))):
            return breaks(f"starts edited in place to {list(given)}: the result of other starts", "starts")
    return holds()


def ragged_spare_rows(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """U: rows past the last start are zeros in memory that the kernel allocates, and change nothing."""
    known = _rows(shape, device, starts=(0, 2, 3, 4))
    base = _call(kernel, known)
    for fill in NAN_AND_NOISE:
        fill(known["x"][4:])
        first, second = (_call(kernel, known, memory) for memory in (NAN, 3.0))
        for before, a, b in zip(base, first, second, strict=True):
            if not bool(same_bits(before, a)[:4].all()):
                return breaks(f"{fill.name} past the last start changes a live row", "spare", fill.name)
            if not torch.equal(bits(a), bits(b)):
                return breaks("rows past the last start hold what the memory held", "spare", fill.name)
            if not bool((a[4:] == 0).all()):
                return breaks(f"rows past the last start hold {a[4].flatten()[0]:.4g}", "spare", fill.name)
    return holds()


# KV writes: (key, value, k_cache, v_cache, slot_mapping)

PAGE, PAGES, TOKENS = 16, 4, 5


_SLOTS = (17, 35, 40, 20, 63)
_CACHES = ("k_cache", "v_cache", "k_buffer", "v_buffer")


def _cache_scene(shape: Shape, device: str, slots: Sequence[int] = _SLOTS, seed: int = 0) -> Known:
    heads, dim = shape.get("kv_heads", 2), shape.get("head_dim", 32)
    key, value = (_random(len(slots), heads, dim, seed=seed + part, device=device) for part in (0, 1))
    pages, inside = PAGES + 2 * scenes.GUARD, slice(scenes.GUARD, -scenes.GUARD)
    k, v = (_random(pages, PAGE, heads, dim, seed=seed + part, device=device) for part in (2, 3))
    known = {"key": key, "value": value, "slot_mapping": torch.tensor(slots, device=device)}
    return known | {"k_cache": k[inside], "v_cache": v[inside], "k_buffer": k, "v_buffer": v}


def _written(pad: int, before: Known, after: Known, results: Sequence[torch.Tensor] = ()) -> str:
    """What differs from the cache that the slots ask for, pages before and behind it included."""
    for name, source in (("k", "key"), ("v", "value")):
        expected, buffer = (known[f"{name}_buffer"].flatten(0, 1) for known in (before, after))
        for token, slot in enumerate(before["slot_mapping"].tolist()):
            if slot != pad:
                expected[scenes.GUARD * PAGE + slot] = before[source][token]
        off = ~same_bits(expected, buffer)
        if off.any():
            slot = int(off.nonzero()[0])
            held = "NaN" if bool(buffer[slot].isnan().any()) else "other values"
            return f"slot {slot - scenes.GUARD * PAGE} of {name}_cache holds {held}"
    return ""


def writes_its_slots(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """0: with slots for all tokens, those slots and no other."""
    # The first slot unless it is reserved, and most slots of all pages.
    first = 1 if shape.get("pad_slot", -1) == 0 else 0
    many = 1 + torch.randperm(PAGES * PAGE - 1, generator=torch.Generator().manual_seed(0))[:MORE]
    slots = (_SLOTS, (18, first, 41, 62, 32), (33,), many.tolist())
    calls = (_cache_scene(shape, device, each, seed) for seed, each in enumerate(slots))
    return _in_turn(kernel, calls, partial(_written, -1), _CACHES) or holds()


def slot_minus_one(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """S: tokens of padding, with NaN in them, have slot -1, or the slot that is reserved for them."""
    pad = shape.get("pad_slot", -1)
    calls = [_cache_scene(shape, device, slots) for slots in ((17, 35, pad, 20, pad), (pad, 35, 17, pad, 20))]
    for known in calls:
        for name in ("key", "value"):
            known[name][known["slot_mapping"] == pad] = NAN

    def wrong(*call: Any) -> str:
        said = _written(pad, *call)
        return said and f"with padding at slot {pad}: {said}"

    return _in_turn(kernel, calls, wrong, _CACHES, case="slot") or holds()


# State: (x, state, weight, state_indices) -> out; a convolution's last inputs, or a recurrence's memory


def _state_scene(shape: Shape, device: str, slots: Sequence[int] = (2, 4, 1, 5, 3), seed: int = 0) -> Known:
    dim, width = shape.get("dim", 32), shape.get("width", 4)
    return {
        "x": _random(len(slots), dim, seed=seed, device=device),
        "pad_index": shape.get("pad_index", -1),
        "state": _random(max(6, len(slots) + 1), dim, width - 1, seed=seed + 1, device=device),
        "weight": _random(dim, width, seed=seed + 2, device=device),
        "state_indices": torch.tensor(slots, dtype=torch.int32, device=device),
    }


def _state_off(pad: int, before: Known, after: Known, results: Sequence[torch.Tensor]) -> tuple[str, bool]:
    """What is wrong with the live rows, and whether all states are as expected."""
    state, expected = before["state"].clone(), torch.zeros_like(before["x"])
    for row, index in enumerate(before["state_indices"].tolist()):
        if index != pad:
            window = torch.cat([state[index], before["x"][row, :, None]], -1)
            expected[row] = (window.float() * before["weight"].float()).sum(-1).to(expected.dtype)
            state[index] = window[:, 1:]
    live = before["state_indices"] != pad
    return _far(results[0][live], expected[live]), torch.equal(after["state"], state)


def updates_its_state(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """0: the convolution, and the states moved on by one input."""

    def wrong(*call: Any) -> str:
        off, same = _state_off(-1, *call)
        return off or ("" if same else "the state is not as expected")

    first = 1 if shape.get("pad_index", -1) == 0 else 0
    slots = ((2, 4, 1, 5, 3), (5, first, 4, 3, 2), (3,), range(MORE, 0, -1))
    calls = (_state_scene(shape, device, [*each], seed) for seed, each in enumerate(slots))
    # A kernel may leave its results in x.
    return _in_turn(kernel, calls, wrong, ("x", "state")) or holds()


def padding_state(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """S: rows with the index of padding and NaN in them leave every state as it is."""
    pad, calls = shape.get("pad_index", -1), []
    for slots in ((2, pad, 1, pad, 3), (pad, 4, 1, 5, pad)):
        known = _state_scene(shape, device, slots)
        known["x"][known["state_indices"] == pad] = NAN
        # The states lie in the middle of a buffer: index -1 would be the row before.
        known["around"] = known["state"].new_zeros(8, *known["state"].shape[1:])
        known["around"][1:-1] = known["state"]
        calls.append(known | {"state": known["around"][1:-1]})

    def wrong(before: Known, after: Known, results: Sequence[torch.Tensor]) -> str:
        off, same = _state_off(pad, before, after, results)
        if not same or after["around"][[0, -1]].any():
            return "a row with the index of padding changes a state"
        return off and f"beside a row of padding a live {off}"

    return _in_turn(kernel, calls, wrong, ("x", "state", "around"), case="index") or holds()


# Merge: (out_a, lse_a, out_b, lse_b) -> out, lse; (tokens, heads, dim) and (tokens, heads)


def _parts(shape: Shape, device: str, rows: int = 4, seed: int = 0, spread: float = 1.0) -> Known:
    size, parts = shape.get("head_dim", 32), [*enumerate("ab", seed)]
    out = {f"out_{part}": _random(rows, 2, size, seed=at, device=device) for at, part in parts}
    lse = {f"lse_{part}": spread * _random(rows, 2, seed=at, device=device).float() for at, part in parts}
    return out | lse


def _merge_is_off(before: Known, after: Known, results: Sequence[torch.Tensor]) -> str:
    lse = torch.stack([before["lse_a"], before["lse_b"]]).double()
    total = lse.logsumexp(0)
    weight = torch.where(lse == -INF, 0.0, (lse - total).exp())[..., None]
    outs = torch.stack([before["out_a"], before["out_b"]]).double()
    out, *more = results
    if more and more[0].numel() != total.numel():
        return f"its lse has shape {tuple(more[0].shape)}, expected {tuple(total.shape)}"
    wrong = _far(out, torch.where(weight > 0, weight * outs, 0.0).sum(0))
    return wrong or (scenes.far_lse(more[0].reshape(total.shape), total, 1e-3) if more else "")


def merges(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """0: two parts of finite weight, also where one weighs next to nothing."""
    sizes = ((4, 0), (4, 2, 100.0), (1, 4), (MORE, 6))
    if said := _in_turn(kernel, (_parts(shape, device, *each) for each in sizes), _merge_is_off):
        return said
    sick = _parts(shape, device)
    sick["out_a"][1] = NAN
    return holds() if bool(_call(kernel, sick)[0][1].isnan().any()) else breaks("the NaN of a part is hidden")


def merges_empty(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """E: one part, the other, and both without keys: lse -inf, and the output NaN or 0."""
    for left in (0.0, NAN):
        known = _parts(shape, device)
        for part, row in (("a", 1), ("b", 2), ("a", 3), ("b", 3)):
            known[f"lse_{part}"][row], known[f"out_{part}"][row] = -INF, left
        if wrong := _merge_is_off(known, known, _call(kernel, known)):
            return breaks(f"a part without keys, its output {left:g}: {wrong}", "merge", f"{left:g}")
    return holds()


# Experts: (x, w1, w2, topk_weights, topk_ids) -> out
# w1 (experts, 2 * inner, hidden): gate, then up; w2 (experts, hidden, inner)


def _experts(shape: Shape, device: str, rows: int = 5, seed: int = 0) -> Known:
    experts, hidden, inner = shape.get("experts", 4), shape.get("hidden", 32), shape.get("inner", 16)
    top_k = shape.get("top_k", 2)
    ids = torch.tensor([[0, 1, 4], [2, 3, 5], [1, 2, 6], [3, 0, 7], [0, 2, 4]], device=device)[:, :top_k]
    ids = ids.roll(seed, 0).repeat(-(-rows // 5), 1)[:rows]
    return {
        "x": _random(rows, hidden, seed=seed, device=device),
        "w1": _random(experts, 2 * inner, hidden, seed=seed + 1, device=device) / hidden**0.5,
        "w2": _random(experts, hidden, inner, seed=seed + 2, device=device) / inner**0.5,
        # The weights of a token differ, so that a weight used with the wrong id is noticed.
        "topk_weights": torch.linspace(0.8, 0.2, top_k, device=device).expand(rows, -1).contiguous(),
        "topk_ids": ids.contiguous(),
    }


def expert_sum(known: Known) -> torch.Tensor:
    """The reference in float64; ids out of range add nothing."""
    x, w1, w2 = (known[name].double() for name in ("x", "w1", "w2"))
    out = torch.zeros_like(x)
    for token, (ids, weights) in enumerate(
        zip(known["topk_ids"].tolist(), known["topk_weights"].tolist(), strict=True)
    ):
        for expert, weight in zip(ids, weights, strict=True):
            if 0 <= expert < len(w1):
                gate, up = (w1[expert] @ x[token]).chunk(2)
                out[token] += weight * (w2[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


def _sum_is_off(before: Known, after: Known, results: Sequence[torch.Tensor]) -> str:
    return _far(results[0], expert_sum(before))


def _experts_off(kernel: Kernel, known: Known) -> str:
    # Before the call, which may add up in place of x.
    expected = expert_sum(known)
    return _far(_call(kernel, known)[0], expected)


def runs_experts(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """0: distinct ids in range."""
    calls = (_experts(shape, device, *each) for each in ((5, 0), (5, 1), (1, 2), (MORE, 3)))
    return _in_turn(kernel, calls, _sum_is_off) or holds()


def repeated_ids(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """D: one expert twice in a row."""
    known = _experts(shape, device)
    known["topk_ids"][1], known["topk_ids"][3] = 2, 0
    wrong = _experts_off(kernel, known)
    return breaks(f"an id that comes twice: {wrong}", "repeated") if wrong else holds()


def ids_out_of_range(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """X: -1, and the number of experts, with weight 0 as for padding."""
    notes = []
    for expert in (-1, shape.get("experts", 4)):
        known = _experts(shape, device)
        known["topk_ids"][1], known["topk_weights"][1] = expert, 0.0
        try:
            wrong = _experts_off(kernel, known)
        except (ValueError, IndexError, AssertionError, RuntimeError) as error:
            if "CUDA" in str(error):
                raise
            notes.append(f"id {expert}: {type(error).__name__}")
            continue
        if wrong:
            return breaks(f"id {expert}: {wrong}", "range", str(expert))
    return holds("; ".join(notes))


def right_operands(kernel: Kernel, shape: Shape, device: str) -> Reading:
    """0: the reference, over operands with zeros behind them, and the same bits twice."""
    known = _made(kernel, shape, device)
    placed = scenes.zeros_behind(known)
    first, second = _call(kernel, placed, 3.0), _call(kernel, scenes.zeros_behind(known), 3.0)
    for name, x in known.items():
        if isinstance(x, torch.Tensor) and not scenes.same_results([x], [placed[name]]):
            return breaks(f"writes to {name}", "clean")
    if not scenes.same_results(first, second):
        return breaks("other bits the second time", "clean")
    if not shape.get("reference"):
        return absent(NO_REFERENCE)
    wrong = _other_than(first, _tensors(shape, "reference", **known))
    if wrong.startswith(NO_REFERENCE):
        return absent(wrong)
    return breaks(f"not the reference: {wrong}", "clean") if wrong else holds()


def _operands(kind: str, kernel: Kernel, shape: Shape, device: str) -> Known:
    if kind == "routing":
        logits = _logits(shape, device)
        return {"bias": torch.zeros_like(logits[0])} | _router_input(kernel, shape, logits)
    makers: dict[str, Callable[[Shape, str], Known]] = {
        "rows": _rows, "ragged": _rows, "kv_write": _cache_scene, "state": _state_scene, "merge": _parts,
        "experts": _experts, "operands": partial(_made, kernel),
    }  # fmt: skip
    return makers[kind](shape, device)


class _Edit(NamedTuple):
    """Which row of a kind is edited, what must keep its bits then, and which row must show a NaN."""

    tensors: Callable[[Known], Sequence[torch.Tensor]]
    kept: list[int]
    fills: Sequence[Fill] = FILLS
    what: str = "row"
    results: int | None = None
    own: int | None = None


_EDITS = {
    "ragged": _Edit(lambda known: [known["x"][3:4]], [0, 1, 2, 4, 5], NAN_AND_NOISE, "sequence"),
    "state": _Edit(lambda known: [known["x"][1], known["state"][4]], [0, 2, 3, 4], results=1, own=1),
    "merge": _Edit(lambda known: [part[1] for part in known.values()], [0, 2, 3]),
    # Other rows include a token that has the same experts.
    "experts": _Edit(lambda known: [known["x"][1]], [0, 2, 3, 4], NAN_AND_NOISE, "token", own=1),
}


def others_alone(kind: str) -> Probe:
    """R: an edit of one row, and of what belongs to it, changes no bit of others. Its own NaN stays one."""
    edit = _EDITS[kind]

    def probe(kernel: Kernel, shape: Shape, device: str) -> Reading:
        base = _call(kernel, _operands(kind, kernel, shape, device))[: edit.results]
        for fill in edit.fills:
            known = _operands(kind, kernel, shape, device)
            for part in edit.tensors(known):
                fill(part)
            now = _call(kernel, known)[: edit.results]
            if fill is FILLS[0] and edit.own is not None and not bool(now[0][edit.own].isnan().any()):
                return breaks(f"the NaN of a {edit.what} is hidden: its own result holds numbers")
            for a, b in zip(base, now, strict=True):
                # A result of another length, for example a state, has no such rows.
                if len(a) > max(edit.kept) and not bool(same_bits(a, b)[edit.kept].all()):
                    return breaks(f"{fill.name} in one {edit.what} changes another", "rows", fill.name)
        return holds()

    return probe


def behind(kind: str) -> Probe:
    """O of a kind of kernel: with each operand at the end of its memory, and other bytes behind it."""

    def probe(kernel: Kernel, shape: Shape, device: str) -> Reading:
        known = bound(kernel, _operands(kind, kernel, shape, device))
        return scenes.behind_operands(lambda placed: _call(kernel, placed), known)

    return probe


PROBES: dict[str, dict[str, Probe]] = {
    "routing": {
        "0": right_experts, "I": ids_under_nan, "Ib": ids_under_nan_bias, "P": padding_mask,
        "R": routes_alone,
    },
    "rows": {"0": same_twice, "R": row_alone, "W": all_written},
    "ragged": {"0": same_twice, "R": others_alone("ragged"), "N": ragged_replays, "U": ragged_spare_rows},
    "operands": {"0": right_operands},
    "kv_write": {"0": writes_its_slots, "S": slot_minus_one},
    "state": {"0": updates_its_state, "R": others_alone("state"), "S": padding_state},
    "merge": {"0": merges, "E": merges_empty, "R": others_alone("merge")},
    "experts": {"0": runs_experts, "R": others_alone("experts"), "D": repeated_ids, "X": ids_out_of_range},
}  # fmt: skip
for _kind, _probes in PROBES.items():
    _probes["O"] = behind(_kind)
