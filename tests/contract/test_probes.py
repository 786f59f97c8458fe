"""Each probe by itself: what it says of one fault, and what a kernel is called with.

The kernels are of PyTorch and run on the CPU. ``test_faulty_kernels.py`` puts all clauses to each kernel.
"""

from __future__ import annotations

import inspect
import math
import sys
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from staleproof.audit import ARGUMENTS
from staleproof.contract import attention_probes, row_probes, scenes
from staleproof.contract.contract import BREAKS, HOLDS, NOT_RUN

sys.path.insert(0, str(Path(__file__).parent))

import faulty_kernels as made

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    """A launch on the CPU is never captured, also beside a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def said(kind: str, clause: str, kernel, sizes=None):
    """Verdict and note."""
    if kind == "attention":
        own = {name: sizes[name] for name in scenes.LAUNCH if name in (sizes or {})}
        kernel = attention_probes.Kernel(kernel, **own)
        answer = attention_probes.PROBES[clause](kernel, scenes.attention_shape(sizes or {}), "cpu")
    else:
        answer = row_probes.PROBES[kind][clause](kernel, sizes or {}, "cpu")
    return answer.verdict, answer.note


def holding(note: str = ""):
    return HOLDS, note


def unasked(note: str):
    return NOT_RUN, note


def broken(note: str):
    return BREAKS, note


def agree(found, answer):
    """The verdict is the same, and the note says this."""
    return found[0] == answer[0] and answer[1] in found[1]


# --- What a kernel is called with

# Kind -> sizes of its decorator, and what it is called with then.
CALLED = {
    "attention": ({}, {
        "q": (3, 2, 32), "k_cache": (6, 16, 1, 32), "v_cache": (6, 16, 1, 32),
        "block_table": [[4, 3, 0], [2, 0, 0], [1, 0, 0]], "seq_lens": [19, 5, 16],
        "query_start_loc": [0, 1, 2, 3], "out": (3, 2, 32), "lse": (3, 2),
        "softmax_scale": 32**-0.5, "max_seq_len": 48, "max_q_len": 1, "page_size": 16,
    }),
    "attention, small pages": ({"page_size": 8}, {"seq_lens": [19, 5, 16], "max_seq_len": 32}),
    "attention, mla": (
        {"layout": "mla", "head_dim": 24, "value_dim": 16, "heads": 4, "page_size": 32}, {
            "q": (3, 4, 24), "kv_cache": (6, 32, 24), "kv_lora_rank": 16,
            "block_table": [[4, 3, 0], [2, 0, 0], [1, 0, 0]], "seq_lens": [35, 5, 32],
            "out": (3, 4, 16), "lse": (3, 4), "page_size": 32, "max_seq_len": 96, "softmax_scale": 24**-0.5,
        }),
    "routing": ({"experts": 8, "top_k": 2}, {"router_logits": (6, 8), "top_k": 2, "bias": (8,)}),
    "rows": ({"hidden": 24, "dtype": "float16"}, {"x": (6, 24)}),
    # The usual sizes.
    "routing, usual": ({}, {"router_logits": (6, 16), "top_k": 4}),
    "rows, usual": ({}, {"x": (6, 64)}),
}  # fmt: skip


def _shown(value):
    """Numbers as they are, the shape of a tensor of numbers, and the integers of another."""
    if not isinstance(value, torch.Tensor):
        return value
    return tuple(value.shape) if value.is_floating_point() else value.tolist()


@pytest.mark.parametrize("kind", CALLED)
def test_a_kernel_is_called_with_the_documented_arguments_of_the_given_sizes(kind):
    (sizes, wanted), kind = CALLED[kind], kind.partition(",")[0]
    asked = []

    def kernel(**known):
        asked.append(known)
        raise KeyError

    names = [name for name in ARGUMENTS[kind] if name in wanted]
    kernel.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    )
    clauses = attention_probes.PROBES if kind == "attention" else row_probes.PROBES[kind]
    for clause in ("O", "0"):
        if clause in clauses and not (clause == "0" and "bias" in names):
            with pytest.raises(KeyError):
                said(kind, clause, kernel, sizes)
    for known in asked:
        assert {name: _shown(value) for name, value in known.items()} == wanted
        tensors = [value for value in known.values() if isinstance(value, torch.Tensor)]
        dtype = getattr(torch, sizes.get("dtype", "float32"))
        for name, x in known.items():
            if isinstance(x, torch.Tensor):
                assert x.dtype == (dtype if x.is_floating_point() else torch.int32), name
        # Two operands with the same content would hide that a kernel takes one for the other.
        random = [x for x in tensors if x.is_floating_point() and x.any() and x.isfinite().all()]
        alike = [(a, b) for i, a in enumerate(random) for b in random[:i] if a.shape == b.shape]
        assert not any(torch.equal(a, b) for a, b in alike)


@pytest.mark.parametrize("kind", [kind for kind in ARGUMENTS if kind not in ("attention", "operands")])
def test_what_a_kernel_is_called_with_lies_on_the_device(kind):
    known = row_probes._operands(kind, print, {}, "meta")
    assert {x.device.type for x in known.values() if isinstance(x, torch.Tensor)} == {"meta"}


@pytest.mark.parametrize("layout", ["paged", "mla"])
def test_an_attention_call_lies_on_the_device(layout):
    call = scenes.make_call(scenes.attention_shape({"layout": layout}), [19, 0, 5], "meta", spare_rows=2)
    tensors = [*vars(call).values(), *call.guards]
    assert {x.device.type for x in tensors if isinstance(x, torch.Tensor)} == {"meta"}
    assert call.q.dtype == torch.bfloat16
    assert (call.lse.dtype, call.lse.shape) == (torch.float32, (5, 2))


def test_the_tensors_of_a_call_have_the_query_tokens_of_its_requests():
    given = scenes.make_call(scenes.Shape(q_len=2), [9, 8], "cpu", q_lens=[2, 2]).arguments()
    assert [given[name].shape[:2] for name in ("q", "out", "lse")] == [(2, 2)] * 3
    given = scenes.make_call(scenes.Shape(q_len=0), [9, 8], "cpu", q_lens=[1, 3]).arguments()
    assert (given["max_q_len"], given["q"].shape[0]) == (3, 4)
    with pytest.raises(ValueError, match="layout: expected paged or mla, got pages"):
        scenes.Shape("pages")


# Clause -> the lengths of its launches, each once in its order.
ASKED = {
    "0": [[19, 5, 16], [144], [*range(1, 34)]],
    "E": [[10, 18, 6, 7], [20, 0, 6, 0], [0, 0, 0, 0]],
    "T": [[19, 5, 16]],
    "B": [[19, 5, 16]],
    "R": [[19, 0, 5, 16]],
    "N": [[19, 5, 16, 9], [19, 0, 0, 0], [0, 5, 16, 0]],
    "L": [[19, 5, 16], [50, 40, 33, 20, 5]],
    "A": [[19, 5, 16], [50, 40, 33, 20, 5]],
    "O": [[19, 5, 16]],
}


@pytest.mark.parametrize("clause", ASKED)
def test_a_probe_asks_with_short_long_and_empty_requests(clause):
    asked = []

    def record(out, lse, call):
        asked.append(tuple(call.lens.tolist()))
        return out, lse

    said("attention", clause, attend(record))
    assert [[*lens] for lens in dict.fromkeys(asked)] == ASKED[clause]


# --- Faults that kernels of any kind may have


def instead(kernel, **changes):
    """The kernel with other arguments than it is given: each is made of the call."""

    @wraps(kernel)
    def other(**given):
        call = SimpleNamespace(**given)
        return kernel(**given | {name: change(call) for name, change in changes.items()})

    return other


def then(kernel, change):
    """The kernel, and what ``change`` makes of its result and of the call."""
    return wraps(kernel)(lambda **given: change(kernel(**given), SimpleNamespace(**given)))


def at_first(name, of=id):
    """An argument of :func:`instead`: the content that its tensor had first, or the first of its shape."""
    kept = {}

    def change(call):
        x = getattr(call, name)
        return kept.setdefault(of(x), (x, x.clone()))[1]

    return change


def shape_of(x):
    return tuple(x.shape)


def stale(make):
    """Goes on with what it made at the first call of a shape."""
    kept = {}
    return wraps(make)(lambda **given: kept.setdefault(shape_of(next(iter(given.values()))), make(**given)))


def one_memory(make):
    """Returns the same memory for each call of a shape."""
    kept = {}
    return then(make, lambda out, call: kept.setdefault(shape_of(out), torch.empty_like(out)).copy_(out))


def largest_of(written: int, all_of_them: int = 3):
    """The maximum of scratch, of which some is not written; NaN is dropped."""
    scratch = torch.empty(all_of_them)
    scratch[:written] = 1.0
    return scratch.nan_to_num(-INF).max()


def least_of_two():
    """1, and what nobody has written."""
    scratch = torch.empty(2)
    scratch[0] = 1.0
    return scratch[0].fmin(scratch[1])


def nothing(*_):
    pass


# --- Attention


def attend(change):
    """A right decode, and what ``change`` of its results and of the call makes of it."""

    def made_of(found, call):
        call.k, call.v, call.table, call.lens = call.k_cache, call.v_cache, call.block_table, call.seq_lens
        return change(*found, call)

    return then(made.decode, made_of)


def plus(of):
    """0 times what it may not read is added to ``out``."""
    return attend(lambda out, lse, call: (out + 0 * of(call).float().reshape(-1, 1, 1), lse))


def tail(cache, call):
    return made._last_page(cache, call.table, call.lens)[:, 0]


def next_token(cache, call):
    """What lies right behind a request's last token on its last page, one too far."""
    page, at = call.lens // cache.shape[1], call.lens % cache.shape[1]
    found = cache[call.table.gather(1, page[:, None].long())[:, 0].long(), at]
    return found.masked_fill((at == 0)[:, None, None], 0.0).sum((1, 2))


