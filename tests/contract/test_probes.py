"""Each probe on a right kernel in PyTorch, and on the same kernel with one fault."""

from __future__ import annotations

import math

import pytest
import torch

from staleproof.contract import row_probes
from staleproof.contract.contract import KINDS, Verdict, breaks
from staleproof.contract.runner import _answer, _documented
from staleproof.kernels.subject import Subject

PROBES = row_probes.PROBES
NAN = math.nan


def route(
    router_logits, top_k, bias=None, is_padding=None, *, scores_of=lambda x: x.nan_to_num(-1e30, 1e30, -1e30)
):
    choice = scores_of(router_logits + (0 if bias is None else bias))
    ids = choice.topk(top_k, -1).indices
    weights = router_logits.sigmoid().nan_to_num().gather(1, ids)
    if is_padding is not None:
        ids, weights = ids.masked_fill(is_padding[:, None], -1), weights.masked_fill(is_padding[:, None], 0.0)
    return weights, ids


def route_stuck(router_logits, top_k, bias=None):
    weights, ids = route(router_logits, top_k, bias)
    bad = router_logits.isnan().any(1) | (False if bias is None else bias.isnan().any())
    return weights, ids.masked_fill(bad[:, None], 0)


def route_masks_ids_only(router_logits, top_k, is_padding=None):
    weights, ids = route(router_logits, top_k)
    if is_padding is not None:
        ids, weights = ids.masked_fill(is_padding[:, None], -1), weights.masked_fill(is_padding[:, None], 0.5)
    return weights, ids


def route_over_all(router_logits, top_k):
    weights, ids = route(router_logits, top_k)
    return weights / router_logits.nan_to_num().abs().max(), ids


def write(key, value, k_cache, v_cache, slot_mapping):
    live = slot_mapping >= 0
    for cache, part in ((k_cache, key), (v_cache, value)):
        cache.view(-1, *part.shape[1:])[slot_mapping[live]] = part[live]


def write_minus_one(key, value, k_cache, v_cache, slot_mapping):
    for cache, part in ((k_cache, key), (v_cache, value)):
        cache.view(-1, *part.shape[1:])[slot_mapping] = part


def write_v_elsewhere(key, value, k_cache, v_cache, slot_mapping):
    write(key, value, k_cache, v_cache, slot_mapping)
    v_cache[0, 0] = 1.0


def update(x, state, weight, state_indices, pad_index, *, skip=True):
    live = (state_indices != pad_index) if skip else torch.ones_like(state_indices, dtype=torch.bool)
    index = state_indices[live].long()
    window = torch.cat([state[index], x[live, :, None]], -1)
    state[index] = window[..., 1:]
    out = torch.zeros_like(x)
    out[live] = (window * weight).sum(-1)
    return out


def update_pads_too(x, state, weight, state_indices, pad_index):
    return update(x, state, weight, state_indices, pad_index, skip=False)


def update_centred(x, state, weight, state_indices, pad_index):
    return update(x, state, weight, state_indices, pad_index) + 0 * x.mean()


def merge(out_a, lse_a, out_b, lse_b):
    top = torch.maximum(lse_a, lse_b)
    shift = torch.where(top == -math.inf, 0.0, top)
    a, b = (lse_a - shift).exp(), (lse_b - shift).exp()
    total = torch.where(a + b == 0, 1.0, a + b)
    parts = [torch.where(w[..., None] > 0, w[..., None] * o, 0.0) for w, o in ((a, out_a), (b, out_b))]
    return (parts[0] + parts[1]) / total[..., None], (a + b).log() + shift


