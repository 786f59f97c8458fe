"""The probes of kernels that write a cache or a state, merge partial results, or run experts.

As in :mod:`staleproof.contract.row_probes`, each is ``(kernel, shape, device) -> Outcome``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from staleproof.contract.contract import Outcome, breaks, holds
from staleproof.contract.row_probes import INF, NAN, NAN_AND_NOISE, Kernel, Shape, _call, _random
from staleproof.contract.scenes import GUARD
from staleproof.evidence.rows import FILLS, same_bits

PAGE, PAGES, TOKENS = 16, 4, 5


# KV writes: (key, value, k_cache, v_cache, slot_mapping), or (key, kv_cache, slot_mapping) for a latent


def _cache_scene(shape: Shape, device: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
    heads, dim = shape.get("kv_heads", 2), shape.get("head_dim", 32)
    buffers = [torch.zeros(PAGES + 2 * GUARD, PAGE, heads, dim, device=device) for _ in range(2)]
    key, value = (_random(TOKENS, heads, dim, seed=seed, device=device) for seed in (0, 1))
    buffers = [buffer.to(key.dtype) for buffer in buffers]
    caches = [buffer[GUARD:-GUARD] for buffer in buffers]
    pad = shape.get("pad_slot", -1)
    slots = torch.tensor([17, 35, pad, 20, pad], device=device)
    known = {"key": key, "value": value, "k_cache": caches[0], "v_cache": caches[1], "slot_mapping": slots}
    return known, buffers


def _written(known: dict[str, Any], buffers: list[torch.Tensor], pad: int) -> str:
    """What differs from the cache that the slots ask for."""
    for name, source, buffer in zip(("k_cache", "v_cache"), ("key", "value"), buffers, strict=True):
        expected = torch.zeros_like(buffer)
        flat = expected[GUARD:-GUARD].flatten(0, 1)
        for token, slot in enumerate(known["slot_mapping"].tolist()):
            if slot != pad:
                flat[slot] = known[source][token]
        off = ~same_bits(expected.flatten(0, 1), buffer.flatten(0, 1))
        if off.any():
            slot = int(off.nonzero()[0])
            held = "NaN" if bool(buffer.flatten(0, 1)[slot].isnan().any()) else "other values"
            return f"slot {slot - GUARD * PAGE} of {name} holds {held}"
    return ""


def writes_its_slots(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """0: with slots for all tokens, those slots and no other."""
    known, buffers = _cache_scene(shape, device)
    known["slot_mapping"].copy_(torch.tensor([17, 35, 40, 20, 63]))
    _call(kernel, known)
    wrong = _written(known, buffers, -1)
    return breaks(wrong, "clean") if wrong else holds()


def slot_minus_one(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """S: tokens of padding, with NaN in them, have slot -1, or the slot that is reserved for them."""
    known, buffers = _cache_scene(shape, device)
    for name in ("key", "value"):
        known[name][[2, 4]] = NAN
    _call(kernel, known)
    pad = shape.get("pad_slot", -1)
    wrong = _written(known, buffers, pad)
    return breaks(f"with padding at slot {pad}: {wrong}", "slot") if wrong else holds()


# State: (x, state, weight, state_indices) -> out; a convolution's last inputs, or a recurrence's memory


def _state_scene(shape: Shape, device: str) -> dict[str, Any]:
    dim, width = shape.get("dim", 32), shape.get("width", 4)
    return {
        "x": _random(TOKENS, dim, device=device),
        "pad_index": shape.get("pad_index", -1),
        "state": _random(6, dim, width - 1, seed=1, device=device),
        "weight": _random(dim, width, seed=2, device=device),
        "state_indices": torch.tensor([2, 4, 1, 5, 3], dtype=torch.int32, device=device),
    }


def _expected_state(known: dict[str, Any], pad: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    state, out = known["state"].clone(), torch.zeros_like(known["x"])
    for row, index in enumerate(known["state_indices"].tolist()):
        if index != pad:
            window = torch.cat([state[index], known["x"][row, :, None]], -1)
            out[row] = (window.float() * known["weight"].float()).sum(-1).to(out.dtype)
            state[index] = window[:, 1:]
    return out, state


def updates_its_state(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """0: the convolution, and the states moved on by one input."""
    known = _state_scene(shape, device)
    expected, state = _expected_state(known)
    (out, *_) = _call(kernel, {**known, "x": known["x"].clone()})
    tolerance = 1e-3 if device == "cpu" else 3e-2
    if not torch.allclose(out.float(), expected.float(), rtol=tolerance, atol=tolerance):
        return breaks(f"off by {(out - expected).abs().max():.3g}", "clean")
    same = torch.equal(known["state"], state)
    return holds() if same else breaks("the state is not as expected", "clean")


def padding_state(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """S: rows with the index of padding and NaN in them leave every state as it is."""
    known, pad = _state_scene(shape, device), shape.get("pad_index", -1)
    known["state_indices"][[1, 3]] = pad
    known["x"][[1, 3]] = NAN
    # The states lie in the middle of a buffer: index -1 would be the row before.
    around = torch.zeros(8, *known["state"].shape[1:], device=device, dtype=known["state"].dtype)
    around[1:-1] = known["state"]
    expected, state = _expected_state(known, pad)
    (out, *_) = _call(kernel, {**known, "x": known["x"].clone(), "state": around[1:-1]})
    if not (torch.equal(around[1:-1], state) and not around[[0, -1]].any()):
        return breaks("a row with the index of padding changes a state", "index")
    live = [0, 2, 4]
    tolerance = 1e-3 if device == "cpu" else 3e-2
    right = torch.allclose(out[live].float(), expected[live].float(), rtol=tolerance, atol=tolerance)
    return holds() if right else breaks("beside a row of padding a live row is wrong", "index")


def state_rows(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """R: content of one row and of its state changes no other."""
    base = _call(kernel, _state_scene(shape, device))[0]
    for fill in FILLS:
        known = _state_scene(shape, device)
        fill(known["x"][1])
        fill(known["state"][4])
        out = _call(kernel, known)[0]
        if not bool(same_bits(out, base)[[0, 2, 3, 4]].all()):
            return breaks(f"{fill.name} in one row changes another", "rows", fill.name)
    return holds()


# Merge: (out_a, lse_a, out_b, lse_b) -> out, lse; (tokens, heads, dim) and (tokens, heads)


def _parts(shape: Shape, device: str) -> dict[str, torch.Tensor]:
    size = shape.get("head_dim", 32)
    out = {f"out_{part}": _random(4, 2, size, seed=seed, device=device) for seed, part in enumerate("ab")}
    lse = {f"lse_{part}": _random(4, 2, seed=seed, device=device).float() for seed, part in enumerate("ab")}
    return out | lse


def _merged(known: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.stack([known["lse_a"], known["lse_b"]]).double()
    total = lse.logsumexp(0)
    weight = torch.where(lse == -INF, 0.0, (lse - total).exp())[..., None]
    outs = torch.stack([known["out_a"], known["out_b"]]).double()
    return torch.where(weight > 0, weight * outs, 0.0).sum(0), total


def _merge_is_off(kernel: Kernel, known: dict[str, torch.Tensor]) -> str:
    out, *more = _call(kernel, known)
    expected, total = _merged(known)
    for row in range(len(out)):
        if not torch.allclose(out[row].double(), expected[row], rtol=2e-2, atol=2e-2):
            return f"row {row} is {out[row].flatten()[0]:.4g}, expected {expected[row].flatten()[0]:.4g}"
        if more and more[0].numel() == total.numel():
            lse = more[0].double().reshape(total.shape)[row]
            if not torch.allclose(lse, total[row], rtol=1e-2, atol=1e-2):
                return f"lse of row {row} is {lse[0]:.4g}, expected {total[row, 0]:.4g}"
    return ""


def merges(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """0: two parts of finite weight."""
    wrong = _merge_is_off(kernel, _parts(shape, device))
    return breaks(wrong, "clean") if wrong else holds()


def merges_empty(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """E: one part, the other, and both without keys: lse -inf, and the output NaN or 0."""
    for left in (0.0, NAN):
        known = _parts(shape, device)
        known["lse_a"][1], known["lse_b"][2] = -INF, -INF
        known["lse_a"][3], known["lse_b"][3] = -INF, -INF
        known["out_a"][1], known["out_b"][2] = left, left
        known["out_a"][3], known["out_b"][3] = left, left
        if wrong := _merge_is_off(kernel, known):
            return breaks(f"a part without keys, its output {left:g}: {wrong}", "merge", f"{left:g}")
    return holds()


def merge_rows(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """R: content of one row changes no other."""
    base = _call(kernel, _parts(shape, device))
    for fill in FILLS:
        known = _parts(shape, device)
        for part in known.values():
            fill(part[1])
        if not all(
            bool(same_bits(a, b)[[0, 2, 3]].all()) for a, b in zip(base, _call(kernel, known), strict=True)
        ):
            return breaks(f"{fill.name} in one row changes another", "rows", fill.name)
    return holds()


# Experts: (x, w1, w2, topk_weights, topk_ids) -> out
# w1 (experts, 2 * inner, hidden): gate, then up; w2 (experts, hidden, inner)


def _experts(shape: Shape, device: str) -> dict[str, torch.Tensor]:
    experts, hidden, inner = shape.get("experts", 4), shape.get("hidden", 32), shape.get("inner", 16)
    top_k = shape.get("top_k", 2)
    ids = torch.tensor([[0, 1, 4], [2, 3, 5], [1, 2, 6], [3, 0, 7], [0, 2, 4]], device=device)[:, :top_k]
    return {
        "x": _random(5, hidden, device=device),
        "w1": _random(experts, 2 * inner, hidden, seed=1, device=device) / hidden**0.5,
        "w2": _random(experts, hidden, inner, seed=2, device=device) / inner**0.5,
        "topk_weights": torch.full((5, top_k), 1 / top_k, device=device),
        "topk_ids": ids.contiguous(),
    }


def _expert_sum(known: dict[str, torch.Tensor]) -> torch.Tensor:
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


def _experts_off(kernel: Kernel, known: dict[str, torch.Tensor]) -> str:
    out = _call(kernel, known)[0].double()
    expected = _expert_sum(known)
    off = ~torch.isclose(out, expected, rtol=3e-2, atol=3e-2).all(1)
    return f"row {int(off.nonzero()[0])} is wrong" if off.any() else ""


def runs_experts(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """0: distinct ids in range."""
    wrong = _experts_off(kernel, _experts(shape, device))
    return breaks(wrong, "clean") if wrong else holds()


def expert_rows(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """R: content of one token changes no other, also of one that shares its experts."""
    base = _call(kernel, _experts(shape, device))[0]
    for fill in NAN_AND_NOISE:
        known = _experts(shape, device)
        fill(known["x"][1])
        if not bool(same_bits(_call(kernel, known)[0], base)[[0, 2, 3, 4]].all()):
            return breaks(f"{fill.name} in one token changes another", "rows", fill.name)
    return holds()


def repeated_ids(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """D: one expert twice in a row."""
    known = _experts(shape, device)
    known["topk_ids"][1], known["topk_ids"][3] = 2, 0
    wrong = _experts_off(kernel, known)
    return breaks(f"an id that comes twice: {wrong}", "repeated") if wrong else holds()


def ids_out_of_range(kernel: Kernel, shape: Shape, device: str) -> Outcome:
    """X: -1, and the number of experts, with weight 0 as for padding."""
    notes = []
    for expert in (-1, len(_experts(shape, device)["w1"])):
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


PROBES: dict[str, dict[str, Callable[[Kernel, Shape, str], Outcome]]] = {
    "kv_write": {"0": writes_its_slots, "S": slot_minus_one},
    "state": {"0": updates_its_state, "R": state_rows, "S": padding_state},
    "merge": {"0": merges, "E": merges_empty, "R": merge_rows},
    "experts": {"0": runs_experts, "R": expert_rows, "D": repeated_ids, "X": ids_out_of_range},
}