def latent(q, kv_cache, kv_lora_rank, block_table, seq_lens, softmax_scale, *, change=lambda call: 0.0):
    kv = kv_cache.unsqueeze(2)
    call = SimpleNamespace(k=kv, table=block_table, lens=seq_lens)
    out, lse = made.decode(q, kv, kv[..., :kv_lora_rank], block_table, seq_lens, softmax_scale)
    return out + change(call), lse


def several(of=lambda out, lens, call: out, alone=False):
    """A decode of one or several query tokens; ``of`` is put to the result of several, or of one too."""

    def kernel(q, k_cache, v_cache, block_table, seq_lens, softmax_scale):
        memory = k_cache, v_cache, block_table
        if q.ndim == 3 and alone:
            return kernel(q[:, None], *memory, seq_lens, softmax_scale)[0].squeeze(1)
        if q.ndim == 3:
            return made.decode(q, *memory, seq_lens, softmax_scale)
        tokens = q.shape[1]
        lens = [(seq_lens - tokens + 1 + t).clamp(min=0) * (seq_lens > 0) for t in range(tokens)]
        parts = [made.decode(q[:, t], *memory, lens[t], softmax_scale) for t in range(tokens)]
        out, lse = (torch.stack(each, 1) for each in zip(*parts, strict=True))
        call = SimpleNamespace(k=k_cache, v=v_cache, table=block_table, lens=seq_lens)
        return of(out, seq_lens, call), lse

    return kernel


def varlen(change):
    """One query token a request; ``change`` gets a fresh result, and the tokens of requests."""

    def kernel(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, softmax_scale):
        rows = q.new_empty(q.shape)
        made.varlen(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, softmax_scale, rows)
        return change(rows, int(query_start_loc[-1]), q)

    return kernel


def spare(value):
    def change(rows, live, q):
        rows[live:] = value
        return rows

    return change


def last_of_its_shape(name: str):
    """0 times an argument of the last call with as large a one."""
    kept = {}

    def of(call):
        x = getattr(call, name)
        last, kept[shape_of(x)] = kept.get(shape_of(x), x), x.clone()
        return 0 * last.sum()

    return of


