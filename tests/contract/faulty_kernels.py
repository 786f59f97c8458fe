"""Small kernels in PyTorch, each right but for one fault that a probe could overlook.

Registered as a user registers theirs: ``staleproof audit tests/contract/faulty_kernels.py``. Beside each
stands what it breaks (:data:`EXPECTED`), for some also how the note begins (:data:`NOTES`);
:data:`NOT_CHECKED` are those whose clause 0 has no reference.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from staleproof import audit, device

device.select("cpu" if not torch.cuda.is_available() else None)

import triton
import triton.language as tl

# Subject -> the clauses it breaks. Every other clause that is put to it must hold.
EXPECTED: dict[str, set[str]] = {}
NOTES: dict[str, str] = {}
# Of broken_variants.py.
NOT_CHECKED = {"quantize_blocks_only"}


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


def _last_page(k, table, lens):
    page = table.gather(1, ((lens - 1).clamp(min=0) // k.shape[1])[:, None].long())[:, 0]
    tail = torch.where((lens == 0)[:, None, None, None], torch.zeros_like(k[:1]), k[page.long()])
    return tail.float().sum((1, 2, 3))[:, None]


def _past_the_need(k, table, lens):
    past = torch.arange(table.shape[1], device=k.device) * k.shape[1] >= lens[:, None]
    ids = torch.where(past & (table != 0), table, 0) + 2
    named = k._base[ids.long()].masked_fill(~(past & (table != 0))[..., None, None, None], 0)
    return named.float().sum((1, 2, 3, 4))[:, None]


# Where a launch is recorded in earnest, what they leave behind may reach its replay.
MAY_BREAK = {"a trace in out": {"A"}, "a trace in lse": {"A"}}
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
varlen_nan = _varlen("varlen, writes NaN past the end of out", "U", spare=float("nan"))

# --- Rows


def _twice(x):
    return 2 * x, x.sum(-1)


@_expect(audit.rows, "rows, both results right", reference=_twice)
def both_results(x):
    return 2 * x, x.sum(-1)


@_expect(audit.rows, "fp8, right")
def fp8(x):
    scale = x.float().abs().amax(1, keepdim=True) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


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


# --- A right kernel of each kind; test_probes.py has their faults


def route(router_logits, top_k, bias=None, is_padding=None):
    choice = router_logits + (0 if bias is None else bias)
    ids = choice.nan_to_num(-1e30, 1e30, -1e30).topk(top_k, -1).indices
    weights = router_logits.sigmoid().nan_to_num().gather(1, ids)
    if is_padding is not None:
        ids, weights = ids.masked_fill(is_padding[:, None], -1), weights.masked_fill(is_padding[:, None], 0.0)
    return weights, ids


def double(x):
    return 2 * x


def scaled(x, scale):
    return scale * x


def _made(device):
    x = torch.arange(12.0, device=device).view(3, 4).T
    return {"x": x, "scale": torch.tensor([2.0], device=device)}


for _kind, _kernel, _sizes in (
    (audit.routing, route, {}),
    (audit.rows, double, {"reference": double}),
    (audit.operands, scaled, {"make": _made, "reference": lambda x, scale: (2 * x,)}),
):
    _expect(_kind, _kernel.__name__, **_sizes)(_kernel)
