"""Small kernels in PyTorch, each right but for one fault that a probe could overlook.

Registered as a user registers theirs: ``staleproof audit tests/contract/faulty_kernels.py``. Beside each
stands what it breaks (:data:`EXPECTED`), for some also how the note begins (:data:`NOTES`);
:data:`NOT_CHECKED` are those whose clause 0 has no reference.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from staleproof import audit, device

device.select("cpu" if not torch.cuda.is_available() else None)

import triton
import triton.language as tl

from staleproof.contract.row_probes import expert_sum

# Subject -> the clauses it breaks. Every other clause that is put to it must hold.
EXPECTED: dict[str, set[str]] = {}
NOTES: dict[str, str] = {}
NOT_CHECKED = {
    "ragged, zeros, no reference",
    "rows, no reference",
    "rows, a reference for one of two results",
    # Of broken_variants.py.
    "quantize_blocks_only",
}


def _expect(kind, name: str, *clauses: str, note: str = "", **sizes):
    EXPECTED[name], NOTES[name] = set(clauses), note
    return kind(name=name, **sizes)


# --- Attention. Each calls a right decode, and does something to what it gives.


def decode(q, k_cache, v_cache, block_table, seq_lens, softmax_scale):
    """(batch, heads, dim) and (batch, heads); follows no entry past the need, and writes empty rows."""
    tokens = torch.arange(block_table.shape[1] * k_cache.shape[1], device=q.device)
    past = tokens >= seq_lens[:, None]
    table = torch.where(past[:, :: k_cache.shape[1]], 0, block_table).long()
    k, v = (
        cache[table].flatten(1, 2).transpose(1, 2).repeat_interleave(q.shape[1], 1)
        .masked_fill(past[:, None, :, None], 0.0).float()
        for cache in (k_cache, v_cache)
    )  # fmt: skip
    scores = (q.float().unsqueeze(2) @ k.transpose(2, 3)).squeeze(2) * softmax_scale
    scores = scores.masked_fill(past[:, None], float("-inf"))
    out = (scores.softmax(-1).unsqueeze(2) @ v).squeeze(2)
    return out.masked_fill((seq_lens == 0)[:, None, None], 0.0).to(q.dtype), scores.logsumexp(-1)


def _attention(name: str, *clauses: str):
    """Registers a function of the call's arguments and of what the right decode gives."""

    def register(change):
        def kernel(q, k_cache, v_cache, block_table, seq_lens, softmax_scale):
            out, lse = decode(q, k_cache, v_cache, block_table, seq_lens, softmax_scale)
            return change(out, lse, q, k_cache, block_table, seq_lens)

        return _expect(audit.attention, name, *clauses)(kernel)

    return register


right = _attention("right")(lambda out, lse, *_: (out, lse))
empty_lse = _attention("lse of an empty row is 0", "E")(
    lambda out, lse, q, k, table, lens: (out, lse.masked_fill((lens == 0)[:, None], 0.0))
)
lse_rows = _attention("lse mixes rows", "R")(lambda out, lse, q, *_: (out, lse + 0 * q.float().mean()))
lse_tail = _attention("lse reads whole pages", "T")(
    lambda out, lse, q, k, table, lens: (out, lse + 0 * _last_page(k, table, lens))
)
# Two pages before the first belong to the probe.
lse_table = _attention("lse follows the table", "B")(
    lambda out, lse, q, k, table, lens: (out, lse + 0 * _past_the_need(k, table, lens))
)
thrice = _attention("lse three times too large", "0")(lambda out, lse, *_: (out, 3 * lse))