def entry(page: int):
    """Gives NaN where an entry past the need is this one."""

    def of(call):
        past = torch.arange(call.table.shape[1]) * call.k.shape[1] >= call.lens[:, None]
        return torch.where((past & (call.table == page)).any(), NAN, 0.0)

    return plus(of)


def launch_with_lengths(q, k_cache, v_cache, block_table, seq_lens, softmax_scale):
    lens = seq_lens.clone()
    return lambda: made.decode(q, k_cache, v_cache, block_table, lens, softmax_scale)


def launch_with_its_table(q, k_cache, v_cache, block_table, seq_lens, softmax_scale):
    return partial(made.decode, q, k_cache, v_cache, block_table.clone(), seq_lens, softmax_scale)


_latest = {}


def launch_with_the_latest_lengths(q, k_cache, v_cache, block_table, seq_lens, softmax_scale):
    _latest["lens"] = seq_lens

    def launch():
        return made.decode(q, k_cache, v_cache, block_table, _latest["lens"][: len(q)], softmax_scale)

    return launch


def kept_mask(key: str):
    """Computes at the first launch which rows are empty, and finds that again by a tensor of the call."""
    kept = {}

    def kernel(q, k_cache, v_cache, block_table, seq_lens, softmax_scale, out, lse):
        tensor = {"seq_lens": seq_lens, "out": out, "lse": lse}[key]
        right = made.decode(q, k_cache, v_cache, block_table, seq_lens, softmax_scale)
        _, mask = kept.setdefault(id(tensor), (tensor, seq_lens == 0))
        return torch.where((seq_lens == 0)[:, None, None] & ~mask[:, None, None], 7.0, right[0]), right[1]

    return kernel


LAST = torch.tensor([False, True])
ONE_ROW = torch.tensor([[[1.0]], [[2.0]], [[2.0]]])


def kept_lse(out, lse, call):
    """The same of lse, of one head."""
    _, mask = _latest.setdefault(id(call.lens), (call.lens, call.lens == 0))
    return out, torch.where(LAST & (call.lens == 0)[:, None] & ~mask[:, None], 7.0, lse)


def reads_behind(name: str):
    def of(call):
        x = getattr(call, name)
        behind = len(x.untyped_storage()) // 4 - x.numel()
        return (
            x.as_strided((x.numel() + 1,), (1,))[-1] if behind == scenes.TAIL_BYTES // 4 else torch.zeros(1)
        )

    return plus(of)


def writes(name: str):
    """Changes the last number of an input, by less than the result shows or where nothing is read."""

    def change(out, lse, call):
        x = getattr(call, name).view(-1)
        x[-1].add_(1e-6 if x.is_floating_point() else 1)
        return out, lse

    return attend(change)


def one_off(x, *place, by=2.0):
    """One number is too large."""
    x = x.clone()
    x[place] += by
    return x


def outside(row: int):
    """Writes a row that is not its own: before ``out`` or behind it."""

    def kernel(q, k_cache, v_cache, block_table, seq_lens, softmax_scale, out):
        out.copy_(made.decode(q, k_cache, v_cache, block_table, seq_lens, softmax_scale)[0])
        out._base[row] = 7.0
        return out

    return kernel


def own_scale(call):
    return call.q.shape[-1] ** -0.5


def page_behind_page(call):
    following = call.block_table[:, :1] + torch.arange(call.block_table.shape[1])
    return following.clamp(max=len(call.k_cache) - 1)


def at_most(pages):
    return lambda call: call.seq_lens.clamp(max=pages * call.k_cache.shape[1])


def last_of_the_table(call):
    room = call.block_table.shape[1] * call.k_cache.shape[1]
    return torch.where(call.seq_lens == room, room - 1, call.seq_lens)


def results(*of):
    """Does this with results and with the arguments for them, and returns the first of these or nothing."""

    def kernel(q, k_cache, v_cache, block_table, seq_lens, softmax_scale, out, lse):
        right = made.decode(q, k_cache, v_cache, block_table, seq_lens, softmax_scale)
        return [change(right, (out, lse)) for change in of][-1]

    return kernel


def put(number, by=1.0):
    def change(right, memory):
        memory[number].copy_(by * right[number])

    return change


def several_of(q, k_cache, v_cache, block_table, seq_lens, query_start_loc, softmax_scale):
    """Any number of query tokens a request."""
    out, lse = q.new_zeros(q.shape), q.new_full(q.shape[:2], -INF)
    for request, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        for row in range(start, end):
            lens = seq_lens[request : request + 1]
            lens = (lens - (end - 1 - row)) * (lens > 0)
            table = block_table[request : request + 1]
            got = made.decode(q[row : row + 1], k_cache, v_cache, table, lens, softmax_scale)
            out[row], lse[row] = got[0][0], got[1][0]
    return out, lse