def merge_multiplies(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    return out_a * (lse_a - lse).exp()[..., None] + out_b * (lse_b - lse).exp()[..., None], lse


def merge_mixes(out_a, lse_a, out_b, lse_b):
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    return out + 0 * out.mean(), lse


def experts(x, w1, w2, topk_weights, topk_ids):
    known = {"x": x, "w1": w1, "w2": w2, "topk_weights": topk_weights, "topk_ids": topk_ids}
    return row_probes.expert_sum(known)


def experts_once(x, w1, w2, topk_weights, topk_ids):
    again = topk_ids[:, 1:] == topk_ids[:, :1]
    return experts(
        x,
        w1,
        w2,
        topk_weights.index_put((again.nonzero()[:, 0], torch.tensor(1)), torch.tensor(0.0)),
        topk_ids,
    )


def experts_clamp(x, w1, w2, topk_weights, topk_ids):
    lost = (topk_ids < 0) | (topk_ids >= len(w1))
    out = experts(x, w1, w2, topk_weights, topk_ids)
    return out + lost.any(1, keepdim=True)


def experts_mix(x, w1, w2, topk_weights, topk_ids):
    return experts(x, w1, w2, topk_weights, topk_ids) + 0 * x.mean()


def ragged(x, starts):
    out = torch.zeros_like(x)
    for start, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        out[start:end] = x[start:end].cumsum(0)
    return out


def ragged_unwritten(x, starts):
    out = torch.empty_like(x)
    out[: int(starts[-1])] = ragged(x, starts)[: int(starts[-1])]
    return out


_seen: dict[int, list[int]] = {}


def ragged_remembers(x, starts):
    """Keeps the starts of a tensor by its identity, as a cache of chunk indices does."""
    return ragged(x, torch.tensor(_seen.setdefault(id(starts), starts.tolist())))


def ragged_mixes(x, starts):
    return ragged(x, starts) + 0 * x.mean()


def unwritten_tile(x):
    out = torch.empty(8, x.shape[1])
    out[: len(x)] = x
    return out


RIGHT = {
    "routing": route, "kv_write": write, "state": update, "merge": merge, "experts": experts,
    "ragged": ragged, "rows": lambda x: 2 * x, "operands": lambda x, scale: scale * x,
}  # fmt: skip
OPERANDS = {
    "make": lambda device: {"x": torch.arange(12.0).view(3, 4).T, "scale": torch.tensor([2.0])},
    "reference": lambda x, scale: (2 * x,),
}
REFERENCES = {"operands": OPERANDS, "rows": {"reference": lambda x: 2 * x}, "ragged": {"reference": ragged}}
WRONG = [
    ("routing", "I", route_stuck, "all NaN: row 1 has [0, 0, 0, 0]"),
    ("routing", "Ib", route_stuck, "all of the bias NaN: row 0 has [0, 0, 0, 0]"),
    ("routing", "P", route_masks_ids_only, "a padding row has a weight"),
    ("routing", "R", route_over_all, "nan in other rows changes a live row"),
    ("kv_write", "0", write_v_elsewhere, "slot 0 of v_cache holds other values"),
    ("kv_write", "S", write_minus_one, "with padding at slot -1: slot 63 of k_cache holds NaN"),
    ("state", "S", update_pads_too, "a row with the index of padding changes a state"),
    ("state", "R", update_centred, "nan in one row changes another"),
    ("merge", "E", merge_multiplies, "a part without keys, its output 0: row 3 is nan, expected 0"),
    ("merge", "R", merge_mixes, "nan in one row changes another"),
    ("experts", "D", experts_once, "an id that comes twice: row 1 is wrong"),
    ("experts", "X", experts_clamp, "id -1: row 1 is wrong"),
    ("experts", "R", experts_mix, "nan in one token changes another"),
    ("ragged", "U", ragged_unwritten, "rows past the last start hold what the memory held"),
    # Which edit shows it depends on whether a new tensor lies where an earlier one was.
    ("ragged", "N", ragged_remembers, "starts edited in place to [0, "),
    ("ragged", "R", ragged_mixes, "nan in one sequence changes another"),
    ("rows", "W", unwritten_tile, "192 of 512 elements of result 0 are not written"),
]


@pytest.mark.parametrize(("kind", "clause"), [(k, c) for k in RIGHT for c in KINDS[k]])
def test_a_right_kernel_holds(kind, clause):
    outcome = PROBES[kind][clause](RIGHT[kind], REFERENCES.get(kind, {}), "cpu")
    assert outcome.verdict is Verdict.HOLDS, outcome.note


@pytest.mark.parametrize(
    ("kind", "clause", "kernel", "note"), WRONG, ids=[f"{kind}-{clause}" for kind, clause, *_ in WRONG]
)
def test_a_fault_breaks_its_clause(kind, clause, kernel, note):
    _seen.clear()
    outcome = PROBES[kind][clause](kernel, {}, "cpu")
    assert outcome.verdict is Verdict.BREAKS
    assert outcome.note.startswith(note)
    assert outcome.case


def test_what_a_documentation_leaves_to_the_caller_is_undefined():
    subject = Subject("x", "rows", print, documented={"R": "scales are of the whole tensor"})
    found = _documented(breaks("NaN", "rows", "nan"), subject, "R")
    assert found.verdict is Verdict.UNDEFINED
    assert found.note == "NaN; documented: scales are of the whole tensor"
    assert _documented(breaks("NaN"), subject, "W").verdict is Verdict.BREAKS


def test_what_the_interpreter_refuses_and_what_is_not_installed_did_not_run():
    class InterpreterError(Exception):
        pass

    def refuse(device):
        raise InterpreterError("no such operation")

    def lacks(device):
        raise ModuleNotFoundError("No module named 'orjson'")

    theirs, yours = Subject("x", "rows", print, package="fast"), Subject("x", "rows", print)
    assert _answer(refuse, theirs, "cpu")[0].verdict is Verdict.NOT_RUN
    assert _answer(lacks, theirs, "cpu")[0].verdict is Verdict.NOT_RUN
    assert _answer(lacks, yours, "cpu")[0].verdict is Verdict.BREAKS


def test_a_call_that_does_not_fit_a_release_did_not_run():
    def other_signature(device):
        return route(1, 2, seqused_k=3)

    def type_error_inside(device):
        return "a" + 1

    theirs, yours = Subject("x", "rows", print, package="fast"), Subject("x", "rows", print)
    assert _answer(other_signature, theirs, "cpu")[0].verdict is Verdict.NOT_RUN
    assert _answer(other_signature, yours, "cpu")[0].verdict is Verdict.BREAKS
    assert _answer(type_error_inside, theirs, "cpu")[0].verdict is Verdict.BREAKS


def test_an_error_of_the_device_ends_the_process():
    def fails(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    outcome, alive = _answer(fails, Subject("x", "rows", print), "cuda")
    assert outcome.verdict is Verdict.BREAKS
    assert not alive