def _last_page(k, table, lens):
    page = table.gather(1, ((lens - 1).clamp(min=0) // k.shape[1])[:, None].long())[:, 0]
    tail = torch.where((lens == 0)[:, None, None, None], torch.zeros_like(k[:1]), k[page.long()])
    return tail.float().sum((1, 2, 3))[:, None]


def _past_the_need(k, table, lens):
    past = torch.arange(table.shape[1], device=k.device) * k.shape[1] >= lens[:, None]
    ids = torch.where(past & (table != 0), table, 0) + 2
    return (
        k._base[ids.long()]
        .masked_fill(~(past & (table != 0))[..., None, None, None], 0)
        .float()
        .sum((1, 2, 3, 4))[:, None]
    )


_masks: dict[int, list[torch.Tensor]] = {}


@_attention("mask of empty rows kept for a tensor of lengths", "N")
def kept_mask(out, lse, q, k, table, lens):
    """Incident 1 again: computed at the first launch. The tensor is kept, so that its id stays its own."""
    _, mask = _masks.setdefault(id(lens), [lens, lens == 0])
    garbage = torch.full_like(out, 7.0)
    return torch.where((lens == 0)[:, None, None] & ~mask[:, None, None], garbage, out), lse


@_attention("a row that was empty once stays zero", "N")
def empty_for_good(out, lse, q, k, table, lens):
    kept = _masks.setdefault(-id(lens), [lens, lens == 0])
    kept[1] = kept[1] | (lens == 0)
    return out.masked_fill(kept[1][:, None, None], 0.0), lse


# Where a launch is recorded in earnest, what they leave behind may reach its replay.
MAY_BREAK = {"a row that was empty once stays zero": {"A"}, "a trace in lse": {"A"}}
_before: dict[tuple[int, ...], torch.Tensor] = {}


def _trace(name: str, place: int):
    @_attention(name, "L", "N", "R")
    def trace(out, lse, q, k, table, lens):
        """A workspace that is found again by the shape of the call, and holds what the last call left."""
        key = (place, *table.shape)
        left = _before.get(key, torch.zeros((), device=q.device))
        _before[key] = q.float().mean()
        return (out + (0 * left).to(out.dtype), lse) if place == 0 else (out, lse + 0 * left)

    return trace


trace_out, trace_lse = _trace("a trace in out", 0), _trace("a trace in lse", 1)


@_expect(audit.attention, "a scale for each page, which drops NaN", "T")
def page_scale(q, k_cache, v_cache, block_table, seq_lens, softmax_scale):
    """Stale NaN does not reach it; other stale numbers set the scale that values are rounded to."""
    size = v_cache.float().nan_to_num(0.0, 0.0, 0.0).abs().amax((1, 2, 3), keepdim=True) + 1e-6
    rounded = ((v_cache.float() / size * 2**12).round() * size / 2**12).to(v_cache.dtype)
    return decode(q, k_cache, rounded, block_table, seq_lens, softmax_scale)[0]


def _varlen(name: str, *clauses: str, spare: float | None):
    @_expect(audit.attention, name, *clauses, q_len=0)
    def kernel(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, softmax_scale, out):
        """One query token after another, each with the keys up to its own."""
        for request, (start, end) in enumerate(pairwise(query_start_loc)):
            for row in range(int(start), int(end)):
                length = (seq_lens[request] - (int(end) - row) + 1).clamp(min=0)[None]
                one = q[row : row + 1], k_cache, v_cache, block_table[request : request + 1]
                out[row] = decode(*one, length * (seq_lens[request] > 0), softmax_scale)[0][0]
        if spare is not None:
            out[int(query_start_loc[-1]) :] = spare
        return out

    return kernel


varlen = _varlen("varlen, right", spare=None)
varlen_zeros = _varlen("varlen, writes rows of out past the end", "U", spare=0.0)

# --- Routing


def _choose(router_logits, top_k):
    scores = router_logits.nan_to_num(-1e30, 1e30, -1e30)
    ids = scores.topk(top_k, -1).indices
    return scores.sigmoid().gather(1, ids), ids


@_expect(audit.routing, "weights of 0", "0")
def no_weights(router_logits, top_k):
    weights, ids = _choose(router_logits, top_k)
    return 0 * weights, ids


@_expect(audit.routing, "weights beside other ids", "0")
def other_weights(router_logits, top_k):
    weights, ids = _choose(router_logits, top_k)
    return weights.flip(1), ids


@_expect(audit.routing, "weights against a reference", "0", reference=_choose)
def wrong_sizes(router_logits, top_k):
    weights, ids = _choose(router_logits, top_k)
    return weights.square(), ids


@_expect(audit.routing, "weights of another function")
def other_function(router_logits, top_k):
    weights, ids = _choose(router_logits, top_k)
    return weights.square(), ids


@_expect(audit.routing, "groups, the first experts", "0", grouped=True)
def first_experts(router_logits, top_k):
    ids = torch.arange(top_k, device=router_logits.device).expand(len(router_logits), -1).contiguous()
    return router_logits.sigmoid().gather(1, ids), ids


# --- Rows and sequences


def _fp8(x):
    scale = x.float().abs().amax(1, keepdim=True) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


@_expect(audit.rows, "fp8, right")
def fp8(x):
    return _fp8(x)


@_expect(audit.rows, "fp8, zeros", "0")
def fp8_zeros(x):
    values, scale = _fp8(x)
    return torch.zeros_like(values), scale


@_expect(audit.rows, "fp8, a scale three times too large", "0")
def fp8_scale(x):
    values, scale = _fp8(x)
    return values, 3 * scale


@_expect(audit.rows, "fp8, a third of the range", "0")
def fp8_range(x):
    _, scale = _fp8(x)
    return (x.float() / (3 * scale)).to(torch.float8_e4m3fn), 3 * scale


def _twice(x):
    return 2 * x, x.sum(-1)


@_expect(audit.rows, "rows, the second result is wrong", "0", reference=_twice)
def second_result(x):
    return 2 * x, 3 * x.sum(-1)


@_expect(audit.rows, "rows, both results right", reference=_twice)
def both_results(x):
    return 2 * x, x.sum(-1)


@_expect(audit.rows, "rows, a reference for one of two results", reference=lambda x: 2 * x)
def one_of_two(x):
    return 2 * x, x.sum(-1)


@_expect(audit.rows, "rows, no reference")
def anything(x):
    return x * 0


def _running_sum(x, starts):
    out = torch.zeros_like(x)
    for start, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        out[start:end] = x[start:end].cumsum(0)
    return out


@_expect(audit.ragged, "ragged, right", reference=_running_sum)
def running_sum(x, starts):
    return _running_sum(x, starts)


@_expect(audit.ragged, "ragged, zeros", "0", reference=_running_sum)
def ragged_zeros(x, starts):
    return torch.zeros_like(x)


@_expect(audit.ragged, "ragged, zeros, no reference")
def ragged_zeros_alone(x, starts):
    return torch.zeros_like(x)


# --- Operands


@triton.jit
def _copy(x, out, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    # No mask: behind the last row it reads what is not its own, and bytes of 0xff count.
    number = tl.load(x + row * columns + column)
    odd = tl.max(tl.where((column >= columns) & (number == -1), 1, 0), axis=0)
    tl.store(out + row * columns + column, number + odd, mask=column < columns)


@_expect(
    audit.rows, "reads a whole tile", "O", hidden=24, dtype="float32", reference=lambda x: x,
    note="0xff behind x changes the result",
)  # fmt: skip
def whole_tile(x):
    """As the scale bytes behind the last expert decide the output of gpt-oss: 0xff, and no other byte."""
    out = torch.empty_like(x)
    _copy[(len(x),)](x.view(torch.int32), out.view(torch.int32), x.shape[1], BLOCK=32)
    return out


@triton.jit
def _scaled_sum(x, scale, out, groups, READ: tl.constexpr):
    row, group = tl.program_id(0), tl.arange(0, READ)
    factor = (tl.load(scale + row * groups + group).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    number = tl.load(x + row * groups + group, mask=group < groups, other=0.0)
    tl.store(out + row, tl.sum(number * factor, axis=0))


def _six_groups(device):
    """Rows of 6 groups, stored as they are: a multiple of 2, and not of 4."""
    x = torch.arange(24.0, device=device).view(4, 6)
    return {"x": x, "scale": torch.full((4, 6), 128, dtype=torch.uint8, device=device)}


@_expect(
    audit.operands, "scales aligned to 2 groups, read in fours", "O", make=_six_groups,
    reference=lambda x, scale: (2 * x.sum(1),), note="0xff behind scale changes the result",
)  # fmt: skip
def aligned_to_two(x, scale):
    """Incident 6 in small: behind the last row it reads two scales, and times 0 an infinite one is NaN."""
    out = torch.empty(len(x), device=x.device)
    _scaled_sum[(len(x),)](x, scale, out, x.shape[1], READ=8)
    return out


@_expect(audit.rows, "writes behind its operand", "O", reference=lambda x: 2 * x, note="writes behind x")
def writes_behind(x):
    """Where its operand is a part of a larger buffer, it writes the byte behind."""
    memory = x.new_empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    if len(memory) > x.nbytes:
        memory[x.nbytes] ^= 1
    return 2 * x


# --- A right kernel of each kind, and the same with one fault


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
    return expert_sum(known)


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


_seen: dict[int, list[torch.Tensor]] = {}


def ragged_remembers(x, starts):
    """Keeps the starts of a tensor by its identity, as a cache of chunk indices does."""
    # The tensor as well, so that its id stays its own.
    return ragged(x, _seen.setdefault(id(starts), [starts, starts.clone()])[1])


def ragged_mixes(x, starts):
    return ragged(x, starts) + 0 * x.mean()


def unwritten_tile(x):
    out = torch.empty(8, x.shape[1])
    out[: len(x)] = x
    return out


def double(x):
    return 2 * x


def scaled(x, scale):
    return scale * x


def _made(device):
    x = torch.arange(12.0, device=device).view(3, 4).T
    return {"x": x, "scale": torch.tensor([2.0], device=device)}


_ragged = {"reference": ragged}
_rows = {"reference": double}
_operands = {"make": _made, "reference": lambda x, scale: (2 * x,)}
for _kind, _kernel, _clauses, _note, _sizes in (
    (audit.routing, route, "", "", {}),
    (audit.routing, route_stuck, "I Ib", "all NaN: row 1 has [0, 0, 0, 0]", {}),
    (audit.routing, route_masks_ids_only, "P", "a padding row has a weight", {}),
    (audit.routing, route_over_all, "I R", "all -inf: a finite row changes", {}),
    (audit.kv_write, write, "", "", {}),
    (audit.kv_write, write_v_elsewhere, "0", "slot 0 of v_cache holds other values", {}),
    (audit.kv_write, write_minus_one, "S", "with padding at slot -1: slot 63 of k_cache holds NaN", {}),
    (audit.state, update, "", "", {}),
    (audit.state, update_pads_too, "S", "a row with the index of padding changes a state", {}),
    (audit.state, update_centred, "R S", "nan in one row changes another", {}),
    (audit.merge, merge, "", "", {}),
    (audit.merge, merge_multiplies, "E", "a part without keys, its output 0: row 3 is nan, expected 0", {}),
    (audit.merge, merge_mixes, "R", "nan in one row changes another", {}),
    (audit.experts, experts, "", "", {}),
    (audit.experts, experts_once, "D", "an id that comes twice: row 1 is wrong", {}),
    (audit.experts, experts_clamp, "X", "id -1: row 1 is wrong", {}),
    (audit.experts, experts_mix, "R", "nan in one token changes another", {}),
    (audit.ragged, ragged, "", "", _ragged),
    (audit.ragged, ragged_unwritten, "U", "rows past the last start hold what the memory held", _ragged),
    (
        audit.ragged,
        ragged_remembers,
        "N",
        "starts edited in place to [0, 1, 2, 6]: the result of other starts",
        _ragged,
    ),
    (audit.ragged, ragged_mixes, "R U", "nan in one sequence changes another", _ragged),
    (audit.rows, double, "", "", _rows),
    (
        audit.rows,
        unwritten_tile,
        "R W",
        "192 of 512 elements of result 0 are not written",
        {"reference": lambda x: x},
    ),
    (audit.operands, scaled, "", "", _operands),
):
    _expect(_kind, _kernel.__name__, *_clauses.split(), note=_note, **_sizes)(_kernel)