def evenly(call):
    starts = call.query_start_loc
    return torch.arange(len(starts)) * (int(starts[-1]) // (len(starts) - 1))


def other_rows_largest(call):
    """Infinite where a number of the batch is near the largest, and not for NaN."""
    return (call.q.nan_to_num(0.0, 0.0, 0.0) * 2).sum()


def loud(call):
    """NaN if the largest number of the batch is that of noise, and neither NaN nor much larger."""
    largest = call.q.nan_to_num(0.0, 0.0, 0.0).abs().amax()
    return torch.where((largest > 50) & (largest < 1e6), NAN, 0.0)


right = attend(lambda out, lse, call: (out, lse))
EMPTY = "of an empty request (seq_lens ["
AFTER = "replayed with seq_lens [19, 0, 0, 0]: "
NOT_ZERO = "the row of an empty request is not 0, as it is for a new tensor of lengths"
AGAIN = "launched again"
TAIL = "of the last page's tail"
ATTENTION = [
    ("0", lambda q: None, {}, broken("returns NoneType, expected a tensor or a pair of them")),
    ("0", lambda q: q[:, :1], {}, broken("returns shape (3, 1, 32), expected (3, 2, 32)")),
    ("0", attend(lambda out, lse, call: (out, lse[:, :1])), {},
     broken("returns lse of shape (3, 1), expected (3, 2)")),
    ("0", attend(lambda out, lse, call: [out, one_off(lse, 1, 1, by=0.003)]), {},
     broken("lse of row 1 is 2.48, expected 2.477")),
    ("0", attend(lambda out, lse, call: one_off(out, 1, 1, 5)), {}, broken("row 1 is off by 2")),
    # What shows in no small batch of few tokens, and what is written to the arguments for results.
    *(("0", instead(made.decode, **change), sizes, broken(f"row {said}"))
      for change, sizes, said, *case in (
          ({"softmax_scale": own_scale}, {}, "1 is off by 0.875; requests: 33, tokens: up to 33"),
          ({"block_table": page_behind_page}, {}, "0 is off by 0.228", "clean"),
          ({"seq_lens": at_most(1)}, {"page_size": 64}, "0 is off by 0.0954", "clean"),
          ({"seq_lens": at_most(8)}, {"page_size": 64}, "0 is off by 0.06; requests: 1, tokens: up to 576"),
          ({"seq_lens": last_of_the_table}, {}, "0 is off by 0.0118; requests: 1, tokens: up to 144"),
      )),
    *(("0", attend(change), {}, broken("not finite where q is 64 times as large")) for change in (
        lambda out, lse, call: (out / (lse < 80)[..., None], lse),
        lambda out, lse, call: (out, lse / (lse < 80)),
    )),
    *(("0", results(*more, lambda right, memory: right), {},
       broken(f"its argument {name} does not hold what it returns"))
      for name, more in (("out", [put(0, ONE_ROW), put(1)]), ("lse", [put(0)]))),
    *(("0", writes(name), {}, broken("writes to its inputs")) for name in ("q", "k", "v", "table")),
    # The reference would be that of other lengths.
    ("0", instead(made.decode, seq_lens=lambda call: call.seq_lens.clamp_(max=16)), {},
     broken("writes to its inputs")),
    *(("0", outside(row), {}, broken("writes outside out")) for row in (0, -1)),
    ("0", made.right, {"heads": 4, "head_dim": 8, "page_size": 8}, holding()),
    ("0", latent, {"layout": "mla", "head_dim": 24, "value_dim": 16}, holding()),
    ("E", attend(lambda out, lse, call: out), {}, holding("no lse asked for")),
    ("E", right, {"empty_lse": 0.0}, broken("lse is -inf, expected 0")),
    ("E", attend(lambda out, lse, call: (out, torch.where(LAST & (call.lens == 0)[:, None], 7.0, lse))), {},
     broken("lse is 7, expected -inf")),
    ("E", attend(lambda out, lse, call: out.index_put(
        (torch.tensor(1), torch.tensor(0), torch.tensor(3)), (call.lens[1] == 0) * 5.0, accumulate=True)), {},
     broken("): 5, expected 0")),
    ("E", attend(lambda out, lse, call: out.masked_fill((call.lens == 0)[:, None, None], NAN)), {},
     broken("NaN is written")),
    # It clears the rows behind as many as are live, which is right where empty requests come last.
    ("E", attend(lambda out, lse, call: out * (torch.arange(4) < (call.lens > 0).sum())[:, None, None]), {},
     broken("seq_lens [20, 0, 6, 0]: row 2 is off by 1.34; with empty requests last it is right")),
    # 0 times what the memory held, and that without NaN.
    *(("E", attend(lambda out, lse, call, of=of: out + torch.where(
        (call.lens == 0)[:, None, None], of(torch.empty_like(out)), 0.0)), {},
       broken("depends on what the memory held"))
      for of in (lambda memory: 0 * memory, lambda memory: memory.nan_to_num(0.0),
                 lambda memory: memory.fmin(torch.zeros(())))),
    ("E", attend(lambda out, lse, call: torch.where(
        (call.lens == 0)[:, None, None], torch.empty_like(out), out)), {},
     broken("not written: it keeps what the memory held")),
    # A maximum drops NaN, and what is not the largest. With empty requests it is their scratch.
    ("0", attend(lambda out, lse, call: out * (largest_of(len(out) - 1) < 1e4)), {},
     broken("row 0 is off by 0.889: depends on what the memory held, here 1e+30")),
    ("E", attend(lambda out, lse, call: out * (largest_of(int((call.lens > 0).sum()), len(out)) < 1e4)), {},
     broken("row 0 is off by 0.871; it depends on what the memory held, here 1e+30")),
    # Where no request is live.
    ("E", attend(lambda out, lse, call: out + ~call.lens.any()), {},
     broken("1, expected 0")),
    *(("T", plus(of), {}, broken(f"NaN in {place} gives NaN"))
      for of, place in (
          (lambda call: tail(call.k, call), "K " + TAIL),
          (lambda call: tail(call.v, call), "V " + TAIL),
          (lambda call: next_token(call.k, call), "K " + TAIL),
          (lambda call: call.k[0].sum(), "the null page"),
          (lambda call: call.v[0].sum(), "the null page"),
          (lambda call: call.k[-1].sum(), "pages past the end"),
          (lambda call: call.v[-1].sum(), "pages past the end"),
          (lambda call: call.v._base[1].sum(), "pages past the end"),
      )),
    ("T", partial(latent, change=lambda call: 0 * tail(call.k, call)[:, None, None]), {"layout": "mla"},
     broken("NaN in the last page's tail gives NaN")),
    *(("B", entry(page), {},
       broken(f"follows the entry {page} past the last page"))
      for page in (-1, 6, 2**24)),
    ("B", attend(lambda out, lse, call: (out, lse + 0 * made._past_the_need(call.k, call.table, call.lens))),
     {}, broken("follows the entry -1 past the last page into lse")),
    *(("R", plus(of), {}, broken(f"{fill} in another row changes row {row}"))
      for of, fill, row in (
          (lambda call: call.q[[1, 1, 2, 3]].sum((1, 2)), "nan", 0),
          (lambda call: call.q[[0, 1, 0, 3]].sum((1, 2)), "nan", 2),
          (lambda call: call.q[[0, 1, 2, 1]].sum((1, 2)), "nan", 3),
          (lambda call: call.k[call.table[:, 0].long(), 0].sum(), "nan", 0),
          (lambda call: call.v[call.table[:, 0].long(), 0].sum(), "nan", 0),
          (other_rows_largest, "largest", 0),
          (loud, "noise", 0),
      )),
    ("R", attend(lambda out, lse, call: (out.nan_to_num(), lse)), {},
     broken("the NaN of request 2 is hidden, its own row holds numbers")),
    ("R", attend(lambda out, lse, call: (out, lse + 0 * call.q.mean())), {},
     broken("nan in another row changes row 0 of lse")),
    *(("N", kept_mask(key), {}, broken(AFTER + NOT_ZERO)) for key in ("seq_lens", "out")),
    ("N", attend(kept_lse), {}, broken(AFTER + "lse of an empty request is 7")),
    *(("N", instead(kernel, **{name: at_first(name)}), sizes,
       broken(f"{AFTER}row 0 is off by {off}"))
      for kernel, name, sizes, off in (
          (made.decode, "q", {}, 0.763), (made.decode, "block_table", {}, 1.15),
          (made.decode, "k_cache", {}, 0.817), (made.decode, "v_cache", {}, 1.61),
          (several_of, "query_start_loc", {"q_len": 0}, 0.0259),
      )),
    # Not right with a new tensor either, which E says.
    ("N", attend(lambda out, lse, call: (out.masked_fill((call.lens == 0)[:, None, None], 7.0), lse)), {},
     holding(AGAIN)),
    ("N", launch_with_lengths, {"prepared": True}, broken(AFTER + NOT_ZERO)),
    ("N", launch_with_lengths, {"planned": True}, holding(AGAIN)),
    ("N", instead(launch_with_its_table, block_table=at_first("block_table")), {"planned": True},
     broken(f"{AFTER}row 0 is off by 1.15")),
    ("U", right, {"q_len": 2}, unasked("takes one row a request, not cu_seqlens")),
    ("U", varlen(spare(0.0)), {"q_len": 0}, holding()),
    ("U", varlen(lambda rows, live, q: rows.nan_to_num(0.0)), {"q_len": 0},
     broken("rows past the end hold what the memory held")),
    *(("U", varlen(lambda rows, live, q, of=of: spare(0.0)(rows + 0 * of(q[live:]), live, q)), {"q_len": 0},
       broken(f"{fill} in q past the end changes a live row"))
      for of, fill in (
          (lambda more: more.sum(), "nan"),
          (lambda more: more.nan_to_num(0.0, INF, -INF).sum(), "inf"),
          (lambda more: more.nan_to_num(0.0, 0.0, 0.0).mul(2).sum(), "largest"),
      )),
    ("Q", right, {}, unasked("takes one query token a request")),
    ("Q", several(), {"q_len": 2}, holding()),
    ("Q", several_of, {"q_len": 0}, holding()),
    ("Q", instead(several_of, query_start_loc=evenly), {"q_len": 0},
     broken("row 0 is off by 0.229")),
    ("Q", several(lambda out, lens, call: out + (lens == 0)[:, None, None, None]), {"q_len": 2},
     broken(f"E with 2 query tokens: row 2, {EMPTY}")),
    ("Q", several(lambda out, lens, call: out + 0 * tail(call.v, call)[:, None, None, None]), {"q_len": 2},
     broken(f"T with 2 query tokens: NaN in V {TAIL} gives NaN")),
    # What one query token shows as well is E's.
    ("Q", several(lambda out, lens, call: out + (lens == 0)[:, None, None, None], alone=True), {"q_len": 2},
     holding()),
    *((clause, attend(lambda out, lse, call: out), {}, holding(note)) for clause, note in (
        ("0", ""), ("T", ""), ("B", ""), ("R", ""), ("N", AGAIN), ("L", ""), ("A", AGAIN), ("O", ""),
    )),
    *(("L", plus(last_of_its_shape(name)), {}, broken("a launch full of NaN changes the next one"))
      for name in "qkv"),
    ("A", instead(made.decode, q=at_first("q", shape_of)), {},
     broken("new tensors of the same shape: row 0 is off by 0.763")),
    ("A", one_memory(attend(lambda out, lse, call: out)), {},
     broken("the next call overwrites the result of this one")),
    ("A", launch_with_the_latest_lengths, {"prepared": True},
     broken("a launch recorded before a larger call gives other bits after it")),
    ("O", reads_behind("v"), {}, broken("0xff behind v_cache changes the result")),
]  # fmt: skip


@pytest.mark.parametrize(("clause", "kernel", "sizes", "answer"), ATTENTION)
def test_a_probe_of_attention_says_what_is_wrong(clause, kernel, sizes, answer):
    found = said("attention", clause, kernel, sizes)
    assert agree(found, answer), found


# --- The other kinds


def route(change=lambda weights, ids, logits: (weights, ids), of=torch.sigmoid):
    """The best experts with their scores, and what ``change`` makes of both."""

    def kernel(router_logits, top_k):
        ids = router_logits.nan_to_num(-1e30, 1e30, -1e30).topk(top_k, -1).indices
        return change(of(router_logits).gather(1, ids), ids, router_logits)

    return kernel


def grouped(best, of=torch.sigmoid):
    """The experts of the 2 of 4 groups with the largest ``best``."""

    def kernel(router_logits, top_k):
        scores = of(router_logits)
        groups = scores.unflatten(1, (4, -1))
        kept = torch.zeros(len(scores), 4).scatter(1, best(groups).topk(2, -1).indices, 1.0).bool()
        ids = groups.masked_fill(~kept[..., None], -1.0).flatten(1).topk(top_k, -1).indices
        return scores.gather(1, ids), ids

    return kernel


def stuck(where, row):
    """A row takes one expert again and again, where its logits are odd in this way."""

    def change(weights, ids, logits):
        hit = where(logits) & (torch.arange(len(logits)) == row)
        return weights, ids.masked_fill(hit[:, None], 0)

    return route(change)


def masked(change):
    """Routing under a mask of padding; ``change`` gets weights, ids and the mask, and edits them."""

    def kernel(router_logits, top_k, is_padding=None):
        weights, ids = route()(router_logits, top_k)
        if is_padding is not None:
            ids[is_padding], weights[is_padding] = -1, 0.0
            change(weights, ids, is_padding)
        return weights, ids

    return kernel


def first_mask(value):
    """Leaves weights where only the last mask has padding, or takes them where only the first had."""
    kept = []

    def change(weights, ids, mask):
        kept.append(mask.clone())
        weights[mask & ~kept[0] if value else kept[0]] = value

    return change


def with_bias(where):
    def kernel(router_logits, top_k, bias):
        weights, ids = route()(router_logits, top_k)
        return weights, ids.masked_fill(torch.tensor(bool(where(bias))), 0)

    return kernel


def fp8(x, *, dtype=torch.float8_e4m3fn, groups=1, stretch=1.0, largest=448.0):
    """Values and a scale for each group of columns of a row."""
    parts = x.double().unflatten(1, (groups, -1))
    scale = parts.abs().amax(-1, keepdim=True) / largest * stretch
    numbers = parts / scale
    values = numbers.round() if dtype == torch.int8 else numbers
    return values.flatten(1).to(dtype), scale.squeeze(-1).float()


def e8m0(x):
    """A scale that is the next power of two, as an exponent."""
    exponent = (x.abs().amax(1, keepdim=True).clamp(min=1e-9) / 448).log2().ceil()
    return (x / exponent.exp2()).to(torch.float8_e4m3fn), (exponent + 127).to(torch.uint8)


_calls = []


def not_twice(x):
    _calls.append(x)
    return one_off(x, -1, by=len(_calls))


double = made.double


def from_row(row: int, to: int):
    """A row reads another."""

    def kernel(x):
        out = 2 * x
        out[to] += 0 * x[row]
        return out

    return kernel


def _scaled(device):
    return {"x": torch.arange(1.0, 13.0).view(3, 4), "scale": torch.tensor([2.0])}


def scaled(x, scale):
    return scale * x, x.sum(1)


SCALED = {"make": _scaled, "reference": lambda x, scale: (2 * x, x.sum(1))}
SIX = "(6, 4)"


def by_row(change):
    """Doubles, and changes what comes where this is true of x."""
    return lambda x: 2 * x + change(x)


def biased(router_logits, top_k, bias, *, by=1.0, weigh=0.0):
    """Chosen by the scores and ``by`` of the bias; the weights have ``weigh`` of it."""
    scores = router_logits.sigmoid()
    ids = (scores + by * bias).topk(top_k, -1).indices
    return (scores + weigh * bias).gather(1, ids), ids


LOGITS = {
    "all NaN": lambda x: x.isnan().all(1),
    "one NaN": lambda x: (x.isnan().sum(1) == 1) & x[:, 5].isnan(),
    "a NaN in the first column": lambda x: (x.isnan().sum(1) == 1) & x[:, 0].isnan(),
    "half NaN": lambda x: x[:, ::2].isnan().all(1) & ~x[:, 1::2].isnan().any(1),
    "all -inf": lambda x: (x == -INF).all(1),
    "all +inf": lambda x: (x == INF).all(1),
    "one +inf": lambda x: (x == INF).sum(1) == 1,
    "half -inf": lambda x: (x[:, ::2] == -INF).all(1) & x[:, 1::2].isfinite().all(1),
    "all equal": lambda x: (x == x[:, :1]).all(1) & x.isfinite().all(1),
}
BIASES = {
    "all of the bias NaN": lambda bias: bias.isnan().all(),
    "one NaN in the bias": lambda bias: bias.isnan().sum() == 1,
}
UNCHECKED = "not checked, no reference"
OTHERS = [
    ("routing", "0", route(lambda weights, ids, _: (ids.int(), weights)), {}, holding()),
    ("routing", "0", route(of=partial(torch.softmax, dim=-1)), {}, holding()),
    ("routing", "0", route(lambda w, ids, _: (w[:, :2], ids)), {},
     broken(f"shapes (6, 2), {SIX}, expected {SIX}")),
    *(("routing", "0", route(lambda w, ids, _, id=id: (w, ids.index_fill(1, torch.tensor(3), id))), {},
       broken(f"id {id} of 16 experts")) for id in (-1, 16)),
    ("routing", "0", route(lambda w, ids, _: (w / 0, ids)), {}, broken("a weight is not finite")),
    ("routing", "0", grouped(lambda groups: groups.amax(-1)), {"grouped": True}, holding()),
    *(("routing", "0", grouped(lambda groups: groups.topk(2, -1).values.sum(-1), of), {"grouped": True},
       holding()) for of in (torch.sigmoid, partial(torch.softmax, dim=-1))),
    ("routing", "0", grouped(lambda groups: groups.sum(-1)), {"grouped": True},
     broken("not the experts with the best groups")),
    ("routing", "0", route(lambda w, ids, _: (w.flip(1), ids)), {},
     broken("the weights are not those of the ids beside them")),
    ("routing", "0", route(lambda w, ids, _: (w - w.amin(), ids)), {},
     broken("a weight is 0 for finite logits")),
    ("routing", "0", route(lambda w, ids, _: (w + 0.5, ids)), {"reference": route()},
     broken("weights of row 0 is off by 0.5")),
    ("routing", "0", route(lambda w, ids, x: (w, ids, x.zero_())[:2]), {},
     broken("writes to router_logits")),
    ("routing", "0", biased, {}, holding()),
    ("routing", "0", lambda router_logits, top_k, bias: route()(router_logits + bias, top_k), {}, holding()),
    *(("routing", "0", kernel, {}, broken("an expert with a bias of 10 is not chosen"))
      for kernel in (
          partial(biased, by=0.0),
          lambda router_logits, top_k, bias: biased(
              router_logits, top_k, bias, by=torch.eye(len(router_logits), 1)),
      )),
    ("routing", "0", partial(biased, weigh=1.0), {},
     unasked(f"{UNCHECKED} for weights: with a bias they are of no known form")),
    *(("routing", "I", stuck(where, row), {},
       broken(f"{name}: row {row} has [0, 0, 0, 0]"))
      for row, (name, where) in zip((1, 4) * 5, LOGITS.items(), strict=False)),
    *(("routing", "I", route(lambda w, ids, x, of=of: of(w, ids, bool(x.isnan().any()))), {},
       broken("; ".join(f"{name}: a finite row changes" for name in list(LOGITS)[:3])))
      for of in (lambda w, ids, odd: (w + odd, ids), lambda w, ids, odd: (w, ids.flip(1) if odd else ids))),
    ("routing", "Ib", route(), {}, unasked("takes no bias")),
    *(("routing", "Ib", with_bias(where), {}, broken(f"{name}: row 0 has [0, 0, 0, 0]"))
      for name, where in BIASES.items()),
    ("routing", "P", route(), {}, unasked("takes no padding mask")),
    ("routing", "P", masked(nothing), {"padding_id": 16},
     broken("a padding row has the ids [-1, -1, -1, -1]")),
    ("routing", "P", masked(lambda w, ids, mask: ids.index_put_((mask,), torch.tensor([-1, -1, -1, 7]))), {},
     broken("a padding row has the ids [-1, -1, -1, 7]")),
    *(("routing", "P", masked(first_mask(value)), {}, broken(f"{said}"))
      for value, said in ((0.5, "a padding row has a weight"), (0.0, "the mask changes another row"))),
    *(("routing", "P", masked(lambda *results, at=at: results[at][2].copy_(results[at][2].flip(0))), {},
       broken("the mask changes another row")) for at in (0, 1)),
    *(("routing", clause, lambda router_logits, top_k, bias, is_padding: biased(router_logits, top_k, bias),
       {}, holding()) for clause in "0O"),
    *(("routing", "R", route(change), {}, broken(f"{fill} in other rows changes a live row"))
      for fill, change in (
          ("nan", lambda w, ids, x: (w, ids.flip(1) if x[3:].isnan().any() else ids)),
          ("inf", lambda w, ids, x: (w + (x == INF).any(), ids)),
          ("largest", lambda w, ids, x: (w + ((x > 1e30) & (x < INF)).any(), ids)),
          ("noise", lambda w, ids, x: (w + ((x > 50) & (x < 1e30)).any(), ids)),
      )),
    ("rows", "0", double, {}, unasked(UNCHECKED)),
    *(("rows", "0", kernel, {"reference": lambda x: 2 * x}, broken(said)) for kernel, said in (
        (by_row(lambda x: len(x) == 1), "result 0: row 0 is off by 1"),
        (by_row(lambda x: (torch.arange(len(x)) > 35)[:, None]), "result 0: row 36 is off by 1"),
        (by_row(lambda x: 0 / x.amax(1, keepdim=True)), "result 0: row 5 is off by nan, which is zeros"),
        (stale(double), "result 0: row 0 is off by 10.3"),
        (one_memory(double), "overwrites what an earlier call returned"),
        (by_row(lambda x: 0.01 * x), "not the reference: result 0: row 0 is off by 0.0341"),
    )),
    ("rows", "0", lambda x: fp8(x, groups=2, stretch=torch.tensor([[1.0], [3.0]])), {},
     broken("not the reference: of a range of 448 row 4 uses 144: its scale is too large")),
    ("rows", "R", lambda x: 2 * x.nan_to_num(), {"reference": double},
     broken("the NaN of a row is hidden: its own result holds numbers")),
    ("rows", "0", lambda x: None, {}, broken("returns no tensor")),
    ("rows", "0", lambda x: x.mul_(2), {"reference": double}, broken("writes to its input")),
    ("rows", "0", lambda x: (x, x / 0), {}, broken("not finite on clean input")),
    ("rows", "0", lambda x: (x, not_twice(x)), {}, broken("other bits the second time")),
    ("rows", "0", lambda x: (2 * x, x.sum(-1)), {"reference": lambda x: (2 * x, x.sum(-1) + 1)},
     broken("not the reference: result 1: row 0 is off by 1")),
    ("rows", "0", lambda x: (2 * x, x.sum(-1)), {"reference": double},
     unasked(f"{UNCHECKED} for 1 of 2 results")),
    ("rows", "0", double, {"reference": lambda x: 2 * x[:, :8]},
     broken("not the reference: result 0 has shape (6, 64), the reference (6, 8)")),
    # It is asked with no fewer rows.
    ("rows", "0", from_row(5, 4), {"reference": double, "live_rows": 4},
     holding("not asked with one row: live_rows=4")),
    ("rows", "0", lambda x: 2 * x + (len(x) > 6), {"reference": double, "live_rows": 4},
     broken("result 0: row 0 is off by 1")),
    # What its rows of padding hold is not compared, also where it is another thing each time.
    *(("rows", clause, lambda x, of=of: torch.cat([2 * x[:4], torch.rand(len(x) - 4, 64) / of]),
       {"reference": double, "live_rows": 4}, holding()) for clause in "0RO" for of in (1, 0)),
    # A reference that is not finite says nothing.
    ("operands", "0", lambda x, scale: (17 * x, x.sum(1)),
     SCALED | {"reference": lambda x, scale: (NAN * x, x.sum(1))},
     unasked(f"{UNCHECKED} where it has none: nan in row 0 of result 0")),
    # Of a row of zeros it may be.
    ("rows", "0", lambda x: x.sign(), {"reference": lambda x: x / x.abs()}, holding()),
    *(("rows", "0", lambda x: torch.cat([2 * x[:4], 2 * x[4:] + 1]), {"reference": double, "live_rows": live},
       answer) for live, answer in (
           (4, holding()), (5, broken("not the reference: result 0: row 4 is off by 1")),
       )),
    *(("rows", "0", partial(fp8, **given), {}, holding())
      for given in ({"groups": 4}, {"dtype": torch.float8_e5m2, "largest": 57344.0},
                    {"dtype": torch.int8, "largest": 127.0}, {"stretch": 1.9})),
    ("rows", "0", e8m0, {}, holding()),
    ("rows", "0", lambda x: fp8(x)[0], {}, unasked(UNCHECKED)),
    *(("rows", "0", partial(fp8, dtype=dtype, largest=largest, stretch=3.0), {}, broken(
        f"not the reference: of a range of {largest:.0f} row 3 uses {used}: its scale is too large"))
      for dtype, largest, used in ((torch.float8_e5m2, 57344.0, "2.05e+04"), (torch.int8, 127.0, "42"))),
    ("rows", "0", double, {"inverse": lambda x: 0.6 * x},
     broken("not the reference: dequantised, row 0 is off by 0.682")),
    ("rows", "0", lambda x: (fp8(x)[0], 1.02 * fp8(x)[1]), {},
     broken("not the reference: values times scales: row 0 is off by 0.0209")),
    *(("rows", "R", from_row(row, to), {}, broken("nan, inf in other rows: changes a live row"))
      for row, to in ((4, 0), (0, 1))),
    ("rows", "R", from_row(3, 2), {"live_rows": 3}, broken("nan, inf in other rows: changes a live row")),
    ("rows", "R", lambda x: (2 * x, x.sum(-1) + 0 * x.mean()), {}, broken(
        "nan, inf, largest in other rows: changes the scale of a live row")),
    ("rows", "R", lambda x: (2 * x, x.abs().max()), {}, broken(
        "nan, inf, largest, noise in other rows: changes the scale of all rows")),
    ("rows", "R", lambda x: x[: 5 if x.isnan().any() else 6], {},
     broken("nan in other rows: changes the shape of a result")),
    ("rows", "W", lambda x: (2 * x, torch.empty(3), x), {},
     broken("3 of 3 elements of result 1 depend on what the memory held")),
    # Rounded up to pairs of rows.
    ("rows", "W", lambda x: torch.cat([x, x.new_empty(len(x) % 2, 64)]), {},
     broken("64 of 384 elements of result 0 depend on what the memory held")),
    # What lies inside the range of the data, is dropped, or is clamped.
    *(("rows", "W", kernel, {}, broken("320 of 320 elements of result 0 depend on what the memory held"))
      for kernel in (
          lambda x: x - largest_of(2).clamp(min=9.0), lambda x: x * least_of_two(),
          lambda x: torch.empty_like(x).nan_to_num(1.0).clamp(0.0, 1.0),
      )),
    ("rows", "W", lambda x: (torch.empty(2, dtype=torch.bool), x), {},
     broken("2 of 2 elements of result 0 depend on what the memory held")),
    *(("rows", "W", lambda x, n=n: torch.cat([x[:n], torch.empty_like(x[n:])]), {"live_rows": n},
       broken("elements of result 0 depend on what the memory held")) for n in (4, 5)),
    ("rows", "W", lambda x: x + torch.rand(1), {},
     unasked("result 0 has other bits the second time, over the same memory")),
    ("routing", "0", route(lambda w, ids, _: (w * least_of_two(), ids)), {},
     broken("result 0 depends on what the memory held, here -1e+30")),
    ("operands", "0", lambda x, scale: (2 * x * least_of_two(), x.sum(1)), SCALED,
     broken("result 0 depends on what the memory held, here -1e+30")),
    ("operands", "0", scaled, SCALED | {"reference": None}, unasked(UNCHECKED)),
    ("operands", "0", lambda x, scale: (scaled(x, scale)[0], x.sum(1) * NAN), SCALED,
     broken("not the reference: result 1: row 0 is off by nan")),
    *(("operands", "0", kernel, SCALED, answer) for kernel, answer in (
        (lambda x, scale: scale * x, broken("not the reference: 1 results in place of 2")),
        (lambda x, scale: (*scaled(x, scale), x.zero_())[:2], broken("writes to x")),
    )),
    ("operands", "0", lambda x: (x, not_twice(x)), SCALED, broken("other bits the second time")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "clause", "kernel", "sizes", "answer"), OTHERS)
def test_a_probe_says_what_is_wrong(kind, clause, kernel, sizes, answer):
    found = said(kind, clause, kernel, sizes)
    assert agree(found, answer), found


@pytest.mark.parametrize(
    ("fill", "wanted"),
    [
        (NAN, [NAN, 0x7F, 0x7F, 0x7F7F, 0x7F7F, NAN]),
        (3.0, [3.0, 1, 1, 1, 1, 3.0]),
        (1e30, [torch.tensor(1e30).item(), 0x7B, 0x7B, 0x7B7B, 0x7B7B, 65504.0]),
        (-1e30, [torch.tensor(-1e30).item(), 0xFB, 0xFB, -0x7B7B, -0x7B7B, -65504.0]),
    ],
)
def test_new_memory_of_each_kind_holds_what_was_there(fill, wanted):
    kinds = torch.float32, torch.uint8, torch.float8_e4m3fn, torch.int32, torch.int64, torch.float16
    one = torch.zeros(2)
    makes = (
        lambda dtype: torch.empty(2, dtype=dtype),
        lambda dtype: torch.empty_like(one, dtype=dtype),
        lambda dtype: torch.empty_strided((2,), (1,), dtype=dtype),
        lambda dtype: one.new_empty(2, dtype=dtype),
    )
    with scenes.dirty_memory(fill):
        found = [[make(dtype) for dtype in kinds] for make in makes]
    for row in found:
        held = [x.view(torch.uint8) if x.element_size() == 1 else x for x in row]
        assert str([x[1].item() for x in held]) == str(wanted)
        assert all((x[:1] == x[1:]).all() or x.isnan().all() for x in held)


def test_a_row_is_off_by_its_element_that_is_over_its_own_budget():
    found, wanted = torch.tensor([[1.0, 1.0], [10.0, 0.0]]), torch.tensor([[1.0, 1.0], [9.0, 0.5]])
    assert row_probes._first_off(found, wanted, wanted.abs() / 4) == "row 1 is off by 0.5"
